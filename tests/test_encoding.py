"""Tokenising: lengths, pairs, the cache, and once per machine."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from tests.runs import ROOT, run_here
from tests.tiny import WORDS, save_tokenizer, write_csv
from toolkit.data import encoding
from toolkit.data.encoding import encode, max_tokens
from toolkit.errors import UserError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    made = save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    made.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]  # as BERT's
    return made


def rows(arrays, name="input_ids"):
    return [arrays[name][a:b].tolist() for a, b in zip(arrays["offsets"], arrays["offsets"][1:])]


def ids(text):
    return [2, *(5 + WORDS.index(word) if word in WORDS else 1 for word in text.split()), 3]


TEXTS = ["a good film", "unheard of", "the quick brown fox jumps over the lazy dog", ""]


def test_flat_arrays_hold_every_text_in_order(tokenizer, tmp_path):
    arrays = encode(tokenizer, TEXTS, 64, str(tmp_path), None)
    assert rows(arrays) == [ids(text) for text in TEXTS]
    assert arrays["input_ids"].dtype == np.int32 and arrays["offsets"].dtype == np.int64
    assert "token_type_ids" not in arrays


def test_only_what_loses_tokens_counts_as_cut(tokenizer, tmp_path):
    arrays = encode(tokenizer, TEXTS, 5, str(tmp_path), None)  # the first text has exactly 5 tokens
    assert rows(arrays) == [[*ids(" ".join(text.split()[:3]))] for text in TEXTS]
    assert arrays["truncated"].tolist() == [1]


def test_many_texts_cross_the_chunks(tokenizer, tmp_path):
    texts = [WORDS[i % len(WORDS)] for i in range(9000)]
    assert rows(encode(tokenizer, texts, 64, str(tmp_path), 2)) == [ids(text) for text in texts]


def test_pairs_have_token_types(tokenizer, tmp_path):
    arrays = encode(tokenizer, [("a good", "film"), ("the", "lazy dog")], 64, str(tmp_path), None)
    assert rows(arrays) == [[*ids("a good"), *ids("film")[1:]], [*ids("the"), *ids("lazy dog")[1:]]]
    assert rows(arrays, "token_type_ids") == [[0, 0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1]]


def test_pairs_are_not_their_texts_run_together(tokenizer, tmp_path):
    first = encode(tokenizer, [("a good", "film")], 64, str(tmp_path), None)
    assert rows(encode(tokenizer, [("a", "good film")], 64, str(tmp_path), None)) != rows(first)
    assert rows(encode(tokenizer, ["a good film"], 64, str(tmp_path), None)) != rows(first)


def test_pair_types_reach_the_model(tiny_classifier, tmp_path):
    model = shutil.copytree(tiny_classifier, tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings["model_input_names"] = ["input_ids", "token_type_ids", "attention_mask"]
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    file = tmp_path / "pairs.csv"
    lines = [f"a {WORDS[i]},{WORDS[i]} film,{('neg', 'pos')[i % 2]}" for i in range(8)]
    file.write_text("first,second,label\n" + "\n".join(lines) + "\n")
    words = ["--model_name_or_path", model, "--train_file", file, "--output_dir", tmp_path / "out"]
    words += ["--text_column_names", "first", "second", "--max_steps", 1]
    seen = []
    from toolkit.classification.task import Classification

    collate = Classification.collate

    def watch(self, *arguments):
        batch = collate(self, *arguments)
        seen.append(batch)
        return batch

    with mock.patch.object(Classification, "collate", watch):
        run_here([str(word) for word in words])
    assert all(batch.inputs["token_type_ids"].max() == 1 for batch in seen)


def load(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


class TestCache:
    def calls(self, run):
        """How often texts are tokenised while `run` runs."""
        with mock.patch.object(encoding, "_tokenise", wraps=encoding._tokenise) as tokenise:
            run()
        return tokenise.call_count

    def test_e11_the_second_run_finds_the_first_ones_work(self, tokenizer, tmp_path):
        assert self.calls(lambda: encode(tokenizer, TEXTS, 64, str(tmp_path), None)) == 1
        again = []
        assert self.calls(lambda: again.append(encode(tokenizer, list(TEXTS), 64, str(tmp_path), 1))) == 0
        assert rows(again[0]) == [ids(text) for text in TEXTS]
        assert len(list(tmp_path.iterdir())) == 1  # nothing half-written stays

    @pytest.mark.parametrize("change", ["text", "order", "length", "tokenizer", "side", "inputs"])
    def test_what_has_changed_is_tokenised_again(self, change, tokenizer, tmp_path):
        encode(tokenizer, TEXTS, 64, str(tmp_path), None)
        texts, length, other = list(TEXTS), 64, tokenizer
        if change == "text":
            texts[0] += " wit"
        elif change == "order":
            texts.reverse()
        elif change == "length":
            length = 63
        else:
            other = save_tokenizer(tmp_path / "other")
            other.model_input_names = tokenizer.model_input_names[: 1 if change == "inputs" else None]
            if change == "tokenizer":
                other.add_tokens(["unheard"])
            elif change == "side":
                other.truncation_side = "left"
        assert self.calls(lambda: encode(other, texts, length, str(tmp_path), None)) == 1

    def test_neighbours_do_not_run_together(self, tokenizer, tmp_path):
        encode(tokenizer, ["a good", "film"], 64, str(tmp_path), None)
        assert self.calls(lambda: encode(tokenizer, ["a", "good film"], 64, str(tmp_path), None)) == 1

    def test_a_folder_that_cannot_be_written(self, tokenizer, tmp_path):
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(UserError, match="--cache_dir"):
            encode(tokenizer, TEXTS, 64, str(tmp_path / "file" / "cache"), None)

    def test_a_damaged_file_is_named(self, tokenizer, tmp_path):
        encode(tokenizer, TEXTS, 64, str(tmp_path), None)
        (file,) = tmp_path.iterdir()
        file.write_bytes(file.read_bytes()[:20])
        with pytest.raises(UserError, match=f"{file} is damaged"):
            encode(tokenizer, TEXTS, 64, str(tmp_path), None)

    def test_every_split_is_found_again(self, tmp_path):
        """Whatever a tokenizer has encoded before, as when the first split comes from the cache."""
        save_tokenizer(tmp_path)
        for expected in (2, 0, 0):
            fresh = load(tmp_path)
            splits = (TEXTS, TEXTS[:2])
            found = self.calls(lambda: [encode(fresh, split, 64, str(tmp_path / "cache"), None) for split in splits])
            assert found == expected

    def test_lone_surrogates_have_a_fingerprint(self, tokenizer):
        assert encoding._fingerprint(tokenizer, ["\ud83d"], 64) != encoding._fingerprint(tokenizer, ["\ud83c"], 64)


RANK = """
import sys, time
from pathlib import Path
sys.path.insert(0, ".")
from tests.tiny import save_tokenizer
from toolkit.data import encoding
folder, rank = Path(sys.argv[1]), sys.argv[2]
tokenise = encoding._tokenise
def slow(*arguments):
    with open(folder / "calls", "a") as calls:
        calls.write(rank + "\\n")
    time.sleep(2)
    return tokenise(*arguments)
