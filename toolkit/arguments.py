"""Typed flags: the one source of `--help`, yaml recipes and checks.

A flag is a dataclass field made with `flag(default, "help text")`. A task script derives its own flags
from `Arguments` and reads them with `parse`. Nothing here imports torch, so `--help` is instant.
"""

import argparse
import dataclasses
import sys
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, nearest

SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "inverse_sqrt",
)

# Flags of HF's scripts that have no counterpart by name.
ELSEWHERE = {
    "--fp16": " Precision belongs to the accelerate config: use one that ends in _fp16.",
    "--bf16": " Precision belongs to the accelerate config: use one that ends in _bf16.",
    "--warmup_ratio": " Use --warmup_steps with a number below 1.",
    "--do_train": " The script always trains: leave it out.",
    "--do_eval": " Evaluation follows from --validation_file: leave it out.",
    "--do_predict": " Prediction follows from --test_file: leave it out.",
    "--group_by_length": " Use --train_sampling_strategy group_by_length.",
    "--auto_find_batch_size": " Micro-batches always fit the memory: leave it out.",
}


def flag(default: Any, help: str, choices: tuple[str, ...] | None = None, defines: bool = False) -> Any:
    """A dataclass field that becomes `--name`.

    Args:
        defines: it is part of what a training is, so that a resumed run must have it as it was. Data, model, global
            batch and length of the run are compared by themselves.
    """
    metadata = {"help": help, "choices": choices, "defines": defines}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass
class Arguments:
    """Flags that every task has. Strategy and precision are not here: they belong to the accelerate config."""

    # Model
    model_name_or_path: str | None = flag(None, "Model folder or Hub name. Default: the demo model.")
    config_name: str | None = flag(None, "Config folder or Hub name, if not the model's own.")
    tokenizer_name: str | None = flag(None, "Tokenizer folder or Hub name, if not the model's own.")
    model_revision: str = flag("main", "Branch, tag or commit of a Hub model.")
    trust_remote_code: bool = flag(False, "Allow code that comes with a Hub model to run here.")
    cache_dir: str | None = flag(None, "Where downloads and encoded data are cached.")
    attn_implementation: str | None = flag(None, "Attention kernel that transformers shall use, e.g. sdpa.")
    dropout: float | None = flag(None, "Overrides every dropout probability of the model.", defines=True)
    torch_compile: bool = flag(False, "Compile each block of the model at its first use: one process, or DDP.")

    # Adapters (LoRA)
    use_peft: bool = flag(False, "Train adapters of low rank (LoRA) in place of the model's own weights.", defines=True)
    lora_r: int = flag(8, "Rank of the adapters.", defines=True)
    lora_alpha: float = flag(16.0, "What adapters add is multiplied by this over the rank.", defines=True)
    lora_dropout: float = flag(0.0, "Dropout of what goes into the adapters.", defines=True)
    lora_target_modules: list[str] = flag(
        ["all-linear"], "Layers that get an adapter, e.g. q_proj; all-linear: all of the blocks.", defines=True
    )
    merge_adapter: bool = flag(False, "Save the whole model with the adapters merged into it, not the adapters alone.")

    # Data
    dataset_name: str | None = flag(None, "Hub data set, or a folder made by datasets' save_to_disk.")
    dataset_config_name: str | None = flag(None, "Configuration of the Hub data set.")
    train_file: str | None = flag(None, "CSV, TSV, JSON, JSONL or Parquet file to train on.")
    validation_file: str | None = flag(None, "File to evaluate on.")
    test_file: str | None = flag(None, "File to predict, with or without labels; gives predictions.csv.")
    validation_split_percentage: float | None = flag(
        None, "Percentage of the training rows held out for evaluation where there is no validation file."
    )
    delimiter: str | None = flag(None, "Column delimiter of CSV files. Default: found from the header.")
    quoting: str = flag("csv", "csv: quotes group a field; none: a quote is a character.", ("csv", "none"))
    column_names: list[str] | None = flag(None, "Column names of CSV/TSV files without a header line.")
    max_length: int | None = flag(None, "Longest sample in tokens. Default: what model and tokenizer allow.")
    max_train_samples: int | None = flag(None, "Train on the first N samples only.")
    max_eval_samples: int | None = flag(None, "Evaluate on the first N samples only.")
    preprocessing_num_workers: int | None = flag(None, "Processes that tokenize. Default: the tokenizer's threads.")
    dataloader_num_workers: int = flag(0, "Processes that collate batches ahead of the step.")

    # The step
    global_batch_size: int | None = flag(None, "Samples per optimizer step, whatever the machine. Default: 32.")
    per_device_train_batch_size: int | None = flag(
        None,
        "Upper bound of one micro-batch per device. With --gradient_accumulation_steps it defines the "
        "global batch as their product with the number of data-parallel devices, as in HF Trainer.",
    )
    gradient_accumulation_steps: int | None = flag(None, "Only together with --per_device_train_batch_size.")
    per_device_eval_batch_size: int | None = flag(None, "Upper bound of one evaluation batch. Default: 64.")
    train_sampling_strategy: str = flag(
        "random",
        "group_by_length puts samples of similar length into one global batch, which changes the training.",
        ("random", "group_by_length"),
        defines=True,
    )
    num_train_epochs: float = flag(3.0, "Passes over the training data.")
    max_steps: int | None = flag(None, "Optimizer steps; overrides --num_train_epochs.")
    optim: str = flag("adamw", "Optimizer.", ("adamw", "sgd"), defines=True)
    learning_rate: float = flag(5e-5, "Highest learning rate.", defines=True)
    adam_beta1: float = flag(0.9, "AdamW's beta1.", defines=True)
    adam_beta2: float = flag(0.999, "AdamW's beta2.", defines=True)
    adam_epsilon: float = flag(1e-8, "AdamW's epsilon.", defines=True)
    weight_decay: float = flag(0.0, "Decoupled weight decay of matrices outside normalisation layers.", defines=True)
    lr_scheduler_type: str = flag("linear", "Learning-rate schedule.", SCHEDULES, defines=True)
    warmup_steps: float = flag(0.0, "Warm-up steps; below 1 a share of all steps.", defines=True)
    max_grad_norm: float = flag(1.0, "Clip the norm of the whole gradient to this; 0: no clipping.", defines=True)
    label_smoothing_factor: float = flag(0.0, "Label smoothing of the training loss.", defines=True)
    skip_nonfinite_steps: int = flag(0, "How many steps with a non-finite loss or gradient to skip before stopping.")
    gradient_checkpointing: bool = flag(False, "Recompute activations in the backward pass to save memory.")
    seed: int = flag(42, "Seed of initialisation, order and dropout.", defines=True)
    full_determinism: bool = flag(False, "Bit-equal repetition on a GPU, at some cost in speed.")

    # The cut that is not the accelerate config's
    data_parallel: bool = flag(
        False, "One process drives all GPUs through torch's own module: the documented baseline."
    )
    data_parallel_replicas: int | None = flag(None, "Replicas of the --data_parallel rehearsal on a CPU. Default: 2.")
    data_parallel_loss: str = flag(
        "gathered",
        "Where --data_parallel computes the loss: gathered on the first device, or in each replica.",
        ("gathered", "replica"),
    )
    pipeline_stages: int = flag(1, "Split the layers over so many consecutive ranks: pipeline parallelism.")
    pipeline_microbatches: int | None = flag(
        None, "Micro-batches of a step in the pipeline; 1: plain model parallelism. Default: 4 per stage."
    )
    pipeline_schedule: str = flag(
        "1f1b", "1f1b holds fewer activations than gpipe and idles as long.", ("1f1b", "gpipe")
    )

    # Evaluation, logging, output
    eval_strategy: str = flag("epoch", "When to evaluate beside the end of training.", ("no", "steps", "epoch"))
    eval_steps: float | None = flag(None, "Steps between evaluations; below 1 a share of all steps.")
    diagnostics: bool = flag(
        False, "Measure a step: bytes sent and held, idle share, replicas, peak memory; diagnostics.json."
    )
    profile: bool = flag(
        False,
        "The same, and what the time of steps 4 to 6 is spent on: data, forward, backward, communication, optimizer.",
    )
    save_strategy: str = flag(
        "epoch", "When to write a checkpoint in the course of training.", ("no", "steps", "epoch")
    )
    save_steps: float = flag(
        500.0, "Steps between checkpoints with --save_strategy steps; below 1 a share of all steps."
    )
    save_total_limit: int | None = flag(2, "Checkpoints to keep: the oldest go first, never the best or the newest.")
    async_save: bool = flag(False, "Write checkpoints in the background, from a copy in main memory.")
    resume_from_checkpoint: str | None = flag(
        None, "A checkpoint to go on from; auto: the newest whole one in --output_dir, if there is one."
    )
    allow_changed: list[str] | None = flag(
        None, "What may differ from the checkpoint's training, by the names that the error tells, e.g. learning_rate."
    )
    load_best_model_at_end: bool = flag(False, "End with the weights of the best evaluation.")
    metric_for_best_model: str | None = flag(None, "Figure that tells the best evaluation. Default: loss.")
    greater_is_better: bool | None = flag(None, "Whether it is better greater. Default: unless it is a loss.")
    early_stopping_patience: int | None = flag(None, "Evaluations without a better one after which to stop.")
    logging_steps: int = flag(10, "Steps between log lines where there is no terminal, and between tracker entries.")
    report_to: str = flag("none", "Tracker.", ("none", "tensorboard", "wandb", "trackio"))
    output_dir: str | None = flag(None, "Where the model and all results go. Default: output/<task>.")
    overwrite_output_dir: bool = flag(False, "Replace the results of an earlier run in --output_dir.")
    push_to_hub: bool = flag(False, "Upload the model when training has ended.")
    hub_model_id: str | None = flag(None, "Hub repository to push to.")


