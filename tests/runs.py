"""Several training runs in one process or one launch, with or without a fault planted in the step.

A launch costs ten seconds of start-up, so one launch does many runs:
    torchrun --nproc_per_node 2 tests/runs.py runs.json
"""

import json
import os
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def read_rows(folder: Path) -> list[dict]:
    """The step rows of a run's metrics.jsonl."""
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "loss" in row]


def run_here(
    flags: list[str],
    precision: str = "no",
    fault: str | None = None,
    task: str = "classify",
    environment: dict[str, str] | None = None,
) -> list[dict]:
    """One run of a task script in this process; its step rows (rank 0).

    Args:
        environment: what `accelerate launch` says of the strategy.
    """
    from accelerate.state import AcceleratorState

    from toolkit.arguments import parse
    from toolkit.fit import fit

    AcceleratorState._reset_state()
    if task == "classify":
        from tasks.classify import ClassifyArguments as Flags
        from toolkit.classification.task import Classification as Task
    else:
        from tasks.language_modeling import LanguageModelingArguments as Flags
        from toolkit.language.task import LanguageModeling as Task
    args = parse(Flags, flags)
    variables = {"ACCELERATE_MIXED_PRECISION": precision, **(environment or {})}
    # Drawing takes half the time of so short a run.
    undrawn = mock.patch("toolkit.report.plots.training_plot")
    with mock.patch.dict(os.environ, variables), planted(fault), undrawn:
        fit(Task(args), args)
    return read_rows(args.output_dir) if int(os.environ.get("RANK", "0")) == 0 else []


def run_launched(runs: list[dict], processes: int, folder: Path, timeout: float = 600) -> None:
    """All runs, one after another, in one launch of `processes` ranks.

    Args:
        runs: the arguments of `run_here` by name.
    """
    file = folder / f"runs-{processes}.json"
    file.write_text(json.dumps(runs))
    result = launch(["tests/runs.py", str(file)], processes, timeout)
    assert result.returncode == 0, result.stdout + result.stderr


def launch(words: list[str], processes: int, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess:
    """Start a script from the repository's root with torchrun on a free port."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={processes}"]
    command += [f"--master_port={free_port()}", *words]
    return run(command, timeout, **environment)


def run(command: list[str], timeout: float = 300, **environment: str) -> subprocess.CompletedProcess:
    """A command in the repository's root, killed with its children after `timeout` seconds."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        out, err = process.communicate()
        raise AssertionError(f"still running after {timeout} s:\n{out}\n{err}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@contextmanager
def planted(fault: str | None):
    """Break the training step in one of eight ways."""
    if fault is None:
        yield
        return
    from toolkit.data import feed
    from toolkit.step import Stepper
    from toolkit.strategy import ddp, single

    def divided_by_ranks(self, batches, weight, seed):
        return run(self, batches, weight * self.data_world, seed)

    def divided_by_micro_batches(self, batches, weight, seed):
        return run(self, batches, weight * len(batches), seed)

    def last_dropped(self, batches, weight, seed):
        return run(self, batches[:-1], weight, seed)

    def one_twice(self, step):
        work = real_work(self, step)
        first = work.batches[0]
        again = feed.collate(self.task, self.samples, step.ids[:1], step.epoch)
        return type(work)(work.step, [first, *work.batches[1:], again], work.tokens, work.padded)

    def not_unscaled(self, gradients):
        pass  # as if clipping had come first

    def late(self, work, *rest):
        given = self.learning_rate
        self.learning_rate = lambda step: given(max(1, step - 1))
        try:
            return take(self, work, *rest)
        finally:
            self.learning_rate = given

    run, take, real_work = single.SingleProcess.run, Stepper.take, feed.Feed.work
    patches = {
        "divided by ranks": (single.SingleProcess, "run", divided_by_ranks),
        "divided by micro-batches": (single.SingleProcess, "run", divided_by_micro_batches),
        "clipping left out": (single, "clip", lambda *args: None),
        "clipping before unscaling": (single.Precision, "unscale", not_unscaled),
        "last micro-batch dropped": (single.SingleProcess, "run", last_dropped),
        "one sample twice": (feed.Feed, "work", one_twice),
        "one rank not reduced": (ddp.DDP, "synchronised", lambda self, last: self.forward.no_sync()),
        "learning rate late": (Stepper, "take", late),
    }
    target, name, replacement = patches[fault]
    with mock.patch.object(target, name, replacement):
        yield


def main() -> None:
    for run_arguments in json.loads(Path(sys.argv[1]).read_text()):
        run_here(**run_arguments)


if __name__ == "__main__":
    from toolkit.launch.guard import guarded

    guarded(main)
