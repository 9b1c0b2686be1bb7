"""DeepSpeed ZeRO: optimizer state (1), gradients (2) and parameters (3) split over data ranks.

ZeRO: Memory Optimizations Toward Training Trillion Parameter Models (Rajbhandari et al. 2020); with offload
ZeRO-Offload (Ren et al. 2021).
"""

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit.errors import UserError, raise_all
from toolkit.launch.environment import World
from toolkit.report.console import say
from toolkit.strategy.base import OptimizerRule, Size, Update, stored
from toolkit.strategy.portable import Wanted, everything
from toolkit.strategy.zero_state import ZeROState
from toolkit.task import Batch, Task

LARGEST_BUCKET = 50_000_000  # elements of the buffer in which gradients are summed: 200 MB


class ZeRO(ZeROState):
    """Data ranks that each own a part of the state.

    The engine averages gradients over ranks, takes their norm, clips, and steps unless the norm is not finite.
    Precision is ours, as everywhere: autocast inside of what the engine calls, which so sees float32 alone, and the
    loss scale. (Its own bf16 and fp16 round the pretrained weights; its `torch_autocast` sums gradients in bf16.)
    """

    alone = False

    def __init__(self, world: World) -> None:
        start(world.device)
        super().__init__(world)
        self.settings = read_settings(world.precision)
        self.stage = self.settings["zero_optimization"]["stage"]
        self.offload = bool(offloaded(self.settings))
        self.name = f"ZeRO-{self.stage}" + " with CPU offload" * self.offload

    def build(self, task: Task, rule: OptimizerRule, probe: Batch) -> None:
        self.task, self.rule, self.probe = task, rule, probe
        # ZeRO-3: only the first rank reads the weights, into main memory, as one process does; so a fresh head is
        # the same under any strategy. The others learn the shapes.
        split = self.stage == 3
        self.model = task.model(dtype=torch.float32, **({"device_map": "meta"} if split and self.rank else {}))
        if not split:
            self.model.to(self.device)
        self.freeze_unused(probe)
        self.size = Size.of(self.model)
        config = engine_config(self.settings, rule, self.size)
        if split:
            deal(self.model, config, self.device)
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        # Casts are kept over all micro-batches of a step, but not of weights that come and go.
        self.whole = Autocast(self.model, self.device.type, self.precision.dtype, cache=not split)
        self.forward = make_engine(self.whole, make_optimizer(rule, self.parameters, self.settings), config)
        self.optimizer = self.forward.optimizer
        self.model.train()

    def unused(self, probe: Batch, device: torch.device) -> list[str]:
        if self.stage < 3:
            return super().unused(probe, device)
        found = [super().unused(probe, torch.device("cpu")) if self.rank == 0 else []]
        dist.broadcast_object_list(found, group=self.control)
        return found[0]

    def synchronised(self, last: bool) -> AbstractContextManager:
        self.forward.set_gradient_accumulation_boundary(last)
        if self.precision.scaled:
            self.optimizer.override_loss_scale(self.precision.factor)
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        # The engine looks at gradients only. Those of a loss that is not finite are made so too (0 x inf = nan).
        loss = loss * (1 + 0 * loss.detach())
        with torch.autocast(self.device.type, enabled=False):
            self.forward.backward(loss)

    def update(self, lr: float, loss: Tensor) -> Update:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.forward.step()
        applied = self.forward.was_step_applied()
        self.updates += applied
        self.precision.adapt(applied)
        norm = torch.as_tensor(self.forward.get_global_grad_norm(), dtype=loss.dtype, device=loss.device)
        loss_value, norm_value = torch.stack([loss, norm]).tolist()
        return Update(loss_value, norm_value, applied)

    def infer(self, batch: Batch) -> Mapping[str, Tensor]:
        return self.whole(**batch.to(self.device).inputs)

    def weights(self, wanted: Wanted = everything) -> Iterator[tuple[str, Tensor | None]]:
        if self.stage < 3:
            yield from super().weights(wanted)
            return
        from deepspeed import zero

        full: dict[int, Tensor] = {}  # tied ones come once
        for name, p in self.model.state_dict(keep_vars=True).items():
            if not wanted(name):
                continue
            if id(p) not in full:
                with zero.GatheredParameters([p]):
                    full[id(p)] = p.detach().cpu().clone() if self.rank == 0 else None
            yield name, full[id(p)]

    def parts(self) -> Iterator[tuple[str, str, Tensor]]:
        for name, p in self.parameters.items():
            yield (name, f"of rank {self.rank}", p.ds_tensor) if self.stage == 3 else (name, "whole", p)

    def held(self) -> dict[str, int]:
        """Float32 with AdamW on N ranks, bytes a parameter; offloaded state is in main memory.

        | stage | parameters | gradients | optimizer |
        |---|---|---|---|
        | 1 | 4 | 4 / N (4 in the backward passes) | 12 / N |
        | 2 | 4 | 4 / N | 12 / N |
        | 3 | 4 / N | 4 / N | 12 / N |
        | 2, optimizer offloaded | 4 | 4 / N, with several micro-batches 8 / N | 16 / N |
        | 3, optimizer offloaded | 4 / N | 8 / N | 12 / N |

        That is Rajbhandari et al. 2020, section 5, with 4 + 4 + 8 bytes. The 4 / N more are a copy of the parameters
        that the engine makes for the optimizer though both are float32, and copies of what moves to and from main
        memory. In stages 1 and 2 a gradient stays whole on every rank that owns a part of it. Stage 3 leaves
        parameters of up to 100,000 elements whole. Not counted: the buffer in which gradients are summed (4 bytes a
        parameter, at most 200 MB), and with offload two of the largest parameter's size.
        """
        zero = self.optimizer
        masters = zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups
        parameters = [*self.model.parameters(), *(getattr(p, "ds_tensor", None) for p in self.model.parameters())]
        state = [t for of in zero.optimizer.state.values() for t in of.values() if torch.is_tensor(t)]
        state += [*masters, *getattr(zero, "param_buffer_of_bit16_for_cpu_offload_groups", [])]
        gradients = [p.grad for p in [*self.model.parameters(), *masters]]
        gradients += [g for group in zero.averaged_gradients.values() for g in group or []]
        gradients += [getattr(zero, "grad_partitions_flat_buffer", None)]
        gradients += getattr(zero, "accumulated_grads_in_cpu", {}).values()
        counted, with_state = stored(parameters), stored([*parameters, *state])
        return {
            "parameters": counted,
            "gradients": stored([*parameters, *state, *gradients]) - with_state,
            "optimizer": with_state - counted,
        }


