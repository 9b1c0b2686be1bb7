"""Writing a checkpoint: each rank its files, rank 0 the name.

A rank writes the tensors that fall to it into `checkpoint-<step>.writing/` and leaves `rank-<k>.done` with their sizes
and checksums. When all ranks' are there, rank 0 adds the rest, flushes, and renames the folder. With `in_background` a
thread does the writing from a copy in host memory; it uses no collective, so training goes on beside it.
"""

import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from toolkit.checkpoint.folder import FORMAT, STATE, TEMPORARY
from toolkit.checkpoint.tensors import TensorFile, balance
from toolkit.errors import UserError
from toolkit.report.results import to_json
from toolkit.strategy.base import Strategy
from toolkit.strategy.portable import Entry

TOKEN = "token"
PATIENCE = 600.0  # seconds that rank 0 waits for the other ranks' files
LONGEST_SAVE = 20.0  # a launcher kills 30 s after SIGTERM


class Saver:
    """Saves the training state of a strategy under one folder. All ranks call every method, in the same order.

    Args:
        renamed: called by rank 0 with the finished checkpoint.
    """

    def __init__(
        self,
        strategy: Strategy,
        folder: Path,
        renamed: Callable[[Path], None],
        in_background: bool = False,
    ) -> None:
        self.strategy, self.folder, self.renamed = strategy, folder, renamed
        self.in_background = in_background
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None
        self.seconds = 0.0  # of the last save, as the training saw it

    def save(self, step: int, state: Mapping[str, Any], extras: Callable[[Path], None]) -> None:
        """Write checkpoint-<step>. In the background, an earlier save that is still running is waited for first.

        Args:
            state: goes into state.json.
            extras: called by rank 0 with the folder, to add what is not tensors (config, tokenizer, metrics).

        Raises:
            UserError: it cannot be written; what was there before is still there.
        """
        started = time.perf_counter()
        self.wait()
        final = self.folder / f"checkpoint-{step}"
        temporary = final.with_name(final.name + TEMPORARY)
        self._together(lambda: self._open(temporary))
        entries = self.strategy.entries()
        writers = balance(
            {key: entry.bytes for key, entry in entries.items()}, {key: self.strategy.holders(key) for key in entries}
        )
        files = _files(entries, writers)
        mine = {key: entry for key, entry in entries.items() if writers[key] == self.strategy.rank}
        state = {**state, "format": FORMAT, "step": step, "tensors": files}
        if self.in_background:
            kept = {}
            for key, tensor in self.strategy.tensors():
                if key in mine:
                    kept[key] = tensor.clone()
            self.thread = threading.Thread(
                target=self._in_thread, args=(temporary, final, kept.items(), mine, state, extras), daemon=True
            )
            self.thread.start()
        else:
            tensors = self.strategy.tensors()
            self._together(
                lambda: self._write(temporary, ((k, t) for k, t in tensors if k in mine), mine, files), tensors
            )
            self._together(lambda: self._finish(temporary, final, state, extras))
        self.seconds = time.perf_counter() - started

    def wait(self) -> None:
        """Wait for a save in the background.

        Raises:
            UserError: it failed, on any rank.
        """
        if not self.in_background:
            return
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        self._together(self._raise)

    @property
    def failed(self) -> bool:
        """Whether this rank's save in the background has failed."""
        return self.error is not None

    def _raise(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error

    def _together(self, action: Callable[[], None], rest: Iterable[Any] = ()) -> None:
        """Run `action` on all ranks, and fail on all where it fails on one.

        Args:
            rest: gone through after a failure, since the other ranks take part in what is collective in it.
        """
        error = None
        try:
            action()
        except (OSError, UserError) as caught:
            error = caught
            for _ in rest:
                pass
        if not self.strategy.agree(error is not None):
            return
        if isinstance(error, OSError):
            raise UserError(
                f"the checkpoint cannot be written: {error.strerror or error} ({error.filename or self.folder}). "
                "Earlier checkpoints are whole; make room or choose another --output_dir, and resume from them."
            ) from error
        raise error or UserError("the checkpoint cannot be written: another rank says why.")

    def _open(self, temporary: Path) -> None:
        """Make the folder, and make sure that all ranks see the same one."""
        mark = temporary / TOKEN
        word = self.strategy.share(uuid.uuid4().hex)  # rank 0's
        if self.strategy.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            mark.write_text(word)
        self.strategy.agree(False)  # a barrier
        deadline = time.monotonic() + 10  # a network file system may show it late
        while time.monotonic() < deadline:
            if mark.is_file() and mark.read_text() == word:
                return
            time.sleep(0.1)
        raise UserError(
            f"{temporary} is not the same folder for rank {self.strategy.rank} and rank 0: with several machines "
            "--output_dir must be on a file system that they share."
        )

    def _write(
        self,
        temporary: Path,
        tensors: Iterable[tuple[str, Tensor]],
        mine: Mapping[str, Entry],
        files: Mapping[str, str],
    ) -> None:
        """This rank's tensor files, and the mark that they are done."""
        names = sorted({files[key] for key in mine})
        open_files = {
            name: TensorFile(temporary / name, {_inside(k): e for k, e in mine.items() if files[k] == name})
            for name in names
        }
        try:
            for key, tensor in tensors:
                open_files[files[key]].add(_inside(key), tensor)
            done = {
                name: {"sha256": file.close(), "bytes": file.path.stat().st_size} for name, file in open_files.items()
            }
        finally:
            for file in open_files.values():
                file.__exit__(None, None, None)
        _write_text(temporary / f"rank-{self.strategy.rank}.done", json.dumps(done))

    def _finish(self, temporary: Path, final: Path, state: Mapping[str, Any], extras: Callable[[Path], None]) -> None:
        """On rank 0: everything else, and the name."""
        if self.strategy.rank:
            return
        marks = [temporary / f"rank-{rank}.done" for rank in range(self.strategy.world_size)]
        deadline = time.monotonic() + PATIENCE
        while not all(mark.is_file() for mark in marks):
            if time.monotonic() > deadline or any(temporary.glob("rank-*.failed")):
                raise UserError(f"{temporary}: not all ranks could write their part.")
            time.sleep(0.02)
        files = {name: facts for mark in marks for name, facts in json.loads(mark.read_text()).items()}
        extras(temporary)
        _write_text(temporary / "model.safetensors.index.json", json.dumps(_index(state["tensors"], files)))
        _write_text(temporary / STATE, to_json({**state, "files": files}))
        for mark in (*marks, temporary / TOKEN):
            mark.unlink()
        _flush_folder(temporary)
        if final.exists():  # a run that was resumed from before this step comes by again
            shutil.rmtree(final)
        temporary.rename(final)
        _flush_folder(self.folder)
        self.renamed(final)

    def _in_thread(
        self,
        temporary: Path,
        final: Path,
        tensors: Iterable[tuple[str, Tensor]],
        mine: Mapping[str, Entry],
        state: Mapping[str, Any],
        extras: Callable[[Path], None],
    ) -> None:
        try:
            self._write(temporary, tensors, mine, state["tensors"])
            self._finish(temporary, final, state, extras)
        except BaseException as error:
            self.error = error
            with suppress(OSError):  # rank 0 need not wait for this one
                (temporary / f"rank-{self.strategy.rank}.failed").touch()


def _files(entries: Mapping[str, Entry], writers: Mapping[str, int]) -> dict[str, str]:
    """The file of each tensor, numbered as transformers numbers shards."""
    ranks: dict[str, list[int]] = {"model": [], "optimizer": []}
    for key in entries:
        part = _part(key)
        if writers[key] not in ranks[part]:
            ranks[part].append(writers[key])
    name = {
        (part, rank): f"{part}-{at:05}-of-{len(found):05}.safetensors"
        for part, found in ranks.items()
        for at, rank in enumerate(sorted(found), 1)
    }
    return {key: name[_part(key), writers[key]] for key in entries}


def _part(key: str) -> str:
    return "model" if key.startswith("model/") else "optimizer"


def _inside(key: str) -> str:
    """The name in the file: a weight's own, so that `from_pretrained` reads it; else moment/parameter."""
    return key.removeprefix("model/")


def _index(tensors: Mapping[str, str], files: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    weights = {key.removeprefix("model/"): file for key, file in tensors.items() if key.startswith("model/")}
    total = sum(facts["bytes"] for name, facts in files.items() if name.startswith("model-"))
    return {"metadata": {"total_size": total}, "weight_map": weights}


def _write_text(path: Path, text: str) -> None:
    """Write and flush to the disk; never half of it under this name."""
    temporary = path.with_name(path.name + ".part")
    with temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    temporary.rename(path)


def _flush_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
