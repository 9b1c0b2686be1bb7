"""Does the installed accelerate read every key of a config, and in this form?

The launcher checks top-level keys only: a misspelt key inside `fsdp_config` trains with the default. So the
names that it really reads are taken from the launcher itself, and everything else is a problem.
"""

import typing
from collections.abc import Iterator
from typing import Any

from toolkit.errors import nearest
from toolkit.launch.config import Config, is_a

# Sections of the yaml: the prefix of the launcher's arguments that they fill in, and whether the launcher
# adds the prefix where it is missing (`_validate_launch_command` of accelerate.commands.launch).
SECTIONS = {
    "deepspeed_config": ("", False),
    "dynamo_config": ("dynamo_", True),
    "fp8_config": ("fp8_", True),
    "fsdp_config": ("fsdp_", True),
    "megatron_lm_config": ("megatron_lm_", False),
    "mpirun_config": ("mpirun_", False),
    "parallelism_config": ("parallelism_config_", False),
}
# Older spellings that `BaseConfig.process_config` converts.
OLD_KEYS = {"fp16": bool, "dynamo_backend": str}


def schema_problems(config: Config) -> Iterator[str]:
    """Keys that the installed accelerate does not read, and values of a wrong type."""
    yield from (f"{config.at(key)}: the key stands in the file twice; delete one." for key in config.repeated)
    kinds = _top_level_kinds()
    for key, value in config.values.items():
        if key in ("gradient_accumulation_steps", "gradient_clipping"):
            continue  # said better where the step is checked
        if key not in kinds:
            yield f"{config.at(str(key))}: accelerate has no such key.{nearest(str(key), kinds)}"
        elif value is not None:
            yield from _type_problem(config, key, value, kinds[key])
            if key in SECTIONS and isinstance(value, dict):
                yield from _section_problems(config, key, value)


def _section_problems(config: Config, section: str, values: dict[str, Any]) -> Iterator[str]:
    prefix, adds_prefix = SECTIONS[section]
    read, unread, actions = section_names(section)
    for key, value in values.items():
        place = f"{section}.{key}"
        name = f"{prefix}{key}" if adds_prefix and not str(key).startswith(prefix) else str(key)
        if name in unread:
            yield (
                f"{config.at(place)}: the installed accelerate does not hand this key on to the training "
                "process, so it has no effect; remove it."
            )
        elif name not in read:
            yield f"{config.at(place)}: `{section}` has no such key.{nearest(name, read)}"
        elif name in actions and value is not None:
            yield from _argument_problem(config, place, value, actions[name])


def _argument_problem(config: Config, place: str, value: Any, action: Any) -> Iterator[str]:
    """Compare a nested value with the launcher's argument of that name."""
    if action.choices:
        choices = [str(choice) for choice in action.choices]
        # dynamo backends are written in capitals in yaml and in small letters on the command line.
        if str(value).lower() not in [choice.lower() for choice in choices]:
            unquoted = value is False and "no" in choices
            hint = " Unquoted `no` is read as false: quote it." if unquoted else nearest(str(value), choices)
            yield f"{config.at(place)}: expected one of {', '.join(choices)}.{hint}"
    elif action.type in (int, float) and not (value == "auto" or is_a(value, action.type)):
        yield f"{config.at(place)}: expected a number."
    elif action.default in ("true", "false") and str(value).lower() not in ("true", "false"):
        if place.endswith("reshard_after_forward") and isinstance(value, str):
            return  # FSDP1 takes names here
        yield f"{config.at(place)}: expected true or false."


def _type_problem(config: Config, key: str, value: Any, kind: type) -> Iterator[str]:
    if is_a(value, kind):
        return
    if kind is str and key == "distributed_type" and value is False and "num_processes" in config.values:
        return  # unquoted NO: the launcher gets along with it
    if kind is str and not isinstance(value, dict | list):
        meant = f"`{key}: '{config.written.get(key, value)}'`"
        read_as = "a boolean" if isinstance(value, bool) else "a number"
        yield f"{config.at(key)}: yaml reads this as {read_as}, accelerate needs a text; quote it: {meant}."
    elif kind is bool:
        yield f"{config.at(key)}: expected true or false, without quotes."
    else:
        wanted = {int: "a whole number without quotes", dict: "indented `key: value` lines", list: "a list"}
        yield f"{config.at(key)}: expected {wanted.get(kind, kind.__name__)}."


def _top_level_kinds() -> dict[str, type]:
    """Every key that `accelerate launch` takes at the top level, with the plain type of its value."""
    from accelerate.commands.config.config_args import ClusterConfig

    hints = typing.get_type_hints(ClusterConfig)
    return {key: _plain(hint) for key, hint in hints.items()} | OLD_KEYS


def _plain(hint: Any) -> type:
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    if typing.get_origin(hint) is list:
        return list
    kind = options[0] if options else hint
    return kind if kind in (int, bool, str, dict) else str  # enums are written as text


def section_names(section: str) -> tuple[set[str], set[str], dict[str, Any]]:
    """Names that a section may hold, names that are parsed but never read, and the launcher's arguments."""
    from accelerate.commands import launch
    from accelerate.utils import launch as environment

    read: set[str] = set()
    for function in (
        launch.deepspeed_launcher,
        environment.prepare_simple_launcher_cmd_env,
        environment.prepare_multi_gpu_env,
        environment.prepare_deepspeed_cmd_env,
        environment.prepare_extend_env_parallelism_config,
    ):
        # `args.name` is among the code's names, `getattr(args, "name", …)` among its constants.
        read.update(function.__code__.co_names)
        read.update(constant for constant in function.__code__.co_consts if isinstance(constant, str))
    prefix = SECTIONS[section][0]
    group = {"deepspeed_config": "DeepSpeed Arguments"}.get(section)
    actions = {
        action.dest: action
        for block in launch.launch_command_parser()._action_groups
        for action in block._group_actions
        if (block.title == group if group else action.dest.startswith(prefix))
    }
    if section == "fp8_config":  # handed on by prefix, whatever the name
        return set(actions), set(), actions
    extra = {name for name in read if name.startswith(prefix) and name.isidentifier() and name != prefix}
    accepted = {name for name in actions if name in read} | (extra if prefix else set())
    return accepted, set(actions) - accepted, actions
