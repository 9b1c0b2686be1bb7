"""The gradient of the input embeddings, made dense once for several micro-batches.

Autograd makes a gradient of the whole vocabulary for every micro-batch, mostly zeros. On a CPU, where a step
is cut finely, that costs more than all other work that a micro-batch adds.
"""

from typing import Any

import torch
from torch import Tensor, nn


class EmbeddingGradient:
    """Takes the embeddings out of the graph while `apart`, and adds their gradient to the weight in `add`."""

    def __init__(self, model: nn.Module) -> None:
        self.apart = False
        self.parts: list[tuple[Tensor, Tensor]] = []  # token ids, and the leaf that took the place of the output
        self.module = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        plain = type(self.module) is nn.Embedding and not self.module.scale_grad_by_freq and not self.module.sparse
        if plain and self.module.weight.requires_grad:
            self.module.register_forward_hook(self._cut)

    def _cut(self, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if not self.apart or not torch.is_grad_enabled():
            return None
        leaf = output.detach().requires_grad_()
        self.parts.append((inputs[0], leaf))
        return leaf

    @property
    def full(self) -> bool:
        """Whether what has come together takes as much memory as the dense gradient."""
        return bool(self.parts) and sum(ids.numel() for ids, _ in self.parts) >= len(self.module.weight)

    def add(self) -> None:
        """Add what has come together to the weight's gradient."""
        parts = [(ids, leaf.grad) for ids, leaf in self.parts if leaf.grad is not None]
        self.parts = []
        if not parts:
            return
        ids = torch.cat([ids.reshape(-1) for ids, _ in parts])
        gradient = torch.cat([grad.reshape(-1, grad.shape[-1]) for _, grad in parts])
        weight, padding = self.module.weight, self.module.padding_idx
        dense = torch.ops.aten.embedding_dense_backward(
            gradient, ids, len(weight), -1 if padding is None else padding, False
        )
        weight.grad = dense if weight.grad is None else weight.grad.add_(dense)
