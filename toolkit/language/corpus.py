"""The tokens of every split, made once per machine, kept in a cache, and mapped into memory by all ranks."""

import hashlib
import json
import os
import shutil
import time
import uuid
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit import __version__
from toolkit.data.encoding import WAIT, cache_folder, settings
from toolkit.data.sources import SPLITS, flag_problems, hold_out, paths, read_data_set
from toolkit.errors import UserError, raise_all
from toolkit.language.documents import DataSet, Documents, Source, open_files
from toolkit.language.forms import Document
from toolkit.language.tokens import Encoder
from toolkit.report.console import say, warn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FORMAT = 1  # of a cache entry, and of what is in it: raise it when the same files are to give other tokens
ARRAYS = {"tokens": "<i4", "target": "?", "starts": "<i8"}
# Flags that the documents depend on, beside the files.
READING = (
    "document_separator",
    "text_column_names",
    "prompt_column_name",
    "completion_column_name",
    "train_on_prompt",
    "delimiter",
    "quoting",
    "column_names",
    "objective",
)


@dataclass(frozen=True)
class Corpus:
    """One split in tokens. The arrays are mapped from files: they may be larger than memory, and are read-only.

    For masked objectives the tokens are the texts' own; what the tokenizer puts around a text
    (`toolkit.language.tokens.special_tokens`) belongs around every chunk.
    """

    tokens: np.ndarray  # int32 [N], all documents one after another, each with BOS (as the tokenizer does) and EOS
    target: np.ndarray  # bool [N]; False: context only (a prompt, a BOS, the first token, which nothing precedes)
    starts: np.ndarray  # int64 [documents + 1]; document d is tokens[starts[d]:starts[d + 1]]
    bytes: int  # UTF-8 bytes of the text that the targets stand for
    characters: int  # the same in characters
    digest: str | None = None

    @property
    def documents(self) -> int:
        return len(self.starts) - 1

    def fingerprint(self) -> str:
        """Of the tokens and targets: the same data and tokenizer give the same one on any machine."""
        if self.digest is not None:
            return self.digest
        parts = (np.ascontiguousarray(getattr(self, name), kind) for name, kind in ARRAYS.items())
        return _combined(hashlib.blake2b(part).digest() for part in parts)


@dataclass(frozen=True)
class Selection:
    """Documents of one split: which ones of which files, in the order of the corpus."""

    files: Sequence[Documents]
    ids: np.ndarray  # counted through all files

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[Document]:
        firsts = np.cumsum([0, *map(len, self.files)])
        for file, document in zip(np.searchsorted(firsts, self.ids, side="right") - 1, self.ids):
            yield self.files[file][int(document - firsts[file])]

    @property
    def empty(self) -> int:
        """Documents of the files that hold nothing, and are no part of the selection."""
        return sum(file.empty for file in self.files)


def build(args: Any, tokenizer: "PreTrainedTokenizerBase") -> dict[str, Corpus]:
    """The splits that the flags name: train (not with `--streaming`), validation, test; none without data flags.

    `--validation_split_percentage` and `--max_*_samples` count documents. A train file of weight w has each
    of its documents floor(w) times, and the rest of w in documents drawn once by `--seed`; held-out
    documents are drawn, and `--max_train_samples` is counted, before that. Local rank 0 encodes what the
    cache does not hold; the others look for the file meanwhile, not in a collective that could time out.

    Raises:
        UserError: contradicting flags, all that is wrong with the files, or a split without anything to learn.
    """
    raise_all(_flag_problems(args))
    encoder = Encoder(tokenizer, args.objective, args.preprocessing_num_workers)
    sources = _sources(args)
    documents: dict[int, Documents] = {}  # by source, each read once

    def read(source: Source) -> Documents:
        if id(source) not in documents:
            documents[id(source)] = source.read(args, tokenizer)
        return documents[id(source)]

    splits = {}
    for split, files in sources.items():
        if split == "train" and args.streaming:
            continue
        folder = cache_folder(args.cache_dir) / f"corpus-{_key(args, tokenizer, split, files)}"
        entry = _open(folder)
        if entry is None and int(os.environ.get("LOCAL_RANK", "0")) == 0:
            say(f"{split}: encoding {', '.join(file.name for file in files)}")
            entry = _make(folder, encoder, split, _select(args, split, [read(file) for file in files]))
        while entry is None:  # should rank 0 fail, the launcher ends the ranks that wait here
            time.sleep(WAIT)
            entry = _open(folder)
        splits[split], counts = entry
        _tell(split, splits[split], counts)
    return splits


