"""The rules of `toolkit check`, beyond the spelling of keys.

Each rule is a generator of messages, so that all problems are found at once. What is said about the launcher
was tried with accelerate 1.15.
"""

import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any

from toolkit.arguments import changed
from toolkit.errors import nearest
from toolkit.launch.config import Config
from toolkit.launch.machine import Machine

SUPPORTED = {"NO", "MULTI_GPU", "DEEPSPEED", "FSDP"}  # distributed types that have a strategy
MULTI_PROCESS = {"MULTI_GPU", "DEEPSPEED", "FSDP"}  # started through torchrun, one process a GPU
# Sections that the launcher reads under one distributed type only.
SECTION_TYPES = {
    "deepspeed_config": "DEEPSPEED",
    "fsdp_config": "FSDP",
    "parallelism_config": "FSDP",
    "megatron_lm_config": "MEGATRON_LM",
    "mpirun_config": "MULTI_CPU",
}
# Variables that the strategies read, and that the launcher passes on where the config leaves out the key.
PASSED_ON = {
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": "deepspeed_config.deepspeed_config_file",
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "deepspeed_config.offload_optimizer_device",
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "deepspeed_config.offload_param_device",
    "ACCELERATE_GRADIENT_CLIPPING": "deepspeed_config.gradient_clipping",
    "FSDP_IGNORED_MODULES": "fsdp_config.fsdp_ignored_modules",
    "FSDP_TRANSFORMER_CLS_TO_WRAP": "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
}


def strategy(config: Config) -> Iterator[str]:
    """Distributed types without a strategy, and sections that their type does not read."""
    from accelerate.utils import DistributedType

    kind, at = config.kind, config.at("distributed_type")
    supported = ", ".join(sorted(SUPPORTED))
    if config.get("compute_environment", str, "LOCAL_MACHINE") != "LOCAL_MACHINE":
        yield f"{config.at('compute_environment')}: not supported; write LOCAL_MACHINE."
    if "distributed_type" not in config.values:
        yield f"{at}: missing; accelerate needs it. Supported: {supported}."
    elif kind == "MULTI_CPU":
        yield (
            f"{at}: accelerate launch starts one process for MULTI_CPU, whatever num_processes says. "
            "Use multi_gpu.yaml (distributed_type: MULTI_GPU): on a machine without GPUs it starts the "
            "processes on the CPU."
        )
    elif kind and kind not in SUPPORTED:
        known = [member.value for member in DistributedType]
        if kind in known:
            yield f"{at}: this strategy is not supported. Supported: {supported}."
        else:
            yield f"{at}: accelerate has no such type. Supported: {supported}.{nearest(kind.upper(), known)}"
    if kind in MULTI_PROCESS and config.on_cpu:
        yield (
            f"{config.at('use_cpu')}: contradicts distributed_type: {kind}, with which the launcher ignores "
            "it. Remove it: without GPUs the same config runs on the CPU."
        )
    for section, wanted in SECTION_TYPES.items():
        if config.values.get(section) and kind in SUPPORTED and kind != wanted:
            yield (
                f"{config.at(section)}: has no effect with distributed_type: {kind}; remove it, or write "
                f"distributed_type: {wanted}."
            )
    for key in ("dynamo_backend", "dynamo_config.dynamo_backend", "dynamo_config.backend"):
        backend = config.find(key)
        if isinstance(backend, str) and backend.lower() != "no":
            yield f"{config.at(key)}: torch.compile by the accelerate config is not supported; remove it."


