"""What checkpoints cost: the share of training time, with and without --async_save, and the size on disk.

    python benchmarks/checkpoint_cost.py [--processes 2] [--steps 60] [--every 20] [--repetitions 3] [flags of classify]

MiniLM on the demo's data unless the flags say otherwise, batch 32, evaluation left out. Runs without checkpoints, with
them, and with them in the background take turns; figures are medians. `waits` is what the training loop itself spends
in saving; `work` is the processor time of the run beyond one without checkpoints, what threads do beside it included.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
SAVING = ["--save_strategy", "steps", "--save_total_limit", "1", "--save_steps"]
WAYS = {"none": ["--save_strategy", "no"], "save": SAVING, "async": ["--async_save", *SAVING]}


def worker(runs):
    """All runs in this process or launch; rank 0 notes how long each waited for saving."""
    import os
    import time
    from unittest import mock

    from tests.runs import run_here
    from toolkit.checkpoint.session import Session

    for run in runs:
        waited = 0.0

        def timed(real):
            def call(*args):
                nonlocal waited
                started = time.perf_counter()
                real(*args)
                waited += time.perf_counter() - started

            return call

        with mock.patch.object(Session, "save", timed(Session.save)):  # noqa: SIM117
            with mock.patch.object(Session, "settle", timed(Session.settle)):
                began = time.process_time()
                run_here(run["flags"])
        if os.environ.get("RANK", "0") == "0":
            Path(run["out"], "measured.json").write_text(json.dumps([waited, time.process_time() - began]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--runs", help=argparse.SUPPRESS)
    args, flags = parser.parse_known_args()
    if args.runs:
        worker(json.loads(Path(args.runs).read_text()))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runs = []
        for repetition in range(-1, args.repetitions):  # the first round warms up
            for way, more in WAYS.items():
                out = folder / f"{way}{repetition}"
                words = ["--output_dir", out, "--max_steps", args.steps, "--eval_strategy", "no"]
                words += [*more, *([] if way == "none" else [args.every]), *flags]
                runs.append({"flags": [str(word) for word in words], "way": way, "out": str(out)})
        file = folder / "runs.json"
        file.write_text(json.dumps(runs))
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={args.processes}", f"--master_port={port}"]
        command = [sys.executable, *(launcher if args.processes > 1 else []), __file__, "--runs", str(file)]
        subprocess.run(command, check=True)
        report(args, runs[len(WAYS) :])


def report(args, runs):
    seconds = {way: [] for way in WAYS}
    waits, work = ({way: [] for way in WAYS} for _ in range(2))
    for run in runs:
        out = Path(run["out"])
        seconds[run["way"]].append(json.loads((out / "train_results.json").read_text())["train_runtime"])
        waited, worked = json.loads((out / "measured.json").read_text())
        waits[run["way"]].append(waited)
        work[run["way"]].append(worked)
    median = {way: statistics.median(values) for way, values in work.items()}
    saves = (args.steps - 1) // args.every
    print(f"\n{args.processes} processes, {args.steps} steps, {saves} checkpoints, {args.repetitions} runs of each way")
    print(f"{'':8}{'seconds':>10}  {'(least to most)':>18}  {'waits':>8}  {'work':>8}")
    for way, values in seconds.items():
        spread = f"({min(values):.1f} to {max(values):.1f})"
        wait = statistics.median(w / s for w, s in zip(waits[way], values))
        more = median[way] / median["none"] - 1
        print(f"{way:8}{statistics.median(values):>10.1f}  {spread:>18}  {wait:>8.1%}  {more:>8.1%}")
    out = Path(next(run["out"] for run in runs if run["way"] == "save"))
    path = next(out.glob("checkpoint-*"))
    size = sum(file.stat().st_size for file in path.iterdir())
    state = 12 * json.loads((out / "run.json").read_text())["parameters"]  # a weight and two moments in float32
    print(f"on disk: {size:,} bytes; weights and moments: {state:,}; {size / state:.4f} x")


if __name__ == "__main__":
    main()
