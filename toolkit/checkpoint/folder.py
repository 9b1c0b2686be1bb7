"""The folder of a checkpoint: where it is, whether it is whole, what it says.

    checkpoint-<step>/
      model-00001-of-00002.safetensors, model.safetensors.index.json, config.json, tokenizer files
      optimizer-00001-of-00002.safetensors    moments, named <moment>/<parameter>
      metrics.jsonl                           the rows up to this step
      state.json                              everything else, with the sizes and checksums of the other files

A folder of this name is complete or it is not there: it is written under another name, flushed and renamed. Nothing
in it is ever unpickled, and what state.json does not name is never read.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from toolkit.checkpoint.tensors import checksum
from toolkit.errors import UserError
from toolkit.report.console import warn
from toolkit.report.results import to_json

STATE = "state.json"
NAME = re.compile(r"checkpoint-(\d+)")
TEMPORARY = ".writing"  # behind the name, while it is written
REMOVING = ".removing"  # behind the name, while it is deleted
FORMAT = 1


class Checkpoint:
    """A complete checkpoint on disk, to read from.

    Raises:
        UserError: it is no checkpoint of this toolkit, or a part is missing, cut short or (with `verify`) changed.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.state = _read_state(self.path)
        self.files: dict[str, dict[str, Any]] = self.state["files"]
        self._open = ExitStack()
        self._readers: dict[str, Any] = {}
        outside = [name for name in self.files if Path(name).is_absolute() or ".." in Path(name).parts]
        if outside or not set(self.state["tensors"].values()) <= set(self.files):
            raise UserError(f"{self.path / STATE}: names files that are no part of the checkpoint.")
        for name, expected in self.files.items():
            file = self.path / name
            if not file.is_file():
                raise UserError(f"{self.path}: {name} is missing.")
            if file.stat().st_size != expected["bytes"]:
                raise UserError(f"{file}: has {file.stat().st_size} bytes instead of {expected['bytes']}.")

    @property
    def step(self) -> int:
        return self.state["step"]

    @property
    def serial(self) -> tuple[int, int]:
        """Its place in the order of writing. A course that was begun anew from an earlier step comes later."""
        return self.state.get("serial", 0), self.step

    def verify(self) -> None:
        """Compare every file with its checksum."""
        for name, expected in self.files.items():
            if checksum(self.path / name) != expected["sha256"]:
                raise UserError(f"{self.path / name}: its content is not what was written (SHA-256 differs).")

    def names(self, kind: str) -> list[str]:
        """The tensors of a kind: `model`, or a moment such as `exp_avg`."""
        return [name.removeprefix(f"{kind}/") for name in self.state["tensors"] if name.startswith(f"{kind}/")]

    def read(self, kind: str, name: str) -> Tensor:
        """One tensor in full shape, on the CPU."""
        reader, inside = self._reader(kind, name)
        return reader.get_tensor(inside)

    def shape(self, kind: str, name: str) -> tuple[int, ...]:
        """The shape of a tensor, without reading it."""
        reader, inside = self._reader(kind, name)
        return tuple(reader.get_slice(inside).get_shape())

    def close(self) -> None:
        """Close the files."""
        self._open.close()
        self._readers.clear()

    def _reader(self, kind: str, name: str) -> tuple[Any, str]:
        """The file that holds a tensor, and its name there."""
        key = f"{kind}/{name}"
        file = self.state["tensors"].get(key)
        if file is None:
            raise UserError(f"{self.path}: holds no tensor {key}; it is a checkpoint of another model or optimizer.")
        if file not in self._readers:
            from safetensors import SafetensorError, safe_open

            try:
                self._readers[file] = self._open.enter_context(safe_open(self.path / file, "pt"))
            except (OSError, SafetensorError) as error:
                raise UserError(f"{self.path / file}: cannot be read: {error}.") from None
        return self._readers[file], name if kind == "model" else key


