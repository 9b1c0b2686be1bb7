"""Writing a checkpoint: each rank its files, rank 0 the name.

A rank writes the tensors that fall to it into `checkpoint-<step>.writing/` and leaves `rank-<k>.done` with their sizes
and checksums. When all ranks' are there, rank 0 adds the rest, flushes, and renames the folder. With `in_background` a
thread does the writing from a copy in main memory; it uses no collective, so training goes on beside it.
"""

import json
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from toolkit.checkpoint.folder import FORMAT, REMOVING, TEMPORARY, ordered, sweep, write_state
from toolkit.checkpoint.tensors import TensorFile, balance, checksum
from toolkit.errors import UserError
from toolkit.report.console import warn
from toolkit.strategy.base import Strategy
from toolkit.strategy.portable import Entry

TOKEN = "token"
INDEX = "model.safetensors.index.json"
PATIENCE = 600.0  # seconds until a network file system shows rank 0 what another rank has written
LONGEST_SAVE = 20.0  # a launcher kills 30 s after SIGTERM
SHOWN = 10.0  # seconds until it shows other ranks the folder that rank 0 has made
POLL = 0.02  # seconds


@dataclass(frozen=True)
class Plan:
    """One checkpoint to be written."""

    final: Path
    state: Mapping[str, Any]  # of state.json, but for the files
    mine: Mapping[str, Entry]  # the tensors that this rank writes
    extras: Callable[[Path], None]
    renamed: Callable[[], None]
    started: float

    @property
    def temporary(self) -> Path:
        return self.final.with_name(self.final.name + TEMPORARY)

    @property
    def files(self) -> Mapping[str, str]:
        """The file of each tensor."""
        return self.state["tensors"]


