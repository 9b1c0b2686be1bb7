"""What the code promises about its own structure."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STRATEGY_WORDS = re.compile(r"deepspeed|fsdp|dtensor|pipelining|dataparallel", re.IGNORECASE)
AT_HOME = ("toolkit/strategy/", "toolkit/launch/")


def test_strategies_are_named_in_their_own_folders_only():
    """The step, the tasks, data and reports hold for every strategy, so they know of none."""
    found = [
        f"{file.relative_to(ROOT)}:{number}: {line.strip()}"
        for folder in ("toolkit", "tasks")
        for file in sorted((ROOT / folder).rglob("*.py"))
        if not file.relative_to(ROOT).as_posix().startswith(AT_HOME)
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1)
        if STRATEGY_WORDS.search(line)
    ]
    assert found == []


def test_files_stay_readable():
    """A guide, not a limit: a clear file of 350 lines beats two tangled ones, one of 450 is two files."""
    long = {
        str(file.relative_to(ROOT)): count
        for file in (ROOT / "toolkit").rglob("*.py")
        if (count := len(file.read_text(encoding="utf-8").splitlines())) > 350
    }
    assert long == {}
