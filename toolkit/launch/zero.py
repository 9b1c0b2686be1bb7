"""The rules of `toolkit check` for DeepSpeed ZeRO: its section of the yaml, and its own json."""

import importlib.util
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, nearest
from toolkit.launch.config import Config, read_config

BATCH = "the step is defined by the task: pass --global_batch_size to the task script"
CLIPPING = "clipping is defined by the task: pass --max_grad_norm to the task script"
# Keys of the yaml that accelerate does not read beside deepspeed_config_file (`DeepSpeedPlugin`).
NOT_BESIDE_JSON = (
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero3_save_16bit_model",
)
# Keys of the yaml that nothing here reads.
UNUSED = {
    "zero3_save_16bit_model": "the model is always saved whole, in float32",
    "deepspeed_hostfile": "only launchers other than torchrun read it",
    "deepspeed_exclusion_filter": "only launchers other than torchrun read it",
    "deepspeed_inclusion_filter": "only launchers other than torchrun read it",
    "deepspeed_moe_layer_cls_names": "mixtures of experts are treated as any other layer",
}
# Keys of the json that are checked one by one, and those that change how fast and how talkative the engine is.
JSON_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
JSON_CHECKED = (*JSON_BATCH, "gradient_clipping", "bf16", "fp16", "zero_force_ds_cpu_optimizer", "zero_optimization")
JSON_HARMLESS = (
    "steps_per_print",
    "wall_clock_breakdown",
    "memory_breakdown",
    "comms_logger",
    "flops_profiler",
    "zero_allow_untested_optimizer",
)
JSON_ELSEWHERE = {
    "optimizer": "the optimizer is the task's: --optim, --learning_rate, --weight_decay; remove the section",
    "scheduler": "the schedule is the task's: --lr_scheduler_type, --warmup_steps; remove the section",
    "activation_checkpointing": "pass --gradient_checkpointing to the task script; remove the section",
}


def settings(config: Config) -> tuple[Any, str, str]:
    """ZeRO's stage, and the devices that hold optimizer and parameters (none | cpu | …), from yaml or json."""
    if json_name(config):
        try:
            return _json_settings(read_config(json_name(config)))
        except UserError:
            return None, "none", "none"  # reported by `json_file`
    find = config.find
    return (
        find("deepspeed_config.zero_stage"),
        str(find("deepspeed_config.offload_optimizer_device") or "none").lower(),
        str(find("deepspeed_config.offload_param_device") or "none").lower(),
    )


def name(config: Config) -> str:
    """`ZeRO-2` or `ZeRO-3 with CPU offload`."""
    stage, *devices = settings(config)
    return f"ZeRO-{stage}" + " with CPU offload" * ("cpu" in devices)


def json_name(config: Config) -> str | None:
    """The DeepSpeed json that the yaml names."""
    value = config.find("deepspeed_config.deepspeed_config_file")
    return None if value in (None, "none") else str(value)


def section(config: Config) -> Iterator[str]:
    """`deepspeed_config` of the yaml."""
    if config.kind != "DEEPSPEED":
        return
    if importlib.util.find_spec("deepspeed") is None:
        yield f"{config.at('distributed_type')}: DeepSpeed is not installed: pip install deepspeed (on Linux)."
    for key, why in UNUSED.items():
        if str(config.find(f"deepspeed_config.{key}")).lower() not in ("none", "false"):
            yield f"{config.at(f'deepspeed_config.{key}')}: has no effect here ({why}); remove it."
    yield from _multinode(config)
    if json_name(config):
        for key in NOT_BESIDE_JSON:
            if config.find(f"deepspeed_config.{key}") is not None:
                yield f"{config.at(f'deepspeed_config.{key}')}: not read beside deepspeed_config_file; remove it here."
        if "mixed_precision" in config.lines:
            yield (
                f"{config.at('mixed_precision')}: accelerate refuses it beside deepspeed_config_file; remove it"
                + ("." if config.precision == "no" else f", and pass --mixed_precision {config.precision} to launch.")
            )
        return
    stage, optimizer, parameters = settings(config)
    at = config.at("deepspeed_config.zero_stage")
    if stage is None:
        yield f"{at}: missing; accelerate would take 2. Write zero_stage: 1, 2 or 3."
    else:
        yield from _stage(at, stage)
    yield from _offload(config.at("deepspeed_config.offload_optimizer_device"), optimizer, stage, (2, 3))
    yield from _offload(config.at("deepspeed_config.offload_param_device"), parameters, stage, (3,))


def _multinode(config: Config) -> Iterator[str]:
    key = "deepspeed_config.deepspeed_multinode_launcher"
    launcher = config.find(key)
    if launcher == "standard" or (launcher is None and config.get("num_machines", int, 1) == 1):
        return
    said = "missing, which means pdsh" if launcher is None else "not supported"
    yield f"{config.at(key)}: {said}; write standard, with which the processes come through torchrun."


