"""nn.DataParallel, the documented baseline: one process, a fresh replica on every GPU for each pass."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from toolkit.launch.environment import World
from toolkit.report.console import warn
from toolkit.strategy.precision import Precision
from toolkit.strategy.single import SingleProcess
from toolkit.task import Batch, Task


class DataParallel(SingleProcess):
    """A micro-batch is split along dimension 0 over the replicas; gradients meet on the first device.

    Args:
        replicas: replicas of the rehearsal on a CPU; on GPUs there is one for each visible device.
        loss: "gathered": outputs are gathered and the loss is computed on the first device, the
            textbook form; "replica": each replica computes the loss of its rows, and only that is gathered.
    """

    name = "DataParallel"

    def __init__(self, world: World, replicas: int | None, loss: str) -> None:
        super().__init__(world)
        self.loss = loss
        if world.device.type == "cuda":
            self.devices = torch.cuda.device_count()
            if self.devices == 1:
                warn("DataParallel on one GPU is no parallelism: it runs as one process does.")
            elif self.devices > 2:
                warn(f"with {self.devices} GPUs, DDP is the better choice: accelerate_configs/multi_gpu.yaml.")
        else:
            self.devices = replicas or 2
            self.name = f"DataParallel rehearsal with {self.devices} replicas (says nothing about speed or memory)"

    def wrap(self, model: nn.Module, probe: Batch) -> nn.Module:
        self.replica = Replica(model, self.precision, self.task)
        if self.device.type == "cuda":
            return nn.DataParallel(self.replica)
        return Rehearsal(self.replica, self.devices)

    def seed(self, value: int) -> None:
        super().seed(value)
        self.replica.seed = value

    def infer(self, batch: Batch) -> Mapping[str, Tensor]:
        return self.forward(**batch.to(self.device).inputs)

    def rows(self, batch: Batch) -> Tensor:
        if self.loss == "replica":
            return self.forward(targets=batch.targets, **batch.inputs)["rows"]
        return super().rows(batch)


class Replica(nn.Module):
    """What runs on each device: the model under its own autocast and, given targets, its own loss."""

    def __init__(self, model: nn.Module, precision: Precision, task: Task) -> None:
        super().__init__()
        self.model = model
        self.precision = precision
        self.task = task
        self.seed = 0

    def forward(self, targets: Tensor | None = None, **inputs: Tensor) -> Mapping[str, Tensor]:
        device = next(iter(inputs.values())).device
        if device.index:
            # Every GPU has a generator of its own; seeded alike, all replicas would drop the same units.
            torch.cuda.manual_seed(self.seed + device.index)
        # DataParallel runs replicas in threads, and autocast is a state of the thread.
        with self.precision.autocast():
            outputs = self.model(**inputs)
            if targets is not None:
                count = len(targets)
                return {"rows": self.task.loss(outputs, Batch(inputs, targets, list(range(count)), count, 0))}
        return {name: value for name, value in outputs.items() if isinstance(value, Tensor)}


class Rehearsal(nn.DataParallel):
    """DataParallel's own forward over replicas on one CPU, where torch would pass straight through.

    Replicas are views of the one set of parameters, made as torch makes them on GPUs, and run one
    after another in the order of their rows, so that dropout repeats.
    """

    def __init__(self, module: nn.Module, replicas: int) -> None:
        super().__init__(module)
        self.device_ids = list(range(replicas))
        self.output_device = 0
        self.dim = 0
        self.src_device_obj = torch.device("cpu")

    def scatter(self, inputs: tuple, kwargs: dict[str, Any], device_ids: list[int]) -> tuple[list, list]:
        """The rows in as many consecutive parts of equal size as there are replicas, as torch.chunk cuts."""
        parts = {name: value.chunk(len(device_ids)) for name, value in kwargs.items()}
        count = max(len(chunks) for chunks in parts.values())
        return [()] * count, [{name: chunks[i] for name, chunks in parts.items()} for i in range(count)]

    def replicate(self, module: nn.Module, device_ids: list[int]) -> list[nn.Module]:
        return [_replica(module) for _ in device_ids]

    def parallel_apply(self, replicas: list[nn.Module], inputs: list, kwargs: list) -> list:
        return [replica(*args, **kw) for replica, args, kw in zip(replicas, inputs, kwargs)]

    def gather(self, outputs: list[Mapping[str, Tensor]], output_device: int) -> Mapping[str, Tensor]:
        return {name: torch.cat([output[name] for output in outputs]) for name in outputs[0]}


def _replica(network: nn.Module) -> nn.Module:
    """A copy whose parameters are plain attributes: differentiable views of the network's own."""
    copies = {module: module._replicate_for_data_parallel() for module in network.modules()}
    for module, copy in copies.items():
        for name, child in module._modules.items():
            if child is not None:
                setattr(copy, name, copies[child])
        for name, parameter in module._parameters.items():
            setattr(copy, name, None if parameter is None else parameter.view_as(parameter))
    return copies[network]
