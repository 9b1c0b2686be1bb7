"""`toolkit predict` on tiny classifiers: names, order, limits, and what it refuses."""

import csv
import json

import numpy as np
import pytest

from tests.tiny import LINES, save_tokenizer
from toolkit import predict
from toolkit.errors import UserError


def _classifier(folder, labels, problem_type=None, **settings):
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    tokenizer = save_tokenizer(folder)
    config = BertConfig(
        vocab_size=len(tokenizer),
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=64,
        initializer_range=0.5,
        id2label=dict(enumerate(labels)),
        label2id={label: index for index, label in enumerate(labels)},
        problem_type=problem_type,
        **settings,
    )
    torch.manual_seed(1)
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(folder)
    return model, tokenizer


def _one_by_one(model, tokenizer, texts):
    """Logits of each text alone: no batch, no padding, no order to get wrong."""
    import torch

    with torch.no_grad():
        return np.stack([model(**tokenizer(text, return_tensors="pt")).logits[0].numpy() for text in texts])


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    folder = tmp_path_factory.mktemp("single")
    return folder, *_classifier(folder, ["neg", "neu", "pos"])


def _read(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


def test_a_file_is_labelled_row_by_row_in_order(single, tmp_path, capsys):
    """Lengths differ, the batch does not divide the rows, and a label column is not needed."""
    folder, model, tokenizer = single
    source, output = tmp_path / "test.csv", tmp_path / "out.csv"
    source.write_text("text\n" + "\n".join(LINES[:7]) + "\n", encoding="utf-8")
    assert predict.main([str(folder), "--file", str(source), "--output", str(output), "--batch_size", "2"]) == 0
    header, *lines = _read(output)
    assert header == ["prediction", "probability_neg", "probability_neu", "probability_pos"]
    logits = _one_by_one(model, tokenizer, LINES[:7])
    assert len(lines) == 7
    assert [line[0] for line in lines] == [["neg", "neu", "pos"][label] for label in logits.argmax(axis=1)]
    expected = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(np.array(lines)[:, 1:].astype(float), expected, atol=2e-6)
    assert "7 predictions" in capsys.readouterr().err


def test_one_row_file(single, tmp_path):
    folder, *_ = single
    (tmp_path / "one.csv").write_text("text,label\na good film,pos\n")
    output = tmp_path / "out.csv"
    predict.main([str(folder), "--file", str(tmp_path / "one.csv"), "--output", str(output)])
    assert len(_read(output)) == 2


def test_text_on_the_screen(single, capsys):
    folder, model, tokenizer = single
    logits = _one_by_one(model, tokenizer, ["a good film, with wit"])[0]
    predict.main([str(folder), "--text", "a good film, with wit"])
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == ["neg", "neu", "pos"][logits.argmax()]
    assert [line.split()[1] for line in rest] == [["neg", "neu", "pos"][at] for at in np.argsort(-logits)]


def test_pairs_are_read_as_pairs(single, tmp_path):
    import torch

    folder, model, tokenizer = single
    tokenizer_output = tokenizer("a good film", "a bad film", return_tensors="pt")
    with torch.no_grad():
        expected = model(**tokenizer_output).logits.numpy()
    loaded, its_tokenizer = predict.load(str(folder))
    np.testing.assert_allclose(
        predict.infer(loaded, its_tokenizer, [("a good film", "a bad film")]), expected, atol=1e-5
    )


def test_regression(tmp_path, capsys):
    folder = tmp_path / "model"
    model, tokenizer = _classifier(folder, ["score"])
    source, output = tmp_path / "texts.jsonl", tmp_path / "out.csv"
    source.write_text("".join(json.dumps({"text": line}) + "\n" for line in LINES[:5]))
    predict.main([str(folder), "--file", str(source), "--output", str(output), "--batch_size", "2"])
    header, *lines = _read(output)
    assert header == ["prediction"]
    expected = _one_by_one(model, tokenizer, LINES[:5])[:, 0]
    np.testing.assert_allclose([float(line[0]) for line in lines], expected, rtol=1e-4, atol=1e-5)
    predict.main([str(folder), "--text", LINES[0]])
    assert float(capsys.readouterr().out) == pytest.approx(expected[0], rel=1e-3)


def test_multi_label_threshold(tmp_path, capsys):
    folder = tmp_path / "model"
    model, tokenizer = _classifier(folder, ["joy", "fear"], "multi_label_classification")
    chances = 1 / (1 + np.exp(-_one_by_one(model, tokenizer, LINES[:1])[0]))
    for threshold, expected in ((0.0, "joy,fear"), (1.0, "(no label)")):
        predict.main([str(folder), "--text", LINES[0], "--threshold", str(threshold)])
        first, *rest = capsys.readouterr().out.splitlines()
        assert first == expected
    assert [float(line.split()[0]) for line in rest] == pytest.approx(sorted(chances)[::-1], abs=1e-3)


def test_long_texts_are_cut_at_the_models_positions(single, capsys):
    folder, *_ = single
    model, tokenizer = predict.load(str(folder))
    long = " ".join(["good"] * 200)
    logits = predict.infer(model, tokenizer, [long, "good"])
    cut = predict.infer(model, tokenizer, [" ".join(["good"] * 62)])  # 64 positions less [CLS] and [SEP]
    np.testing.assert_allclose(logits[0], cut[0], atol=1e-5)
    assert "1 of 2 texts are longer than 64 tokens" in capsys.readouterr().err


def test_decoder_pools_the_last_real_token(tmp_path):
    """GPT-2 without a padding token, and a tokenizer that pads left: batches give each text's own logits."""
    import torch
    from transformers import GPT2Config, GPT2ForSequenceClassification

    tokenizer = save_tokenizer(tmp_path)
    config = GPT2Config(vocab_size=len(tokenizer), n_positions=64, n_embd=32, n_layer=2, n_head=2, num_labels=2)
    torch.manual_seed(2)
    alone = GPT2ForSequenceClassification(config).eval()
    alone.save_pretrained(tmp_path)
    expected = []
    for text in LINES[:4]:
        encoded = torch.tensor(tokenizer(text)["input_ids"])[None]
        with torch.no_grad():
            hidden = alone.transformer(encoded).last_hidden_state[0, -1]
            expected.append(alone.score(hidden).numpy())
    model, tokenizer = predict.load(str(tmp_path))
    tokenizer.padding_side = "left"
    np.testing.assert_allclose(predict.infer(model, tokenizer, LINES[:4], 4), np.stack(expected), atol=1e-5)


def test_write_predictions_puts_rows_in_order(tmp_path):
    path = tmp_path / "predictions.csv"
    logits = np.array([[0.0, 9.0], [9.0, 0.0], [0.0, 9.0]])
    names = ['a "b", c', "d\nü"]
    predict.write_predictions(path, "single_label_classification", names, logits, ids=[7, 1, 3])
    assert [line[:2] for line in _read(path)] == [
        ["row", "prediction"],
        ["1", names[0]],
        ["3", names[1]],
        ["7", names[1]],
    ]
    with pytest.raises(ValueError, match="once"):
        predict.write_predictions(path, "single_label_classification", names, logits, ids=[0, 0, 1])
    predict.write_predictions(path, "multi_label_classification", ["x", "y"], np.array([[1.0, 1], [-1, -1]]))
    assert [line[0] for line in _read(path)] == ["prediction", "x,y", ""]


def test_refusals(single, tmp_path, tiny_bert, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    folder, *_ = single
    source, output = tmp_path / "texts.csv", tmp_path / "out.csv"
    source.write_text("text\na good film\n")
    output.write_text("precious")
    (tmp_path / "empty").mkdir()
    cases = [
        ([], "say which model"),
        ([str(folder)], "either --text or --file"),
        ([str(folder), "--text", "  "], "--text is empty"),
        ([str(folder), "--text", "a", "--text", "b"], "more than once"),
        ([str(folder), "--text", "a", "--batch_size", "0"], "--batch_size"),
        ([str(folder), "--text", "a", "--treshold", "0.3"], "--threshold"),
        ([str(folder), "--file", str(source), "--output", str(output)], "exists"),
        ([str(folder), "--file", str(source), "--output", str(tmp_path / "no" / "out.csv")], "does not exist"),
        ([str(tmp_path / "absent"), "--text", "a"], "no such folder"),
        (["absent/model", "--text", "a"], "no such folder"),
        ([str(tmp_path / "empty"), "--text", "a"], "no config.json"),
        ([str(tiny_bert), "--text", "a"], "not a finished classifier"),
    ]
    for argv, message in cases:
        with pytest.raises(UserError, match=message):
            predict.main(argv)
    assert output.read_text() == "precious"
    predict.main([str(folder), "--file", str(source), "--output", str(output), "--overwrite"])
    assert len(_read(output)) == 2


def test_a_broken_model_file_is_named(single, tmp_path):
    import shutil

    folder, *_ = single
    broken = shutil.copytree(folder, tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(UserError, match="cannot be loaded as a sequence classifier"):
        predict.load(str(broken))


def test_empty_rows(single, tmp_path):
    folder, *_ = single
    source, output = tmp_path / "texts.csv", tmp_path / "out.csv"
    source.write_text('text,id\na good film,1\n"",2\na bad film,3\n')
    argv = [str(folder), "--file", str(source), "--text_column_names", "text", "--output", str(output)]
    with pytest.raises(UserError, match=r"texts\.csv:3"):
        predict.main(argv)
    assert not output.exists()
    predict.main([*argv, "--empty_text", "keep"])
    assert len(_read(output)) == 4
