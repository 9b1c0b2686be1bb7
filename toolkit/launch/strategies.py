"""The rules of `toolkit check` for strategies that shard or split the model, and what each is called.

Like those in rules.py: generators of messages. What is said about the launcher was tried with accelerate 1.15.
"""

import json
import math
import os
import shutil
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from toolkit.launch import zero
from toolkit.launch.config import Config, is_a
from toolkit.launch.schema import section_names

# Keys of fsdp_config that the strategy obeys.
FSDP_USED = {
    "fsdp_version",
    "fsdp_offload_params",
    "fsdp_reshard_after_forward",
    "fsdp_auto_wrap_policy",
    "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_cpu_ram_efficient_loading",
}
FSDP_INSTEAD = {
    "fsdp_activation_checkpointing": "pass --gradient_checkpointing to the task script instead",
    "fsdp_sharding_strategy": "FSDP2 has fsdp_reshard_after_forward instead",
    "fsdp_state_dict_type": "the model is always saved whole",
}
# The beginnings of what strategies are called.
SIMPLEST_FIRST = (
    *("one process", "DDP", "DataParallel", "ZeRO-1", "ZeRO-2", "FSDP2", "HSDP", "ZeRO-3"),
    *("TP", "FSDP2 x TP", "HSDP x TP", "pipeline"),
)
SIZES = ("dp_replicate", "dp_shard", "tp")
HEADS = ("num_attention_heads", "n_head", "n_heads")  # names in the config.json of different families
LAYERS = ("num_hidden_layers", "n_layer", "n_layers")


def fsdp(config: Config) -> Iterator[str]:
    """Keys of `fsdp_config`, all of which must be obeyed."""
    if config.kind != "FSDP":
        return
    at = config.at("fsdp_config.fsdp_version")
    version = fsdp_value(config, "version")
    if version is None:
        yield f"{at}: missing, which means version 1. Only version 2 is supported: write fsdp_version: 2."
    elif str(version) != "2":
        yield f"{at}: only version 2 is supported; write fsdp_version: 2."
    section = config.values.get("fsdp_config")
    known, _, _ = section_names("fsdp_config")
    for key, value in section.items() if isinstance(section, dict) else ():
        name, at = f"fsdp_{str(key).removeprefix('fsdp_')}", config.at(f"fsdp_config.{key}")
        if name in known - FSDP_USED and str(value).lower() not in ("false", "none"):
            why = f" ({FSDP_INSTEAD[name]})" if name in FSDP_INSTEAD else ""
            yield f"{at}: has no effect here{why}; remove it."
        elif name == "fsdp_cpu_ram_efficient_loading" and _is_true(value):
            yield (
                f"{at}: has no effect: every rank reads the whole model, so that a new head is the same on all. "
                "Write false."
            )
        elif name == "fsdp_auto_wrap_policy" and str(value).upper() != "TRANSFORMER_BASED_WRAP":
            yield f"{at}: expected TRANSFORMER_BASED_WRAP, which shards block by block; or remove it."
        elif name == "fsdp_transformer_layer_cls_to_wrap" and fsdp_value(config, "auto_wrap_policy") is None:
            yield f"{at}: accelerate reads it only with fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP; add that."
        elif name == "fsdp_reshard_after_forward" and str(value).lower() not in ("true", "false"):
            yield f"{at}: FSDP2 takes true (less memory) or false (less communication)."


def fsdp_value(config: Config, name: str) -> Any:
    """A key of `fsdp_config`; accelerate adds the prefix where it is missing."""
    value = config.find(f"fsdp_config.fsdp_{name}")
    return config.find(f"fsdp_config.{name}") if value is None else value


def sizes(config: Config) -> tuple[int, int, int]:
    """Replicas, shards and tensor ranks that the config asks for.

    Without a `parallelism_config` all ranks share one set of shards. A size that is left out there is 1, as the
    launcher has it.
    """
    if not config.values.get("parallelism_config"):
        return 1, config.get("num_processes", int, 1), 1
    values = [config.find(f"parallelism_config.{_size_key(name)}") for name in SIZES]
    return tuple(value if is_a(value, int) else 1 for value in values)


def _size_key(name: str) -> str:
    return f"parallelism_config_{name}_size"


