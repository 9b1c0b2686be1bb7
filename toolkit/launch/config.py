"""Reading an accelerate yaml, with the line of every key so that a message can point at it."""

import difflib
import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from toolkit.errors import UserError, nearest

# Flags of `accelerate launch` that override a top-level key.
LAUNCH_FLAGS = {
    "num_processes": int,
    "num_machines": int,
    "machine_rank": int,
    "main_process_ip": str,
    "main_process_port": int,
    "mixed_precision": str,
    "gpu_ids": str,
}
# Its flags that override a key of a section: all of a prefix, and DeepSpeed's, which have none.
SECTION_PREFIXES = {"fsdp_": "fsdp_config", "parallelism_config_": "parallelism_config"}
DEEPSPEED_FLAGS = (
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero3_init_flag",
    "zero3_save_16bit_model",
    "deepspeed_config_file",
    "deepspeed_multinode_launcher",
)


@dataclass(frozen=True)
class Config:
    """An accelerate config file."""

    path: Path
    values: dict[str, Any]
    lines: dict[str, int]  # "fsdp_config.fsdp_version" -> line
    flags: list[str]  # task flags that the config needs, from `# flags:` in its head
    repeated: list[str] = field(default_factory=list)  # keys that stand there twice
    written: dict[str, str] = field(default_factory=dict)  # scalars as the file has them: `no`, not false

    def at(self, key: str) -> str:
        """Where a key stands and what it says, the head of every message; a nested key as `section.key`."""
        value = self.find(key)
        if key not in self.lines:
            flag = key.rpartition(".")[2]
            return f"{self.path}: key `{key}`" if value is None else f"accelerate launch --{flag} {value}"
        shown = "" if isinstance(value, dict | list) else f": {self.written.get(key, json.dumps(value))}"
        return f"{self.path}:{self.lines[key]}: key `{key}{shown}`"

    def find(self, key: str) -> Any:
        """The value of a key, nested as `section.key`; None where it is absent."""
        value: Any = self.values
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        return value

    @property
    def kind(self) -> str:
        """The distributed type. Unquoted NO is read as False by yaml."""
        return "NO" if self.values.get("distributed_type") is False else self.get("distributed_type", str, "")

    @property
    def local_processes(self) -> int:
        """Processes on each machine."""
        return self.get("num_processes", int, 1) // max(1, self.get("num_machines", int, 1))

    @property
    def precision(self) -> str:
        """The mixed precision: no, bf16, fp16 or whatever else stands there."""
        default = "fp16" if self.values.get("fp16") is True else "no"
        return self.get("mixed_precision", str, default).lower()

    @property
    def on_cpu(self) -> bool:
        """True where the config keeps off the GPUs."""
        return self.values.get("use_cpu") is True

    def get(self, key: str, kind: type, default: Any) -> Any:
        """The value of a top-level key, or the default where it is absent or of another type."""
        value = self.values.get(key)
        return value if is_a(value, kind) else default


def configs_folder() -> Path:
    """`accelerate_configs/` beside the package."""
    return Path(__file__).resolve().parents[2] / "accelerate_configs"


def find_config(name: str) -> Path:
    """A path as it is, or a bare name such as `multi_gpu` from `accelerate_configs/`.

    Raises:
        UserError: there is no such config.
    """
    path = Path(name)
    if path.suffix or path.is_file() or path.parent != Path("."):
        return path
    known = {file.stem: file for file in sorted(configs_folder().glob("*.yaml"))}
    if name not in known:
        raise UserError(f"config {name}: there is none of this name.{nearest(name, known)} Known: {', '.join(known)}.")
    return known[name]


