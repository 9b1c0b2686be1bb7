"""The output layer of a language model as the place where its loss is computed.

What touches a parameter must happen inside the model's own forward, where every strategy expects it. So the layer
takes the labels there, and gives a sum of losses for each row instead of a score for each word: full logits, rows x
length x vocabulary, never stand in memory, neither forward nor backward.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.errors import UserError

IGNORED = -100  # the label of a position that has no target
# Logits at a time: 64 MiB in float32 on a CPU, 512 MiB where small products would leave most of a device idle.
PIECE = {"cpu": 2**24}
PIECE_ELSEWHERE = 2**27


def install(model: nn.Module) -> None:
    """Make `labels` an argument of the model, with which its `logits` are sums of losses.

    `labels`, int64 [rows, length], holds the target of each position, or IGNORED; for a causal model it is shifted
    already. `logits` is then float32 [rows, 2]: the sum of the losses of a row's targets, and their number.
    Without `labels` the model is as it was.

    Raises:
        UserError: the model has no plain linear output layer, or does something with what that gives.
    """
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        kind = "none" if head is None else f"a {type(head).__name__}"
        raise UserError(f"{type(model).__name__} has no linear output layer, but {kind}: it cannot be trained here.")
    if not model.get_input_embeddings().weight.is_meta:
        _check_last(model, head)
    # The object stays, with its name and its weight, which may be tied or gathered by whoever split the model.
    head.__class__ = LossHead
    model.register_forward_pre_hook(_hand_over, with_kwargs=True)


def _check_last(model: nn.Module, head: nn.Linear) -> None:
    """Raise a `UserError` where the model's logits are not what the head has given, untouched."""
    given: list[Tensor] = []
    hook = head.register_forward_hook(lambda module, args, output: given.append(output))
    try:
        with torch.no_grad():
            logits = model(input_ids=torch.ones(1, 2, dtype=torch.int64, device=head.weight.device)).logits
    finally:
        hook.remove()
    if len(given) != 1 or logits is not given[0]:
        raise UserError(
            f"{type(model).__name__} scales or caps the logits that its output layer gives, so their losses cannot be "
            "computed there: it cannot be trained here."
        )


def _hand_over(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Leave the labels with the head of this very model, which may be a copy of the one that was prepared."""
    labels = kwargs.pop("labels", None)
    model.get_output_embeddings().labels = labels
    return args, kwargs


@dataclass(frozen=True)
class Part:
    """The rows of the weight that this rank has, where they are divided over the ranks of a group."""

    first: int
    group: dist.ProcessGroup


class LossHead(nn.Linear):
    """A linear layer that, where there are labels, gives each row's sum of losses and number of targets.

    The loss is the cross-entropy in float32 of logits in the dtype of autocast, as in transformers.
    """

    labels: Tensor | None = None  # for the next pass
    part: Part | None = None

    def divide(self, first: int, group: dist.ProcessGroup) -> None:
        """Say that weight and bias are divided over the ranks of a group, this rank's rows beginning at `first`.

        Their `to_local` then gives this rank's part.
        """
        self.part = Part(first, group)

    def forward(self, hidden: Tensor) -> Tensor:
        labels, self.labels = self.labels, None
        if labels is None:
            return super().forward(hidden)
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.weight.dtype
        weight, bias = self.weight, self.bias
        if self.part is not None:
            weight, bias = weight.to_local(), None if bias is None else bias.to_local()
        # Autocast would keep a copy of the weight that has lost its gradient, and give it to others.
        with torch.autocast(device, enabled=False):
            sums = _RowLosses.apply(hidden, weight, bias, labels, dtype, self.part)
        return torch.stack([sums, (labels != IGNORED).sum(1).float()], dim=1)


class _RowLosses(torch.autograd.Function):
    """Sums of cross-entropies over the targets of each row, float32 [rows].

    The logits of a few targets at a time are computed once forward, where of each target only the logarithm of the
    sum of exponentials is kept, and again backward. Where ranks have a part of the vocabulary each, they exchange
    three numbers for a target, and the gradient of its hidden state (Shoeybi et al. 2019, section 3).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        dtype: torch.dtype,
        part: Part | None,
    ) -> Tensor:
        """hidden [rows, length, width], weight [vocabulary, width], bias [vocabulary], labels [rows, length]."""
        places = (labels.flatten() != IGNORED).nonzero().squeeze(1)
        targets = labels.flatten()[places] - (part.first if part else 0)
        mine = (targets >= 0) & (targets < len(weight))
        targets = torch.where(mine, targets, 0)
        found = torch.empty(2, len(places), dtype=torch.float32, device=hidden.device)
        normalisers, scores = found
        for piece, logits, _ in _pieces(hidden, weight, bias, places, dtype):
            normalisers[piece] = logits.logsumexp(1)
            scores[piece] = logits.gather(1, targets[piece, None]).squeeze(1)
        if part is not None:
            largest = normalisers.clone()
            dist.all_reduce(largest, dist.ReduceOp.MAX, part.group)
            found.copy_(torch.stack([(normalisers - largest).exp(), scores * mine]))
            dist.all_reduce(found, group=part.group)
            normalisers.log_().add_(largest)
        ctx.save_for_backward(hidden, weight, bias, places, targets, mine, normalisers)
        ctx.dtype, ctx.part = dtype, part
        losses = torch.zeros(labels.numel(), dtype=torch.float32, device=hidden.device)
        losses[places] = normalisers - scores
        return losses.view_as(labels).sum(1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, places, targets, mine, normalisers = ctx.saved_tensors
        scale = gradient[places // hidden.shape[1]]
        of_hidden = torch.zeros(hidden.shape, dtype=hidden.dtype, device=hidden.device)
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        of_bias = torch.zeros_like(bias) if ctx.needs_input_grad[2] else None
        with torch.autocast(hidden.device.type, enabled=False):
            cast = weight.to(ctx.dtype)
            for piece, logits, states in _pieces(hidden, cast, bias, places, ctx.dtype):
                # d loss / d logits = softmax - 1 at the target.
                of_logits = logits.sub_(normalisers[piece, None]).exp_()
                of_logits.scatter_add_(1, targets[piece, None], -mine[piece, None].float())
                of_logits = of_logits.mul_(scale[piece, None]).to(ctx.dtype)
                of_hidden.flatten(0, 1)[places[piece]] = (of_logits @ cast).to(hidden.dtype)
                if of_weight is not None:
                    _add_product(of_weight, of_logits.T, states)
                if of_bias is not None:
                    of_bias += of_logits.sum(0)
        if ctx.part is not None:
            dist.all_reduce(of_hidden, group=ctx.part.group)
        return of_hidden, of_weight, of_bias, None, None, None


def _pieces(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, places: Tensor, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """A few places after another: their logits [few, vocabulary] in float32, and states [few, width] in `dtype`."""
    size = max(1, PIECE.get(hidden.device.type, PIECE_ELSEWHERE) // len(weight))
    weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    for start in range(0, len(places), size):
        piece = slice(start, start + size)
        states = hidden.flatten(0, 1)[places[piece]].to(dtype)
        yield piece, F.linear(states, weight, bias).float(), states


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, without another matrix of that size where the types allow it."""
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right