class Autocast(nn.Module):
    """The model under autocast: the engine turns off what is around its own forward."""

    def __init__(self, model: nn.Module, device: str, dtype: torch.dtype | None, cache: bool) -> None:
        super().__init__()
        self.model = model
        self.how = {"device_type": device, "dtype": dtype, "enabled": dtype is not None, "cache_enabled": cache}

    def forward(self, **inputs: Tensor) -> Any:
        with torch.autocast(**self.how):
            return self.model(**inputs)


def start(device: torch.device) -> None:
    """Connect deepspeed to the process group, or make one of a single process; and keep it silent."""
    if device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise UserError(f"DeepSpeed cannot be used ({error}): pip install deepspeed, on Linux.") from error
    deepspeed.utils.logger.setLevel("ERROR")
    warnings.filterwarnings("ignore", "`torch.distributed.*` is deprecated", FutureWarning)  # names that it calls
    if device.type == "cuda":
        deepspeed.init_distributed("nccl")
        return
    # Else it compiles an all-reduce for the processes of one machine. This is a rehearsal: gloo does.
    deepspeed.ops.__compatible_ops__ = {}
    deepspeed.init_distributed("gloo")
    del deepspeed.ops.__compatible_ops__  # found out anew when asked for


def make_engine(model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any]) -> Any:
    """DeepSpeed's engine; raises a `UserError` where it does not take the settings."""
    import deepspeed

    try:
        return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    except (AssertionError, ValueError) as error:
        raise UserError(f"DeepSpeed does not take its settings: {' '.join(str(error).split())}") from error


def deal(model: nn.Module, config: dict[str, Any], device: torch.device) -> None:
    """Split the parameters of the first rank's model over all ranks, in place and one by one.

    On other ranks the model may be on the meta device.
    """
    from deepspeed import zero

    made: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay tied
    for module in reversed(list(model.modules())):  # parts first: what is split already is left alone
        for name, p in list(module.named_parameters(recurse=False)):
            if p.is_meta:
                if p not in made:
                    made[p] = nn.Parameter(torch.empty_like(p, device=device), p.requires_grad)
                setattr(module, name, made[p])
        if next(module.parameters(recurse=False), None) is not None:
            zero.Init(module=module, config_dict_or_path=config)
        for name, buffer in list(module.named_buffers(recurse=False)):
            buffer = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
            dist.broadcast(buffer, src=0)
            setattr(module, name, buffer)


