"""Tensor parallelism: which matrices of a block are split over the ranks of a group, and how.

The pairing is that of Megatron-LM (Shoeybi et al. 2019, section 3): the matrices into attention and feed-forward are
split by columns, those out of them by rows. A block needs two all-reduces of its activations forward. Backward it needs
one for each matrix that is split by columns: four, or five with a gated feed-forward; Megatron-LM, which computes those
of one input together, needs two.
"""

import re
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from toolkit.errors import UserError
from toolkit.strategy.blocks import blocks

if TYPE_CHECKING:
    from transformers import PretrainedConfig

# Names inside a block, for families to which transformers gives no plan.
BERT = {
    "attention.self.query": "colwise",
    "attention.self.key": "colwise",
    "attention.self.value": "colwise",
    "attention.output.dense": "rowwise",
    "intermediate.dense": "colwise",
    "output.dense": "rowwise",
}
DISTILBERT = {
    "attention.q_lin": "colwise",
    "attention.k_lin": "colwise",
    "attention.v_lin": "colwise",
    "attention.out_lin": "rowwise",
    "ffn.lin1": "colwise",
    "ffn.lin2": "rowwise",
}
OWN_PLANS = {"bert": BERT, "roberta": BERT, "electra": BERT, "distilbert": DISTILBERT}
# What the words of a plan mean; a model whose plan has others is refused.
STYLES = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    "colwise_gather_output": lambda: ColwiseParallel(output_layouts=Replicate()),
    "embedding_rowwise": lambda: RowwiseParallel(input_layouts=Replicate()),
    # A norm of each head, whole on every rank though it sees only that rank's heads: its gradient is their sum.
    "replicated_with_grad_allreduce": lambda: SequenceParallel(use_local_output=True),
}
# The parts of a layer with an adapter, x W + x A B, by the style of the layer: what is not named stays whole.
ADAPTED = {
    "colwise": {"base_layer": "colwise", "lora_B.default": "colwise"},
    "rowwise": {"base_layer": "rowwise", "lora_A.default": "rowwise"},
}
ALTERNATIVES = "Use accelerate_configs/fsdp2.yaml, zero3.yaml or pipeline_parallel.yaml, which split every model."


def check(config: "PretrainedConfig", ranks: int) -> None:
    """Raise a `UserError` where a model of this config cannot be split over so many ranks."""
    config = config.get_text_config()
    theirs = config.base_model_tp_plan or {}
    unknown = sorted(set(theirs.values()) - set(STYLES))
    if not theirs and config.model_type not in OWN_PLANS:
        raise UserError(
            f"tp_size: there is no tensor parallel plan for models of type {config.model_type}. {ALTERNATIVES}"
        )
    if unknown:
        raise UserError(
            f"tp_size: the tensor parallel plan of models of type {config.model_type} has {', '.join(unknown)}, which "
            f"is not supported. {ALTERNATIVES}"
        )
    heads = config.num_attention_heads
    sizes = {
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "intermediate_size": getattr(config, "intermediate_size", None) or getattr(config, "hidden_dim", ranks),
    }
    wrong = [f"{name} {size}" for name, size in sizes.items() if size % ranks]
    if wrong:
        raise UserError(
            f"tp_size: {ranks} does not divide the model's {' and '.join(wrong)}: write a tp_size that does. "
            f"{ALTERNATIVES}"
        )


def split(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the model's matrices over the ranks of `mesh`; what the plan does not name stays whole on each of them.

    Args:
        model: whole, the same on every rank.
        mesh: one dimension.
    """
    check(model.config, mesh.size())
    plan = model.tp_plan or _own_plan(model)
    tied = _tied(model)
    for name, module in list(model.named_modules()):
        style = plan.get(re.sub(r"\.\d+(?=\.|$)", ".*", name))
        if style and hasattr(module, "divide"):
            _divide(module, mesh)
        elif style:
            # Every rank has the whole matrix and takes its part: nothing is sent.
            for part, own in ADAPTED[style].items() if hasattr(module, "base_layer") else [("", style)]:
                parallelize_module(module.get_submodule(part), mesh, STYLES[own](), src_data_rank=None)
    for first, *rest in tied:
        for name in rest:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))


def _divide(head: nn.Linear, mesh: DeviceMesh) -> None:
    """Cut the vocabulary of a head that computes the loss by itself, and knows how to with a part of it."""
    size = -(-head.out_features // mesh.size())
    for name, parameter in list(head.named_parameters(recurse=False)):
        cut = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
        setattr(head, name, nn.Parameter(cut, parameter.requires_grad))
    head.divide(size * mesh.get_local_rank(), mesh.get_group())


def _own_plan(model: nn.Module) -> dict[str, str]:
    name, _ = blocks(model)
    return {f"{name}.*.{inside}": style for inside, style in OWN_PLANS[model.config.model_type].items()}


def _tied(model: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [group for group in names.values() if len(group) > 1]
