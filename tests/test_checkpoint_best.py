"""Which checkpoints are kept, which evaluation is the best, and when training stops early: alike on all ranks."""

import json
import os
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from tests.ranks import on_ranks
from tests.runs import read_rows, run_here
from tests.test_checkpoint_resume import flags, power_cut, rows
from tests.test_checkpoint_save import read
from tests.tiny import save_tiny_classifier, write_csv
from toolkit.arguments import Arguments, parse
from toolkit.checkpoint.folder import named
from toolkit.checkpoint.keeper import Keeper
from toolkit.classification.task import Classification
from toolkit.data.plan import Schedule
from toolkit.settings import best_problems

METRICS = ["loss", "accuracy", "dev_loss", "perplexity", "mse"]
EVERY = {"eval_strategy": "steps", "eval_steps": 2, "save_steps": 3}
BEST = ["--load_best_model_at_end", "--metric_for_best_model", "eval_accuracy"]


def keeper(folder, *words, steps=100):
    args = parse(Arguments, [str(word) for word in words])
    return Keeper(args, Schedule(100, 10, steps, 0), folder)


def best_of(values, folder, *words, name="accuracy"):
    kept = keeper(folder, "--load_best_model_at_end", "--metric_for_best_model", f"eval_{name}", *words)
    for step, value in enumerate(values, 1):
        kept.evaluated(step, {name: value})
    return kept.best


@pytest.mark.parametrize(
    "name, values, best, said",
    [
        ("dev_loss", [3.0, 1.0, 2.0], 2, "smallest dev_loss"),
        ("loss", [3.0, 1.0, 2.0], 2, "smallest loss"),
        ("perplexity", [3.0, 1.0, 2.0], 2, "smallest perplexity"),
        ("mse", [3.0, 1.0, 2.0], 2, "smallest mse"),
        ("accuracy", [0.3, 0.1, 0.2], 1, "greatest accuracy"),
    ],
)
def test_d11_which_way_is_better(name, values, best, said, tmp_path, capfd):
    assert best_of(values, tmp_path, name=name).step == best
    assert said in capfd.readouterr().err


def test_d11_the_user_says_which_way(tmp_path):
    assert best_of([3.0, 1.0, 2.0], tmp_path, "--greater_is_better", "false").step == 2
    assert best_of([3.0, 1.0, 2.0], tmp_path, "--greater_is_better", "true", name="loss").step == 1


def test_d13_the_first_of_equal_ones(tmp_path):
    assert best_of([0.8, 0.9, 0.9], tmp_path).step == 2
    before = keeper(tmp_path, "--early_stopping_patience", 9, "--metric_for_best_model", "accuracy")
    for step, value in ((1, 0.8), (2, 0.9)):
        before.evaluated(step, {"accuracy": value})
    after = keeper(tmp_path, "--early_stopping_patience", 9, "--metric_for_best_model", "accuracy")
    after.load(json.loads(json.dumps(before.state())), tmp_path)
    after.evaluated(3, {"accuracy": 0.9})
    assert (after.best.step, after.best.since) == (2, 1)


def test_what_is_no_number_is_never_the_best(tmp_path):
    assert best_of([float("nan"), float("inf"), 0.1, None], tmp_path).step == 3


@pytest.mark.parametrize(
    "words, metrics, said",
    [
        (["--load_best_model_at_end"], [], "there is no labelled validation data"),
        (["--metric_for_best_model", "acuracy"], METRICS, "Did you mean `accuracy`?"),
    ],
)
def test_a_best_that_cannot_be_told(words, metrics, said):
    assert said in " ".join(best_problems(parse(Arguments, words), metrics))
    assert not best_problems(parse(Arguments, words), ["loss", "acuracy"])


@pytest.mark.parametrize(
    "words, steps",
    [
        (["--save_strategy", "no"], []),
        (["--save_strategy", "epoch"], [5, 10, 15]),
        (["--save_strategy", "steps", "--save_steps", 4], [4, 8, 12, 16]),
        (["--save_strategy", "steps", "--save_steps", 0.25], [5, 10, 15]),
        (["--save_strategy", "steps", "--save_steps", 0.26], [6, 12, 18]),  # a share is rounded up
    ],
)
def test_when_to_save(words, steps, tmp_path):
    kept = keeper(tmp_path, *words, steps=20)
    assert [step for step in range(1, 21) if kept.due(step, step % 5 == 0)] == steps


