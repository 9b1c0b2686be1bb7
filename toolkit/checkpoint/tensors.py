"""Safetensors files written one tensor at a time, so that a rank never holds more than one of them.

The safetensors library writes a file from all its tensors at once. The format is simple: eight bytes of header
length, a JSON header (name -> dtype, shape, offsets), the tensors one after another.
"""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from toolkit.strategy.portable import Entry

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class TensorFile:
    """Writes one file; tensors come in the order of `entries`. On disk and checksummed when `close` returns.

    Args:
        entries: the tensors to come, by name.
        metadata: texts for the header; `format: pt` is what transformers asks for.
    """

    def __init__(self, path: Path, entries: Mapping[str, Entry], metadata: Mapping[str, str] | None = None) -> None:
        self.path, self.entries = path, dict(entries)
        self.waiting = list(self.entries)[::-1]
        header: dict[str, object] = {"__metadata__": dict(metadata or {"format": "pt"})}
        at = 0
        for name, entry in self.entries.items():
            header[name] = {
                "dtype": NAMES[entry.dtype],
                "shape": list(entry.shape),
                "data_offsets": [at, at + entry.bytes],
            }
            at += entry.bytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # the data begins at a multiple of 8 bytes
        self._hash = hashlib.sha256()
        self._stream = path.open("wb")
        self._write(len(text).to_bytes(8, "little") + text)

    def add(self, name: str, tensor: Tensor) -> None:
        """Append a tensor.

        Raises:
            ValueError: it is not the one whose turn it is, or not as announced.
        """
        expected = self.waiting.pop()
        entry = self.entries[expected]
        if name != expected or Entry.of(tensor) != entry:
            raise ValueError(f"{self.path}: expected {expected} as {entry}, got {name} as {Entry.of(tensor)}")
        content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._write(memoryview(content.numpy()))

    def close(self) -> str:
        """Flush to the disk; the file's SHA-256.

        Raises:
            ValueError: a tensor is missing.
        """
        if self.waiting:
            raise ValueError(f"{self.path}: {len(self.waiting)} tensors were never written, {self.waiting[-1]} first")
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        return self._hash.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(OSError):  # of what could not be written: it has been told
            self._stream.close()

    def _write(self, content: bytes | memoryview) -> None:
        self._hash.update(content)
        self._stream.write(content)


def balance(sizes: Mapping[str, int], holders: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """A writing rank for each name: largest tensors first, to the least loaded of those that hold it.

    Args:
        sizes: bytes of each tensor.
        holders: the ranks that could write it.
    """
    load: dict[int, int] = {}
    writers = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = min(holders[name], key=lambda rank: (load.get(rank, 0), rank))
        writers[name] = rank
        load[rank] = load.get(rank, 0) + sizes[name]
    return {name: writers[name] for name in sizes}


def checksum(path: Path) -> str:
    """A file's SHA-256."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
