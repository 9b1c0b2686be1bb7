"""The files of a checkpoint: written one tensor at a time, found, verified, rotated."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file

from toolkit.checkpoint.folder import Checkpoint, named, newest, rotate, write_state
from toolkit.checkpoint.tensors import TensorFile, balance, checksum
from toolkit.errors import UserError
from toolkit.strategy.portable import Entry

TENSORS = {
    "a.weight": torch.randn(3, 5),
    "half": torch.randn(7).to(torch.bfloat16),
    "count": torch.tensor(3),
    "empty": torch.zeros(0, 4),
    "mask": torch.tensor([True, False, True]),
}


def write(path, tensors, prefix=""):
    entries = {prefix + name: Entry.of(tensor) for name, tensor in tensors.items()}
    with TensorFile(path, entries) as file:
        for name, tensor in tensors.items():
            file.add(prefix + name, tensor)
        return file.close()


def make(folder, step, weights=TENSORS, moments=None):
    """A checkpoint as it is described in toolkit/checkpoint/folder.py, by hand."""
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    moments = moments or {"a.weight": torch.ones(3, 5)}
    write(path / "model-00001-of-00001.safetensors", weights)
    write(path / "optimizer-00001-of-00001.safetensors", moments, "exp_avg/")
    files = {file.name: {"bytes": file.stat().st_size, "sha256": checksum(file)} for file in path.glob("*.safetensors")}
    tensors = {f"model/{name}": "model-00001-of-00001.safetensors" for name in weights}
    tensors |= {f"exp_avg/{name}": "optimizer-00001-of-00001.safetensors" for name in moments}
    write_state(path, {"format": 1, "step": step, "files": files, "tensors": tensors})
    return path


def test_a_file_is_what_safetensors_reads(tmp_path):
    digest = write(tmp_path / "x.safetensors", TENSORS)
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)
    assert digest == checksum(tmp_path / "x.safetensors")


def test_tensors_come_in_order_and_all_of_them(tmp_path):
    entries = {name: Entry.of(tensor) for name, tensor in TENSORS.items()}
    with TensorFile(tmp_path / "x", entries) as file, pytest.raises(ValueError, match=r"expected a\.weight"):
        file.add("half", TENSORS["half"])
    with TensorFile(tmp_path / "x", entries) as file, pytest.raises(ValueError, match=r"expected a\.weight"):
        file.add("a.weight", torch.zeros(5, 3))
    with TensorFile(tmp_path / "x", entries) as file:
        file.add("a.weight", TENSORS["a.weight"])
        with pytest.raises(ValueError, match="4 tensors were never written"):
            file.close()


def test_writing_is_shared_out_by_bytes_among_those_who_can():
    sizes = {"a": 8, "b": 5, "c": 4, "d": 3}
    everyone = dict.fromkeys(sizes, (0, 1))
    assert balance(sizes, everyone) == {"a": 0, "b": 1, "c": 1, "d": 0}
    assert balance(sizes, {**everyone, "d": (1,)}) == {"a": 0, "b": 1, "c": 1, "d": 1}
    assert list(balance(sizes, everyone)) == list(sizes)


def test_reading_back(tmp_path):
    checkpoint = Checkpoint(make(tmp_path, 7))
    checkpoint.verify()
    assert checkpoint.step == 7
    assert checkpoint.names("model") == list(TENSORS) and checkpoint.names("exp_avg") == ["a.weight"]
    assert torch.equal(checkpoint.read("model", "half"), TENSORS["half"])
    assert torch.equal(checkpoint.read("exp_avg", "a.weight"), torch.ones(3, 5))
    with pytest.raises(UserError, match="another model or optimizer"):
        checkpoint.read("exp_avg", "half")
    checkpoint.close()


def damage_byte(path):
    file = path / "model-00001-of-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def cut_short(path):
    file = path / "optimizer-00001-of-00001.safetensors"
    os.truncate(file, file.stat().st_size - 3)


DAMAGES = {
    "differs": damage_byte,
    "bytes instead of": cut_short,
    "is missing": lambda path: (path / "model-00001-of-00001.safetensors").unlink(),
    "has no state.json": lambda path: (path / "state.json").unlink(),
    "cannot be read": lambda path: os.truncate(path / "state.json", 20),
    "another version": lambda path: (path / "state.json").write_text(
        json.dumps({**json.loads((path / "state.json").read_text()), "format": 99})
    ),
}


@pytest.mark.parametrize("said", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_passed_over_and_stays(said, tmp_path, capfd):
    make(tmp_path, 5)
    damaged = make(tmp_path, 20)
    DAMAGES[said](damaged)
    before = sorted(file.name for file in damaged.iterdir())
    with pytest.raises(UserError, match=said):
        Checkpoint(damaged).verify()
    found = newest(tmp_path)
    assert found.step == 5
    warning = capfd.readouterr().err
    assert "passed over" in warning and "checkpoint-20" in warning and said in warning
    assert sorted(file.name for file in damaged.iterdir()) == before


def test_newest_by_number_and_none_where_there_is_none(tmp_path):
    assert newest(tmp_path) is None
    for step in (9, 10, 100):
        make(tmp_path, step)
    (tmp_path / "checkpoint-200.writing").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    assert [step for step, _ in named(tmp_path)] == [100, 10, 9]
    assert newest(tmp_path).step == 100


def test_rotation_spares_the_best_the_newest_and_what_is_not_ours(tmp_path):
    paths = {step: make(tmp_path, step) for step in (1, 2, 3, 4)}
    foreign = tmp_path / "checkpoint-0"
    foreign.mkdir()
    (foreign / "precious").write_text("x")
    rotate(tmp_path, 2, [paths[1]])
    assert [step for step, _ in named(tmp_path)] == [4, 1, 0]
    rotate(tmp_path, 1, [paths[1]])
    assert [step for step, _ in named(tmp_path)] == [4, 1, 0]  # both spared
    rotate(tmp_path, None, [])
    rotate(tmp_path, 1, [])
    assert [step for step, _ in named(tmp_path)] == [4, 0]
