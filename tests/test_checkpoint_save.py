"""Writing a checkpoint: in the background, on several ranks, and where it cannot be written."""

import errno
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from tests.lm import TinyLM, prepare, random_rows
from tests.ranks import on_ranks
from toolkit.checkpoint import save
from toolkit.checkpoint.folder import Checkpoint, named, newest
from toolkit.checkpoint.save import Saver
from toolkit.checkpoint.tensors import TensorFile
from toolkit.errors import UserError

ROWS = random_rows([3, 9, 5, 14, 7, 20, 4, 11])
FLAGS = ["--global_batch_size", 4, "--num_train_epochs", 4, "--learning_rate", 1e-2]
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
NO_ROOM = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Training:
    """A tiny GPT-2 in training, its weights tied, and a saver of it."""

    def __init__(self, folder, in_background=False):
        self.trained = prepare(TinyLM(ROWS), FLAGS)
        self.strategy = self.trained.strategy
        self.work = iter(self.trained.feed)
        self.saver = Saver(self.strategy, folder, in_background)

    def step(self):
        return self.trained.stepper.take(next(self.work), failed=self.saver.failed)

    def save(self, step, extras=lambda folder: None):
        self.saver.save(step, {"note": "x"}, extras)

    def tensors(self):
        return {key: tensor.clone() for key, tensor in self.strategy.tensors()}


def read(path):
    """All tensors of a whole checkpoint."""
    checkpoint = Checkpoint(path)
    checkpoint.verify()
    keys = [key.split("/", 1) for key in checkpoint.state["tensors"]]
    return {"/".join(key): checkpoint.read(*key) for key in keys}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[key], right[key]) for key in left)


@contextmanager
def breaking(target, name, error=NO_ROOM, after=0):
    """A method that fails from its call number `after` on."""
    calls = []

    def broken(*args, **kwargs):
        calls.append(args)
        if len(calls) > after:
            raise error
        return real(*args, **kwargs)

    real = getattr(target, name)
    with mock.patch.object(target, name, broken):
        yield


def test_a_checkpoint_holds_the_state_and_nothing_else(tmp_path):
    training = Training(tmp_path)
    training.step()
    training.save(1, lambda folder: (folder / "config.json").write_text("{}"))
    path = tmp_path / "checkpoint-1"
    assert same(read(path), training.tensors())
    state = Checkpoint(path).state
    assert state["note"] == "x" and state["step"] == state["serial"] == 1
    assert {file.name for file in path.iterdir()} == {*state["files"], "state.json"}
    assert "config.json" in state["files"]
    names = load_file(path / "model-00001-of-00001.safetensors").keys()
    assert "transformer.wte.weight" in names and "lm_head.weight" not in names  # tied: once
    # Weights and two moments in float32: the rest is small.
    expected = 3 * 4 * sum(p.numel() for p in training.strategy.model.parameters())
    assert expected < sum(facts["bytes"] for facts in state["files"].values()) < expected * 1.15


def test_training_goes_on_beside_a_save_in_the_background(tmp_path):
    training = Training(tmp_path, in_background=True)
    training.step()
    before, hold = training.tensors(), threading.Event()
    training.save(1, lambda folder: hold.wait(30))
    training.step()
    training.step()
    assert named(tmp_path) == [] and not training.saver.failed
    after = training.tensors()
    assert not same(before, after)
    threading.Timer(0.3, hold.set).start()
    training.save(3)  # waits for the one in flight
    assert [step for step, _ in named(tmp_path)][-1:] == [1]
    training.saver.wait()
    assert same(read(tmp_path / "checkpoint-1"), before)
    assert same(read(tmp_path / "checkpoint-3"), after)
    assert [Checkpoint(path).state["serial"] for _, path in named(tmp_path)] == [2, 1]


