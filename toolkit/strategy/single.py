"""One process on one device. The other ways to copy a whole model build on it."""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, is_tensor, nn

from toolkit.errors import UserError
from toolkit.launch.environment import World
from toolkit.launch.guard import lost_peer
from toolkit.phases import phase
from toolkit.report.console import warn
from toolkit.strategy.base import (
    OptimizerRule,
    Seed,
    Size,
    Update,
    clip,
    describe_unused,
    finite,
    stored,
    without_gradient,
)
from toolkit.strategy.blocks import compile_blocks
from toolkit.strategy.memory import out_of_memory
from toolkit.strategy.portable import Patience, Portable, Wanted, everything, forever
from toolkit.strategy.precision import Precision
from toolkit.task import Batch, Task


class SingleProcess(Portable):
    """The whole model on one device, and the step as the task defines it."""

    name = "one process"
    data_rank = 0
    data_world = 1
    devices = 1
    repeatable = True
    alone = True
    micro_batches: int | None = None
    running = 0
    compiled = False  # each block, at its first use

    def __init__(self, world: World) -> None:
        self.device = world.device
        self.precision = Precision(world.precision, world.device)

    def build(self, task: Task, rule: OptimizerRule, probe: Batch) -> None:
        self.task = task
        self.rule = rule
        self.model = task.model(dtype=torch.float32).to(self.device)
        self.freeze_unused(probe)
        self.size = Size.of(self.model)
        if self.compiled:
            compile_blocks(self.model)
        self.forward = self.wrap(self.model, probe)
        self.parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        self.optimizer = rule.make(self.parameters)
        self.model.train()

    def wrap(self, model: nn.Module, probe: Batch) -> nn.Module:
        """What is called for a training pass."""
        return model

    def run(self, batches: Sequence[Batch], weight: float, seed: Seed) -> Tensor:
        total = torch.zeros((), device=self.device)
        self.precision.ranks = self.data_world
        with self.precision.autocast():
            for index, batch in enumerate(batches):
                self.running = index
                self.seed(seed.of(self.data_rank, index))
                with self.synchronised(index == len(batches) - 1):
                    with phase("forward"):
                        loss = self.rows(batch.to(self.device))[: len(batch.ids)].sum() / weight
                    with phase("backward"):
                        self.backward(loss * self.data_world)
                total += loss.detach()
        return self.reduce(total)

    def backward(self, loss: Tensor) -> None:
        """Gradients of the loss, which is the whole step's where data ranks take the mean of theirs."""
        self.precision.backward(loss)

    def trial(self, batch: Batch) -> None:
        # Without any collective: where one rank's memory is exhausted, the others must not wait for it. So batch
        # normalisation uses its statistics, and leaves them as they are.
        for module in batch_norms(self.model):
            module.eval()
        try:
            with self.precision.autocast(), self.synchronised(last=False):
                self.precision.backward(self.rows(batch.to(self.device))[:0].sum())
        finally:
            self.model.train()

    def seed(self, value: int) -> None:
        """Seed the dropout of the next micro-batch."""
        torch.manual_seed(value)

    def rows(self, batch: Batch) -> Tensor:
        """The loss of each row, filler included: slicing it off gives it a gradient of exactly 0."""
        return self.task.loss(self.forward(**batch.inputs), batch)

    def synchronised(self, last: bool) -> AbstractContextManager:
        """Around a micro-batch: gradients are exchanged after the last one only."""
        return nullcontext()

    def reduce(self, loss: Tensor) -> Tensor:
        """Sum over data ranks, on the device."""
        return loss

    def update(self, lr: float, loss: Tensor) -> Update:
        gradients = self.gradients()
        self.precision.unscale(gradients)
        norm = self.norm(gradients)
        loss_value, norm_value = torch.stack([loss, norm]).tolist()  # the one read of the step
        applied = finite(loss_value, norm_value)
        if applied:
            clip(gradients, norm, norm_value, self.rule.max_grad_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.updates += applied
        self.precision.adapt(applied)
        self.clear()
        return Update(loss_value, norm_value, applied)

    def gradients(self) -> list[Tensor]:
        """The gradients as this rank holds them."""
        return [p.grad for p in self.parameters.values() if p.grad is not None]

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm of the whole gradient, the same on every rank."""
        return nn.utils.get_total_norm(gradients)

    def overflow(self, update: Update) -> bool:
        return finite(update.loss) and self.precision.overflow()

    def clear(self) -> None:
        self.optimizer.zero_grad()

    @contextmanager
    def inference(self) -> Iterator[None]:
        self.model.eval()
        try:
            # Not inference_mode: DataParallel's threads would not inherit it.
            with torch.no_grad(), self.precision.autocast():
                yield
        finally:
            self.model.train()

    def infer(self, batch: Batch) -> Mapping[str, Tensor]:
        return self.model(**batch.to(self.device).inputs)

    def total(self, values: Sequence[float], patience: Patience = forever) -> list[float]:
        return list(values)

    def gather(self, rows: Tensor) -> list[Tensor]:
        return [rows]

    def groups(self) -> list[dict]:
        return [{"weight_decay": g["weight_decay"], "names": g["names"]} for g in self.optimizer.param_groups]

    def weights(self, wanted: Wanted = everything) -> Iterator[tuple[str, Tensor | None]]:
        for name, tensor in self.model.state_dict().items():
            if wanted(name):
                yield name, tensor.cpu() if self.data_rank == 0 else None

    def parts(self) -> Iterator[tuple[str, str, Tensor]]:
        for name, parameter in self.parameters.items():
            yield name, "whole", parameter

    def held(self) -> dict[str, int]:
        """AdamW: 4 bytes a parameter, 4 its gradient, 8 its moments (float32)."""
        return {
            "parameters": stored(self.model.parameters()),
            "gradients": stored(self.gradients()),
            "optimizer": stored(t for state in self.optimizer.state.values() for t in state.values() if is_tensor(t)),
        }

    def shell(self) -> nn.Module:
        return self.model

    def freeze_unused(self, probe: Batch) -> None:
        """Freeze parameters that the loss does not reach: they would stall DDP, and are no one's to train."""
        unused = self.unused(probe, self.device)
        for name in unused:
            self.model.get_parameter(name).requires_grad_(False)
        describe_unused(unused)
        if batch_norms(self.model):
            warn("the model has batch normalisation: its training depends on how a step is cut.")

    def unused(self, probe: Batch, device: torch.device) -> list[str]:
        """Names of the trainable parameters that the loss does not reach; `device` is where the model is.

        Raises:
            UserError: the model's own code fails on its first batch.
        """
        self.model.eval()
        batch = probe.to(device)
        try:
            with self.precision.autocast():
                loss = self.task.loss(self.model(**batch.inputs), batch).sum()
            loss.backward()
        except Exception as error:
            if out_of_memory(error) or lost_peer(error) or isinstance(error, UserError):
                raise
            frame = traceback.extract_tb(error.__traceback__)[-1]
            reason = next(iter(str(error).splitlines()), "").rstrip(".")
            raise UserError(
                f"{type(self.model).__name__} fails on its first batch, with {type(error).__name__} at "
                f"{frame.filename}:{frame.lineno}: {reason}. Check the model's config.json and "
                "--attn_implementation."
            ) from error
        return without_gradient(self.model)


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """The batch normalisation layers, whose training depends on how a step is cut."""
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
