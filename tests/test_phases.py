"""How the time of a step is divided, against timelines that were drawn by hand, and on real runs."""

import json
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from tests.ranks import on_ranks
from tests.tiny import write_csv
from toolkit.phases import FIRST, LAST, PHASES, Phases, divide, length, union, within, without


def event(name, start, end, device=DeviceType.CPU, children=()):
    time_range = SimpleNamespace(start=start, end=end)
    return SimpleNamespace(name=name, time_range=time_range, device_type=device, cpu_children=list(children))


def marks(**spans):
    return [event(f"toolkit::{name}", *span) for name, span in spans.items()]


def test_what_computation_hides_is_not_communication():
    events = marks(window=(0, 1000), data=(0, 100), forward=(100, 300), backward=(300, 900), optimizer=(900, 980))
    events += [
        event("aten::mm", 100, 290),
        event("aten::mm", 300, 700),
        event("gloo:all_reduce", 500, 890),  # from 700 on there is nothing but waiting
        event("aten::add_", 900, 980),
    ]
    found = divide(events)
    assert found == {
        **{"data": 100, "forward": 200, "backward": 600 - 190, "communication": 190, "optimizer": 80},
        "unattributed": 20,
        "total": 1000,
    }


def test_short_gaps_between_computations_are_no_waiting():
    events = marks(window=(0, 1000), forward=(0, 1000))
    events.append(event("gloo:all_gather", 0, 1000))
    events += [event("aten::mm", start, start + 80) for start in range(0, 1000, 100)]  # 20 microseconds between
    assert divide(events)["communication"] == pytest.approx(20)  # behind the last one


def test_what_calls_others_may_be_waiting():
    inner = event("c10d::_allreduce", 500, 510)
    events = [*marks(window=(0, 1000), backward=(0, 1000)), event("aten::add", 0, 1000, children=[inner]), inner]
    events += [event("gloo:all_reduce", 0, 1000)]
    assert divide(events)["communication"] == 1000


def test_only_what_is_in_the_window_counts():
    events = [*marks(window=(100, 200), forward=(0, 150), data=(190, 300)), event("gloo:recv", 170, 400)]
    found = divide(events)
    assert (found["forward"], found["communication"], found["data"], found["unattributed"]) == (50, 30, 0, 20)


def test_on_a_gpu_kernels_compute_and_the_host_only_queues():
    gpu = DeviceType.CUDA
    events = marks(window=(0, 1000), forward=(0, 400), backward=(400, 1000))
    events += [
        event("aten::mm", 0, 1000),
        event("toolkit::forward", 50, 390, gpu),
        event("nccl:all_reduce", 0, 1000),  # the host's call
        event("gemm", 0, 600, gpu),
        event("ncclDevKernel_AllReduce", 500, 900, gpu),
    ]
    found = divide(events)
    assert (found["forward"], found["backward"], found["communication"]) == (400, 300, 300)


def test_a_run_that_goes_on_from_a_later_step_is_not_timed():
    phases = Phases()
    for step in range(FIRST + 1, LAST + 3):
        phases.before(step)
    assert phases.seconds is None


def test_intervals():
    assert union([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    assert union([(0, 2), (4, 5), (9, 10)], gap=2) == [(0, 5), (9, 10)]
    assert without([(0, 10)], [(2, 3), (5, 12)]) == [(0, 2), (3, 5)]
    assert without([(0, 3), (4, 6)], [(1, 5)]) == [(0, 1), (5, 6)]
    assert within([(0, 10)], [(2, 3), (5, 12)]) == [(2, 3), (5, 10)]
    assert length([(0, 3), (5, 6)]) == 4


SLEEP = 0.05


def a_run_with_a_slow_rank(folder):
    """Rank 0 takes longer to get its data; each rank reads from the system what the other one took at most."""
    import os
    import time
    from pathlib import Path

    import torch.distributed as dist

    from tests.runs import run_here
    from toolkit.data.feed import Feed
    from toolkit.report.run import Run

    rank, real, pids, taken = int(os.environ["RANK"]), Feed.work, [0, 0], []

    def slow(self, step):
        time.sleep(SLEEP if rank == 0 else 0)
        return real(self, step)

    def look_at_the_other(self, report):
        dist.all_gather_object(pids, os.getpid())
        status = Path(f"/proc/{pids[1 - rank]}/status")
        taken.append(int(status.read_text().split("VmHWM:")[1].split()[0]) * 1024 if status.exists() else None)
        dist.barrier()  # until both have looked
        diagnosed(self, report)

    diagnosed, Run.diagnosed, Feed.work = Run.diagnosed, look_at_the_other, slow
    flags = json.loads((folder / "flags.json").read_text())
    run_here([*flags, "--profile", "--output_dir", str(folder / "out")])
    return taken[0]


def test_a_run_under_ddp(tiny_classifier, tmp_path):
    """One launch: times add up, waiting for a slow rank is communication, peak memory is what the system says."""
    data = write_csv(tmp_path / "train.csv", 64, seed=1)
    flags = ["--model_name_or_path", str(tiny_classifier), "--train_file", str(data), "--max_steps", "8"]
    (tmp_path / "flags.json").write_text(json.dumps([*flags, "--global_batch_size", "8"]))
    read = on_ranks(a_run_with_a_slow_rank, 2, tmp_path)
    ranks = json.loads((tmp_path / "out" / "diagnostics.json").read_text())["ranks"]
    for rank in ranks:
        phases = rank["phases"]
        assert sum(phases[name] for name in PHASES) + phases["unattributed"] == pytest.approx(phases["total"])
        assert min(phases.values()) >= 0
        assert phases["forward"] > 0 and phases["backward"] > 0 and phases["optimizer"] > 0
    slow, fast = (rank["phases"] for rank in ranks)
    assert slow["data"] == pytest.approx(SLEEP, abs=0.02)
    assert fast["data"] < 0.01
    assert fast["communication"] - slow["communication"] == pytest.approx(SLEEP, abs=0.02)
    for rank, other in zip(ranks, reversed(read)):
        if other is not None:
            assert rank["memory"][0]["peak_resident"] == pytest.approx(other, rel=0.02)