@pytest.mark.parametrize("in_background", [False, True])
@pytest.mark.parametrize("where", ["tensors", "state", "name"])
def test_m03_what_cannot_be_written_leaves_what_was_there(where, in_background, tmp_path):
    training = Training(tmp_path, in_background)
    training.step()
    training.save(1)
    training.saver.wait()
    kept = read(tmp_path / "checkpoint-1")
    training.step()
    broken = {"tensors": (TensorFile, "add", NO_ROOM, 5), "state": (save, "write_state"), "name": (Saver, "_rename")}
    with breaking(*broken[where]), pytest.raises(UserError, match=r"No space left on device.*make room") as error:
        training.save(2)
        while not training.saver.failed:
            time.sleep(0.01)
        training.saver.wait()
    assert len(error.value.messages) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    assert same(read(tmp_path / "checkpoint-1"), kept)
    training.save(2)  # once there is room
    training.saver.wait()
    assert newest(tmp_path).step == 2


def test_a_run_that_fails_lets_a_save_in_the_background_come_to_its_end(tmp_path):
    training = Training(tmp_path, in_background=True)
    training.step()
    training.save(1, lambda folder: time.sleep(0.3))
    training.saver.come_to_an_end(20)
    assert newest(tmp_path).step == 1
    training.save(2, lambda folder: time.sleep(5))
    started = time.monotonic()
    training.saver.come_to_an_end(0.2)
    assert time.monotonic() - started < 2


def test_m07_a_step_that_comes_by_again_replaces_its_checkpoint(tmp_path):
    training = Training(tmp_path)
    for step in (1, 2):
        training.step()
        training.save(step)
    (tmp_path / "checkpoint-7.writing").mkdir()
    (tmp_path / "checkpoint-7.writing" / "half").write_text("x")
    (tmp_path / "checkpoint-mine.writing").mkdir()
    training.step()
    now = training.tensors()
    training.save(1)
    assert same(read(tmp_path / "checkpoint-1"), now)
    assert newest(tmp_path).step == 1  # it was written last
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "checkpoint-1",
        "checkpoint-2",
        "checkpoint-mine.writing",
    ]


