"""Chunks and blocks: nothing lost, nothing too long, and hardly any room left over."""

import itertools
import time

import numpy as np
import pytest

from toolkit.language.packing import IGNORED, best_fit, chunks, concatenate, sample, with_targets


def starts_of(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def random_lengths(seed, count=300, longest=200):
    return np.random.RandomState(seed).randint(1, longest, count)


def test_chunks_by_hand():
    # Documents of 3, 10, 1 and 2 tokens, blocks of 4.
    assert chunks(starts_of([3, 10, 1, 2]), 4).tolist() == [[0, 3], [3, 7], [6, 10], [9, 13], [14, 16]]
    assert chunks(starts_of([3, 10, 1, 2]), 4, overlap=0).tolist() == [
        *([0, 3], [3, 7], [7, 11], [11, 13]),
        *([13, 14], [14, 16]),
    ]


def test_a_document_of_one_block_is_one_chunk():
    assert chunks(starts_of([4, 5]), 4).tolist() == [[0, 4], [4, 8], [7, 9]]
    assert chunks(starts_of([]), 4).shape == (0, 2)


def test_a_larger_overlap_is_more_context():
    # Documents of 3, 10 and 1 tokens: windows of 6 that begin every 2 tokens.
    assert chunks(starts_of([3, 10, 1]), 6, overlap=4).tolist() == [[0, 3], [3, 9], [5, 11], [7, 13]]


def test_i01_a_corpus_shorter_than_a_block_is_one_short_chunk():
    pieces = chunks(starts_of([20]), 64)
    assert pieces.tolist() == [[0, 20]]
    assert [block.tolist() for block in best_fit([20], 64)] == [[0]]


@pytest.mark.parametrize("block", [2, 3, 7, 64, 500])
@pytest.mark.parametrize("seed", range(3))
def test_every_document_comes_back_from_its_chunks(block, seed):
    lengths = random_lengths(seed)
    starts = starts_of(lengths)
    tokens = np.random.RandomState(seed).randint(0, 50, starts[-1])
    pieces = chunks(starts, block)
    assert np.diff(pieces).min() >= 2 and np.diff(pieces).max() <= block
    documents, at = [], 0
    for first, last in itertools.pairwise(starts):
        if last - first < 2:
            documents.append(tokens[first:last].tolist())  # one token predicts nothing and has no chunk
            continue
        document = tokens[pieces[at][0] : pieces[at][1]].tolist()
        assert pieces[at][0] == first
        while pieces[at][1] < last:
            at += 1
            assert tokens[pieces[at][0]] == document[-1]  # context, from the chunk before
            document += tokens[pieces[at][0] + 1 : pieces[at][1]].tolist()
        at += 1
        documents.append(document)
    assert at == len(pieces)
    assert documents == [tokens[a:b].tolist() for a, b in itertools.pairwise(starts)]


@pytest.mark.parametrize("block", [2, 5, 64])
def test_targets_of_an_epoch_are_tokens_minus_documents(block):
    lengths = random_lengths(1)
    starts = starts_of(lengths)
    tokens, target = np.arange(starts[-1]), np.ones(starts[-1], bool)
    target[starts[:-1]] = False
    pieces = chunks(starts, block)
    rows = [sample(tokens, target, pieces[b]) for b in best_fit(np.diff(pieces)[:, 0], block)]
    labels = np.concatenate([row["labels"] for row in rows])
    assert sorted(labels[labels != IGNORED].tolist()) == np.flatnonzero(target).tolist()  # each once
    assert (labels != IGNORED).sum() == (lengths - 1).sum()


def test_masked_chunks_hold_every_token_once():
    starts = starts_of(random_lengths(2))
    pieces = chunks(starts, 13, overlap=0)
    assert np.concatenate([np.arange(a, b) for a, b in pieces]).tolist() == list(range(starts[-1]))
    assert np.isin(starts[:-1], pieces[:, 0]).all()  # no chunk reaches into the next document


def test_concatenate_cuts_at_every_block():
    assert concatenate(starts_of([3, 10, 1, 2]), 4).tolist() == [[0, 4], [3, 7], [6, 10], [9, 13], [12, 16]]


def test_chunks_without_a_target_teach_nothing():
    target = np.zeros(16, bool)
    target[[2, 8, 15]] = True
    pieces = chunks(starts_of([3, 10, 1, 2]), 4)  # label regions 1-2, 4-6, 7-9, 10-12, 15
    assert with_targets(pieces, target).tolist() == [[0, 3], [6, 10], [14, 16]]
    assert with_targets(pieces[1:4], target).tolist() == [[6, 10]]
    assert with_targets(pieces[:0], target).shape == (0, 2)
    whole = chunks(starts_of([3, 10, 1, 2]), 4, overlap=0)
    assert with_targets(whole, target, overlap=0).tolist() == [[0, 3], [7, 11], [14, 16]]


def test_i09_an_answer_behind_a_long_prompt_is_still_learnt():
    # A prompt of 60, an answer of 5, blocks of 32: the first chunk is all prompt, the others learn the answer.
    target = np.arange(65) >= 60
    pieces = with_targets(chunks(starts_of([65]), 32), target)
    labels = np.concatenate([sample(np.arange(65), target, [piece])["labels"] for piece in pieces])
    assert pieces.tolist() == [[31, 63], [62, 65]]
    assert labels[labels != IGNORED].tolist() == [60, 61, 62, 63, 64]


def test_a_sample_by_hand():
    tokens = np.array([1, 7, 8, 2, 1, 9, 2], np.int32)
    target = np.array([0, 1, 1, 1, 0, 0, 1], bool)
    row = sample(tokens, target, [[0, 4], [4, 7]])
    assert row["tokens"].tolist() == tokens.tolist() and row["tokens"].dtype == np.int32
    assert row["labels"].tolist() == [7, 8, 2, IGNORED, IGNORED, 2, IGNORED]
    assert row["positions"].tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert row["labels"].dtype == row["positions"].dtype == np.int64


# --- best fit ------------------------------------------------------------------------------------------------


def test_best_fit_by_hand():
    # 6 leaves 4, 5 does not fit and leaves 5; 4 fits best behind 6, a 3 behind 5; the other 3 finds no room.
    assert [block.tolist() for block in best_fit([3, 5, 6, 4, 3], 10)] == [[2, 3], [0, 1], [4]]


def first_fit(lengths, size):
    """Rooms left by the textbook's first-fit decreasing."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        for i, room in enumerate(rooms):
            if room >= length:
                rooms[i] -= length
                break
        else:
            rooms.append(size - length)
    return rooms


def textbook_best_fit(lengths, size):
    """How many blocks: the least sufficient room, found by looking at all."""
    rooms = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting, key=rooms.__getitem__)] -= length
        else:
            rooms.append(size - length)
    return sorted(rooms)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("size", [16, 100, 512])
def test_blocks_hold_each_chunk_once_and_are_never_too_long(seed, size):
    draw = np.random.RandomState(seed)
    lengths = np.minimum(draw.lognormal(3, 1.2, 700).astype(int) + 2, size)
    blocks = best_fit(lengths, size)
    assert sorted(np.concatenate(blocks).tolist()) == list(range(700))
    rooms = [size - int(lengths[block].sum()) for block in blocks]
    assert min(rooms) >= 0
    assert sorted(rooms) == textbook_best_fit(lengths.tolist(), size)
    assert len(blocks) <= len(first_fit(lengths.tolist(), size))  # a fill rate at least as high
    again = best_fit(lengths.tolist(), size)
    assert all(np.array_equal(a, b) for a, b in zip(blocks, again))


def test_a_million_chunks_take_seconds():
    draw = np.random.RandomState(0)
    lengths = np.minimum(draw.lognormal(4.5, 1.2, 1_000_000).astype(int) + 2, 1024)
    start = time.process_time()
    blocks = best_fit(lengths, 1024)
    assert time.process_time() - start < 20
    assert lengths.sum() / (len(blocks) * 1024) > 0.999
