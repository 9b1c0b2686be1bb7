"""The embedded default: a small byte-level model, trained from scratch on the sources of Python's standard library."""

import hashlib
import json
import os
import shutil
import sysconfig
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from toolkit.data.demo import library_files, sha1
from toolkit.data.encoding import WAIT, cache_folder
from toolkit.errors import UserError, raise_all
from toolkit.report.console import say

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from toolkit.language.corpus import Corpus

END, PADDING = "<|endoftext|>", "<|pad|>"
BYTES = 256
# A decoder as Llama is (Touvron et al. 2023), small enough to learn something in a minute of two cores.
CONFIG = {
    "vocab_size": BYTES + 2,
    "hidden_size": 192,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "max_position_embeddings": 256,
    "bos_token_id": BYTES,
    "eos_token_id": BYTES,
    "pad_token_id": BYTES + 1,
    "initializer_range": 0.02,
}
FLAGS = {
    "num_train_epochs": 1.0,
    "global_batch_size": 8,
    "learning_rate": 4e-3,
    "lr_scheduler_type": "cosine",
    "warmup_steps": 0.05,
    "adam_beta2": 0.99,
    "weight_decay": 0.1,
}
HELD_OUT = 300_000  # bytes, in whole files
TRAINED = 1_300_000  # bytes: two minutes are enough for so many on two cores with bf16 units
LARGEST = 60_000  # a larger file is never held out: it would dominate
NAME = "demo-language-"  # of its folder in the cache, before a digest
PROMPT, WRITTEN = "def ", 200  # tokens, of the sample that is shown


def set_demo_flags(args: Any) -> None:
    """Put the demo's model and data, which are made in the cache, where the flags name none.

    Raises:
        UserError: there is no default for what is asked.
    """
    own_model = args.model_name_or_path or args.config_name
    own_data = args.train_file or args.dataset_name
    if own_model and own_data:
        return
    problems = []
    if not own_model and args.objective == "masked":
        problems.append("--objective masked has no default model: --model_name_or_path, a folder or a Hub name.")
    if not own_data and (args.validation_file or args.test_file):
        problems.append("no training data beside the other files: add --train_file, or --dataset_name.")
    raise_all(problems)
    folder = _folder(cache_folder(args.cache_dir))
    if not own_data:
        args.train_file = [str(folder / "train.jsonl")]
        if args.validation_split_percentage is None:
            args.validation_file = [str(folder / "validation.jsonl")]
    if not own_model:
        args.config_name, args.tokenizer_name = str(folder), args.tokenizer_name or str(folder)
        for name, value in FLAGS.items():
            if name not in args.given:
                setattr(args, name, value)
        say("demo model: " + " ".join(f"--{name} {getattr(args, name)}" for name in FLAGS))


def is_demo(args: Any) -> bool:
    """Whether the run trains the demo's model."""
    return args.config_name is not None and Path(args.config_name).name.startswith(NAME)


def byte_tokenizer() -> "PreTrainedTokenizerFast":
    """Every byte of a text is a token, whose id is the byte; END stands before and behind a text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    # A pre-tokenizer writes bytes as printable letters, in the order of the bytes that are printable by themselves.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(BYTES) if byte not in plain]
    letters = {byte: chr(byte) for byte in plain} | {byte: chr(BYTES + at) for at, byte in enumerate(others)}
    vocabulary = {letters[byte]: byte for byte in range(BYTES)}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END, PADDING])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, BYTES)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        pad_token=PADDING,
        model_max_length=CONFIG["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )


def library_sources() -> dict[str, list[str]]:
    """Files of the standard library: `train` and `validation`, which are not among the former.

    In the order of the SHA-1 of their path files are held out until there are HELD_OUT bytes, and the next ones train
    until there are TRAINED. The result depends on the installed Python and on nothing else.
    """
    library = Path(sysconfig.get_path("stdlib"))
    paths = {path.relative_to(library).as_posix(): path for _, path in library_files(library)}
    splits: dict[str, list[str]] = {"validation": [], "train": []}
    wanted = {"validation": HELD_OUT, "train": TRAINED}
    for name in sorted(paths, key=sha1):
        try:
            content = paths[name].read_bytes()
            text = content.decode("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        for split, texts in splits.items():
            if wanted[split] > 0 and content.strip() and (split == "train" or len(content) <= LARGEST):
                texts.append(text)
                wanted[split] -= len(content)
                break
    if not splits["train"]:
        raise UserError(
            f"the demo data are the sources of Python's standard library, but its folder {library} holds none. "
            "Train on your own data with --train_file."
        )
    return splits


def ngram_baselines(train: "Corpus", validation: "Corpus") -> dict[str, dict[str, float]]:
    """Bits per byte of what counts of single bytes and of pairs know, each pair seen once more than it was.

    They predict the same targets as the model does.
    """
    size = CONFIG["vocab_size"]
    followed = _pairs(train)
    pairs = np.bincount(followed[0] * size + followed[1], minlength=size * size).reshape(size, size) + 1.0
    singles = pairs.sum(axis=0)
    before, after = _pairs(validation)
    chances = {
        "bytes": singles[after] / singles.sum(),
        "pairs of bytes": (pairs / pairs.sum(1, keepdims=True))[before, after],
    }
    return {
        name: {"bits_per_byte": float(-np.log2(chance).sum() / validation.bytes)} for name, chance in chances.items()
    }


def _pairs(corpus: "Corpus") -> tuple[np.ndarray, np.ndarray]:
    """Each target and what stands before it; the first token of a document is none."""
    places = np.flatnonzero(corpus.target)
    return corpus.tokens[places - 1].astype(np.int64), corpus.tokens[places].astype(np.int64)


def _folder(cache: Path) -> Path:
    """The folder of the demo's files, which local rank 0 makes where it is not there."""
    splits = library_sources()
    content = {
        f"{split}.jsonl": "".join(json.dumps({"text": text}) + "\n" for text in texts)
        for split, texts in splits.items()
    }
    digest = hashlib.blake2b(json.dumps([CONFIG, content]).encode(), digest_size=8).hexdigest()
    folder = cache / f"{NAME}{digest}"
    if not folder.exists() and int(os.environ.get("LOCAL_RANK", "0")) == 0:
        from transformers import LlamaConfig

        partial = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.part")
        try:
            partial.mkdir(parents=True)
            for name, text in content.items():
                (partial / name).write_text(text, encoding="utf-8")
            LlamaConfig(**CONFIG).save_pretrained(partial)
            byte_tokenizer().save_pretrained(partial)
            if not folder.exists():  # another run may have been as quick
                partial.rename(folder)
        except OSError as error:
            raise UserError(
                f"the demo's files cannot be kept in {cache} ({error}). Name another folder: --cache_dir."
            ) from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    while not folder.exists():  # should rank 0 fail, the launcher ends the ranks that wait here
        time.sleep(WAIT)
    return folder
