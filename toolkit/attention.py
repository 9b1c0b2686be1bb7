"""Attention on a CPU: with dropout in the precision at hand, and blocks that compute real tokens only.

A batch of texts is as wide as its longest, so that much of it may be padding. All but attention treats every token by
itself, so the tokens of all texts pass the blocks as one row, without padding. Attention alone puts them side by side,
texts of like length together. Before and behind its blocks a model sees the batch as ever, [texts, length].
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from toolkit.data.plan import cheapest
from toolkit.dropout import drops, factors
from toolkit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

PADDED, UNPADDED = "sdpa_cpu", "sdpa_cpu_unpadded"  # our names in transformers' table of attentions
# Sizes are rounded up, so that they come again: the first matrix product of a new shape costs a CPU many of its kind.
MULTIPLE = 32  # of the tokens in a row
WIDTH = 8  # of the texts that stand side by side
GROUP = 2**14  # what one more group of them costs, in pairs of tokens
TRIED = (7, 4, 3)  # tokens of the texts of the trial
TOLERANCE = 1e-4  # of the largest value; texts that see each other change values by far more


def install(model: "PreTrainedModel") -> None:
    """Swap torch's sdpa attention for ours and, where a trial gives the same, leave padding out of the blocks.

    Args:
        model: in evaluation mode. One without weights (on the meta device) is not tried, and keeps its padding.
    """
    if model.config._attn_implementation != "sdpa" or not model._supports_attention_backend:
        return
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    for name, mask in ((PADDED, sdpa_mask), (UNPADDED, row_or_mask)):
        AttentionInterface.register(name, attend)
        AttentionMaskInterface.register(name, mask)
    model.set_attn_implementation(PADDED)
    if model.device.type != "meta" and _hook_blocks(model) and not _gives_the_same(model):
        keep_padding(model)


def keep_padding(model: nn.Module) -> None:
    """Let blocks see whole batches again, [texts, length], for whoever looks in between them."""
    if unpads(model):
        model.set_attn_implementation(PADDED)


def unpads(model: nn.Module) -> bool:
    """Whether padding is left out of the model's blocks, where a batch comes with an attention mask."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) == UNPADDED


