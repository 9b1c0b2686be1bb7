"""Tokenising once per machine, and reading the result back."""

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit import __version__
from toolkit.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WAIT = 0.05  # seconds between looks for a file that another rank writes


def encode(
    tokenizer: "PreTrainedTokenizerBase",
    texts: Sequence[str] | Sequence[tuple[str, str]],
    max_length: int,
    cache_dir: str | None,
    workers: int | None,
) -> dict[str, np.ndarray]:
    """Token ids of every text, truncated to `max_length`, as flat arrays.

    One process per machine tokenises and leaves the result in a cache under a fingerprint of texts,
    tokenizer and length; the others wait for the file, not in a collective that could time out.

    Returns:
        input_ids (and token_type_ids for pairs): int32 [tokens]; offsets: int64 [n + 1]; truncated: [1],
        the number of texts that have lost tokens.

    Raises:
        UserError: the cache cannot be written or read.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import load_file, save_file

    folder = cache_folder(cache_dir)
    path = folder / f"{_fingerprint(tokenizer, texts, max_length)}.safetensors"
    make: Callable[[], None] = lambda: save_file(_tokenise(tokenizer, texts, max_length, workers), _partial(path))  # noqa: E731
    try:
        once_per_machine(path, make)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"encoded texts cannot be cached in {folder} ({error}). Name a folder that can be written: --cache_dir."
        ) from error
    try:
        return load_file(path)
    except SafetensorError as error:
        raise UserError(f"the cached file {path} is damaged ({error}). Delete it and start again.") from error


def once_per_machine(path: Path, make: Callable[[], None]) -> None:
    """Local rank 0 makes the file `path` (through `_partial`); the others wait until it is there."""
    if path.is_file():
        return
    if int(os.environ.get("LOCAL_RANK", "0")) == 0:
        path.parent.mkdir(parents=True, exist_ok=True)
        make()
        os.replace(_partial(path), path)
    # Should rank 0 fail, the launcher ends the ranks that wait here.
    while not path.is_file():
        time.sleep(WAIT)


def max_tokens(
    tokenizer: "PreTrainedTokenizerBase", config: Any, asked: int | None, flag: str = "--max_length"
) -> tuple[int, str | None]:
    """The longest sample in tokens that tokenizer, model and flag allow, and a warning when asked for more.

    Raises:
        UserError: the flag leaves no room for a text.
    """
    limits = [tokenizer.model_max_length] if tokenizer.model_max_length < 10**9 else []
    positions = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if positions and positions > 0:
        limits.append(positions - first_position(config))
    limit = min(limits, default=asked or 512)
    if asked is not None and asked <= (special := tokenizer.num_special_tokens_to_add(pair=False)):
        raise UserError(f"{flag} {asked} leaves no room beside the {special} special tokens of every text.")
    if asked is not None and asked > limit:
        return limit, f"{flag} {asked} is more than the model has positions for: {limit} is used."
    return asked or limit, None


def first_position(config: Any) -> int:
    """The number of a text's first position: RoBERTa's family counts from padding_idx + 1, so it has fewer of them."""
    return (config.pad_token_id or 0) + 1 if config.model_type in _OFFSET_POSITIONS else 0


_OFFSET_POSITIONS = {"roberta", "xlm-roberta", "camembert", "mpnet", "longformer", "xlm-roberta-xl", "data2vec-text"}


def _tokenise(
    tokenizer: "PreTrainedTokenizerBase", texts: Sequence[Any], max_length: int, workers: int | None
) -> dict[str, np.ndarray]:
    if workers:
        os.environ["RAYON_NUM_THREADS"] = str(workers)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    pairs = bool(texts) and isinstance(texts[0], tuple)
    names = ["input_ids", *(["token_type_ids"] if pairs and "token_type_ids" in tokenizer.model_input_names else [])]
    flat: dict[str, list[np.ndarray]] = {name: [] for name in names}
    lengths: list[int] = []
    truncated = 0
    for at in range(0, len(texts), 4096):
        part = texts[at : at + 4096]
        words = [list(column) for column in zip(*part)] if pairs else [list(part)]
        encoded = tokenizer(*words, truncation=True, max_length=max_length, return_attention_mask=False, verbose=False)
        for name in names:
            flat[name] += [np.asarray(row, dtype=np.int32) for row in encoded[name]]
        lengths += [len(row) for row in encoded["input_ids"]]
        full = (index for index, row in enumerate(encoded["input_ids"]) if len(row) == max_length)
        # Slow tokenizers do not tell whether a text of just this length has lost any.
        truncated += sum(not encoded.is_fast or bool(encoded.encodings[index].overflowing) for index in full)
    arrays = {name: np.concatenate(rows) if rows else np.zeros(0, np.int32) for name, rows in flat.items()}
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
    return {**arrays, "offsets": offsets, "truncated": np.array([truncated])}


def _fingerprint(tokenizer: "PreTrainedTokenizerBase", texts: Sequence[Any], max_length: int) -> str:
    """Of all that the token ids depend on: an edited text or tokenizer never meets a stale cache."""
    digest = hashlib.blake2b(digest_size=16)
    beside = f"{max_length} {tokenizer.truncation_side} {tokenizer.model_input_names}"
    for part in (__version__, type(tokenizer).__name__, settings(tokenizer), beside):
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    for text in texts:
        for part in text if isinstance(text, tuple) else (text,):
            content = part.encode("utf-8", "surrogatepass")
            digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()


def settings(tokenizer: "PreTrainedTokenizerBase") -> str:
    """All that a tokenizer's ids depend on, as text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return repr(sorted(tokenizer.get_vocab().items()))
    backend.no_truncation()  # else what was encoded before would count; every call sets its own
    backend.no_padding()
    return backend.to_str()


def cache_folder(cache_dir: str | None) -> Path:
    """Where encoded data are kept."""
    return Path(cache_dir).expanduser() if cache_dir else _default_cache()


def _default_cache() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "toolkit" / "encoded"


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.part")