def mesh(config: Config, args: Any) -> Iterator[str]:
    """The sizes of `parallelism_config` against each other, the processes and the model."""
    section = config.values.get("parallelism_config")
    if config.kind != "FSDP" or not isinstance(section, dict) or not section:
        return
    used = {_size_key(name) for name in SIZES}
    for key, value in section.items():
        at = config.at(f"parallelism_config.{key}")
        if key in used and is_a(value, int) and value < 1:
            yield f"{at}: expected 1 or more; accelerate fills in no size by itself."
        elif key in ("parallelism_config_cp_size", "parallelism_config_sp_size"):
            if value != 1:
                yield f"{at}: context and sequence parallelism are not supported; remove it."
        elif str(key).startswith(("parallelism_config_cp_", "parallelism_config_sp_")):
            yield f"{at}: has no effect here; remove it."
    replicas, shards, tensor = sizes(config)
    if min(replicas, shards, tensor) < 1:
        return
    at, processes = config.at("parallelism_config"), config.get("num_processes", int, 1)
    product = replicas * shards * tensor
    if product != processes:
        said = f"{replicas} (dp_replicate) x {shards} (dp_shard) x {tensor} (tp) = {product}"
        fitting = processes // (replicas * tensor)
        advice = f"--num_processes {product} (launch.sh: NPROC={product})"
        if fitting > 1 and processes % (replicas * tensor) == 0:
            advice += f", or write {_size_key('dp_shard')}: {fitting}"
        yield f"{at}: {said} is not num_processes: {processes}. Pass {advice}."
    if replicas > 1 and shards == 1:
        yield f"{at}: nothing is sharded with {_size_key('dp_shard')}: 1" + (
            "; accelerate refuses tensor parallelism in replicas. Use fsdp2_tensor_parallel.yaml."
            if tensor > 1
            else ", only copied. Use multi_gpu.yaml, or raise it."
        )
    if tensor > 1 and shards == 1 and _is_true(fsdp_value(config, "offload_params")):
        at = config.at("fsdp_config.fsdp_offload_params")
        yield f"{at}: only shards are offloaded, and {_size_key('dp_shard')} is 1; write false, or shard too."
    yield from _heads(config, args, tensor)


def _heads(config: Config, args: Any, tensor: int) -> Iterator[str]:
    """Tensor parallelism gives each rank whole attention heads."""
    model = model_config(args)
    heads = {"attention": _first(model, HEADS), "key/value": _first(model, ("num_key_value_heads",))}
    uneven = [f"{count} {name} heads" for name, count in heads.items() if count and count % tensor]
    if uneven:
        at = config.at(f"parallelism_config.{_size_key('tp')}")
        fitting = math.gcd(*(count for count in heads.values() if count))
        yield (
            f"{at}: does not divide the model's {' and '.join(uneven)} ({args.model_name_or_path}/config.json). "
            f"Use a divisor of {fitting}, or a config that splits by parameters (fsdp2.yaml) or layers "
            "(pipeline_parallel.yaml)."
        )


def pipeline(args: Any, kind: str, processes: int) -> list[str]:
    """What contradicts the flags of a pipeline. The same whether a config or the environment says kind and size."""
    if args is None:  # not readable
        return []
    stages, problems = args.pipeline_stages, []
    if stages < 1:
        problems.append(f"--pipeline_stages {stages}: expected at least 1.")
    if args.pipeline_microbatches is not None and args.pipeline_microbatches < 1:
        problems.append(f"--pipeline_microbatches {args.pipeline_microbatches}: expected at least 1.")
    if stages <= 1:
        given = {"--pipeline_microbatches": args.pipeline_microbatches, "--pipeline_schedule": args.pipeline_schedule}
        idle = [flag for flag, value in given.items() if value not in (None, "1f1b")]
        problems += [f"{flag} has no effect without --pipeline_stages 2 or more." for flag in idle]
        return problems
    if args.data_parallel:
        problems.append(
            f"--pipeline_stages {stages} is a process for every stage, --data_parallel one for all GPUs: leave one out."
        )
    elif kind in ("DEEPSPEED", "FSDP"):
        problems.append(
            f"--pipeline_stages {stages} cannot be combined with distributed_type: {kind}. Use pipeline_parallel.yaml; "
            "more processes than stages give data parallelism beside it."
        )
    elif processes % stages:
        problems.append(
            f"--pipeline_stages {stages} does not divide the {processes} process{'es' * (processes > 1)}, one a stage. "
            f"Pass --num_processes {stages * math.ceil(processes / stages)} to accelerate launch with "
            "pipeline_parallel.yaml, or change the stages."
        )
    layers = _first(model_config(args), LAYERS)
    if layers and stages > layers:
        problems.append(
            f"--pipeline_stages {stages}: the model has {layers} layers ({args.model_name_or_path}/config.json), and a "
            "stage needs at least one."
        )
    return problems


