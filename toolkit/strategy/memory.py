"""How large a micro-batch fits: found before step 1 on a device with memory of its own."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

import numpy as np
import torch

from toolkit.data.feed import Feed, collate
from toolkit.data.plan import Bound
from toolkit.errors import UserError
from toolkit.report.console import say
from toolkit.strategy.base import OptimizerRule, Strategy

CPU_TOKENS = 4096  # on a CPU nothing is tried
SHARE = 0.9  # of the free memory that a micro-batch may take


class Meter(Protocol):
    """Reads a device's memory, in bytes."""

    def peak(self, action: Callable[[], None]) -> int:
        """The most memory that `action` took above what was taken before."""

    def free(self) -> int:
        """What could still be taken."""

    def reserve(self, size: int) -> object:
        """Take `size` bytes until the returned object is dropped."""


class CudaMeter:
    """The caching allocator's own counters."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def peak(self, action: Callable[[], None]) -> int:
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        action()
        return torch.cuda.max_memory_allocated(self.device) - before

    def free(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.device)
        cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return free + cached

    def reserve(self, size: int) -> object:
        return torch.empty(size, dtype=torch.uint8, device=self.device)


def out_of_memory(error: BaseException) -> bool:
    """Whether this error says that the device's memory is exhausted."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )


def default_bound(rows: int | None, devices: int, device: torch.device) -> Bound:
    """The bound before anything is measured: the flag's rows, and on a CPU a number of tokens."""
    tokens = CPU_TOKENS * devices if device.type == "cpu" else math.inf
    return Bound(rows and rows * devices, tokens)


def find_bound(strategy: Strategy, feed: Feed, rule: OptimizerRule, meter: Meter | None) -> Bound:
    """The largest micro-batch that fits, the same on every rank.

    Two small micro-batches give the bytes per padded token and per token x length; those are
    extrapolated to 90 % of what is free beside the optimizer's state. Then the worst micro-batch of the
    run is tried, with that state's memory taken, and the bound halved until it passes.

    Raises:
        UserError: not even a single row of the longest sample fits.
    """
    if meter is None:
        return feed.bound
    parameters = sum(p.numel() for p in strategy.model.parameters() if p.requires_grad)
    state = parameters * (8 if rule.name == "adamw" else 0)
    strategy.trial(collate(feed.task, feed.samples, np.array([0]), 0))  # allocations that stay
    linear, square = _slopes(strategy, feed, meter)
    room = SHARE * (meter.free() - state - 4 * parameters)
    if room <= 0:
        raise UserError(
            f"the model's gradients and optimizer state ({(state + 4 * parameters) / 2**30:.1f} GiB) do not fit "
            "beside its weights on this device. Use a config that shards them."
        )
    bound = replace(feed.bound, tokens=room / linear, area=room / square if square > 0 else math.inf)
    # The least over ranks.
    shares = [part.tolist() for part in strategy.gather(torch.tensor([[bound.tokens, bound.area]]).double())]
    feed.bound = replace(bound, tokens=min(s[0][0] for s in shares), area=min(s[0][1] for s in shares))
    held = meter.reserve(state)
    while True:
        worst = feed.worst()
        rows, length = next(iter(worst.inputs.values())).shape[:2]
        failed = 0.0
        try:
            strategy.trial(worst)
        except RuntimeError as error:
            if not out_of_memory(error):
                raise
            failed = 1.0
        strategy.clear()
        if not strategy.total([failed])[0]:
            break
        if rows == 1:
            raise UserError(f"one sample of {length} tokens does not fit on this device: lower --max_length.")
        feed.bound = feed.bound.halved(rows, length)
    del held
    say(f"micro-batches of up to {feed.bound.rows_at(length)} rows of {length} tokens fit on a device")
    return feed.bound


def _slopes(strategy: Strategy, feed: Feed, meter: Meter) -> tuple[float, float]:
    """Bytes per padded token, and per padded token x length, from a short and a long micro-batch."""
    by_length = np.argsort(feed.samples.lengths, kind="stable")
    rows = max(2 * strategy.devices, 2)
    middle, longest = by_length[len(by_length) // 4 :][:rows], by_length[-rows:]
    points = []
    for ids in (middle, longest):
        batch = collate(feed.task, feed.samples, ids, 0)
        count, length = next(iter(batch.inputs.values())).shape[:2]
        points.append((count * length, length, meter.peak(lambda batch=batch: strategy.trial(batch))))
        strategy.clear()
    (tokens_a, length_a, bytes_a), (tokens_b, length_b, bytes_b) = points
    per_a, per_b = bytes_a / tokens_a, bytes_b / tokens_b
    square = max(0.0, (per_b - per_a) / (length_b - length_a)) if length_b > length_a else 0.0
    return max(1.0, per_b - square * length_b), square
