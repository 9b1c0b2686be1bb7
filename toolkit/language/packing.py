"""From documents to samples: chunks of at most a block, and blocks packed from chunks.

A chunk is a piece (start, end) of a corpus' tokens, of one document. Plain numpy, a function of its
arguments alone.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

IGNORED = -100  # the label of a position that has nothing to predict; PyTorch's own default


def chunks(starts: np.ndarray, block_size: int, overlap: int = 1) -> np.ndarray:
    """Cut documents into chunks of at most `block_size` tokens; only the last of a document may be shorter.

    With an overlap of 1 (causal models) a chunk that continues a document begins with the last token of
    the one before: it is context there, and no target, since a chunk's first token never is one. Nothing
    is lost: every token but a document's first is a target once. A document of one token has no chunk.
    With an overlap of 0 (masked models) every token stands in one chunk. A larger overlap is more context.

    Args:
        starts: int64 [documents + 1], where each document begins.
        block_size: more than `overlap`.
        overlap: tokens that a chunk shares with the one before it in its document.

    Returns:
        int64 [n, 2], in the order of the corpus.
    """
    starts = np.asarray(starts, np.int64)
    lengths, stride = np.diff(starts), block_size - overlap
    counts = np.where(lengths > min(overlap, 1), np.maximum(-(-(lengths - overlap) // stride), 1), 0)
    first = np.cumsum(counts) - counts
    begin = np.repeat(starts[:-1], counts) + (np.arange(counts.sum()) - np.repeat(first, counts)) * stride
    return np.stack([begin, np.minimum(begin + block_size, np.repeat(starts[1:], counts))], axis=1)


def concatenate(starts: np.ndarray, block_size: int) -> np.ndarray:
    """The old way, for comparison: all documents as one, cut at every block. They see each other.

    Returns:
        int64 [n, 2]: pieces of the corpus, as `chunks` gives.
    """
    return chunks(np.asarray(starts)[[0, -1]], block_size)


def with_targets(pieces: np.ndarray, target: np.ndarray, overlap: int | np.ndarray = 1) -> np.ndarray:
    """The chunks that have something to predict. Those of a long prompt have not, and would teach nothing.

    Args:
        pieces: from `chunks`, or some of them in the same order.
        target: bool [tokens].
        overlap: tokens at the beginning of each chunk that are no targets there: one number, or [n].
    """
    if not len(pieces):
        return pieces
    bounds = np.stack([pieces[:, 0] + overlap, pieces[:, 1]], axis=1).ravel()
    # The last bound is the end of the corpus, which reduceat takes for granted and does not accept.
    taught = np.logical_or.reduceat(target, bounds[:-1] if bounds[-1] == len(target) else bounds)[::2]
    return pieces[taught]


def best_fit(lengths: np.ndarray | Sequence[int], block_size: int) -> list[np.ndarray]:
    """Pack chunks into blocks of at most `block_size` tokens by best-fit decreasing.

    Longest first, each chunk goes to the block with the least room that still holds it (of several the one
    opened or filled last), so that the result depends on the lengths and their order alone. The number of
    blocks is at most 11/9 of the least possible, plus 4 (Johnson et al. 1974, SIAM J. Comput. 3).

    Args:
        lengths: [n], each from 1 to `block_size`.

    Returns:
        For each block the indices of its chunks, in ascending order.
    """
    lengths = np.asarray(lengths)
    blocks: list[list[int]] = []
    open_blocks: list[list[int]] = [[] for _ in range(block_size + 1)]  # by the room that is left in them
    rooms = 0  # bit r is set where open_blocks[r] holds any: finding the least sufficient room is one shift
    descending = np.argsort(-lengths, kind="stable")
    for chunk, length in zip(descending.tolist(), lengths[descending].tolist()):
        sufficient = rooms >> length
        if sufficient:
            room = length + (sufficient & -sufficient).bit_length() - 1
            block = open_blocks[room].pop()
            if not open_blocks[room]:
                rooms ^= 1 << room
            blocks[block].append(chunk)
        else:
            room, block = block_size, len(blocks)
            blocks.append([chunk])
        if room > length:
            open_blocks[room - length].append(block)
            rooms |= 1 << (room - length)
    return [np.array(sorted(block)) for block in blocks]


def sample(tokens: np.ndarray, target: np.ndarray, pieces: np.ndarray) -> dict[str, Any]:
    """One row of a causal model: a block's chunks side by side, each with positions of its own.

    Args:
        tokens, target: [N], of the corpus.
        pieces: int [k, 2], from `chunks`.

    Returns:
        tokens: int32 [L]; labels: int64 [L], at each position the token that follows it in its chunk,
        IGNORED where none does or it is no target; positions: int64 [L], from 0 in every chunk.
    """
    parts, labels, positions = [], [], []
    for start, end in np.asarray(pieces).tolist():
        part = tokens[start:end]
        following = np.full(end - start, IGNORED, np.int64)
        following[:-1] = np.where(target[start + 1 : end], part[1:], IGNORED)
        parts.append(part)
        labels.append(following)
        positions.append(np.arange(end - start))
    return {
        "tokens": np.concatenate(parts),
        "labels": np.concatenate(labels),
        "positions": np.concatenate(positions),
    }
