"""Kill a training at random moments, start it again, and compare the weights that it ends with, bit for bit.

    python benchmarks/kill.py                                # 40 moments, about 25 minutes on 2 cores
    python benchmarks/kill.py --kills 10 --way "FSDP2 x 2"   # of tests/ways.py

Two processes with dropout; saved every third step, evaluated every fifth. Each time SIGKILL comes to one process or to
all, at a random instant of a step, an evaluation, the writing of a checkpoint or its renaming; every second run saves
in the background. The same command with --resume_from_checkpoint auto then ends it. Prints a line for each, and exits
with 1 where weights or rows of metrics.jsonl differ from those of the run that was never killed.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.runs import launch
from tests.test_checkpoint_ring import equal
from tests.test_checkpoint_stop import EVALUATED, SAVED, STEPS, figures, flags, prepare
from tests.ways import WAYS

# How long each moment lasts, in seconds, and the steps that may be behind it.
MOMENTS = {
    "training": (0.1, range(STEPS)),
    "evaluation": (0.1, range(EVALUATED, STEPS, EVALUATED)),
    "saving": (0.05, range(SAVED, STEPS, SAVED)),
    "renaming": (0.002, range(SAVED, STEPS, SAVED)),
}
LIMIT = 200.0  # seconds that a launch may take


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--way", choices=[name for name, way in WAYS.items() if way.processes == 2], default="DDP x 2")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(run_all(Path(temporary), asked.kills, random.Random(asked.seed), asked.way))


def run_all(folder: Path, kills: int, draw: random.Random, way: str) -> int:
    """So many kills that have hit; 1 where a run did not end as if nothing had been."""
    prepare(folder)
    run = lambda *words: launch(  # noqa: E731
        ["tests/moments.py", *words, *WAYS[way].flags], 2, LIMIT, **dict(WAYS[way].environment)
    )
    first = run("[]", *flags(folder, folder / "whole"))
    assert first.returncode == 0, first.stderr
    hit, differing = Counter(), 0
    while hit.total() < kills:
        moment = list(MOMENTS)[hit.total() % len(MOMENTS)]
        lasts, steps = MOMENTS[moment]
        plan = {"moment": moment, "step": draw.choice(steps), "rank": 0 if moment == "renaming" else draw.randrange(2)}
        plan |= {"delay": draw.uniform(0, lasts), "to": draw.choice(["self", "all"])}
        out = folder / f"run-{hit.total()}-{draw.randrange(10**6)}"
        background = ["--async_save"] * draw.randrange(2)
        started = time.monotonic()
        if run(json.dumps([plan]), *flags(folder, out, *background)).returncode == 0:
            continue  # it was over before
        left = sorted(path.name for path in out.glob("checkpoint-*"))
        again = run("[]", *flags(folder, out, *background, "--resume_from_checkpoint", "auto"))
        problem = "" if again.returncode == 0 else again.stderr
        try:
            equal(out, folder / "whole")
            assert figures(out) == figures(folder / "whole"), "metrics.jsonl differs"
        except (AssertionError, OSError) as error:
            problem = problem or str(error) or "weights differ"
        hit[moment] += 1
        differing += bool(problem)
        how = "all" if plan["to"] == "all" else f"rank {plan['rank']}"
        print(
            f"{hit.total():3} {moment} after step {plan['step']} + {1000 * plan['delay']:.1f} ms, {how}"
            f"{', in the background' if background else ''}: left {' '.join(left) or 'nothing'}; "
            f"{time.monotonic() - started:.0f} s; {problem or 'equal'}",
            flush=True,
        )
    print(f"{hit.total()} kills ({', '.join(f'{n} {name}' for name, n in hit.items())}), {differing} runs differ")
    return int(differing > 0)


if __name__ == "__main__":
    main()
