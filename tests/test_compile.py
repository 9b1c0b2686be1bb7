"""--torch_compile: the same training, to the tolerance of the compiler; refused where it cannot be."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.runs import read_rows, run_here, run_launched
from tests.test_language_parity import BLOCK, flags, save_llama
from tests.tiny import save_tiny_bert, write_csv
from toolkit.launch.strategies import compiled

TOLERANCE = 1e-4  # relative, fp32


def classify(folder, out, *more):
    given = {"model_name_or_path": folder / "bert", "train_file": folder / "train.csv", "output_dir": out}
    given |= {"max_steps": 4, "global_batch_size": 6, "per_device_train_batch_size": 2, "seed": 7}
    return [str(word) for name, value in given.items() for word in (f"--{name}", value)] + list(more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models of one block: each kind of block is compiled once, but that takes long."""
    folder = tmp_path_factory.mktemp("compile")
    save_llama(folder / "llama", num_hidden_layers=1)
    save_tiny_bert(folder / "bert", num_hidden_layers=1)
    write_csv(folder / "train.csv", 30)
    draw = np.random.RandomState(5)
    documents = ["".join(draw.choice(list("abcdefgh"), draw.randint(3, 59))) for _ in range(40)]
    (folder / "train.txt").write_text("\n\n".join(documents) + "\n")
    return folder


def test_the_same_losses_in_one_process_and_two(folder):
    text = lambda name, *more: flags(folder / "llama", folder / "train.txt", folder / name, BLOCK, *more)  # noqa: E731
    expected = run_here(text("plain"), task="language_modeling")
    run_here(text("one", "--torch_compile"), task="language_modeling")
    run_launched([{"flags": text("two", "--torch_compile"), "task": "language_modeling"}], 2, folder)
    for name in ("one", "two"):
        rows = read_rows(folder / name)
        for key in ("loss", "grad_norm"):
            assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected], rel=TOLERANCE)


def test_a_classifier_and_names_of_parameters(folder):
    from safetensors.torch import load_file

    expected = run_here(classify(folder, folder / "lines"))
    rows = run_here(classify(folder, folder / "compiled lines", "--torch_compile"))
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], rel=TOLERANCE)
    left, right = (load_file(folder / name / "model.safetensors") for name in ("lines", "compiled lines"))
    assert left.keys() == right.keys()


def test_what_cannot_be_compiled_is_refused(monkeypatch):
    args = SimpleNamespace(torch_compile=True, pipeline_stages=1, data_parallel=False)
    assert compiled(args, "MULTI_GPU") == compiled(args, "NO") == []
    assert "not with distributed_type: FSDP" in compiled(args, "FSDP")[0]
    assert "not with --pipeline_stages" in compiled(SimpleNamespace(**{**vars(args), "pipeline_stages": 2}), "NO")[0]
    monkeypatch.setenv("PATH", "")
    assert "needs the C++ compiler" in compiled(args, "NO")[0]
    assert compiled(SimpleNamespace(**{**vars(args), "torch_compile": False}), "DEEPSPEED") == []
