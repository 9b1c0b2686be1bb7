"""What a classification run leaves behind agrees with itself."""

import csv
import json
import math
import os

import numpy as np
import pytest

from tests.runs import run_here
from tests.tiny import LINES
from toolkit import predict
from toolkit.errors import UserError


def train(model, folder, out, *more):
    words = ["--model_name_or_path", model, "--train_file", folder / "train.csv", "--output_dir", out]
    return run_here([str(word) for word in [*words, "--max_steps", 2, *more]])


def rows_of(path):
    with path.open(encoding="utf-8", newline="") as stream:
        return list(csv.reader(stream))


@pytest.fixture(scope="module")
def multi_label(tiny_bert, tmp_path_factory):
    """A run with labels a, b and c, with a threshold of its own."""
    folder = tmp_path_factory.mktemp("multi")
    given = ["a", "a;b", "", "a;c"] * 5
    lines = [f"{text},{labels}" for text, labels in zip(LINES, given)]
    (folder / "train.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    (folder / "test.csv").write_text("\n".join(["text", *LINES]) + "\n")
    more = ["--label_separator", ";", "--threshold", 0.3, "--test_file", folder / "test.csv", "--learning_rate", 0]
    train(tiny_bert, folder, folder / "out", *more)
    return folder


def test_predict_says_what_the_run_has_said(multi_label, tmp_path):
    output = tmp_path / "predictions.csv"
    predict.main([str(multi_label / "out"), "--file", str(multi_label / "test.csv"), "--output", str(output)])
    ours, theirs = rows_of(output), rows_of(multi_label / "out" / "predictions.csv")
    assert [row[0] for row in ours] == [row[0] for row in theirs]
    assert any("a" in row[0] for row in ours[1:])  # likelier than 0.3, not than 0.9


def test_a_fresh_multi_label_head_starts_at_the_base_rates(multi_label):
    """At learning rate 0: a stands in 15 of 20 rows, b in 5, c in 5; (count + 0.5) / (rows + 1)."""
    from safetensors.torch import load_file

    bias = load_file(multi_label / "out" / "model.safetensors")["classifier.bias"].numpy()
    rates = np.array([15.5 / 21, 5.5 / 21, 5.5 / 21])
    assert bias == pytest.approx(np.log(rates / (1 - rates)), rel=1e-5)


def test_a_fresh_regression_head_starts_at_the_mean(tiny_bert, tmp_path):
    from safetensors.torch import load_file

    scores = [i / 4 for i in range(20)]
    lines = [f"{text},{score}" for text, score in zip(LINES, scores)]
    (tmp_path / "train.csv").write_text("\n".join(["text,score", *lines]) + "\n")
    train(tiny_bert, tmp_path, tmp_path / "out", "--learning_rate", 0)
    bias = load_file(tmp_path / "out" / "model.safetensors")["classifier.bias"]
    assert bias.item() == pytest.approx(math.fsum(scores) / 20, rel=1e-5)


def test_a_model_of_pairs_is_not_asked_about_single_texts(tiny_bert, tmp_path, capsys):
    lines = [f"{a},{b},{('same', 'other')[i % 2]}" for i, (a, b) in enumerate(zip(LINES, reversed(LINES)))]
    (tmp_path / "train.csv").write_text("\n".join(["sentence1,sentence2,label", *lines]) + "\n")
    train(tiny_bert, tmp_path, tmp_path / "out")
    assert "--text_pair" in capsys.readouterr().err.splitlines()[-1]
    with pytest.raises(UserError, match="trained on pairs of texts: add --text_pair"):
        predict.main([str(tmp_path / "out"), "--text", "a good film"])
    assert predict.main([str(tmp_path / "out"), "--text", "a good film", "--text_pair", "a bad film"]) == 0


def test_a_model_of_single_texts_is_not_asked_about_pairs(multi_label):
    with pytest.raises(UserError, match="trained on single texts"):
        predict.main([str(multi_label / "out"), "--text", "a good film", "--text_pair", "a bad film"])


@pytest.mark.parametrize("more", [[], ["--use_peft"], ["--use_peft", "--merge_adapter"]], ids=" ".join)
@pytest.mark.parametrize("umask", [0o022, 0o007])
def test_files_have_the_modes_that_the_umask_gives(tiny_bert, tmp_path, monkeypatch, more, umask):
    (tmp_path / "train.csv").write_text("text,label\na good film,pos\na bad film,neg\n")
    monkeypatch.setattr("toolkit.report.results.UMASK", umask)
    before = os.umask(umask)
    try:
        train(tiny_bert, tmp_path, tmp_path / "out", "--save_strategy", "steps", "--save_steps", 1, *more)
    finally:
        os.umask(before)
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert any(path.suffix == ".safetensors" for path in files)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {
        path.name: oct(0o666 & ~umask) for path in files
    }


def test_the_model_is_saved_before_the_final_evaluation_can_fail(tiny_classifier, tmp_path, monkeypatch):
    from toolkit import fit

    monkeypatch.setattr(fit.Evaluation, "run", lambda self, split: (_ for _ in ()).throw(UserError("no figures")))
    lines = [f"{text},{('neg', 'pos')[i % 2]}" for i, text in enumerate(LINES)]
    for name in ("train.csv", "dev.csv"):
        (tmp_path / name).write_text("\n".join(["text,label", *lines]) + "\n")
    with pytest.raises(UserError, match="no figures"):
        more = ["--validation_file", tmp_path / "dev.csv", "--eval_strategy", "no"]
        train(tiny_classifier, tmp_path, tmp_path / "out", *more)
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert json.loads((tmp_path / "out" / "run.json").read_text())["status"] == "failed"
