"""Training data larger than memory: records read again and again, shuffled within a buffer.

The order of records is a function of (files, seed, epoch, buffer size). How many processes train has no
part in it: every rank reads all records and takes the same global batches from them.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from toolkit.data.sources import paths
from toolkit.data.tables import Table
from toolkit.errors import UserError, raise_all
from toolkit.language.documents import BYTE_ORDER_MARK, TEXT_SUFFIX, open_files
from toolkit.language.forms import Document, Form, Text, find_form

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LARGEST = 64 << 20  # bytes of one record: a buffer of many such would be no stream any more
LOOKED_AT = 100  # rows of a JSONL file from which its columns are known
SEPARATORS = ("blank_line", "line")
SUFFIXES = (TEXT_SUFFIX, ".jsonl")


@dataclass(frozen=True)
class Place:
    """Where in the files the next record is looked for."""

    file: int = 0
    offset: int = 0  # bytes
    line: int = 1
    record: int = 0  # number of the next record within the epoch


@dataclass(frozen=True)
class Position:
    """Where a stream is: at the beginning of which buffer, and how many of its samples have been handed out."""

    epoch: int = 0
    buffer: int = 0  # number within the epoch
    place: Place = Place()
    taken: int = 0


class Record(NamedTuple):
    """One document of a file, read and checked, but not tokenised."""

    id: int  # number within the epoch, from 0, in the order of the files; empty records have none
    row: dict[str, Any]
    form: Form
    size: int  # bytes in the file: batches can be cut by it before anything is tokenised
    place: str  # file:line

    def document(self) -> Document:
        try:
            return self.form.document(self.row)
        except ValueError as error:
            raise UserError(f"{self.place}: {error}") from None


class Stream:
    """Samples of text files (by line or blank line) and JSONL files, epoch after epoch, without end.

    A buffer holds the next `--stream_buffer_size` records. Its samples come in an order drawn from (seed,
    epoch, number of the buffer); then the next buffer is read. Memory is that of one buffer.

    Args:
        make: the samples of a buffer's records; without it, these themselves. See `toolkit.language.samples`.
        start: what `position` gave, to go on from there.

    Raises:
        UserError: files that cannot be streamed; later, records that cannot be read, when they are met.
    """

    def __init__(
        self,
        args: Any,
        tokenizer: "PreTrainedTokenizerBase",
        make: Callable[[list[Record]], list[Any]] | None = None,
        start: dict[str, Any] | None = None,
    ) -> None:
        raise_all(problems(args))
        self.files = [file.name for file in open_files(paths(args.train_file))]
        self.blank_line = args.document_separator == "blank_line"
        self.seed, self.buffer_size = args.seed, args.stream_buffer_size
        self.empty = 0  # records met that hold nothing
        self._before = np.cumsum([0, *map(os.path.getsize, self.files)])  # bytes of all files before each
        self._forms = [self._form(file, args, tokenizer) for file in self.files]
        self._make = make or list
        self._position = Position() if start is None else Position(**{**start, "place": Place(**start["place"])})
        self._next = self._position
        self._samples: list[Any] | None = None  # of the buffer that begins at the position; None: not read yet
        self._fruitful = start is not None

    def batches(self, size: int) -> Iterator[list[Any]]:
        """Global batches of `size` samples, without end; the last of an epoch may be smaller."""
        batch: list[Any] = []
        while True:
            if self._samples is None:
                self._fill()
            taken = self._position.taken
            part = self._samples[taken : taken + size - len(batch)]
            batch += part
            self._position = replace(self._position, taken=taken + len(part))
            ends_epoch = self._position.taken == len(self._samples) and self._go_on()
            if batch and (ends_epoch or len(batch) == size):
                yield batch
                batch = []

    def position(self) -> dict[str, Any]:
        """Where the next batch begins, for JSON. A batch counts as handed out when it has been fetched."""
        return asdict(self._position)

    @property
    def epoch(self) -> int:
        """Of the next batch, from 0."""
        return self._position.epoch

    @property
    def passed(self) -> float:
        """Epochs behind the next batch, by the bytes that have been read."""
        at = self._position
        begin = self._bytes(at.place)
        if not at.taken:
            return at.epoch + begin / self._before[-1]
        end = self._bytes(self._next.place) if self._next.epoch == at.epoch else self._before[-1]
        return at.epoch + (begin + (end - begin) * at.taken / len(self._samples)) / self._before[-1]

    def _bytes(self, place: Place) -> int:
        return int(self._before[place.file]) + place.offset

    def fingerprint(self) -> str:
        """Of the files' sizes, beginnings and ends: enough to tell data sets apart, without reading all."""
        digest = hashlib.blake2b(digest_size=16)
        for name in self.files:
            with open(name, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                for at in (0, max(0, size - (1 << 20))):
                    file.seek(at)
                    digest.update(size.to_bytes(8, "little") + file.read(1 << 20))
        return digest.hexdigest()

    def _go_on(self) -> bool:
        """Go to the next buffer that has samples, or else to the next epoch; whether it is that."""
        while True:
            ends_epoch = self._next.epoch > self._position.epoch
            self._position, self._samples = self._next, None
            if ends_epoch:
                return True
            self._fill()
            if self._samples:
                return False

    def _fill(self) -> None:
        """Read the buffer at the position, and note where the next one begins."""
        at = self._position
        found = list(islice(self._records(at.place), self.buffer_size + 1))  # one more, to see whether there is any
        samples = self._make([record for record, _ in found[: self.buffer_size]])
        self._fruitful |= bool(samples)
        if len(found) <= self.buffer_size:
            if not self._fruitful:
                raise UserError(f"there is nothing to train on in {', '.join(self.files)}.")
            self._next = Position(at.epoch + 1)
        else:
            self._next = Position(at.epoch, at.buffer + 1, found[self.buffer_size - 1][1])
        # RandomState's streams are frozen for good, so that an order means the same under every numpy.
        draw = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([self.seed, at.epoch, at.buffer])))
        self._samples = [samples[i] for i in draw.permutation(len(samples)).tolist()]

    def _records(self, place: Place) -> Iterator[tuple[Record, Place]]:
        """The records from `place` to the end of the last file, each with the place behind it."""
        number = place.record
        for file in range(place.file, len(self.files)):
            offset, line = (place.offset, place.line) if file == place.file else (0, 1)
            for content, size, lines in _read(self.files[file], offset, line, self._by_blank_line(file)):
                where = f"{self.files[file]}:{line}"
                row = self._row(content.removeprefix(BYTE_ORDER_MARK) if offset == 0 else content, file, where)
                offset, line = offset + size, line + lines
                if row is not None:
                    yield Record(number, row, self._forms[file], size, where), Place(file, offset, line, number + 1)
                    number += 1

    def _row(self, content: bytes, file: int, where: str) -> dict[str, Any] | None:
        """A record's values; None for an empty one."""
        if not content.strip():
            self.empty += _is_text(self.files[file]) and not self.blank_line  # elsewhere blank lines only part records
            return None
        form = self._forms[file]
        row = _text_row(content, where) if _is_text(self.files[file]) else _json_row(content, where)
        if fault := form.fault(row):
            raise UserError(f"{where}: {fault}")
        if form.empty(row):
            self.empty += 1
            return None
        return row

    def _form(self, file: str, args: Any, tokenizer: "PreTrainedTokenizerBase") -> Form:
        if _is_text(file):
            return Text("text")
        found = enumerate(islice(_read(file, 0, 1, False), LOOKED_AT), 1)
        rows = [
            _json_row(content.removeprefix(BYTE_ORDER_MARK), f"{file}:{line}")
            for line, (content, _, _) in found
            if content.strip()
        ]
        names = dict.fromkeys(name for row in rows for name in row)
        return find_form(Table(file, {name: [row.get(name) for row in rows] for name in names}), args, tokenizer)

    def _by_blank_line(self, file: int) -> bool:
        return self.blank_line and _is_text(self.files[file])


