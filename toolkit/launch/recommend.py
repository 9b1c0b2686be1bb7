"""Which config suits this machine, for a model of a given size."""

import json
import math
from pathlib import Path

from toolkit.launch.machine import Machine

BYTES_PER_PARAMETER = 16  # float32 weight, gradient and AdamW's two moments
LONGEST_HEADER = 100_000_000  # bytes, as safetensors itself allows
SHARE_OF_DEVICE = 0.7  # the rest is for activations
EASY_SHARE = 0.35  # of a device, with so much left that nothing is gained by splitting the model


def recommend(machine: Machine, parameters: int | None = None) -> tuple[str, str]:
    """The config to choose on this machine for a model of so many parameters, and why."""
    several = machine.gpus > 1
    name = "multi_gpu" if several else "single_gpu"
    why = f"{machine.gpus} GPUs" if several else "one GPU" if machine.gpus else "no GPU"
    suffix = ""
    if machine.bf16 if machine.gpus else machine.bf16_units:
        suffix = "_bf16"
        why += " with bf16 units" if machine.gpus else ", a processor with bf16 units"
    memory, need = device_memory(machine), BYTES_PER_PARAMETER * (parameters or 0)
    if need <= SHARE_OF_DEVICE * memory:
        return name + suffix, why
    why += f"; {need / 1e9:.0f} GB of training state ({BYTES_PER_PARAMETER} bytes x parameters)"
    why += f" do not leave room for activations in the {memory / 1e9:.0f} GB of one device"
    if not machine.gpus:
        return name + suffix, f"{why}: this machine is too small for the model"
    if need <= SHARE_OF_DEVICE * memory * machine.gpus:
        return f"fsdp2{suffix}", f"{why}: shard it over the GPUs"
    return "zero3_offload", f"{why}: keep the state in main memory, which is slow"


def device_memory(machine: Machine) -> int:
    """Bytes of the smallest device: a GPU, or main memory where there is none."""
    return min(machine.gpu_memory) if machine.gpu_memory else machine.memory


def simpler_hint(parameters: int, memory: int) -> str | None:
    """One line where a model that is sharded or split would fit one device easily.

    Args:
        parameters: of the whole model.
        memory: bytes of one device.
    """
    need = BYTES_PER_PARAMETER * parameters
    if need > EASY_SHARE * memory:
        return None
    return (
        f"the model fits one device easily ({need / 1e9:.1f} GB of training state, {memory / 1e9:.0f} GB of memory): "
        "data parallelism (multi_gpu) is simpler and probably faster here"
    )


def count_parameters(folder: str) -> int | None:
    """Parameters of the model in a local folder, read from the headers of its safetensors files."""
    count = 0
    try:
        for file in Path(folder).glob("*.safetensors"):
            with file.open("rb") as stream:
                # Eight bytes of length, then a JSON header: tensor name -> dtype, shape, offsets.
                header = json.loads(stream.read(min(int.from_bytes(stream.read(8), "little"), LONGEST_HEADER)))
            header.pop("__metadata__", None)
            count += sum(math.prod(tensor["shape"]) for tensor in header.values())
    except (OSError, ValueError, KeyError, OverflowError):
        return None  # loading the model will say what is wrong with the file
    return count or None
