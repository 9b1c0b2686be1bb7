"""A run that fails: all ranks stop soon, and the cause is said once, last of all that our processes print."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.runs import ROOT, launch, read_rows, run
from tests.tiny import write_csv

LIMIT = 60.0  # seconds that a job with a dead rank may take to end, start-up included


@pytest.fixture(scope="module")
def flags(tmp_path_factory, tiny_classifier):
    """Flags of a run that would take hours."""
    data = write_csv(tmp_path_factory.mktemp("data") / "train.csv", 64)
    words = ["--model_name_or_path", tiny_classifier, "--train_file", data, "--max_steps", 1_000_000]
    return [str(word) for word in [*words, "--global_batch_size", 8]]


def ours(stderr):
    """What our processes printed: neither the launcher's log lines nor its closing summary."""
    text = re.split(r"^E\d{4} .*failed \(exitcode", stderr, maxsplit=1, flags=re.MULTILINE)[0]
    return [line for line in text.splitlines() if line and not re.match(r"[WEI]\d{4} ", line)]


def root_cause(stderr):
    return stderr.split("Root Cause")[1]


@pytest.mark.parametrize("rank, processes", [(0, 2), (1, 3)])
def test_a_killed_rank(flags, tmp_path, rank, processes):
    out = tmp_path / "out"
    words = ["tests/faults.py", "kill", str(rank), "5", *flags, "--output_dir", str(out)]
    result = launch(words, processes, timeout=LIMIT)
    lines = ours(result.stderr)
    assert result.returncode != 0
    # Either the connection broke first or the launcher's SIGTERM came first.
    assert re.search(r"(lost the connection to another rank|stopped by SIGTERM), after step 5 of 1000000", lines[-1])
    assert "killed" in lines[-1]
    assert sum("after step 5" in line for line in lines) == 1, lines
    assert "Traceback" not in "\n".join(lines)
    # The launcher names the rank, and what ours said stands in its summary.
    assert f"rank      : {rank} " in root_cause(result.stderr) and "SIGKILL" in root_cause(result.stderr)
    assert result.stderr.count(lines[-1].split("] ")[-1]) == 2
    assert [row["step"] for row in read_rows(out)] == [1, 2, 3, 4, 5]
    assert not list(out.glob("checkpoint-*"))  # a survivor's SIGTERM is no notice to heed


def test_an_exception_in_one_rank(flags, tmp_path):
    out = tmp_path / "out"
    result = launch(["tests/faults.py", "fail", "1", "5", *flags, "--output_dir", str(out)], 2, timeout=LIMIT)
    lines = ours(result.stderr)
    assert result.returncode != 0
    assert lines[-2:] == ["ZeroDivisionError: planted in this rank", "after step 5 of 1000000"]
    assert sum("Traceback" in line for line in lines) == 1
    assert "[rank 1] Traceback (most recent call last):" in lines
    assert "rank      : 1 " in root_cause(result.stderr) and "planted in this rank" in root_cause(result.stderr)


def test_an_interrupt_by_the_user(flags, tmp_path):
    out = tmp_path / "out"
    process = subprocess.Popen(
        [sys.executable, "tasks/classify.py", *flags, "--output_dir", str(out)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        end = time.monotonic() + LIMIT
        while not ((out / "metrics.jsonl").is_file() and len(read_rows(out)) > 3) and time.monotonic() < end:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    steps = len(read_rows(out))
    assert process.returncode == 0 and "Traceback" not in error
    assert json.loads((out / "run.json").read_text())["status"] == "interrupted"
    assert (out / f"checkpoint-{steps}" / "state.json").is_file()


# The word among ranks, without torch: what `torchrun` gives to its processes is made by hand.

SCRIPT = """
import os, sys, time
sys.path.insert(0, {root!r})
from toolkit.errors import UserError
from toolkit.launch import guard
guard.PATIENCE = 0.5
def main():
    rank = os.environ["RANK"]
    open(os.path.join({folder!r}, "ready" + rank), "w").close()
    while not os.path.exists(os.path.join({folder!r}, "go")):  # all ranks at once
        time.sleep(0.001)
    {body}
guard.guarded(main)
"""


def ranks(folder, count, body, terminate=()):
    """What each rank prints and what it leaves for the launcher.

    Args:
        terminate: ranks that get a SIGTERM when the others have ended.
    """
    code = SCRIPT.format(root=str(ROOT), folder=str(folder), body=body)
    processes = []
    for rank in range(count):
        file = folder / str(rank) / "error.json"
        file.parent.mkdir()
        variables = {**os.environ, "RANK": str(rank), "TORCHELASTIC_ERROR_FILE": str(file)}
        processes.append(
            subprocess.Popen([sys.executable, "-c", code], env=variables, stderr=subprocess.PIPE, text=True)
        )
    end = time.monotonic() + 30
    while len(list(folder.glob("ready*"))) < count and time.monotonic() < end:
        time.sleep(0.01)
    (folder / "go").touch()
    for rank in set(range(count)) - set(terminate):
        processes[rank].wait(30)
    for rank in terminate:
        processes[rank].terminate()
    said = [process.communicate(timeout=30)[1] for process in processes]
    assert [process.returncode for process in processes] == [1] * count
    left = [json.loads((folder / str(rank) / "error.json").read_text())["message"] for rank in range(count)]
    return said, left


def test_what_all_ranks_know_is_said_by_rank_0(tmp_path):
    said, left = ranks(tmp_path, 4, "raise UserError('one', 'two')")
    assert said == ["error: one\nerror: two\n", "", "", ""]
    assert left[0]["message"] == "error: one\nerror: two"
    assert {entry["message"] for entry in left[1:]} == {"ended with the rank that failed"}
    # torchrun takes the earliest for the root cause.
    stamps = [entry["extraInfo"]["timestamp"] for entry in left]
    assert stamps[0] < min(stamps[1:])


def test_what_two_of_three_ranks_know_is_said_once(tmp_path):
    body = "time.sleep(60) if rank == '0' else None; raise UserError('not on rank 0')"
    said, left = ranks(tmp_path, 3, body, terminate=[0])
    spoken = [rank for rank in (1, 2) if said[rank]]
    assert len(spoken) == 1 and said[0] == ""
    assert said[spoken[0]] == f"[rank {spoken[0]}] error: not on rank 0\n"
    assert left[0]["message"] == "ended with the rank that failed"


def test_sigterm_to_all_is_said_once(tmp_path):
    said, _ = ranks(tmp_path, 3, "time.sleep(60)", terminate=[0, 1, 2])
    assert sum(bool(text) for text in said) == 1
    assert "stopped by SIGTERM" in "".join(said)


def test_a_folder_that_cannot_be_written_hides_nothing(tmp_path):
    variables = {"RANK": "0", "TORCHELASTIC_ERROR_FILE": str(tmp_path / "file" / "0" / "error.json")}
    (tmp_path / "file").write_text("")
    (tmp_path / "go").touch()
    code = SCRIPT.format(root=str(ROOT), folder=str(tmp_path), body="raise UserError('said')")
    result = run([sys.executable, "-c", code], **variables)
    assert (result.returncode, result.stderr) == (1, "error: said\n")


def test_lost_peers_are_told_from_own_errors(monkeypatch):
    import torch.distributed as dist

    from toolkit.launch.guard import lost_peer

    # As gloo says it, torch 2.13.
    gloo = RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1")
    assert not lost_peer(gloo)  # there is no other rank
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    assert lost_peer(gloo) and lost_peer(dist.DistBackendError("NCCL error"))
    assert not lost_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not lost_peer(ValueError("Connection closed by peer"))
