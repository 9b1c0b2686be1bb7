"""Which config suits this machine, for a model of a given size."""

import json
import math
from pathlib import Path

from toolkit.launch.config import configs_folder
from toolkit.launch.machine import Machine

BYTES_PER_PARAMETER = 16  # float32 weight, gradient and AdamW's two moments
LONGEST_HEADER = 100_000_000  # bytes, as safetensors itself allows
SHARE_OF_DEVICE = 0.7  # the rest is for activations


def recommend(machine: Machine, parameters: int | None = None) -> tuple[str, str]:
    """The config to choose on this machine for a model of so many parameters, and why."""
    several = machine.gpus > 1
    name = "multi_gpu" if several else "single_gpu"
    why = f"{machine.gpus} GPUs" if several else "one GPU" if machine.gpus else "no GPU"
    if machine.bf16 if machine.gpus else machine.bf16_units:
        name += "_bf16"
        why += " with bf16 units" if machine.gpus else ", a processor with bf16 units"
    memory = min(machine.gpu_memory) if machine.gpu_memory else machine.memory
    need = BYTES_PER_PARAMETER * (parameters or 0)
    if need <= SHARE_OF_DEVICE * memory:
        return name, why
    why += f"; {need / 1e9:.0f} GB of training state ({BYTES_PER_PARAMETER} bytes x parameters)"
    why += f" do not leave room for activations in the {memory / 1e9:.0f} GB of one device"
    if not machine.gpus:
        return name, f"{why}: this machine is too small for the model"
    sharded = ("zero3", "fsdp2") if several else ("zero3_offload", "fsdp2_offload")
    present = [choice for choice in sharded if (configs_folder() / f"{choice}.yaml").is_file()]
    why += f": shard the state with {' or '.join(sharded)}"
    if not present:
        return name, f"{why}, which are not in accelerate_configs/ yet"
    return present[0], why


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