def write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Write state.json into a checkpoint's folder, with a checksum of itself."""
    sealed = {"sha256": _digest(state), **state}
    (path / STATE).write_bytes(_encoded(sealed))


def _encoded(state: Mapping[str, Any]) -> bytes:
    return to_json(state).encode("utf-8", "backslashreplace")  # a flag may hold a lone surrogate


def _digest(state: Mapping[str, Any]) -> str:
    return hashlib.sha256(_encoded(state)).hexdigest()


def _read_state(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise UserError(f"checkpoint {path}: no such folder.")
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        if not isinstance(state, dict) or not {"format", "step", "files", "tensors"} <= set(state):
            raise ValueError("it is not the state of a training")
    except FileNotFoundError:
        inside = ordered(path)
        hint = f" It holds {inside[0].path}: did you mean that?" if inside else ""
        raise UserError(f"{path}: no checkpoint of this toolkit, since it has no {STATE}.{hint}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path / STATE}: cannot be read: {error}.") from None
    if state["format"] != FORMAT:
        raise UserError(f"{path}: written by another version (format {state['format']}, this one reads {FORMAT}).")
    if state.pop("sha256", None) != _digest(state):
        raise UserError(f"{path / STATE}: its content is not what was written (SHA-256 differs).")
    return state


def named(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of all folders named checkpoint-<step>, the latest step first, whatever is in them."""
    found = [(NAME.fullmatch(path.name), path) for path in folder.glob("checkpoint-*") if path.is_dir()]
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def ordered(folder: Path, passed_over: list[str] | None = None) -> list[Checkpoint]:
    """The checkpoints in a folder that are whole by their sizes, the one that was written last first.

    Args:
        passed_over: gets a message for each of the others.
    """
    found = []
    for _, path in named(folder):
        try:
            found.append(Checkpoint(path))
        except UserError as error:
            if passed_over is not None:
                passed_over += error.messages
    return sorted(found, key=lambda checkpoint: checkpoint.serial, reverse=True)


def newest(folder: Path) -> Checkpoint | None:
    """The checkpoint that was written last of those that are whole.

    Others are named, passed over and left alone.

    Raises:
        UserError: there are checkpoints, but no whole one.
    """
    problems: list[str] = []
    for path in folder.glob(f"checkpoint-*{TEMPORARY}"):
        warn(f"passed over: {path}: its writing was cut off.")
    candidates = ordered(folder, problems)
    for problem in problems:
        warn(f"passed over: {problem}")
    for checkpoint in candidates:
        try:
            checkpoint.verify()
            return checkpoint
        except UserError as error:
            warn(f"passed over: {error.messages[0]}")
    if named(folder):
        raise UserError(f"none of the checkpoints in {folder} is whole.")
    return None


def rotate(folder: Path, limit: int | None, keep: Sequence[Path]) -> None:
    """Delete the checkpoints that were written first beyond `limit`.

    Never those in `keep`, the one written last, or a folder that is not ours or not whole.
    """
    if limit is None:
        return
    ours = [checkpoint.path for checkpoint in ordered(folder)]
    spared = {path.resolve() for path in (*keep, *ours[:1])}
    surplus = len(ours) - limit
    for path in reversed(ours):
        if surplus <= 0:
            break
        if path.resolve() not in spared:
            delete(path)
            surplus -= 1


def delete(path: Path) -> None:
    """Remove a checkpoint so that at no moment a half one has its name."""
    gone = path.with_name(path.name + REMOVING)
    shutil.rmtree(gone, ignore_errors=True)
    path.rename(gone)
    shutil.rmtree(gone)


def sweep(folder: Path) -> None:
    """Remove what is left of writing and deleting that was cut off."""
    for ending in (TEMPORARY, REMOVING):
        for path in folder.glob(f"checkpoint-*{ending}"):
            if NAME.fullmatch(path.name.removesuffix(ending)):
                shutil.rmtree(path, ignore_errors=True)
