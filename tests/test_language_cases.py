"""Cases of language modelling that are about a whole run, or about a batch."""

import json
import math

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.language import byte_tokenizer
from tests.runs import run_here
from tests.test_language_parity import save_llama
from toolkit.language.samples import IGNORED
from toolkit.language.task import LanguageModeling


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cases")
    save_llama(folder / "model")
    (folder / "two.txt").write_text("abc\n\n" + "abcdefgh " * 3 + "ijk\n")  # A01: 3 and 30 targets
    return folder


def task_of(folder, *more):
    from tasks.language_modeling import LanguageModelingArguments
    from toolkit.arguments import parse

    given = ["--model_name_or_path", folder / "model", "--train_file", folder / "two.txt", *more]
    return LanguageModeling(parse(LanguageModelingArguments, [*map(str, given), "--cache_dir", str(folder / "cache")]))


def train(folder, out, *more):
    given = ["--model_name_or_path", folder / "model", "--train_file", folder / "two.txt", "--output_dir", out]
    given += ["--cache_dir", folder / "cache", "--max_steps", 1, *more]
    return run_here([str(word) for word in given], task="language_modeling")


def test_a01_a_token_is_a_target_whatever_the_micro_batches(folder):
    exact = ["--optim", "sgd", "--learning_rate", 1, "--lr_scheduler_type", "constant", "--max_grad_norm", 0]
    found = {}
    for rows in (1, 2):
        for packing in ("none", "best_fit"):
            out = folder / f"{packing} {rows}"
            more = ["--per_device_train_batch_size", rows, "--packing", packing, "--block_size", 32]
            (row,) = train(folder, out, *exact, *more)
            found[out] = row["loss"]
    losses = list(found.values())
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)
    first, *others = (load_file(out / "model.safetensors") for out in found)
    for other in others:
        assert max((first[name] - other[name]).abs().max().item() for name in first) < 1e-6


def test_i05_a_padding_token_that_is_the_end_hides_no_end(folder):
    task = task_of(folder, "--packing", "none", "--block_size", 16)
    task.prepare()
    task.tokenizer.pad_token = task.tokenizer.eos_token
    samples = task.splits["train"]
    ids = [0, 2]  # "abc" with its end, and the last chunk of the longer text
    batch = task.collate([samples[i] for i in ids], ids, 0)
    end = task.tokenizer.eos_token_id
    lengths = samples.lengths[ids]
    assert lengths[0] != lengths[1] and (batch.inputs["input_ids"] == end).sum() > 2
    assert ((batch.targets == end).sum(1) == 1).all()
    mask = batch.inputs["attention_mask"]
    assert mask.sum(1).tolist() == lengths.tolist()
    assert (batch.targets[mask == 0] == IGNORED).all()
    assert batch.weight == sum(lengths) - len(ids)


def test_d17_a_perplexity_that_overflows_is_written_as_infinity(folder):
    """Of a model whose logits are ten thousand times too large."""
    scaled = folder / "scaled"
    save_llama(scaled, tie_word_embeddings=False)
    weights = load_file(scaled / "model.safetensors")
    weights["lm_head.weight"] *= 1e4
    save_file(weights, scaled / "model.safetensors", {"format": "pt"})
    out = folder / "overflow"
    more = ["--model_name_or_path", scaled, "--validation_file", folder / "two.txt", "--learning_rate", 0]
    train(folder, out, *more)

    def not_json(constant):
        raise AssertionError(constant)

    for file in ("eval_results.json", "all_results.json", "run.json"):
        found = json.loads((out / file).read_text(), parse_constant=not_json)
    found = json.loads((out / "eval_results.json").read_text())
    assert 710 < found["eval_loss"] < math.inf
    assert float(found["eval_perplexity"]) == math.inf


def test_h07_a_poem_keeps_its_lines(folder, tmp_path):
    """In the first block, and in what a model is trained on."""
    poem = "Roses are red,\n  violets\tare blue.\n"
    (folder / "poem.txt").write_text(poem)
    task = task_of(folder, "--train_file", folder / "poem.txt")
    row = task.prepare()["train"][0]
    assert task.tokenizer.decode(row["tokens"], skip_special_tokens=True) == poem.rstrip("\n")
    assert byte_tokenizer()("\n")["input_ids"][0] in row["labels"]


def test_h17_one_huge_line_is_split_where_a_stream_is_read(folder):
    """As large as the buffer's other lines together, and not packed."""
    (folder / "huge.txt").write_text("short\n" + "abcdefgh " * 50_000 + "\nlast\n")
    given = ["--train_file", folder / "huge.txt", "--document_separator", "line", "--streaming", "--packing", "none"]
    rows = train(folder, folder / "huge", *given, "--global_batch_size", 64, "--max_steps", 3)
    assert [row["samples"] for row in rows] == [64, 128, 192]
    assert rows[-1]["tokens"] == pytest.approx(3 * 64 * 64, rel=0.1)  # chunks of 64 tokens, the model's positions
    assert np.isfinite([row["loss"] for row in rows]).all()


def test_e15_a_limit_counts_documents_not_blocks(folder, capfd):
    (folder / "fifty.txt").write_text("a b c d e f g h i j\n\n" * 50)
    task = task_of(folder, "--train_file", folder / "fifty.txt", "--max_train_samples", 1, "--block_size", 8)
    samples = task.prepare()["train"]
    assert samples.corpus.documents == 1 and len(samples) == 3  # 20 tokens, of which chunks share one
    said = capfd.readouterr().err
    assert "1 document, 20 tokens, 19 to predict" in said and "3 samples of up to 8 tokens" in said


def test_a_batch_of_one_token_rows_has_no_target(folder):
    """What a stream may hand out: its loss is 0, not 0/0."""
    from toolkit.language import head

    task = task_of(folder, "--packing", "none")
    task.prepare()
    row = {"tokens": np.array([2], np.int32), "labels": np.array([IGNORED]), "positions": np.array([0])}
    batch = task.collate([row], [0], 0)
    assert batch.weight == 0
    model = task.model(dtype=torch.float32)
    assert isinstance(model.lm_head, head.LossHead)
    assert task.loss(model(**batch.inputs), batch).tolist() == [0.0]
