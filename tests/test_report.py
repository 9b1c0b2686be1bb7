"""Result files, progress, plots and the model card."""

import errno
import json
import math
import os
import re
import subprocess
import sys

import numpy as np
import pytest

from toolkit.errors import UserError
from toolkit.report import results
from toolkit.report.card import model_card
from toolkit.report.plots import training_plot
from toolkit.report.progress import Progress, duration


def _strict(text: str):
    """JSON by the letter: Python's own reader takes NaN and Infinity."""

    def refuse(word):
        raise ValueError(word)

    return json.loads(text, parse_constant=refuse)


def test_json_is_strict_and_keeps_precision(tmp_path):
    path = tmp_path / "all_results.json"
    loss = 0.1 + 0.2
    results.write_json(
        path,
        {
            "loss": loss,
            "nan": math.nan,
            "perplexity": math.inf,
            "numpy": np.float32(0.5),
            "array": np.array([1, 2]),
            "nested": [{"x": -math.inf}],
            "folder": tmp_path,
            "text": "naïve 字",
            3: True,
        },
    )
    read = _strict(path.read_text(encoding="utf-8"))
    assert read["loss"] == loss
    assert read["nan"] is None
    assert float(read["perplexity"]) == math.inf
    assert float(read["nested"][0]["x"]) == -math.inf
    assert (read["numpy"], read["array"], read["text"], read["3"]) == (0.5, [1, 2], "naïve 字", True)
    assert os.listdir(tmp_path) == ["all_results.json"]


def test_errors_of_the_system_as_libraries_in_rust_say_them(tmp_path):
    """As the library tokenizers does; what is no such error stays what it is."""
    with pytest.raises(OSError, match="No space left on device") as error, results.libraries_write(tmp_path):
        raise Exception("No space left on device (os error 28)")
    assert error.value.errno == errno.ENOSPC
    with pytest.raises(ZeroDivisionError), results.libraries_write(tmp_path):
        raise ZeroDivisionError


@pytest.mark.parametrize("name", ["training.png", "README.md", "a.csv"])
def test_no_kind_of_result_is_written_by_half(name, tmp_path, monkeypatch):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0, "learning_rate": 0.1}\n')
    write = {
        "training.png": lambda path: training_plot(tmp_path / "metrics.jsonl", path),
        "README.md": lambda path: model_card(path, {"name": "mine"}),
        "a.csv": lambda path: results.write_text(path, "a"),
    }[name]
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(results.os, "replace", lambda *_: (_ for _ in ()).throw(full))
    with pytest.raises(UserError, match=f"{name} cannot be written to {tmp_path}: No space left on device"):
        write(tmp_path / name)
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    results.write_json(path, {"old": 1})
    monkeypatch.setattr(results.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(UserError, match=rf"run.json cannot be written to {tmp_path}: disk full. Make room"):
        results.write_json(path, {"new": 2})
    assert _strict(path.read_text()) == {"old": 1}
    assert os.listdir(tmp_path) == ["run.json"]


def test_metrics_log_is_readable_while_it_is_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with results.MetricsLog(path) as log:
        log.write(step=1, loss=1 / 3, grad_norm=math.nan)
        (line,) = path.read_text().splitlines()
        assert _strict(line) == {"step": 1, "loss": 1 / 3, "grad_norm": None}
        log.write(step=2, eval_loss=math.inf)
    with path.open("a") as file:
        file.write('{"step": 3, "lo')  # killed here
    assert [row["step"] for row in results.read_metrics(path)] == [1, 2]


def test_claim_makes_a_folder_and_takes_an_empty_one(tmp_path):
    results.claim_output(tmp_path / "a" / "b", overwrite=False)
    (tmp_path / "a" / "b" / ".gitignore").touch()
    results.claim_output(tmp_path / "a" / "b", overwrite=False)
    assert (tmp_path / "a" / "b").is_dir()


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "model.safetensors", "thesis.docx"])
def test_claim_refuses_a_folder_with_files(tmp_path, name):
    (tmp_path / name).write_text("precious")
    with pytest.raises(UserError, match=rf"{name}.*--output_dir, or --overwrite_output_dir"):
        results.claim_output(tmp_path, overwrite=False)
    assert (tmp_path / name).read_text() == "precious"


