"""--torch_compile: the same training, to the tolerance of the compiler; refused where it cannot be."""

from types import SimpleNamespace

import numpy as np
import pytest
from torch._dynamo.utils import counters

from tests.runs import read_rows, run_here, run_launched
from tests.test_language_parity import BLOCK, flags, save_llama
from tests.tiny import save_tiny_bert, write_csv
from toolkit.launch.strategies import compiled

TOLERANCE = 1e-4  # relative, fp32


def classify(folder, out, *more):
    given = {"model_name_or_path": folder / "bert", "train_file": folder / "train.csv", "output_dir": out}
    given |= {"max_steps": 4, "global_batch_size": 4, "per_device_train_batch_size": 2, "seed": 7}
    return [str(word) for name, value in given.items() for word in (f"--{name}", value)] + list(more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Models of one block, and two rows in every micro-batch: what is compiled once takes long enough."""
    folder = tmp_path_factory.mktemp("compile")
    save_llama(folder / "llama", num_hidden_layers=1)
    save_tiny_bert(folder / "bert", num_hidden_layers=1)
    write_csv(folder / "train.csv", 30)
    draw = np.random.RandomState(5)
    documents = ["".join(draw.choice(list("abcdefgh"), draw.randint(3, 9))) for _ in range(80)]
    (folder / "train.txt").write_text("\n\n".join(documents) + "\n")
    return folder


def test_the_same_losses_in_one_process_and_two(folder):
    def text(name, *more):
        given = flags(folder / "llama", folder / "train.txt", folder / name, BLOCK, *more)
        return [*given, "--global_batch_size", "4"]

    expected = run_here(text("plain"), task="language_modeling")
    before = counters["stats"]["unique_graphs"]
    run_here(text("one", "--torch_compile"), task="language_modeling")
    assert counters["stats"]["unique_graphs"] == before + 1
    run_launched([{"flags": text("two", "--torch_compile"), "task": "language_modeling"}], 2, folder)
    for name in ("one", "two"):
        rows = read_rows(folder / name)
        for key in ("loss", "grad_norm"):
            assert [row[key] for row in rows] == pytest.approx([row[key] for row in expected], rel=TOLERANCE)


def test_a_classifier_and_names_of_parameters(folder):
    from safetensors.torch import load_file

    expected = run_here(classify(folder, folder / "lines"))
    before = counters["stats"]["unique_graphs"]
    rows = run_here(classify(folder, folder / "compiled lines", "--torch_compile"))
    assert counters["stats"]["unique_graphs"] <= before + 2  # with padding and without, for texts of many lengths
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
