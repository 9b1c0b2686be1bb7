"""The rows of a classification task: texts, targets and tokens of every split."""

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from toolkit.data.columns import label_column, text_columns, texts
from toolkit.data.labels import Labels, find_labels
from toolkit.data.sources import read_splits
from toolkit.data.tables import Table
from toolkit.report.console import say

DEMO_FLAGS = {"num_train_epochs": 1.0, "learning_rate": 1e-4}


@dataclass(frozen=True)
class Rows:
    """One split before encoding."""

    texts: list[str] | list[tuple[str, str]]
    targets: np.ndarray | None  # see Labels.targets
    kept: list[int]  # rows of the table that the texts come from


@dataclass(frozen=True)
class EncodedRows:
    """One split as samples: token ids and a target each."""

    arrays: dict[str, np.ndarray]  # see toolkit.data.encoding.encode
    targets: np.ndarray | None

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.arrays["offsets"])

    def __len__(self) -> int:
        return len(self.arrays["offsets"]) - 1

    def __getitem__(self, sample: int) -> dict[str, Any]:
        start, end = self.arrays["offsets"][sample : sample + 2]
        row = {name: self.arrays[name][start:end] for name in ("input_ids", "token_type_ids") if name in self.arrays}
        return {**row, "target": None if self.targets is None else self.targets[sample]}

    def fingerprint(self) -> str:
        """Of the tokens and targets: the same data and tokenizer give the same one on any machine."""
        digest = hashlib.blake2b(digest_size=16)
        targets = [] if self.targets is None else [("targets", self.targets)]
        for name, array in [*sorted(self.arrays.items()), *targets]:
            digest.update(name.encode())
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()


def read_rows(args: Any, known: dict[int, str] | None) -> tuple[dict[str, Rows], Labels, list[str]]:
    """Read and check all splits that the flags name; also what their labels mean, and the names of the text columns.

    Args:
        known: id2label of an existing head.

    Raises:
        UserError: all that is wrong with the columns, texts and labels.
    """
    tables = read_splits(args) or _demo(args)
    train = tables["train"]
    column = label_column(train, args.label_column_name)
    names = text_columns(train, args.text_column_names, column)
    if not args.text_column_names:
        say(f"texts: column{'s' * (len(names) > 1)} {' and '.join(f'`{name}`' for name in names)}")
    read: dict[str, tuple[Table, list, list[int]]] = {}
    for split, table in tables.items():
        found, kept = texts(table, names, args.empty_text)
        read[split] = (table.select(kept) if len(kept) < len(table) else table, found, kept)
    labels = find_labels(
        {split: table for split, (table, _, _) in read.items()}, column, args.problem_type, args.label_separator, known
    )
    rows = {
        split: Rows(found, labels.targets(table, required=split != "test"), kept)
        for split, (table, found, kept) in read.items()
    }
    return rows, labels, names


def set_demo_flags(args: Any) -> None:
    """The demo takes one pass at a higher rate, unless its user asks for something else."""
    for name, value in DEMO_FLAGS.items():
        if is_demo(args) and name not in args.given:
            setattr(args, name, value)
            say(f"demo data: --{name} {value:g}")


def is_demo(args: Any) -> bool:
    """Whether the run has no data of its own."""
    return not (args.dataset_name or args.train_file)


def _demo(args: Any) -> dict[str, Table]:
    from toolkit.data.demo import stdlib_docstrings
    from toolkit.launch.machine import detect

    machine = detect()
    quick = machine.gpus or machine.mps or machine.bf16_units
    tables = stdlib_docstrings(1.0 if quick else 0.35)
    limits = {"train": args.max_train_samples, "validation": args.max_eval_samples}
    return {split: table.select(range(min(limits[split] or len(table), len(table)))) for split, table in tables.items()}
