"""tasks/classify.py with a signal that comes at a chosen moment.

torchrun --nproc_per_node 2 tests/moments.py PLAN [task flags]

PLAN is JSON, a list with an entry for each start of the group (a launcher may restart it; beyond the list nothing
happens): the arguments of `armed`, where "to" is self, all (ranks) or launcher.
"""

import json
import os
import signal
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from threading import Timer
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    plan = json.loads(sys.argv.pop(1))
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    from tasks import classify

    with armed(**plan[attempt]) if attempt < len(plan) else nullcontext():
        classify.main()


@contextmanager
def armed(
    moment: str,
    step: int,
    rank: int = 0,
    signal: str = "SIGKILL",
    to: str = "self",
    times: int = 1,
    delay: float | None = None,
):
    """Have the signal sent when this rank comes by the moment after `step` steps.

    Args:
        delay: seconds by which it comes later than that.
    """
    from toolkit import evaluate
    from toolkit.checkpoint.save import Saver
    from toolkit.checkpoint.tensors import TensorFile
    from toolkit.report.run import Run
    from toolkit.strategy.single import SingleProcess

    owner, name, wanted = {
        "training": (SingleProcess, "rows", 2),  # a micro-batch
        "evaluation": (evaluate, "collate", 2),  # a micro-batch
        "saving": (TensorFile, "add", 2),
        "renaming": (Saver, "_rename", 1),  # on rank 0
    }[moment]
    calls = 0

    def watched(*args, **more):
        nonlocal calls
        if int(os.environ.get("RANK", "0")) == rank and run is not None and run.steps == step:
            calls += 1
            for _ in range(times if calls == wanted else 0):
                send(signal, to) if delay is None else Timer(delay, send, (signal, to)).start()
        return passed(*args, **more)

    def training(self, *rest):
        nonlocal run
        run = self
        return begin(self, *rest)

    run, begin, passed = None, Run.training, getattr(owner, name)
    with mock.patch.object(Run, "training", training), mock.patch.object(owner, name, watched):
        yield


def send(name: str, to: str) -> None:
    """Send a signal; to another process with a note of when, beside the output folder."""
    number = getattr(signal, name)
    if "--output_dir" in sys.argv:
        Path(sys.argv[sys.argv.index("--output_dir") + 1]).with_suffix(".sent").touch()
    if to == "launcher":
        os.kill(os.getppid(), number)
    elif to == "all":
        siblings = Path(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read_text().split()
        for process in sorted(map(int, siblings), key=lambda process: process == os.getpid()):  # this one last
            os.kill(process, number)
    else:
        os.kill(os.getpid(), number)


if __name__ == "__main__":
    from toolkit.launch.guard import guarded

    guarded(main)
