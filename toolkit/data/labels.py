"""What kind of label a column holds, and its numbers for the model.

Labels come from the training split alone, are named as people wrote them, and get ids in a stable order:
numeric if all are numbers, else alphabetical; or the order of an existing head with the same names.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit.data.columns import absent
from toolkit.data.tables import Table, few
from toolkit.data.values import is_missing, label_name, number
from toolkit.errors import UserError, nearest, raise_all

SINGLE = "single_label_classification"
MULTI = "multi_label_classification"
REGRESSION = "regression"
KINDS = {"single_label": SINGLE, "multi_label": MULTI, **{kind: kind for kind in (SINGLE, MULTI, REGRESSION)}}


@dataclass(frozen=True)
class Labels:
    """What a label column means."""

    kind: str  # transformers' problem_type: SINGLE, MULTI or REGRESSION
    names: list[str]  # id -> name as people wrote it; [] for regression
    column: str
    separator: str | None = None  # between the labels of one cell; None: cells are lists, or hold one label

    @property
    def num_labels(self) -> int:
        """Width of the model's head: the number of names, 1 for regression."""
        return 1 if self.kind == REGRESSION else len(self.names)

    def targets(self, table: Table, required: bool) -> np.ndarray | None:
        """The label column as numbers.

        Returns:
            int64 [rows] for single-label, float32 [rows, num_labels] of 0 and 1 for multi-label (an empty
            cell is no label), float32 [rows] for regression; None where `required` is false and the table
            has no such column or nothing in it.

        Raises:
            UserError: the column is absent, a label is missing, unknown, not a finite number or of the wrong
                type; with the places of the first rows.
        """
        if self.column not in table.columns:
            if required:
                raise UserError(absent(table, self.column, "--label_column_name"))
            return None
        values = table.columns[self.column]
        if not required and all(is_missing(value) for value in values):
            return None
        if self.kind == REGRESSION:
            return self._numbers(table, values)
        if self.kind == MULTI:
            return self._indicators(table, values)
        return self._ids(table, values)

    def _numbers(self, table: Table, values: list[Any]) -> np.ndarray:
        numbers = [number(value) for value in values]
        bad = [row for row, value in enumerate(numbers) if value is None]
        if bad:
            raise UserError(
                f"{table.places(bad)}: column `{self.column}` holds {_shown(values, bad)}: regression "
                "needs a finite number in every row. Correct or remove these rows; for classes add "
                "--problem_type single_label."
            )
        return np.array(numbers, dtype=np.float32)

    def _ids(self, table: Table, values: list[Any]) -> np.ndarray:
        missing = [row for row, value in enumerate(values) if is_missing(value)]
        wrong = [row for row, value in enumerate(values) if isinstance(value, list | dict)]
        problems = []
        if missing:
            problems.append(f"{table.places(missing)}: no label in column `{self.column}`. Label or remove these rows.")
        if wrong:
            shown = _shown(values, wrong)
            problems.append(f"{table.places(wrong)}: column `{self.column}` holds {shown}: expected one label.")
        raise_all(problems)
        index = {name: i for i, name in enumerate(self.names)}
        names = [label_name(value) for value in values]
        self._refuse_unknown(table, [[name] for name in names])
        return np.array([index[name] for name in names], dtype=np.int64)

    def _indicators(self, table: Table, values: list[Any]) -> np.ndarray:
        items = _cells(table, self.column, self.separator)
        self._refuse_unknown(table, items)
        index = {name: i for i, name in enumerate(self.names)}
        targets = np.zeros((len(values), len(self.names)), dtype=np.float32)
        for row, names in enumerate(items):
            targets[row, [index[name] for name in names]] = 1
        return targets

    def _refuse_unknown(self, table: Table, cells: list[list[str]]) -> None:
        known, places = set(self.names), {}
        for row, names in enumerate(cells):
            for name in names:
                if name not in known:
                    places.setdefault(name, []).append(row)
        if places:
            shown = [f"{name!r} (first at {table.place(rows[0])})" for name, rows in places.items()]
            raise UserError(
                f"column `{self.column}` of {table.name} holds labels that no training row has: "
                f"{few(shown)}. Training knows {few([repr(name) for name in self.names], limit=10)}. "
                "Add training rows with them (--max_train_samples keeps the first rows alone), or remove these rows."
            )


