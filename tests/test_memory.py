"""How large a micro-batch fits, on a device whose memory is a formula."""

import numpy as np
import pytest
import torch

from tests.lm import TinyLM, random_rows
from toolkit.data.feed import Feed
from toolkit.data.plan import Bound, Schedule
from toolkit.errors import UserError
from toolkit.strategy.base import OptimizerRule, Size
from toolkit.strategy.memory import CPU_TOKENS, SHARE, default_bound, find_bound, out_of_memory

PARAMETERS = 1000
ADAMW = OptimizerRule("adamw", (0.9, 0.999), 1e-8, 0.0, 1.0)
LENGTHS = np.random.RandomState(0).randint(4, 64, 500).tolist()


class FakeDevice:
    """Strategy and meter in one: a pass takes base + a x tokens + b x tokens x length bytes.

    Args:
        total: bytes beside the weights.
        hidden: bytes per token that show only in passes of more than 500 tokens.
        others: what other ranks would put into `gather` and `total`.
    """

    def __init__(self, total, base=0, a=100, b=0, hidden=0, devices=1, others=None, failing=0):
        self.total_bytes, self.base, self.a, self.b, self.hidden = total, base, a, b, hidden
        self.devices, self.others, self.failing = devices, others, failing
        self.model = torch.nn.Linear(PARAMETERS, 1, bias=False)
        self.size, self.alone = Size.of(self.model), True
        self.gradients, self.reserved = 0, 0
        self.tried: list[tuple[int, int]] = []

    def needs(self, rows, length):
        tokens = rows * length
        late = self.hidden * tokens if tokens > 500 else 0
        return self.base + self.a * tokens + self.b * tokens * length + late

    def trial(self, batch):
        rows, length = batch.inputs["input_ids"].shape
        self.tried.append((rows, length))
        self.last = self.needs(rows, length) + 4 * PARAMETERS - self.gradients
        if self.last > self.free():
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        self.gradients = 4 * PARAMETERS

    def clear(self):
        self.gradients = 0

    def total(self, values):
        self.failing -= 1
        return [values[0] + (self.failing >= 0)]

    def gather(self, rows):
        return [rows, *([self.others] if self.others is not None else [])]

    def peak(self, action):
        action()
        return self.last

    def free(self):
        return self.total_bytes - self.gradients - self.reserved

    def reserve(self, size):
        self.reserved = size
        return object()


def feed_of(lengths=LENGTHS, global_batch=512, rows=None, devices=1):
    samples = random_rows(lengths)
    bound = default_bound(rows, devices, torch.device("cuda"))
    schedule = Schedule(len(lengths), global_batch, 1, 0)
    return Feed(TinyLM(samples), samples, schedule, 0, 1, bound)


def found(device, feed=None, rule=ADAMW):
    feed = feed or feed_of()
    bound = find_bound(device, feed, rule, device)
    assert bound == feed.bound
    return bound


@pytest.mark.parametrize("base", [0, 50_000])
@pytest.mark.parametrize(("a", "b"), [(100, 0), (100, 5), (10, 7)])
def test_the_bound_allows_what_fits_and_little_less(base, a, b):
    device = FakeDevice(300_000, base, a, b)
    bound = found(device)
    room = 300_000 - 12 * PARAMETERS  # beside gradients and AdamW's two moments
    for length in (4, 10, 30, 63):
        rows = bound.rows_at(length)
        assert device.needs(rows, length) <= room
        assert device.needs(rows + 1, length) > (SHARE - 0.02) * room


def test_sgd_keeps_no_moments():
    sgd = OptimizerRule("sgd", (0.9, 0.999), 1e-8, 0.0, 1.0)
    assert found(FakeDevice(300_000), rule=sgd).tokens > found(FakeDevice(300_000)).tokens


