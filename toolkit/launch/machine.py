"""What this machine has: devices, memory, cores and the precisions they can compute in."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Machine:
    """One machine as this process may use it (visible devices, not all that are built in)."""

    gpus: int
    gpu_names: tuple[str, ...]
    gpu_memory: tuple[int, ...]  # bytes of each visible GPU
    visible_devices: str | None  # CUDA_VISIBLE_DEVICES
    bf16: bool  # autocast to bfloat16 works on the device
    fp16: bool
    mps: bool
    cores: int
    memory: int  # bytes of main memory
    bf16_units: bool = False  # the processor multiplies bfloat16 in hardware, so that bf16 is faster
    amx: bool = False  # and in matrix units at that, which is faster still


def detect() -> Machine:
    """Look at the machine this process runs on."""
    import torch

    gpus, flags = torch.cuda.device_count(), _processor_flags()
    mps = gpus == 0 and torch.backends.mps.is_available()
    properties = [torch.cuda.get_device_properties(index) for index in range(gpus)]
    return Machine(
        gpus=gpus,
        gpu_names=tuple(device.name for device in properties),
        gpu_memory=tuple(device.total_memory for device in properties),
        visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        # A CPU computes in both, slower or faster; half precision on MPS was never run with this toolkit.
        bf16=all(map(_has_bf16, properties)) if gpus else not mps,
        fp16=not mps,
        mps=mps,
        cores=_cores(),
        memory=_memory(),
        bf16_units=bool(flags & {"amx_bf16", "avx512_bf16"}),
        amx="amx_bf16" in flags,
    )


def _has_bf16(device: Any) -> bool:
    import torch

    # From the properties alone: asking torch.cuda.is_bf16_supported for each device would make every rank
    # take memory on every GPU. Compute capability 8 is Ampere, the first with bfloat16.
    return torch.version.hip is not None or device.major >= 8


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):  # Linux: what a container or a scheduler leaves to us
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory() -> int:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # no cgroup, or "max"
        return total
    return min(total, limit)


def _processor_flags() -> set[str]:
    """What Linux says of the processor's instructions; nothing elsewhere."""
    try:
        return set(Path("/proc/cpuinfo").read_text().split())
    except OSError:
        return set()
