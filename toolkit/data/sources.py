"""From flags to tables: files of known kinds, saved data sets, Hub data sets, and their splits.

Tables are held in memory as Python values. Nothing here depends on the machine: the split made by
`--validation_split_percentage` is a function of the seed alone.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.arguments import Arguments
from toolkit.data.delimited import read_delimited
from toolkit.data.tables import Table, check_names, few, first_line, read_json, read_jsonl, read_parquet
from toolkit.errors import UserError, nearest, raise_all

__all__ = ["SPLITS", "Table", "read_splits", "read_table"]

SPLITS = ("train", "validation", "test")
READERS = {".json": read_json, ".jsonl": read_jsonl, ".parquet": read_parquet}
DELIMITED = (".csv", ".tsv")
# What data sets call the split that we call validation, the most usual name first.
VALIDATION_NAMES = ("validation", "dev", "valid", "val")


def read_table(
    path: str, delimiter: str | None = None, quoting: str = "csv", column_names: list[str] | None = None
) -> Table:
    """Read one file (CSV, TSV, JSON, JSONL, Parquet) or one folder made by `Dataset.save_to_disk`.

    Args:
        delimiter, quoting, column_names: for CSV and TSV only, see `toolkit.data.delimited.read_delimited`.

    Raises:
        UserError: no such file, an unknown kind, no rows, or what its reader finds wrong, with line or row.
    """
    file = Path(path)
    if not file.exists():
        raise UserError(missing(file))
    if file.is_dir():
        return _read_folder(path)
    suffix = file.suffix.lower()
    try:
        if suffix in DELIMITED:
            table = read_delimited(file, delimiter, quoting, column_names)
        elif suffix in READERS:
            table = READERS[suffix](file)
        else:
            raise UserError(
                f"{path}: unknown kind of file {suffix!r}. Known are {', '.join((*DELIMITED, *READERS))}, "
                "and folders made by datasets' save_to_disk: convert or rename it."
            )
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}.") from None
    return _with_rows(table)


def read_splits(args: Arguments) -> dict[str, Table]:
    """The tables that the flags name, under the keys `train`, `validation` and `test` as far as they exist.

    Without any data flag the result is empty: the caller takes its default data. Held-out rows are drawn from
    `train` by a permutation of `args.seed` and stand, like the rest, in the order of the file. Then
    `--max_train_samples` and `--max_eval_samples` keep the first rows.

    Raises:
        UserError: contradicting flags, and the problems of all files at once.
    """
    raise_all(flag_problems(args))
    splits: dict[str, Table] = {}
    problems: list[str] = []
    if args.dataset_name:
        splits = read_data_set(args.dataset_name, args.dataset_config_name, args.cache_dir)
    for split in SPLITS:
        path = getattr(args, f"{split}_file")
        if path:
            try:
                splits[split] = read_table(path, args.delimiter, args.quoting, args.column_names)
            except UserError as error:
                problems += error.messages
    raise_all(problems)
    if args.validation_split_percentage is not None and splits:
        if "validation" in splits:
            raise UserError(
                f"--validation_split_percentage: {splits['validation'].name} is there to validate on. "
                "Leave the flag out."
            )
        splits["train"], splits["validation"] = _hold_out(splits["train"], args.validation_split_percentage, args.seed)
    for split, limit in (("train", args.max_train_samples), ("validation", args.max_eval_samples)):
        if split in splits and limit is not None and limit < len(splits[split]):
            splits[split] = splits[split].select(range(limit))
    return splits


def flag_problems(args: Arguments) -> list[str]:
    """What contradicts itself among the flags that name data; a file flag may hold one path or a list of them."""
    problems = []
    given = [f"--{split}_file" for split in SPLITS if getattr(args, f"{split}_file")]
    if args.dataset_name and args.train_file:
        problems.append("--dataset_name and --train_file both name training data: give one of them.")
    if not args.dataset_name and not args.train_file:
        if given:
            problems.append(f"{' and '.join(given)} without training data: add --train_file or --dataset_name.")
        elif args.validation_split_percentage is not None:
            problems.append("--validation_split_percentage needs --train_file or --dataset_name.")
    if args.dataset_config_name and not args.dataset_name:
        problems.append("--dataset_config_name needs --dataset_name.")
    files = [path for split in SPLITS for path in paths(getattr(args, f"{split}_file"))]
    delimited = [path for path in files if Path(path).suffix.lower() in DELIMITED]
    for name in ("delimiter", "column_names"):
        if getattr(args, name) and not delimited:
            problems.append(f"--{name} is for CSV and TSV files, but no file given is one.")
    percentage = args.validation_split_percentage
    if percentage is not None and not 0 < percentage < 100:
        problems.append(f"--validation_split_percentage {percentage:g}: expected a number between 0 and 100.")
    if percentage is not None and args.validation_file:
        problems.append("--validation_split_percentage and --validation_file: give one of them.")
    for name in ("max_train_samples", "max_eval_samples"):
        limit = getattr(args, name)
        if limit is not None and limit < 1:
            problems.append(f"--{name} {limit}: expected at least 1.")
    return problems


def paths(value: str | list[str] | None) -> list[str]:
    """The files that a flag names, of which it may hold none, one or several."""
    return [value] if isinstance(value, str) else list(value or [])


def missing(file: Path) -> str:
    """The message for a file that does not exist."""
    if not file.parent.is_dir():
        return f"{file}: no such file: the folder {file.parent} does not exist."
    others = [other.name for other in file.parent.iterdir()]
    return f"{file}: no such file in {file.parent.resolve()}.{nearest(file.name, others)}"


def _with_rows(table: Table) -> Table:
    if not len(table):
        raise UserError(f"{table.name}: no rows.")
    return table


def hold_out(rows: int, percentage: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Row numbers to train on and to hold out, each in order and at least one of two or more rows."""
    held = min(max(round(rows * percentage / 100), 1), rows - 1)
    order = np.random.default_rng(seed).permutation(rows)
    return np.sort(order[held:]), np.sort(order[:held])