def find_labels(
    splits: dict[str, Table],
    column: str,
    problem_type: str | None = None,
    separator: str | None = None,
    known: dict[int, str] | None = None,
) -> Labels:
    """Find the kind of the labels and their names in the training split, and check every split against them.

    The kind: multi-label where cells are lists or `separator` is given; regression where all are numbers and
    some are not whole; else single-label. `problem_type` overrides that where the values allow it.

    Args:
        splits: `train` and, if any, `validation` and `test`. Only `test` may be without labels.
        known: an existing head's id2label: its order is kept if it has exactly the same names.

    Raises:
        UserError: the problems of all splits at once, each naming the split and the first rows.
    """
    train = splits["train"]
    raise_all(
        f"{split} split: {absent(table, column, '--label_column_name')}"
        for split, table in splits.items()
        if split != "test" and column not in table.columns
    )
    kind = _find_kind(train, column, problem_type, separator)
    names = [] if kind == REGRESSION else _find_names(train, column, kind, separator)
    if known is not None and len(known) == len(names) and set(known.values()) == set(names):
        names = [known[i] for i in sorted(known)]
    labels = Labels(kind, names, column, separator)
    problems: list[str] = []
    for split, table in splits.items():
        try:
            labels.targets(table, required=split != "test")
        except UserError as error:
            problems += [f"{split} split: {message}" for message in error.messages]
            problems += _type_clash(train, table, column)
    raise_all(problems)
    if kind == SINGLE and len(names) == 1:
        raise UserError(
            f"column `{column}` of {train.name}: every training row has the one class {names[0]!r}, so "
            "there is nothing to learn. Add rows of another class, name another --label_column_name, or, "
            "where a number is to be predicted, add --problem_type regression."
        )
    return labels


def balance(targets: np.ndarray, names: Sequence[str]) -> str:
    """One line about the distribution of what `Labels.targets` returned: counts and shares, or the range."""
    if targets.dtype.kind == "f" and targets.ndim == 1:
        return f"targets from {targets.min():g} to {targets.max():g}, mean {targets.mean():.4g}"
    counts = targets.sum(axis=0) if targets.ndim == 2 else np.bincount(targets, minlength=len(names))
    order = np.argsort(-counts, kind="stable")
    shown = [f"{names[i]} {int(counts[i])} ({counts[i] / len(targets):.1%})" for i in order]
    if len(shown) > 10:
        shown = [*shown[:8], f"{len(shown) - 9} more", f"least {shown[-1]}"]
    return f"{len(names)} {'labels' if targets.ndim == 2 else 'classes'}: {', '.join(shown)}"


def balanced_weights(targets: np.ndarray, k: int) -> np.ndarray:
    """Class weights n / (k x count), as scikit-learn's `class_weight="balanced"`; 0 for a class without rows.

    Args:
        targets: int64 [n], class ids.

    Returns:
        float32 [k].
    """
    counts = np.bincount(targets, minlength=k)
    return np.where(counts > 0, len(targets) / (k * np.maximum(counts, 1)), 0).astype(np.float32)


def _find_kind(train: Table, column: str, problem_type: str | None, separator: str | None) -> str:
    if problem_type is not None and problem_type not in KINDS:
        raise UserError(
            f"--problem_type {problem_type!r}: expected single_label, multi_label or regression."
            f"{nearest(problem_type, KINDS)}"
        )
    if separator == "":
        raise UserError("--label_separator is empty: expected what stands between the labels of one cell.")
    asked = KINDS[problem_type] if problem_type else None
    values = train.columns[column]
    lists = [row for row, value in enumerate(values) if isinstance(value, list)]
    if lists or separator is not None:
        if asked not in (None, MULTI):
            why = "--label_separator" if separator is not None else f"the list at {train.place(lists[0])}"
            raise UserError(f"--problem_type {problem_type} contradicts {why} in column `{column}`: drop one.")
        return MULTI
    if asked == MULTI:
        raise UserError(
            f"--problem_type {problem_type}: column `{column}` of {train.name} has no lists, so name what "
            "stands between the labels of one cell, e.g. --label_separator ','."
        )
    if asked:
        return asked
    numbers = {row: number(value) for row, value in enumerate(values) if not is_missing(value)}
    decimals = [row for row, value in numbers.items() if value is not None and not value.is_integer()]
    others = [row for row, value in numbers.items() if value is None]
    if not decimals:
        return SINGLE
    if others:
        decimal = f"{_shown(values, decimals[:1])} at {train.place(decimals[0])}"
        raise UserError(
            f"column `{column}` of {train.name} holds decimal numbers (e.g. {decimal}) and something else: "
            f"{_shown(values, others)} at {train.places(others)}. "
            "For regression give each row a finite number; for classes add --problem_type single_label."
        )
    return REGRESSION


