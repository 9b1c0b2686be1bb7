"""Tokenising documents for language models: nothing is cut off, whatever the length."""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from toolkit.errors import UserError
from toolkit.language.forms import Document

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CAUSAL, MASKED = "causal", "masked"
BATCH = 1 << 20  # characters that are tokenised at once
# A tokenizer needs some 100 bytes for each byte of a text while it works. Longer texts are tokenised in
# windows, each of which reaches over the next one's beginning.
WINDOW, REACH = 1 << 18, 1 << 13
AGREED = 16  # tokens on either side of a seam that both windows must have alike


@dataclass(frozen=True)
class Encoded:
    """One document in tokens, or one of several parts of a long one."""

    tokens: np.ndarray  # int32 [L]
    target: np.ndarray  # bool [L]
    bytes: int  # of the text that the targets stand for, in UTF-8
    characters: int
    last: bool = True  # whether the document ends here


class Pieces(NamedTuple):
    """Tokens and the characters that they stand for."""

    ids: np.ndarray  # int32 [n]
    starts: np.ndarray  # int64 [n]; of the first token only, or of none, where no one asked
    ends: np.ndarray


class Encoder:
    """Documents to tokens, for one objective.

    Causal: special tokens as the tokenizer adds them, and the end-of-text token behind every document that
    does not end with it. A chat template writes its own special tokens: the end-of-text token is added only
    to a conversation that holds none. Never a target are the first token and what the tokenizer puts before
    a text. Masked: the text's own tokens only, all of them targets; `prefix` and `suffix` belong around
    every chunk.

    Raises:
        UserError: the tokenizer has no end-of-text token (causal), or cannot tell which characters a token
            stands for where a part of a document is to be learnt.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", objective: str, workers: int | None = None) -> None:
        if workers:
            os.environ["RAYON_NUM_THREADS"] = str(workers)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        self.tokenizer = tokenizer
        self.causal = objective == CAUSAL
        self.prefix, self.suffix = special_tokens(tokenizer)
        self.special = np.array(tokenizer.all_special_ids)
        self.eos: int | None = tokenizer.eos_token_id
        if self.causal and self.eos is None and not self.suffix:
            raise UserError(
                f"the tokenizer {tokenizer.name_or_path} has no end-of-text token, so that a model could not learn "
                "where a text ends: set `eos_token` in its tokenizer_config.json to one of its tokens."
            )

    def __call__(self, documents: Iterable[Document]) -> Iterator[Encoded]:
        """The documents in tokens, in order."""
        parts: list[Encoded] = []
        for part in self.parts(documents):
            parts.append(part)
            if part.last:
                yield parts[0] if len(parts) == 1 else _joined(parts)
                parts = []

    def parts(self, documents: Iterable[Document]) -> Iterator[Encoded]:
        """The same, a long document in several parts, so that it never stands in memory as tokens."""
        for batch in _batches(documents):
            located = [document.spans is not None for document in batch]
            if any(located) and not self.tokenizer.is_fast:
                raise UserError(
                    f"the tokenizer {self.tokenizer.name_or_path} does not tell which characters a token stands for, "
                    "so that answers cannot be told from prompts: take a fast tokenizer."
                )
            short = [at for at, document in enumerate(batch) if not self._long(document)]
            whole = iter(self._tokenise([batch[at].text for at in short], [located[at] for at in short]))
            for document in batch:
                if self._long(document):
                    for pieces, begin, end in _in_windows(self._tokenise, document.text):
                        yield self._finish(document, pieces, begin, end)
                else:
                    yield self._finish(document, next(whole), 0, len(document.text))

    def _long(self, document: Document) -> bool:
        return len(document.text) > WINDOW + REACH and self.tokenizer.is_fast and not document.rendered

    def _tokenise(self, texts: list[str], located: list[bool]) -> list[Pieces]:
        if not texts:
            return []
        encoded = self.tokenizer(
            texts,
            add_special_tokens=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,  # nothing is too long: documents are cut into chunks
        )
        found = []
        for at, ids in enumerate(encoded["input_ids"]):
            spans = np.zeros((0, 2), np.int64)
            if located[at]:
                spans = np.array(encoded.encodings[at].offsets, np.int64).reshape(-1, 2)
            elif encoded.is_fast and ids:  # the first token's characters are needed
                spans = np.array([encoded.encodings[at].token_to_chars(0) or (0, 0)])
            found.append(Pieces(np.array(ids, np.int32), spans[:, 0], spans[:, 1]))
        return found

    def _finish(self, document: Document, pieces: Pieces, begin: int, end: int) -> Encoded:
        """The part of a document that stands for its characters from `begin` to `end`."""
        opens, closes = begin == 0, end == len(document.text)
        around = self.causal and not document.rendered
        before = self.prefix if around and opens else []
        after = self.suffix if around and closes else []
        if self.causal and closes and self._lacks_end(document, pieces, after):
            after = [*after, self.eos]
        own = slice(len(before), len(before) + len(pieces.ids))
        tokens = np.concatenate([np.array(before, np.int32), pieces.ids, np.array(after, np.int32)])
        target = np.ones(len(tokens), bool)
        if document.spans is not None:
            target[own] = _overlaps(pieces, document.spans)
            target[own.stop :] = bool(document.spans) and document.spans[-1][1] >= len(document.text.rstrip())
        target[: own.start] = False
        if self.causal and opens:
            target[:1] = False
        if document.spans is not None:
            text = self._learnt(document.text, pieces, target[own])
        elif len(pieces.ends) and not target[own][0]:
            text = document.text[pieces.ends[0] : end]
        else:
            text = document.text[begin:end]
        return Encoded(tokens, target, _size(text), len(text), closes)

    def _lacks_end(self, document: Document, pieces: Pieces, after: list[int]) -> bool:
        if self.eos is None or self.eos in after[-1:]:
            return False
        own = pieces.ids if document.rendered else pieces.ids[-1:]
        return bool(after) or not (own == self.eos).any()

    def _learnt(self, text: str, pieces: Pieces, target: np.ndarray) -> str:
        """The text that the targets stand for; what special tokens stand for is no text."""
        known = target & ~np.isin(pieces.ids, self.special)
        if not known.any():
            return ""
        first = pieces.starts[known].min()
        chosen = np.zeros(pieces.ends[known].max() - first + 1, np.int64)  # +1 where a token begins, -1 where it ends
        np.add.at(chosen, pieces.starts[known] - first, 1)
        np.add.at(chosen, pieces.ends[known] - first, -1)
        return "".join(text[first + i] for i in np.flatnonzero(np.cumsum(chosen)[:-1]))


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> tuple[list[int], list[int]]:
    """The token ids that the tokenizer puts before and behind every text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    full = tokenizer("a")["input_ids"]
    for at in range(len(full) - len(plain) + 1):
        if full[at : at + len(plain)] == plain:
            return full[:at], full[at + len(plain) :]
    return [], []


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """Documents of at most BATCH characters together; a longer one by itself."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        if batch and size + len(document.text) > BATCH:
            yield batch
            batch, size = [], 0
        batch.append(document)
        size += len(document.text)
    if batch:
        yield batch


def _joined(parts: Sequence[Encoded]) -> Encoded:
    return Encoded(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.target for part in parts]),
        sum(part.bytes for part in parts),
        sum(part.characters for part in parts),
    )


def _in_windows(
    tokenise: Callable[[list[str], list[bool]], list[Pieces]], text: str
) -> Iterator[tuple[Pieces, int, int]]:
    """The tokens of a text longer than REACH, with the characters (begin, end) that each lot stands for.

    Windows are cut where both have the same tokens: at one that begins at the same character in both, with
    AGREED equal tokens on either side. How a window begins and ends has no influence there. Where no such
    place is found (a word of megabytes) the rest is tokenised in one go.
    """
    starts = range(0, len(text) - REACH, WINDOW)
    last, begin = None, 0
    for at in range(0, len(starts), 4):
        windows = [text[start : start + WINDOW + REACH] for start in starts[at : at + 4]]
        for start, pieces in zip(starts[at : at + 4], tokenise(windows, [True] * len(windows))):
            current = _moved(pieces, start)
            if last is not None:
                seam = _seam(last, current, start)
                if seam is None:
                    (rest,) = tokenise([text[start - WINDOW :]], [True])
                    rest = _moved(rest, start - WINDOW)
                    yield _cut(rest, slice(np.searchsorted(rest.starts, begin), None)), begin, len(text)
                    return
                end = int(current.starts[seam[1]])
                yield _cut(last, slice(0, seam[0])), begin, end
                current, begin = _cut(current, slice(seam[1], None)), end
            last = current
    yield last, begin, len(text)


def _seam(left: Pieces, right: Pieces, start: int) -> tuple[int, int] | None:
    """Where to cut two windows that overlap from character `start` on, nearest to the middle of the overlap."""
    first = int(np.searchsorted(left.starts, start))
    last = int(np.searchsorted(right.starts, left.ends[-1] if len(left.ends) else start))
    shared, at_left, at_right = np.intersect1d(left.starts[first:], right.starts[:last], return_indices=True)
    order = np.argsort(np.abs(np.arange(len(shared)) - len(shared) // 2), kind="stable")
    for i, j in zip((at_left[order] + first).tolist(), at_right[order].tolist()):
        around_left, around_right = slice(i - AGREED, i + AGREED), slice(j - AGREED, j + AGREED)
        if min(i, j) < AGREED or max(i - len(left.ids), j - len(right.ids)) > -AGREED:
            continue
        if np.array_equal(left.ids[around_left], right.ids[around_right]) and np.array_equal(
            left.starts[around_left], right.starts[around_right]
        ):
            return i, j
    return None


def _cut(pieces: Pieces, part: slice) -> Pieces:
    return Pieces(*(array[part] for array in pieces))


def _moved(pieces: Pieces, characters: int) -> Pieces:
    return Pieces(pieces.ids, pieces.starts + characters, pieces.ends + characters)


def _overlaps(pieces: Pieces, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Whether each token stands for any character of a span, or for none but stands in it: bool [n]."""
    chosen = np.zeros(len(pieces.ids), bool)
    ends = np.maximum(pieces.ends, pieces.starts + 1)
    for start, end in spans:
        chosen |= (pieces.starts < end) & (ends > start)
    return chosen


def _size(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
