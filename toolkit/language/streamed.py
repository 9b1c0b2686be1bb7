"""A stream of records as samples: what `samples` makes of a corpus, of one buffer after another."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from toolkit.errors import UserError
from toolkit.language.corpus import Corpus
from toolkit.language.samples import Around, Windows, cut
from toolkit.language.stream import Record, Stream
from toolkit.language.tokens import Encoder
from toolkit.task import Drawn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRIED = 256  # samples that model and memory are tried with
CHUNKS = 2**32  # more than a record can have


class Part(NamedTuple):
    """One sample of a buffer that has been tokenised."""

    windows: Windows
    number: int
    chunks: np.ndarray  # int64 [chunks of the buffer]: a number of each that is its own in the whole epoch
    places: list[str]  # of the buffer's records

    @property
    def size(self) -> int:
        """Tokens."""
        return int(self.windows.lengths[self.number])

    @property
    def place(self) -> str:
        """That of its first record."""
        first = self.number if self.windows.blocks is None else self.windows.blocks[self.number][0]
        return self.places[np.searchsorted(self.windows.corpus.starts, self.windows.spans[first, 0], side="right") - 1]

    def row(self) -> dict[str, Any]:
        """As `Windows` has it."""
        row = self.windows[self.number]
        return {**row, "chunks": self.chunks[row["chunks"]]}


class Untokenised(NamedTuple):
    """A record of so few bytes that it is one chunk, whatever its tokens."""

    record: Record
    encoder: Encoder
    block_size: int
    around: Around | None

    @property
    def size(self) -> int:
        """More than its tokens."""
        return self.record.size + _added(self.encoder, self.around)

    @property
    def place(self) -> str:
        return self.record.place

    def row(self) -> dict[str, Any]:
        """As `Windows` has it, whether or not it has a target."""
        corpus = _corpus([self.record], self.encoder)
        length = len(corpus.tokens) + len(self.around or ())
        if length > self.block_size:
            raise UserError(
                f"{self.place}: {length} tokens for {self.record.size} bytes, which is too many for a stream that is "
                "not packed: use --packing best_fit, or train without --streaming."
            )
        spans = np.array([[0, len(corpus.tokens), 1 if self.around is None else 0]])
        windows = Windows(corpus, spans, None, self.around, np.array([length]))
        return {**windows[0], "chunks": np.array([self.record.id * CHUNKS])}


def buffers(
    encoder: Encoder, block_size: int, how: str, around: Around | None = None
) -> Callable[[list[Record]], list[Any]]:
    """For `Stream(make=…)`: the samples of a buffer of records, as `cut` makes them of a corpus.

    Where nothing is packed, a record of few bytes is one sample and is tokenised only when that is asked for.
    """

    def tokenised(records: list[Record]) -> list[Part]:
        corpus = _corpus(records, encoder)
        windows = cut(corpus, block_size, how, around)
        documents = windows.documents()
        within = np.arange(len(documents)) - np.searchsorted(documents, documents)
        chunks = np.array([record.id for record in records], np.int64)[documents] * CHUNKS + within
        places = [record.place for record in records]
        return [Part(windows, number, chunks, places) for number in range(len(windows))]

    def make(records: list[Record]) -> list[Any]:
        if how == "best_fit":
            return tokenised(records)
        room = block_size - _added(encoder, around)
        short = [Untokenised(record, encoder, block_size, around) for record in records if record.size <= room]
        return [*short, *tokenised([record for record in records if record.size > room])]

    return make


def _added(encoder: Encoder, around: Around | None) -> int:
    """The most tokens that a sample has beside those of its text."""
    return len(around) if around is not None else len(encoder.prefix) + len(encoder.suffix) + 2


def _corpus(records: Sequence[Record], encoder: Encoder) -> Corpus:
    encoded = list(encoder(record.document() for record in records))
    tokens = [np.zeros(0, np.int32), *(document.tokens for document in encoded)]
    target = [np.zeros(0, bool), *(document.target for document in encoded)]
    starts = np.cumsum([0, *(len(document.tokens) for document in encoded)])
    return Corpus(np.concatenate(tokens), np.concatenate(target), starts, 0, 0)


@dataclass(frozen=True)
class Global:
    """A global batch of a stream, see `toolkit.task.Drawn`."""

    samples: list[Any]
    check: Callable[[np.ndarray], None]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, sample: int) -> dict[str, Any]:
        row = self.samples[sample].row()
        self.check(row["tokens"])
        return row

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.array([sample.size for sample in self.samples])

    @property
    def places(self) -> list[str]:
        return [sample.place for sample in self.samples]


class Streamed:
    """See `toolkit.task.Streamed`.

    Args:
        how, around: see `cut`.
        check: of a sample's tokens; raises a `UserError`.

    Raises:
        UserError: files that cannot be streamed, or hold nothing to train on.
    """

    def __init__(
        self,
        args: Any,
        tokenizer: "PreTrainedTokenizerBase",
        block_size: int,
        how: str,
        around: Around | None,
        check: Callable[[np.ndarray], None],
    ) -> None:
        encoder = Encoder(tokenizer, args.objective, args.preprocessing_num_workers)
        make = buffers(encoder, block_size, how, around)
        self._open = lambda position: Stream(args, tokenizer, make, position)
        self._cut = [block_size, how, len(around or ()), args.stream_buffer_size]
        self._check = check
        first = self._open(None)
        first.buffer_size = min(first.buffer_size, TRIED)
        beginning = Global(next(first.batches(TRIED)), check)
        self._rows = [beginning[i] for i in range(len(beginning))]
        longest = max(self._rows, key=lambda row: len(row["tokens"]))
        self._rows.append({name: np.resize(longest[name], block_size) for name in ("tokens", "labels")})
        self._rows[-1] |= {"positions": np.arange(block_size), "chunks": longest["chunks"][:1]}
        self.lengths = np.array([len(row["tokens"]) for row in self._rows])

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, sample: int) -> dict[str, Any]:
        return self._rows[sample]

    def fingerprint(self) -> str:
        """Of the files and how they become samples; what columns and tokenizer make of them shows in the first ones."""
        digest = hashlib.blake2b(f"{self._open(None).fingerprint()} {self._cut}".encode(), digest_size=16)
        for row in self._rows:
            digest.update(np.concatenate([row["tokens"], row["labels"]]).astype("<i8").tobytes())
        return digest.hexdigest()

    def batches(self, size: int, position: dict[str, Any] | None) -> Iterator[Drawn]:
        stream = self._open(position)
        epoch = stream.epoch
        for samples in stream.batches(size):
            ended = stream.epoch > epoch
            yield Drawn(Global(samples, self._check), epoch, ended, stream.passed, stream.position())
            epoch = stream.epoch
