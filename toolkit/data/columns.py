"""Which columns of a table hold texts and labels, and the texts themselves."""

from collections.abc import Sequence
from typing import Any

from toolkit.data.tables import Table, few
from toolkit.data.values import is_missing, is_nothing, number
from toolkit.errors import UserError, nearest, raise_all
from toolkit.report.console import warn

TEXT_NAMES = ("text", "sentence")
PAIR_NAMES = (
    ("sentence1", "sentence2"),
    ("premise", "hypothesis"),
    ("question1", "question2"),
    ("question", "sentence"),
    ("question", "passage"),
    ("question", "context"),
    ("query", "passage"),
    ("text_a", "text_b"),
    ("text1", "text2"),
)
LABEL_NAMES = ("label", "labels", "score", "similarity_score", "class", "target")
EMPTY_POLICIES = ("error", "drop", "keep")


def text_columns(table: Table, asked: list[str] | None, label: str | None) -> list[str]:
    """The one column of texts, or the two of text pairs.

    Without `asked`: columns of a well-known name (TEXT_NAMES, PAIR_NAMES), else the only column of strings
    that is neither the label nor all numbers.

    Raises:
        UserError: columns that do not exist, or more than one way to read the table.
    """
    if asked:
        problems = [absent(table, name, "--text_column_names") for name in asked if name not in table.columns]
        if len(asked) > 2 or len(set(asked)) < len(asked):
            problems.append(f"--text_column_names {' '.join(asked)}: expected one column, or two different ones.")
        if label in asked:
            problems.append(f"--text_column_names {' '.join(asked)}: `{label}` is the label column.")
        raise_all(problems)
        return list(asked)
    names = [name for name in table.columns if name != label]
    usual = {name.lower(): name for name in names}
    found = [[usual[name] for name in pair] for pair in PAIR_NAMES if set(pair) <= set(usual)]
    paired = {name for pair in found for name in pair}
    found += [[usual[name]] for name in TEXT_NAMES if name in usual and usual[name] not in paired]
    if not found:
        found = [[name] for name in names if _is_text(table.columns[name])]
    if len(found) == 1:
        return found[0]
    fault = "more than one possible text column" if found else "no text column"
    raise UserError(
        f"{table.name} has {fault}: its columns are {_listed(table)}. "
        "Name one, or two for pairs, with --text_column_names."
    )


def label_column(table: Table, asked: str | None, required: bool = True) -> str | None:
    """The label column: `asked`, else the only one of a well-known name (LABEL_NAMES).

    Returns:
        Its name; None where the table has none and `required` is false.

    Raises:
        UserError: there is none, or more than one.
    """
    if asked is not None:
        if asked not in table.columns and required:
            raise UserError(absent(table, asked, "--label_column_name"))
        return asked if asked in table.columns else None
    found = [name for name in table.columns if name.lower() in LABEL_NAMES]
    if len(found) == 1 or not (found or required):
        return found[0] if found else None
    fault = "more than one label column" if found else "no label column of a usual name"
    raise UserError(f"{table.name} has {fault}: its columns are {_listed(table)}. Name one with --label_column_name.")


def texts(table: Table, columns: Sequence[str], policy: str) -> tuple[list[str] | list[tuple[str, str]], list[int]]:
    """The texts of one column, or the pairs of two, and the rows (from 0) that they come from.

    Numbers become text. A text is empty if it is None, NaN or only white space, a pair if both its texts are.

    Args:
        policy: what to do with empty texts: `error`; `drop`, with a warning that places them; `keep`.

    Raises:
        UserError: a column is absent, a value is neither text nor number, a text is empty under `error`, or
            none is left under `drop`.
    """
    if policy not in EMPTY_POLICIES:
        raise UserError(f"--empty_text {policy!r}: expected one of {', '.join(EMPTY_POLICIES)}.")
    raise_all(absent(table, name, "--text_column_names") for name in columns if name not in table.columns)
    problems = []
    for name in columns:
        values = table.columns[name]
        wrong = [row for row, value in enumerate(values) if isinstance(value, list | dict | bytes)]
        if wrong:
            kind = type(values[wrong[0]]).__name__
            problems.append(f"{table.places(wrong)}: column `{name}` holds a {kind}: expected a text.")
    raise_all(problems)
    read = [["" if is_nothing(value) else str(value) for value in table.columns[name]] for name in columns]
    rows = list(range(len(table)))
    empty = [row for row in rows if not any(column[row].strip() for column in read)]
    if empty and policy != "keep":
        where = " and ".join(f"`{name}`" for name in columns)
        what = f"{len(empty)} of {len(rows)} rows have no text in {where}"
        if policy == "error":
            raise UserError(
                f"{table.places(empty)}: {what}. Correct them, or add --empty_text drop (leave them out) or "
                "--empty_text keep (an empty text is a text)."
            )
        if len(empty) == len(rows):
            raise UserError(f"{table.name}: {what}: nothing is left under --empty_text drop.")
        warn(f"{table.name}: {what} and are left out: {table.places(empty, limit=20)}.")
        gone = set(empty)
        rows = [row for row in rows if row not in gone]
    if len(columns) == 1:
        return [read[0][row] for row in rows], rows
    return [(read[0][row], read[1][row]) for row in rows], rows


def absent(table: Table, column: str, flag: str) -> str:
    """The message for a column that the table does not have."""
    guess = nearest(column, table.columns)
    return f"{table.name} has no column `{column}`.{guess} Its columns are {_listed(table)}: see {flag}."


def _is_text(values: list[Any]) -> bool:
    """Strings, and not all of them numbers."""
    present = [value for value in values if not is_missing(value)]
    return all(isinstance(value, str) for value in present) and any(number(value) is None for value in present)


def _listed(table: Table) -> str:
    listed = few([f"`{name}`" for name in table.columns], limit=20)
    if table.name.lower().endswith((".csv", ".tsv")):
        listed += " (if that is a row of data, the file has no header line: add --column_names)"
    return listed