def processes(config: Config, machine: Machine) -> Iterator[str]:
    """The number of processes against the distributed type and the GPUs."""
    kind, at = config.kind, config.at("num_processes")
    total, machines = config.values.get("num_processes"), config.get("num_machines", int, 1)
    if total is None or total == -1:
        if kind != "NO" or total == -1:
            yield f"{at}: missing; accelerate does not start. Write the number of processes of all machines."
        return
    if not isinstance(total, int) or isinstance(total, bool):
        return  # reported as a wrong type
    if total < 1 or machines < 1:
        yield f"{at}: expected at least one process on at least one machine."
        return
    if kind == "NO" and total > 1:
        yield (
            f"{at}: distributed_type: NO starts one process, not {total}. Use multi_gpu.yaml, or write "
            "num_processes: 1."
        )
    if total % machines:
        yield f"{at}: does not divide by num_machines: {machines}; every machine starts the same number."
    ids = config.get("gpu_ids", str, "all")
    # gpu_ids replaces CUDA_VISIBLE_DEVICES in the started processes.
    visible = machine.gpus if ids == "all" else len(ids.split(","))
    if kind in MULTI_PROCESS and machine.gpus and total // machines > visible:
        devices = "unset" if machine.visible_devices is None else machine.visible_devices
        why = f"CUDA_VISIBLE_DEVICES={devices}" if ids == "all" else f"gpu_ids: {ids}"
        yield (
            f"{at}: config asks {total // machines} processes{' per machine' if machines > 1 else ''}, "
            f"{visible} GPUs visible ({why}). Pass --num_processes {visible * machines} to accelerate "
            "launch, or show it more GPUs."
        )
    if kind == "MULTI_GPU" and machines == 1 and ids != "all" and "," not in ids:
        yield f"{config.at('gpu_ids')}: the launcher refuses MULTI_GPU with one id; use single_gpu.yaml."


def machines(config: Config) -> Iterator[str]:
    """Several machines, and the port they meet at."""
    machines, rank = config.get("num_machines", int, 1), config.get("machine_rank", int, 0)
    port = config.get("main_process_port", int, None)
    if port is not None and not 0 <= port <= 65535:
        yield f"{config.at('main_process_port')}: expected a port number, or 0 for a free one."
        return
    if machines > 1:
        if config.kind == "NO":
            at = config.at("num_machines")
            yield f"{at}: distributed_type: NO is one process on one machine; use multi_gpu.yaml."
        if not config.values.get("main_process_ip"):
            yield (
                f"{config.at('main_process_ip')}: missing with num_machines: {machines}; write the address "
                "of the first machine, or pass --main_process_ip."
            )
        if not port:
            yield (
                f"{config.at('main_process_port')}: all machines must name the same port with num_machines: "
                f"{machines}; write one, or pass --main_process_port."
            )
        if not 0 <= rank < machines:
            at = config.at("machine_rank")
            yield f"{at}: expected 0 to {machines - 1}, a different one on each machine."
    started = "LOCAL_RANK" in os.environ  # by a launcher: the port is in use by this very job
    if port and config.kind in MULTI_PROCESS and rank == 0 and not started and _is_bound(port):
        yield (
            f"{config.at('main_process_port')}: the port is in use on this machine. Pass another with "
            "--main_process_port" + (" on every machine." if machines > 1 else ", or write 0: a free one is taken.")
        )


def _is_bound(port: int) -> bool:
    with socket.socket() as probe:
        # A port of a run that has just ended is free again.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False


def precision(config: Config, machine: Machine) -> Iterator[str]:
    """The precision against the hardware."""
    from accelerate.utils import PrecisionType

    name, at = config.precision, config.at("mixed_precision")
    # The CPU computes in everything but fp8, slower or faster.
    bf16, fp16 = machine.bf16 or config.on_cpu, machine.fp16 or config.on_cpu
    device = machine.gpu_names[0] if machine.gpu_names else "MPS" if machine.mps else "this device"
    known = [kind for kind in PrecisionType.list() if kind != "fp8"]
    if name == "fp8":
        yield f"{at}: fp8 is not supported; use bf16."
    elif name not in known:
        yield f"{at}: expected one of {', '.join(known)}.{nearest(name, known)}"
    elif name == "bf16" and not bf16:
        other = "fp16, or fp32 (mixed_precision: 'no')" if fp16 else "mixed_precision: 'no'"
        yield f"{at}: {device} does not compute in bf16; use {other}."
    elif name == "fp16" and not fp16:
        yield f"{at}: {device} is not supported with fp16; use mixed_precision: 'no'."