def _find_names(train: Table, column: str, kind: str, separator: str | None) -> list[str]:
    values = train.columns[column]
    if kind == MULTI:
        found = {name for names in _cells(train, column, separator) for name in names}
    else:
        found = {label_name(v) for v in values if not is_missing(v) and not isinstance(v, list | dict)}
    if not found:
        raise UserError(f"column `{column}` of {train.name}: no training row has a label.")
    numeric = all(number(name) is not None for name in found)
    names = sorted(found, key=lambda name: (number(name) if numeric else 0, name))
    alike: dict[Any, list[str]] = {}
    for name in names:
        alike.setdefault(number(name) if numeric else name.strip(), []).append(name)
    twins = [" and ".join(map(repr, same)) for same in alike.values() if len(same) > 1]
    if twins:
        raise UserError(f"column `{column}` of {train.name} writes one label in several ways: {few(twins)}. Use one.")
    return names


def _cells(table: Table, column: str, separator: str | None) -> list[list[str]]:
    """The label names of each row of a multi-label column; a UserError where a cell is no such thing."""
    values = table.columns[column]
    cells: list[list[str]] = []
    wrong, twice = [], []
    for row, value in enumerate(values):
        names = _names_of(value, separator)
        if names is None:
            wrong.append(row)
        elif len(set(names)) < len(names):
            twice.append(row)
        cells.append(names or [])
    problems = []
    if wrong:
        what = "a list of labels" if separator is None else f"labels parted by {separator!r}"
        hint = " or add --label_separator" if separator is None else ""
        problems.append(
            f"{table.places(wrong)}: column `{column}` holds {_shown(values, wrong)}: expected {what} "
            f"(an empty one where no label applies). Correct these rows{hint}."
        )
    if twice:
        shown = _shown(values, twice[:1])
        problems.append(
            f"{table.places(twice)}: column `{column}` names a label twice in one row, e.g. {shown}. "
            "Name each once; a row of zeros and ones is to be given as the list of the labels that are one."
        )
    raise_all(problems)
    return cells


def _names_of(value: Any, separator: str | None) -> list[str] | None:
    """The labels of one cell; None where it is not a multi-label cell."""
    if isinstance(value, list):
        if any(is_missing(item) or isinstance(item, list | dict) for item in value):
            return None
        return [label_name(item) for item in value]
    if isinstance(value, str) and not value.strip():
        return []
    if separator is None or not isinstance(value, str | int):
        return None
    return [part.strip() for part in label_name(value).split(separator) if part.strip()]


def _type_clash(train: Table, table: Table, column: str) -> list[str]:
    """One message where a column looks like numbers in one split and like something else in another."""
    ours, theirs = _look(train.columns[column]), _look(table.columns.get(column, []))
    if table is train or ours is None or theirs is None or ours[0] == theirs[0]:
        return []
    a, b = (
        f"{kind} in {where.name} ({where.columns[column][row]!r} at {where.place(row)})"
        for where, (kind, row) in ((train, ours), (table, theirs))
    )
    return [f"column `{column}` holds {a} but {b}: write it the same way in every file."]


def _look(values: list[Any]) -> tuple[str, int] | None:
    """What most strictly describes the values, and a row that shows it."""
    tests: list[tuple[str, Callable[[Any], bool]]] = [
        ("lists", lambda v: isinstance(v, list)),
        ("true and false", lambda v: isinstance(v, bool)),
        ("text", lambda v: number(v) is None),
        ("numbers", lambda v: True),
    ]
    rows = [row for row, value in enumerate(values) if not is_missing(value)]
    for kind, test in tests:
        row = next((row for row in rows if test(values[row])), None)
        if row is not None:
            return kind, row
    return None


def _shown(values: list[Any], rows: Sequence[int]) -> str:
    shown = [repr(values[row]) for row in rows[:5]]
    return few([text if len(text) < 40 else text[:37] + "…" for text in dict.fromkeys(shown)])
