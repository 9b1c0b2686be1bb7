"""Streams: every record once an epoch, in an order that no machine changes, and back to any place."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.language import Flags, byte_tokenizer
from tests.runs import ROOT
from toolkit.data.plan import Bound, cut
from toolkit.errors import UserError
from toolkit.language.documents import TextFile
from toolkit.language.packing import IGNORED
from toolkit.language.stream import Stream
from toolkit.language.streamed import buffers
from toolkit.language.tokens import CAUSAL, Encoder


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return str(path)

    return write


def stream(*files, start=None, make=None, tokenizer=None, **flags):
    given = {"streaming": True, "max_steps": 10, "document_separator": "line", "stream_buffer_size": 8, **flags}
    return Stream(Flags(train_file=list(files), **given), tokenizer or byte_tokenizer(), make, start)


def lines(count, first=0):
    return "".join(f"line {i}\n" for i in range(first, first + count))


def take(batches, count):
    return [[record.id for record in batch] for batch in itertools.islice(batches, count)]


def epoch_of(source, size):
    """The batches of the present epoch."""
    epoch, found = source.epoch, []
    for batch in source.batches(size):
        found.append(batch)
        if source.epoch > epoch:
            return found


def test_every_record_once_an_epoch(write):
    """Two files, buffers of 8 and batches of 3 that fit neither the files nor each other."""
    source = stream(write("a.txt", lines(20)), write("b.txt", lines(15, 20)))
    for epoch in range(3):
        batches = epoch_of(source, 3)
        assert [len(batch) for batch in batches] == [3] * 11 + [2]
        records = sorted(itertools.chain(*batches))
        assert [record.id for record in records] == list(range(35))
        assert [record.document().text for record in records] == lines(35).splitlines()
        assert source.epoch == epoch + 1
    assert records[0].place.endswith("a.txt:1") and records[34].place.endswith("b.txt:15")


def test_the_order_is_of_seed_epoch_and_buffer(write):
    path = write("a.txt", lines(40))
    first, again = take(stream(path).batches(4), 20), take(stream(path).batches(4), 20)
    assert first == again
    assert first[:10] != first[10:]  # another epoch
    assert sorted(itertools.chain(*first[:2])) == list(range(8))  # the first buffer
    assert take(stream(path, seed=1).batches(4), 10) != first[:10]
    assert take(stream(path, stream_buffer_size=16).batches(4), 10) != first[:10]
    flat = list(itertools.chain(*first))
    assert list(itertools.chain(*take(stream(path).batches(8), 10))) == flat  # cut otherwise, in the same order


@pytest.mark.parametrize("count", [39, 40])  # the last buffer is short, or just full
@pytest.mark.parametrize("size", [3, 8, 50])
def test_a_stream_goes_on_where_it_was(count, size, write):
    files = write("a.txt", lines(17)), write("b.txt", "\n" + lines(count - 17, 17))
    whole = take(stream(*files).batches(size), 30)
    for done in (0, 1, 2, 5, 9, 10, 14):
        source = stream(*files)
        take(source.batches(size), done)
        position = json.loads(json.dumps(source.position()))
        resumed = stream(*files, start=position)
        assert take(resumed.batches(size), 30 - done) == whole[done:]


def test_e07_e09_ranks_share_a_batch_and_lose_nothing(write):
    """71 records, batches of 4: each rank reads all, and takes its own part of the cut by byte lengths."""
    path = write("a.txt", "".join(f"{'x' * (i % 23)} {i}\n" for i in range(71)))
    seen = []
    for rank in range(2):
        for batch in epoch_of(stream(path), 4):
            parts = cut([record.size for record in batch], 2, Bound(rows=2))
            assert len(parts[0]) == len(parts[1])
            seen += [batch[i].id for piece in parts[rank] for i in piece]
    assert sorted(seen) == list(range(71))


def test_documents_are_those_of_the_file(write):
    text = "\ufeff\n \none\r\ntwo\r\n\n\n\nthree\n \nfour\n\tfive"
    path = write("a.txt", text)
    for separator in ("line", "blank_line"):
        file = TextFile(path, separator)
        source = stream(path, document_separator=separator)
        found = sorted(itertools.chain(*epoch_of(source, 2)))
        assert [record.document() for record in found] == [file[i] for i in range(len(file))]
    assert [record.place.rsplit(":")[-1] for record in found] == ["3", "8", "10"]


def test_jsonl_in_every_form(write):
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": " "}, {"prompt": "d", "completion": "e"}]
    path = write("a.jsonl", "\n\n".join(map(json.dumps, rows)))
    source = stream(path)
    found = sorted(itertools.chain(*epoch_of(source, 2)))
    assert [(record.id, record.document().text, record.document().spans) for record in found] == [
        (0, "ab", ((1, 2),)),
        (1, "de", ((1, 2),)),
    ]
    assert source.empty == 1


def refusal(call, *args, **kwargs):
    with pytest.raises(UserError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def test_records_that_cannot_be_read_are_placed(write):
    first = lambda path: next(stream(path).batches(1))  # noqa: E731
    good = '{"text": "a"}\n'
    assert "a.jsonl:2: not valid JSON" in refusal(first, write("a.jsonl", good + "{\n"))
    assert "b.jsonl:2: expected an object" in refusal(first, write("b.jsonl", good + "[]\n"))
    assert "c.jsonl:201: column `text` holds no value" in refusal(first_of_many, write("c.jsonl", good * 200 + "{}\n"))
    assert "d.txt:3: not UTF-8" in refusal(first, write("d.txt", b"a\n\n\xff\n"))
    assert "nothing to train on" in refusal(first, write("e.txt", "\n \n"))


def first_of_many(path):
    return next(stream(path, stream_buffer_size=1000).batches(1))


def test_flags_that_do_not_go_with_a_stream(write):
    message = refusal(
        stream,
        write("a.csv", "text\na\n"),
        write("b.txt", "a"),
        max_steps=None,
        document_separator="file",
        train_file_weights=[1.0],
        stream_buffer_size=0,
    )
    assert "needs --max_steps" in message and "not " in message and "a.csv" in message
    assert "not by --document_separator file" in message and "--train_file_weights" in message
    assert "--stream_buffer_size 0" in message
    assert "give them with --train_file" in refusal(stream)


def test_a_giant_record_is_refused(write, monkeypatch):
    monkeypatch.setattr("toolkit.language.stream.LARGEST", 100)
    assert "a.txt:2: a record of more than" in refusal(
        lambda p: next(stream(p).batches(1)), write("a.txt", "a\n" + "b" * 200)
    )


def packed_stream(path, start=None):
    encoder = Encoder(byte_tokenizer(bos=True), CAUSAL)
    return stream(path, make=buffers(encoder, 32, "best_fit"), start=start)


def test_packed_buffers_lose_no_target_and_resume(write):
    path = write("a.txt", "".join(f"{'y' * (i * 7 % 50)} {i}\n" for i in range(30)))
    source = packed_stream(path)
    labels, count, positions = [], 0, []
    while source.epoch == 0:
        (block,) = next(source.batches(1))
        row = block.row()
        assert block.size == len(row["tokens"]) <= 32
        labels.append(row["labels"])
        positions.append(source.position())
        count += 1
    found = np.concatenate(labels)
    expected = [byte + 4 for line in Path(path).read_bytes().splitlines() for byte in line] + [2] * 30
    assert sorted(found[found != IGNORED].tolist()) == sorted(expected)
    at = count // 2
    resumed = packed_stream(path, start=positions[at - 1])
    rest = [next(resumed.batches(1))[0].row()["labels"].tolist() for _ in range(count - at)]
    assert rest == [label.tolist() for label in labels[at:]]


def test_fingerprints_tell_files_apart(write):
    one, other = write("a.txt", lines(10)), write("b.txt", lines(11))
    assert stream(one).fingerprint() == stream(write("c.txt", lines(10))).fingerprint()
    assert len({stream(*files).fingerprint() for files in ([one], [other], [one, other], [other, one])}) == 4


def test_memory_does_not_grow_with_the_file():
    """The benchmark at a small size: two processes, no line lost, and as much memory for 4 MB as for 1 MB."""
    command = [sys.executable, "benchmarks/stream.py", "--megabytes", "1", "4", "--buffer", "1000"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    small, large = json.loads(result.stdout)["runs"]
    assert large["lines"] > 3 * small["lines"]
    assert all(run["lost"] == run["doubled"] == 0 for run in (small, large))
    assert large["peak_mb"] - small["peak_mb"] < 20
