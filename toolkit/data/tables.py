"""A table in memory that knows where each of its rows came from, and the readers of JSON and Parquet."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.data.values import is_broken
from toolkit.errors import UserError, raise_all


@dataclass(frozen=True)
class Table:
    """Columns of equal length. Row numbers in arguments count from 0, in messages from 1."""

    name: str  # as people know it: the path, or `hub-name[train]`
    columns: dict[str, list[Any]]
    lines: list[int] | None = None  # line of the file where each row starts, from 1; None: rows only
    rows: list[int] | None = None  # number of each row in its source, from 1; None: 1, 2, 3, …

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))

    def place(self, row: int) -> str:
        """`train.csv:12` where lines are known, else `train.parquet, row 12`."""
        if self.lines is not None:
            return f"{self.name}:{self.lines[row]}"
        return f"{self.name}, row {self.rows[row] if self.rows is not None else row + 1}"

    def places(self, rows: Sequence[int], limit: int = 5) -> str:
        """The places of the first few rows, and how many there are beyond them."""
        return few([self.place(row) for row in rows[:limit]], len(rows))

    def select(self, rows: Sequence[int]) -> "Table":
        """These rows, in this order; they keep their places."""
        return Table(
            self.name,
            {name: [values[row] for row in rows] for name, values in self.columns.items()},
            None if self.lines is None else [self.lines[row] for row in rows],
            [row + 1 if self.rows is None else self.rows[row] for row in rows],
        )


def few(items: Sequence[str], total: int | None = None, limit: int = 5) -> str:
    """`a, b, c and 4 more`; `total` where `items` is already a part of the whole."""
    total = len(items) if total is None else total
    shown = items[:limit]
    return ", ".join(shown) + (f" and {total - len(shown)} more" if total > len(shown) else "")


def read_text(path: Path) -> str:
    """The file's text, line ends untouched, without a byte order mark.

    Raises:
        UserError: the file is not UTF-8 (the line is named) or holds nothing.
    """
    content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        utf16 = content[:2] in (b"\xff\xfe", b"\xfe\xff")
        line = 1 if utf16 else content.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}:{line}: not UTF-8 (byte 0x{content[error.start]:02x}). Convert the file first, e.g. "
            f"`iconv -f {'UTF-16' if utf16 else 'WINDOWS-1252'} -t UTF-8 {path.name} > new_{path.name}`, "
            "with the encoding that it was written in."
        ) from None
    if not text.strip():
        raise UserError(f"{path}: the file is empty.")
    return text


def read_json(path: Path) -> Table:
    """A list of objects, or `{"data": [objects]}`; also one object a line, as in many `.json` files."""
    text = read_text(path)
    try:
        content = json.loads(text)
    except ValueError as error:
        if getattr(error, "msg", "") == "Extra data" and text.lstrip().startswith("{"):
            return read_jsonl(path)
        raise UserError(f"{path}{_json_fault(error)}") from None
    if isinstance(content, dict):
        content = content.get("data")
    if not isinstance(content, list):
        raise UserError(
            f'{path}: expected a list of objects, [{{"text": …, "label": …}}, …], or one object with such a '
            'list as "data". A file with one object a line is to be named .jsonl.'
        )
    return _from_objects(str(path), content, None)


def read_jsonl(path: Path) -> Table:
    """One object a line; blank lines are skipped."""
    objects, lines, problems = [], [], []
    # str.splitlines would also cut at U+2028 and other characters that may stand inside a JSON string.
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            objects.append(json.loads(line))
            lines.append(number)
        except ValueError as error:
            problems.append(f"{path}:{number}{_json_fault(error, line=False)}")
    if problems:
        rest = len(problems) - 5
        raise UserError(*problems[:5], *([f"{path}: {rest} more lines are not valid JSON."] if rest > 0 else []))
    return _from_objects(str(path), objects, lines)


def read_parquet(path: Path) -> Table:
    """Parquet by pyarrow; values become Python's own types."""
    import pyarrow
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            content = file.read()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path}: not readable as Parquet: {first_line(error)}") from None
    check_names(str(path), content.column_names)
    return Table(str(path), content.to_pydict())


def check_names(where: str, names: Sequence[str]) -> None:
    """Raise a `UserError` for empty and for repeated column names."""
    problems = []
    empty = [str(position) for position, name in enumerate(names, 1) if not name]
    if empty:
        problems.append(f"{where}: column {few(empty)} of {len(names)} has an empty name in the header.")
    repeated = sorted({name for name in names if name and names.count(name) > 1})
    if repeated:
        problems.append(f"{where}: the column name {few([repr(name) for name in repeated])} stands there twice.")
    raise_all(problems)


def first_line(error: BaseException) -> str:
    """A library's message in one line."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _json_fault(error: ValueError, line: bool = True) -> str:
    if not isinstance(error, json.JSONDecodeError):
        return f": not valid JSON: {first_line(error)}."
    where = f":{error.lineno}" if line else ""
    return f"{where}: not valid JSON at column {error.colno}: {error.msg}."


def _from_objects(name: str, objects: list[Any], lines: list[int] | None) -> Table:
    """Rows as objects to columns; a key that a row does not have is None there."""
    shape = Table(name, {"": objects}, lines)
    wrong = [row for row, value in enumerate(objects) if not isinstance(value, dict)]
    if wrong:
        kind = type(objects[wrong[0]]).__name__
        raise UserError(f"{shape.places(wrong)}: expected an object, {{…}}, for each row, found a {kind}.")
    names = dict.fromkeys(key for row in objects for key in row)
    table = Table(name, {key: [row.get(key) for row in objects] for key in names}, lines)
    _refuse_surrogates(table)
    return table


def _refuse_surrogates(table: Table) -> None:
    """Half a UTF-16 pair (`\\ud83d` alone) is not a character: no tokenizer and no file can take it."""
    problems = []
    for name, values in table.columns.items():
        bad = [row for row, value in enumerate(values) if _any_text(value, is_broken)]
        if bad:
            problems.append(
                f"{table.places(bad)}: column `{name}` holds half a surrogate pair (\\ud800 to \\udfff "
                "alone), which is not a character. Remove it, or write the whole pair."
            )
    raise_all(problems)


def _any_text(value: Any, test: Callable[[str], bool]) -> bool:
    if isinstance(value, str):
        return test(value)
    if isinstance(value, list):
        return any(_any_text(item, test) for item in value)
    if isinstance(value, dict):
        return any(_any_text(item, test) for pair in value.items() for item in pair)
    return False
