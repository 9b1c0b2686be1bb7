"""Being told to stop, and being killed: in training, in an evaluation, while saving; on one process and on two."""

import json
import os
import signal
import subprocess
import sys
import time
from unittest import mock

import pytest

from tests.moments import armed, send
from tests.ranks import on_ranks
from tests.runs import ROOT, read_rows, run, run_here
from tests.test_checkpoint_ring import equal
from tests.tiny import save_tiny_classifier, write_csv
from toolkit.checkpoint.folder import Checkpoint, named

STEPS, EVALUATED, SAVED = 12, 5, 3  # steps, and how often the run evaluates and saves
# The steps behind the signal that comes between two micro-batches, in an evaluation, or while saving; and the step at
# which the run then stops: the next one hears of it, and what is being saved need not be saved again.
MOMENTS = {"training": 6, "evaluation": 5, "saving": 6}
STOPPED = {"training": 8, "evaluation": 5, "saving": 6}
LONGEST = 25.0  # seconds from the signal to the end


def flags(folder, out, *more):
    words = {
        "--model_name_or_path": folder / "model",
        "--train_file": folder / "train.csv",
        "--validation_file": folder / "dev.csv",
        "--output_dir": out,
        "--global_batch_size": 10,
        "--per_device_train_batch_size": 3,
        "--per_device_eval_batch_size": 4,
        "--max_steps": STEPS,
        "--dropout": 0.1,
        "--eval_strategy": "steps",
        "--eval_steps": EVALUATED,
        "--save_strategy": "steps",
        "--save_steps": SAVED,
    }
    return [str(word) for pair in words.items() for word in pair] + [str(word) for word in more]


def prepare(folder):
    save_tiny_classifier(folder / "model")
    write_csv(folder / "train.csv", 43, seed=3)
    write_csv(folder / "dev.csv", 21, seed=4)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model and data, and a run of one process that nothing disturbs."""
    folder = prepare(tmp_path_factory.mktemp("stop"))
    run_here(flags(folder, folder / "whole"))
    return folder


def interrupted_at(out):
    """The step at which a run was interrupted, of which it has left a whole checkpoint, and nothing half."""
    settings = json.loads((out / "run.json").read_text())
    assert settings["status"] == "interrupted"
    (_, newest), *_ = named(out)
    checkpoint = Checkpoint(newest)
    checkpoint.verify()
    assert checkpoint.step == settings["interrupted_at"] == len(read_rows(out))
    assert not [path for path in out.glob("checkpoint-*") if not path.name.split("-")[1].isdigit()]
    return checkpoint.step


def figures(out):
    """All rows of a run but what depends on the clock."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if "second" not in k and "runtime" not in k} for row in rows]


def same(out, whole):
    """A run is bit for bit, evaluations included, the one that nothing disturbed."""
    equal(out, whole)
    assert figures(out) == figures(whole)


# One process


@pytest.mark.parametrize("moment, name", zip(MOMENTS, ("SIGTERM", "SIGINT", "SIGUSR1")))
def test_one_process_stops_with_a_checkpoint_and_goes_on(moment, name, folder, tmp_path):
    out = tmp_path / "out"
    with armed(moment, MOMENTS[moment], signal=name):
        run_here(flags(folder, out))
    assert interrupted_at(out) == STOPPED[moment]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    run_here(flags(folder, out, "--resume_from_checkpoint", "auto"))
    same(out, folder / "whole")


def test_a_second_ctrl_c_stops_at_once(folder, tmp_path):
    out = tmp_path / "out"
    with armed("training", 3, signal="SIGINT", times=2), pytest.raises(KeyboardInterrupt):
        run_here(flags(folder, out))
    assert json.loads((out / "run.json").read_text())["status"] == "failed"
    assert [step for step, _ in named(out)] == [3]


def test_a_notice_before_the_training_waits_for_its_first_step(folder, tmp_path):
    from toolkit.fit import Evaluation

    def told(self):
        send("SIGUSR1", "self")
        return try_out(self)

    out, try_out = tmp_path / "out", Evaluation.try_out
    with mock.patch.object(Evaluation, "try_out", told):
        run_here(flags(folder, out))
    assert interrupted_at(out) == 1
    run_here(flags(folder, out, "--resume_from_checkpoint", "auto"))
    same(out, folder / "whole")


def test_a_stop_in_the_last_evaluation(folder, tmp_path):
    """With the best weights in place of the last ones, which no checkpoint may take for the state after step 12."""
    more = ["--load_best_model_at_end", "--metric_for_best_model", "loss", "--greater_is_better"]  # not the last
    run_here(flags(folder, tmp_path / "whole", *more))
    out = tmp_path / "out"
    from toolkit.fit import Evaluation

    def told(self, split):
        if self.feed.schedule.total_steps == len(read_rows(out)) and (out / "model.safetensors").is_file():
            send("SIGTERM", "self")
        return scored(self, split)

    scored = Evaluation.run
    with mock.patch.object(Evaluation, "run", told):
        run_here(flags(folder, out, *more))
    assert json.loads((out / "run.json").read_text())["status"] == "interrupted"
    assert STEPS not in [step for step, _ in named(out)]
    run_here(flags(folder, out, *more, "--resume_from_checkpoint", "auto"))
    same(out, tmp_path / "whole")


