"""The folder of a checkpoint: where it is, whether it is whole, what it says.

    checkpoint-<step>/
      model-00001-of-00002.safetensors, model.safetensors.index.json, config.json, tokenizer files
      optimizer-00001-of-00002.safetensors    moments, named <moment>/<parameter>
      state.json                              everything else, with the sizes and checksums of the tensor files
      metrics.jsonl                           the rows up to this step

A folder of this name is complete or it is not there: it is written under another name, flushed and renamed.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from toolkit.checkpoint.tensors import checksum
from toolkit.errors import UserError
from toolkit.report.console import warn

STATE = "state.json"
NAME = re.compile(r"checkpoint-(\d+)")
TEMPORARY = ".writing"  # behind the name, while it is written
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
        for name, expected in self.files.items():
            file = self.path / name
            if not file.is_file():
                raise UserError(f"{self.path}: {name} is missing.")
            if file.stat().st_size != expected["bytes"]:
                raise UserError(f"{file}: has {file.stat().st_size} bytes instead of {expected['bytes']}.")

    @property
    def step(self) -> int:
        return self.state["step"]

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
        key = f"{kind}/{name}"
        file = self.state["tensors"].get(key)
        if file is None:
            raise UserError(f"{self.path}: holds no tensor {key}; it is a checkpoint of another model or optimizer.")
        if file not in self._readers:
            from safetensors import safe_open

            self._readers[file] = self._open.enter_context(safe_open(self.path / file, "pt"))
        return self._readers[file].get_tensor(name if kind == "model" else key)

    def close(self) -> None:
        """Close the files."""
        self._open.close()
        self._readers.clear()


def _read_state(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise UserError(f"checkpoint {path}: no such folder.")
    try:
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        if not isinstance(state, dict) or not {"format", "step", "files", "tensors"} <= set(state):
            raise ValueError("it is not the state of a training")
    except FileNotFoundError:
        raise UserError(f"{path}: no checkpoint of this toolkit, since it has no {STATE}.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path / STATE}: cannot be read: {error}.") from None
    if state["format"] > FORMAT:
        raise UserError(f"{path}: written by a newer version (format {state['format']}, this one reads {FORMAT}).")
    return state


def checkpoints(folder: Path) -> Iterator[tuple[int, Path]]:
    """All folders named checkpoint-<step>, newest first, whatever is in them."""
    found = []
    for path in folder.glob("checkpoint-*"):
        match = NAME.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    yield from sorted(found, reverse=True)


def newest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint that is complete and intact; others are named, passed over and left alone."""
    for _, path in checkpoints(folder):
        try:
            found = Checkpoint(path)
            found.verify()
            return found
        except UserError as error:
            warn(f"passed over: {error.messages[0]}")
    return None


def is_ours(path: Path) -> bool:
    """Whether a folder was written by this toolkit as a checkpoint, whole or not."""
    try:
        _read_state(path)
    except UserError:
        return False
    return True


def rotate(folder: Path, limit: int | None, keep: Sequence[Path], remove: Callable[[Path], None] | None = None) -> None:
    """Delete the oldest checkpoints beyond `limit`; never those in `keep`, the newest, or a foreign folder."""
    if limit is None:
        return
    ours = [path for _, path in checkpoints(folder) if is_ours(path)]
    spared = {path.resolve() for path in keep} | {path.resolve() for path in ours[:1]}
    surplus = len(ours) - limit
    for path in reversed(ours):
        if surplus <= 0:
            break
        if path.resolve() not in spared:
            (remove or delete)(path)
            surplus -= 1


def delete(path: Path) -> None:
    """Remove a checkpoint so that at no moment a half one has its name."""
    gone = path.with_name(path.name + ".removing")
    path.rename(gone)
    shutil.rmtree(gone)
