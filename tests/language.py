"""Flags and tokenizers to test the data of language models with."""

from dataclasses import dataclass
from typing import Any


@dataclass
class Flags:
    """The flags that the data depend on, as a task script's dataclass has them."""

    objective: str = "causal"
    dataset_name: str | None = None
    dataset_config_name: str | None = None
    train_file: list[str] | None = None
    validation_file: Any = None
    test_file: Any = None
    train_file_weights: list[float] | None = None
    validation_split_percentage: float | None = None
    document_separator: str = "blank_line"
    text_column_names: list[str] | None = None
    prompt_column_name: str | None = None
    completion_column_name: str | None = None
    train_on_prompt: bool = False
    delimiter: str | None = None
    quoting: str = "csv"
    column_names: list[str] | None = None
    max_train_samples: int | None = None
    max_eval_samples: int | None = None
    preprocessing_num_workers: int | None = None
    cache_dir: str | None = None
    seed: int = 42
    streaming: bool = False
    stream_buffer_size: int = 10_000
    max_steps: int | None = None


def byte_tokenizer(bos: bool = False, eos: str | None = "<eos>", mask: bool = False):
    """GPT-2's way: every byte a token, id = byte + 4; no special token is added unless `bos` or `mask`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>", "<mask>"]
    alphabet = {bytes([byte]): letter for byte, letter in _letters().items()}
    vocabulary = {token: i for i, token in enumerate(special)}
    vocabulary |= {alphabet[bytes([byte])]: byte + 4 for byte in range(256)}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(special)
    if bos or mask:
        made.post_processor = processors.TemplateProcessing(
            single="<bos> $A <eos>" if mask else "<bos> $A", special_tokens=[("<bos>", 1), ("<eos>", 2)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token="<bos>",
        eos_token=None if mask else eos,
        mask_token="<mask>" if mask else None,
        pad_token="<pad>",
        model_max_length=64,
    )


def word_tokenizer(lines: list[str], size: int = 400, spaces: bool = False):
    """BPE trained on lines; `spaces`: Llama's way, a word for the whole text with `▁` for spaces."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<unk>", "<bos>", "<eos>"]
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    if spaces:
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        made.pre_tokenizer = pre_tokenizers.Split("\n", "isolated")  # for the trainer's speed; taken away below
        trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False)
    else:
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        made.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
        )
    made.train_from_iterator(lines, trainer)
    if spaces:
        made.pre_tokenizer = None
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<bos>", eos_token="<eos>")


def _letters() -> dict[int, str]:
    """Byte-level BPE's printable letter for every byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return {byte: chr(byte if byte in plain else next(others)) for byte in range(256)}