def _flag_problems(args: Any) -> list[str]:
    problems = flag_problems(args)
    files, weights = paths(args.train_file), args.train_file_weights
    if weights and len(weights) != len(files):
        problems.append(
            f"--train_file_weights {' '.join(f'{weight:g}' for weight in weights)}: expected one weight for each "
            f"--train_file, of which there are {len(files)}."
        )
    if weights and not all(0 < weight < float("inf") for weight in weights):
        problems.append("--train_file_weights: expected numbers above 0.")
    return problems


def _sources(args: Any) -> dict[str, list[Source]]:
    """The files of every split, in the order of SPLITS; held-out documents come from the files of train."""
    found: dict[str, list[Source]] = {}
    if args.dataset_name:
        tables = read_data_set(args.dataset_name, args.dataset_config_name, args.cache_dir)
        found = {split: [DataSet(table)] for split, table in tables.items()}
    names = {split: paths(getattr(args, f"{split}_file")) for split in SPLITS}
    opened = iter(open_files([name for split in SPLITS for name in names[split]]))
    found |= {split: [next(opened) for _ in names[split]] for split in SPLITS if names[split]}
    if args.validation_split_percentage is not None and found:
        if "validation" in found:
            raise UserError(
                f"--validation_split_percentage: {found['validation'][0].name} is there to validate on. "
                "Leave the flag out."
            )
        found["validation"] = found["train"]
    return {split: found[split] for split in SPLITS if split in found}


def _select(args: Any, split: str, files: Sequence[Documents]) -> Selection:
    ids = np.arange(sum(map(len, files)))
    percentage = args.validation_split_percentage
    if percentage is not None and split != "test":
        if len(ids) < 2:
            raise UserError(
                f"--validation_split_percentage {percentage:g}: {files[0].name} is one document, so nothing can be "
                "held out. --document_separator says what parts the documents of a text file."
            )
        kept, held = hold_out(len(ids), percentage, args.seed)
        ids = kept if split == "train" else held
    ids = ids[: {"train": args.max_train_samples, "validation": args.max_eval_samples}.get(split)]
    if split == "train" and args.train_file_weights:
        ids = _weighted(ids, [len(file) for file in files], args.train_file_weights, args.seed)
    return Selection(files, ids)


def _weighted(ids: np.ndarray, sizes: Sequence[int], weights: Sequence[float], seed: int) -> np.ndarray:
    """Each file's documents as many times as its weight says; at least one of a file."""
    parts, first = [], 0
    for number, (size, weight) in enumerate(zip(sizes, weights)):
        own = ids[(ids >= first) & (ids < first + size)]
        rest = round((weight % 1) * len(own))
        if weight < 1:
            rest = max(1, rest)
        drawn = np.random.default_rng([seed, number]).permutation(own)[:rest]
        parts.append(np.sort(np.concatenate([np.repeat(own, int(weight)), drawn])))
        first += size
    return np.concatenate(parts)


