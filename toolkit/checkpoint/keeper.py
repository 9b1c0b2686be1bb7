"""When to save, which checkpoint is the best, and when to stop early: decided alike on every rank."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolkit.arguments import Arguments
from toolkit.checkpoint.folder import rotate
from toolkit.data.plan import Schedule
from toolkit.report.console import say, warn
from toolkit.settings import best_flags, best_metric

# Figures that are better smaller, by how their names end; `dev_loss` is a loss.
SMALLER = ("loss", "perplexity", "bits_per_byte", "bits_per_character", "mse", "mae", "error")


@dataclass
class Best:
    """The best evaluation so far, and how many have come since."""

    metric: str
    value: float | None = None
    step: int | None = None
    since: int = 0


class Keeper:
    """What is kept of a run, from its flags and its evaluations.

    Every rank must be told the same figures, and so comes to the same decisions. Of equal figures the first is the
    best.
    """

    def __init__(self, args: Arguments, schedule: Schedule, folder: Path) -> None:
        self.args, self.schedule = args, schedule
        self.folders = [folder]  # where the best one may be
        self.metric = best_metric(args)
        self.greater = args.greater_is_better
        if self.greater is None:
            self.greater = not self.metric.endswith(SMALLER)
        self.best = Best(self.metric)
        self._due = save_steps(args, schedule)
        if best_flags(args):
            say(f"the best evaluation is the one with the {'greatest' if self.greater else 'smallest'} {self.metric}")

    def due(self, step: int, ends_epoch: bool) -> bool:
        """Whether to save after this step; the last one's model is written anyway."""
        best = self.args.load_best_model_at_end and self.best.step == step
        return (self._due(step, ends_epoch) or best) and step < self.schedule.total_steps

    def evaluated(self, step: int, figures: Mapping[str, Any]) -> None:
        """Take note of an evaluation."""
        value = figures.get(self.metric)
        if value is None:
            return
        if self._better(float(value)):
            self.best = Best(self.metric, float(value), step)
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
        """Where the best evaluation's weights are, if they were saved."""
        paths = [folder / f"checkpoint-{self.best.step}" for folder in self.folders]
        return next((path for path in paths if path.is_dir()), None)

    def rotation(self) -> Callable[[], None]:
        """What deletes checkpoints beyond `--save_total_limit`, as things stand now; never the best or the newest."""
        folder, best = self.folders[0], self.best_checkpoint()
        keep = [best or folder / f"checkpoint-{self.best.step}"]
        return lambda: rotate(folder, self.args.save_total_limit, keep)

    def state(self) -> dict[str, Any]:
        return asdict(self.best)

    def load(self, state: Mapping[str, Any], folder: Path) -> None:
        """Take over the state of a checkpoint that was found in `folder`."""
        best = Best(**state)
        if folder.resolve() != self.folders[0].resolve():
            self.folders.append(folder)
        if best.metric != self.metric:
            if self.compares:
                say(f"the best evaluation so far was told by {best.metric}: by {self.metric} it begins anew from here")
            return
        self.best = best
        if self.args.load_best_model_at_end and best.step is not None and not self.best_checkpoint():
            warn(
                f"the best evaluation so far was at step {best.step}, of which there is no checkpoint in "
                f"{' or '.join(map(str, self.folders))}: the best of the evaluations from here on will be taken."
            )
            self.best = Best(self.metric)

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