def compiled(args: Any, kind: str) -> list[str]:
    """What stands against `--torch_compile` on this machine.

    Args:
        kind: the distributed type.
    """
    if not getattr(args, "torch_compile", False):
        return []
    others = {
        f"distributed_type: {kind}": kind in ("DEEPSPEED", "FSDP"),
        "--pipeline_stages": args.pipeline_stages > 1,
        "--data_parallel": args.data_parallel,
    }
    problems = [
        f"--torch_compile is for one process and DDP, not with {other}: leave it out, or use single_gpu.yaml or "
        "multi_gpu.yaml."
        for other, asked in others.items()
        if asked
    ]
    compiler = os.environ.get("CXX", "g++")
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if shutil.which(compiler) is None or not header.is_file():
        lacking = f"the C++ compiler {compiler}" if shutil.which(compiler) is None else f"{header}"
        problems.append(
            f"--torch_compile needs {lacking}, which is not there: install g++ and the headers of Python (Debian, "
            "Ubuntu: apt install g++ python3-dev), or leave it out."
        )
    return problems


def name(config: Config, args: Any) -> str:
    """What the config and flags ask for, in a few words."""
    kind, stages = config.kind, getattr(args, "pipeline_stages", 1)
    if getattr(args, "data_parallel", False):
        return "DataParallel"
    if kind == "DEEPSPEED":
        return zero.name(config)
    if kind == "FSDP":
        return mesh_name(*sizes(config)) + " with CPU offload" * _is_true(fsdp_value(config, "offload_params"))
    if stages > 1:
        copies = config.get("num_processes", int, 1) // stages
        return f"pipeline of {stages} stages" + (f" x {copies} data ranks" if copies > 1 else "")
    return {"NO": "one process", "MULTI_GPU": "DDP"}.get(kind, kind)


def mesh_name(replicas: int, shards: int, tensor: int) -> str:
    """`FSDP2`, `HSDP 2 x 2`, `TP 2`, `FSDP2 x TP 2 x 2` or `HSDP x TP 2 x 2 x 2`."""
    if tensor == 1:
        return f"HSDP {replicas} x {shards}" if replicas > 1 else "FSDP2"
    if replicas == 1:
        return f"FSDP2 x TP {shards} x {tensor}" if shards > 1 else f"TP {tensor}"
    return f"HSDP x TP {replicas} x {shards} x {tensor}"


def simplicity(title: str) -> tuple[bool, int]:
    """A rank of strategies by their names: the lower, the simpler to set up and to understand."""
    known = [name for name in SIMPLEST_FIRST if title.startswith(name)]
    return "offload" in title, SIMPLEST_FIRST.index(max(known, key=len)) if known else len(SIMPLEST_FIRST)


def splits(config: Config, args: Any) -> bool:
    """Whether the state of one model is spread over ranks."""
    return config.kind in ("DEEPSPEED", "FSDP") or getattr(args, "pipeline_stages", 1) > 1


def model_config(args: Any) -> dict[str, Any]:
    """The config.json of a model in a local folder; empty where there is none."""
    folder = getattr(args, "model_name_or_path", None)
    try:
        values = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")) if folder else {}
    except (OSError, ValueError):
        return {}  # loading the model will say what is wrong with the file
    return values if isinstance(values, dict) else {}


def _is_true(value: Any) -> bool:
    return str(value).lower() == "true"


def _first(values: dict[str, Any], names: tuple[str, ...]) -> int | None:
    return next((values[name] for name in names if is_a(values.get(name), int)), None)
