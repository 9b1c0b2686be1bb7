"""One optimizer step: the same on every machine.

The loss of a step is the sum of the weighted losses of its global batch over the sum of the weights. The
strategy runs this rank's micro-batches; what is here decides on the weight, on failures and on the
learning rate.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from torch import Tensor

from toolkit.checkpoint.notice import Notice
from toolkit.data.feed import Feed, Work
from toolkit.errors import UserError
from toolkit.launch.environment import restart_command
from toolkit.phases import phase
from toolkit.report.console import say, warn
from toolkit.strategy.base import Seed, Strategy, Update
from toolkit.strategy.memory import out_of_memory


@dataclass
class Stepper:
    """Takes steps, and keeps count of those that were skipped.

    Args:
        learning_rate: of a step number from 1; nothing else moves it.
        skip_nonfinite: steps whose loss or gradient may be non-finite before the run stops.
        notice: of a stop.
    """

    strategy: Strategy
    feed: Feed
    learning_rate: Callable[[int], float]
    seed: int
    skip_nonfinite: int
    notice: Notice = field(default_factory=Notice)
    skipped: int = 0
    stop: bool = False  # any rank was asked to stop before the last step
    failed: bool = False  # any rank's work in the background had failed before the last step

    def take(self, work: Work, failed: bool = False) -> tuple[Update, Work]:
        """Run one step and update the weights once; also the work as it was done, its tokens those of all ranks.

        Args:
            failed: of this rank; afterwards the attributes `stop` and `failed` say it of all ranks together, after
                the same step, since they ride on an exchange that each step needs anyway.

        Raises:
            UserError: the step has no target at all; loss or gradient is not finite; memory ran out and the
                step cannot be repeated in smaller pieces.
        """
        number, started = work.step.number, time.monotonic()
        own = [sum(batch.weight for batch in work.batches), self.notice.come, failed, work.tokens, work.padded]
        weight, stops, failures, tokens, padded = self.strategy.total(own, self.notice.patience)
        self.stop, self.failed = stops > 0, failures > 0
        if weight <= 0:
            raise UserError(f"step {number}: none of the samples {_some(work)} has a target to learn from.")
        loss, work = self._run(work, weight)
        with phase("optimizer"):
            update = self.strategy.update(self.learning_rate(number), loss)
        if not update.applied:
            self._judge(work, update)
        self.notice.slowest = max(self.notice.slowest, time.monotonic() - started)
        return update, replace(work, tokens=int(tokens), padded=int(padded))

    def _run(self, work: Work, weight: float) -> tuple[Tensor, Work]:
        seed = Seed(self.seed, work.step.number)
        while True:
            try:
                return self.strategy.run(work.batches, weight, seed), work
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                rows, length = self._halve(work, error)
            warn(
                f"out of memory in step {work.step.number} with a micro-batch of {rows} rows of {length} tokens: the "
                f"step is repeated with at most {self.feed.bound.rows_at(length)} such rows at a time. "
                "The global batch stays the same."
            )
            self.strategy.clear()
            work = self.feed.work(work.step)

    def _halve(self, work: Work, error: RuntimeError) -> tuple[int, int]:
        """Lower the bound to half of the micro-batch that failed, where the step can be repeated."""
        failed = work.batches[self.strategy.running]
        rows, length = next(iter(failed.inputs.values())).shape[:2]
        if not self.strategy.repeatable or rows == 1:
            advice = (
                "A single sample does not fit: lower --max_length, or use a config that splits the model."
                if rows == 1
                else f"Start again with smaller micro-batches (the training stays the same): {self._restart(rows)}"
            )
            raise UserError(
                f"out of memory in step {work.step.number} with a micro-batch of {rows} rows of {length} tokens "
                f"({str(error).splitlines()[0]}). {advice}"
            ) from error
        self.feed.bound = self.feed.bound.halved(rows, length)
        return rows, length

    def _restart(self, rows: int) -> str:
        smaller = max(1, rows // 2 // self.strategy.devices)
        return restart_command("--per_device_train_batch_size", str(smaller), "--resume_from_checkpoint", "auto")

    def _judge(self, work: Work, update: Update) -> None:
        """Let a non-finite step pass where it may, else stop."""
        if self.strategy.overflow(update):
            say(f"step {work.step.number}: the scaled gradient overflowed fp16: no update, and a lower scale from here")
            return
        self.skipped += 1
        what = (
            f"step {work.step.number}: loss {update.loss}, grad norm {update.grad_norm}, learning rate "
            f"{self.learning_rate(work.step.number):g}, samples {_some(work)}"
        )
        if self.skipped > self.skip_nonfinite:
            raise UserError(
                f"{what}: not finite, so the update was not made. Look at these samples, lower --learning_rate "
                "or --max_grad_norm, or allow some such steps with --skip_nonfinite_steps N."
            )
        warn(f"{what}: not finite, skipped ({self.skipped} of {self.skip_nonfinite} allowed).")


def _some(work: Work) -> str:
    names = work.step.names
    return ", ".join(names[:64]) + (f" and {len(names) - 64} more" if len(names) > 64 else "")
