"""Going on from a checkpoint: is it the same training, and where does it stand?

What defines a training (data, model, seed, global batch, optimizer, schedule) must be what it was, or the user says
which of it he means to change. What the machine decides (strategy, world size, precision, micro-batches) may differ.
"""

import dataclasses
import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from toolkit.arguments import Arguments
from toolkit.checkpoint.folder import Checkpoint, newest
from toolkit.errors import UserError, nearest

AUTO = "auto"
# Not config fields of the model, but of how it was saved or is run.
UNRELATED = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache", "architectures")


def find(wanted: str | None, folder: Path) -> Checkpoint | None:
    """The checkpoint that `--resume_from_checkpoint` means; None: a fresh start.

    Raises:
        UserError: the one that is named is no checkpoint, or not whole.
    """
    if wanted is None:
        return None
    if wanted == AUTO:
        return newest(folder)
    found = Checkpoint(wanted)
    found.verify()
    return found


def training(
    args: Arguments, global_batch: int, total_steps: int, fingerprint: str, config: Mapping[str, Any]
) -> dict[str, Any]:
    """What defines a training, by the names under which a difference is told and allowed.

    Args:
        fingerprint: of the training split as it was encoded.
        config: the model's, as a dict.
    """
    flags = {field.name: getattr(args, field.name) for field in dataclasses.fields(args) if field.metadata["defines"]}
    related = {key: value for key, value in config.items() if key not in UNRELATED and "dropout" not in key}
    text = json.dumps(related, sort_keys=True, default=str)
    return {
        **json.loads(json.dumps(flags, default=str)),
        "global_batch_size": global_batch,
        "total_steps": total_steps,
        "data": fingerprint,
        "model": hashlib.sha256(text.encode()).hexdigest()[:16],
    }


def check_same(saved: Mapping[str, Any], now: Mapping[str, Any], allowed: Collection[str]) -> list[str]:
    """What differs from the checkpoint's training beyond what is allowed, a message each."""
    problems = [
        f"--allow_changed {name}: nothing of this name defines a training.{nearest(name, now)}"
        for name in allowed
        if name not in now
    ]
    advice = {
        "data": "the training data is not the same",
        "model": "the model's config is not the same",
        "total_steps": "the run's length, and with it the schedule, differs",
    }
    for name in now:
        if name in saved and saved[name] != now[name] and name not in allowed:
            what = advice.get(name, f"--{name}")
            problems.append(
                f"{what}: {saved[name]} in the checkpoint, {now[name]} here. Restore it, or add it to --allow_changed "
                f"({name})."
            )
    return problems


def raise_differences(problems: list[str], path: Path) -> None:
    """Raise one error that lists each difference."""
    if problems:
        raise UserError(f"{path} is a checkpoint of another training:", *problems)
