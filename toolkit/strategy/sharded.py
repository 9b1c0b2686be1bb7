"""Parameters, gradients and optimizer state split over ranks: FSDP2, HSDP, tensor parallelism and their product."""

import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from toolkit.errors import UserError, nearest, raise_all
from toolkit.launch.environment import World
from toolkit.launch.strategies import mesh_name
from toolkit.strategy import tensor
from toolkit.strategy.base import OptimizerRule, Size, stored
from toolkit.strategy.blocks import blocks
from toolkit.strategy.distributed import Distributed
from toolkit.strategy.portable import Wanted, everything
from toolkit.task import Batch, Task

if TYPE_CHECKING:
    from accelerate import FullyShardedDataParallelPlugin

BY_BLOCK = "TRANSFORMER_BASED_WRAP"


class Sharded(Distributed):
    """Ranks laid out as replicas x shards x tensor ranks, the last ones consecutive.

    A tensor group splits the matrices of each block and works on the same micro-batches. Over `shards`, parameters,
    gradients and optimizer state are cut along their first dimension; a block's parameters are gathered for its
    passes, and its gradients summed and scattered after each. Over `replicas`, the shards are copies of each other.
    """

    alone = False

    def __init__(self, world: World) -> None:
        self.plugin = read_plugin()
        self.replicas, self.shards, self.tensor_ranks = sizes = mesh_sizes(world.size)
        super().__init__(world, self.tensor_ranks)
        self.mesh = init_device_mesh(world.device.type, sizes, mesh_dim_names=("replicate", "shard", "tensor"))
        self.offload = isinstance(self.plugin.cpu_offload, CPUOffloadPolicy)
        if self.offload and self.replicas * self.shards == 1:
            raise UserError("fsdp_config: fsdp_offload_params needs shards: write parallelism_config_dp_shard_size: 2.")
        self.name = mesh_name(*sizes) + " with CPU offload" * self.offload

    def build(self, task: Task, rule: OptimizerRule, probe: Batch) -> None:
        self.task, self.rule = task, rule
        quiet()
        config = getattr(task, "config", None)
        if self.tensor_ranks > 1 and hasattr(config, "model_type"):
            tensor.check(config, self.tensor_ranks)  # before anything large is read
        # Every rank reads the whole file. With this option, which transformers obeys, all but one would be left
        # without weights, and with another fresh head.
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
        self.model = self.forward = task.model(dtype=torch.float32)
        self.model_class = type(self.model)
        if self.tensor_ranks > 1:
            tensor.split(self.model, self.mesh["tensor"])
        if self.replicas * self.shards > 1:
            self.shard(self.model)
        else:
            self.model.to(self.device)
        self.freeze_unused(probe)
        self.size = Size.of(self.model)
        self.whole = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        # The optimizer works on each rank's own part: both rules are elementwise, and plain tensors that share the
        # parameters' memory may stand in one group whatever ranks they are spread over.
        self.parameters = {name: nn.Parameter(local(p.detach())) for name, p in self.whole.items()}
        self.optimizer = rule.make(self.parameters)
        self.model.train()

    def shard(self, model: nn.Module) -> None:
        """Cut the parameters over the data ranks, block by block, then what is outside of blocks."""
        classes = wrapped_classes(model, self.plugin.transformer_cls_names_to_wrap)
        half = self.precision.dtype
        policy = {
            "mesh": self.mesh["replicate", "shard"] if self.replicas > 1 else self.mesh["shard"],
            "mp_policy": MixedPrecisionPolicy(half, torch.float32 if half else None),
            "offload_policy": CPUOffloadPolicy(self.device.type == "cuda") if self.offload else OffloadPolicy(),
        }
        for module in reversed(list(model.modules())):  # inner ones first
            if type(module) in classes:
                fully_shard(module, reshard_after_forward=self.plugin.reshard_after_forward, **policy)
        fully_shard(model, **policy)

    def synchronised(self, last: bool) -> AbstractContextManager:
        # Gradients are scattered after every micro-batch, so that no rank ever holds them whole; replicas are
        # added up once.
        if self.replicas > 1:
            self.model.set_requires_all_reduce(last)
        return nullcontext()

    def reduce(self, loss: Tensor) -> Tensor:
        loss = super().reduce(loss)
        return loss.cpu() if self.offload else loss  # where the gradients are

    def gradients(self) -> list[Tensor]:
        for name, p in self.whole.items():
            if isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
                # A table of embeddings that a tensor group has cut gets its gradient whole.
                p.grad = p.grad.redistribute(placements=p.placements)
            self.parameters[name].grad = None if p.grad is None else local(p.grad)
        return super().gradients()

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Squares are summed over the ranks that a tensor is cut over, not over those that have copies of it."""
        parts: dict[tuple[str, ...], list[Tensor]] = {}
        cuts = [cut_over(self.whole[name]) for name, p in self.parameters.items() if p.grad is not None]
        for gradient, cut in zip(gradients, cuts, strict=True):
            parts.setdefault(cut, []).append(gradient)
        squares = {cut: nn.utils.get_total_norm(part).square().to(self.device) for cut, part in parts.items()}
        for dimension in ("shard", "tensor"):
            cuts = [cut for cut in squares if dimension in cut]
            if cuts:
                total = torch.stack([squares[cut] for cut in cuts])
                dist.all_reduce(total, group=self.mesh.get_group(dimension))
                squares.update(zip(cuts, total))
        norm = sum(squares.values(), torch.zeros((), device=self.device)).sqrt()
        return norm.cpu() if self.offload else norm

    def clear(self) -> None:
        for p in self.whole.values():
            p.grad = None
        self.optimizer.zero_grad()

    def weights(self, wanted: Wanted = everything) -> Iterator[tuple[str, Tensor | None]]:
        state = {name: p for name, p in self.model.state_dict(keep_vars=True).items() if wanted(name)}
        uses = Counter(map(id, state.values()))
        kept: dict[int, Tensor] = {}  # of those with several names
        for name, p in state.items():
            full = kept[id(p)] if id(p) in kept else self.full(p.detach())
            if uses[id(p)] > 1:
                kept[id(p)] = full
            yield name, full if self.rank == 0 else None

    def full(self, part: Tensor) -> Tensor:
        """The whole tensor on the CPU of rank 0, on all ranks of which this rank has a part."""
        whole = part.to(self.device).full_tensor() if isinstance(part, DTensor) else part
        return whole.cpu() if self.rank == 0 else whole

    def whole_of(self, part: Tensor, like: Tensor) -> Tensor:
        if isinstance(like, DTensor) and not isinstance(part, DTensor):
            cut = {"shape": like.shape, "stride": like.stride()}
            part = DTensor.from_local(part, like.device_mesh, like.placements, **cut)
        return part.to(self.device).full_tensor() if isinstance(part, DTensor) else part

    def put(self, target: Tensor, like: Tensor, full: Tensor) -> None:
        if isinstance(like, DTensor):
            # Every rank has read the whole tensor and keeps its part: nothing is sent.
            mesh, placements = like.device_mesh, like.placements
            full = distribute_tensor(full.to(self.device), mesh, placements, src_data_rank=None).to_local()
        local(target).copy_(full)

    def shell(self) -> nn.Module:
        with torch.device("meta"):
            shell = self.model_class(self.model.config)
        if getattr(self.model, "generation_config", None) is not None:
            shell.generation_config = self.model.generation_config
        return shell

    def parts(self) -> Iterator[tuple[str, str, Tensor]]:
        for name, p in self.parameters.items():
            places = [f"{dimension} {self.mesh.get_local_rank(dimension)}" for dimension in cut_over(self.whole[name])]
            yield name, ", ".join(places) or "whole", p

    def held(self) -> dict[str, int]:
        """AdamW in float32 over N shards: 4, 4 and 8 bytes a parameter, over N.

        As ZeRO's stage 3 (Rajbhandari et al. 2020, section 5.3) and FSDP (Zhao et al. 2023, section 3.2.1). A group of
        T tensor ranks divides the matrices that its plan names by T besides (Shoeybi et al. 2019), and nothing else.
        """
        return {
            "parameters": stored(local(p.detach()) for p in self.model.parameters()),
            "gradients": stored(self.gradients()),
            "optimizer": stored(value for state in self.optimizer.state.values() for value in state.values()),
        }


def quiet() -> None:
    """Keep warnings back that say nothing about this code: no output is changed in place, whole tensors are rare."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


