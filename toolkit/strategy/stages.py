"""Cutting a model into the stages of a pipeline, without code for any one model.

Every stage runs the model's own forward. Blocks before the stage's own give out the hidden state that was
received, and the first block behind them takes it out, which ends the forward. Modules that come before all
blocks give zeros on later stages, where only the shape and type of what they give matter.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.strategy.anatomy import AFTER, BEFORE, BETWEEN, Anatomy, first, outside, parameters_of, refuse
from toolkit.task import Batch


class Saved(NamedTuple):
    """Where a tensor of the model's state is found."""

    name: str  # of the parameter or buffer; tied ones share one
    stage: int  # the first that holds it
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class Plan:
    """Which stage holds what.

    Attributes:
        layers: the blocks of each stage.
        parameters: of each stage; a tied parameter counts on both that hold it.
        tied: names of parameters that the first and the last stage both hold.
        state: the model's state dict, by its own names.
    """

    layers: list[range]
    parameters: list[int]
    tied: list[str]
    state: dict[str, Saved]

    def describe(self) -> str:
        """One line: the blocks and parameters of each stage."""
        stages = [
            (f"blocks {own[0]} to {own[-1]}" if len(own) > 1 else f"block {own[0]}") + f" ({count:,} parameters)"
            for own, count in zip(self.layers, self.parameters)
        ]
        return f"stages: {', '.join(stages)}"


def make_plan(model: nn.Module, seen: Anatomy, stages: int) -> Plan:
    """Stages of consecutive blocks, so that the one with most parameters has as few as can be.

    What comes before the blocks is the first stage's, what comes after them the last one's.

    Raises:
        UserError: more stages than blocks; parameters that are used in other places than these.
    """
    layers = model.get_submodule(seen.path)
    if stages > len(layers):
        raise UserError(
            f"--pipeline_stages {stages}: {type(model).__name__} has only {len(layers)} blocks ({seen.path}), and "
            "a stage needs at least one."
        )
    names = {id(p): name for name, p in model.named_parameters()}
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    holders: dict[str, set[int]] = {}
    for module_name, module in outside(model, seen.path):
        for parameter in parameters_of(module).values():
            name = names[id(parameter)]
            holders.setdefault(name, set()).update(_ends(model, seen, module_name, name, stages))
    costs = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    costs[0] += sum(sizes[name] for name, held in holders.items() if 0 in held)
    costs[-1] += sum(sizes[name] for name, held in holders.items() if stages - 1 in held)
    cut = partition(costs, stages)
    stage_of = {layer: stage for stage, own in enumerate(cut) for layer in own}
    for index, layer in enumerate(layers):
        for parameter in layer.parameters():
            holders.setdefault(names[id(parameter)], set()).add(stage_of[index])
    tied = [name for name, held in holders.items() if len(held) > 1]
    for name in tied:
        if holders[name] != {0, stages - 1}:
            refuse(model, f"{name} is shared between blocks")
    state = {}
    for own_name, tensor in model.state_dict(keep_vars=True).items():
        name = names.get(id(tensor), own_name)
        stage = min(holders[name]) if name in holders else _stage_of_buffer(seen, name, stage_of, stages)
        state[own_name] = Saved(name, stage, tensor.shape, tensor.dtype)
    counts = [sum(sizes[name] for name, held in holders.items() if stage in held) for stage in range(stages)]
    return Plan(cut, counts, tied, state)


def _ends(model: nn.Module, seen: Anatomy, module: str, parameter: str, stages: int) -> set[int]:
    """The stages that hold a parameter outside the blocks, for one module that has it."""
    places = seen.places.get(module, set())
    if places and BETWEEN not in places:
        return {0 if place == BEFORE else stages - 1 for place in places}
    if parameter not in seen.unused and model.get_parameter(parameter).requires_grad:
        refuse(model, f"{parameter} is used beside its blocks, not only before or after them")
    return {0}


def _stage_of_buffer(seen: Anatomy, name: str, stage_of: Mapping[int, int], stages: int) -> int:
    if name.startswith(f"{seen.path}."):
        return stage_of[int(name.removeprefix(f"{seen.path}.").split(".")[0])]
    return stages - 1 if seen.places.get(name.rpartition(".")[0]) == {AFTER} else 0


