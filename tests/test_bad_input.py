"""What people get wrong, from flags to a result: a paragraph each, all at once, and nothing is touched."""

import csv
import errno
import json
import os
import sys
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from tests.runs import ROOT, run, run_here
from toolkit.cli import main as toolkit
from toolkit.errors import UserError
from toolkit.report.results import MetricsLog

ROWS = ["a good film,pos", "a bad film,neg", "the best of times,pos", "the worst of times,neg"]


@pytest.fixture
def folder(tmp_path, monkeypatch, tiny_classifier):
    """A working folder with good files; the model lies elsewhere."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    write("train.csv", "text,label", *ROWS)
    write("dev.csv", "text,label", *ROWS[:2])
    return tmp_path


def write(name, *lines, encoding="utf-8"):
    Path(name).write_bytes("".join(f"{line}\n" for line in lines).encode(encoding))


def contents(folder):
    """All that is in a folder: names, and bytes of files."""
    return {path: path.read_bytes() if path.is_file() else None for path in sorted(Path(folder).rglob("*"))}


def train(model, *flags, train="train.csv", dev="dev.csv"):
    words = ["--model_name_or_path", str(model), "--train_file", train, "--max_steps", "1", "--output_dir", "out"]
    return run_here([*words, *(["--validation_file", dev] if dev else []), *flags])


def refused(model, folder, *flags, **files):
    """The messages of a run that must not start, and must leave everything as it was."""
    before = contents(folder)
    with pytest.raises(UserError) as caught:
        train(model, *flags, **files)
    assert contents(folder) == before
    assert not any("\n" in message for message in caught.value.messages)
    return caught.value.messages


LONE = {"dev": None}
FAULTS = {
    "a missing file": ([], ["other,kind"], {"train": "trian.csv"}, ["trian.csv: no such file", "`train.csv`?"]),
    "an empty file": ([], [], LONE, ["bad.csv: the file is empty"]),
    "only a header": ([], ["text,label"], LONE, ["bad.csv: a header line, but no rows"]),
    "one row": ([], ["text,label", ROWS[0]], LONE, ["bad.csv: every training row has the one class 'pos'"]),
    "one class": ([], ["text,label", "a,pos", "b,pos"], LONE, ["the one class 'pos', so there is nothing to learn"]),
    "no label column": ([], ["text,kind", *ROWS], LONE, ["bad.csv has no label column", "--label_column_name"]),
    "a label column that is absent": (["--label_column_name", "lable"], ["text,label", *ROWS], LONE, ["`label`?"]),
    "a text column that is absent": (["--text_column_names", "txet"], ["text,label", *ROWS], LONE, ["`text`?"]),
    "empty texts": ([], ["text,label", *ROWS, ",pos", "  ,neg"], LONE, ["bad.csv:6, bad.csv:7", "--empty_text drop"]),
    "no label": ([], ["text,label", *ROWS, "a,"], LONE, ["bad.csv:6: no label in column `label`"]),
    "NaN to predict": (
        ["--problem_type", "regression"],
        ["text,label", "a,1.5", "b,nan", "c,inf"],
        LONE,
        ["bad.csv:3, bad.csv:4", "finite number"],
    ),
    "another delimiter than said": (
        ["--delimiter", ","],
        ["text;label", "a;pos"],
        LONE,
        ["bad.csv:1", "add --delimiter ';'"],
    ),
    "rows of another width": (
        [],
        ["text,label", *ROWS, "a,b,pos"],
        LONE,
        ["bad.csv: 2 fields expected", "line 6 has 3"],
    ),
    "a class only in validation": (
        [],
        ["text,label", "a,great"],
        {"train": "train.csv", "dev": "bad.csv"},
        ["'great' (first at bad.csv:2)", "Training knows 'neg', 'pos'"],
    ),
    "one row to hold out of": (
        ["--validation_split_percentage", "10"],
        ["text,label", ROWS[0]],
        LONE,
        ["bad.csv has one row"],
    ),
    "a number out of range": (
        ["--learning_rate", "nan"],
        ["text,label"],
        {"train": "train.csv"},
        ["--learning_rate nan"],
    ),
    "a tracker that is not there": (
        ["--report_to", "wandb"],
        ["text,label"],
        {"train": "train.csv"},
        ["the package wandb is not installed"],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_placed(folder, tiny_classifier, monkeypatch, fault):
    if fault == "a tracker that is not there":
        monkeypatch.setitem(sys.modules, "wandb", None)
    flags, lines, files, parts = FAULTS[fault]
    write("bad.csv", *lines)
    (message,) = refused(tiny_classifier, folder, *flags, **{"train": "bad.csv", **files})
    for part in parts:
        assert part in message


@pytest.mark.parametrize("task", ["classify", "language_modeling"])
@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--metric_for_best_model", "nonsense"], ["nonsense: an evaluation has loss, "]),
        (["--metric_for_best_model", "eval_losss"], ["Did you mean `loss`?"]),
        (["--early_stopping_patience", "1", "--eval_strategy", "epoch"], ["no labelled validation data"]),
    ],
)
def test_a_best_that_cannot_be_told_is_refused_before_the_model_is_loaded(
    folder, tiny_classifier, monkeypatch, task, flags, said
):
    for name in ("classification", "language"):
        monkeypatch.setattr(f"toolkit.{name}.task.load_model", lambda *_, **__: pytest.fail("the model is loaded"))
    words = ["--train_file", "train.csv", "--max_steps", "1", "--output_dir", "out", *flags]
    if task == "language_modeling":
        words += ["--text_column_names", "text", "--objective", "masked"]
    with pytest.raises(UserError) as caught:
        run_here(["--model_name_or_path", str(tiny_classifier), *words], task=task)
    (message,) = caught.value.messages
    assert all(part in message for part in said)


def test_files_that_are_no_tables(folder, tiny_classifier):
    Path("latin.csv").write_bytes("text,label\ncafé,pos\n".encode("latin-1"))
    Path("broken.parquet").write_bytes(b"PAR1")
    Path("broken.jsonl").write_text('{"text": "a", "label": "pos"}\n{"text": \n')
    Path("half.jsonl").write_text('{"text": "a", "label": "x"}\n{"text": "\\ud83d", "label": "y"}\n')
    for name, part in [
        ("latin.csv", "latin.csv:2: not UTF-8"),
        ("broken.parquet", "broken.parquet: not readable as Parquet"),
        ("broken.jsonl", "broken.jsonl:2: not valid JSON"),
        ("half.jsonl", "half.jsonl:2: column `text` holds half a surrogate pair"),
        (".", ".: a folder"),
    ]:
        (message,) = refused(tiny_classifier, folder, train=name, dev=None)
        assert part in message


def test_several_mistakes_are_shown_together(folder, tiny_classifier):
    flags = ["--max_steps", "0", "--eval_steps", "5", "--data_parallel_replicas", "0", "--hub_model_id", "x"]
    messages = refused(tiny_classifier, folder, *flags)
    for part in ("--max_steps 0", "--eval_steps", "--data_parallel_replicas 0", "--hub_model_id"):
        assert any(message.startswith(part) for message in messages), part
    write("bad.csv", "text,label")
    messages = refused(tiny_classifier, folder, train="nowhere.csv", dev="bad.csv")
    assert [message.split(":")[0] for message in messages] == ["nowhere.csv", "bad.csv"]


def test_models_that_are_none(folder):
    Path("empty").mkdir()
    Path("broken").mkdir()
    Path("broken/config.json").write_text("{")
    for name, part in [
        ("./nowhere", "--model_name_or_path ./nowhere: no such folder"),
        ("no-such-model", "it is no folder here"),
        ("empty", "the config of empty cannot be loaded"),
        ("broken", "the config of broken cannot be loaded"),
    ]:
        (message,) = refused(name, folder)
        assert part.lower() in message.lower()


def test_a_model_whose_own_code_cannot_be_trained(folder, tiny_classifier):
    """Such as an attention without a backward pass on this device."""
    (message,) = refused(tiny_classifier, folder, "--attn_implementation", "flex_attention")
    assert "BertForSequenceClassification fails on its first batch, with NotImplementedError at " in message
    assert "flex_attention.py:" in message and message.endswith(
        " Check the model's config.json and --attn_implementation."
    )


def test_an_output_folder_with_something_in_it(folder, tiny_classifier):
    Path("out").mkdir()
    write("out/notes.txt", "mine")
    assert "files that are not of a run" in refused(tiny_classifier, folder)[0]
    write("out/config.json", "{}")
    assert "no run of this toolkit wrote them" in refused(tiny_classifier, folder, "--overwrite_output_dir")[0]
    Path("out/config.json").unlink()
    Path("out/notes.txt").unlink()

    train(tiny_classifier)
    assert "the results of another run" in refused(tiny_classifier, folder)[0]
    # A mistake in the next run does not cost the results of this one, even where they may be replaced.
    write("bad.csv", "text,label", "a,pos")
    refused(tiny_classifier, folder, "--overwrite_output_dir", train="bad.csv", dev=None)
    write("out/notes.txt", "mine")
    train(tiny_classifier, "--overwrite_output_dir", "--seed", "7")
    assert json.loads(Path("out/run.json").read_text())["flags"]["seed"] == 7
    assert Path("out/notes.txt").read_text() == "mine\n"

    Path("file").write_text("")
    assert "file is a file" in refused(tiny_classifier, folder, "--output_dir", "file")[0]


def test_a_run_that_diverges_keeps_its_log(folder, tiny_classifier):
    with pytest.raises(UserError, match="lower --learning_rate"):
        train(tiny_classifier, "--learning_rate", "1e30", "--max_steps", "3")
    assert json.loads(Path("out/run.json").read_text())["status"] == "failed"
    assert len(Path("out/metrics.jsonl").read_text().splitlines()) >= 1
    assert not Path("out/model.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "saved"),
    [
        ("metrics.jsonl", "checkpoint-2, run.json, metrics.jsonl"),
        ("the model", "checkpoint-2, run.json, metrics.jsonl"),
        ("eval_results.json", "the model, run.json, metrics.jsonl, train_results.json, eval_report.json"),
        ("predictions.csv", "all_results.json"),
        ("README.md", "predictions.csv"),
        ("run.json", "README.md"),
    ],
)
def test_a_full_disk_is_a_paragraph_that_says_what_is_saved(folder, tiny_classifier, monkeypatch, name, saved):
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    replace, write_line, save = os.replace, MetricsLog.write, PreTrainedTokenizerBase.save_pretrained

    def replace_until_full(source, target):
        if Path(target).name == name and Path("out/README.md" if name == "run.json" else "out/checkpoint-2").exists():
            raise full
        replace(source, target)

    def write_until_full(log, **row):
        if name == "metrics.jsonl" and row["step"] == 3:
            log._file.close()
            log._file = open("/dev/full", "a", buffering=1)  # noqa: SIM115
        write_line(log, **row)

    def save_until_full(tokenizer, target, **how):
        if name == "the model" and target == Path("out"):
            raise Exception("No space left on device (os error 28)")  # as the library tokenizers says it
        return save(tokenizer, target, **how)

    monkeypatch.setattr("toolkit.report.results.os.replace", replace_until_full)
    monkeypatch.setattr(MetricsLog, "write", write_until_full)
    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", save_until_full)
    write("test.csv", "text", "a good film")
    words = ["--max_steps", "4", "--save_strategy", "steps", "--save_steps", "2"]
    with pytest.raises(UserError) as caught:
        train(tiny_classifier, *words, "--test_file", "test.csv")
    (message,) = caught.value.messages
    assert message.startswith(f"{name} cannot be written to out: No space left on device. Saved there already: check")
    assert saved in message and message.endswith("by the same command with --resume_from_checkpoint auto.")
    assert "\n" not in message


def test_a_full_disk_before_the_first_checkpoint(folder, tiny_classifier, monkeypatch):
    def save(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(PreTrainedTokenizerBase, "save_pretrained", save)
    with pytest.raises(
        UserError, match=r"the model cannot be written.*: run.json, metrics.jsonl.*--overwrite_output_dir"
    ):
        train(tiny_classifier)
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    train(tiny_classifier, "--overwrite_output_dir")


TREATED = {
    # What is wrong: file, flags, rows that are trained on, what is said.
    "a byte order mark": (["\ufefftext,label", *ROWS], [], 4, "labels: 2 classes: neg 2"),
    "semicolons": (["text;label", "a, b;pos", "c;neg"], [], 2, "labels: 2 classes"),
    "tabs": (["text\tlabel", "a, b\tpos", "c\tneg"], [], 2, "labels: 2 classes"),
    "empty texts, dropped": (
        ["text,label", *ROWS, ",pos"],
        ["--empty_text", "drop"],
        4,
        "1 of 5 rows have no text in `text` and are left out: bad.csv:6",
    ),
    "empty texts, kept": (["text,label", *ROWS, ",pos"], ["--empty_text", "keep"], 5, "pos 3"),
    "a text longer than the model": (
        ["text,label", ROWS[0], " ".join(["good"] * 500) + ",neg"],
        [],
        2,
        "train: 1 of 2 texts are cut at 64 tokens",
    ),
    "a text column of no usual name": (["label,comment", "pos,a", "neg,b"], [], 2, "texts: column `comment`"),
    "a pair of usual names": (
        ["premise,hypothesis,label", "a,b,pos", "c,d,neg"],
        [],
        2,
        "texts: columns `premise` and `hypothesis`",
    ),
    "a length beyond the model": (
        ["text,label", *ROWS],
        ["--max_length", "512"],
        4,
        "--max_length 512 is more than the model has positions for: 64 is used",
    ),
}


@pytest.mark.parametrize("fault", TREATED)
def test_what_is_put_right_is_said(folder, tiny_classifier, capfd, fault):
    lines, flags, rows, said = TREATED[fault]
    write("bad.csv", *lines)
    train(tiny_classifier, *flags, train="bad.csv", dev="bad.csv")
    assert said in capfd.readouterr().err
    assert json.loads(Path("out/run.json").read_text())["samples"]["train"] == rows


def test_validation_of_no_row_and_of_one(folder, tiny_classifier, capfd):
    train(tiny_classifier, dev=None)
    assert "warning: there is no validation data" in capfd.readouterr().err
    assert not Path("out/eval_results.json").exists()
    write("one.csv", "text,label", ROWS[0])
    train(tiny_classifier, "--overwrite_output_dir", dev="one.csv")
    assert json.loads(Path("out/eval_results.json").read_text())["eval_samples"] == 1


def test_a_test_file_without_labels(folder, tiny_classifier):
    write("test.csv", "text", "a good film", "one of the worst", "one of the best")
    train(tiny_classifier, "--test_file", "test.csv")
    lines = Path("out/predictions.csv").read_text().splitlines()
    assert lines[0].startswith("prediction,") and len(lines) == 4
    assert "test_accuracy" not in json.loads(Path("out/all_results.json").read_text())


def test_flags_and_recipe_through_the_script(folder, tiny_classifier):
    write("recipe.yaml", "learning_rat: 1", "max_steps: many", f"model_name_or_path: {tiny_classifier}")
    before = contents(folder)
    result = run([sys.executable, str(ROOT / "tasks/classify.py"), str(folder / "recipe.yaml"), "--train_flie", "x"])
    errors = [line for line in result.stderr.splitlines() if line]
    assert result.returncode == 1 and all(line.startswith("error: ") for line in errors)
    for part in ("unknown key `learning_rat`. Did you mean `learning_rate`?", "--max_steps 'many'", "`--train_file`?"):
        assert any(part in line for line in errors), part
    assert contents(folder) == before


def test_characters_of_all_kinds_in_the_c_locale(folder, tiny_bert):
    """H09: names of files to read, labels and texts survive where the locale knows only ASCII."""
    rows = ["a family 👨‍👩‍👧‍👦;👍", "e\u0301 combined;👎", "\u05e9\u05dc\u05d5\u05dd to the right;👍", "a \0 zero;👎"]
    write("données.csv", "\ufefftext;label", *rows)
    write("essai.csv", "text", "👩‍🚀 in space", "\0", "\u0645\u0631\u062d\u0628\u0627")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    files = ["--train_file", f"{folder}/données.csv", "--test_file", f"{folder}/essai.csv"]
    flags = ["--model_name_or_path", str(tiny_bert), *files, "--max_steps", "1", "--output_dir"]
    refusal = run([sys.executable, str(ROOT / "tasks/classify.py"), *flags, f"{folder}/sortie é"], **locale)
    assert "this locale cannot write such a name" in refusal.stderr and "Traceback" not in refusal.stderr
    flags.append(f"{folder}/sortie")
    result = run([sys.executable, str(ROOT / "tasks/classify.py"), *flags], **locale)
    assert result.returncode == 0, result.stderr
    assert "Traceback" not in result.stderr
    out = folder / "sortie"
    with (out / "predictions.csv").open(encoding="utf-8", newline="") as file:
        header, *lines = csv.reader(file)
    assert header == ["prediction", "probability_👍", "probability_👎"]
    assert len(lines) == 3 and {line[0] for line in lines} <= {"👍", "👎"}
    assert sorted(json.loads((out / "config.json").read_text(encoding="utf-8"))["label2id"]) == ["👍", "👎"]
    words = ["predict", str(out), "--file", f"{folder}/essai.csv", "--output", f"{folder}/encore.csv"]
    result = run([sys.executable, "-m", "toolkit.cli", *words], **locale)
    assert result.returncode == 0, result.stderr
    assert (folder / "encore.csv").read_bytes() == (out / "predictions.csv").read_bytes()


def test_toolkit_check_on_what_is_no_config(folder, capsys):
    write("empty.yaml")
    write("list.yaml", "- a")
    write("tab.yaml", "a:", "\t- b: [")
    Path("bytes.yaml").write_bytes(bytes(range(256)))
    for name, part in [
        ("empty.yaml", "found nothing"),
        ("list.yaml", "found a list"),
        ("tab.yaml", "tab.yaml:2: not valid yaml"),
        ("bytes.yaml", "not a text file"),
        (str(folder), "a folder; name a yaml file in it"),
        ("nowhere.yaml", "no such file"),
        ("multi_gup", "`multi_gpu`?"),
    ]:
        assert toolkit(["check", name]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and part in error and error.count("\n") == 1


def test_toolkit_predict_on_odd_input(folder, tiny_classifier, capsys):
    write("rows.csv", "text", "a good film")
    write("none.csv", "text")
    Path("taken.csv").write_text("mine")
    model, before = str(tiny_classifier), contents(folder)
    for words, part in [
        (["./nowhere", "--text", "a"], "no such folder"),
        ([str(folder), "--text", "a"], "no config.json"),
        ([model, "--text", " \n"], "--text is empty"),
        ([model, "--text", "a \ud83d"], "half a character"),
        ([model, "--text", "a", "--max_length", "0"], "--max_length 0"),
        ([model, "--text", "a", "--threshold", "9"], "--threshold 9.0"),
        ([model, "--file", "none.csv"], "no rows"),
        ([model, "--file", "row.csv"], "`rows.csv`?"),
        ([model, "--file", "rows.csv", "--output", "taken.csv"], "is left alone"),
        ([model, "--file", "rows.csv", "--output", str(folder)], "is a folder"),
        ([model, "--file", "rows.csv", "--output", "no/where.csv"], "does not exist"),
        ([model, "--file", "rows.csv", "--text_column_names", "txet"], "`text`?"),
    ]:
        assert toolkit(["predict", *words]) == 2, words
        error = capsys.readouterr().err
        assert error.startswith("error: ") and part in error and error.count("\n") == 1, error
    assert contents(folder) == before