def test_overwrite_removes_only_results(tmp_path):
    ours = ["run.json", "model.safetensors", "model-00001-of-00002.safetensors", "README.md", "predictions.csv"]
    foreign = ["notes.txt", "thesis.docx", "train.csv"]
    for name in ours + foreign:
        (tmp_path / name).write_text(name)
    (tmp_path / "checkpoint-5").mkdir()
    results.claim_output(tmp_path, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == sorted([*foreign, "checkpoint-5"])


def test_overwrite_spares_a_model_that_no_run_wrote(tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_text(name)
    with pytest.raises(UserError, match=r"config\.json, model\.safetensors.*no run of this toolkit"):
        results.claim_output(tmp_path, overwrite=True)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


def test_claim_of_a_file_or_below_a_file(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="--output_dir"):
            results.claim_output(path, overwrite=True)


def test_plain_progress_lines(capsys):
    with Progress(25, 10) as progress:
        for step in range(1, 26):
            progress.update(step, 1.2341, 4.8e-5, 2.3, 71.4)
            if step == 3:
                progress.say("evaluated")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "evaluated"
    assert [line.split()[1] for line in lines[1:]] == ["10/25", "20/25", "25/25"]
    expected = r"step 10/25  loss 1\.234  lr 4\.8e-05  grad norm 2\.3  71 samples/s  \d+:\d\d left"
    assert re.fullmatch(expected, lines[1])


def test_other_ranks_are_silent(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with Progress(2, 1) as progress:
        progress.update(1, 1.0, 1e-4, 1.0, 1.0)
        progress.say("evaluated")
    captured = capsys.readouterr()
    assert captured.out + captured.err == ""


def test_time_left(monkeypatch, capsys):
    clock = iter([100.0, 102.0, 104.0])
    monkeypatch.setattr("toolkit.report.progress.time.monotonic", lambda: next(clock))
    progress = Progress(33, 1)
    for step in (1, 2, 3):
        progress.update(step, 1.0, 1e-4, 1.0, 1.0)
    assert capsys.readouterr().err.splitlines()[-1].endswith("  1:00 left")  # 30 steps of 2 s
    assert [duration(seconds) for seconds in (5, 83, 3600)] == ["0:05", "1:23", "1:00:00"]


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
def test_bar_on_a_terminal():
    """On a real (pseudo-)terminal: one bar, and said and warned lines stay whole above it."""
    code = (
        "from toolkit.report.progress import Progress\n"
        "from toolkit.report.console import warn\n"
        "with Progress(3, 1, unit='tokens') as progress:\n"
        "    for step in (1, 2, 3):\n"
        "        progress.update(step, 0.5, 1e-4, 1.0, 1234.0)\n"
        "    progress.say('evaluated [bold] 1')\n"
        "    warn('careful')\n"
    )
    master, slave = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "RANK": "0"}
    run = subprocess.Popen([sys.executable, "-c", code], stderr=slave, env=environment)
    os.close(slave)
    shown = b""
    while True:
        try:
            part = os.read(master, 65536)
        except OSError:  # Linux's way to say that the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(master)
    assert run.wait() == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.decode())
    assert "3/3" in text
    assert "loss 0.5" in text
    assert "1,234 tokens/s" in text
    lines = [line.strip() for line in re.split(r"[\r\n]+", text)]
    assert "evaluated [bold] 1" in lines
    assert "warning: careful" in lines


def test_training_plot(tmp_path):
    from PIL import Image

    with results.MetricsLog(tmp_path / "metrics.jsonl") as log:
        for step in range(1, 101):
            loss = math.nan if step == 50 else 2 / step
            log.write(step=step, loss=loss, learning_rate=5e-5 * (1 - step / 100))
            if step % 25 == 0:
                log.write(step=step, eval_loss=1 / step, eval_accuracy=0.5)
    training_plot(tmp_path / "metrics.jsonl", tmp_path / "training.png")
    with Image.open(tmp_path / "training.png") as picture:
        assert picture.format == "PNG"
        assert picture.size == (1200, 750)


def test_training_plot_of_a_run_without_steps(tmp_path):
    (tmp_path / "metrics.jsonl").touch()
    training_plot(tmp_path / "metrics.jsonl", tmp_path / "training.png")
    assert (tmp_path / "training.png").stat().st_size > 0


def test_model_card(tmp_path):
    import yaml

    path = tmp_path / "README.md"
    facts = {
        "name": "output/classify",
        "base_model": "sentence-transformers/all-MiniLM-L6-v2",
        "data": "train.csv, 6,920 rows",
        "labels": ["neg", "pos"],
        "results": {"accuracy": 0.88, "mcc": 0.75, "perplexity": None},
        "settings": {"learning_rate": 5e-5},
        "versions": {"torch": "2.13.0"},
    }
    model_card(path, facts)
    _, front, body = path.read_text(encoding="utf-8").split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "base_model": "sentence-transformers/all-MiniLM-L6-v2",
        "tags": ["accelerate", "text-classification"],
        "metrics": ["accuracy", "matthews_correlation"],
    }
    assert "| accuracy | 0.8800 |" in body
    assert 'AutoModelForSequenceClassification.from_pretrained("output/classify")' in body
    assert "| learning_rate | `5e-05` |" in body
    assert "Labels: `neg`, `pos`." in body


def test_model_card_keeps_a_local_path_to_itself(tmp_path):
    path = tmp_path / "README.md"
    model_card(path, {"name": "m", "base_model": str(tmp_path / "base"), "pipeline_tag": "text-generation"})
    text = path.read_text(encoding="utf-8")
    assert "base_model:" not in text
    assert str(tmp_path) not in text
    assert "Fine-tuned from `base`" in text
    assert "AutoModelForCausalLM" in text
