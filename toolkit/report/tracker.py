"""An experiment tracker beside the run's own files."""

import importlib.util
import time
from pathlib import Path
from typing import Any

from toolkit.errors import UserError


class Tracker:
    """Hands settings and figures to a tracker. Make one on rank 0 only, so that a job is one run there.

    Args:
        kind: a value of --report_to other than none.
        project: the name under which the tracker files the run (TensorBoard has no projects).
        folder: the run's own; TensorBoard writes to tensorboard/<time> in it.

    Raises:
        UserError: the tracker cannot be started.
    """

    def __init__(self, kind: str, project: str, folder: Path, settings: dict[str, Any]) -> None:
        from accelerate.tracking import LOGGER_TYPE_TO_CLASS

        try:
            if kind == "tensorboard":
                self._tracker = LOGGER_TYPE_TO_CLASS[kind](time.strftime("%Y%m%d-%H%M%S"), folder / "tensorboard")
            else:
                self._tracker = LOGGER_TYPE_TO_CLASS[kind](project)
            self._tracker.start()
            self._tracker.store_init_configuration(settings)
        except Exception as error:  # login, network, a version that accelerate does not know
            reason = " ".join(str(error).split()) or type(error).__name__
            raise UserError(
                f"--report_to {kind}: the tracker cannot be started: {reason}. Leave the flag out to do without it."
            ) from error

    def log(self, figures: dict[str, float], step: int) -> None:
        """Figures of a step."""
        self._tracker.log(figures, step=step)

    def close(self) -> None:
        """Write out what is not yet written."""
        self._tracker.finish()


def missing_tracker(kind: str) -> list[str]:
    """What to install, where --report_to names a tracker that is not there."""
    if kind == "none" or importlib.util.find_spec(kind):
        return []
    return [f"--report_to {kind}: the package {kind} is not installed: `pip install {kind}`, or leave the flag out."]
