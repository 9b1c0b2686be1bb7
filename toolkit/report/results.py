"""Result files: strict JSON, written whole or not at all, and never over somebody else's work."""

import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from toolkit.errors import UserError

RESULTS = (
    *("run.json", "metrics.jsonl", "train_results.json", "eval_results.json", "all_results.json"),
    *(
        "eval_report.json",
        "test_results.json",
        "test_report.json",
        "predictions.csv",
        "training.png",
        "diagnostics.json",
    ),
    "README.md",
)
# What a run leaves at the top of its output folder: `--overwrite_output_dir` removes these and nothing else.
RESULT_FILES = (
    *RESULTS,
    *("config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "vocab.txt", "vocab.json", "merges.txt", "spiece.model", "tokenizer.model"),
    *("sentencepiece.bpe.model", "bpe.codes", "adapter_config.json", "adapter_model.safetensors"),
)
SHARDS = "model-*-of-*.safetensors"
UMASK = os.umask(0)  # can only be read by setting it, which threads that write files would notice
os.umask(UMASK)
# These files make a folder this toolkit's; a config.json or a README.md may be anybody's.
MARKS = ("run.json", "metrics.jsonl")


class Unwritable(UserError):
    """A file that cannot be written: `reason` says which and why, the message also what to do."""

    def __init__(self, name: str, folder: Path, error: Exception) -> None:
        self.reason = f"{name} cannot be written to {folder}: {getattr(error, 'strerror', None) or error}."
        super().__init__(f"{self.reason} Make room, or choose another folder.")


def to_json(data: Any, indent: int | None = None) -> str:
    """Strict JSON at full precision, of dicts, lists, numbers (numpy's too), texts, paths and None.

    JSON has no NaN and no infinity. NaN, which is no value, becomes null. An infinity is a value (a
    perplexity that overflowed) and becomes the text "Infinity" or "-Infinity", which `float` reads.
    """
    return json.dumps(_plain(data), indent=indent, ensure_ascii=False, allow_nan=False)


def write_json(path: Path, data: Any) -> None:
    """Write `to_json(data)` in one move: whatever happens, the old file is there or the new one, whole."""
    write_text(path, to_json(data, indent=2) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file in one move. Line ends are written as they are."""
    # A lone surrogate, which a text of the data may hold, is written as an escape rather than lost.
    write_bytes(path, text.encode("utf-8", "backslashreplace"))


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file in one move.

    Raises:
        Unwritable: it cannot be.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with _writing(path):
        try:
            temporary.write_bytes(content)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unwritable(path.name, path.parent, error) from None


class MetricsLog:
    """`metrics.jsonl`: one strict JSON object a line, flushed, so that a killed run keeps its lines."""

    def __init__(self, path: Path) -> None:
        self._path = Path(path)
        with _writing(self._path):
            self._file = self._path.open("a", encoding="utf-8", buffering=1)

    def write(self, **row: Any) -> None:
        """Append one line."""
        with _writing(self._path):
            self._file.write(to_json(row) + "\n")

    def close(self) -> None:
        """Close the file; more than once is fine."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The rows of a `metrics.jsonl`. A last line that a kill cut short is left out."""
    rows = []
    for line in Path(path).read_text(encoding="utf-8").split("\n"):
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows


def claim_output(path: Path, overwrite: bool) -> None:
    """Make the output folder free for results. Call it in one process, when there is something to write.

    With `overwrite`, the result files of an earlier run of this toolkit are removed; all other files stay.

    Raises:
        UserError: see `check_output`.
    """
    # The mark goes last: a removal that is interrupted can be repeated.
    for name in sorted(check_output(path, overwrite), key=lambda name: name in MARKS):
        (Path(path) / name).unlink()


def remove_checkpoints(path: Path) -> None:
    """Remove the checkpoints of an earlier run, known by their state.json, and what is left of half written ones."""
    for folder in Path(path).glob("checkpoint-*"):
        half = folder.name.endswith((".writing", ".removing"))
        if folder.is_dir() and (half or (folder / "state.json").is_file()):
            shutil.rmtree(folder)


def check_output(path: Path, overwrite: bool) -> list[str]:
    """Make the output folder where there is none, or make sure that nothing in it would be lost.

    Returns:
        The results of an earlier run that `claim_output` would remove.

    Raises:
        UserError: the folder is not empty and `overwrite` is false; it holds files with the names of our
            results that no run of this toolkit has left; or it cannot be made or written.
    """
    path = Path(path)
    if path.exists() and not path.is_dir():
        raise UserError(f"--output_dir {path} is a file, not a folder. Give another --output_dir.")
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:  # bytes that the locale has no characters for; the tokenizer's save fails on them
        raise UserError(
            f"--output_dir {str(path)!a}: this locale cannot write such a name. Set the environment variable "
            "PYTHONUTF8=1, or give a name of ASCII letters."
        ) from None
    try:
        path.mkdir(parents=True, exist_ok=True)
        present = sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise UserError(f"--output_dir {path}: {error.strerror}. Give another --output_dir.") from None
    if not os.access(path, os.W_OK):
        raise UserError(f"--output_dir {path} cannot be written. Give another --output_dir.")
    ours = any(name in MARKS for name in present)
    results = [name for name in present if name in RESULT_FILES or Path(name).match(SHARDS)]
    if present and not overwrite:
        found = "the results of another run" if ours else "files that are not of a run"
        raise UserError(
            f"--output_dir {path} holds {found} ({_few(present)}); nothing was changed. Give another "
            "--output_dir, or --overwrite_output_dir to replace the results in it (other files stay)."
        )
    if results and not ours:
        raise UserError(
            f"--output_dir {path} holds {_few(results)}, but no {MARKS[0]}: no run of this toolkit wrote "
            "them, so --overwrite_output_dir leaves them alone. Give another --output_dir."
        )
    return results


def last_folder(folder: Path) -> Path | None:
    """The last one that `new_folder` has made."""
    numbers = {path: path.name.removeprefix(f"{folder.name}-") for path in folder.parent.glob(f"{folder.name}-*")}
    made = {int(number): path for path, number in numbers.items() if number.isdecimal() and path.is_dir()}
    return made[max(made)] if made else folder if folder.is_dir() else None


def new_folder(folder: Path) -> Path:
    """Make `folder`, or where runs have been before, `folder-2`, `folder-3`, …; two runs never get the same."""
    count, free = 1, folder
    while True:
        try:
            free.mkdir(parents=True)
            return free
        except FileExistsError:
            count += 1
            free = folder.with_name(f"{folder.name}-{count}")
        except OSError as error:
            raise UserError(f"the folder {free} cannot be made: {error.strerror}. Give an --output_dir.") from None


def _few(names: list[str]) -> str:
    rest = f" and {len(names) - 4} more" if len(names) > 4 else ""
    return ", ".join(names[:4]) + rest


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy's and torch's scalars and arrays
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if isinstance(value, float):
        return value if math.isfinite(value) else _NOT_FINITE.get(value)
    return str(value) if isinstance(value, Path) else value


_NOT_FINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}  # and NaN: null


@contextmanager
def model_written_to(folder: Path) -> Iterator[None]:
    """Inside it a model is written.

    Raises:
        Unwritable: it cannot be.
    """
    from safetensors import SafetensorError

    try:
        with libraries_write(folder):
            yield
    except (OSError, SafetensorError) as error:
        name = getattr(error, "filename", None)
        raise Unwritable(Path(name).name if name else "the model", folder, error) from None


@contextmanager
def libraries_write(folder: Path) -> Iterator[None]:
    """Inside it libraries in Rust (safetensors, tokenizers) write files of a model, which then behave like any other.

    Their own errors for a full disk and the like become `OSError`s, and the files' modes those of the umask.
    """
    try:
        yield
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
    for file in folder.iterdir():
        if file.name in RESULT_FILES or file.match(SHARDS):
            with suppress(OSError):  # a file system without modes
                file.chmod(0o666 & ~UMASK)