# Two processes, told one at a time: all in one launch


def on_two_ranks(folder):
    """Runs in which one rank is told, and what an exchange does with one that does not answer."""
    from datetime import timedelta

    import torch.distributed as dist

    from toolkit.checkpoint import notice
    from toolkit.strategy import distributed

    run_here(flags(folder, folder / "two"))
    for rank, moment in enumerate(MOMENTS):
        out = folder / f"rank told in {moment}"
        with armed(moment, MOMENTS[moment], rank % 2, "SIGUSR1"):
            run_here(flags(folder, out))
        dist.barrier()
        if dist.get_rank() == 0:
            assert interrupted_at(out) == STOPPED[moment]
        dist.barrier()
        run_here(flags(folder, out, "--resume_from_checkpoint", "auto"))
    strategy = distributed.Distributed.__new__(distributed.Distributed)
    strategy.everyone, strategy.model_ranks = None, 1
    asked = notice.Notice()
    asked.slowest = 0.2
    with mock.patch.multiple(notice, ANSWER=0.3), mock.patch.object(distributed, "BREATH", timedelta(seconds=0.1)):
        if dist.get_rank() == 1:
            time.sleep(2)
            return strategy.total([1.0], asked.patience)  # has time: it was not told to stop
        asked.signal = signal.SIGTERM
        started = time.monotonic()
        with pytest.raises(dist.DistBackendError, match="does not answer"):
            strategy.total([1.0], asked.patience)
        waited = time.monotonic() - started
        time.sleep(3)  # the late one still needs this one's part
        return waited


@pytest.fixture(scope="module")
def both(folder):
    return on_ranks(on_two_ranks, 2, folder, timeout=300)


@pytest.mark.parametrize("moment", MOMENTS)
def test_all_ranks_stop_when_one_is_told(moment, both, folder):
    same(folder / f"rank told in {moment}", folder / "two")


def test_who_is_told_to_stop_does_not_wait_long_for_the_others(both):
    waited, total = both
    assert 0.5 <= waited < 1.5
    assert total == [2.0]


# The launcher


def launched(folder, out, plan, *more, launcher=(), timeout=200):
    """`accelerate launch` of two processes; also the seconds since the signal."""
    config = ROOT / "accelerate_configs" / "multi_gpu.yaml"
    command = ["accelerate.commands.launch", "--quiet", "--config_file", config, "--num_processes", "2", *launcher]
    command = [sys.executable, "-m", *map(str, command), "tests/moments.py", json.dumps(plan)]
    result = run([*command, *flags(folder, out, *more)], timeout)
    return result, time.time() - out.with_suffix(".sent").stat().st_mtime


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_launcher_is_told(moment, both, folder, tmp_path):
    out = tmp_path / "out"
    plan = [{"moment": moment, "step": MOMENTS[moment], "rank": 1, "signal": "SIGTERM", "to": "launcher"}]
    # Workers of a data loader, which are sent the signal too, must not die of it.
    result, seconds = launched(folder, out, plan, "--dataloader_num_workers", 1)
    assert 0 <= interrupted_at(out) - STOPPED[moment] <= 2, result.stderr  # it may take a moment to pass it on
    assert result.returncode == 1  # of torchrun, whatever the ranks return
    assert "rank 0" not in result.stderr and "lost" not in result.stderr, result.stderr
    assert seconds < LONGEST
    run_here(flags(folder, out, "--resume_from_checkpoint", "auto", "--dropout", "0.1"))
    rows = [row["step"] for row in figures(out) if "eval_loss" in row]
    assert rows == [5, 10, 12]  # made up for where it was cut off


def test_killed_and_killed_again(both, folder, tmp_path):
    """Ranks die in training, in an evaluation, while saving and before renaming: the launcher starts them again."""
    out = tmp_path / "out"
    plan = [
        {"moment": "training", "step": 3, "rank": 1},
        {"moment": "evaluation", "step": 5, "rank": 0},
        {"moment": "saving", "step": 6, "rank": 1, "to": "all"},
        {"moment": "renaming", "step": 9, "rank": 0},
    ]
    result, _ = launched(folder, out, plan, launcher=["--max_restarts", len(plan)])
    assert result.returncode == 0, result.stderr
    assert result.stderr.count("going on from") == len(plan)
    assert [result.stderr.count(f"after step {step} of {STEPS} (DDP") for step in (3, 6, 9)] == [3, 1, 0]
    same(out, folder / "two")


def test_launch_sh_tells_a_stop_from_an_end(folder, tmp_path):
    out = tmp_path / "out"
    words = [str(ROOT / "launch.sh"), "single_gpu", "classify", *flags(folder, out, "--max_steps", 1_000_000)]
    process = subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    try:
        end = time.monotonic() + 60
        while not ((out / "metrics.jsonl").is_file() and len(read_rows(out)) > 3) and time.monotonic() < end:
            time.sleep(0.05)
        process.terminate()
        _, error = process.communicate(timeout=LONGEST)
    finally:
        process.kill()
    assert process.returncode == 75, error
    assert "Traceback" not in error
    assert f"stopped after step {interrupted_at(out)} of 1000000, as asked" in error
