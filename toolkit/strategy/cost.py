"""What a micro-batch costs whatever is in it: it decides between finer cuts and fewer passes."""

import torch

# In padded tokens. Small where a token is dear; where tokens are cheap, each pass costs what many of them would.
ACCELERATOR = 4096.0
CPU = 48.0
CPU_AMX = 250.0  # bf16 in the processor's matrix units


def overhead(device: torch.device, precision: str, amx: bool) -> float:
    """The fixed cost of a micro-batch, in padded tokens.

    A function of machine and precision, never of a clock, so that a cut repeats.

    Args:
        precision: no, bf16 or fp16.
        amx: a processor of the job multiplies bfloat16 in matrix units.
    """
    if device.type != "cpu":
        return ACCELERATOR
    return CPU_AMX if amx and precision == "bf16" else CPU
