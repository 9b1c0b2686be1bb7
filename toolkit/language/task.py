"""Language modelling as a task: the next token, or hidden ones."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from toolkit.data.encoding import first_position, max_tokens
from toolkit.errors import UserError, raise_all
from toolkit.language import demo, head, isolation, stream
from toolkit.language.corpus import build
from toolkit.language.masking import Masker
from toolkit.language.samples import IGNORED, Around, Windows, cut
from toolkit.language.streamed import Streamed
from toolkit.language.tokens import special_tokens
from toolkit.models import check_adapter, check_vocabulary, load_config, load_model, load_tokenizer
from toolkit.report.console import say, warn
from toolkit.report.results import write_text
from toolkit.settings import best_problems
from toolkit.task import Batch, pad

BLOCK_SIZE = 1024  # tokens, where model and tokenizer allow so many
PACKED = "best_fit"


class LanguageModeling:
    """See `toolkit.task.Task`. The table that is scored holds a sample's sum of losses and its targets, [n, 2]."""

    name = "language_modeling"
    command = "generate"

    resumes = False

    def __init__(self, args: Any) -> None:
        self.args = args
        self.masked = args.objective == "masked"
        self.packing = args.packing or ("none" if self.masked else PACKED)
        self.packed = self.packing == PACKED

    def prepare(self) -> dict[str, Windows | Streamed]:
        args = self.args
        raise_all(self._contradictions())
        check_adapter(self._auto_class, args)
        self.config = load_config(args)
        if self.config.is_encoder_decoder:
            raise UserError(f"{args.model_name_or_path} is an encoder with a decoder, not a language model by itself.")
        self.tokenizer = load_tokenizer(args)
        self.masker = None
        if self.masked:
            self.masker = Masker(self.tokenizer, args.mlm_probability, args.whole_word_mask, args.seed)
        self.block_size = self._block_size()
        around = Around(*special_tokens(self.tokenizer)) if self.masked else None
        self.splits = {}
        if args.streaming:
            check = lambda tokens: check_vocabulary(tokens, self.tokenizer, self.config)  # noqa: E731
            self.splits["train"] = Streamed(args, self.tokenizer, self.block_size, self.packing, around, check)
        for split, corpus in build(args, self.tokenizer).items():
            check_vocabulary(corpus.tokens, self.tokenizer, self.config)
            samples = cut(corpus, self.block_size, self._how(split), around, self._stride(split))
            self.splits[split] = samples
            fill = samples.lengths.sum() / (len(samples) * self.block_size)
            filled = f", {fill:.1%} full" if samples.blocks is not None else ""
            say(f"{split}: {len(samples):,} samples of up to {self.block_size} tokens{filled}")
        return self.splits

    def model(self, **how: Any) -> nn.Module:
        model = load_model(self._auto_class, self.args, self.config, resumes=self.resumes, **how)
        if self.packed:
            if self.masked:
                isolation.separate(model, first_position(self.config))
            if model.device.type != "meta":  # a rank without weights: the others try it out
                isolation.check(model)
        head.install(model)
        return model

    def collate(self, rows: Sequence[dict[str, Any]], ids: Sequence[int], epoch: int) -> Batch:
        if self.masker is not None:
            rows = [self.masker(row, epoch) for row in rows]
        lengths = [len(row["tokens"]) for row in rows]
        longest = max(lengths)
        inputs = {"input_ids": pad([row["tokens"] for row in rows], longest, self.tokenizer.pad_token_id)}
        if self.packed:
            # Padding is one more document. There is no mask: documents are told apart by their positions.
            rest = [np.arange(longest - length) for length in lengths]
            positions = [np.concatenate([row["positions"], more]) for row, more in zip(rows, rest)]
            inputs["position_ids"] = pad(positions, longest, 0)
        else:
            inputs["attention_mask"] = pad([np.ones(length, np.int64) for length in lengths], longest, 0)
        labels = inputs["labels"] = pad([row["labels"] for row in rows], longest, IGNORED)
        return Batch(inputs, labels, list(ids), float((labels != IGNORED).sum()), sum(lengths))

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        return outputs["logits"][:, 0]

    def columns(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        return outputs["logits"]

    def score(self, split: str, table: np.ndarray) -> dict[str, float]:
        """Of all targets of the split, however they were cut into rows and batches."""
        loss, targets = table.sum(axis=0)
        if not targets:
            raise UserError(f"{split}: the tokenizer knows no word of these texts, so there is nothing to predict.")
        figures = {"loss": loss / targets, "perplexity": _exp(loss / targets)}
        if not self.masked:
            corpus = self.splits[split].corpus
            figures["bits_per_byte"] = loss / math.log(2) / corpus.bytes
            figures["bits_per_character"] = loss / math.log(2) / corpus.characters
        return figures

    def details(self, split: str, table: np.ndarray) -> dict[str, Any]:
        samples = self.splits[split]
        return {
            "documents": samples.corpus.documents,
            "chunks": len(samples.spans),
            "targets": int(table[:, 1].sum()),
            "bytes": samples.corpus.bytes,
            "characters": samples.corpus.characters,
            "block_size": self.block_size,
        }

    def write_predictions(self, path: Path, split: str, table: np.ndarray) -> None:
        """The loss of each document; those without anything to predict are left out, as in the corpus."""
        samples = self.splits[split]
        losses, targets = (np.bincount(samples.documents(), column, samples.corpus.documents) for column in table.T)
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["document", "targets", "loss", "perplexity"])
        for number, (loss, count) in enumerate(zip(losses, targets), 1):
            mean = loss / count if count else math.nan
            writer.writerow([number, int(count), f"{mean:.6g}", f"{_exp(mean):.6g}"])
        write_text(path, text.getvalue())

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("loss", "perplexity", *(() if self.masked else ("bits_per_byte", "bits_per_character")))

    @property
    def facts(self) -> dict[str, Any]:
        return {"pipeline_tag": "fill-mask" if self.masked else "text-generation"}

    @property
    def example(self) -> str:
        """Flags of `toolkit generate`; a masked model does not write texts."""
        return "" if self.masked else '--prompt "Once upon a time"'

    def sample(self, folder: Path) -> str:
        """What the demo's model writes; another one's user knows better what to begin with."""
        if not demo.is_demo(self.args):
            return ""
        from toolkit.generate import GenerateArguments, generate, load

        how = GenerateArguments(demo.PROMPT, max_new_tokens=demo.WRITTEN, temperature=0.7, seed=self.args.seed)
        return generate(*load(str(folder)), how)

    def baseline(self) -> dict[str, dict[str, float]]:
        """What counts of bytes know, beside the demo's model."""
        if not demo.is_demo(self.args) or not {"train", "validation"} <= set(self.splits):
            return {}
        return demo.ngram_baselines(self.splits["train"].corpus, self.splits["validation"].corpus)

    @property
    def _auto_class(self) -> Any:
        from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

        return AutoModelForMaskedLM if self.masked else AutoModelForCausalLM

    def _how(self, split: str) -> str:
        """How a split's chunks become samples.

        Documents are scored apart from each other, also where training concatenates them, and those of the test split
        each by itself.
        """
        if split == "train":
            return self.packing
        return PACKED if self.packed and split == "validation" else "none"

    def _stride(self, split: str) -> int | None:
        return None if split == "train" else self.args.eval_stride

    def _block_size(self) -> int:
        asked = self.args.block_size
        size, note = max_tokens(self.tokenizer, self.config, asked or BLOCK_SIZE, "--block_size")
        if asked and note:
            warn(note)
        if size < 3:
            raise UserError(f"--block_size {size}: expected at least 3.")
        stride = self.args.eval_stride
        if stride is not None and not 1 <= stride < size:
            raise UserError(
                f"--eval_stride {stride}: expected a number of tokens from 1 to {size - 1}, below the block."
            )
        return size

    def _contradictions(self) -> list[str]:
        args, problems = self.args, best_problems(self.args, self.metrics)
        if args.streaming:
            problems += stream.problems(args)
            if args.train_sampling_strategy == "group_by_length":
                problems.append("--train_sampling_strategy group_by_length needs all training data at once.")
            if args.dataloader_num_workers:
                problems.append("--dataloader_num_workers: a stream is read between the steps. Leave the flag out.")
            if self.packing == "concatenate":
                problems.append("--packing concatenate needs all training data at once: not with --streaming.")
        if args.max_length is not None:
            problems.append("--max_length: texts are not cut off here, but divided: use --block_size.")
        if args.label_smoothing_factor:
            problems.append(f"--label_smoothing_factor {args.label_smoothing_factor} is not supported here.")
        if not 0 < args.mlm_probability < 1:
            problems.append(f"--mlm_probability {args.mlm_probability}: expected a number between 0 and 1.")
        if not self.masked:
            problems += [
                f"--{name} needs --objective masked."
                for name in ("mlm_probability", "whole_word_mask")
                if name in args.given
            ]
        elif args.eval_stride is not None:
            problems.append("--eval_stride needs --objective causal.")
        if self.masked and self.packing == "concatenate":
            problems.append("--packing concatenate needs --objective causal.")
        if self.packed:
            problems += isolation.kernel_problems(args.attn_implementation)
        return problems


def _exp(loss: float) -> float:
    """Infinite where a float ends."""
    with np.errstate(over="ignore"):
        return float(np.exp(loss))
