"""What the time of a step is spent on, from a profiler's timeline.

A moment is communication when a message is under way and nothing is computed: what computation hides costs
nothing. Any other moment belongs to the phase that the code is in.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

PHASES = ("data", "forward", "backward", "communication", "optimizer")
FIRST, LAST = 4, 6  # the steps that are timed: before them, buffers and caches fill
PREFIX = "toolkit::"
MESSAGES = ("gloo:", "nccl", "rccl")  # what the profiler calls them
COMMUNICATION = ("c10d::", "_c10d_functional::", *MESSAGES)  # the same and what starts or awaits it
# Microseconds: the host takes as long between two computations without waiting for anything.
BREATH = 50.0

Interval = tuple[float, float]
Item = TypeVar("Item")
_timed: list["Phases"] = []  # the one that is timing now


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Around a part of a step that a timeline shall show under this name, one of `PHASES`."""
    with record_function(PREFIX + name):
        yield
        if _timed and torch.cuda.is_available():
            torch.cuda.synchronize()  # else its kernels would run on into the next phase


def fetched(items: Iterable[Item]) -> Iterator[Item]:
    """The same items; getting one is the phase `data`."""
    iterator = iter(items)
    while True:
        with phase("data"):
            item = next(iterator, None)
        if item is None:
            return
        yield item


class Phases:
    """Times this rank from the passes of step `FIRST` to those of the step behind `LAST`: whole rounds."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] | None = None  # of one step, the mean; None: not timed yet

    def before(self, step: int) -> None:
        """To be called when the passes of a step begin."""
        if step == FIRST:
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self.profiler = profile(activities=activities, acc_events=True)
            self.profiler.start()
            _timed.append(self)
            self.window = record_function(PREFIX + "window")
            self.window.__enter__()
        elif step == LAST + 1 and self in _timed:  # not in a run that went on from a later step
            self.window.__exit__(None, None, None)
            _timed.remove(self)
            self.profiler.stop()
            steps = LAST - FIRST + 1
            found = divide(self.profiler.events())
            self.seconds = {name: microseconds / 1e6 / steps for name, microseconds in found.items()}
            del self.profiler


def divide(events: Sequence[Any]) -> dict[str, float]:
    """Microseconds of each of `PHASES`, of what is in none of them (`unattributed`), and of all (`total`).

    Args:
        events: of torch's profiler, with one window and the phases in it.
    """
    on_device = any(event.device_type == DeviceType.CUDA for event in events)
    spans: dict[str, list[Interval]] = {}
    messages, work = [], []
    for event in events:
        span = (event.time_range.start, event.time_range.end)
        kernel = event.device_type == DeviceType.CUDA
        if event.name.startswith(PREFIX):
            if not kernel:  # where it is repeated, for what it queued
                spans.setdefault(event.name.removeprefix(PREFIX), []).append(span)
        elif event.name.startswith(MESSAGES) and kernel == (on_device and not event.name.startswith("gloo:")):
            messages.append(span)
        # What calls others may wait in between; and where there are kernels, the host's calls only queue them.
        elif kernel == on_device and not event.cpu_children and not event.name.startswith(COMMUNICATION):
            work.append(span)
    window = spans.pop("window")
    exposed = within(without(union(messages), union(work, BREATH)), window)
    seconds = {name: length(without(within(union(spans.get(name, [])), window), exposed)) for name in PHASES}
    seconds["communication"] += length(exposed)
    total = length(window)
    return {**seconds, "unattributed": total - sum(seconds.values()), "total": total}


def union(intervals: Iterable[Interval], gap: float = 0.0) -> list[Interval]:
    """The time that any of them covers, in order; gaps of up to `gap` are closed."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def without(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The time of `intervals` that is in none of `others`; both in order and without overlap."""
    left, at = [], 0
    for start, end in intervals:
        while at < len(others) and others[at][1] <= start:
            at += 1
        covering = at
        while covering < len(others) and others[covering][0] < end:
            if others[covering][0] > start:
                left.append((start, others[covering][0]))
            start = max(start, others[covering][1])
            covering += 1
        if start < end:
            left.append((start, end))
    return left


def within(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """The time that is in both; both in order and without overlap."""
    return without(intervals, without(intervals, others))


def length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
