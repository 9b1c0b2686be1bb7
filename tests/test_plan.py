"""Order and cut: which samples make a step, and how they are dealt out."""

import itertools
import math
import random

import numpy as np
import pytest
import torch

from toolkit.data.plan import GROUPING_SPAN, Bound, Schedule, cut, fullest, order, pieces, with_padding, without_padding
from toolkit.strategy.cost import overhead


def lists(batches):
    return [batch.tolist() for batch in batches]


@pytest.mark.parametrize(("samples", "batch"), [(1, 4), (4, 4), (5, 2), (22, 4), (64, 8), (3, 64)])
def test_every_sample_once_and_only_the_last_batch_short(samples, batch):
    batches = lists(order(3, 0, samples, batch))
    assert sorted(i for ids in batches for i in ids) == list(range(samples))
    assert [len(ids) for ids in batches[:-1]] == [batch] * (-(-samples // batch) - 1)
    assert len(batches[-1]) == (samples % batch or min(batch, samples))


def test_order_depends_on_seed_and_epoch_and_nothing_else():
    first = lists(order(3, 1, 50, 8))
    torch.rand(7), np.random.rand(7), random.random()  # E03: what one rank does alone moves nothing
    torch.manual_seed(9), np.random.seed(9), random.seed(9)
    assert lists(order(3, 1, 50, 8)) == first
    assert lists(order(3, 2, 50, 8)) != first  # C03: the next epoch differs
    assert lists(order(4, 1, 50, 8)) != first
    assert lists(order(1, 3, 50, 8)) != first  # seed and epoch do not stand in for each other
    # The batch size cuts the permutation; it does not draw another one.
    assert np.concatenate(order(3, 1, 50, 5)).tolist() == np.concatenate(order(3, 1, 50, 8)).tolist()


def test_an_order_stays_what_it_was():
    # Frozen: a checkpoint made under one version goes on under the next.
    assert lists(order(42, 0, 8, 4)) == [[3, 1, 5, 7], [4, 0, 6, 2]]


def test_group_by_length():
    lengths = np.random.RandomState(0).randint(1, 100, 1000)
    batches = order(0, 0, 1000, 8, lengths)
    assert sorted(i for ids in batches for i in ids) == list(range(1000))
    assert all(len(ids) == 8 for ids in batches)
    spread = np.mean([np.ptp(lengths[ids]) for ids in batches])
    random_spread = np.mean([np.ptp(lengths[ids]) for ids in order(0, 0, 1000, 8)])
    assert spread < random_spread / 10
    means = [lengths[ids].mean() for ids in batches]
    assert abs(np.corrcoef(means, range(len(means)))[0, 1]) < 0.3  # the batches themselves stay in random order
    again = order(0, 0, 1000, 8, lengths)
    assert lists(again) == lists(batches)
    assert lists(order(0, 1, 1000, 8, lengths)) != lists(batches)


def test_group_by_length_ends_with_the_short_batch():
    lengths = np.arange(GROUPING_SPAN * 4 + 3)
    batches = order(0, 0, len(lengths), 4, lengths)
    assert [len(ids) for ids in batches] == [4] * GROUPING_SPAN + [3]


@pytest.mark.parametrize(
    ("bound", "length", "rows"),
    [
        (Bound(), 10, 2**31),
        (Bound(rows=4), 10, 4),
        (Bound(tokens=100), 10, 10),
        (Bound(tokens=100), 33, 3),
        (Bound(tokens=100), 1000, 1),  # one row always fits
        (Bound(rows=4, tokens=100), 10, 4),
        (Bound(area=1000), 10, 10),
        (Bound(tokens=100, area=1000), 10, 5),  # 10 rows fill each, so 5 fill both
        (Bound(rows=3), 0, 3),
    ],
)
def test_rows_of_a_bound(bound, length, rows):
    assert bound.rows_at(length) == rows


@pytest.mark.parametrize("rows", [2, 3, 8, 100])
@pytest.mark.parametrize("bound", [Bound(), Bound(rows=100), Bound(tokens=10_000), Bound(area=1e6)])
def test_a_halved_bound_holds_half_the_rows(bound, rows):
    halved = bound.halved(rows, 64)
    assert halved.rows_at(64) <= rows // 2
    assert bound.halved(rows, 64).halved(rows // 2, 64).rows_at(64) <= max(1, rows // 4)
    assert all(halved.rows_at(length) <= bound.rows_at(length) for length in range(1, 200))


def test_a_halved_bound_leaves_short_rows_their_company():
    assert Bound().halved(8, 64).rows_at(8) == 32


BOUNDS = [Bound(), Bound(rows=1), Bound(rows=3), Bound(tokens=64), Bound(rows=5, tokens=100), Bound(area=3000)]


@pytest.mark.parametrize("overhead", [0, 48, 4096])
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_a_cut_holds_each_position_once_within_bounds(world, bound, overhead):
    draw = random.Random(world)
    for size in (1, 2, 5, 32, 33):
        lengths = [draw.randint(1, 60) for _ in range(size)]
        ranks = cut(lengths, world, bound, overhead)
        assert len(ranks) == world
        assert len({len(rank) for rank in ranks}) == 1 and ranks[0]  # collectives pair up
        assert sorted(i for rank in ranks for piece in rank for i in piece) == list(range(size))
        for piece in (piece for rank in ranks for piece in rank if piece):
            assert len(piece) <= bound.rows_at(max(lengths[i] for i in piece))
        assert cut(lengths, world, bound, overhead) == ranks


def test_e01_more_ranks_than_samples_leaves_fillers():
    ranks = cut([7], 3, Bound())
    assert sorted(ranks) == [[[]], [[]], [[0]]]


def padded(rank, lengths):
    return sum(len(piece) * max(lengths[i] for i in piece) for piece in rank if piece)


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_are_balanced_by_padded_tokens(world):
    draw = random.Random(1)
    lengths = [draw.choice([5, 8, 13, 60]) for _ in range(64)]
    loads = [padded(rank, lengths) for rank in cut(lengths, world, Bound(tokens=240), 10)]
    # A deal of the unsorted rows in turn, each rank's padded to its longest.
    naive = max(padded([list(range(rank, 64, world))], lengths) for rank in range(world))
    assert max(loads) < 0.6 * naive
    assert max(loads) <= 1.25 * sum(loads) / world


def test_overhead_decides_between_padding_and_passes():
    lengths = [50, 50, 2, 2, 2, 2]
    assert len(cut(lengths, 1, Bound(), 0)[0]) == 2  # 100 + 8 tokens
    assert len(cut(lengths, 1, Bound(), 10_000)[0]) == 1  # 300 tokens in one pass


@pytest.mark.parametrize("bound", BOUNDS)
def test_no_cut_into_consecutive_pieces_is_cheaper_for_one_rank(bound):
    draw = random.Random(5)
    for fixed in (0, 7, 48, 250):
        lengths = [draw.choice([3, 5, 8, 13, 40]) for _ in range(draw.randint(1, 10))]
        descending = sorted(lengths, reverse=True)
        costs = []
        for where in itertools.product([False, True], repeat=len(lengths) - 1):
            ends = [i + 1 for i, ends_here in enumerate(where) if ends_here] + [len(lengths)]
            pieces = [descending[a:b] for a, b in zip([0, *ends], ends)]
            if all(len(piece) <= bound.rows_at(piece[0]) for piece in pieces):
                costs.append(sum(len(piece) * piece[0] + fixed for piece in pieces))
        (found,) = cut(lengths, 1, bound, fixed)
        assert padded(found, lengths) + fixed * len(found) == min(costs)


def test_a_pass_costs_more_tokens_where_tokens_are_cheap():
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert overhead(cpu, "no", amx=True) == overhead(cpu, "bf16", amx=False) == overhead(cpu, "fp16", amx=True)
    assert overhead(cpu, "no", amx=True) < overhead(cpu, "bf16", amx=True) < overhead(gpu, "bf16", amx=False)


def test_pieces_are_consecutive():
    def found(descending, bound, cost=None, limit=math.inf):
        return pieces(len(descending), fullest(descending, bound), cost and cost(descending), limit)

    assert found([9, 9, 5, 5, 1], Bound(rows=2)) == [(0, 2), (2, 4), (4, 5)]
    assert found([9, 9, 5, 5, 1], Bound(), with_padding, limit=18) == [(0, 2), (2, 5)]
    assert found([9, 9, 5, 5, 1], Bound(), without_padding, limit=18) == [(0, 2), (2, 5)]
    assert found([9, 9, 5, 5, 1], Bound(), without_padding, limit=23) == [(0, 3), (3, 5)]
    assert found([9, 9, 5, 5, 1], Bound(rows=4), without_padding, limit=99) == [(0, 4), (4, 5)]
    assert found([9], Bound(), with_padding, limit=1) == [(0, 1)]
    assert found([], Bound()) == []


@pytest.mark.parametrize("bound", [Bound(), Bound(rows=5), Bound(tokens=200)])
def test_a_cut_without_padding_is_even_and_takes_few_passes(bound):
    lengths = np.random.default_rng(3).integers(1, 60, 41).tolist()
    (alone,) = cut(lengths, 1, bound, 48, padding=False)
    descending = sorted(lengths, reverse=True)
    assert len(alone) == len(pieces(len(lengths), fullest(descending, bound)))  # no pass more than must be
    for world in (2, 3):
        ranks = cut(lengths, world, bound, 48, padding=False)
        assert sorted(i for rank in ranks for piece in rank for i in piece) == list(range(41))
        assert all(len(piece) <= bound.rows_at(max(lengths[i] for i in piece)) for rank in ranks for piece in rank)
        assert len({len(rank) for rank in ranks}) == 1
        loads = [sum(lengths[i] for piece in rank for i in piece) for rank in ranks]
        if bound == Bound():
            assert len(ranks[0]) == 1
            assert max(loads) <= sum(lengths) / world + max(lengths)


def test_a_schedule_counts_steps_and_epochs():
    schedule = Schedule(samples=10, global_batch=4, total_steps=7, seed=0)
    steps = list(schedule.steps())
    assert [step.number for step in steps] == [1, 2, 3, 4, 5, 6, 7]
    assert [step.epoch for step in steps] == [0, 0, 0, 1, 1, 1, 2]
    assert [len(step.ids) for step in steps] == [4, 4, 2, 4, 4, 2, 4]
    assert [step.ends_epoch for step in steps] == [False, False, True, False, False, True, True]
    for epoch in (0, 1):
        ids = [i for step in steps if step.epoch == epoch for i in step.ids]
        assert sorted(ids) == list(range(10))


@pytest.mark.parametrize("start", [0, 1, 3, 4, 7])
def test_a_schedule_goes_on_in_the_middle(start):
    schedule = Schedule(samples=10, global_batch=4, total_steps=7, seed=0)
    whole, rest = list(schedule.steps()), list(schedule.steps(start))
    assert [(step.number, step.ids.tolist()) for step in rest] == [
        (step.number, step.ids.tolist()) for step in whole[start:]
    ]
