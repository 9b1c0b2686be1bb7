"""Documents that share a row do not see each other.

A causal model of transformers keeps them apart by itself where `position_ids` begin anew with each document and there
is no attention mask. A masked model does not: it gets a mask made of its positions. Whether it worked is tried out on
the model in hand, so that no list of models is needed.
"""

from typing import Any

import torch
from torch import Tensor, nn

from toolkit.errors import UserError

TRIED = (7, 4, 3)  # tokens of the documents of the probe
TOLERANCE = 1e-4  # of the largest logit; a document that is seen changes logits by far more
KERNELS = (None, "sdpa", "eager", "flex_attention")  # others are not tried out by a probe on a CPU


def separate(model: nn.Module, offset: int) -> None:
    """Let a masked model keep documents apart by `position_ids` alone, as causal ones do.

    Args:
        offset: number of a document's first position in this model.
    """

    def hook(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        positions = kwargs.get("position_ids")
        if positions is None:
            return args, kwargs
        return args, {**kwargs, "attention_mask": _mask(model, positions), "position_ids": positions + offset}

    model.register_forward_pre_hook(hook, with_kwargs=True)


def _mask(model: nn.Module, positions: Tensor) -> Tensor | dict[str, Tensor]:
    """Attention within documents, as the model's attention takes it: one mask, or one for each kind of layer."""
    from transformers.masking_utils import (
        create_bidirectional_mask,
        create_bidirectional_sliding_window_mask,
        packed_sequence_mask_function,
    )

    how = {
        "config": model.config,
        "inputs_embeds": torch.empty(*positions.shape, 0, device=positions.device),  # for its shape and device
        "attention_mask": None,
        "and_mask_function": packed_sequence_mask_function((positions == 0).cumsum(1)),
    }
    full = create_bidirectional_mask(**how)
    if "sliding_attention" not in (getattr(model.config, "layer_types", None) or ()):
        return full
    return {"full_attention": full, "sliding_attention": create_bidirectional_sliding_window_mask(**how)}


def check(model: nn.Module) -> None:
    """See that each of a few packed documents gets the logits that it gets alone.

    Args:
        model: whole, with real weights, in evaluation mode.

    Raises:
        UserError: it does not.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    draw = torch.Generator().manual_seed(0)
    documents = [torch.randint(vocabulary // 2, vocabulary, (1, length), generator=draw) for length in TRIED]
    documents = [document.to(model.device) for document in documents]
    positions = torch.cat([torch.arange(length) for length in TRIED])[None].to(model.device)
    try:
        with torch.no_grad():
            alone = torch.cat([model(input_ids=document).logits for document in documents], dim=1)
            packed = model(input_ids=torch.cat(documents, dim=1), position_ids=positions).logits
    except (TypeError, ValueError, RuntimeError, IndexError) as error:
        refuse(model, f"it cannot be told where they begin ({str(error).splitlines()[0]})")
    difference = (packed - alone).abs().max() / alone.abs().max()
    if not difference <= TOLERANCE:
        refuse(model, f"a trial gave logits that are off by {difference:.1e} of the largest")


def kernel_problems(implementation: str | None) -> list[str]:
    """What stands against an attention kernel of which it is not known that it keeps documents apart."""
    if implementation in KERNELS:
        return []
    return [
        f"--attn_implementation {implementation}: it is not known to keep packed documents apart in micro-batches of "
        "several rows. Use sdpa or flex_attention, or --packing none."
    ]


def refuse(model: nn.Module, reason: str) -> None:
    """Stop: this model cannot be packed."""
    raise UserError(
        f"{type(model).__name__} does not keep documents apart that are packed into one row: {reason}. "
        "Use --packing none."
    )
