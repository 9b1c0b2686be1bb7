"""What a task gives to the toolkit: batches, a model, a loss per row, scores.

The task says what is trained; it knows nothing of processes, devices or strategies.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Batch:
    """One micro-batch of CPU tensors.

    Rows after `len(ids)` are filler: they pass forward and backward, and count for nothing. A batch
    without ids is all filler, with a loss of exactly 0.
    """

    inputs: dict[str, Tensor]  # the model's keyword arguments, each [rows, ...]
    targets: Tensor  # [rows, ...]
    ids: list[int]  # sample ids of the rows
    weight: float  # this batch's part of the loss's denominator, known before any forward
    tokens: int  # real tokens, without padding and filler

    def pin_memory(self) -> "Batch":
        """The same batch in page-locked memory, for copies that overlap with computation."""
        inputs = {name: tensor.pin_memory() for name, tensor in self.inputs.items()}
        return Batch(inputs, self.targets.pin_memory(), self.ids, self.weight, self.tokens)

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`, copied without waiting."""
        if device.type == "cpu":
            return self
        inputs = {name: tensor.to(device, non_blocking=True) for name, tensor in self.inputs.items()}
        return Batch(inputs, self.targets.to(device, non_blocking=True), self.ids, self.weight, self.tokens)


def pad(rows: Sequence[np.ndarray], length: int, value: int) -> Tensor:
    """Rows side by side, filled up on the right: int64 [len(rows), length]."""
    full = np.full((len(rows), length), value, dtype=np.int64)
    for row, content in zip(full, rows):
        row[: len(content)] = content
    return torch.from_numpy(full)


class Samples(Protocol):
    """An encoded split. The id of a sample is its position."""

    lengths: np.ndarray  # [n] tokens of each sample

    def __len__(self) -> int: ...
    def __getitem__(self, sample: int) -> dict[str, Any]: ...
    def fingerprint(self) -> str: ...


class Drawn(NamedTuple):
    """One global batch of a stream."""

    samples: Any  # `lengths`, by which it is cut, [n]; `places`, a name for each; len(…); samples[i] as of a split
    epoch: int
    ends_epoch: bool
    passed: float  # epochs behind it, in part or whole
    position: dict[str, Any]  # where the next one begins, for JSON


@runtime_checkable
class Streamed(Samples, Protocol):
    """A training split that is read while training.

    As samples it is a few of its own, to try model and memory with, among them one as long as they may be.
    """

    def batches(self, size: int, position: dict[str, Any] | None) -> Iterator[Drawn]:
        """Global batches from a position on, epoch after epoch without end; an epoch's last may be smaller."""


class Task(Protocol):
    """One kind of training, such as classification."""

    name: str
    command: str  # of `toolkit`, to try the model with
    example: str  # its flags; empty: there is no such command
    config: Any  # of the model, once the data are prepared
    tokenizer: Any  # saved beside the model
    facts: dict[str, Any]  # for the model card, see toolkit.report.card
    metrics: tuple[str, ...]  # that the best model may be told by, once the data are prepared

    resumes: bool  # whether a checkpoint replaces the weights that `model` gives

    def prepare(self) -> dict[str, Samples]:
        """Read, check and encode the data: splits named train, validation and test, those that there are.

        Raises:
            UserError: all that is wrong with the data, before a model is loaded.
        """

    def model(self, **how: Any) -> nn.Module:
        """The model to train; `how` (dtype and the like) is the strategy's and goes to `from_pretrained`."""

    def collate(self, rows: Sequence[dict[str, Any]], ids: Sequence[int], epoch: int) -> Batch:
        """One micro-batch of these samples; a pure function of its arguments and the seed."""

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """Each row's sum of weighted losses, float32 [rows]; not divided by anything."""

    def columns(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        """What scoring needs of each row, [rows, k]; all that evaluation sends between ranks."""

    def score(self, split: str, table: np.ndarray) -> dict[str, float]:
        """Metrics of a split from `columns` of all its samples, [n, k], in order of id."""

    def details(self, split: str, table: np.ndarray) -> dict[str, Any]:
        """What goes into <split>_report.json beside the metrics."""

    def write_predictions(self, path: Path, split: str, table: np.ndarray) -> None:
        """Predictions of a split, a line per row of its file, in that order."""

    def sample(self, folder: Path) -> str:
        """What to show at the end of what the model in `folder` does; may be empty."""

    def baseline(self) -> dict[str, dict[str, float]]:
        """Figures to compare the final ones of the validation split with, by the name of what reached them."""
