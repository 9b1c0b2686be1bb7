"""A split of a corpus as samples: chunks of documents, or blocks packed from them."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit.language import packing
from toolkit.language.corpus import Corpus

IGNORED = packing.IGNORED


@dataclass(frozen=True)
class Around:
    """What a masked model wants before and behind every chunk, such as [CLS] and [SEP]."""

    before: Sequence[int]
    behind: Sequence[int]

    def __len__(self) -> int:
        return len(self.before) + len(self.behind)


@dataclass(frozen=True)
class Windows:
    """One split as samples, see `toolkit.task.Samples`; what a sample holds stands at `__getitem__`."""

    corpus: Corpus
    spans: np.ndarray  # int64 [chunks, 3]: first token, end, first token that may be a target
    blocks: list[np.ndarray] | None  # chunks of each sample; None: every chunk is a sample
    around: Around | None  # of a masked model's chunks; None: a causal model
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, sample: int) -> dict[str, Any]:
        """tokens int32 [L]; labels int64 [L], positions int64 [L] from 0 in every chunk; chunks, their numbers.

        The label of a position is, for a causal model, the token that follows it in its chunk; for a masked model the
        token itself; IGNORED where that is no target.
        """
        chunks = np.array([sample]) if self.blocks is None else self.blocks[sample]
        parts = [self._causal(*self.spans[i]) if self.around is None else self._masked(*self.spans[i]) for i in chunks]
        return {**{name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, "chunks": chunks}

    def _causal(self, start: int, end: int, first: int) -> dict[str, np.ndarray]:
        part = packing.sample(self.corpus.tokens, self.corpus.target, [[start, end]])
        part["labels"][: first - start - 1] = IGNORED
        return part

    def _masked(self, start: int, end: int, first: int) -> dict[str, np.ndarray]:
        before, behind = self.around.before, self.around.behind
        tokens = np.concatenate([before, self.corpus.tokens[start:end], behind]).astype(np.int32)
        labels = np.full(len(tokens), IGNORED, np.int64)
        inside = slice(len(before), len(tokens) - len(behind))
        labels[inside] = np.where(self.corpus.target[start:end], tokens[inside], IGNORED)
        return {"tokens": tokens, "labels": labels, "positions": np.arange(len(tokens))}

    def documents(self) -> np.ndarray:
        """The document that each chunk is of, int64 [chunks]."""
        return np.searchsorted(self.corpus.starts, self.spans[:, 0], side="right") - 1

    def fingerprint(self) -> str:
        """Of tokens, targets and how they are cut."""
        digest = hashlib.blake2b(self.corpus.fingerprint().encode(), digest_size=16)
        for array in (self.spans, *(self.blocks or ()), np.array(len(self.around or ()))):
            digest.update(np.ascontiguousarray(array).tobytes() + b"\0")
        return digest.hexdigest()


def cut(corpus: Corpus, block_size: int, how: str, around: Around | None = None, stride: int | None = None) -> Windows:
    """Samples of at most `block_size` tokens, those without any target left out.

    Args:
        how: best_fit: blocks of several chunks; none: one chunk each; concatenate: as if all documents were one.
        around: for a masked model.
        stride: score a document in windows that begin every so many tokens. Each token is a target once, in the
            first window that holds it: those of all windows but the first have a context of at least
            block_size - stride tokens.
    """
    size = block_size - len(around or ())
    overlap = 0 if around is not None else 1 if stride is None else size - stride
    starts = corpus.starts if how != "concatenate" else corpus.starts[[0, -1]]
    pieces = packing.chunks(starts, size, overlap)
    # The first chunk of a document has no context, and for a causal model no target at its first token.
    opening = np.isin(pieces[:, 0], starts)
    context = np.where(opening, min(overlap, 1), overlap)
    kept = _taught(pieces, corpus.target, context)
    spans = np.column_stack([pieces, pieces[:, 0] + context])[kept]
    lengths = spans[:, 1] - spans[:, 0] + len(around or ())
    blocks = None
    if how == "best_fit":
        blocks = packing.best_fit(lengths, block_size)
        lengths = np.array([lengths[block].sum() for block in blocks])
    return Windows(corpus, spans, blocks, around, lengths)


def _taught(pieces: np.ndarray, target: np.ndarray, context: np.ndarray) -> np.ndarray:
    """Which chunks have a target behind their context."""
    if not len(pieces):
        return np.zeros(0, bool)
    bounds = np.stack([pieces[:, 0] + context, pieces[:, 1]], axis=1).ravel()
    # The end of the corpus is what reduceat goes to in any case, and does not accept.
    return np.logical_or.reduceat(target, bounds[:-1] if bounds[-1] == len(target) else bounds)[::2]