def environment(config: Config, machine: Machine, environ: Mapping[str, str]) -> Iterator[str]:
    """Variables that say something else than the config: one of the two would be silently ignored."""
    kind = config.kind
    expected: dict[str, tuple[str, str]] = {
        "ACCELERATE_MIXED_PRECISION": ("mixed_precision", config.precision),
        "ACCELERATE_USE_DEEPSPEED": ("distributed_type", str(kind == "DEEPSPEED")),
        "ACCELERATE_USE_FSDP": ("distributed_type", str(kind == "FSDP")),
        "ACCELERATE_USE_MEGATRON_LM": ("distributed_type", str(kind == "MEGATRON_LM")),
        "ACCELERATE_USE_PARALLELISM_CONFIG": (
            "parallelism_config",
            str(bool(config.values.get("parallelism_config"))),
        ),
        "WORLD_SIZE": ("num_processes", str(config.get("num_processes", int, 1))),
    }
    if machine.gpus:  # without GPUs both ways end on the CPU
        expected["ACCELERATE_USE_CPU"] = ("use_cpu", str(config.on_cpu))
        if config.get("gpu_ids", str, "all") != "all":
            expected["CUDA_VISIBLE_DEVICES"] = ("gpu_ids", config.values["gpu_ids"])
    for variable, (key, value) in expected.items():
        said = environ.get(variable)
        if said is not None and _plain(said) != _plain(value):
            yield f"{config.at(key)}: the environment says {variable}={said}; unset it, or change the config."
    for variable, key in PASSED_ON.items():
        if SECTION_TYPES[key.split(".")[0]] == kind and variable in environ and config.find(key) is None:
            yield f"{config.at(key)}: not there, but the environment says {variable}={environ[variable]}; unset it."


def _plain(value: str) -> str:
    return {"1": "true", "0": "false", "yes": "true"}.get(value.lower(), value.lower().replace(" ", ""))


def step(config: Config, args: Any, environ: Mapping[str, str]) -> Iterator[str]:
    """The step is the task's: no number of the config may change it."""
    accumulation = (
        "the step is defined by the task: pass --global_batch_size, or --per_device_train_batch_size with "
        "--gradient_accumulation_steps, to the task script"
    )
    clipping = "clipping is defined by the task: pass --max_grad_norm to the task script"
    for name, text in (("gradient_accumulation_steps", accumulation), ("gradient_clipping", clipping)):
        if name in config.values:
            yield f"{config.at(name)}: {text}; accelerate has no such top-level key."
    key = "deepspeed_config.gradient_accumulation_steps"
    if str(config.find(key) or 1) not in ("1", "auto"):
        yield f"{config.at(key)}: {accumulation}, and write 1 here."
    key = "deepspeed_config.gradient_clipping"
    if args is not None and config.find(key) not in (None, "auto", args.max_grad_norm):
        yield (
            f"{config.at(key)}: contradicts --max_grad_norm {args.max_grad_norm}; {clipping}, and remove the key here."
        )
    variable = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"
    if environ.get(variable, "1") != "1":
        yield f"environment: {variable}={environ[variable]}: {accumulation}, and unset the variable."


def flags(config: Config, args: Any, known: bool) -> Iterator[str]:
    """Task flags that belong to the config, or must not be used with it."""
    needed = [flag for flag in config.flags if flag.startswith("--")] if known and args is not None else []
    missing = [flag for flag in needed if flag.removeprefix("--") not in changed(args)]
    if missing:
        yield (
            f"{config.path}: needs the task flags `{' '.join(config.flags)}`; missing: {', '.join(missing)}. "
            "Add them behind the task script."
        )
    if getattr(args, "data_parallel", False) and config.kind in MULTI_PROCESS:
        yield (
            f"{config.at('distributed_type')}: --data_parallel is one process with all GPUs, and this config "
            "starts one process a GPU. Use data_parallel.yaml, or leave out --data_parallel (DDP is faster)."
        )
