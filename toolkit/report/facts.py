"""What a run knows about libraries, model and memory."""

import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import toolkit

LIBRARIES = ("torch", "accelerate", "transformers", "datasets", "numpy")


def versions() -> dict[str, str]:
    """Version of the toolkit and of the libraries that decide on a result."""
    found = {"toolkit": toolkit.__version__}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def device_name(device: torch.device) -> str:
    """What kind of device it is."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


def peak_memory(device: torch.device) -> int:
    """The most memory of this rank's device that tensors took; on a CPU the most that the process took."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident()


def peak_resident() -> int:
    """The most bytes of main memory that this process took."""
    try:
        # Linux's other count, that of getrusage, begins with what the launcher took before it became this process.
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    except (OSError, IndexError):
        import resource

        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
