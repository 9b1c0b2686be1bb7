"""Real launches: every way to start a run gives the same run, and what was not asked for does not start."""

import json
import os
import re
import socket
import subprocess
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from tests.runs import ROOT, read_rows, run_here
from tests.tiny import write_csv

TASK = str(ROOT / "tasks" / "classify.py")
CONFIGS = ROOT / "accelerate_configs"
TOOLS = Path(sys.executable).parent  # where accelerate and torchrun are
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
# A tracker that keeps one file a run.
TRACKER = """
import json, uuid
class Config(dict):
    def update(self, values, allow_val_change):
        super().update(values)
class Run:
    def __init__(self, project):
        self.file = open(f"tracked-{project}-{uuid.uuid4()}", "w")
    def log(self, values, step):
        print(json.dumps({"step": step, **values}), file=self.file)
    def finish(self):
        print(json.dumps(config), file=self.file, flush=True)
config = Config()
init = Run
"""


@pytest.fixture(scope="module")
def flags(tmp_path_factory, tiny_classifier):
    folder = tmp_path_factory.mktemp("data")
    train, dev = write_csv(folder / "train.csv", 40), write_csv(folder / "dev.csv", 10, seed=1)
    words = ["--model_name_or_path", tiny_classifier, "--train_file", train, "--validation_file", dev]
    return [str(word) for word in [*words, "--global_batch_size", 8, "--max_steps", 7]]


def start(words, folder, **environment):
    """A command that runs in `folder`, without what a launcher or the user's settings would add."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "OMP_", "HF_"))}
    variables = {**kept, "PATH": f"{TOOLS}:{kept['PATH']}", "OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "hf")}
    variables |= environment
    process = subprocess.Popen(
        words,
        cwd=folder,
        env={name: value for name, value in variables.items() if value},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
    )
    process.folder = folder
    return process


def finish(process, timeout=120):
    """The process's exit code and stderr."""
    try:
        _, error = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, error


def finished(process):
    """Of a run that must succeed: stderr, its folder's name, its losses and its settings."""
    code, error = finish(process)
    assert code == 0, error
    name = re.search(r"^model +(\S+)$", error, re.MULTILINE)[1]
    folder = process.folder / name
    losses = [row["loss"] for row in read_rows(folder)]
    return error, name, losses, json.loads((folder / "run.json").read_text())


def said_more_than_once(error):
    """Lines of our own that stand there twice; log lines of the launcher are none."""
    lines = [line for line in error.splitlines() if line and not re.match(r"[WEI]\d{4} ", line)]
    return [line for line, count in Counter(lines).items() if count > 1]


def test_two_jobs_of_two_ranks_at_once(flags, tmp_path):
    (tmp_path / "trackio.py").write_text(TRACKER)
    accelerate = ["accelerate", "launch", "--config_file", str(CONFIGS / "multi_gpu.yaml"), TASK, *flags]
    with socket.socket() as listener:
        with suppress(OSError):  # in use already: as good
            listener.bind(("", 29500))
        jobs = [
            start([*accelerate, "--report_to", "trackio"], tmp_path, PYTHONPATH=str(tmp_path)),
            start(["torchrun", "--nproc_per_node", "2", TASK, *flags], tmp_path),
        ]
        ends = [finished(job) for job in jobs]
    for error, _, losses, settings in ends:
        assert error.count("2 processes on the CPU, 1 thread each, DDP (rehearsal over gloo), fp32\n") == 1
        assert said_more_than_once(error) == []
        assert settings["world_size"] == settings["data_world"] == 2 and settings["status"] == "finished"
        assert len(losses) == 7
    assert ends[0][2] == ends[1][2]
    # Neither job has taken the other's folder, and no rank has made one of its own.
    assert {name for _, name, _, _ in ends} == {"output/classify", "output/classify-2"}
    assert sorted(path.name for path in (tmp_path / "output").iterdir()) == ["classify", "classify-2"]
    (tracked,) = tmp_path.glob("tracked-*")
    first, *_, final, settings = map(json.loads, tracked.read_text().splitlines())
    assert tracked.name.startswith("tracked-classify-") and settings["report_to"] == "trackio"
    assert first["step"] == 1 and first["train/loss"] == ends[0][2][0]
    assert final["step"] == 7 and 0 <= final["eval/accuracy"] <= 1


