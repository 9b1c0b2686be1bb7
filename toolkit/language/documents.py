"""Documents of text files, tables and data sets, before they are tokenised."""

import hashlib
import mmap
import re
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from toolkit.data.sources import DELIMITED, READERS, missing, read_table
from toolkit.data.tables import Table, read_text
from toolkit.errors import UserError, raise_all
from toolkit.language.forms import Document, Form, find_form

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
TEXT_SUFFIX = ".txt"
SEPARATORS = {"blank_line": rb"\n(?:[^\S\n]*\n)+", "line": rb"\n", "file": None}
ANYTHING = re.compile(rb"\S")
BLANK_LINES = re.compile(rb"(?:[^\S\n]*\n)+")


class Documents(Protocol):
    """The documents of one file or split, without the empty ones."""

    name: str
    empty: int  # documents left out because they hold nothing

    def __len__(self) -> int: ...
    def __getitem__(self, number: int) -> Document: ...


class TextFile:
    """Documents of a text file, which stays on the disk.

    Line breaks inside a document are kept, as one character each; the one that ends a document goes, since
    an end-of-text token stands there. Under `file` the text is one document, and keeps the last one too.

    Args:
        separator: blank_line (one line or more of nothing but white space), line, file, or a text of its own;
            a line break on either side of that belongs to it, `\\n` and `\\t` in it are a line break and a tab.

    Raises:
        UserError: the file holds nothing; with the first document that is not UTF-8, where that is.
    """

    def __init__(self, path: str, separator: str) -> None:
        self.name = path
        self.empty = 0
        with open(path, "rb") as file:
            if not file.seek(0, 2):
                raise UserError(f"{path}: the file is empty.")
            self._content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._bounds = array("q")  # start and end of every document, in bytes
        start = len(BYTE_ORDER_MARK) if self._content[:3] == BYTE_ORDER_MARK else 0
        if separator == "blank_line" and (blank := BLANK_LINES.match(self._content, start)):
            start = blank.end()
        if pattern := _pattern(separator):
            for found in pattern.finditer(self._content, start):
                self._add(start, found.start())
                start = found.end()
        if start < len(self._content):
            self._add(start, len(self._content), keep_end=pattern is None)

    def __len__(self) -> int:
        return len(self._bounds) // 2

    def __getitem__(self, number: int) -> Document:
        start, end = self._bounds[2 * number : 2 * number + 2]
        try:
            return Document(self._content[start:end].decode("utf-8").replace("\r\n", "\n"))
        except UnicodeDecodeError:
            read_text(Path(self.name))  # says where
            raise

    def _add(self, start: int, end: int, keep_end: bool = False) -> None:
        if not keep_end:
            while end > start and self._content[end - 1] in b"\r\n":
                end -= 1
        if ANYTHING.search(self._content, start, end):
            self._bounds.extend((start, end))
        else:
            self.empty += 1


class Rows:
    """Documents of a table.

    Raises:
        UserError: columns that cannot be read, and all missing or wrong values with their places.
    """

    def __init__(self, table: Table, form: Form) -> None:
        self.name = table.name
        self._table, self._form = table, form
        faults: dict[str, list[int]] = {}
        self._kept = array("q")
        for row in range(len(table)):
            values = self._row(row)
            if fault := form.fault(values):
                faults.setdefault(fault, []).append(row)
            elif not form.empty(values):
                self._kept.append(row)
        raise_all(f"{table.places(rows)}: {fault}" for fault, rows in faults.items())
        self.empty = len(table) - len(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, number: int) -> Document:
        row = self._kept[number]
        try:
            return self._form.document(self._row(row))
        except ValueError as error:
            raise UserError(f"{self._table.place(row)}: {error}") from None

    def _row(self, row: int) -> dict[str, Any]:
        return {name: self._table.columns[name][row] for name in self._form.columns}


class File:
    """A file or saved folder that has not been read yet."""

    def __init__(self, path: str) -> None:
        self.name = path
        file = Path(path)
        if not file.exists():
            raise UserError(missing(file))
        if file.is_file() and file.suffix.lower() not in (TEXT_SUFFIX, *DELIMITED, *READERS):
            raise UserError(
                f"{path}: unknown kind of file {file.suffix!r}. Known are "
                f"{', '.join((TEXT_SUFFIX, *DELIMITED, *READERS))}, and folders made by datasets' save_to_disk: "
                "convert or rename it."
            )
        self._file = file

    def digest(self) -> str:
        """Of all bytes, and of the suffix that says how to read them."""
        digest = hashlib.blake2b(self._file.suffix.lower().encode(), digest_size=16)
        files = sorted(self._file.rglob("*")) if self._file.is_dir() else [self._file]
        try:
            for path in filter(Path.is_file, files):
                with path.open("rb") as file:
                    digest.update(hashlib.file_digest(file, "blake2b").digest())
        except OSError as error:
            raise UserError(f"{self.name}: cannot be read: {error.strerror or error}.") from None
        return digest.hexdigest()

    def read(self, args: Any, tokenizer: "PreTrainedTokenizerBase") -> Documents:
        """The documents; raises a `UserError` for what is wrong with the file."""
        if self._file.suffix.lower() != TEXT_SUFFIX:
            return DataSet(read_table(self.name, args.delimiter, args.quoting, args.column_names)).read(args, tokenizer)
        try:
            return TextFile(self.name, args.document_separator)
        except OSError as error:
            raise UserError(f"{self.name}: cannot be read: {error.strerror or error}.") from None


class DataSet:
    """A table that is in memory already."""

    def __init__(self, table: Table) -> None:
        self.name, self._table = table.name, table

    def digest(self) -> str:
        """Of all values."""
        digest = hashlib.blake2b(digest_size=16)
        for name, values in self._table.columns.items():
            for value in (name, len(values), *values):
                content = repr(value).encode("utf-8", "backslashreplace")
                digest.update(len(content).to_bytes(8, "little") + content)
        return digest.hexdigest()

    def read(self, args: Any, tokenizer: "PreTrainedTokenizerBase") -> Documents:
        """The documents; raises a `UserError` for what is wrong with the table."""
        return Rows(self._table, find_form(self._table, args, tokenizer))


Source = File | DataSet


def open_files(names: Sequence[str]) -> list[File]:
    """The files that a flag names; raises one `UserError` for all that cannot be had."""
    files, problems = [], []
    for name in names:
        try:
            files.append(File(name))
        except UserError as error:
            problems += error.messages
    raise_all(problems)
    return files


def _pattern(separator: str) -> re.Pattern[bytes] | None:
    if separator in SEPARATORS:
        return re.compile(SEPARATORS[separator]) if SEPARATORS[separator] else None
    text = separator.replace("\\n", "\n").replace("\\t", "\t")
    if not text:
        raise UserError("--document_separator is empty: expected blank_line, line, file, or a text.")
    return re.compile(rb"(?:\r?\n)?" + re.escape(text.encode()) + rb"(?:\r?\n)?")