def problems(args: Any) -> list[str]:
    """What stands against `--streaming` among the flags."""
    found = []
    files = paths(args.train_file)
    if not files:
        found.append("--streaming reads text and JSONL files: give them with --train_file.")
    if args.max_steps is None:
        found.append("--streaming needs --max_steps: how many steps an epoch has is not known before it has been read.")
    unlike = [file for file in files if Path(file).suffix.lower() not in SUFFIXES]
    if unlike:
        found.append(
            f"--streaming reads {' and '.join(SUFFIXES)} files, not {', '.join(unlike)}: convert or leave out."
        )
    if any(map(_is_text, files)) and args.document_separator not in SEPARATORS:
        found.append(
            f"--streaming reads text files by {' or '.join(SEPARATORS)}, not by --document_separator "
            f"{args.document_separator}."
        )
    for name in ("validation_split_percentage", "train_file_weights", "max_train_samples"):
        if getattr(args, name) is not None:
            found.append(f"--{name} needs all training data at once: not with --streaming.")
    if args.stream_buffer_size < 1:
        found.append(f"--stream_buffer_size {args.stream_buffer_size}: expected at least 1.")
    return found


def _read(file: str, offset: int, line: int, by_blank_line: bool) -> Iterator[tuple[bytes, int, int]]:
    """The records from `offset` on: content without what ends it, bytes and lines with that."""
    with open(file, "rb") as content:
        content.seek(offset)
        parts: list[bytes] = []
        size = 0
        while part := content.readline(LARGEST + 1):
            parts.append(part)
            size += len(part)
            if size > LARGEST:
                raise UserError(
                    f"{file}:{line}: a record of more than {LARGEST >> 20} MB. Divide it, or train without --streaming."
                )
            blank = not part.strip()
            if by_blank_line and not blank:
                continue
            yield b"".join(parts[:-1] if by_blank_line else parts).rstrip(b"\r\n"), size, len(parts)
            line += len(parts)
            parts, size = [], 0
        if parts:
            yield b"".join(parts).rstrip(b"\r\n"), size, len(parts)


def _is_text(file: str) -> bool:
    return Path(file).suffix.lower() == TEXT_SUFFIX


def _text_row(content: bytes, where: str) -> dict[str, Any]:
    try:
        return {"text": content.decode("utf-8").replace("\r\n", "\n")}
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 (byte 0x{content[error.start]:02x}). Convert the file first.") from None


def _json_row(content: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(content)
    except ValueError as error:
        raise UserError(f"{where}: not valid JSON: {error}.") from None
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected an object, {{…}}, found a {type(row).__name__}.")
    return row
