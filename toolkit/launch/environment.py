"""What reached this process from its launcher, and the one Accelerator made from it.

Works the same under `accelerate launch`, `torchrun` and plain `python`. Where what was asked for is not
what was obtained, it stops.
"""

import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from toolkit.arguments import Arguments
from toolkit.errors import UserError, raise_all
from toolkit.launch.strategies import compiled, pipeline
from toolkit.report.console import warn
from toolkit.report.tracker import missing_tracker

if TYPE_CHECKING:
    from accelerate import Accelerator

LAUNCHERS = {
    "accelerate",
    "accelerate-launch",
    "accelerate.commands.launch",
    "accelerate.commands.accelerate_cli",
    "torchrun",
    "torch.distributed.run",
    "torch.distributed.launch",
}
# What the launcher says of the strategy, which is ours to set up: the Accelerator only connects the processes.
STRATEGY_VARIABLES = {"ACCELERATE_USE_DEEPSPEED": "DEEPSPEED", "ACCELERATE_USE_FSDP": "FSDP"}
HIDDEN = (*STRATEGY_VARIABLES, "ACCELERATE_USE_PARALLELISM_CONFIG")


@dataclass(frozen=True)
class World:
    """The processes of this job and the device of this one."""

    accelerator: "Accelerator"
    device: torch.device
    rank: int
    local_rank: int
    size: int
    local_size: int
    precision: str  # no | bf16 | fp16
    kind: str  # NO | MULTI_GPU | DEEPSPEED | FSDP, as in the accelerate config

    def describe(self, strategy: str, devices: int) -> str:
        """One line of what is used, such as `2 of 4 visible GPUs, DDP, bf16`."""
        used = max(self.local_size, devices)
        precision = "fp32" if self.precision == "no" else self.precision
        if self.device.type == "cuda":
            place = f"{used} of {torch.cuda.device_count()} visible GPUs"
            if self.size > self.local_size:
                place += f" on each of {self.size // self.local_size} machines"
        else:
            what = "CPU" if self.device.type == "cpu" else self.device.type.upper()
            place = f"{self.size} processes on the {what}" if self.size > 1 else f"the {what}"
            if self.device.type == "cpu":
                threads = torch.get_num_threads()
                place += f", {threads} thread{'s' * (threads > 1)}" + (" each" if self.size > 1 else "")
                strategy += " (rehearsal over gloo)" if self.size > 1 else ""
                precision += " (rehearsal)" if self.precision == "fp16" else ""
        return f"{place}, {strategy}, {precision}"


def connect(args: Arguments, problems: Sequence[str] = ()) -> World:
    """Join the other processes of the job.

    Args:
        problems: what was found wrong before, to be shown together with what is found here.

    Raises:
        UserError: the config, flags, environment and machine contradict each other, or the job that
            came about is not the one asked for.
    """
    _end_with_launcher()
    # What config and environment both say is said once.
    raise_all(dict.fromkeys([*problems, *_asked_in_config(args), *_asked_in_environment(args)]))
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    gpu = torch.cuda.is_available() and os.environ.get("ACCELERATE_USE_CPU", "false").lower() != "true"
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", asked if asked > 1 else 1))
    if gpu and local_size > torch.cuda.device_count():
        raise UserError(
            f"{local_size} processes were started on this machine, but only {torch.cuda.device_count()} GPUs are "
            f"visible (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'unset')}). "
            "Start one process per GPU: --num_processes."
        )
    if not gpu and not torch.backends.mps.is_available():
        _use_cores(local_size)
        _keep_freed_memory()
        # Saving a model imports deepspeed where it is installed, which would say that it found no GPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if args.full_determinism:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    if asked > 1 and restarts():
        _join_anew("nccl" if gpu else "gloo")
    accelerator = _accelerator(cpu=asked > 1 and not gpu)
    device = torch.device("cpu") if accelerator.device.type == "cpu" else accelerator.device
    if accelerator.num_processes != asked:
        raise UserError(
            f"the launcher asked for {asked} processes, but this one finds itself in a group of "
            f"{accelerator.num_processes}. Start the job with `accelerate launch --config_file "
            "accelerate_configs/multi_gpu.yaml` or with torchrun."
        )
    if gpu and device.type != "cuda":
        raise UserError(f"GPUs are visible, but the device obtained is {device}. Set `use_cpu: true` to mean that.")
    precision = str(accelerator.mixed_precision)
    if precision != "no" and device.type == "mps":
        raise UserError(f"{precision} was asked for, but on MPS only fp32 is supported: use single_gpu.yaml.")
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise UserError(
            f"bf16 was asked for, but {torch.cuda.get_device_name(device)} cannot compute in it. "
            "Use the config of the same name with _fp16, or without a suffix."
        )
    return World(
        accelerator,
        device,
        accelerator.process_index,
        accelerator.local_process_index if asked > 1 else 0,
        asked,
        local_size,
        precision,
        _kind(),
    )


