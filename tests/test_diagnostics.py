"""What `--diagnostics` measures, against what is known of each collective."""

import json

import pytest
import torch

from tests.ranks import on_ranks
from tests.runs import launch
from tests.tiny import write_csv
from toolkit.strategy.base import stored
from toolkit.strategy.diagnostics import compare_replicas


def traffic_of_each_collective(folder):
    """Bytes sent by one call of each collective with 1,000 float32 per rank, on two ranks."""
    import torch.distributed as dist
    import torch.distributed._functional_collectives as functional

    from toolkit.strategy.diagnostics import Traffic

    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), 1000
    own, whole = torch.ones(n), torch.ones(2 * n)

    def send_and_receive():
        if rank == 0:
            dist.send(own, 1)
        else:
            dist.recv(own, 0)

    calls = {
        "all_reduce": lambda: dist.all_reduce(own),
        "all_gather": lambda: dist.all_gather([torch.empty(n), torch.empty(n)], own),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(whole, own),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(own, whole),
        "broadcast": lambda: dist.broadcast(own, 0),
        "functional": lambda: functional.all_reduce(own, "sum", dist.group.WORLD).sum(),
        "send": send_and_receive,
        "barrier": dist.barrier,
    }
    sent = {}
    for name, call in calls.items():
        with Traffic() as traffic:
            call()
        sent[name] = traffic.sent
    dist.destroy_process_group()
    return sent


@pytest.fixture(scope="module")
def sent(tmp_path_factory):
    return on_ranks(traffic_of_each_collective, 2, tmp_path_factory.mktemp("traffic"))


def test_bytes_sent_by_each_collective(sent):
    expected = {
        "all_reduce": 4000,  # 2 (N - 1) / N n
        "all_gather": 4000,  # (N - 1) / N of 8,000 bytes
        "all_gather_into_tensor": 4000,
        "reduce_scatter": 4000,
        "broadcast": 2000,
        "functional": 4000,
        "barrier": 0,
    }
    for rank in sent:
        assert {name: rank[name] for name in expected} == expected
    assert [rank["send"] for rank in sent] == [4000, 0]


def test_replicas_are_compared_part_by_part():
    same = [("a", "0", "x"), ("a", "1", "y"), ("a", "0", "x"), ("a", "1", "y"), ("b", "whole", "z")]
    assert compare_replicas(same) == {"replicated": 2, "different": []}
    assert compare_replicas([*same, ("b", "whole", "other")]) == {"replicated": 3, "different": ["b"]}


def test_distinct_storages_are_counted_once_and_whole():
    buffer = torch.zeros(100)
    assert stored([buffer[:10], buffer[50:], None, torch.zeros(3, dtype=torch.float64)]) == 400 + 24
    assert stored([]) == 0


def test_a_run_under_ddp_writes_what_a_step_costs(tiny_classifier, tmp_path):
    """The gradients of all P parameters, 2 (N - 1) / N x 4 P bytes, and the loss."""
    from safetensors.torch import load_file

    data = write_csv(tmp_path / "train.csv", 24, seed=1)
    out = tmp_path / "out"
    words = ["tasks/classify.py", "--model_name_or_path", str(tiny_classifier), "--train_file", str(data)]
    words += ["--max_steps", "4", "--global_batch_size", "8", "--diagnostics", "--output_dir", str(out)]
    result = launch(words, 2)
    assert result.returncode == 0, result.stderr
    report = json.loads((out / "diagnostics.json").read_text())
    count = sum(tensor.numel() for tensor in load_file(out / "model.safetensors").values())
    for rank in report["ranks"]:
        assert rank["bytes_sent"] == pytest.approx(4 * count, rel=0.01)
        held = rank["bytes_held"]
        assert held["parameters"] == pytest.approx(4 * count, rel=0.01)
        assert held["gradients"] == pytest.approx(4 * count, rel=0.01)
        assert held["optimizer"] == pytest.approx(8 * count, rel=0.01)
    assert report["replicas"]["replicated"] > 10
    assert report["replicas"]["different"] == []
