"""The repeated blocks of a transformer: where a model is sharded or cut."""

from torch import nn

from toolkit.errors import UserError


def compile_blocks(model: nn.Module) -> None:
    """Have each repeated block compiled at its first use, in place, so that no name of a parameter changes.

    Blocks of one kind share what is compiled. Shapes are dynamic: a new length compiles nothing.
    """
    for block in blocks(model)[1]:
        block.compile(dynamic=True)


def blocks(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """The qualified name of the list of repeated blocks, and the list.

    It is the `nn.ModuleList` that holds the most parameters, among those whose members have submodules of their own.

    Raises:
        UserError: the model has no such list.
    """
    lists = [
        (sum(p.numel() for p in module.parameters()), name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and all(any(True for _ in member.children()) for member in module)
    ]
    parameters, name, module = max(lists, key=lambda entry: entry[0], default=(0, "", None))
    if not parameters:
        raise UserError(
            f"{type(model).__name__} has no list of repeated blocks (nn.ModuleList) at which it could be sharded or "
            "cut. Use accelerate_configs/multi_gpu.yaml, which needs none."
        )
    return name, module