# Runs


@contextmanager
def scored(accuracies):
    """Evaluations during training give these accuracies, and the final ones the last."""
    given = iter(accuracies)
    state = {}

    def score(self, split, table):
        figures = real(self, split, table)
        if table.std() == 0:  # trying it out
            return figures
        state["value"] = next(given, state.get("value"))
        return {**figures, "accuracy": state["value"]}

    real = Classification.score
    with mock.patch.object(Classification, "score", score):
        yield


@contextmanager
def growing_on_rank_1():
    """All evaluations are equally good for rank 0, and better and better for rank 1."""
    counts = iter(range(100))

    def score(self, split, table):
        return {**real(self, split, table), "accuracy": float(next(counts)) if os.environ["RANK"] == "1" else 0.5}

    real = Classification.score
    with mock.patch.object(Classification, "score", score):
        yield


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    make(folder)
    return folder


def make(folder):
    save_tiny_classifier(folder / "model", hidden_dropout_prob=0.1)
    write_csv(folder / "train.csv", 43, seed=3)
    write_csv(folder / "dev.csv", 11, seed=4)


def weights(path):
    return load_file(path / "model.safetensors") if (path / "model.safetensors").exists() else read(path)


def same(left, right):
    left = {name.removeprefix("model/"): tensor for name, tensor in left.items() if not name.startswith("exp")}
    right = {name.removeprefix("model/"): tensor for name, tensor in right.items() if not name.startswith("exp")}
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_m05_the_limit_and_what_it_spares(files, tmp_path):
    words = flags(files, tmp_path / "a", **{**EVERY, "save_total_limit": 3, "save_steps": 1, "num_train_epochs": 2})
    with scored([0.5] * 9):
        run_here(words)
    # loss decides, and its best is spared wherever it was; the others are the last ones.
    state = json.loads((tmp_path / "a" / "checkpoint-9" / "state.json").read_text())
    assert len(named(tmp_path / "a")) == 3
    assert {9, 8} < {step for step, _ in named(tmp_path / "a")} and state["best"]["step"] <= 9
    words = flags(files, tmp_path / "b", *BEST, **EVERY, save_total_limit=1)
    with scored([0.5, 0.9, 0.6, 0.6, 0.6, 0.6, 0.6]):
        run_here(words)
    assert [step for step, _ in named(tmp_path / "b")] == [12, 4]  # the newest and the best


@pytest.mark.parametrize("more", [{}, {"async_save": True}, {"save_strategy": "no", "save_steps": None}], ids=str)
def test_the_best_weights_are_taken_back(more, files, tmp_path, capfd):
    accuracies = [0.5, 0.7, 0.9, 0.9, 0.2, 0.1, 0.6]
    with scored(accuracies):
        run_here(flags(files, tmp_path / "best", *BEST, **{**EVERY, "save_total_limit": 1, **more}))
    assert "the best evaluation was at step 6, accuracy 0.9: its weights are used" in capfd.readouterr().err
    run_here(flags(files, tmp_path / "plain", **{**EVERY, "save_steps": 6, "save_total_limit": 9}))
    assert same(weights(tmp_path / "best"), weights(tmp_path / "plain" / "checkpoint-6"))
    assert not same(weights(tmp_path / "best"), weights(tmp_path / "plain"))
    assert len(read_rows(tmp_path / "best")) == 15


def test_the_last_evaluation_may_be_the_best(files, tmp_path, capfd):
    with scored([0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8]):
        run_here(flags(files, tmp_path / "best", *BEST, **{**EVERY, "eval_steps": 5}))
    assert "the best evaluation was at step 15" in capfd.readouterr().err
    run_here(flags(files, tmp_path / "plain", **EVERY))
    assert same(weights(tmp_path / "best"), weights(tmp_path / "plain"))
    assert 15 not in [step for step, _ in named(tmp_path / "best")]