def partition(costs: Sequence[int], stages: int) -> list[range]:
    """Consecutive ranges, none empty, whose largest sum is as small as can be."""
    best: dict[int, tuple[int, list[range]]] = {0: (0, [])}  # of the first so many, in the stages so far
    for stage in range(1, stages + 1):
        best = {
            end: min(
                (
                    (max(largest, sum(costs[start:end])), [*ranges, range(start, end)])
                    for start, (largest, ranges) in best.items()
                    if start < end
                ),
                key=lambda found: found[0],
            )
            for end in range(stage, len(costs) + 1)
        }
    return best[len(costs)][1]


class Stage:
    """One stage of a model, which is cut in place: modules of other stages lose their parameters.

    Attributes:
        parameters: what the stage holds, by the whole model's names.
        width: of the hidden state, [rows, length, width].
        receives, sends: its dtype where it comes in and goes out.
    """

    def __init__(self, model: nn.Module, seen: Anatomy, plan: Plan, number: int) -> None:
        own = plan.layers[number]
        self.model, self.number = model, number
        self.last = number == len(plan.layers) - 1
        self.tuples = seen.tuples
        self.received: Tensor | None = None
        self.width = seen.hidden[0].shape[-1]
        self.receives = seen.hidden[own.start].dtype
        self.sends = None if self.last else seen.hidden[own.stop].dtype
        names = {id(p): name for name, p in model.named_parameters()}
        self._cut(seen, own)
        self.parameters = {names[id(p)]: p for p in model.parameters()}

    def _cut(self, seen: Anatomy, own: range) -> None:
        for name, module in outside(self.model, seen.path):
            places = seen.places.get(name, set())
            is_first = self.number == 0 and (BEFORE in places or AFTER not in places)
            if is_first or (self.last and AFTER in places):
                continue
            for key in parameters_of(module):
                module._parameters[key] = None
                if BEFORE in places:
                    if seen.before[name] is None:
                        refuse(self.model, f"{name} gives something else than one tensor")
                    module.forward = _zeros(*seen.before[name])
        for index, block in enumerate(self.model.get_submodule(seen.path)):
            if index not in own:
                # The object stays, since the model's loop reads attributes of it.
                for content in (block._modules, block._parameters, block._buffers):
                    content.clear()
                block.forward = self._give if index < own.start else self._take

    def _give(self, *args: Any, **kwargs: Any) -> Any:
        return (self.received,) if self.tuples else self.received

    def _take(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise _Reached(first(args, kwargs))

    def __call__(self, inputs: Mapping[str, Tensor], received: Tensor | None) -> Any:
        """The stage's hidden state [rows, length, width], on the last stage the model's outputs.

        Args:
            received: the previous stage's hidden state; None on the first.
        """
        self.received = received
        try:
            return self.model(**inputs)
        except _Reached as reached:
            return reached.hidden
        finally:
            self.received = None

    def check(self, seen: Anatomy, own: range, probe: Batch, autocast: AbstractContextManager) -> None:
        """See that the stage does on the probe what its blocks did in the whole model.

        Raises:
            UserError: it does not, so more than the hidden state goes from stage to stage.
        """
        more = f"stage {self.number} needs more than the hidden state of the one before"
        try:
            with torch.no_grad(), autocast:
                found = self(probe.inputs, seen.hidden[own.start] if self.number else None)
        except Exception as error:
            refuse(
                self.model, f"stage {self.number} needs more than the hidden state of the one before: {error}", error
            )
        pairs = [(found[name], value) for name, value in seen.outputs.items()] if self.last else []
        for value, expected in pairs or [(found, seen.hidden[own.stop])]:
            if not torch.allclose(value, expected, rtol=1e-3, atol=1e-5, equal_nan=True):
                refuse(self.model, more)

    def tensors(self) -> dict[str, Tensor]:
        """What the stage holds of the model's state, by `Saved.name`."""
        return {**dict(self.model.named_buffers()), **self.parameters}


class _Reached(Exception):
    """The end of a stage: carries its hidden state out of the model's forward."""

    def __init__(self, hidden: Tensor) -> None:
        self.hidden = hidden


def _zeros(width: int, dtype: torch.dtype) -> Callable[..., Tensor]:
    """In place of an embedding, or of a layer on top of one."""

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        given = first(args, kwargs)
        shape = given.shape[:-1] if given.is_floating_point() else given.shape
        return torch.zeros(*shape, width, dtype=dtype, device=given.device)

    return forward