def test_one_process_without_a_config_and_by_the_script(flags, tmp_path):
    jobs = [
        start(["accelerate", "launch", TASK, *flags, "--output_dir", "plain"], tmp_path),
        start([str(ROOT / "launch.sh"), "data_parallel", "classify", *flags, "--output_dir", "launch"], tmp_path),
    ]
    expected = [row["loss"] for row in run_here([*flags, "--output_dir", str(tmp_path / "here")])]
    (plain, _, losses, _), (launch, _, split, settings) = map(finished, jobs)
    assert losses == pytest.approx(expected, rel=1e-5) and split == pytest.approx(expected, rel=1e-5)
    assert plain.count("the CPU, 1 thread, one process, fp32\n") == 1 and "warning: no --config_file" not in plain
    assert "DataParallel rehearsal with 2 replicas" in launch and settings["devices_per_process"] == 2


def test_a_forgotten_default_config_and_idle_cores(flags, tmp_path):
    default = tmp_path / "hf" / "accelerate" / "default_config.yaml"
    default.parent.mkdir(parents=True)
    default.write_text((CONFIGS / "single_gpu_bf16.yaml").read_text())
    words = ["accelerate", "launch", TASK, *flags, "--max_steps", "2"]
    error, _, _, settings = finished(start(words, tmp_path, OMP_NUM_THREADS="", OMP_WAIT_POLICY="passive"))
    assert error.count(f"accelerate obeys its default config {default}. Pass --config_file") == 1
    assert settings["precision"] == "bf16"
    # The launcher sets OMP_NUM_THREADS to 1 where the user has not.
    assert f"the CPU, {CORES} thread" in settings["effective"]


def stopped(words, folder, **environment):
    """Of a run that must not start: its stderr up to the launcher's own summary."""
    code, error = finish(start(words, folder, **environment))
    assert code != 0 and not (folder / "output").exists()
    return error.split("Traceback")[0], error


def test_a_config_that_does_not_say_what_it_seems_to(flags, tmp_path):
    config = tmp_path / "own.yaml"
    config.write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_CPU\nnum_processes: 2\nuse_cpu: true\n"
        "mixed_precision: 'no'\nfsdp_config:\n  fsdp_reshard_after_foward: false\n"
    )
    words = ["accelerate", "launch", "--quiet", "--config_file", str(config), TASK, *flags]
    # A model that is not there would be the first thing to say, were the model looked at.
    said, error = stopped([*words, "--model_name_or_path", "./nowhere"], tmp_path)
    assert f"{config}:2: key `distributed_type: MULTI_CPU`: accelerate launch starts one process" in said
    assert f"{config}:7: key `fsdp_config.fsdp_reshard_after_foward: false`" in said
    assert "Did you mean `fsdp_reshard_after_forward`?" in said
    assert "nowhere" not in said and "Traceback" not in error


def test_what_contradicts_is_said_at_once_and_once(flags, tmp_path):
    words = ["accelerate", "launch", "--config_file", str(CONFIGS / "multi_gpu.yaml"), TASK, *flags]
    said, error = stopped(
        [*words, "--data_parallel", "--learning_rate", "-1"], tmp_path, ACCELERATE_GRADIENT_ACCUMULATION_STEPS="8"
    )
    lines = [line for line in said.splitlines() if line.startswith(("error: ", "[rank 1]"))]
    assert all(line.startswith("error: ") for line in lines) and said_more_than_once(said) == []
    for part in ("--learning_rate -1.0", "--data_parallel", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"):
        assert any(part in line for line in lines), part
    assert lines[0] in error.split("Root Cause")[1]


def test_processes_that_nobody_started(flags, tmp_path):
    # Left over in the environment of a notebook or a batch job.
    said, error = stopped([sys.executable, TASK, *flags], tmp_path, WORLD_SIZE="2")
    assert said.startswith("error: ") and "Traceback" not in error
