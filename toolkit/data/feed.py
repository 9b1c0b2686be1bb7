"""From the schedule to the micro-batches of this rank."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset

from toolkit.attention import rounded
from toolkit.data.plan import Bound, Schedule, Step, StreamSchedule, cut
from toolkit.phases import fetched
from toolkit.task import Batch, Samples, Task


@dataclass(frozen=True)
class Work:
    """What one rank does in one step."""

    step: Step
    batches: list[Batch]
    tokens: int  # real tokens of its micro-batches
    padded: int  # the same, with what is computed beside them

    def pin_memory(self) -> "Work":
        """The same work in page-locked memory; the data loader calls this."""
        return replace(self, batches=[batch.pin_memory() for batch in self.batches])


class Feed:
    """Cuts every step for this rank and collates its micro-batches.

    Args:
        bound: may be lowered while training; steps not yet begun then follow the new one.
        overhead: fixed cost of a micro-batch, in tokens.
        pin: hand out page-locked memory, for copies to an accelerator.
        workers: processes that collate ahead; 0: between the steps.
        micro_batches: of a step, where the strategy asks for a number.
    """

    def __init__(
        self,
        task: Task,
        samples: Samples,
        schedule: Schedule | StreamSchedule,
        rank: int,
        world: int,
        bound: Bound,
        overhead: float = 0.0,
        pin: bool = False,
        workers: int = 0,
        micro_batches: int | None = None,
    ) -> None:
        self.task, self.samples, self.schedule = task, samples, schedule
        self.rank, self.world, self.bound = rank, world, bound
        self.overhead, self.pin = overhead, pin
        self.workers = workers
        self.micro_batches = micro_batches
        self.padding = True  # takes the model's time; False: the model leaves it out
        self.position: dict[str, Any] | None = None  # of a stream, behind the last work that was handed out

    def work(self, step: Step) -> Work:
        """This rank's part of a step under the present bound."""
        samples = step.drawn.samples if step.drawn else self.samples
        lengths = samples.lengths[step.ids].tolist()
        pieces = cut(lengths, self.world, self.bound, self.overhead, self.micro_batches, self.padding)
        batches = [collate(self.task, samples, step.ids[piece], step.epoch) for piece in pieces[self.rank]]
        return Work(step, batches, sum(batch.tokens for batch in batches), sum(map(self._computed, batches)))

    def _computed(self, batch: Batch) -> int:
        """Tokens that a pass computes for the samples of a micro-batch."""
        if not batch.ids:
            return 0
        return len(batch.ids) * next(iter(batch.inputs.values())).shape[1] if self.padding else rounded(batch.tokens)

    def __iter__(self) -> Iterator[Work]:
        """The work of all steps, in order."""
        return self.after(0)

    def after(self, done: int) -> Iterator[Work]:
        """The work of the steps after the first `done` ones, behind which a stream is at `position`."""
        while done < self.schedule.total_steps:
            bound = self.bound
            for work in fetched(self._ahead(done) if self.workers else self._here(done)):
                done = work.step.number
                self.position = work.step.drawn.position if work.step.drawn else None
                yield work
                if self.workers and self.bound != bound:
                    break  # what was collated ahead has the old bound

    def _here(self, done: int) -> Iterator[Work]:
        # Collating is a slice and a pad: most often cheaper here than handed between processes.
        for step in self.schedule.steps(done, self.position):
            work = self.work(step)
            yield work.pin_memory() if self.pin else work

    def _ahead(self, done: int) -> DataLoader:
        dataset = _Steps(self, list(self.schedule.steps(done)))
        return DataLoader(
            dataset, batch_size=None, num_workers=self.workers, pin_memory=self.pin, worker_init_fn=_leave_signals
        )

    def worst(self) -> Batch:
        """The largest micro-batch of the run: the longest samples, as many as the bound allows."""
        rows = min(self.bound.rows_at(int(self.samples.lengths.max())), self.schedule.global_batch)
        longest = np.argsort(-self.samples.lengths, kind="stable")[:rows]
        return collate(self.task, self.samples, longest, 0)


class _Steps(Dataset):
    def __init__(self, feed: Feed, steps: list[Step]) -> None:
        self.feed, self.steps = feed, steps

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, at: int) -> Work:
        return self.feed.work(self.steps[at])


def _leave_signals(worker: int) -> None:
    """A stop is the rank's business: a worker that died of its signal would take the rank with it."""
    for name in ("SIGTERM", "SIGINT", "SIGUSR1"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def collate(task: Task, samples: Samples, ids: np.ndarray, epoch: int) -> Batch:
    """A micro-batch of these samples; of none, a filler that has one sample's shape and counts for nothing."""
    if len(ids):
        return task.collate([samples[i] for i in ids.tolist()], ids.tolist(), epoch)
    shortest = int(np.argmin(samples.lengths))
    like = task.collate([samples[shortest]], [shortest], epoch)
    return Batch(like.inputs, like.targets, [], 0.0, 0)
