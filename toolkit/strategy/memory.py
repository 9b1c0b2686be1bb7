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

    A few small micro-batches give the bytes per padded token and per token x length; those are
    extrapolated to 90 % of what is free beside gradients and optimizer state, and the least over ranks is
    taken. Then the worst micro-batch of the run is tried, with that state's memory taken, and the bound
    halved until it passes. Strategies whose passes need other ranks keep the flag's bound: where one rank runs
    out of memory in a collective, the others would wait.

    Raises:
        UserError: not even a single row of the longest sample fits.
    """
    if meter is None or not strategy.alone:
        return feed.bound
    parameters = strategy.size.trainable_parameters
    state = parameters * (8 if rule.name == "adamw" else 0)
    own = _extrapolated(strategy, feed, meter, beside=state + 4 * parameters)
    everyone = torch.cat(strategy.gather(torch.tensor([[own.tokens, own.area]], dtype=torch.float64)))
    feed.bound = replace(own, tokens=everyone[:, 0].min().item(), area=everyone[:, 1].min().item())
    held = meter.reserve(state)
    while True:
        worst = feed.worst()
        rows, length = next(iter(worst.inputs.values())).shape[:2]
        fits = _tried(lambda worst=worst: strategy.trial(worst))
        strategy.clear()
        if not strategy.total([float(not fits)])[0]:
            break
        if rows == 1:
            raise UserError(f"one sample of {length} tokens does not fit on this device: lower --max_length.")
        feed.bound = feed.bound.halved(rows, length)
    del held
    say(f"micro-batches of up to {feed.bound.rows_at(length)} rows of {length} tokens fit on a device")
    return feed.bound


def _extrapolated(strategy: Strategy, feed: Feed, meter: Meter, beside: int) -> Bound:
    """This rank's bound, where gradients and optimizer state take `beside` bytes of what is free."""
    measured: list[tuple[float, float, float]] = []
    fits = _tried(lambda: measured.append(_measured(strategy, feed, meter)))
    strategy.clear()
    room = SHARE * (meter.free() - beside)
    if room <= 0:
        raise UserError(
            f"the model's gradients and optimizer state ({beside / 2**30:.1f} GiB) do not fit beside its weights "
            "on this device. Use a config that shards them."
        )
    fixed, linear, square = measured[0] if fits else (math.inf, 1.0, 0.0)
    if fixed >= room:
        return feed.bound.halved(1, int(feed.samples.lengths.max()))  # one row at a time, which is tried next
    return replace(
        feed.bound,
        tokens=min(feed.bound.tokens, (room - fixed) / linear),
        area=(room - fixed) / square if square > 0 else math.inf,
    )


def _tried(action: Callable[[], None]) -> bool:
    """Whether `action` found enough memory."""
    try:
        action()
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        return False
    return True


def _measured(strategy: Strategy, feed: Feed, meter: Meter) -> tuple[float, float, float]:
    """Bytes of a pass in itself, per padded token, and per padded token x length.

    Two micro-batches of one length, one twice the other, tell what grows with the batch from what does
    not; a short and a long sample tell what grows with the length.
    """
    by_length = np.argsort(feed.samples.lengths, kind="stable")
    short, long = int(by_length[len(by_length) // 4]), int(by_length[-1])
    strategy.trial(collate(feed.task, feed.samples, np.array([short]), 0))  # gradients and workspaces, which stay
    lengths = {sample: max(1, int(feed.samples.lengths[sample])) for sample in (short, long)}
    tokens = 2 * strategy.devices * lengths[long]

    def peak(sample: int, rows: int) -> int:
        batch = collate(feed.task, feed.samples, np.full(rows, sample), 0)
        return meter.peak(lambda: strategy.trial(batch))

    def line(sample: int) -> tuple[float, float]:
        rows = tokens // lengths[sample]
        once, twice = peak(sample, rows), peak(sample, 2 * rows)
        return max(0.0, 2 * once - twice), (twice - once) / (rows * lengths[sample])

    (fixed_short, at_short), (fixed_long, at_long) = line(short), line(long)
    fixed = max(fixed_short, fixed_long)
    growth = (at_long - at_short) / (lengths[long] - lengths[short]) if lengths[long] > lengths[short] else 0.0
    if growth <= 0:
        return fixed, max(1.0, at_short, at_long), 0.0
    return fixed, max(1.0, at_long - growth * lengths[long]), growth
