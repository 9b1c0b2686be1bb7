"""`toolkit check`: does a config fit accelerate, this machine, the task flags and the environment?"""

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from toolkit.arguments import Arguments, parse
from toolkit.errors import UserError
from toolkit.launch import rules, strategies, zero
from toolkit.launch.config import Config, configs_folder, find_config, read_config
from toolkit.launch.machine import Machine, detect
from toolkit.launch.recommend import count_parameters, device_memory, recommend, simpler_hint
from toolkit.launch.schema import schema_problems
from toolkit.report.console import say, warn


def flags_class() -> type:
    """The flags of all scripts in tasks/ in one class."""
    for script in sorted((configs_folder().parent / "tasks").glob("*.py")):
        name = f"toolkit_task_{script.stem}"
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, script)
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
    tasks = [cls for cls in Arguments.__subclasses__() if cls.__module__.startswith("toolkit_task_")]
    return dataclasses.make_dataclass("TaskFlags", [], bases=tuple(tasks)) if tasks else Arguments


def problems(
    config: Config,
    machine: Machine,
    task_flags: Sequence[str] | Arguments | None = None,
    environ: Mapping[str, str] = os.environ,
) -> list[str]:
    """Everything that would stop, or silently change, a run of this config; empty where all is well.

    Args:
        config: what the launcher is given: the file, and its own flags (`with_launch_flags`).
        machine: where it shall run.
        task_flags: the task script's flags, as words or read; None: not known, so that none is missed.
        environ: the environment that the launcher is started in.
    """
    found = [
        *schema_problems(config),
        *rules.strategy(config),
        *rules.processes(config, machine),
        *rules.machines(config),
        *rules.precision(config, machine),
        *rules.environment(config, machine, environ),
        *zero.section(config),
        *strategies.fsdp(config),
    ]
    args, flag_problems = _read_flags(config.flags if task_flags is None else task_flags)
    return [
        *found,
        *flag_problems,
        *rules.step(config, args, environ),
        *zero.json_file(config, args),
        *strategies.mesh(config, args),
        *strategies.pipeline(args, config.kind, config.get("num_processes", int, 1)),
        *strategies.compiled(args, config.kind),
        *rules.flags(config, args, task_flags is not None),
    ]


def notes(config: Config, machine: Machine, task_flags: Sequence[str] | None = None) -> list[str]:
    """What is allowed but worth knowing."""
    found = []
    processes = config.local_processes
    if not machine.gpus and processes > machine.cores:
        found.append(f"{config.at('num_processes')}: {processes} processes share {machine.cores} cores, which is slow.")
    if config.values.get("enable_cpu_affinity") is True:
        found.append(
            f"{config.at('enable_cpu_affinity')}: accelerate launch does not read this from a config; "
            "pass --enable_cpu_affinity to it."
        )
    if config.flags and task_flags is None:
        found.append(f"{config.path}: give the task script {' '.join(config.flags)} with this config.")
    return found


def describe(config: Config, machine: Machine, task_flags: Sequence[str] | None = None) -> str:
    """One line: devices, strategy, precision."""
    processes, on_gpu = config.local_processes, machine.gpus and not config.on_cpu
    args, _ = _read_flags(config.flags if task_flags is None else task_flags)
    strategy = strategies.name(config, args)
    precision = {"no": "fp32"}.get(config.precision, config.precision)
    if on_gpu:
        used = machine.gpus if strategy == "DataParallel" else processes
        where = f"{used} of {machine.gpus} visible GPUs"
    elif machine.mps:
        where = "MPS"
    else:
        where = f"rehearsal on a CPU with {machine.cores} cores"
        if processes > 1:
            where += f", {processes} processes"
        if precision == "fp16":
            precision += " (rehearsed, not faster)"
    return f"{where}, {strategy}, {precision}"


def main(argv: Sequence[str]) -> int:
    """`toolkit check CONFIG [task flags]` or `toolkit check --recommend [task flags]`."""
    argv = list(argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(
            "usage: toolkit check CONFIG [task flags]\n"
            "       toolkit check --recommend [task flags]\n\n"
            "CONFIG is a yaml file or a name from accelerate_configs/. All problems are listed at once\n"
            "(exit 1); without any, one line says what would be used.\n"
            "--recommend prints the name of the config that suits this machine and nothing else."
        )
        return 0 if argv else 2
    if argv[0] == "--recommend":
        name, why = recommend(detect(), _parameters(argv[1:]))
        print(name)
        say(f"{name}: {why}")
        return 0
    if argv[0].startswith("-"):
        raise UserError(f"toolkit check {argv[0]}: the config comes first: toolkit check CONFIG [task flags].")
    config, flags, machine = read_config(find_config(argv[0])), argv[1:] or None, detect()
    found = problems(config, machine, flags)
    for message in notes(config, machine, flags):
        warn(message)
    if found:
        for message in found:
            say(f"error: {message}")
        return 1
    print(f"{config.path.name}: {describe(config, machine, flags)}")
    parameters = _parameters(flags or ())
    name, why = recommend(machine, parameters)
    print(f"recommended here: {name} ({why})")
    hint = simpler(config, flags, parameters, device_memory(machine))
    if hint:
        print(hint)
    return 0


def simpler(config: Config, task_flags: Sequence[str] | None, parameters: int | None, memory: int) -> str | None:
    """The hint that sharding or splitting is not needed, where it is done and the model fits one device easily."""
    args, _ = _read_flags(config.flags if task_flags is None else task_flags)
    return simpler_hint(parameters, memory) if parameters and strategies.splits(config, args) else None


def _read_flags(task_flags: Sequence[str] | Arguments) -> tuple[Any, list[str]]:
    """Task flags as the task reads them (None where they are not readable), and what is wrong with them."""
    if isinstance(task_flags, Arguments):
        return task_flags, []
    try:
        return parse(flags_class() if task_flags else Arguments, list(task_flags)), []
    except UserError as error:
        return None, error.messages


def _parameters(task_flags: Sequence[str]) -> int | None:
    args, _ = _read_flags(task_flags)
    return count_parameters(args.model_name_or_path) if args and args.model_name_or_path else None
