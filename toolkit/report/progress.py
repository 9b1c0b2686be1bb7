"""How far a training is: one progress bar on a terminal, plain lines elsewhere, and only on rank 0."""

import sys
import time
from types import TracebackType
from typing import Any, Self

from toolkit.report import console


class Progress:
    """Shows loss, learning rate, throughput and time left.

    Args:
        total_steps: optimizer steps of the run.
        logging_steps: steps between lines where stderr is not a terminal; the last step always has one.
        unit: what throughput counts, `samples` or `tokens`.
    """

    def __init__(self, total_steps: int, logging_steps: int, unit: str = "samples") -> None:
        self.total_steps = total_steps
        self.logging_steps = max(1, logging_steps)
        self.unit = unit
        self._bar: Any = None
        self._first: tuple[int, float] | None = None  # step and time of the first update

    def __enter__(self) -> Self:
        if console.is_speaker() and sys.stderr.isatty():
            self._bar = _bar()
            self._bar.start()
            self._task = self._bar.add_task("training", total=self.total_steps, facts="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def update(self, step: int, loss: float, lr: float, grad_norm: float, per_second: float) -> None:
        """Report that `step` (from 1) is done; `per_second` counts samples or tokens."""
        if not console.is_speaker():
            return
        facts = f"loss {loss:.4g}  lr {lr:.2g}  grad norm {grad_norm:.2g}  {per_second:,.0f} {self.unit}/s"
        left = self._left(step)
        if self._bar is not None:
            self._bar.update(self._task, completed=step, facts=f"{facts}  {left}")
        elif step % self.logging_steps == 0 or step == self.total_steps:
            console.say(f"step {step}/{self.total_steps}  {facts}  {left}")

    def say(self, text: str) -> None:
        """Print a line, above the bar where there is one."""
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            console.say(text)

    def _left(self, step: int) -> str:
        """The time left at the mean pace since the first update; the first step is slower than the rest."""
        now = time.monotonic()
        if self._first is None or step <= self._first[0]:
            self._first = (step, now)
            return ""
        first, start = self._first
        return f"{duration((now - start) / (step - first) * (self.total_steps - step))} left"


def duration(seconds: float) -> str:
    """Seconds as `m:ss`, or `h:mm:ss` from an hour on."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"


def _bar() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[facts]}", markup=False),
    )
    return Bar(*columns, console=Console(stderr=True))
