"""Several processes: which ranks share a micro-batch, and what data ranks tell each other."""

import time
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from toolkit.launch.environment import World
from toolkit.strategy.portable import Patience, forever
from toolkit.strategy.single import SingleProcess

BREATH = timedelta(seconds=1)


class Distributed(SingleProcess):
    """Ranks laid out as data ranks x model ranks.

    Consecutive ranks share a data rank: a model that is split stays inside a machine.

    Args:
        model_ranks: ranks that hold parts of one model and work on the same micro-batches.
    """

    repeatable = False

    def __init__(self, world: World, model_ranks: int = 1) -> None:
        super().__init__(world)
        self.rank, self.world_size, self.model_ranks = world.rank, world.size, model_ranks
        self.data_rank, self.model_rank = divmod(world.rank, model_ranks)
        self.data_world = world.size // model_ranks
        # Host numbers travel over gloo, so that they never wait for the device's queue.
        self.everyone = None if world.device.type == "cpu" else dist.new_group(backend="gloo")  # None: all ranks
        self.data_group, self.control = None, self.everyone
        if model_ranks > 1:
            peers = [list(range(start, world.size, model_ranks)) for start in range(model_ranks)]
            self.data_group, _ = dist.new_subgroups_by_enumeration(peers)
            self.control, _ = dist.new_subgroups_by_enumeration(peers, backend="gloo")

    def reduce(self, loss: Tensor) -> Tensor:
        dist.all_reduce(loss, group=self.data_group)
        return loss

    def total(self, values: Sequence[float], patience: Patience = forever) -> list[float]:
        # Over all ranks, so that those of one model hear of the same things in the same step.
        numbers = torch.tensor(values, dtype=torch.float64)
        self._exchange(numbers, dist.ReduceOp.SUM, patience)
        return (numbers / self.model_ranks).tolist()

    def agree(self, flag: bool, patience: Patience = forever) -> bool:
        found = torch.tensor(flag, dtype=torch.uint8)
        self._exchange(found, dist.ReduceOp.MAX, patience)
        return bool(found)

    def _exchange(self, numbers: Tensor, operation: dist.ReduceOp, patience: Patience) -> None:
        """All-reduce that comes up for air: signals are heard, and patience may come to an end."""
        started = time.monotonic()
        work = dist.all_reduce(numbers, operation, group=self.everyone, async_op=True)
        while True:
            try:
                work.wait(BREATH)
                return
            except RuntimeError:
                if work.is_completed():
                    raise
            if time.monotonic() - started > patience():
                raise dist.DistBackendError("another rank does not answer")

    def words(self, word: str) -> list[str]:
        said = [""] * self.world_size
        dist.all_gather_object(said, word, group=self.everyone)
        return said

    def gather(self, rows: Tensor) -> list[Tensor]:
        counts = self.total([len(rows) if rank == self.data_rank else 0 for rank in range(self.data_world)])
        longest = int(max(counts))
        padded = torch.zeros(longest, *rows.shape[1:], dtype=rows.dtype)
        padded[: len(rows)] = rows
        received = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(received, padded, group=self.control)
        return [part[: int(count)] for part, count in zip(received, counts)]
