"""Order and cut: which samples make a step, and how the machine divides them.

The order depends on (seed, epoch) alone. The cut depends on lengths and machine alone, changes only
speed and memory, and is computed by every rank without communication.
"""

import math
from bisect import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from toolkit.task import Drawn, Streamed

GROUPING_SPAN = 50  # global batches that group_by_length sorts together


@dataclass(frozen=True)
class Bound:
    """How large one micro-batch of a data rank may be.

    A micro-batch of r rows padded to length L fits when r <= rows and
    r * L / tokens + r * L * L / area <= 1: memory grows with the padded tokens, and where attention
    scores are kept also with the square of the length. One row always fits.
    """

    rows: int | None = None
    tokens: float = math.inf
    area: float = math.inf

    def rows_at(self, length: int) -> int:
        """Rows that fit at this length, at least 1."""
        share = length / self.tokens + length * length / self.area
        fit = math.floor(1 / share + 1e-9) if share > 0 else self.rows or 2**31
        return max(1, min(fit, self.rows or fit))

    def halved(self, rows: int, length: int) -> "Bound":
        """The bound after a micro-batch of this shape did not fit: half of its rows at that length."""
        return replace(self, tokens=min(self.tokens, max(1, rows // 2) * length))


def order(
    seed: int, epoch: int, samples: int, global_batch: int, group_by: np.ndarray | None = None
) -> list[np.ndarray]:
    """The global batches of an epoch, as arrays of sample ids; the last may be smaller.

    Args:
        group_by: lengths [samples]; given, samples of similar length share a global batch.
    """
    # RandomState's streams are frozen for good, so that an order means the same under every numpy.
    draw = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([seed, epoch])))
    permutation = draw.permutation(samples)
    if group_by is None:
        return [permutation[at : at + global_batch] for at in range(0, samples, global_batch)]
    batches = []
    for at in range(0, samples, GROUPING_SPAN * global_batch):
        span = permutation[at : at + GROUPING_SPAN * global_batch]
        span = span[np.argsort(-group_by[span], kind="stable")]
        batches += [span[i : i + global_batch] for i in range(0, len(span), global_batch)]
    full = [batch for batch in batches if len(batch) == global_batch]
    short = [batch for batch in batches if len(batch) < global_batch]
    return [full[i] for i in draw.permutation(len(full))] + short


def cut(
    lengths: Sequence[int],
    data_world: int,
    bound: Bound,
    overhead: float = 0.0,
    wanted: int | None = None,
    padding: bool = True,
) -> list[list[list[int]]]:
    """Cut one global batch into micro-batches: for each data rank a list of lists of positions.

    Every rank gets the same number of micro-batches (an empty one is a filler), since collectives must
    pair up; together they hold each position exactly once. Least time is wanted: tokens of the busiest
    rank plus `overhead` tokens per micro-batch. One rank gets the least there is; several get pieces of
    like size, in the number of micro-batches that takes the least time.

    Args:
        lengths: tokens of each sample of the global batch.
        overhead: fixed cost of a micro-batch, in tokens.
        wanted: this number of micro-batches for each rank, or as many as the bound needs.
        padding: takes the time of tokens.
    """
    ranked = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    descending = [lengths[i] for i in ranked]
    cost = with_padding(descending) if padding else without_padding(descending)
    full = fullest(descending, bound)
    if data_world == 1 and not wanted:
        found = cheapest(descending, lambda start, end: cost(start, end) + overhead, full)
        return [[ranked[start:end] for start, end in found]]
    best: tuple[float, list[list[tuple[int, int]]]] | None = None
    count = max(wanted or 1, -(-len(pieces(len(ranked), full)) // data_world))
    while True:
        dealt, busiest = _deal(_tightest(len(ranked), count * data_world, full, cost), data_world, count, cost)
        time = busiest + overhead * count
        if best is not None and time >= best[0]:
            break
        best = (time, dealt)
        if wanted:
            break
        count += 1
    return [[[ranked[i] for i in range(*piece)] for piece in rank] for rank in best[1]]


Piece = Callable[[int, int], int]  # what consecutive samples (start, end) cost, in tokens


def with_padding(descending: Sequence[int]) -> Piece:
    """The cost of pieces whose samples are all made as long as the first."""
    return lambda start, end: (end - start) * max(1, descending[start])


def without_padding(descending: Sequence[int]) -> Piece:
    """The cost of pieces without padding."""
    sums = [0, *accumulate(descending)]
    return lambda start, end: sums[end] - sums[start]


def fullest(descending: Sequence[int], bound: Bound) -> Callable[[int], int]:
    """Where a piece ends at the latest that begins at a place."""
    return lambda start: min(start + bound.rows_at(max(1, descending[start])), len(descending))


def pieces(
    count: int, full: Callable[[int], int], cost: Piece | None = None, limit: float = math.inf
) -> list[tuple[int, int]]:
    """Consecutive pieces of `count` samples, each as long as it may be at a cost of at most `limit`, or one sample."""
    found, start = [], 0
    while start < count:
        end = full(start)
        if cost and cost(start, end) > limit:
            end = max(start + 1, bisect(range(end), limit, lo=start + 1, key=lambda end: cost(start, end)) - 1)
        found.append((start, end))
        start = end
    return found


def cheapest(descending: Sequence[int], cost: Piece, full: Callable[[int], int] | None = None) -> list[tuple[int, int]]:
    """Consecutive pieces (start, end) of the least cost in all, none longer than `full` allows.

    By dynamic programming over the places where a piece may end: where the length changes, or where it is full.
    """
    count = len(descending)
    changes = [i for i in range(1, count) if descending[i] < descending[i - 1]] + [count]
    least = [0.0] + [math.inf] * count  # cost of the samples before each place
    begin = [0] * (count + 1)  # of the piece that ends there
    for start in range(count):
        if least[start] == math.inf:
            continue
        last = full(start) if full else count
        for end in (*changes[bisect(changes, start) : bisect(changes, last)], last):
            total = least[start] + cost(start, end)
            if total < least[end]:
                least[end], begin[end] = total, start
    found = [(begin[count], count)]
    while found[-1][0] > 0:
        found.append((begin[found[-1][0]], found[-1][0]))
    return found[::-1]


def _tightest(count: int, most: int, full: Callable[[int], int], cost: Piece) -> list[tuple[int, int]]:
    """At most `most` pieces of `count` samples, whose largest is as small as can be."""
    low, high = max(cost(i, i + 1) for i in range(count)), cost(0, count)
    while low < high:
        middle = (low + high) // 2
        if len(pieces(count, full, cost, middle)) <= most:
            high = middle
        else:
            low = middle + 1
    return pieces(count, full, cost, low)


def _deal(cuts: list[tuple[int, int]], ranks: int, each: int, cost: Piece) -> tuple[list[list[tuple[int, int]]], float]:
    """Give every rank `each` pieces, largest first to the least loaded; also the largest load."""
    dealt: list[list[tuple[int, int]]] = [[] for _ in range(ranks)]
    load = [0.0] * ranks
    for piece in sorted(cuts, key=lambda piece: (-cost(*piece), piece)):
        rank = min((r for r in range(ranks) if len(dealt[r]) < each), key=lambda r: (load[r], r))
        dealt[rank].append(piece)
        load[rank] += cost(*piece)
    for rank in dealt:
        rank += [(0, 0)] * (each - len(rank))
    return dealt, max(load)


@dataclass(frozen=True)
class Step:
    """One optimizer step: its number from 1, its epoch from 0, and the ids of its global batch."""

    number: int
    epoch: int
    ids: np.ndarray
    ends_epoch: bool
    passed: float = 0.0  # epochs behind this step, in part or whole
    drawn: "Drawn | None" = None  # from a stream: what the ids count in

    @property
    def names(self) -> list[str]:
        """What to call its samples in a message."""
        return self.drawn.samples.places if self.drawn else [str(i) for i in self.ids.tolist()]


@dataclass(frozen=True)
class Schedule:
    """All steps of a run, from the task alone."""

    samples: int
    global_batch: int
    total_steps: int
    seed: int
    lengths: np.ndarray | None = None  # given: group_by_length

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.global_batch)

    @property
    def epochs(self) -> int:
        """Epochs that the run touches."""
        return -(-self.total_steps // self.steps_per_epoch)

    def __str__(self) -> str:
        return f"{self.samples} samples, {self.steps_per_epoch} steps per epoch, {self.total_steps} in all"

    def steps(self, start: int = 0, position: Any = None) -> Iterator[Step]:
        """The steps after the first `start` ones; only a stream needs the position behind them."""
        for epoch in range(start // self.steps_per_epoch, self.epochs):
            batches = order(self.seed, epoch, self.samples, self.global_batch, self.lengths)
            for position, ids in enumerate(batches):
                number = epoch * self.steps_per_epoch + position + 1
                if start < number <= self.total_steps:
                    last = position == len(batches) - 1 or number == self.total_steps
                    yield Step(number, epoch, ids, last, number / self.steps_per_epoch)


@dataclass(frozen=True)
class StreamSchedule:
    """All steps of a run over a stream, whose epochs end where its records do."""

    stream: "Streamed"
    global_batch: int
    total_steps: int
    samples: None = None  # how many there are is not known

    def __str__(self) -> str:
        return f"samples from a stream, {self.total_steps} steps in all"

    def steps(self, start: int = 0, position: Any = None) -> Iterator[Step]:
        """The steps after the first `start` ones, behind which the stream is at `position`."""
        numbers = range(start + 1, self.total_steps + 1)
        for number, drawn in zip(numbers, self.stream.batches(self.global_batch, position)):
            last = drawn.ends_epoch or number == self.total_steps
            yield Step(number, drawn.epoch, np.arange(len(drawn.samples)), last, drawn.passed, drawn)