def _stage(at: str, stage: Any) -> Iterator[str]:
    if stage == 0:
        yield f"{at}: stage 0 shards nothing, DeepSpeed would copy the whole model. Use multi_gpu.yaml, or 1, 2 or 3."
    elif isinstance(stage, bool) or stage not in (1, 2, 3):
        yield f"{at}: expected 1, 2 or 3."


def _offload(at: str, device: str, stage: Any, stages: tuple[int, ...]) -> Iterator[str]:
    if device == "nvme":
        yield f"{at}: offload to nvme is not supported; write cpu or none."
    elif device not in ("none", "cpu"):
        yield f"{at}: expected none or cpu.{nearest(device, ('none', 'cpu'))}"
    elif device == "cpu" and stage not in stages:
        yield f"{at}: needs stage {' or '.join(map(str, stages))}."


def json_file(config: Config, args: Any) -> Iterator[str]:
    """The json that the yaml names: it must leave the step alone, and be read by DeepSpeed key by key."""
    if config.kind != "DEEPSPEED" or not json_name(config):
        return
    path = Path(json_name(config))
    if path.suffix != ".json":
        yield f"{config.at('deepspeed_config.deepspeed_config_file')}: expected a file that ends in .json."
        return
    try:
        read = read_config(path)
    except UserError as error:
        yield f"{config.at('deepspeed_config.deepspeed_config_file')}: {error}"
        return
    yield from _json_step(read, args, config.precision)
    yield from _json_compiler(read)
    for key in read.values:
        if key in JSON_ELSEWHERE:
            yield f"{read.at(key)}: {JSON_ELSEWHERE[key]}."
        elif key not in (*JSON_CHECKED, *JSON_HARMLESS):
            yield f"{read.at(key)}: not used here, or it would change the step; remove it.{nearest(key, JSON_CHECKED)}"
    yield from _json_zero(read)


def _json_step(read: Config, args: Any, precision: str) -> Iterator[str]:
    """Numbers and precision, all of which are decided elsewhere."""
    for key in JSON_BATCH:
        value = read.values.get(key)
        if value not in (None, "auto") and not (key == "gradient_accumulation_steps" and value == 1):
            yield f"{read.at(key)}: {BATCH}, and remove the key here."
    value = read.values.get("gradient_clipping")
    if args is not None and value not in (None, "auto", args.max_grad_norm):
        yield f"{read.at('gradient_clipping')}: contradicts --max_grad_norm {args.max_grad_norm}; {CLIPPING}."
    for key in ("bf16", "fp16"):
        if key != precision and read.find(f"{key}.enabled") not in (None, False, "auto"):
            yield (
                f"{read.at(f'{key}.enabled')}: contradicts mixed precision {precision}. Remove the section, and pass "
                f"--mixed_precision {key} to accelerate launch if you mean it."
            )


def _json_compiler(read: Config) -> Iterator[str]:
    """DeepSpeed's own optimizer for the CPU is the only op that is built, with the compiler that torch asks for."""
    compiler = os.environ.get("CXX", "c++")
    if (
        read.values.get("zero_force_ds_cpu_optimizer") is True
        and _json_settings(read)[1] == "cpu"
        and not shutil.which(compiler)
    ):
        yield (
            f"{read.at('zero_force_ds_cpu_optimizer')}: this optimizer is built at its first use, and there is no C++ "
            f"compiler ({compiler}). Install g++, or write false: torch's AdamW gives the same training."
        )


def _json_settings(read: Config) -> tuple[Any, str, str]:
    devices = [read.find(f"zero_optimization.offload_{what}.device") for what in ("optimizer", "param")]
    optimizer, parameters = (str(device or "none").lower() for device in devices)
    return read.find("zero_optimization.stage"), optimizer, parameters


def _json_zero(read: Config) -> Iterator[str]:
    zero = read.values.get("zero_optimization")
    if not isinstance(zero, dict):
        yield f'{read.at("zero_optimization")}: missing; write {{"stage": 1, 2 or 3}}.'
        return
    stage, optimizer, parameters = _json_settings(read)
    at = read.at("zero_optimization.stage")
    if stage is None:
        yield f"{at}: missing, which means 0. Write 1, 2 or 3."
    else:
        yield from _stage(at, stage)
    yield from _offload(read.at("zero_optimization.offload_optimizer"), optimizer, stage, (2, 3))
    yield from _offload(read.at("zero_optimization.offload_param"), parameters, stage, (3,))
    known = _zero_names()
    for key in zero:
        place = read.at(f"zero_optimization.{key}")
        if known and key not in known:
            yield f"{place}: DeepSpeed has no such key, or not any more.{nearest(key, known)}"
        elif key.startswith("zero_quantized") and zero[key] is not False:
            yield f"{place}: rounds what travels, which changes the training; remove it."


def _zero_names() -> set[str]:
    """The keys that DeepSpeed takes below zero_optimization; empty where it is not installed."""
    logging.disable(logging.WARNING)  # what it says about devices is nothing to be warned of
    try:
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    except ImportError:
        return set()
    finally:
        logging.disable(logging.NOTSET)
    fields = DeepSpeedZeroConfig.model_fields.items()
    return {field.alias or name for name, field in fields if not (field.json_schema_extra or {}).get("deprecated")}