class Saver:
    """Saves the training state of a strategy under one folder. All ranks call every method, in the same order."""

    def __init__(self, strategy: Strategy, folder: Path, in_background: bool = False) -> None:
        self.strategy, self.folder, self.in_background = strategy, folder, in_background
        self.plan: Plan | None = None  # of the last save
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None  # of this rank's thread
        self.given_up = threading.Event()  # another rank's part will not come
        self.seconds = 0.0  # that the last save took in all, on rank 0

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        extras: Callable[[Path], None],
        renamed: Callable[[], None] = lambda: None,
    ) -> None:
        """Write checkpoint-<step>. In the background, an earlier save that is still running is waited for first.

        Args:
            state: goes into state.json.
            extras: called by rank 0 with the folder, to add what is not tensors (config, tokenizer, metrics).
            renamed: called by rank 0 when the checkpoint is there.

        Raises:
            UserError: on all ranks, where one cannot write; what was there before is still there.
        """
        self.wait()
        plan = self.plan = self._plan(step, state, extras, renamed)
        word = self.strategy.share(uuid.uuid4().hex)  # rank 0's
        self._together(lambda: self._open(plan, word))
        self._together(lambda: self._look(plan, word))
        if self.in_background:
            copies = {key: tensor.to("cpu", copy=True) for key, tensor in self.strategy.tensors() if key in plan.mine}
            self.thread = threading.Thread(target=self._in_thread, args=(plan, copies.items()), daemon=True)
            self.thread.start()
            return
        tensors = self.strategy.tensors()
        self._together(lambda: self._write(plan, tensors), tensors)
        self._together(lambda: self._finish(plan))
        self._judge_time()

    def wait(self) -> None:
        """Wait for a save in the background.

        Raises:
            UserError: on all ranks, where one could not write.
        """
        if not self.in_background:
            return
        while True:
            running, failed = self.strategy.total([self.thread is not None and self.thread.is_alive(), self.failed])
            if failed:
                self.given_up.set()
            if not running:
                break
            time.sleep(POLL)
        thread, self.thread = self.thread, None
        self._together(self._raise)
        if thread is not None:
            self._judge_time()

    def come_to_an_end(self, seconds: float) -> None:
        """Let a save in the background be completed before the process ends. Not collective: others may be gone."""
        if self.thread is None:
            return
        deadline = time.monotonic() + seconds
        self.thread.join(seconds)
        # The first rank that leaves takes the others with it.
        while self.error is None and self.plan.temporary.exists() and time.monotonic() < deadline:
            time.sleep(POLL)

    @property
    def failed(self) -> bool:
        """Whether this rank's save in the background has failed."""
        return self.error is not None

    def _plan(
        self, step: int, state: Mapping[str, Any], extras: Callable[[Path], None], renamed: Callable[[], None]
    ) -> Plan:
        entries = self.strategy.entries()
        writers = balance(
            {key: entry.bytes for key, entry in entries.items()}, {key: self.strategy.holders(key) for key in entries}
        )
        state = {"format": FORMAT, "step": step, **state, "tensors": _files(entries, writers)}
        mine = {key: entry for key, entry in entries.items() if writers[key] == self.strategy.rank}
        return Plan(self.folder / f"checkpoint-{step}", state, mine, extras, renamed, time.monotonic())

    def _together(self, action: Callable[[], None], rest: Iterable[Any] = ()) -> None:
        """Run `action` on all ranks, and fail on all where it fails on one, with what that one says.

        Args:
            rest: gone through after a failure, since the other ranks take part in what is collective in it.
        """
        problem = ""
        try:
            action()
        except OSError as error:
            problem = (
                f"the checkpoint cannot be written: {error.strerror or error} ({error.filename or self.folder}). "
                "Earlier checkpoints are whole: make room, or choose another --output_dir, and go on from them with "
                "--resume_from_checkpoint."
            )
        except UserError as error:
            problem = str(error)
        if problem:
            for _ in rest:
                pass
        problems = [said for said in self.strategy.words(problem) if said]
        if problems:
            if self.strategy.rank == 0 and self.plan is not None:
                shutil.rmtree(self.plan.temporary, ignore_errors=True)
            self.given_up.clear()
            raise UserError(*dict.fromkeys(problems))

    def _raise(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error

    def _open(self, plan: Plan, word: str) -> None:
        """On rank 0: make the folder."""
        if self.strategy.rank == 0:
            if plan.temporary.exists():
                shutil.rmtree(plan.temporary)
            plan.temporary.mkdir(parents=True)
            (plan.temporary / TOKEN).write_text(word)

    def _look(self, plan: Plan, word: str) -> None:
        """Make sure that this rank sees rank 0's folder."""
        mark = plan.temporary / TOKEN
        deadline = time.monotonic() + SHOWN
        while time.monotonic() < deadline:
            if mark.is_file() and mark.read_text() == word:
                return
            time.sleep(POLL)
        raise UserError(
            f"{plan.temporary} is not the same folder for rank {self.strategy.rank} and rank 0: with several machines "
            "--output_dir must be on a file system that they share."
        )

    def _write(self, plan: Plan, tensors: Iterable[tuple[str, Tensor | None]]) -> None:
        """This rank's tensor files, and the mark that they are done."""
        contents: dict[str, dict[str, Entry]] = {}
        for key, entry in plan.mine.items():
            contents.setdefault(plan.files[key], {})[_inside(key)] = entry
        with ExitStack() as stack:
            opened = {
                name: stack.enter_context(TensorFile(plan.temporary / name, entries))
                for name, entries in contents.items()
            }
            for key, tensor in tensors:
                if key in plan.mine:
                    opened[plan.files[key]].add(_inside(key), tensor)
            done = {name: {"sha256": file.close(), "bytes": file.path.stat().st_size} for name, file in opened.items()}
        _write_text(_mark(plan, self.strategy.rank), json.dumps(done))

    def _finish(self, plan: Plan) -> None:
        """On rank 0: everything else, and the name."""
        if self.strategy.rank:
            return
        marks = [_mark(plan, rank) for rank in range(self.strategy.world_size)]
        deadline = time.monotonic() + PATIENCE
        while not all(mark.is_file() for mark in marks):
            if self.given_up.is_set():
                return
            if not self.in_background and time.monotonic() > deadline:
                raise UserError(f"{plan.temporary}: what other ranks have written there is not to be seen.")
            time.sleep(POLL)
        files = {name: facts for mark in marks for name, facts in json.loads(mark.read_text()).items()}
        for mark in (*marks, plan.temporary / TOKEN):
            mark.unlink()
        (plan.temporary / INDEX).write_text(json.dumps(_index(plan.files, files)))
        plan.extras(plan.temporary)
        files |= _others(plan.temporary, files)
        serial = max((checkpoint.serial[0] for checkpoint in ordered(self.folder)), default=0) + 1
        write_state(plan.temporary, {"serial": serial, **plan.state, "files": files})
        _flush_all(plan.temporary)
        self._rename(plan)
        plan.renamed()
        self.seconds = time.monotonic() - plan.started

    def _rename(self, plan: Plan) -> None:
        """Give the folder its name; a run that was resumed from before this step comes by again."""
        if plan.final.exists():
            before = plan.final.with_name(plan.final.name + REMOVING)
            shutil.rmtree(before, ignore_errors=True)
            plan.final.rename(before)
        plan.temporary.rename(plan.final)
        _flush(self.folder)
        sweep(self.folder)

    def _in_thread(self, plan: Plan, tensors: Iterable[tuple[str, Tensor]]) -> None:
        try:
            self._write(plan, tensors)
            self._finish(plan)
        except BaseException as error:
            self.error = error

    def _judge_time(self) -> None:
        if self.seconds > LONGEST_SAVE:
            warn(
                f"saving took {self.seconds:.0f} s, but a launcher kills 30 s after SIGTERM: ask for a stop with "
                "SIGUSR1 instead (SLURM: --signal=USR1@120)."
            )
        self.seconds = 0.0


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


def _mark(plan: Plan, rank: int) -> Path:
    return plan.temporary / f"rank-{rank}.done"


def _index(tensors: Mapping[str, str], files: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    weights = {key.removeprefix("model/"): file for key, file in tensors.items() if key.startswith("model/")}
    total = sum(facts["bytes"] for name, facts in files.items() if name.startswith("model-"))
    return {"metadata": {"total_size": total}, "weight_map": weights}


def _others(folder: Path, known: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Sizes and checksums of the files that are not tensors."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix(): path for path in found}
    return {
        name: {"sha256": checksum(path), "bytes": path.stat().st_size}
        for name, path in names.items()
        if name not in known
    }


def _write_text(path: Path, text: str) -> None:
    """Never half of it under this name: rank 0 waits for it."""
    temporary = path.with_name(path.name + ".part")
    temporary.write_text(text)
    temporary.rename(path)


def _flush_all(folder: Path) -> None:
    """Have the folder on the disk, with all that is in it."""
    for path in (*folder.rglob("*"), folder):
        _flush(path)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