@pytest.mark.parametrize("target", [(TensorFile, "close"), (save, "write_state"), (save, "_flush_all")])
def test_m01_killed_while_saving(target, tmp_path, capfd):
    training = Training(tmp_path)
    training.step()
    training.save(1)
    child = os.fork()
    if child == 0:
        with mock.patch.object(*target, lambda *args: os.kill(os.getpid(), signal.SIGKILL)):
            training.save(2)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert (tmp_path / "checkpoint-2.writing").is_dir()
    assert newest(tmp_path).step == 1
    assert "checkpoint-2.writing: its writing was cut off" in capfd.readouterr().err
    training.save(3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1", "checkpoint-3"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 2 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], capture_output=True)
    if made.returncode:
        pytest.skip("no file system can be mounted here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_full_disk_and_one_that_is_read_only(in_background, small_disk):
    training = Training(small_disk, in_background)
    training.step()
    training.save(1)
    training.saver.wait()
    kept = read(small_disk / "checkpoint-1")
    size = sum(file.stat().st_size for file in (small_disk / "checkpoint-1").iterdir())
    (small_disk / "filler").write_bytes(bytes(shutil.disk_usage(small_disk).free - size // 2))
    training.step()
    with pytest.raises(UserError, match="No space left on device"):
        training.save(2)
        training.saver.wait()
    assert same(read(newest(small_disk).path), kept)
    assert sorted(path.name for path in small_disk.iterdir()) == ["checkpoint-1", "filler"]
    (small_disk / "filler").unlink()
    training.save(2)
    training.saver.wait()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    with pytest.raises(UserError, match=r"Read-only file system \(.*checkpoint-3"):
        training.save(3)
    assert newest(small_disk).step == 2


def refused(action):
    try:
        action()
    except UserError as error:
        return error.messages
    return None


def on_two_ranks(folder):
    """What goes wrong on one rank is said alike by both."""
    rank = int(os.environ["RANK"])
    said = {}
    for name, background in (("front", False), ("back", True)):
        training = Training(folder / name, background)
        training.step()
        training.save(1)
        training.saver.wait()
        training.step()
        for broken, where in ((1, TensorFile), (0, TensorFile), (0, save)):
            method = "add" if where is TensorFile else "write_state"
            error = OSError(errno.ENOSPC, f"no room on rank {broken}")
            after = 10**9 if rank != broken else 3 if where is TensorFile else 0

            def attempt(training=training):
                training.save(2)
                training.saver.wait()

            with breaking(where, method, error, after):
                said[f"{name} {broken} {method}"] = refused(attempt)
        if background:
            # Known at the next step's boundary, on both ranks.
            with breaking(TensorFile, "add", after=3 if rank else 10**9):
                training.save(2)
                while rank and not training.saver.failed:
                    time.sleep(0.01)
                training.strategy.agree(False)
                training.step()
                said["boundary"] = training.trained.stepper.failed
                said["why"] = refused(training.saver.wait)
        training.save(2)
        training.saver.wait()
        if rank == 0:
            said[f"{name} whole"] = same(read(folder / name / "checkpoint-2"), training.tensors())
            said[f"{name} left"] = sorted(path.name for path in (folder / name).iterdir())
            said[f"{name} files"] = sorted(Checkpoint(folder / name / "checkpoint-2").files)
        else:
            list(training.strategy.tensors())
    with mock.patch.dict(os.environ, FSDP2):
        split = Training(folder / "split", in_background=True)
    split.step()
    before = split.tensors()
    split.save(1)
    split.step()  # what is being written is a copy
    split.saver.in_background = False
    split.saver.thread.join()
    # While one rank has failed, the other gathers what is left with it.
    with breaking(TensorFile, "add", after=3 if rank else 10**9):
        said["split"] = refused(lambda: split.save(2))
    if rank == 0:
        said["split whole"] = same(read(folder / "split" / "checkpoint-1"), before)
    (folder / "file").touch()
    training.saver = Saver(training.strategy, folder / "file" / "below")
    said["no folder"] = refused(lambda: training.save(3))
    training.saver = Saver(training.strategy, folder / f"machine {rank}")
    with mock.patch.object(save, "SHOWN", 1.0):
        said["not shared"] = refused(lambda: training.save(3))
    return said


def test_ranks_agree_on_what_went_wrong(tmp_path):
    first, second = on_ranks(on_two_ranks, 2, tmp_path)
    for key, messages in second.items():
        assert messages == first[key], key
    for name in ("front", "back"):
        for key in (f"{name} 1 add", f"{name} 0 add", f"{name} 0 write_state"):
            assert len(first[key]) == 1 and f"no room on rank {key.split()[1]}" in first[key][0], key
        assert first[f"{name} whole"] is True
        assert first[f"{name} left"] == ["checkpoint-1", "checkpoint-2"]
        # Both ranks wrote a part.
        parts = [f"{part}-0000{i}-of-00002.safetensors" for part in ("model", "optimizer") for i in (1, 2)]
        assert set(parts) < set(first[f"{name} files"])
    assert first["split whole"] is True and "No space left" in first["split"][0]
    assert first["boundary"] is True and "No space left" in first["why"][0]
    assert len(first["no folder"]) == 1 and "cannot be written" in first["no folder"][0]
    assert "must be on a file system that they share" in first["not shared"][0]
    assert not named(tmp_path / "machine 0") and not named(tmp_path / "machine 1")


def test_slow_saves_are_warned_about(tmp_path, capfd):
    training = Training(tmp_path)
    training.step()
    training.save(1)
    assert "SIGUSR1" not in capfd.readouterr().err
    with mock.patch.object(save, "LONGEST_SAVE", 0.0):
        training.save(2)
    assert "--signal=USR1@120" in capfd.readouterr().err


def test_state_is_strict_json_whatever_is_in_the_flags(tmp_path):
    training = Training(tmp_path)
    odd = {"path": "b\udcff", "rate": float("inf"), "nothing": float("nan")}
    training.saver.save(1, {"flags": odd}, lambda folder: None)
    flags = Checkpoint(tmp_path / "checkpoint-1").state["flags"]
    assert flags == {"path": "b\udcff", "rate": "Infinity", "nothing": None}
    json.loads((tmp_path / "checkpoint-1" / "state.json").read_text(), parse_constant=lambda word: 1 / 0)
