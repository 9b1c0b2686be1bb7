"""Evaluation: every sample once and in order, whatever the number of processes and the size of a batch."""

import csv
import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.lm import EXACT, TinyLM, prepare, random_rows
from tests.ranks import on_ranks
from tests.runs import run_here
from tests.tiny import WORDS, save_tiny_classifier, write_csv
from toolkit.arguments import Arguments
from toolkit.data.plan import Bound
from toolkit.errors import UserError
from toolkit.evaluate import outputs
from toolkit.fit import Evaluation

SIZES = {1: 1, 2: 2, 7: 3, 64: 4}  # evaluation rows: --per_device_eval_batch_size
WORLDS = (1, 2, 3)
LENGTHS = np.random.RandomState(5).randint(2, 60, 64).tolist()


def flags(folder, out, *more):
    words = ["--model_name_or_path", folder / "model", "--train_file", folder / "train.csv", "--output_dir", out]
    words += ["--dropout", 0, "--global_batch_size", 12, "--cache_dir", folder / "cache"]
    return [str(word) for word in [*words, *more]]


def everything(folder, world):
    """All runs of one world size; what a language model says of all row counts and batch sizes."""
    out = folder / f"world{world}"
    for size, rows in SIZES.items():
        file = folder / f"rows{size}.csv"
        words = ["--validation_file", file, "--test_file", file, "--per_device_eval_batch_size", rows]
        run_here(flags(folder, out / f"rows{size}", "--max_steps", 1, "--learning_rate", 0, *words))
    five = ["--validation_file", folder / "five.csv", "--per_device_eval_batch_size", 2]
    run_here(flags(folder, out / "five", *five, "--learning_rate", 0, "--max_steps", 1))
    run_here(flags(folder, out / "trained", "--train_file", folder / "five.csv", "--num_train_epochs", 2))
    cut = ["--per_device_train_batch_size", 1, "--num_train_epochs", 2, *five, *EXACT]
    run_here(flags(folder, out / "quiet", *cut, "--eval_strategy", "no"))
    run_here(flags(folder, out / "often", *cut, "--eval_strategy", "steps", "--eval_steps", 1))
    same = ["--validation_file", folder / "train.csv", "--global_batch_size", 24, "--learning_rate", 0]
    run_here(flags(folder, out / "same", *same, "--max_steps", 1))

    strategy = prepare(TinyLM(random_rows(LENGTHS)), [*EXACT, "--max_steps", 1]).strategy
    found = {}
    for size in (*range(1, 10), 64):
        for rows in range(1, 5):
            task = TinyLM(random_rows(LENGTHS[:size]))
            table = outputs(strategy, task, task.samples, Bound(rows))
            found[f"{size} {rows}"] = {"losses": table[:, 0].tolist(), "seen": task.seen}
    return found


def two_worlds(folder):
    return everything(folder, 2)


