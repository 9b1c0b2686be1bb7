"""DistributedDataParallel: a copy of the model on each rank, gradients summed in the last backward."""

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from toolkit.report.console import warn
from toolkit.strategy.distributed import Distributed
from toolkit.strategy.single import batch_norms
from toolkit.task import Batch


class DDP(Distributed):
    """One copy per rank. DDP averages gradients, so the loss is multiplied by the number of ranks."""

    name = "DDP"

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
        # DDP sums in another order from its second backward on, and divides gradients that lie in its buckets where
        # it multiplies others by the inverse. Taking the first backward here, on a batch that counts for nothing,
        # makes a run that starts anew bit-equal to one that goes on.
        self.forward = wrapped
        with self.precision.autocast():
            loss = self.rows(probe.to(self.device))[:0].sum()
        loss.backward()
        model.zero_grad(set_to_none=False)
        return wrapped

    def synchronised(self, last: bool) -> AbstractContextManager:
        return nullcontext() if last else self.forward.no_sync()

    def clear(self) -> None:
        # Kept and filled with zeros: gradients stay in DDP's buckets, also those of all micro-batches but the last.
        self.optimizer.zero_grad(set_to_none=False)
