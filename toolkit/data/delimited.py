"""CSV and TSV. Values are strings exactly as written, and no row is ever lost without a word.

A quote that is never closed swallows the rows behind it. There are two cases:

- It stays open up to the end of the file, or another field's opening quote closes it. The parser is strict,
  so this is always an error, at the line where the record starts.
- The end of a later field closes it. That is valid CSV, as a text with line breaks is. It is an error if
  *every* line of the record would be a row by itself: it has the right number of fields, and of the fields
  that it would then have beside the quoted one, at least one holds a value that the same column has in
  another row too (or a decimal number, where that column is all numbers). Texts with line breaks practically
  never look like that; how many of them were read is said aloud.
"""

import csv
import io
from collections.abc import Callable, Sequence
from pathlib import Path

from toolkit.data.tables import Table, check_names, few, read_text
from toolkit.data.values import number
from toolkit.errors import UserError
from toolkit.report.console import say

CANDIDATES = ("\t", ",", ";", "|")
NAMES = {"\\t": "\t", "tab": "\t", "comma": ",", "semicolon": ";", "pipe": "|", "space": " "}


def read_delimited(
    path: Path, delimiter: str | None = None, quoting: str = "csv", column_names: list[str] | None = None
) -> Table:
    """Read a CSV or TSV file; every value is a string as written.

    Args:
        delimiter: one character, or its name (`tab`, `\\t`). Default: a tab for `.tsv`; else whichever of
            tab, comma, semicolon and pipe cuts the header into most columns; a comma without a header.
        quoting: `csv`: quotes group a field; `none`: a quote is a character like others.
        column_names: the names where the file has no header line.

    Raises:
        UserError: not UTF-8, no rows, a doubtful header or delimiter, rows with too many or too few fields,
            a quote without its end; each with line numbers.
    """
    name, text = str(path), read_text(path)
    first = next(line for line in io.StringIO(text, newline="") if line.strip())
    if delimiter is not None:
        delimiter = _named(delimiter)
    elif path.suffix.lower() == ".tsv":
        delimiter = "\t"
    else:
        delimiter = "," if column_names else _from_header(name, first)
    records = _records(name, text, delimiter, quoting)
    top = records[0][0]
    if column_names:
        names = list(column_names)
        check_names("--column_names", names)
        if records[0][1] == names:
            raise UserError(f"{name}:{top}: the file has a header line already: leave out --column_names.")
    else:
        names = [field.strip() for field in records.pop(0)[1]]
        if len(names) > 1 and names[0] == "":
            names[0] = "row"  # the index that pandas' to_csv() writes
        check_names(f"{name}:{top}", names)
        if len(names) == 1:
            _refuse_hidden_delimiter(f"{name}:{top}", first, delimiter)
    while records and not records[-1][1]:
        records.pop()
    if len(names) == 1:
        # Inside a one-column file a blank line is a row with an empty text.
        records = [(line, fields or [""]) for line, fields in records]
    else:
        records = [(line, fields) for line, fields in records if fields]
    if not records:
        raise UserError(f"{name}: a header line, but no rows.")
    _check_widths(name, records, len(names), delimiter, first if column_names else None)
    _check_swallowed(name, records, delimiter)
    columns = {column: [fields[i] for _, fields in records] for i, column in enumerate(names)}
    return Table(name, columns, [line for line, _ in records])


def _named(delimiter: str) -> str:
    delimiter = NAMES.get(delimiter.lower(), delimiter)
    if len(delimiter) != 1 or delimiter in '"\r\n':
        raise UserError(f"--delimiter {delimiter!r}: expected one character, or one of {', '.join(NAMES)}.")
    return delimiter


def _shown(delimiter: str) -> str:
    return "tab" if delimiter == "\t" else f"'{delimiter}'"


def _cut(line: str, delimiter: str) -> list[str]:
    return next(csv.reader([line], delimiter=delimiter))


def _from_header(name: str, header: str) -> str:
    counts = {delimiter: len(_cut(header, delimiter)) for delimiter in CANDIDATES}
    most = max(counts.values())
    if most == 1:
        return ","
    best = [delimiter for delimiter in CANDIDATES if counts[delimiter] == most]
    if len(best) > 1:
        shown = " or ".join(map(_shown, best))
        raise UserError(f"{name}: the header's delimiter may be {shown}: name it with --delimiter.")
    return best[0]


def _refuse_hidden_delimiter(where: str, header: str, delimiter: str) -> None:
    others = [other for other in (*CANDIDATES, ":", "^", "~") if len(_cut(header, other)) > 1]
    if others:
        raise UserError(
            f"{where}: with {_shown(delimiter)} as the delimiter the header {header.strip()!r} is one "
            f"column. If {_shown(others[0])} parts the columns, add --delimiter {_shown(others[0])}."
        )


