"""What a checkpoint holds of a strategy: every tensor in full shape, under the model's own name.

So a checkpoint written under one strategy is read under any other. Names are `model/<parameter or buffer>` and
`<moment>/<parameter>`; tied parameters come once.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from toolkit import adapters

MODEL = "model"
MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ()}  # as torch names the state of each optimizer
Patience = Callable[[], float]
Read = Callable[[str, str], Tensor]  # kind, name -> the full tensor on the CPU


Wanted = Callable[[str], bool]  # whether a tensor is, by its name; the same on every rank


def everything(name: str) -> bool:
    return True


def forever() -> float:
    """Seconds that are never over."""
    return math.inf


class Entry(NamedTuple):
    """What is known of a tensor before it is there."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> "Entry":
        """The entry of a tensor, of a cut one with its full shape."""
        # ZeRO-3 empties parameters, and keeps their shapes beside them.
        return cls(tensor.dtype, tuple(getattr(tensor, "ds_shape", tensor.shape)))

    @property
    def bytes(self) -> int:
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


class Portable:
    """Reading and writing the state of a strategy whose ranks hold all tensors, or parts that `full` puts together."""

    rank = 0
    world_size = 1
    updates = 0  # applied so far; every parameter has had all of them
    model: nn.Module
    parameters: Mapping[str, nn.Parameter]  # trained ones, as the optimizer holds them
    optimizer: torch.optim.Optimizer

    @property
    def moments(self) -> Sequence[str]:
        """The optimizer's state of each parameter, float32 and of its shape."""
        return MOMENTS[self.rule.name]

    def saved(self) -> Iterator[tuple[str, Tensor]]:
        """The model's parameters and saved buffers as this rank holds them, each once; of adapters what is theirs."""
        kept = {name for name in self.model.state_dict(keep_vars=True) if adapters.own(self.model, name)}
        for tensors in (self.model.named_parameters(), self.model.named_buffers()):
            yield from ((name, tensor) for name, tensor in tensors if name in kept)

    def entries(self) -> dict[str, Entry]:
        """All tensors of the state, in the order of `tensors`; the same on every rank."""
        model = {name: Entry.of(tensor) for name, tensor in self.saved()}
        found = {f"{MODEL}/{name}": entry for name, entry in model.items()}
        for moment in self.moments:
            found |= {f"{moment}/{name}": Entry(torch.float32, model[name].shape) for name in self.parameters}
        return found

    def holders(self, key: str) -> Sequence[int]:
        """The ranks that get this tensor from `tensors`."""
        return range(self.world_size)

    def tensors(self) -> Iterator[tuple[str, Tensor | None]]:
        """Every tensor of the state in full shape, one at a time; None on ranks that are not among its holders.

        Collective. What is given may be the live tensor: copy what is to outlast the next update.
        """
        for name, tensor in self.saved():
            yield f"{MODEL}/{name}", self.whole_of(tensor.detach(), tensor)
        like = dict(self.saved())
        for moment in self.moments:
            for name, parameter in self.parameters.items():
                part = self.optimizer.state.get(parameter, {}).get(moment)
                part = torch.zeros_like(parameter) if part is None else part
                yield f"{moment}/{name}", self.whole_of(part.detach(), like[name])

    def restore(self, read: Read, updates: int) -> None:
        """Take over a state: weights, moments and the number of updates. Collective.

        Args:
            read: gives any tensor of `entries` in full shape.
        """
        like = dict(self.saved())
        with torch.no_grad():
            for name, tensor in like.items():
                self.put(tensor, tensor, read(MODEL, name))
            for name, parameter in self.parameters.items():
                if not self.moments or not updates:
                    self.optimizer.state.pop(parameter, None)
                    continue
                state = {"step": torch.tensor(float(updates), device=parameter.device)}
                for moment in self.moments:
                    state[moment] = torch.zeros_like(parameter)
                    self.put(state[moment], like[name], read(moment, name))
                self.optimizer.state[parameter] = state
        self.updates = updates

    def whole_of(self, part: Tensor, like: Tensor) -> Tensor:
        """The full tensor of which this rank holds `part`, cut as the model's tensor `like` is. Collective."""
        return part

    def put(self, target: Tensor, like: Tensor, full: Tensor) -> None:
        """Write this rank's part of a full CPU tensor into `target`, cut as the model's tensor `like` is."""
        target.copy_(full)

    def agree(self, flag: bool, patience: Patience = forever) -> bool:
        """Whether any rank of the job says so. Collective, and so a barrier.

        Args:
            patience: asked again and again how many seconds to wait for the others in all.
        """
        return flag

    def words(self, word: str) -> list[str]:
        """Every rank's word, in order of rank, on all of them. Collective."""
        return [word]

    def share(self, word: str) -> str:
        """Rank 0's word, on every rank. Collective."""
        return self.words(word)[0]
