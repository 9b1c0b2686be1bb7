"""Train a language model: to write on (causal), or to fill in what is hidden (masked).

    accelerate launch --config_file accelerate_configs/single_gpu_bf16.yaml tasks/language_modeling.py \
        --model_name_or_path M --train_file train.txt --validation_file valid.txt
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from toolkit.arguments import Arguments, flag, parse
from toolkit.launch.guard import guarded


@dataclass
class LanguageModelingArguments(Arguments):
    """Flags of language modelling."""

    objective: str = flag(
        "causal", "causal: predict the next token; masked: find hidden ones.", ("causal", "masked"), defines=True
    )

    # Data
    train_file: list[str] | None = flag(None, "Text, JSON, JSONL, CSV, TSV or Parquet files to train on.")
    train_file_weights: list[float] | None = flag(None, "How many times an epoch holds each train file's documents.")
    validation_file: list[str] | None = flag(None, "Files to evaluate on.")
    test_file: list[str] | None = flag(None, "Files to score document by document; gives predictions.csv.")
    document_separator: str = flag(
        "blank_line", "Between the documents of a text file: blank_line, line, file or a text."
    )
    text_column_names: list[str] | None = flag(None, "The text column.")
    prompt_column_name: str | None = flag(None, "Column of prompts, which are context and not learnt. Default: prompt.")
    completion_column_name: str | None = flag(None, "Column of what is to follow a prompt. Default: completion.")
    train_on_prompt: bool = flag(False, "Learn prompts, and all messages of a conversation, as well.")
    streaming: bool = flag(False, "Read training data while training; needs --max_steps.", defines=True)
    stream_buffer_size: int = flag(10_000, "Records of a stream that are shuffled together.", defines=True)

    # Samples
    block_size: int | None = flag(None, "Longest sample in tokens. Default: what the model allows, at most 1024.")
    packing: str | None = flag(
        None,
        "best_fit packs documents into blocks, where they do not see each other; none: a document, or a chunk of one, "
        "is a sample; concatenate: all documents as one, cut at every block. Default: best_fit for causal, none for "
        "masked.",
        ("best_fit", "concatenate", "none"),
    )
    eval_stride: int | None = flag(
        None, "Score long documents in windows that begin every N tokens, with at least block_size - N of context."
    )
    mlm_probability: float = flag(0.15, "Share of the tokens that a masked model has to find.", defines=True)
    whole_word_mask: bool = flag(False, "Hide whole words.", defines=True)


def main() -> None:
    args = parse(LanguageModelingArguments, description=__doc__)
    # Not earlier: --help and mistakes in flags should not wait for torch.
    from toolkit.fit import fit
    from toolkit.language.demo import set_demo_flags
    from toolkit.language.task import LanguageModeling

    set_demo_flags(args)
    fit(LanguageModeling(args), args)


if __name__ == "__main__":
    guarded(main)
