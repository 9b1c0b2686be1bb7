"""Run a function of a test module on every rank of one launch:

torchrun --nproc_per_node 2 tests/ranks.py tests.test_step:on_two_ranks FOLDER
"""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.runs import launch


def on_ranks(function: Callable[[Path], Any], processes: int, folder: Path, timeout: float = 300) -> list[Any]:
    """What `function(folder)` returns on each rank, through JSON."""
    result = start(function, processes, folder, timeout)
    assert result.returncode == 0, result.stdout + result.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(processes)]


def start(
    function: Callable[[Path], Any], processes: int, folder: Path, timeout: float = 300
) -> subprocess.CompletedProcess:
    """The finished launch, whatever its exit code."""
    name = f"{function.__module__}:{function.__name__}"
    return launch(["tests/ranks.py", name, str(folder)], processes, timeout)


def main() -> None:
    import os

    module, name = sys.argv[1].split(":")
    folder = Path(sys.argv[2])
    result = getattr(importlib.import_module(module), name)(folder)
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(result))


if __name__ == "__main__":
    from toolkit.launch.guard import guarded

    guarded(main)