def restarts() -> int:
    """How often the launcher has restarted the group after a failure (`--max_restarts`)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _join_anew(backend: str) -> None:
    """Make the group of a restart: the launcher's store still has the addresses of dead ranks, under the same keys."""
    import torch.distributed as dist

    store, rank, size = next(iter(dist.rendezvous("env://")))
    dist.init_process_group(backend, store=dist.PrefixStore(str(restarts()), store), rank=rank, world_size=size)


def _kind() -> str:
    """The distributed type that the launcher's environment says."""
    asked = [kind for variable, kind in STRATEGY_VARIABLES.items() if _is_set(variable)]
    return asked[0] if asked else "MULTI_GPU" if int(os.environ.get("WORLD_SIZE", "1")) > 1 else "NO"


def _accelerator(cpu: bool) -> "Accelerator":
    from accelerate import Accelerator

    hidden = {name: os.environ.pop(name) for name in HIDDEN if name in os.environ}
    try:
        return Accelerator(cpu=cpu)
    except (ValueError, ImportError, RuntimeError) as error:
        raise UserError(
            f"the processes of the job could not be set up: {' '.join(str(error).split())}. "
            "`toolkit check CONFIG` looks for mistakes in the accelerate config."
        ) from error
    finally:
        os.environ.update(hidden)


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() == "true"


def _asked_in_environment(args: Arguments) -> list[str]:
    environment = os.environ
    problems = []
    if _is_set("ACCELERATE_USE_MEGATRON_LM"):
        problems.append("the launcher asks for Megatron-LM, which is not supported. Use one of accelerate_configs/.")
    precision = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    if precision not in ("no", "bf16", "fp16"):
        problems.append(f"mixed_precision: {precision} is not supported; use no, bf16 or fp16.")
    accumulation = environment.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "1")
    if accumulation != "1":
        problems.append(
            f"gradient_accumulation_steps is {accumulation} in the accelerate config or in "
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS. A step is the task's: leave it out there and use "
            "--global_batch_size (or --per_device_train_batch_size with --gradient_accumulation_steps)."
        )
    backend = environment.get("ACCELERATE_DYNAMO_BACKEND", "no")
    if backend.lower() != "no":
        problems.append(f"dynamo_backend: {backend} has no effect here; leave it out of the accelerate config.")
    problems += pipeline(args, _kind(), int(environment.get("WORLD_SIZE", "1")))
    problems += compiled(args, _kind())
    problems += missing_tracker(args.report_to)
    if args.data_parallel and int(environment.get("WORLD_SIZE", "1")) > 1:
        problems.append(
            f"--data_parallel drives all GPUs from one process, but {environment['WORLD_SIZE']} were started. Use "
            "accelerate_configs/data_parallel.yaml, or leave the flag out for DDP."
        )
    if args.data_parallel_replicas is not None:
        if not args.data_parallel:
            problems.append("--data_parallel_replicas needs --data_parallel.")
        if torch.cuda.is_available():
            problems.append("--data_parallel_replicas is for the rehearsal on a CPU; on GPUs set CUDA_VISIBLE_DEVICES.")
        if args.data_parallel_replicas < 1:
            problems.append(f"--data_parallel_replicas {args.data_parallel_replicas}: at least 1.")
    return problems


