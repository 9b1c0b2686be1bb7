"""Pipeline parallelism: consecutive blocks on consecutive ranks, which work on different micro-batches at once."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from toolkit import adapters
from toolkit.attention import keep_padding
from toolkit.errors import UserError
from toolkit.launch.environment import World
from toolkit.phases import phase
from toolkit.report.console import say, warn
from toolkit.strategy.anatomy import examine
from toolkit.strategy.base import OptimizerRule, Seed, Size, describe_unused
from toolkit.strategy.distributed import Distributed
from toolkit.strategy.portable import MODEL, Entry, Wanted, everything
from toolkit.strategy.schedule import FORWARD, idle_share, order
from toolkit.strategy.single import batch_norms
from toolkit.strategy.stages import Saved, Stage, make_plan
from toolkit.task import Batch, Task

PER_STAGE = 4  # micro-batches of a step by default: stages then idle for less than a fifth of it
BUCKET = 25 * 2**20  # bytes of gradients that are summed over data ranks in one message


class Pipeline(Distributed):
    """A stage of the model on each rank of a group; groups of equal ranks are data parallel.

    All stages of a group have the same micro-batches, so every one knows the shapes of what it receives, and
    takes masks and positions from its own copy. Hidden states go down the pipeline and their gradients up, each
    through a process group of its own: neither direction waits for the other.

    Args:
        stages: they divide the number of processes.
        micro_batches: of a step; 1: one stage works at a time, plain model parallelism.
    """

    alone = False

    def __init__(self, world: World, stages: int, micro_batches: int | None, schedule: str) -> None:
        super().__init__(world, model_ranks=stages)
        self.stages, self.schedule = stages, schedule
        self.micro_batches = micro_batches or PER_STAGE * stages
        self.name = f"pipeline of {stages} stages"
        self.name += f" x {self.data_world} data ranks" if self.data_world > 1 else ""
        self.name += f" ({schedule})" if self.micro_batches > 1 else " (one micro-batch: model parallelism)"
        self.pipelines = [list(range(start, start + stages)) for start in range(0, world.size, stages)]
        self.first = self.rank - self.model_rank
        before = self.rank - 1 if self.model_rank else None
        after = self.rank + 1 if self.model_rank < stages - 1 else None
        self.hidden = Channel(self._group(self.pipelines), before, after)
        self.gradient = Channel(self._group(self.pipelines), after, before)
        self.clock = Clock(self.device)

    @staticmethod
    def _group(ranks: list[list[int]]) -> dist.ProcessGroup:
        return dist.new_subgroups_by_enumeration(ranks)[0]

    def build(self, task: Task, rule: OptimizerRule, probe: Batch) -> None:
        self.task, self.rule = task, rule
        model = self.model = task.model(dtype=torch.float32)
        keep_padding(model)
        if batch_norms(model):
            warn("the model has batch normalisation: its training depends on how a step is cut.")
        autocast = torch.autocast("cpu", dtype=self.precision.dtype, enabled=self.precision.dtype is not None)
        seen = examine(model, task, probe, autocast)
        for name in seen.unused:
            model.get_parameter(name).requires_grad_(False)
        describe_unused(seen.unused)
        self.size = Size.of(model)
        whole = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.whole_groups = [{key: g[key] for key in ("weight_decay", "names")} for g in rule.groups(whole)]
        self.plan = make_plan(model, seen, self.stages)
        self.stage = Stage(model, seen, self.plan, self.model_rank)
        self.stage.check(seen, self.plan.layers[self.model_rank], probe, autocast)
        say(f"{self.plan.describe()}; every process loads the whole model before it keeps its stage")
        model.to(self.device).train()
        self.parameters = {name: p for name, p in self.stage.parameters.items() if p.requires_grad}
        if not self.parameters:
            raise UserError(
                f"no parameter of stage {self.model_rank} of the pipeline is trained: leave out --lora_target_modules, "
                "so that all blocks get adapters, or use fewer stages."
            )
        self.tied = [self.parameters[name] for name in self.plan.tied if name in self.parameters]
        self.ends = self._group([[ranks[0], ranks[-1]] for ranks in self.pipelines]) if self.plan.tied else None
        self.optimizer = rule.make(self.parameters)

    def run(self, batches: Sequence[Batch], weight: float, seed: Seed) -> Tensor:
        total = torch.zeros((), device=self.device)
        waiting: dict[int, tuple[Tensor | None, Tensor]] = {}  # passes whose backward is still to come
        self.clock.start()
        with self.precision.autocast():
            for kind, index in order(self.model_rank, self.stages, len(batches), self.schedule):
                if kind == FORWARD:
                    self.running = index
                    self.seed(seed.of(self.data_rank, index, self.model_rank))
                    waiting[index] = self._forward(batches[index].to(self.device), weight)
                    if self.stage.last:
                        total += waiting[index][1].detach()
                else:
                    self._backward(*waiting.pop(index))
        self.hidden.flush()
        self.gradient.flush()
        dist.all_reduce(total)  # only last stages have a loss
        self.clock.stop()
        with phase("communication"):
            self._sum_gradients()
        return total

    def _forward(self, batch: Batch, weight: float) -> tuple[Tensor | None, Tensor]:
        """What the stage received and what it gives: a hidden state or, on the last stage, the loss."""
        received = self._receive(batch)
        with self.clock.busy(), phase("forward"):
            if received is not None:
                received.requires_grad_()
            given = self.stage(batch.inputs, received)
            if self.stage.last:
                given = self.task.loss(given, batch)[: len(batch.ids)].sum() / weight
        if not self.stage.last:
            given = given.to(self.stage.sends)
            self.hidden.send(given.detach())
        return received, given

    def _backward(self, received: Tensor | None, given: Tensor) -> None:
        gradient = None if self.stage.last else self.gradient.receive(torch.empty_like(given))
        with self.clock.busy(), phase("backward"):
            if gradient is None:
                self.precision.backward(given)
            elif given.requires_grad:  # else nothing up to here is trained
                with torch.autocast(self.device.type, enabled=False):
                    given.backward(gradient)
        if received is not None:
            self.gradient.send(received.grad)

    def _receive(self, batch: Batch) -> Tensor | None:
        """The hidden state of the stage before, [rows, length, width]."""
        if self.model_rank == 0:
            return None
        rows, length = next(iter(batch.inputs.values())).shape[:2]
        shape = (rows, length, self.stage.width)
        return self.hidden.receive(torch.empty(shape, dtype=self.stage.receives, device=self.device))

    def _sum_gradients(self) -> None:
        """Over the two stages that hold a tied parameter, then over data ranks."""
        for parameter in self.parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.tied:
            _add_up([parameter.grad for parameter in self.tied], self.ends)
        if self.data_world > 1:
            _add_up(self.gradients(), self.data_group)

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        # Tied parameters count on the first stage.
        counted = [p.grad for name, p in self.parameters.items() if self.model_rank == 0 or name not in self.plan.tied]
        squared = nn.utils.get_total_norm(counted).double() ** 2
        dist.all_reduce(squared, group=self.gradient.group)
        return squared.sqrt().float()

    def infer(self, batch: Batch) -> Mapping[str, Tensor]:
        batch = batch.to(self.device)
        given = self.stage(batch.inputs, self._receive(batch))
        outputs: dict[str, Tensor] = {}
        if self.stage.last:
            outputs = {name: value.contiguous() for name, value in given.items() if isinstance(value, Tensor)}
        else:
            self.hidden.send(given.to(self.stage.sends))
        shapes: list[Any] = [{name: (value.shape, value.dtype) for name, value in outputs.items()}]
        last = self.first + self.stages - 1
        dist.broadcast_object_list(shapes, last, self.gradient.group, self.device)
        for name, (shape, dtype) in shapes[0].items():
            value = outputs.setdefault(name, torch.empty(shape, dtype=dtype, device=self.device))
            dist.broadcast(value, last, self.gradient.group)
        self.hidden.flush()
        return outputs

    def groups(self) -> list[dict]:
        return self.whole_groups

    def weights(self, wanted: Wanted = everything) -> Iterator[tuple[str, Tensor | None]]:
        own = self.stage.tensors()
        for name, saved in self.plan.state.items():
            if not wanted(name):
                continue
            tensor = own.get(saved.name)
            if self.data_rank == 0 and saved.stage > 0:
                if self.model_rank == saved.stage:
                    dist.send(tensor.detach().contiguous(), 0, self.gradient.group)
                elif self.rank == 0:
                    tensor = torch.empty(saved.shape, dtype=saved.dtype, device=self.device)
                    dist.recv(tensor, saved.stage, self.gradient.group)
            yield name, tensor.detach().cpu() if self.rank == 0 else None

    def saved(self) -> Iterator[tuple[str, Tensor]]:
        names = {saved.name for saved in self._kept()}
        yield from ((name, tensor) for name, tensor in self.stage.tensors().items() if name in names)

    def entries(self) -> dict[str, Entry]:
        model = {saved.name: Entry(saved.dtype, tuple(saved.shape)) for saved in self._kept()}
        trained = [name for group in self.whole_groups for name in group["names"]]
        return {f"{MODEL}/{name}": entry for name, entry in model.items()} | {
            f"{moment}/{name}": Entry(torch.float32, model[name].shape) for moment in self.moments for name in trained
        }

    def _kept(self) -> list[Saved]:
        """The whole model's tensors that a checkpoint holds."""
        return [saved for saved in self.plan.state.values() if adapters.own(self.model, saved.name)]

    def holders(self, key: str) -> Sequence[int]:
        name = key.partition("/")[2]
        stage = next(saved.stage for saved in self.plan.state.values() if saved.name == name)
        return range(stage, self.world_size, self.stages)

    def tensors(self) -> Iterator[tuple[str, Tensor | None]]:
        own = dict(super().tensors())
        yield from ((key, own.get(key)) for key in self.entries())

    def held(self) -> dict[str, int]:
        """Like one process, 16 bytes a parameter of AdamW (4 itself, 4 its gradient, 8 its moments), for the stage's.

        A tied parameter counts on both stages that hold it.
        """
        return super().held()

    @property
    def idle(self) -> float:
        """The share of the last step's passes in which this stage did none; compare `schedule.idle_share`."""
        return self.clock.idle()

    @property
    def expected_idle(self) -> float:
        """The same for stages and micro-batches of equal cost, without any cost of sending."""
        return idle_share(self.stages, self.micro_batches)


