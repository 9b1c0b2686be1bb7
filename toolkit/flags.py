"""How flags are made and read: from the command line, and from a yaml recipe."""

import argparse
import dataclasses
import sys
import types
import typing
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, nearest

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