def _asked_in_config(args: Arguments) -> list[str]:
    """What is wrong with the accelerate config that the launcher was given, where that can be found out.

    A task script is not told its config, so this looks at the command line of the parent process (Linux).
    """
    words = parent_command()
    if not any("accelerate" in Path(word).name for word in words[:4] if not word.startswith("--")):
        return []
    path = config_file(words)
    if path is None:
        from accelerate.commands.config.config_args import default_config_file

        if not Path(default_config_file).is_file():
            return []
        path = default_config_file
        warn(
            f"no --config_file was given, so accelerate obeys its default config {path}. "
            "Pass --config_file accelerate_configs/<one>.yaml to choose yourself."
        )
    from toolkit.launch.check import problems
    from toolkit.launch.config import read_config, with_launch_flags
    from toolkit.launch.machine import detect

    config = with_launch_flags(read_config(path), words)
    return problems(config, detect(), args, _parent_environment())


def config_file(command: list[str]) -> str | None:
    """The value of --config_file on a launcher's command line."""
    return _value_of("--config_file", command)


def _value_of(flag: str, command: list[str]) -> str | None:
    for at, word in enumerate(command):
        if at > 1 and word.endswith(".py"):
            return None  # what follows the script is the script's
        if word == flag and at + 1 < len(command):
            return command[at + 1]
        if word.startswith(f"{flag}="):
            return word.split("=", 1)[1]
    return None


def parent_command() -> list[str]:
    """The words of the parent process's command line; empty where they cannot be read."""
    return _parent("cmdline")


def _parent_environment() -> Mapping[str, str]:
    return dict(word.split("=", 1) for word in _parent("environ") if "=" in word)


def _parent(what: str) -> list[str]:
    try:
        content = Path(f"/proc/{os.getppid()}/{what}").read_bytes()
    except OSError:
        return []
    return [word for word in content.decode("utf-8", "replace").split("\0") if word]


def _use_cores(local_size: int) -> None:
    """Share the cores among the local processes, unless the user has set OMP_NUM_THREADS.

    Launchers set it to 1 when the user did not, which would leave the other cores idle.
    """
    asked = _parent_environment().get("OMP_NUM_THREADS") if _launched() else os.environ.get("OMP_NUM_THREADS")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(int(asked) if asked and asked.isdigit() else max(1, cores // local_size))


def _keep_freed_memory() -> None:
    """Let glibc keep what is freed: every step frees and takes the same blocks, and fresh pages cost 10 % of it."""
    import ctypes

    mmap_max, trim_threshold, top_pad = -4, -1, -2  # malloc.h
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return  # another C library
    mallopt(mmap_max, 0)
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 256 * 2**20)


def _end_with_launcher() -> None:
    """Have SIGTERM sent to this process when its launcher dies of a signal, which else leaves it running (Linux)."""
    import ctypes
    from contextlib import suppress

    parent_death_signal = 1  # prctl.h
    if _launched():
        with suppress(OSError, AttributeError):  # another system
            ctypes.CDLL(None).prctl(parent_death_signal, int(signal.SIGTERM))


def _launched() -> bool:
    """Whether the parent process is a launcher: accelerate or torchrun, as a command or a module."""
    return any(word in LAUNCHERS or Path(word).name in LAUNCHERS for word in parent_command()[:4])


def restart_command(*more: str) -> str:
    """The command line that started this job, with flags added at its end."""
    words = parent_command() if _launched() else [sys.executable, *sys.argv]
    return shlex.join([*words, *more])