def parse(cls: type, argv: list[str] | None = None, description: str | None = None) -> Any:
    """Read flags into `cls`; a yaml recipe may stand first, flags on the command line win.

    The result's `given` holds the names of the flags that the user has set.

    Raises:
        UserError: all unknown flags and keys and all unreadable values at once, each with the nearest
            valid name.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    recipe: dict[str, Any] = {}
    parser = _Parser(description=description, allow_abbrev=False, formatter_class=_HelpFormatter)
    problems = parser.problems
    if argv and not argv[0].startswith("-"):
        recipe, found = _read_recipe(cls, Path(argv.pop(0)))
        problems += found
    for field, kind in _fields(cls):
        _add(parser, field, kind)
    known, unknown = parser.parse_known_args(argv)
    names = [f"--{field.name}" for field, _ in _fields(cls)]
    for at, word in enumerate(unknown):
        if word.startswith("-"):
            name = word.split("=")[0]
            problems.append(f"unknown flag {name}.{ELSEWHERE.get(name) or nearest(name, names)}")
        elif at == 0 or not unknown[at - 1].startswith("-"):  # else the value of an unknown flag
            problems.append(f"unexpected word {word!r} on the command line: every value belongs behind a --flag.")
    if problems:
        raise UserError(*problems)
    args = cls(**{**recipe, **vars(known)})
    args.given = frozenset({*recipe, *vars(known)})
    return args


def changed(args: Any) -> dict[str, Any]:
    """The flags that differ from their defaults, in order of definition."""
    return {
        field.name: getattr(args, field.name)
        for field in dataclasses.fields(args)
        if getattr(args, field.name) != _default(field)
    }


class _Parser(argparse.ArgumentParser):
    """Collects errors where argparse would stop at the first."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.problems: list[str] = []

    def error(self, message: str) -> None:
        # argparse reports a flag without its value here; nothing after it was read.
        raise UserError(*self.problems, f"command line: {message}.")


class _HelpFormatter(argparse.HelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=40, width=110)


