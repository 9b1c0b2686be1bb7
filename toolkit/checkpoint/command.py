"""`toolkit checkpoint show | verify | export`: look at checkpoints and take models out of them, launching nothing."""

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit import adapters
from toolkit.arguments import flag, parse
from toolkit.checkpoint.folder import TEMPORARY, Checkpoint, named, newest
from toolkit.checkpoint.resume import describe
from toolkit.checkpoint.save import INDEX
from toolkit.errors import UserError, nearest
from toolkit.report.console import say
from toolkit.report.summary import table

USAGE = """usage: toolkit checkpoint show PATH
       toolkit checkpoint verify PATH
       toolkit checkpoint export PATH --output_dir FOLDER

PATH is a checkpoint, or the output folder of a run: then all its checkpoints are meant, to export the one written last.
show: what they are. verify: whether they are whole, by their checksums (exit 2 where one is not).
export: weights, config and tokenizer, as from_pretrained reads them."""


@dataclass
class ExportArguments:
    """Flags of `toolkit checkpoint export`."""

    output_dir: str | None = flag(None, "A new folder for the model.")


def main(argv: Sequence[str]) -> int:
    """Run the subcommand; the exit code.

    Raises:
        UserError: no such checkpoint, or one that is not whole.
    """
    argv = list(argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if argv else 2
    name = argv.pop(0)
    commands = {"show": show, "verify": verify, "export": export}
    if name not in commands:
        raise UserError(
            f"toolkit checkpoint has no command {name}.{nearest(name, commands)} It has: show, verify, export."
        )
    if not argv or argv[0].startswith("-"):
        raise UserError(f"toolkit checkpoint {name}: a checkpoint or an output folder comes next.")
    path = Path(argv.pop(0))
    if name != "export" and argv:
        raise UserError(f"toolkit checkpoint {name} PATH: unexpected {argv[0]}.")
    commands[name](path, *([argv] if name == "export" else []))
    return 0


def show(path: Path) -> None:
    """Print what a checkpoint is, or all of a folder."""
    texts, problems = [], []
    for folder in _meant(path):
        try:
            texts.append(table(_facts(Checkpoint(folder))))
        except UserError as error:
            problems += error.messages
    if texts:
        print("\n\n".join(texts))
    if problems:
        raise UserError(*problems)


def verify(path: Path) -> None:
    """Compare all files with their checksums."""
    problems = []
    for folder in _meant(path):
        try:
            checkpoint = Checkpoint(folder)
            checkpoint.verify()
            print(f"{folder}: whole ({len(checkpoint.files)} files, {_size(_bytes(checkpoint))})")
        except UserError as error:
            problems += error.messages
    if problems:
        raise UserError(*problems)


def export(path: Path, argv: Sequence[str]) -> None:
    """Copy the model out of a checkpoint."""
    target = parse(ExportArguments, list(argv)).output_dir
    if target is None:
        raise UserError("toolkit checkpoint export: give a new folder for the model: --output_dir.")
    checkpoint = Checkpoint(path) if not named(path) else newest(path)
    checkpoint.verify()
    folder = Path(target)
    if folder.exists():
        raise UserError(f"--output_dir {folder} exists; nothing was changed. Give another one.")
    # What the checkpoint lists and nothing else: another file may have been put there by anybody.
    names = [name for name in checkpoint.files if not name.startswith("optimizer-") and name != "metrics.jsonl"]
    if adapters.CONFIG in names:  # the same tensors, as peft reads them
        names = [name for name in names if not name.startswith("model-") and name != INDEX]
    alone = [name for name in names if name.startswith("model-") and "-of-00001." in name]
    temporary = folder.with_name(folder.name + TEMPORARY)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        for name in names:
            if alone and name == INDEX:
                continue
            copy = temporary / ("model.safetensors" if name in alone else name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(checkpoint.path / name, copy)
        os.rename(temporary, folder)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise UserError(f"--output_dir {folder} cannot be written: {error.strerror}.") from None
    say(f"the model of step {checkpoint.step} is in {folder}")


def _meant(path: Path) -> list[Path]:
    """The checkpoint folders that a path stands for, in order of step."""
    inside = [folder for _, folder in reversed(named(path))] if path.is_dir() else []
    return inside or [path]


def _facts(checkpoint: Checkpoint) -> list[tuple[str, str]]:
    state = checkpoint.state
    training, best = state["training"], state["best"]
    count = len(checkpoint.names("model"))
    rows = [
        ("checkpoint", str(checkpoint.path)),
        ("step", f"{checkpoint.step} of {training['total_steps']}, epoch {state['epoch']:.2f}"),
        ("samples seen", f"{state['samples']:,}, {training['global_batch_size']} a step"),
        ("optimizer", f"{training['optim']}, {state['updates']} updates, learning rate {training['learning_rate']:g}"),
        ("written under", describe(state["machine"])),
        ("model", f"{training['model'].get('model_type')}, {count} tensors"),
        ("size", f"{_size(_bytes(checkpoint))} in {len(checkpoint.files)} files"),
    ]
    if best["step"] is not None:
        here = " (this one)" if best["step"] == checkpoint.step else ""
        rows.append(("best so far", f"{best['metric']} {best['value']:.6g} at step {best['step']}{here}"))
    status = _status(checkpoint.path.parent)
    if status:
        rows.append(("its run is", status))
    rows.append(("versions", ", ".join(f"{name} {version}" for name, version in state["versions"].items())))
    return rows


def _status(folder: Path) -> str | None:
    """What the run beside it says of itself: running, finished, interrupted or failed."""
    try:
        settings: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    at = settings.get("interrupted_at")
    return f"{settings.get('status')}" + (f" at step {at}" if settings.get("status") == "interrupted" else "")


def _bytes(checkpoint: Checkpoint) -> int:
    return sum(facts["bytes"] for facts in checkpoint.files.values())


def _size(count: int) -> str:
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.2f} MB"
