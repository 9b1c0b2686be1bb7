"""Dropout on a CPU, where torch draws one number an element.

The same dropout: each element goes with probability p, the rest is scaled by 1 / (1 - p), and torch.manual_seed rules.
In evaluation and on other devices, everything is torch's own.
"""

import torch
from torch import Tensor, nn

LEVELS = 2**16  # p is exact to one in so many


def install(model: nn.Module) -> None:
    """Swap the model's dropout modules for ours."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, Dropout(child.p).train(child.training))


class Dropout(nn.Dropout):
    """torch's, with numbers that are drawn four at a time."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training and drops(input, self.p):
            return input * factors(input, self.p)
        return super().forward(input)


def drops(input: Tensor, p: float) -> bool:
    """Whether elements of `input` are dropped here: plain numbers on a CPU."""
    return 0 < round(p * LEVELS) < LEVELS and type(input) in (Tensor, nn.Parameter) and input.device.type == "cpu"


def factors(like: Tensor, p: float) -> Tensor:
    """What dropout multiplies `like` by: 0 or 1 / (1 - p)."""
    count = like.numel()
    # torch's generator gives 64 bits at once: four numbers of 16 bits, which then become 0 or 1 in place.
    words = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    kept = words.view(torch.int16)[:count].view(like.shape).ge_(round(p * LEVELS) - LEVELS // 2)
    if like.element_size() != 2:
        return kept.to(like.dtype).mul_(1 / (1 - p))
    # 0 or 1 times the bits of a number of the same size is 0 or that number.
    bits = torch.tensor(1 / (1 - p), dtype=like.dtype).view(torch.int16)
    return kept.mul_(bits).view(like.dtype)
