"""What every way to cut a step offers, and what building one needs."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from toolkit.task import Batch, Task

NORMALISATION = re.compile(r"norm|\bln(_|\d|\b)", re.IGNORECASE)


class Update(NamedTuple):
    """What one update did, on the host."""

    loss: float  # the step's global loss
    grad_norm: float  # before clipping
    applied: bool  # False: loss or gradient was not finite, and no weight changed


@dataclass(frozen=True)
class OptimizerRule:
    """The optimizer and the clipping of a step, as the task defines them."""

    name: str  # adamw | sgd
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    max_grad_norm: float  # 0: no clipping

    def decayed(self, name: str, shape: Sequence[int]) -> bool:
        """Whether weight decay acts on this parameter, by its name and *full* shape.

        Parameters of two or more dimensions outside normalisation layers, as in AdamW's usual practice.
        """
        module = name.rsplit(".", 1)[0]
        return len(shape) >= 2 and not NORMALISATION.search(module.rsplit(".", 1)[-1])

    def groups(self, parameters: Mapping[str, nn.Parameter]) -> list[dict]:
        """Parameter groups for the optimizer; the lists of names stand in each group as `names`."""
        decay = {name: p for name, p in parameters.items() if self.decayed(name, p.shape)}
        rest = {name: p for name, p in parameters.items() if name not in decay}
        return [
            {"params": list(group.values()), "names": list(group), "weight_decay": strength}
            for group, strength in ((decay, self.weight_decay), (rest, 0.0))
            if group
        ]

    def make(self, parameters: Mapping[str, nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer; its learning rate is set before each update."""
        groups = self.groups(parameters)
        if self.name == "sgd":
            return torch.optim.SGD(groups, lr=0.0, fused=True)
        return torch.optim.AdamW(groups, lr=0.0, betas=self.betas, eps=self.epsilon, fused=True)


@dataclass(frozen=True)
class Seed:
    """Where in the run a micro-batch stands: what its dropout depends on."""

    seed: int
    step: int

    def of(self, data_rank: int, micro_batch: int, stage: int = 0) -> int:
        """A 63-bit seed, different for each place of the run and the same on every repetition."""
        value = 0x9E3779B97F4A7C15
        for part in (self.seed, self.step, data_rank, stage, micro_batch):
            # splitmix64's finalizer (Steele, Lea, Flood 2014) after each part.
            value = (value + part + 0x9E3779B97F4A7C15) & (2**64 - 1)
            value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
            value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
            value ^= value >> 31
        return value >> 1


class Strategy(Protocol):
    """How a step is cut. Every method is collective: all ranks call it, in the same order."""

    name: str  # as the log shows it
    device: torch.device
    data_rank: int
    data_world: int
    devices: int  # devices that share one micro-batch
    repeatable: bool  # no collective inside a micro-batch: a failed step may be repeated
    running: int  # index of the micro-batch that `run` began last
    model: nn.Module  # unwrapped

    def build(self, task: Task, rule: OptimizerRule, probe: Batch) -> None:
        """Load the model, cut or wrap it, then make the optimizer. `probe` is a batch of real samples."""

    def run(self, batches: Sequence[Batch], weight: float, seed: Seed) -> Tensor:
        """All forward and backward passes of a step; the global loss (scalar, on the device)."""

    def trial(self, batch: Batch) -> None:
        """One forward and backward pass that counts for nothing, to see whether it fits in memory."""

    def update(self, lr: float, loss: Tensor) -> Update:
        """Clip, step and clear, unless loss or gradient is not finite. Reads the device once."""

    def overflow(self, update: Update) -> bool:
        """Whether an update was left out because of fp16's loss scale, which is no fault."""

    def clear(self) -> None:
        """Drop the gradients of a step that is not finished."""

    def inference(self) -> AbstractContextManager[None]:
        """Around all calls of `infer` of one evaluation: evaluation mode, no gradients, one autocast."""

    def infer(self, batch: Batch) -> Mapping[str, Tensor]:
        """The model's outputs."""

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over data ranks, on the host."""

    def gather(self, rows: Tensor) -> list[Tensor]:
        """Every data rank's CPU rows [m, k] (m may differ), in rank order, on all ranks."""

    def groups(self) -> list[dict]:
        """The optimizer's groups: weight decay and the names of the parameters."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The model's own names and full tensors; only the first rank need read the tensors."""


def clip(parameters: Sequence[Tensor], norm: Tensor, value: float, limit: float) -> None:
    """Scale gradients by min(1, limit / (norm + 1e-6)); `value` is the norm on the host."""
    if limit > 0 and value + 1e-6 > limit:
        nn.utils.clip_grads_with_norm_(parameters, limit, norm)


def finite(*values: float) -> bool:
    return all(math.isfinite(value) for value in values)