class Channel:
    """Messages in one direction along the pipeline, in the order of the schedule.

    Args:
        source, target: the ranks beside this one; None at the end of the pipeline.
    """

    def __init__(self, group: dist.ProcessGroup, source: int | None, target: int | None) -> None:
        self.group, self.source, self.target = group, source, target
        self.sent: list[tuple[dist.Work, Tensor]] = []  # tensors live until they have been read

    def send(self, tensor: Tensor) -> None:
        """Without waiting for the receiver."""
        tensor = tensor.contiguous()
        self.sent.append((dist.isend(tensor, self.target, self.group), tensor))

    def receive(self, tensor: Tensor) -> Tensor:
        """Fill `tensor` with the next message."""
        dist.recv(tensor, self.source, self.group)
        return tensor

    def flush(self) -> None:
        """Wait until all that was sent has arrived."""
        for work, _ in self.sent:
            work.wait()
        self.sent.clear()


class Clock:
    """How long the passes of a step took, waiting for other stages left out."""

    def __init__(self, device: torch.device) -> None:
        self.on_device = device.type == "cuda"

    def start(self) -> None:
        self.began, self.passes = self._now(), []

    @contextmanager
    def busy(self) -> Iterator[None]:
        began = self._now()
        yield
        self.passes.append((began, self._now()))

    def stop(self) -> None:
        self.ended = self._now()

    def idle(self) -> float:
        """The share of the time from start to stop outside passes."""
        busy = sum(self._between(*ends) for ends in self.passes)
        return 1 - busy / self._between(self.began, self.ended)

    def _now(self) -> Any:
        if not self.on_device:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, began: Any, ended: Any) -> float:
        if not self.on_device:
            return ended - began
        ended.synchronize()
        return began.elapsed_time(ended)


def _add_up(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum over a group, in place, several gradients to a message."""
    bucket, size = [], 0
    for index, gradient in enumerate(gradients):
        bucket.append(gradient)
        size += gradient.nbytes
        if size < BUCKET and index < len(gradients) - 1:
            continue
        flat = bucket[0] if len(bucket) == 1 else torch.cat([part.flatten() for part in bucket])
        dist.all_reduce(flat, group=group)
        if len(bucket) > 1:
            for part, total in zip(bucket, flat.split([part.numel() for part in bucket])):
                part.copy_(total.view_as(part))
        bucket, size = [], 0
