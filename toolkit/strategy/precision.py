"""Mixed precision, the same everywhere: autocast over float32 parameters and gradients."""

from contextlib import AbstractContextManager

import torch
from torch import Tensor

DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALLEST_SCALE = 1.0  # a loss scale below this means that the gradients overflow by themselves


class Precision:
    """Autocast for the passes, and under fp16 the scale of the loss.

    Args:
        name: no, bf16 or fp16, as the accelerate config says.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.dtype = DTYPES[name]
        self.scaler = torch.amp.GradScaler(device.type, enabled=name == "fp16")

    def autocast(self) -> AbstractContextManager:
        """One context should span all micro-batches of a step, so that weights are cast once."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None)

    def backward(self, loss: Tensor) -> None:
        """Backward of the scaled loss, outside autocast but without clearing its cached casts."""
        with torch.autocast(self.device.type, enabled=False):
            self.scaler.scale(loss).backward()

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, before their norm is taken."""
        if self.scaler.is_enabled():
            self.scaler.unscale_(optimizer)

    def adapt(self) -> None:
        """Lower the scale after an overflow, raise it after a long time without one."""
        if self.scaler.is_enabled():
            self.scaler.update()

    def overflow(self) -> bool:
        """Whether a non-finite gradient may be the scale's fault, so that the step is merely skipped."""
        return self.scaler.is_enabled() and self.scaler.get_scale() >= SMALLEST_SCALE
