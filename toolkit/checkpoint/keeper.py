"""When to save, which checkpoint is the best, and when to stop early: decided alike on every rank."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.arguments import Arguments
from toolkit.checkpoint.folder import rotate
from toolkit.data.plan import Schedule
from toolkit.errors import UserError, nearest

LOSS = "loss"


@dataclass
class Best:
    """The best evaluation so far, and how many have come since."""

    value: float | None = None
    step: int | None = None
    since: int = 0


class Keeper:
    """What is kept of a run, from its flags and its evaluations.

    The figures of an evaluation are the same on every rank, so every rank comes to the same decisions.

    Args:
        metrics: names of the figures that an evaluation gives; none where nothing is evaluated.

    Raises:
        UserError: flags that need an evaluation without one, or a metric that there is not.
    """

    def __init__(self, args: Arguments, schedule: Schedule, folder: Path, metrics: list[str]) -> None:
        self.args, self.schedule, self.folder = args, schedule, folder
        self.best = Best()
        self.metric = (args.metric_for_best_model or LOSS).removeprefix("eval_")
        self.greater = args.greater_is_better if args.greater_is_better is not None else not self.metric.endswith(LOSS)
        asked = [
            flag
            for flag, value in {
                "--load_best_model_at_end": args.load_best_model_at_end,
                "--early_stopping_patience": args.early_stopping_patience,
                "--metric_for_best_model": args.metric_for_best_model,
            }.items()
            if value
        ]
        if asked and not metrics:
            raise UserError(f"{' and '.join(asked)}: there is no labelled validation data to tell the best by.")
        if asked and self.metric not in metrics:
            raise UserError(
                f"--metric_for_best_model {self.metric}: an evaluation has {', '.join(metrics)}."
                f"{nearest(self.metric, metrics)}"
            )
        self._due = save_steps(args, schedule)

    def due(self, step: int, ends_epoch: bool) -> bool:
        """Whether to save after this step; the last one's model is written anyway."""
        wanted = self._due(step, ends_epoch) and step < self.schedule.total_steps
        return wanted or (self.args.load_best_model_at_end and self.best.step == step)

    def evaluated(self, step: int, figures: Mapping[str, Any]) -> None:
        """Take note of an evaluation."""
        value = figures.get(self.metric)
        if value is None:
            return
        if self._better(float(value)):
            self.best = Best(float(value), step)
        else:
            self.best.since += 1

    @property
    def compares(self) -> bool:
        """Whether evaluations decide anything, so that the last one counts too."""
        return self.args.load_best_model_at_end or self.args.early_stopping_patience is not None

    @property
    def enough(self) -> bool:
        """Whether early stopping ends the run here."""
        patience = self.args.early_stopping_patience
        return patience is not None and self.best.since >= patience

    def best_checkpoint(self) -> Path | None:
        """Where the best evaluation's weights are, if it was saved."""
        path = self.folder / f"checkpoint-{self.best.step}"
        return path if self.best.step is not None and path.is_dir() else None

    def rotate(self) -> None:
        """Delete what is beyond `--save_total_limit`; never the best, the newest, or what is not ours."""
        best = self.best_checkpoint() if self.args.load_best_model_at_end else None
        rotate(self.folder, self.args.save_total_limit, [best] if best else [])

    def state(self) -> dict[str, Any]:
        return asdict(self.best)

    def load(self, state: Mapping[str, Any]) -> None:
        self.best = Best(**state)

    def _better(self, value: float) -> bool:
        if not math.isfinite(value):
            return False
        if self.best.value is None:
            return True
        return value > self.best.value if self.greater else value < self.best.value


def save_steps(args: Arguments, schedule: Schedule) -> Callable[[int, bool], bool]:
    """Whether to save after a step, given its number and whether it ends an epoch."""
    if args.save_strategy == "no":
        return lambda step, ends_epoch: False
    if args.save_strategy == "epoch":
        return lambda step, ends_epoch: ends_epoch
    share = args.save_steps if args.save_steps < 1 else 0
    every = max(1, math.ceil(share * schedule.total_steps)) if share else int(args.save_steps)
    return lambda step, ends_epoch: step % every == 0
