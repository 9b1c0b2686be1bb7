"""tasks/classify.py with a fault planted in the middle of the training.

torchrun --nproc_per_node 2 tests/faults.py FAULT RANK STEP [task flags]
"""

import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise ZeroDivisionError("planted in this rank")


def refuse() -> None:
    from toolkit.errors import UserError

    raise UserError("planted for the user")


FAULTS = {"kill": kill, "fail": fail, "refuse": refuse}


def main() -> None:
    """Train, and when this is the rank (or `all`), run the fault at the end of the step."""
    from tasks import classify
    from toolkit.report.run import Run

    fault, rank, step = sys.argv[1:4]
    del sys.argv[1:4]
    log_step = Run.step

    def step_with_fault(run, work, *rest):
        log_step(run, work, *rest)
        if work.step.number == int(step) and rank in ("all", os.environ["RANK"]):
            FAULTS[fault]()

    Run.step = step_with_fault
    classify.main()


if __name__ == "__main__":
    from toolkit.launch.guard import guarded

    guarded(main)
