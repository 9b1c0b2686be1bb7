"""Dropout on a CPU, where torch draws one number an element, and attention that drops is computed in float32.

The same dropout: each element goes with probability p, the rest is scaled by 1 / (1 - p), and torch.manual_seed rules.
Without dropout, in evaluation and on other devices, everything is torch's own.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KERNEL = "sdpa_cpu_dropout"  # our attention's name in transformers' table
LEVELS = 2**16  # p is exact to one in so many


def install(model: "PreTrainedModel", attention: bool) -> None:
    """Swap the model's dropout modules and, where `attention`, torch's sdpa attention for ours."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, Dropout(child.p).train(child.training))
    if attention and model.config._attn_implementation == "sdpa" and model._supports_attention_backend:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask

        AttentionInterface.register(KERNEL, attend)
        AttentionMaskInterface.register(KERNEL, sdpa_mask)
        model.set_attn_implementation(KERNEL)


class Dropout(nn.Dropout):
    """torch's, with numbers that are drawn four at a time."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training and _ours(input, self.p):
            return input * _scale(input, self.p)
        return super().forward(input)


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: q, k, v [rows, heads, length, width] give [rows, length, heads, width].

    Args:
        attention_mask: where to look, boolean [rows, 1 or heads, length, length]; None: everywhere, or where
            `is_causal` back only, which is left to torch.
    """
    causal = attention_mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    masked = attention_mask is not None
    usual = not causal and (not masked or attention_mask.dtype == torch.bool) and query.shape[1] == key.shape[1]
    if not usual or more.get("position_bias") is not None or not _ours(query, dropout):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        how = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **more}
        return sdpa_attention_forward(module, query, key, value, attention_mask, **how)
    scores = torch.matmul(query * (scaling or query.shape[-1] ** -0.5), key.transpose(2, 3))
    if masked:
        # Added, not filled in: that costs nothing backward. Finite, so that a row of nothing but padding stays so.
        scores += torch.where(attention_mask, 0.0, torch.finfo(scores.dtype).min / 2).to(scores.dtype)
    weights = F.softmax(scores, -1)
    return torch.matmul(weights * _scale(weights, dropout), value).transpose(1, 2).contiguous(), None


def _ours(input: Tensor, p: float) -> bool:
    """Whether elements of `input` are dropped here: plain numbers on a CPU."""
    return 0 < round(p * LEVELS) < LEVELS and type(input) in (Tensor, nn.Parameter) and input.device.type == "cpu"


def _scale(like: Tensor, p: float) -> Tensor:
    """What dropout multiplies `like` by: 0 or 1 / (1 - p)."""
    count = like.numel()
    # torch's generator gives 64 bits at once: four numbers of 16 bits, which then become 0 or 1 in place.
    words = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None)
    kept = words.view(torch.int16)[:count].view(like.shape).ge_(round(p * LEVELS) - LEVELS // 2)
    if like.element_size() != 2:
        return kept.to(like.dtype).mul_(1 / (1 - p))
    # 0 or 1 times the bits of a number of the same size is 0 or that number.
    bits = torch.tensor(1 / (1 - p), dtype=like.dtype).view(torch.int16)
    return kept.mul_(bits).view(like.dtype)
