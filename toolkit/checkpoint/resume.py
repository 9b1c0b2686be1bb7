"""Going on from a checkpoint: is it the same training, and where does it stand?

What defines a training (data, model, seed, global batch, optimizer, schedule) must be what it was, or the user says
which of it is meant to change. What the machine decides (strategy, world size, precision, micro-batches) may differ.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolkit.arguments import Arguments
from toolkit.checkpoint.folder import Checkpoint, newest
from toolkit.data.plan import Schedule
from toolkit.errors import UserError, nearest
from toolkit.report.console import say
from toolkit.report.results import to_json
from toolkit.strategy.portable import MODEL, Entry

AUTO = "auto"
# Fields of a model's config that say how it was saved, is run or is used, not what it is.
UNRELATED = {
    *("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache"),
    *("output_attentions", "output_hidden_states", "return_dict", "text_columns", "threshold"),
}
LENGTH = "total_steps"
SHOWN = 6  # fields of a config
ANEW = (
    "So there is nothing to go on from. Begin anew with another --output_dir, or without --resume_from_checkpoint and "
    "with --overwrite_output_dir."
)
ANOTHER = "Name another one, or let --resume_from_checkpoint auto take the one in --output_dir that was written last."
WORDS = {
    "data": "the training data (data)",
    "base": "the model that the adapters build on (base)",
    LENGTH: "the length of the run, and with it the schedule (total_steps)",
}


def find(wanted: str, folder: Path) -> Checkpoint | None:
    """The checkpoint that `--resume_from_checkpoint` means, whole; None: there is none yet.

    Raises:
        UserError: the one that is named is no checkpoint, or not whole; or none of several is.
    """
    try:
        if wanted == AUTO:
            return newest(folder)
        found = Checkpoint(wanted)
        found.verify()
        return found
    except UserError as error:
        raise UserError(*error.messages, ANEW if wanted == AUTO else ANOTHER) from None


def training(args: Arguments, schedule: Schedule, data: str, config: Any) -> dict[str, Any]:
    """What defines a training, by the names under which a difference is told and allowed; plain JSON.

    Args:
        data: fingerprint of the training split as it was encoded.
        config: the model's.
    """
    flags = {field.name: getattr(args, field.name) for field in dataclasses.fields(args) if field.metadata["defines"]}
    fields = {key: value for key, value in config.to_dict().items() if key not in UNRELATED and "drop" not in key}
    found = {
        **flags,
        "global_batch_size": schedule.global_batch,
        LENGTH: schedule.total_steps,
        "data": data,
        MODEL: fields,
        "base": args.model_name_or_path if args.use_peft else None,  # whose weights the checkpoint does not hold
    }
    return json.loads(to_json(found))


def same_flags(saved: Mapping[str, Any], args: Arguments) -> bool:
    """Whether `args` define the training of these flags, as far as can be told without its data."""
    names = [field.name for field in dataclasses.fields(args) if field.metadata["defines"]]
    now = json.loads(to_json({name: getattr(args, name) for name in (*names, "num_train_epochs", "max_steps")}))
    return all(saved.get(name) == value for name, value in now.items())


def check_same(checkpoint: Checkpoint, now: Mapping[str, Any], allowed: list[str]) -> None:
    """Make sure that the training is the checkpoint's, but for what is allowed to differ, and goes beyond it.

    Raises:
        UserError: it lists each difference, and names the flag that allows them; or the run ends before the checkpoint.
    """
    every = f" It can be {', '.join(now)}."
    unknown = [
        f"--allow_changed {name}: nothing of this name defines a training.{nearest(name, now) or every}"
        for name in allowed
        if name not in now
    ]
    if unknown:
        raise UserError(*unknown)
    saved = checkpoint.state["training"]
    texts = {name: _difference(name, saved[name], value) for name, value in now.items() if name in saved}
    texts = {name: text for name, text in texts.items() if text}
    refused = [name for name in texts if name not in allowed]
    if refused:
        everything = ",".join(name for name in now if name in refused or name in allowed)
        raise UserError(
            f"{checkpoint.path} is a checkpoint of another training:",
            *(texts[name] for name in refused),
            f"Give it what it had, or say that this is meant: --allow_changed {everything}",
        )
    if checkpoint.step > now[LENGTH]:
        raise UserError(
            f"{checkpoint.path} is after step {checkpoint.step}, and the run is to end after step {now[LENGTH]}. Give "
            "a greater --max_steps or --num_train_epochs, or an earlier checkpoint."
        )
    for text in texts.values():
        say(f"changed, as allowed: {text}")


def check_tensors(checkpoint: Checkpoint, entries: Mapping[str, Entry], moments: bool) -> None:
    """Make sure that a checkpoint holds what the model needs, in its shapes.

    Args:
        moments: whether the optimizer's state counts.

    Raises:
        UserError: it does not, or holds more.
    """
    kinds = [key for key in entries if moments or key.startswith(f"{MODEL}/")]
    there = {key for key in checkpoint.state["tensors"] if moments or key.startswith(f"{MODEL}/")}
    problems = []
    missing, beside = [key for key in kinds if key not in there], sorted(there - set(kinds))
    if missing:
        problems.append(f"it has no {_few(missing)}.")
    if beside:
        problems.append(f"it has {_few(beside)} besides.")
    for key in kinds:
        shape = checkpoint.shape(*key.split("/", 1)) if key in there else entries[key].shape
        if shape != entries[key].shape:
            problems.append(f"{key} is {list(shape)} in it, and {list(entries[key].shape)} here.")
            break
    if problems:
        raise UserError(f"{checkpoint.path} is a checkpoint of another model:", *problems)


def describe(machine: Mapping[str, Any]) -> str:
    """Under what a checkpoint was written, such as `DDP x 2, fp32, CPU`."""
    precision = {"no": "fp32"}.get(machine["precision"], machine["precision"])
    count = f" x {machine['world_size']}" if machine["world_size"] > 1 else ""
    return f"{machine['strategy']}{count}, {precision}, {machine['device']}"


def _difference(name: str, saved: Any, now: Any) -> str:
    """What differs, or nothing."""
    if saved == now:
        return ""
    if name == "data":
        return f"{WORDS[name]}: other texts or labels, another order, tokenizer or length."
    if name != MODEL:
        return f"{WORDS.get(name, f'--{name}')}: {saved} in the checkpoint, {now} here."
    # A field that only one of two versions of transformers knows is no difference.
    fields = [key for key in saved if key in now and saved[key] != now[key]]
    shown = [f"{key} {_short(saved[key])} in the checkpoint, {_short(now[key])} here" for key in fields[:SHOWN]]
    return f"the model (model): {'; '.join(shown)}." if shown else ""


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _few(names: list[str]) -> str:
    return names[0] + (f" and {len(names) - 1} more" if names[1:] else "")