def _key(args: Any, tokenizer: "PreTrainedTokenizerBase", split: str, files: Sequence[Source]) -> str:
    """Of all that a split's tokens depend on: edited files, flags or tokenizers never meet a stale cache."""
    held_out = args.validation_split_percentage is not None and split != "test"
    weights = args.train_file_weights if split == "train" else None
    content = {
        "code": [FORMAT, __version__],
        "files": [file.digest() for file in files],
        "flags": {name: getattr(args, name) for name in READING},
        "split": [split, args.validation_split_percentage if held_out else None, weights],
        "limit": {"train": args.max_train_samples, "validation": args.max_eval_samples}.get(split),
        "seed": args.seed if held_out or weights else None,
        "tokenizer": [type(tokenizer).__name__, settings(tokenizer), tokenizer.special_tokens_map],
        "template": tokenizer.chat_template,
    }
    return hashlib.blake2b(json.dumps(content, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def _make(folder: Path, encoder: Encoder, split: str, selection: Selection) -> tuple[Corpus, dict[str, int]]:
    """Encode a split into the cache: complete under its name, or not there."""
    partial = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.part")
    try:
        partial.mkdir(parents=True)
        _write(partial, encoder, split, selection)
        if (entry := _open(folder)) is None:  # another run may have been as quick
            shutil.rmtree(folder, ignore_errors=True)  # a damaged one
            os.rename(partial, folder)
            entry = _open(folder)
    except OSError as error:
        raise UserError(
            f"encoded texts cannot be cached in {folder.parent} ({error}). Name a folder that can be written: "
            "--cache_dir."
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if entry is None:
        raise UserError(f"what was written to {folder} cannot be read back. Name another folder: --cache_dir.")
    return entry


def _write(folder: Path, encoder: Encoder, split: str, selection: Selection) -> None:
    """The arrays of a corpus, document by document, and what was counted."""
    counts = dict.fromkeys(("bytes", "characters", "targets", "untaught"), 0)
    starts = array("q", [0])
    with (folder / "tokens.bin").open("wb") as tokens, (folder / "target.bin").open("wb") as target:
        length = targets = 0  # of the present document
        for part in encoder.parts(selection):
            part.tokens.astype("<i4").tofile(tokens)
            part.target.tofile(target)
            length, targets = length + len(part.tokens), targets + int(part.target.sum())
            counts["bytes"] += part.bytes
            counts["characters"] += part.characters
            if not part.last:
                continue
            if targets:
                starts.append(starts[-1] + length)
            else:  # nothing of it counts: the next one is written over it
                tokens.seek(starts[-1] * 4)
                target.seek(starts[-1])
                counts["untaught"] += 1
            counts["targets"] += targets
            length = targets = 0
        tokens.truncate(starts[-1] * 4)
        target.truncate(starts[-1])
    if len(starts) == 1:
        names = ", ".join(file.name for file in selection.files)
        raise UserError(
            f"{split}: there is nothing to learn in {names}: {_counted(selection.empty, 'empty document')}, and "
            f"{counts['untaught']} without an answer to predict."
        )
    np.frombuffer(starts, np.int64).astype("<i8").tofile(folder / "starts.bin")
    counts |= {"empty": selection.empty, "digest": _stored_digest(folder)}
    (folder / "corpus.json").write_text(json.dumps(counts), encoding="utf-8")


def _open(folder: Path) -> tuple[Corpus, dict[str, int]] | None:
    """A corpus of the cache and what was counted; None where it is not there or damaged."""
    try:
        counts = json.loads((folder / "corpus.json").read_text(encoding="utf-8"))
        if _stored_digest(folder) != counts["digest"]:
            return None
        # As plain arrays, since a slice of a memmap costs ten times as much.
        arrays = {name: np.asarray(np.memmap(folder / f"{name}.bin", kind, "r")) for name, kind in ARRAYS.items()}
        return Corpus(**arrays, **{name: counts[name] for name in ("bytes", "characters", "digest")}), counts
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _stored_digest(folder: Path) -> str:
    digests = []
    for name in ARRAYS:
        with (folder / f"{name}.bin").open("rb") as file:
            digests.append(hashlib.file_digest(file, hashlib.blake2b).digest())
    return _combined(digests)


def _combined(digests: Iterable[bytes]) -> str:
    return hashlib.blake2b(b"".join(digests), digest_size=16).hexdigest()


def _tell(split: str, corpus: Corpus, counts: dict[str, int]) -> None:
    say(
        f"{split}: {_counted(corpus.documents, 'document')}, {len(corpus.tokens):,} tokens, "
        f"{counts['targets']:,} to predict"
    )
    if counts["empty"]:
        say(f"{split}: left out: {_counted(counts['empty'], 'empty document')}")
    if counts["untaught"]:
        warn(f"{split}: left out: {_counted(counts['untaught'], 'document')} without an answer to predict.")


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}" + ("" if count == 1 else "s")