def three_worlds(folder):
    return everything(folder, 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluation")
    save_tiny_classifier(folder / "model")
    write_csv(folder / "train.csv", 24, seed=1)
    for size in SIZES:
        write_csv(folder / f"rows{size}.csv", size, seed=size)
    # Five rows of which the model, untrained, gets the first three wrong.
    texts = [f"{word} and the {word}" for word in WORDS[:5]]
    said = [logits.argmax() for logits in one_by_one(folder / "model", texts)]
    lines = [f"{text},{('neg', 'pos')[(label + (row < 3)) % 2]}" for row, (text, label) in enumerate(zip(texts, said))]
    (folder / "five.csv").write_text("text,label\n" + "\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def found(folder):
    """By world size, what each rank found of the language model."""
    return {1: [everything(folder, 1)], 2: on_ranks(two_worlds, 2, folder), 3: on_ranks(three_worlds, 3, folder)}


def one_by_one(model, texts):
    """Logits of each text by itself, without anything of the toolkit."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    network = AutoModelForSequenceClassification.from_pretrained(model).eval()
    with torch.no_grad():
        inputs = [tokenizer(text, return_tensors="pt", truncation=True, max_length=64) for text in texts]
        return [network(**each).logits[0].numpy() for each in inputs]


def read(path):
    return json.loads(path.read_text())


@pytest.mark.parametrize("world", WORLDS)
def test_every_sample_once_for_all_sizes_and_batches(world, found):
    strategy = prepare(TinyLM(random_rows(LENGTHS)), [*EXACT, "--max_steps", 1]).strategy
    task = TinyLM(random_rows(LENGTHS))
    alone = []
    for sample in range(64):
        batch = task.collate([task.samples[sample]], [sample], 0)
        with torch.no_grad():
            alone.append(task.loss(strategy.model(**batch.inputs), batch).item())
    for size in (*range(1, 10), 64):
        for rows in range(1, 5):
            # The prefix of a longer draw is not the shorter draw: each size has its own rows.
            expected = alone if size == 64 else None
            ranks = [rank[f"{size} {rows}"] for rank in found[world]]
            for rank in ranks:
                assert len(rank["losses"]) == size and np.isfinite(rank["losses"]).all()
                assert rank["losses"] == found[1][0][f"{size} {rows}"]["losses"]  # to the last bit
                if expected:
                    assert rank["losses"] == pytest.approx(expected, rel=1e-5)
            # What is collated for a filler is one row, and not counted: the finite table shows that every
            # row was scored, the number of passes that none was scored twice.
            passes = sum(len(ids) for rank in ranks for ids in rank["seen"])
            fillers = -(-len(cuts(size, rows)) // world) * world - len(cuts(size, rows))
            assert passes == size + fillers


def cuts(size, rows):
    return range(0, size, rows)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("size", SIZES)
def test_d01_d09_metrics_and_predictions_do_not_depend_on_the_processes(world, size, folder, found):
    here = folder / f"world{world}" / f"rows{size}"
    with (folder / f"rows{size}.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    logits = np.array(one_by_one(folder / "model", [row["text"] for row in rows]))
    targets = np.array([["neg", "pos"].index(row["label"]) for row in rows])
    results = read(here / "eval_results.json")
    chances = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    assert results["eval_samples"] == size
    assert results["eval_accuracy"] == (logits.argmax(1) == targets).mean()
    assert results["eval_loss"] == pytest.approx(-np.log(chances[range(size), targets]).mean(), rel=1e-5)
    # A line for each row, in the order of the file.
    with (here / "predictions.csv").open() as stream:
        lines = list(csv.DictReader(stream))
    assert [line["prediction"] for line in lines] == [("neg", "pos")[label] for label in logits.argmax(1)]
    assert np.array([line["probability_pos"] for line in lines], float) == pytest.approx(chances[:, 1], abs=2e-6)
    # And the same for any number of processes, to the last bit.
    first = folder / "world1" / f"rows{size}"
    assert (here / "predictions.csv").read_bytes() == (first / "predictions.csv").read_bytes()
    timed = ("eval_runtime", "eval_samples_per_second")
    alone = read(first / "eval_results.json")
    assert {k: v for k, v in results.items() if k not in timed} == {k: v for k, v in alone.items() if k not in timed}
    assert read(here / "eval_report.json") == read(first / "eval_report.json")


@pytest.mark.parametrize("world", WORLDS)
def test_d01_two_of_five_are_right(world, folder, found):
    results = read(folder / f"world{world}" / "five" / "eval_results.json")
    assert results["eval_accuracy"] == 0.4 and results["eval_samples"] == 5


@pytest.mark.parametrize("world", WORLDS)
def test_a09_samples_are_counted_once(world, folder, found):
    lines = (folder / f"world{world}" / "trained" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["samples"] for line in lines] == [5, 10]


@pytest.mark.parametrize("world", WORLDS)
def test_d03_evaluation_in_the_middle_changes_nothing(world, folder, found):
    quiet, often = (folder / f"world{world}" / name for name in ("quiet", "often"))
    left, right = load_file(quiet / "model.safetensors"), load_file(often / "model.safetensors")
    assert all(torch.equal(left[name], right[name]) for name in left)
    logs = [[json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()] for run in (quiet, often)]
    steps = [[(row["step"], row["loss"]) for row in log if "loss" in row] for log in logs]
    assert steps[0] == steps[1] and len(steps[0]) == 4
    assert [row["step"] for row in logs[1] if "eval_loss" in row] == [1, 2, 3, 4]
    start = load_file(folder / "model" / "model.safetensors")
    assert not torch.equal(left["classifier.weight"], start["classifier.weight"])


@pytest.mark.parametrize("world", WORLDS)
def test_d07_without_training_evaluation_has_the_loss_of_training(world, folder, found):
    run = folder / f"world{world}" / "same"
    (step,) = [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in row]
    assert read(run / "eval_results.json")["eval_loss"] == pytest.approx(step["loss"], rel=1e-5)


def test_evaluation_loss_is_neither_smoothed_nor_weighted(folder, tmp_path):
    words = ["--validation_file", folder / "rows64.csv", "--max_steps", 1, "--learning_rate", 0]
    run_here(flags(folder, tmp_path / "plain", *words))
    more = ["--label_smoothing_factor", 0.3, "--class_weights", "balanced"]
    run_here(flags(folder, tmp_path / "other", *words, *more))
    losses = [read(tmp_path / name / "eval_results.json")["eval_loss"] for name in ("plain", "other")]
    assert losses[0] == losses[1]


def evaluation(rows, **given):
    task = TinyLM(rows)
    trained = prepare(task, [*EXACT, "--max_steps", 1])
    task.score = lambda split, table: {"loss": float(table.mean())}
    return Evaluation(task, Arguments(**given), trained.strategy, {"train": rows, "validation": rows}, trained.feed)


def test_outputs_that_are_not_finite_are_an_error():
    found = evaluation(random_rows([5, 6, 7]))
    assert found.run("test") == {}
    assert found.run("validation")["samples"] == 3
    with torch.no_grad():
        found.strategy.model.transformer.ln_f.weight.fill_(torch.nan)
    with pytest.raises(UserError, match=r"3 of 3 samples of the validation split .* sample 0.*--learning_rate"):
        found.run("validation")


def test_a_try_out_takes_two_batches_and_no_training_data():
    found = evaluation(random_rows([5] * 20), per_device_eval_batch_size=4)
    found.task.seen.clear()
    found.try_out()
    assert [len(ids) for ids in found.task.seen] == [4, 4]


def test_evaluation_leaves_the_training_mode_and_the_gradients_alone():
    found = evaluation(random_rows([5, 6, 7]))
    assert found.strategy.model.training
    with pytest.raises(ZeroDivisionError), found.strategy.inference():
        assert not found.strategy.model.training and not torch.is_grad_enabled()
        raise ZeroDivisionError
    assert found.strategy.model.training and torch.is_grad_enabled()


def test_a_split_that_loses_all_its_rows(folder, tmp_path):
    shutil.copy(folder / "rows7.csv", tmp_path / "dev.csv")
    (tmp_path / "test.csv").write_text('text,label\n" ",pos\n')
    words = ["--validation_file", tmp_path / "dev.csv", "--test_file", tmp_path / "test.csv", "--empty_text", "drop"]
    with pytest.raises(UserError, match="nothing is left under --empty_text drop"):
        run_here(flags(folder, tmp_path / "out", *words, "--max_steps", 1))
