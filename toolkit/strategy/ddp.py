"""DistributedDataParallel: a copy of the model on each rank, gradients summed in the last backward."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from toolkit.launch.environment import World
from toolkit.report.console import warn
from toolkit.strategy.single import SingleProcess, batch_norms
from toolkit.task import Batch


class DDP(SingleProcess):
    """One copy per rank. DDP averages gradients, so the loss is multiplied by the number of ranks."""

    name = "DDP"
    repeatable = False

    def __init__(self, world: World) -> None:
        super().__init__(world)
        self.data_rank = world.rank
        self.data_world = world.size
        # Host numbers travel over gloo, so that they never wait for the device's queue.
        self.control = dist.new_group(backend="gloo") if world.device.type != "cpu" else None

    def wrap(self, model: nn.Module, probe: Batch) -> nn.Module:
        batch_norm = bool(batch_norms(model))
        if batch_norm:
            if self.device.type == "cuda":
                model = self.model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
            else:
                warn("batch normalisation is synchronised between GPUs only; here each rank uses its own statistics.")
        wrapped = DistributedDataParallel(
            model,
            device_ids=[self.device.index] if self.device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            forward_sync_buffers=batch_norm,
        )
        # DDP sums in another order from its second backward on. Taking the first one here, on a batch
        # that counts for nothing, makes a run that starts anew bit-equal to one that goes on.
        self.forward = wrapped
        with self.precision.autocast():
            loss = self.rows(probe.to(self.device))[:0].sum()
        loss.backward()
        model.zero_grad()
        return wrapped

    def synchronised(self, last: bool) -> AbstractContextManager:
        return nullcontext() if last else self.forward.no_sync()

    def reduce(self, loss: Tensor) -> Tensor:
        dist.all_reduce(loss)
        return loss

    def clear(self) -> None:
        # Kept and filled with zeros: gradients stay in DDP's buckets, also those of all micro-batches but the last.
        self.optimizer.zero_grad(set_to_none=False)

    def total(self, values: Sequence[float]) -> list[float]:
        numbers = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(numbers, group=self.control)
        return numbers.tolist()

    def gather(self, rows: Tensor) -> list[Tensor]:
        counts = self.total([len(rows) if rank == self.data_rank else 0 for rank in range(self.data_world)])
        longest = int(max(counts))
        padded = torch.zeros(longest, *rows.shape[1:], dtype=rows.dtype)
        padded[: len(rows)] = rows
        received = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(received, padded, group=self.control)
        return [part[: int(count)] for part, count in zip(received, counts)]