def test_the_worst_micro_batch_of_the_run_is_tried_with_the_optimizer_state_in_place():
    device = FakeDevice(300_000)
    bound = found(device)
    longest = max(LENGTHS)
    assert device.tried[-1] == (bound.rows_at(longest), longest)
    assert device.reserved == 8 * PARAMETERS
    small = FakeDevice(30_000_000)
    found(small, feed_of(global_batch=32))
    assert small.tried[-1] == (32, longest)  # more never meets in one step


def test_what_small_micro_batches_do_not_show_halves_the_bound():
    device = FakeDevice(300_000, hidden=100)
    bound = found(device)
    longest = max(LENGTHS)
    tried = [rows for rows, length in device.tried if length == longest][-2:]
    assert bound.rows_at(longest) == tried[1] == tried[0] // 2
    assert device.needs(bound.rows_at(longest), longest) <= 300_000 - 12 * PARAMETERS
    assert bound.rows_at(4) > bound.rows_at(longest)


def test_memory_for_little_more_than_one_row():
    device = FakeDevice(12 * PARAMETERS + 7000)  # the longest row takes 6300
    assert found(device).rows_at(max(LENGTHS)) == 1


def test_not_even_one_row():
    with pytest.raises(UserError, match=r"one sample of 63 tokens does not fit .*--max_length"):
        found(FakeDevice(12 * PARAMETERS + 6000))


def test_no_room_for_gradients_and_optimizer():
    with pytest.raises(UserError, match=r"gradients and optimizer state .* do not fit"):
        found(FakeDevice(11 * PARAMETERS))


def test_another_error_is_not_taken_for_memory():
    device = FakeDevice(300_000)
    device.trial = lambda batch: (_ for _ in ()).throw(RuntimeError("device-side assert"))
    with pytest.raises(RuntimeError, match="device-side assert"):
        found(device)


def test_the_least_over_ranks():
    alone = found(FakeDevice(300_000, b=5))
    scarce = torch.tensor([[alone.tokens / 2, alone.area / 3]], dtype=torch.float64)
    bound = found(FakeDevice(300_000, b=5, others=scarce))
    assert (bound.tokens, bound.area) == (alone.tokens / 2, alone.area / 3)
    plenty = torch.tensor([[alone.tokens * 2, torch.inf]], dtype=torch.float64)
    assert found(FakeDevice(300_000, b=5, others=plenty)) == alone


def test_a_rank_whose_trial_failed_halves_the_bound_of_all():
    alone = found(FakeDevice(300_000))
    bound = found(FakeDevice(300_000, failing=1))
    assert bound.rows_at(63) == alone.rows_at(63) // 2


def test_the_flag_stays_an_upper_bound():
    assert found(FakeDevice(30_000_000), feed_of(rows=3)).rows_at(4) == 3
    assert found(FakeDevice(30_000_000, devices=2), feed_of(rows=3, devices=2)).rows_at(4) == 6


@pytest.mark.parametrize("lengths", [[7], [7, 7], [7] * 40, [3, 60]])
def test_few_samples_or_one_length(lengths):
    device = FakeDevice(300_000, base=1000, b=3)
    bound = found(device, feed_of(lengths))
    assert device.needs(bound.rows_at(max(lengths)), max(lengths)) <= 300_000 - 12 * PARAMETERS


def test_nothing_is_tried_without_a_meter():
    device, feed = FakeDevice(300_000), feed_of()
    assert find_bound(device, feed, ADAMW, None) == feed.bound
    assert not device.tried


def test_bound_before_measuring():
    assert default_bound(None, 1, torch.device("cpu")) == Bound(None, CPU_TOKENS)
    assert default_bound(4, 2, torch.device("cpu")) == Bound(8, 2 * CPU_TOKENS)
    assert default_bound(4, 2, torch.device("cuda")) == Bound(8)


def test_what_counts_as_out_of_memory():
    assert out_of_memory(torch.OutOfMemoryError("x"))
    assert out_of_memory(RuntimeError("CUDA out of memory. "))
    assert out_of_memory(RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"))
    assert not out_of_memory(RuntimeError("shapes"))
    assert not out_of_memory(ValueError("out of memory"))