def read_config(path: str | Path) -> Config:
    """Read an accelerate config (yaml or json).

    Raises:
        UserError: the file is missing, is not valid yaml or json, or holds no mapping.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(_missing(path))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path}: not a text file in UTF-8.") from None
    values, places, written = _parse_json(path, text) if path.suffix == ".json" else _parse_yaml(path, text)
    if not isinstance(values, dict):
        found = "nothing" if values is None else f"a {type(values).__name__}"
        raise UserError(f"{path}: expected `key: value` lines, found {found}.")
    names = [name for name, _ in places]
    repeated = sorted({name for name in names if names.count(name) > 1})
    # The last of two equal keys wins in yaml.
    return Config(path, values, dict(places), _head_flags(text), repeated, written)


def with_launch_flags(config: Config, words: Sequence[str]) -> Config:
    """The config as `accelerate launch` sees it when these words of its own command line override keys.

    Stops at the script, whose flags are its own.
    """
    values, given = dict(config.values), set()
    for word, following in zip(words, [*words[1:], ""]):
        if word.endswith(".py") and not word.endswith("launch.py"):
            break
        if not word.startswith("--"):
            continue
        flag, equals, value = word.removeprefix("--").partition("=")
        name, value = flag.replace("-", "_"), value if equals else following
        section = _section_of(name)
        if name in LAUNCH_FLAGS:
            values[name] = int(value) if LAUNCH_FLAGS[name] is int and value.isdigit() else value
            given.add(name)
        elif section and isinstance(values.get(section) or {}, dict):
            values[section] = {**(values.get(section) or {}), name: _plain(value)}
            given.add(f"{section}.{name}")
    return replace(config, values=values, lines={key: line for key, line in config.lines.items() if key not in given})


def _section_of(flag: str) -> str | None:
    if flag in DEEPSPEED_FLAGS:
        return "deepspeed_config"
    return next((section for prefix, section in SECTION_PREFIXES.items() if flag.startswith(prefix)), None)


def _plain(word: str) -> Any:
    """A word of the command line as a number or truth value, where it is one."""
    try:
        return json.loads(word.lower())
    except ValueError:
        return word


def is_a(value: Any, kind: type) -> bool:
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _missing(path: Path) -> str:
    if path.is_dir():
        return f"config {path}: a folder; name a yaml file in it."
    folder = path.parent
    names = [file.name for file in folder.iterdir() if file.is_file()] if folder.is_dir() else []
    close = difflib.get_close_matches(path.name, names, n=1)
    return f"config {path}: no such file." + (f" Did you mean `{folder / close[0]}`?" if close else "")


def _head_flags(text: str) -> list[str]:
    """Task flags of the `# flags: …` lines that stand before the first key."""
    flags: list[str] = []
    for line in text.splitlines():
        line = line.strip()
        if line and not line.startswith("#"):
            break
        if line.startswith("# flags:"):
            flags += shlex.split(line.removeprefix("# flags:"))
    return flags


def _parse_json(path: Path, text: str) -> tuple[Any, list[tuple[str, int]], dict[str, str]]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}:{error.lineno}: not valid json: {error.msg}.") from None
    lines = text.splitlines()

    def line_of(key: str) -> int:
        return next((number for number, line in enumerate(lines, 1) if f'"{key}"' in line), 1)

    places = []
    for key, value in values.items() if isinstance(values, dict) else ():
        places.append((key, line_of(key)))
        places += [(f"{key}.{name}", line_of(name)) for name in value] if isinstance(value, dict) else []
    return values, places, {}


def _parse_yaml(path: Path, text: str) -> tuple[Any, list[tuple[str, int]], dict[str, str]]:
    import yaml

    try:
        values, root = yaml.safe_load(text), yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        raise UserError(f"{where}: not valid yaml: {getattr(error, 'problem', None) or error}.") from None

    written: dict[str, str] = {}

    def walk(node: Any, prefix: str = "") -> Iterator[tuple[str, int]]:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            name = f"{prefix}{key.value}"
            if isinstance(value, yaml.ScalarNode):
                written[name] = value.value
            yield name, key.start_mark.line + 1
            yield from walk(value, f"{name}.")

    return values, list(walk(root)), written