encoding._tokenise = slow
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
arrays = encoding.encode(tokenizer, ["a good film", "a bad film"], 64, str(folder / "cache"), None)
(folder / f"rank{rank}").write_text(str(arrays["input_ids"].tolist()))
"""


def test_e11_one_rank_of_a_machine_tokenises_and_the_others_wait(tmp_path):
    save_tokenizer(tmp_path / "tokenizer")
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path), rank], cwd=ROOT, env={**os.environ, "LOCAL_RANK": rank}
        )
        for rank in ("1", "0")
    ]
    assert [process.wait(timeout=60) for process in processes] == [0, 0]
    assert (tmp_path / "calls").read_text() == "0\n"
    assert (tmp_path / "rank0").read_text() == (tmp_path / "rank1").read_text()


class Config:
    def __init__(self, model_type="bert", positions=64, pad_token_id=0, name="max_position_embeddings"):
        self.model_type, self.pad_token_id = model_type, pad_token_id
        setattr(self, name, positions)


class Lengths:
    def __init__(self, model_max_length):
        self.model_max_length = model_max_length

    def num_special_tokens_to_add(self, pair):
        return 2


@pytest.mark.parametrize(
    ("tokenizer_limit", "config", "asked", "expected"),
    [
        (int(1e30), Config(), None, 64),  # H13
        (int(1e30), Config(), 20, 20),
        (32, Config(), None, 32),
        (512, Config(), None, 64),
        (int(1e30), Config("gpt2", name="n_positions"), None, 64),
        (512, Config("roberta", 514, pad_token_id=1), None, 512),
        (int(1e30), Config("roberta", 514, pad_token_id=1), None, 512),
        (int(1e30), Config("t5", None), None, 512),
        (int(1e30), Config("deberta", -1), None, 512),
    ],
)
def test_the_limit_is_the_least_of_tokenizer_model_and_flag(tokenizer_limit, config, asked, expected):
    assert max_tokens(Lengths(tokenizer_limit), config, asked) == (expected, None)


def test_h13_more_than_the_model_has_positions_for_is_said():
    limit, said = max_tokens(Lengths(int(1e30)), Config(), 512)
    assert limit == 64 and "--max_length 512" in said and "64 is used" in said


def test_a_model_without_a_limit_takes_what_is_asked():
    assert max_tokens(Lengths(int(1e30)), Config("t5", None), 2048) == (2048, None)


def test_a_limit_without_room_for_a_text_is_refused():
    with pytest.raises(UserError, match="--max_length 2 leaves no room beside the 2 special tokens"):
        max_tokens(Lengths(512), Config(), 2)
    assert max_tokens(Lengths(512), Config(), 3) == (3, None)


def run_long(model, tmp_path, train, validation, *more):
    words = ["--model_name_or_path", model, "--train_file", train, "--validation_file", validation]
    words += ["--output_dir", tmp_path / "out", "--max_steps", 1, "--cache_dir", tmp_path / "cache", *more]
    return run_here([str(word) for word in words])


def write_rows(path, counts):
    lines = [
        f"{' '.join(WORDS[i % len(WORDS)] for i in range(n))},{('neg', 'pos')[k % 2]}" for k, n in enumerate(counts)
    ]
    path.write_text("text,label\n" + "\n".join(lines) + "\n")
    return path


def test_h11_a_text_longer_than_the_model_is_cut_and_said(tiny_classifier, tmp_path, capfd):
    short = write_csv(tmp_path / "short.csv", 4)
    run_long(tiny_classifier, tmp_path, write_rows(tmp_path / "train.csv", [200, 5, 200, 62]), short)
    assert "train: 2 of 4 texts are cut at 64 tokens" in capfd.readouterr().err  # 62 words are 64 tokens


def test_h15_a_validation_text_longer_than_all_training_texts(tiny_classifier, tmp_path):
    train = write_rows(tmp_path / "train.csv", [3, 4, 5, 6])
    from toolkit.evaluate import outputs

    lengths = []

    def watch(strategy, task, samples, *more, **how):
        lengths.append(samples.lengths.max())
        return outputs(strategy, task, samples, *more, **how)

    with mock.patch("toolkit.fit.outputs", watch):
        run_long(tiny_classifier, tmp_path, train, write_rows(tmp_path / "dev.csv", [40, 3]))
    assert set(lengths) == {42}


@pytest.mark.parametrize("spaces", [True, False])
def test_h17_one_huge_line(spaces, tmp_path):
    """5 MB in one line: under a minute and under 1 GB, measured in a process of its own."""
    save_tokenizer(tmp_path / "tokenizer")
    script = f"""
