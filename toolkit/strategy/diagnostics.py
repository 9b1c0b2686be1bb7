"""What a step costs: bytes sent and held, time waited, memory, energy; and whether replicas stayed identical."""

import hashlib
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from toolkit.phases import FIRST, LAST, Phases
from toolkit.report.console import warn
from toolkit.report.facts import peak_resident
from toolkit.strategy.base import Seed, Strategy, Update
from toolkit.task import Batch

MEASURED_STEP = 3  # the first ones allocate, and fill buffers


class Measured:
    """A strategy that does what the given one does, and measures one step of it.

    Every rank holds its own figures; `report` puts them together.

    Args:
        profile: also what the time of some steps is spent on.
    """

    def __init__(self, strategy: Strategy, profile: bool) -> None:
        self.strategy = strategy
        self.traffic = Traffic()
        self.held: dict[str, int] = {}
        self.phases = Phases() if profile else None
        self.began: float | None = None  # when the first step did, in seconds since 1970
        self.energy: list[float] = []  # behind each step, in joules

    def __getattr__(self, name: str) -> Any:
        return getattr(self.strategy, name)

    def run(self, batches: Sequence[Batch], weight: float, seed: Seed) -> Tensor:
        self.began = self.began or time.time()
        self.measuring = seed.step == MEASURED_STEP
        if self.phases:
            self.phases.before(seed.step)
        if not self.measuring:
            return self.strategy.run(batches, weight, seed)
        with self.traffic:
            return self.strategy.run(batches, weight, seed)

    def update(self, lr: float, loss: Tensor) -> Update:
        if not self.measuring:
            update = self.strategy.update(lr, loss)
        else:
            self.held = self.strategy.held()  # gradients are still there, the optimizer's state is the last step's
            with self.traffic:
                update = self.strategy.update(lr, loss)
        used = energy(self.strategy)
        self.energy += [] if used is None else [used]
        return update


def report(strategy: Strategy) -> dict[str, Any]:
    """The figures of all ranks, in rank order, on every rank; needs a `Measured` that has trained. Collective."""
    if strategy.phases and strategy.phases.seconds is None:
        warn(f"--profile times steps {FIRST} to {LAST} of a run that goes on behind them, which this one did not.")
    own = {
        "bytes_sent": strategy.traffic.sent,
        "bytes_held": strategy.held,
        "idle_share": getattr(strategy, "idle", None),
        "expected_idle_share": getattr(strategy, "expected_idle", None),
        "memory": [peak_memory(device) | {"device": str(device)} for device in devices(strategy)],
        "began": strategy.began,
        "energy": strategy.energy,
        "phases": strategy.phases and strategy.phases.seconds,
        "checksums": [(name, part, _checksum(tensor)) for name, part, tensor in strategy.parts()],
    }
    ranks: list[Any] = [own]
    if dist.is_initialized():
        ranks = [None] * dist.get_world_size()
        dist.all_gather_object(ranks, own)
    checksums = [entry for rank in ranks for entry in rank.pop("checksums")]
    return {"ranks": ranks, "replicas": compare_replicas(checksums)}


def devices(strategy: Strategy) -> list[torch.device]:
    """The devices that this process computes on."""
    if strategy.device.type == "cuda" and strategy.devices > 1:
        return [torch.device("cuda", index) for index in range(strategy.devices)]
    return [strategy.device]


def peak_memory(device: torch.device) -> dict[str, int | None]:
    """The most bytes that were taken since training began: on a GPU by tensors, and by the allocator with what it
    keeps for later; and by the process in main memory, since it started.
    """
    on_gpu = device.type == "cuda"
    return {
        "peak_allocated": torch.cuda.max_memory_allocated(device) if on_gpu else None,
        "peak_reserved": torch.cuda.max_memory_reserved(device) if on_gpu else None,
        "peak_resident": peak_resident(),
    }


def energy(strategy: Strategy) -> float | None:
    """Joules that the devices of this process have used since their driver was loaded; None where none tells."""
    if strategy.device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        ids = [f"GPU-{torch.cuda.get_device_properties(device).uuid}" for device in devices(strategy)]
        handles = [pynvml.nvmlDeviceGetHandleByUUID(id) for id in ids]
        return sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, handles)) / 1000
    except pynvml.NVMLError:
        return None


def compare_replicas(checksums: Iterable[tuple[str, str, str]]) -> dict[str, Any]:
    """How many (name, part) are held more than once, and the names of those that are not the same everywhere."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, part, checksum in checksums:
        found.setdefault((name, part), []).append(checksum)
    replicated = {key: sums for key, sums in found.items() if len(sums) > 1}
    return {
        "replicated": len(replicated),
        "different": sorted({name for (name, _), sums in replicated.items() if len(set(sums)) > 1}),
    }


def _checksum(tensor: Tensor) -> str:
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha1(content.numpy(), usedforsecurity=False).hexdigest()


class Traffic(TorchDispatchMode):
    """Counts the bytes that this rank sends in collectives, as ring algorithms send them.

    Of a full tensor of n bytes on N ranks (nccl-tests, doc/PERFORMANCE.md): all-reduce 2 (N - 1) / N n; reduce-scatter,
    all-gather and all-to-all (N - 1) / N n; broadcast the same on average over ranks; send n.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "_c10d_functional"):
            group = _group(func, args)
            if group is not None:
                name = func.overloadpacket.__name__
                # Inputs and outputs, whichever is the full tensor.
                whole = max(map(_bytes, (args[0], args[1], result)))
                self.sent += round(_factor(name, group.size()) * whole)
        return result


def _factor(name: str, ranks: int) -> float:
    if name.startswith(("recv", "barrier", "wait")):
        return 0.0
    if name.startswith("send"):
        return 1.0
    twice = name.startswith(("allreduce", "all_reduce"))
    return (2 if twice else 1) * (ranks - 1) / ranks


def _bytes(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, list | tuple):
        return sum(map(_bytes, value))
    return 0


def _group(func: Any, args: tuple) -> dist.ProcessGroup | None:
    for argument, value in zip(func._schema.arguments, args):
        if argument.name == "process_group":
            return dist.ProcessGroup.unbox(value)
        if argument.name == "group_name":
            return dist.distributed_c10d._resolve_process_group(value)
    return None
