"""What every way to cut a step offers, and what building one needs."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from toolkit.report.console import say
from toolkit.strategy.portable import Entry, Patience, Read, Wanted, everything, forever
from toolkit.task import Batch, Task

if TYPE_CHECKING:
    from toolkit.strategy.precision import Precision

NORMALISATION = re.compile(r"norm|\bln(_|\d|\b)", re.IGNORECASE)


class Size(NamedTuple):
    """Parameters of the whole model, each counted once."""

    parameters: int
    trainable_parameters: int
    matrix_parameters: int  # of matrix products: two dimensions, outside embeddings

    @classmethod
    def of(cls, model: nn.Module) -> "Size":
        """The size of a model that is not split."""
        tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
        parameters = list(model.parameters())
        return cls(
            sum(p.numel() for p in parameters),
            sum(p.numel() for p in parameters if p.requires_grad),
            sum(p.numel() for p in parameters if p.dim() == 2 and id(p) not in tables),
        )


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
        # A parameter that ZeRO-3 has cut is empty, and keeps its full shape beside it.
        decay = {name: p for name, p in parameters.items() if self.decayed(name, getattr(p, "ds_shape", p.shape))}
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
    rank: int
    world_size: int
    data_rank: int
    data_world: int
    devices: int  # devices that share one micro-batch
    repeatable: bool  # no collective inside a micro-batch: a failed step may be repeated
    alone: bool  # `trial` needs no other rank, so that it may fail on one of them
    micro_batches: int | None  # in every step of each data rank, where the strategy asks for a number
    precision: "Precision"
    updates: int  # applied so far
    running: int  # index of the micro-batch that `run` began last
    model: nn.Module  # unwrapped
    size: "Size"

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

    def total(self, values: Sequence[float], patience: Patience = forever) -> list[float]:
        """Sums over data ranks, on the host."""

    def gather(self, rows: Tensor) -> list[Tensor]:
        """Every data rank's CPU rows [m, k] (m may differ), in rank order, on all ranks."""

    def groups(self) -> list[dict]:
        """The optimizer's groups: weight decay and the names of the parameters."""

    def weights(self, wanted: Wanted = everything) -> Iterator[tuple[str, Tensor | None]]:
        """The model's own names and full tensors on the CPU, one at a time; None on all ranks but the first."""

    def parts(self) -> Iterator[tuple[str, str, Tensor]]:
        """Each trainable parameter that this rank holds: its name, which part of it, and the local tensor.

        Ranks that hold the same part of the same parameter are replicas of each other.
        """

    def held(self) -> dict[str, int]:
        """Bytes that this rank holds as parameters, gradients and optimizer state, between `run` and `update`."""

    def entries(self) -> dict[str, Entry]: ...  # see toolkit.strategy.portable, here and below
    def holders(self, key: str) -> Sequence[int]: ...
    def tensors(self) -> Iterator[tuple[str, Tensor | None]]: ...
    def restore(self, read: Read, updates: int) -> None: ...
    def agree(self, flag: bool, patience: Patience = forever) -> bool: ...
    def words(self, word: str) -> list[str]: ...
    def share(self, word: str) -> str: ...

    def shell(self) -> nn.Module:
        """A model object that can save the tensors of `weights`; its own may be cut or on no device."""


def clip(gradients: Sequence[Tensor], norm: Tensor, value: float, limit: float) -> None:
    """Scale gradients by min(1, limit / (norm + 1e-6)); `value` is the norm on the host."""
    if limit > 0 and value + 1e-6 > limit:
        torch._foreach_mul_(gradients, limit / (norm + 1e-6))


def stored(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the distinct storages behind these tensors, each counted whole."""
    storages = [tensor.untyped_storage() for tensor in tensors if tensor is not None]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def without_gradient(model: nn.Module) -> list[str]:
    """Names of trainable parameters that a backward pass did not reach. Clears all gradients."""
    unused = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    model.zero_grad()
    return unused


def describe_unused(names: Sequence[str]) -> None:
    """Say once which parameters stay as they are, for they are no one's to train."""
    if names:
        say(f"{len(names)} parameters take no part in the loss and stay as they are: {', '.join(names[:6])}")


def finite(*values: float) -> bool:
    return all(math.isfinite(value) for value in values)
