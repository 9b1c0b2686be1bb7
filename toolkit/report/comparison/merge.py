"""Comparisons of several runs or machines, side by side."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.report.comparison import words

NEEDED = ("configs", "machine", "settings", "reference", "rehearsal", "created", "versions")
ABSENT = object()


def read(path: Path) -> dict[str, Any]:
    """A compare.json.

    Raises:
        UserError: there is none, or it is something else.
    """
    path = Path(path)
    try:
        comparison = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); `toolkit compare` writes compare.json.") from None
    except ValueError:
        raise UserError(f"{path}: is not JSON; `toolkit compare` writes compare.json.") from None
    missing = [key for key in NEEDED if not isinstance(comparison, dict) or key not in comparison]
    if isinstance(comparison, dict) and "runs" in comparison:
        raise UserError(f"{path}: holds several runs already; give the compare.json of each run instead.")
    if missing:
        raise UserError(f"{path}: is not a comparison, `{missing[0]}` is missing; `toolkit compare` writes one.")
    return comparison


def merge(comparisons: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Several comparisons as one, every config labelled with its machine.

    Returns:
        A comparison whose configs have a `machine` each. `runs` holds what was said of each run (`label`,
        `machine`, `settings`, `versions`, …), `differences` in words where their settings and versions differ.
    """
    labels = _labels(comparisons)
    runs = [
        {"label": label} | {key: value for key, value in comparison.items() if key != "configs"}
        for label, comparison in zip(labels, comparisons)
    ]
    first = comparisons[0]
    return {
        **{key: first.get(key) for key in ("reference", "settings", "versions", "machine")},
        "created": max(comparison["created"] for comparison in comparisons),
        "rehearsal": any(comparison["rehearsal"] for comparison in comparisons),
        "runs": runs,
        "differences": list(_differences(runs)),
        "configs": [
            {**config, "machine": label}
            for label, comparison in zip(labels, comparisons)
            for config in comparison["configs"]
        ],
    }


def _labels(comparisons: Sequence[dict[str, Any]]) -> list[str]:
    """The machines' names; with the time where one machine stands there twice, with a number where that is the same."""
    labels = [comparison["machine"].get("name") or words.machine(comparison["machine"]) for comparison in comparisons]
    if len(set(labels)) < len(labels):
        labels = [f"{label}, {comparison['created']}" for label, comparison in zip(labels, comparisons)]
    return [
        label if labels.count(label) == 1 else f"{label} ({number})" for number, label in enumerate(labels, start=1)
    ]


def _differences(runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    for part in ("settings", "versions", "reference"):
        named = [run[part] if isinstance(run[part], dict) else {"": run[part]} for run in runs]
        for key in dict.fromkeys(key for values in named for key in values):
            found = [values.get(key, ABSENT) for values in named]
            if any(value != found[0] for value in found):
                said = ", ".join(f"{_said(value)} ({run['label']})" for value, run in zip(found, runs))
                yield f"{part}{f' {key}' if key else ''}: {said}"


def _said(value: Any) -> str:
    if value is ABSENT:
        return "not given"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
