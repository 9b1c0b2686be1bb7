"""Mixed precision, the same everywhere: autocast over float32 parameters and gradients."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

DTYPES = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SMALLEST_SCALE = 1.0  # a loss scale below this means that the gradients overflow by themselves


class Precision:
    """Autocast for the passes, and under fp16 the scale of the loss.

    The scale moves as torch.amp.GradScaler's does. It is kept here because whether it was too large shows in the
    norm of the whole gradient, on which all ranks agree whatever part of the gradient each of them holds.

    Args:
        name: no, bf16 or fp16, as the accelerate config says.
    """

    start, growth, backoff, patience = 2.0**16, 2.0, 0.5, 2000  # GradScaler's defaults

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.dtype = DTYPES[name]
        self.scaled = name == "fp16"
        self.scale = self.start if self.scaled else 1.0
        self.since = 0  # updates without an overflow at this scale
        self.ranks = 1  # by whose number the loss is multiplied besides

    @property
    def factor(self) -> float:
        """What scales a pass: less where its loss is multiplied by ranks, so that any number of them overflows alike.

        The next power of two takes their place, with which scaling costs no precision.
        """
        return self.scale / 2 ** (self.ranks - 1).bit_length()

    def autocast(self) -> AbstractContextManager:
        """One context should span all micro-batches of a step, so that weights are cast once."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None)

    def backward(self, loss: Tensor) -> None:
        """Backward of the scaled loss, outside autocast but without clearing its cached casts."""
        with torch.autocast(self.device.type, enabled=False):
            (loss * self.factor if self.scaled else loss).backward()

    def unscale(self, gradients: Sequence[Tensor]) -> None:
        """Divide the gradients by the scale, before their norm is taken."""
        if self.scaled:
            torch._foreach_mul_(gradients, 1 / self.factor)

    def adapt(self, applied: bool) -> None:
        """Lower the scale after an overflow, raise it after a long time without one."""
        if not self.scaled:
            return
        self.since = self.since + 1 if applied else 0
        if not applied:
            self.scale *= self.backoff
        elif self.since == self.patience:
            self.scale, self.since = self.scale * self.growth, 0

    def state(self) -> dict[str, float]:
        """What a run that goes on needs."""
        return {"scale": self.scale, "since": self.since}

    def load(self, state: Mapping[str, float]) -> None:
        """Go on from `state`; one of another precision means nothing here."""
        if self.scaled and state["scale"] != 1:
            self.scale, self.since = state["scale"], int(state["since"])

    def overflow(self) -> bool:
        """Whether a non-finite gradient may be the scale's fault, so that the step is merely skipped."""
        return self.scaled and self.scale >= SMALLEST_SCALE