def _records(name: str, text: str, delimiter: str, quoting: str) -> list[tuple[int, list[str]]]:
    """The line where each record starts, and its fields: [] for a blank line behind the first record."""
    csv.field_size_limit(2**31 - 1)  # the module's default stops at 128 KiB
    style = csv.QUOTE_NONE if quoting == "none" else csv.QUOTE_MINIMAL
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, quoting=style, strict=True)
    records: list[tuple[int, list[str]]] = []
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader)
        except StopIteration:
            return records
        except csv.Error as error:
            raise UserError(_quote_fault(name, line, reader.line_num, error)) from None
        if fields or records:
            records.append((line, fields))


def _quote_fault(name: str, start: int, end: int, error: csv.Error) -> str:
    if "end of data" in str(error):
        fault = f"a quote opens here and is not closed by the end of the file (line {end})"
    elif end > start:
        fault = f"a quote opens here and is not closed properly: it swallows the lines up to {end}"
    else:
        fault = "a quoted field goes on behind its closing quote"
    return (
        f"{name}:{start}: {fault}. Close it, or double quotes inside a quoted field; "
        "if quotes are plain characters in this file, add --quoting none."
    )


def _check_widths(
    name: str, records: Sequence[tuple[int, list[str]]], width: int, delimiter: str, first: str | None
) -> None:
    wrong = [f"line {line} has {len(fields)}" for line, fields in records if len(fields) != width]
    if not wrong:
        return
    hint = f"Quote a field that holds the delimiter {_shown(delimiter)}, or name another one with --delimiter"
    fitting = [other for other in CANDIDATES if first is not None and len(_cut(first, other)) == width]
    if fitting and fitting[0] != delimiter and len(wrong) == len(records):
        hint = f"Line {records[0][0]} fits with --delimiter {_shown(fitting[0])}"
    source = "the header" if first is None else "--column_names"
    raise UserError(
        f"{name}: {width} fields expected, as {source} says, but {few(wrong)} "
        f"({len(wrong)} of {len(records)} rows). {hint}; --quoting none where a quote is only a character."
    )


def _check_swallowed(name: str, records: Sequence[tuple[int, list[str]]], delimiter: str) -> None:
    """Refuse quotes that swallowed rows, and count texts that hold line breaks. The rule: see the module."""
    width = len(records[0][1])
    broken = [i for i, (_, fields) in enumerate(records) if any("\n" in field for field in fields)]
    if not broken:
        return
    seen: list[set[str]] = [set() for _ in range(width)]
    for _, fields in records:
        for values, field in zip(seen, fields):
            if "\n" not in field:
                values.add(field)
    numeric = [bool(values) and all(number(value) is not None for value in values) for values in seen]

    def known(column: int, value: str) -> bool:
        value = value.rstrip("\r")
        return bool(value) and (
            value in seen[column] or (numeric[column] and "." in value and number(value) is not None)
        )

    suspects = []
    for i in broken:
        line, fields = records[i]
        if any(_holds_records(fields, column, delimiter, known) for column in range(width)):
            suspects.append(f"line {line}")
    if suspects:
        raise UserError(
            f"{name}: the quote that opens on {few(suspects)} seems to swallow the rows behind it: each of "
            "the lines up to its closing quote is a whole row by itself. Close the quote; if quotes are "
            "plain characters in this file, add --quoting none; if the line breaks are meant, save it as .jsonl."
        )
    say(
        f"{name}: {len(broken)} of {len(records)} rows hold line breaks inside quotes "
        f"(the first starts on line {records[broken[0]][0]})."
    )


def _holds_records(fields: list[str], column: int, delimiter: str, known: Callable[[int, str], bool]) -> bool:
    """Whether each line of the quoted field at `column`, taken with its neighbours, is a record by itself."""
    pieces = fields[column].split("\n")
    if len(pieces) == 1:
        return False
    width, last = len(fields), len(pieces) - 1
    for i, piece in enumerate(pieces):
        parts = piece.split(delimiter)
        start = column if i == 0 else 0  # where the piece's first part would stand in its row
        end = column + 1 if i == last else width
        if start + len(parts) != end:
            return False
        # The part beside a quote is a part of the quoted text, whichever way the line is read.
        inner = [
            (start + j, part)
            for j, part in enumerate(parts)
            if not (i == 0 and j == 0) and not (i == last and j == len(parts) - 1)
        ]
        if inner and not any(known(position, part) for position, part in inner):
            return False
    return width > 1