import resource, sys
sys.path.insert(0, ".")
from transformers import AutoTokenizer
from toolkit.data.encoding import encode
tokenizer = AutoTokenizer.from_pretrained({str(tmp_path / "tokenizer")!r})
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
text = {"'good film ' * 500_000" if spaces else "'g' * 5_000_000"}
arrays = encode(tokenizer, ["a bad film", text], 64, {str(tmp_path / "cache")!r}, None)
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
print(arrays["offsets"].tolist(), arrays["truncated"].tolist(), grown)
"""
    start = time.monotonic()
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
    offsets, truncated, grown = result.stdout.split("] ")
    assert offsets + "]" == ("[0, 5, 69]" if spaces else "[0, 5, 8]")
    assert truncated + "]" == ("[1]" if spaces else "[0]")
    assert float(grown) < 600, f"{grown} MB"
    assert time.monotonic() - start < 60


def test_h17_with_a_real_tokenizer(minilm, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm)
    words = Path(__file__).read_text().split()
    text = " ".join(words * (5_000_000 // len(" ".join(words)) + 1))
    start = time.monotonic()
    arrays = encode(tokenizer, [text], 128, str(tmp_path), None)
    assert np.diff(arrays["offsets"]).tolist() == [128]
    assert arrays["input_ids"].tolist() == tokenizer(text[:5000], truncation=True, max_length=128)["input_ids"]
    assert time.monotonic() - start < 30