def _fields(cls: type) -> list[tuple[dataclasses.Field, Any]]:
    hints = typing.get_type_hints(cls)
    return [(field, hints[field.name]) for field in dataclasses.fields(cls)]


def _default(field: dataclasses.Field) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def _add(parser: _Parser, field: dataclasses.Field, kind: Any) -> None:
    default = _default(field)
    text = field.metadata.get("help", "").replace("%", "%%")
    if default is not None and default is not False and default != []:
        text += f" (default: {default})"
    convert = _Convert(parser, field, kind)
    # SUPPRESS leaves absent flags out of the namespace, so that a recipe's value is not overwritten.
    options: dict[str, Any] = {"help": text, "default": argparse.SUPPRESS, "type": convert, "metavar": convert.metavar}
    if convert.base is bool:
        options |= {"nargs": "?", "const": True}
    elif convert.many:
        options |= {"nargs": "+", "action": _Words}
    parser.add_argument(f"--{field.name}", **options)


class _Words(argparse.Action):
    """`--columns a b` and `--columns a,b` are the same."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, [word for value in values for word in value])


class _Convert:
    """Turns one word of the command line, or one yaml value, into the field's type."""

    def __init__(self, parser: Any, field: dataclasses.Field, kind: Any) -> None:
        self.problems: list[str] = parser.problems
        self.name = f"--{field.name}"
        self.choices = field.metadata.get("choices")
        options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
        base = next(option for option in options if option is not type(None))
        self.many = typing.get_origin(base) is list
        self.base = typing.get_args(base)[0] if self.many else base
        self.metavar = "|".join(self.choices) if self.choices else self.base.__name__.upper()

    def __call__(self, word: str) -> Any:
        if self.many:
            return [self._one(part) for part in map(str.strip, word.split(",")) if part]
        return self._one(word)

    def _one(self, word: str) -> Any:
        try:
            if self.base is bool:
                value: Any = {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}[
                    word.lower()
                ]
            elif self.base is int:
                value = int(word.replace("_", ""))
            else:
                value = self.base(word)
        except (ValueError, KeyError):
            self.problems.append(f"{self.name} {word!r}: expected {_KINDS[self.base]}.")
            return None
        if self.choices and value not in self.choices:
            self.problems.append(
                f"{self.name} {word!r}: expected one of {', '.join(self.choices)}.{nearest(word, self.choices)}"
            )
        return value


_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _read_recipe(cls: type, path: Path) -> tuple[dict[str, Any], list[str]]:
    """A yaml recipe's values in the fields' types, and what is wrong with it."""
    import yaml

    if not path.is_file():
        raise UserError(f"recipe {path}: no such file. A first word without -- is read as a yaml file of flags.")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8-sig")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {path} is not valid yaml: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"recipe {path}: expected `flag: value` lines, found a {type(content).__name__}.")
    collector = _Parser(add_help=False)
    fields = {field.name: (field, kind) for field, kind in _fields(cls)}
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).removeprefix("--")
        if name not in fields:
            collector.problems.append(f"recipe {path}: unknown key `{key}`.{nearest(name, fields)}")
            continue
        if value is None:
            continue
        convert = _Convert(collector, *fields[name])
        before = len(collector.problems)
        words = value if isinstance(value, list) else [value]
        if convert.base is str and not convert.choices and any(isinstance(word, bool) for word in words):
            collector.problems.append(
                f"recipe {path}, key `{key}`: yes, no, on, off, true and false without quotes are no text in yaml. "
                "Put the value in quotes."
            )
        elif convert.many and isinstance(value, list):
            values[name] = [convert._one(str(part)) for part in value]
        elif isinstance(value, list | dict):
            collector.problems.append(f"recipe {path}, key `{key}`: expected one value, found {value!r}.")
        elif convert.choices and isinstance(value, bool):
            # An unquoted `no` is False in yaml.
            values[name] = convert("yes" if value else "no")
        else:
            values[name] = convert(str(value))
        collector.problems[before:] = [f"recipe {path}: {problem}" for problem in collector.problems[before:]]
    return values, collector.problems