def rounded(tokens: int) -> int:
    """Tokens of the row that this many real ones make; there is always one more, whose gradient is 0."""
    return (tokens // MULTIPLE + 1) * MULTIPLE


class Row:
    """How the real tokens of a padded batch stand in one row, and side by side for attention.

    It takes the place of the attention mask on its way from the model through its blocks. The row's tokens behind
    the real ones are filler: whatever they hold, nothing looks at them.

    Args:
        real: where the batch has tokens, boolean [texts, length].
        mask: gives the mask of texts side by side from the same of theirs, as transformers' mask functions do.
    """

    def __init__(self, real: Tensor, mask: Callable[..., Tensor | None]) -> None:
        self.batch = real.shape
        places = real.flatten().nonzero().squeeze(1)
        self.tokens = len(places)
        self.size = rounded(self.tokens)
        if self.size == real.shape[1]:
            self.size += MULTIPLE  # so that a batch is never taken for a row
        # Where each token of the row is in the batch, and each of the batch in the row.
        self.place = F.pad(places, (0, self.size - self.tokens))
        self.token = torch.full((real.numel(),), self.tokens, device=real.device)
        self.token[places] = torch.arange(self.tokens, device=real.device)
        lengths = real.sum(1).tolist()
        starts = torch.tensor([0, *accumulate(lengths)], device=real.device)
        ranked = sorted((i for i, length in enumerate(lengths) if length), key=lambda i: -lengths[i])
        self.groups: list[tuple[int, int, Tensor | None]] = []  # texts, width, mask
        # The same for texts side by side: which token of the row is in each slot, and in which slot each token is.
        slots, self.slot, behind = [], torch.zeros_like(self.place), 0
        descending = [lengths[i] for i in ranked]
        for start, end in cheapest(descending, lambda start, end: (end - start) * descending[start] ** 2 + GROUP):
            texts, width = ranked[start:end], -(-lengths[ranked[start]] // WIDTH) * WIDTH
            at = torch.arange(width, device=real.device)
            filled = at < torch.tensor([lengths[i] for i in texts], device=real.device)[:, None]
            tokens = torch.where(filled, starts[texts][:, None] + at, self.tokens)
            self.slot[tokens[filled]] = behind + filled.flatten().nonzero().squeeze(1)
            how = {"batch_size": len(texts), "q_length": width, "kv_length": width, "attention_mask": filled}
            self.groups.append((len(texts), width, mask(**how)))
            slots.append(tokens.flatten())
            behind += filled.numel()
        self.token_of = torch.cat(slots)

    def enter(self, batch: Tensor) -> Tensor:
        """From [texts or 1, length, ...] to [1, size, ...]."""
        flat = batch.expand(*self.batch, *batch.shape[2:]).flatten(0, 1)
        return Move.apply(flat, self.place, self.token)[None]

    def leave(self, row: Tensor) -> Tensor:
        """From [1, size, ...] to [texts, length, ...], with filler for padding."""
        return Move.apply(row[0], self.token, self.place, self.tokens).unflatten(0, self.batch)

    def spread(self, row: Tensor) -> list[Tensor]:
        """From [1, heads, size, width of a head] to each group's [texts, heads, length, width of a head]."""
        apart = Move.apply(row[0].transpose(0, 1), self.token_of, self.slot, self.tokens)
        parts = apart.split([texts * width for texts, width, _ in self.groups])
        return [part.unflatten(0, group[:2]).transpose(1, 2) for part, group in zip(parts, self.groups)]

    def collect(self, parts: Sequence[Tensor]) -> Tensor:
        """From each group's [texts, length, heads, width of a head] to [1, size, heads, width of a head]."""
        return Move.apply(torch.cat([part.flatten(0, 1) for part in parts]), self.slot, self.token_of)[None]


class Move(torch.autograd.Function):
    """Rows of a tensor in another order, some of them more than once or not at all.

    Backward, each row gets the gradient of one row: all others that it became are filler, and theirs is 0.

    Args:
        source: the row that each row of the result is.
        back: the row of the result whose gradient each row gets.
        kept: rows from here on are filler and get 0.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, source: Tensor, back: Tensor, kept: int | None = None) -> Tensor:
        ctx.save_for_backward(back)
        ctx.kept = kept
        return rows.index_select(0, source)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        gradient = gradient.index_select(0, *ctx.saved_tensors)
        if ctx.kept is not None:
            gradient[ctx.kept :] = 0
        return gradient, None, None, None


def row_or_mask(attention_mask: Tensor | None = None, **how: Any) -> "Row | Tensor | None":
    """In the place of transformers' `sdpa_mask`: a `Row` for a batch with padding, and its mask for any other."""
    from transformers.masking_utils import sdpa_mask

    texts, length = how["batch_size"], how["q_length"]
    plain = attention_mask is not None and attention_mask.shape == (texts, length) == (texts, how["kv_length"])
    # What needs vmap looks at single samples, by their place in the batch.
    if not plain or how.get("use_vmap") or not attention_mask.any():
        return sdpa_mask(attention_mask=attention_mask, **how)
    return Row(attention_mask.bool(), lambda **sizes: sdpa_mask(**{**how, **sizes}))


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | Row | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: q, k, v [texts, heads, length, width] give [texts, length, heads, width].

    Args:
        attention_mask: where to look, boolean [texts, 1 or heads, length, length]; None: everywhere, or where
            `is_causal` back only, which is left to torch. With a `Row` q, k, v and what they give are a row.
    """
    how = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **more}
    if isinstance(attention_mask, Row):
        parts = zip(*map(attention_mask.spread, (query, key, value)), attention_mask.groups)
        return attention_mask.collect([attend(module, *qkv, group[2], **how)[0] for *qkv, group in parts]), None
    causal = attention_mask is None and (getattr(module, "is_causal", True) if is_causal is None else is_causal)
    masked = attention_mask is not None
    usual = not causal and (not masked or attention_mask.dtype == torch.bool) and query.shape[1] == key.shape[1]
    if not usual or more.get("position_bias") is not None or not drops(query, dropout):
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(module, query, key, value, attention_mask, **how)
    scores = torch.matmul(query * (scaling or query.shape[-1] ** -0.5), key.transpose(2, 3))
    if masked:
        # Added, not filled in: that costs nothing backward. Finite, so that a row of nothing but padding stays so.
        scores += torch.where(attention_mask, 0.0, torch.finfo(scores.dtype).min / 2).to(scores.dtype)
    weights = F.softmax(scores, -1)
    return torch.matmul(weights * factors(weights, dropout), value).transpose(1, 2).contiguous(), None


def _hook_blocks(model: nn.Module) -> bool:
    """Have batches enter and leave the row around the blocks, wherever there is a `Row`; False: it has no blocks."""
    from toolkit.strategy.blocks import blocks

    try:
        layers = blocks(model)[1]
    except UserError:
        return False
    for layer in layers:
        layer.register_forward_pre_hook(_enter, with_kwargs=True)
    layers[-1].register_forward_hook(_leave, with_kwargs=True)
    return True


def _row_in(args: tuple, kwargs: dict[str, Any]) -> Row | None:
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Row)), None)


def _enter(block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]] | None:
    """Everything per token enters the row: the hidden state in the first block, such as positions in each."""
    row = _row_in(args, kwargs)
    if row is None:
        return None

    def move(value: Any) -> Any:
        per_token = isinstance(value, Tensor) and value.shape[1:2] == row.batch[1:] and len(value) in (1, row.batch[0])
        return row.enter(value) if per_token else value

    return tree_map(move, args), tree_map(move, kwargs)


def _leave(block: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
    row = _row_in(args, kwargs)
    if row is None:
        return None
    return (row.leave(output[0]), *output[1:]) if isinstance(output, tuple) else row.leave(output)


def _gives_the_same(model: "PreTrainedModel") -> bool:
    """Whether the model makes of a few texts what it makes of them with padding; leaves it so that padding is out."""
    vocabulary = model.get_input_embeddings().num_embeddings
    draw = torch.Generator().manual_seed(0)
    real = torch.arange(max(TRIED)) < torch.tensor(TRIED)[:, None]
    ids = torch.randint(vocabulary // 2, vocabulary, real.shape, generator=draw)
    ids[~real] = model.config.get_text_config().pad_token_id or 0
    inputs = {"input_ids": ids.to(model.device), "attention_mask": real.long().to(model.device)}
    try:
        with torch.no_grad():
            padded = model.base_model(**inputs)[0][real]
            model.set_attn_implementation(UNPADDED)
            unpadded = model.base_model(**inputs)[0][real]
    except Exception:  # whatever blocks that need more than a mask and a hidden state make of a row
        return False
    return bool((unpadded - padded).abs().max() <= TOLERANCE * padded.abs().max())
