"""What runs when in a model: learnt from one pass, so that it can be cut without code for any one model."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from toolkit.errors import UserError
from toolkit.strategy.blocks import blocks
from toolkit.task import Batch, Task

BEFORE, BETWEEN, AFTER = "before", "between", "after"  # the blocks


@dataclass
class Anatomy:
    """What one pass through the whole model showed.

    Attributes:
        path: name of the list of blocks.
        called: numbers of the blocks, as they were called.
        places: for each module of `outside`, when it was called.
        before: last dimension and dtype of what such a module gave before the blocks; None: not one tensor.
        hidden: what went into each block, [rows, length, width].
        tuples: whether blocks give a tuple that begins with the hidden state.
        outputs: the tensors that the model gave.
        unused: names of parameters that the loss does not reach.
    """

    path: str
    called: list[int] = field(default_factory=list)
    places: dict[str, set[str]] = field(default_factory=dict)
    before: dict[str, tuple[int, torch.dtype] | None] = field(default_factory=dict)
    hidden: list[Tensor] = field(default_factory=list)
    tuples: bool = False
    outputs: dict[str, Tensor] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)


def examine(model: nn.Module, task: Task, probe: Batch, autocast: AbstractContextManager) -> Anatomy:
    """One forward and backward pass of the whole model, with an eye on what runs when.

    Gradients are dropped as they come, so that the pass takes no memory for them.

    Raises:
        UserError: the model is not one chain of blocks, each called once.
    """
    path, layers = blocks(model)
    if getattr(model.config, "is_encoder_decoder", False):
        refuse(model, "it is an encoder with a decoder, so its blocks are no single chain")
    seen, reached = Anatomy(path), set()

    def drop(name: str, parameter: nn.Parameter) -> None:
        reached.add(name)
        parameter.grad = None

    trainable = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    handles = [p.register_post_accumulate_grad_hook(partial(drop, name)) for name, p in trainable.items()]
    model.eval()
    with _watched(model, layers, seen):
        with autocast:
            outputs = model(**probe.inputs)
            loss = task.loss(outputs, probe).sum()
        loss.backward()
    for handle in handles:
        handle.remove()
    if seen.called != list(range(len(layers))):
        refuse(model, f"its blocks ({path}) are not each called once and in order")
    shape = next(iter(probe.inputs.values())).shape[:2]
    if any(hidden.dim() != 3 or hidden.shape[:2] != shape for hidden in seen.hidden):
        refuse(model, "what goes from block to block is not of the shape [rows, length, width]")
    seen.outputs = {name: value.detach() for name, value in outputs.items() if isinstance(value, Tensor)}
    seen.unused = [name for name in trainable if name not in reached]
    return seen


@contextmanager
def _watched(model: nn.Module, layers: nn.ModuleList, seen: Anatomy) -> Iterator[None]:
    """Hooks that fill `seen`."""
    place, entered = BEFORE, {}

    def enter_block(index: int, module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> None:
        nonlocal place
        place = BETWEEN
        seen.called.append(index)
        seen.hidden.append(first(args, kwargs).detach())

    def leave_block(index: int, module: nn.Module, args: tuple, output: Any) -> None:
        nonlocal place
        place = AFTER if index == len(layers) - 1 else BETWEEN
        seen.tuples = isinstance(output, tuple)

    def enter(name: str, module: nn.Module, args: tuple) -> None:
        entered[name] = place

    def leave(name: str, module: nn.Module, args: tuple, output: Any) -> None:
        seen.places.setdefault(name, set()).add(place if place == entered[name] else BETWEEN)
        if place == BEFORE:
            seen.before[name] = (output.shape[-1], output.dtype) if isinstance(output, Tensor) else None

    handles = []
    for index, layer in enumerate(layers):
        handles.append(layer.register_forward_pre_hook(partial(enter_block, index), with_kwargs=True))
        handles.append(layer.register_forward_hook(partial(leave_block, index)))
    for name, module in outside(model, seen.path):
        handles.append(module.register_forward_pre_hook(partial(enter, name)))
        handles.append(module.register_forward_hook(partial(leave, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def outside(model: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """The modules outside the blocks that have parameters or saved buffers of their own, by name."""
    for name, module in model.named_modules():
        saved = set(module._buffers) - module._non_persistent_buffers_set
        if not name.startswith(f"{path}.") and (parameters_of(module) or saved):
            yield name, module


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """A module's own parameters, without those of its children."""
    return dict(module.named_parameters(recurse=False))


def first(args: tuple, kwargs: Mapping[str, Any]) -> Tensor:
    """The first argument of a call, however it was given: of a block, the hidden state."""
    return args[0] if args else next(iter(kwargs.values()))


def refuse(model: nn.Module, reason: str, cause: Exception | None = None) -> NoReturn:
    """Stop: this model cannot be run as a pipeline."""
    raise UserError(
        f"{type(model).__name__} cannot be cut into pipeline stages: {reason}. Use a config that shards it instead: "
        "accelerate_configs/fsdp2.yaml or zero3.yaml."
    ) from cause