def read_plugin() -> "FullyShardedDataParallelPlugin":
    """What the launcher passed on of `fsdp_config`.

    Raises:
        UserError: it asks for what is not supported.
    """
    from accelerate import FullyShardedDataParallelPlugin

    if os.environ.get("FSDP_VERSION", "1") != "2":
        raise UserError("fsdp_config: fsdp_version: 1, which is also the default, is not supported; write 2.")
    try:
        plugin = FullyShardedDataParallelPlugin()
    except (ValueError, KeyError, RuntimeError) as error:
        raise UserError(f"fsdp_config: {error}") from error
    problems = []
    if plugin.activation_checkpointing:
        problems.append(
            "fsdp_config: fsdp_activation_checkpointing has no effect here; pass --gradient_checkpointing to the task."
        )
    if os.environ.get("FSDP_AUTO_WRAP_POLICY", BY_BLOCK).upper() != BY_BLOCK:
        problems.append(f"fsdp_config: fsdp_auto_wrap_policy: only {BY_BLOCK} is supported; write that, or remove it.")
    if plugin.ignored_modules:
        problems.append("fsdp_config: fsdp_ignored_modules is not supported: the whole model is trained.")
    raise_all(problems)
    return plugin


def mesh_sizes(world: int) -> tuple[int, int, int]:
    """Replicas, shards and tensor ranks, of which the launcher passed on `parallelism_config`, else shards only.

    Raises:
        UserError: their product is not the number of processes, or the config asks for another kind of parallelism.
    """
    from accelerate.parallelism_config import ParallelismConfig

    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG", "false").lower() != "true":
        return 1, world, 1
    try:
        config = ParallelismConfig()
    except ValueError as error:
        raise UserError(f"parallelism_config: {error}") from error
    if config.cp_size > 1 or config.sp_size > 1:
        raise UserError("parallelism_config: context and sequence parallelism (cp_size, sp_size) are not supported.")
    sizes = config.dp_replicate_size, config.dp_shard_size, config.tp_size
    if config.total_size != world:
        raise UserError(
            f"parallelism_config: dp_replicate_size {sizes[0]} x dp_shard_size {sizes[1]} x tp_size {sizes[2]} = "
            f"{config.total_size}, but there are {world} processes. Write sizes whose product is {world}."
        )
    return sizes


def wrapped_classes(model: nn.Module, names: Iterable[str] | None) -> set[type[nn.Module]]:
    """The classes of these names in the model; without names those of its blocks."""
    if not names:
        return {type(block) for block in blocks(model)[1]}
    known = {type(module).__name__: type(module) for module in model.modules()}
    names = [name.strip() for name in names]
    missing = [name for name in names if name not in known]
    if missing:
        classes = sorted({type(block).__name__ for block in blocks(model)[1]})
        raise UserError(
            f"fsdp_transformer_layer_cls_to_wrap: {type(model).__name__} has no {', '.join(missing)}."
            f"{nearest(missing[0], known)} Its blocks are of class {', '.join(classes)}: leave the key out."
        )
    return {known[name] for name in names}


def local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def cut_over(tensor: Tensor) -> tuple[str, ...]:
    """The dimensions of the mesh over which a tensor is cut; none where each rank has all of it."""
    if not isinstance(tensor, DTensor):
        return ()
    names = tensor.device_mesh.mesh_dim_names
    return tuple(name for name, placement in zip(names, tensor.placements) if not placement.is_replicate())