@pytest.mark.parametrize("cut_at", [5, 7, 9])
def test_early_stopping_and_the_best_over_a_break(cut_at, files, tmp_path, capfd):
    accuracies = [0.5, 0.9, 0.8, 0.9, 0.7, 0.99]  # at steps 2, 4, 6, 8, 10: enough after 3 that are not better
    words = [*BEST, "--early_stopping_patience", 3]
    with scored(accuracies):
        run_here(flags(files, tmp_path / "straight", *words, **EVERY))
    assert "stopped early at step 10" in capfd.readouterr().err
    out = tmp_path / "out"
    with scored(accuracies), power_cut(cut_at):
        run_here(flags(files, out, *words, **EVERY))
    newest = named(out)[0][0]
    assert newest == {5: 4, 7: 6, 9: 9}[cut_at]
    # Elsewhere, where the best one is not.
    with scored(accuracies[newest // 2 :]):
        run_here(flags(files, tmp_path / "other", *words, **EVERY, resume_from_checkpoint=out / f"checkpoint-{newest}"))
    assert "stopped early at step 10" in capfd.readouterr().err
    with scored(accuracies[newest // 2 :]):
        run_here(flags(files, out, *words, **EVERY, resume_from_checkpoint="auto"))
    for again in (out, tmp_path / "other"):
        assert same(weights(again), weights(tmp_path / "straight"))
        assert rows(again) == rows(tmp_path / "straight")
    run_here(flags(files, out, *words, **EVERY, resume_from_checkpoint="auto"))
    assert "this run has finished" in capfd.readouterr().err


def test_a_best_that_is_gone_or_damaged(files, tmp_path, capfd):
    accuracies = [0.5, 0.9, 0.8, 0.7, 0.75, 0.6, 0.7]
    out = tmp_path / "out"
    words = flags(files, out, *BEST, **EVERY)
    with scored(accuracies), power_cut(7):
        run_here(words)
    (out / "checkpoint-4").rename(tmp_path / "checkpoint-4")
    with scored(accuracies[3:]):
        run_here([*words, "--resume_from_checkpoint", "auto"])
    said = capfd.readouterr().err
    assert "the best evaluation so far was at step 4, of which there is no checkpoint" in said
    assert "the best evaluation was at step 10, accuracy 0.75" in said
    # Damaged while it was needed: the last weights are better than none.
    with scored(accuracies), mock.patch("toolkit.checkpoint.folder.checksum", return_value="other"):
        run_here(flags(files, tmp_path / "damaged", *BEST, **EVERY))
    assert "cannot be had, so the last ones are used" in capfd.readouterr().err
    run_here(flags(files, tmp_path / "plain", **EVERY))
    assert same(weights(tmp_path / "damaged"), weights(tmp_path / "plain"))


def test_another_metric_after_a_break_begins_anew(files, tmp_path, capfd):
    out = tmp_path / "out"
    with scored([0.9, 0.5, 0.6]), power_cut(7):
        run_here(flags(files, out, *BEST, **EVERY))
    run_here(flags(files, out, "--load_best_model_at_end", **EVERY, resume_from_checkpoint="auto"))
    said = capfd.readouterr().err
    assert "the best evaluation so far was told by accuracy: by loss it begins anew from here" in said


def on_two_ranks(folder):
    words = [*BEST, "--early_stopping_patience", 2]
    for name, more in (("front", []), ("back", ["--async_save"])):
        with scored([0.5, 0.9, 0.8, 0.7, 0.99]):
            run_here(flags(folder, folder / name, *words, *more, **EVERY))
    # Rank 1 would go on for ever.
    with growing_on_rank_1():
        run_here(flags(folder, folder / "other", *words, **EVERY))


def test_n03_early_stopping_is_agreed(tmp_path):
    make(tmp_path)
    on_ranks(on_two_ranks, 2, tmp_path)
    # Best at 4, enough at 8; where all are equal, best at 2 and enough at 6.
    for name, best, steps in (("front", 4, 8), ("back", 4, 8), ("other", 2, 6)):
        assert len(read_rows(tmp_path / name)) == steps
        assert same(weights(tmp_path / name), weights(tmp_path / name / f"checkpoint-{best}"))