def _hold_out(train: Table, percentage: float, seed: int) -> tuple[Table, Table]:
    if len(train) < 2:
        raise UserError(
            f"--validation_split_percentage {percentage:g}: {train.name} has one row, so nothing can be held out."
        )
    kept, held = hold_out(len(train), percentage, seed)
    return train.select(kept.tolist()), train.select(held.tolist())


def read_data_set(name: str, config: str | None, cache_dir: str | None) -> dict[str, Table]:
    """The splits of a saved folder or a Hub data set. Code that comes with a data set is never run."""
    content = _load_saved(name) if _is_saved(Path(name)) else _load_hub(name, config, cache_dir)
    if not isinstance(content, dict):
        content = {"train": content}
    validation = next((split for split in VALIDATION_NAMES if split in content), None)
    if "train" not in content:
        raise UserError(f"data set {name}: no split `train`. It has {few(list(content), limit=20)}.")
    chosen = {"train": "train", "validation": validation, "test": "test"}
    return {
        split: _with_rows(_from_arrow(f"{name}[{source}]", content[source]))
        for split, source in chosen.items()
        if source in content
    }


def _read_folder(path: str) -> Table:
    if not _is_saved(Path(path)):
        raise UserError(f"{path}: a folder, and not one made by datasets' save_to_disk. Name a file in it.")
    content = _load_saved(path)
    if isinstance(content, dict):
        raise UserError(
            f"{path}: a saved data set with the splits {few(list(content), limit=20)}: use --dataset_name for it."
        )
    return _with_rows(_from_arrow(path, content))


def _is_saved(folder: Path) -> bool:
    return (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file()


def _load_saved(folder: str) -> Any:
    from datasets import load_from_disk

    try:
        return load_from_disk(folder)
    except Exception as error:  # whatever a damaged folder makes the library raise
        raise UserError(f"{folder}: not readable as a saved data set: {first_line(error)}") from None


def _load_hub(name: str, config: str | None, cache_dir: str | None) -> Any:
    from datasets import load_dataset

    try:
        return load_dataset(name, config, cache_dir=cache_dir)
    except Exception as error:  # network, names, configurations, formats: the library has no common type for them
        raise UserError(
            f"data set {name}{f' ({config})' if config else ''}: cannot be loaded: {first_line(error)} "
            "Check --dataset_name, --dataset_config_name and the network, or give files with --train_file."
        ) from None


def _from_arrow(name: str, content: Any) -> Table:
    """A `datasets.Dataset` as a table. Class ids become the data set's names for them; -1 is no label."""
    from datasets import ClassLabel, List

    check_names(name, content.column_names)
    columns = content.with_format(None).to_dict()
    for column, feature in content.features.items():
        if isinstance(feature, ClassLabel):
            columns[column] = _class_names(columns[column], feature.names)
        elif isinstance(feature, List) and isinstance(feature.feature, ClassLabel):
            names = feature.feature.names
            columns[column] = [ids and _class_names(ids, names) for ids in columns[column]]
    return Table(name, columns)


def _class_names(ids: Sequence[int | None], names: list[str]) -> list[str | None]:
    return [None if i is None or i < 0 else names[i] for i in ids]