def read_settings(precision: str) -> dict[str, Any]:
    """DeepSpeed's settings from the accelerate config, or from the json that it names.

    Raises:
        UserError: they cannot be read, ask for what is not supported, or define the step, which is the task's.
    """
    from accelerate import DeepSpeedPlugin

    try:
        settings = deepcopy(DeepSpeedPlugin().deepspeed_config)
    except (ValueError, OSError) as error:
        raise UserError(f"the DeepSpeed settings cannot be read: {' '.join(str(error).split())}") from error
    zero = settings.get("zero_optimization") or {}
    stage, problems = zero.get("stage"), []
    if stage not in (1, 2, 3):
        problems.append(f"DeepSpeed: ZeRO stage {stage} is not one of 1, 2 and 3. Without a stage, use multi_gpu.yaml.")
    for part, stages in (("optimizer", (2, 3)), ("param", (3,))):
        where = (zero.get(f"offload_{part}") or {}).get("device") or "none"
        if where not in ("none", "cpu"):
            problems.append(f"DeepSpeed: offload_{part}_device: {where} is not supported; use none or cpu.")
        elif where == "cpu" and stage not in stages:
            problems.append(f"DeepSpeed: offload_{part}_device: cpu needs ZeRO stage {' or '.join(map(str, stages))}.")
    owned = {
        "train_batch_size": "--global_batch_size",
        "train_micro_batch_size_per_gpu": "--per_device_train_batch_size",
        "optimizer": "--optim, --learning_rate and --weight_decay",
        "scheduler": "--lr_scheduler_type and --warmup_steps",
    }
    problems += [
        f"DeepSpeed: {key} is set, but a step is the task's: leave it out there and use {flags}."
        for key, flags in owned.items()
        if settings.pop(key, "auto") != "auto"
    ]
    if settings.get("gradient_accumulation_steps", "auto") not in ("auto", 1):
        problems.append("DeepSpeed: gradient_accumulation_steps is set, but a step is the task's: leave it out there.")
    for name in ("bf16", "fp16", "torch_autocast"):
        enabled = (settings.pop(name, None) or {}).get("enabled", "auto")
        if enabled not in ("auto", False) and name != precision:
            problems.append(
                f"DeepSpeed: {name} is enabled, but the accelerate config says {precision}. Remove the section and "
                "write mixed_precision: bf16 (beside a DeepSpeed json: accelerate launch --mixed_precision bf16)."
            )
    raise_all(problems)
    return set_values(settings)


def offloaded(settings: dict[str, Any]) -> list[str]:
    """What lives in main memory: optimizer, param."""
    zero = settings["zero_optimization"]
    return [part for part in ("optimizer", "param") if (zero.get(f"offload_{part}") or {}).get("device") == "cpu"]


def engine_config(settings: dict[str, Any], rule: OptimizerRule, size: Size) -> dict[str, Any]:
    """The settings with the step written into them.

    Raises:
        UserError: they ask for another clipping than the task.
    """
    clipping = settings.get("gradient_clipping", "auto")
    if clipping not in ("auto", rule.max_grad_norm):
        raise UserError(
            f"DeepSpeed: gradient_clipping is {clipping}, but --max_grad_norm is {rule.max_grad_norm}. A step is the "
            "task's: leave gradient_clipping out of the accelerate config or DeepSpeed json."
        )
    bucket = max(1, min(size.trainable_parameters, LARGEST_BUCKET))
    return {
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW does as well, and needs no compiler
        **settings,
        "zero_optimization": {"reduce_bucket_size": bucket, **set_values(settings["zero_optimization"])},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": rule.max_grad_norm,
        "zero_allow_untested_optimizer": True,  # SGD
    }


def set_values(section: dict[str, Any]) -> dict[str, Any]:
    """Without what is left to the engine's defaults."""
    return {key: value for key, value in section.items() if value != "auto"}


def make_optimizer(
    rule: OptimizerRule, parameters: Mapping[str, nn.Parameter], settings: dict[str, Any]
) -> torch.optim.Optimizer:
    """torch's optimizer, or DeepSpeed's for the CPU where the settings ask for it.

    Raises:
        UserError: that one cannot be built, or another process seems to be building it.
    """
    if not (
        settings.get("zero_force_ds_cpu_optimizer") and "optimizer" in offloaded(settings) and rule.name == "adamw"
    ):
        return rule.make(parameters)
    check_build_lock("cpu_adam")
    say("DeepSpeed builds its CPU optimizer at first use, which takes minutes")
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    try:
        return DeepSpeedCPUAdam(rule.groups(parameters), lr=0.0, betas=rule.betas, eps=rule.epsilon, adamw_mode=True)
    except (RuntimeError, ImportError, OSError) as error:
        raise UserError(
            f"DeepSpeed's CPU optimizer cannot be built: {str(error).splitlines()[0]}. Leave out "
            "zero_force_ds_cpu_optimizer: torch's AdamW gives the same training."
        ) from error


def check_build_lock(op: str) -> None:
    """Raise a `UserError` where a build that began before this process holds the lock on an op.

    torch.utils.cpp_extension waits for the lock for ever, and a build that was killed leaves it behind.
    """
    import psutil
    from torch.utils.cpp_extension import get_default_build_root

    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    started = psutil.Process().create_time()
    for lock in [*folder.glob(f"{op}/lock"), *folder.glob(f"*/{op}/lock")]:
        if lock.stat().st_mtime < started:
            raise UserError(
                f"{lock.parent} is locked by a build that began before this run. Where none is running, it was killed "
                "and left the lock behind: remove that folder and start again."
            )
