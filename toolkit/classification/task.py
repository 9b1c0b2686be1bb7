"""Classification as a task: one label of several, several at once, or a number."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from toolkit.classification import metrics
from toolkit.classification.data import EncodedRows, is_demo, read_rows
from toolkit.data.encoding import encode, max_tokens
from toolkit.data.labels import MULTI, REGRESSION, SINGLE, balance, balanced_weights
from toolkit.errors import raise_all
from toolkit.models import check_adapter, check_vocabulary, load_config, load_model, load_tokenizer
from toolkit.report.console import say, warn
from toolkit.settings import best_problems
from toolkit.task import Batch, pad


class Classification:
    """See `toolkit.task.Task`. The table that is scored holds a sample's logits, [n, num_labels]."""

    name = "classify"
    command = "predict"

    resumes = False

    def __init__(self, args: Any) -> None:
        self.args = args

    def prepare(self) -> dict[str, EncodedRows]:
        args = self.args
        if args.model_name_or_path is None and args.config_name is None:
            from toolkit.data.demo import demo_model

            args.model_name_or_path = str(demo_model())
        check_adapter(self._auto_class, args)
        self.config = load_config(args)
        self.tokenizer = load_tokenizer(args)
        has_head = any(name.endswith("ForSequenceClassification") for name in self.config.architectures or [])
        known = self.config.id2label if has_head else None
        rows, self.labels, self.text_columns = read_rows(args, known)
        self.rows = rows
        raise_all(self._contradictions())
        if known and self.labels.names and list(known.values()) != self.labels.names:
            warn(f"the model's labels {_few(known.values())} give way to the data's {_few(self.labels.names)}.")
        self._set_labels()
        limit, note = max_tokens(self.tokenizer, self.config, args.max_length)
        if note:
            warn(note)
        splits = {}
        for split, part in rows.items():
            arrays = encode(self.tokenizer, part.texts, limit, args.cache_dir, args.preprocessing_num_workers)
            check_vocabulary(arrays["input_ids"], self.tokenizer, self.config)
            splits[split] = EncodedRows(arrays, part.targets)
            cut = int(arrays["truncated"][0])
            if cut:
                say(f"{split}: {cut} of {len(part.texts)} texts are cut at {limit} tokens")
        say(f"labels: {balance(rows['train'].targets, self.labels.names)}")
        weights = torch.ones(self.labels.num_labels)
        if args.class_weights == "balanced":
            weights = torch.from_numpy(balanced_weights(rows["train"].targets, self.labels.num_labels))
        self.weights = {torch.device("cpu"): weights}
        return splits

    def model(self, **how: Any) -> nn.Module:
        return load_model(self._auto_class, self.args, self.config, self._start, self.resumes, **how)

    def collate(self, rows: Sequence[dict[str, Any]], ids: Sequence[int], epoch: int) -> Batch:
        tokens = [row["input_ids"] for row in rows]
        length = max(map(len, tokens))
        inputs = {"input_ids": pad(tokens, length, self.tokenizer.pad_token_id)}
        inputs["attention_mask"] = pad([np.ones(len(row), np.int32) for row in tokens], length, 0)
        if "token_type_ids" in rows[0]:
            inputs["token_type_ids"] = pad([row["token_type_ids"] for row in rows], length, 0)
        targets = [row["target"] for row in rows]
        unlabelled = targets[0] is None
        tensor = torch.zeros(len(rows)) if unlabelled else torch.from_numpy(np.stack(targets))
        weight = float(len(rows))
        if self.args.class_weights == "balanced" and not unlabelled:
            weight = float(self.weights[torch.device("cpu")][tensor].double().sum())
        return Batch(inputs, tensor, list(ids), weight, sum(map(len, tokens)))

    def loss(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        logits = outputs["logits"].float()
        if self.labels.kind == REGRESSION:
            return (logits.squeeze(-1) - batch.targets) ** 2
        if self.labels.kind == MULTI:
            return F.binary_cross_entropy_with_logits(logits, batch.targets, reduction="none").mean(-1)
        if logits.device not in self.weights:
            self.weights[logits.device] = self.weights[torch.device("cpu")].to(logits.device)
        return F.cross_entropy(
            logits,
            batch.targets,
            weight=self.weights[logits.device],
            label_smoothing=self.args.label_smoothing_factor,
            reduction="none",
        )

    def columns(self, outputs: Mapping[str, Tensor], batch: Batch) -> Tensor:
        return outputs["logits"].float()

    def score(self, split: str, table: np.ndarray) -> dict[str, float]:
        targets = self.rows[split].targets
        if targets is None:
            return {}
        figures = metrics.score(self.labels.kind, table, targets, self.labels.names, self.args.threshold)
        return {"loss": self._plain_loss(table, targets), **figures}

    def details(self, split: str, table: np.ndarray) -> dict[str, Any]:
        """The per-class report and confusion matrix; what is suspicious about them is said."""
        targets = self.rows[split].targets
        if targets is None:
            return {}
        arguments = (self.labels.kind, table, targets, self.labels.names, self.args.threshold)
        for message in metrics.warnings(*arguments):
            warn(f"{split}: {message}")
        return metrics.report(*arguments)

    def write_predictions(self, path: Path, split: str, table: np.ndarray) -> None:
        from toolkit.predict import write_predictions

        kept = self.rows[split].kept
        ids = None if kept == list(range(len(kept))) else [row + 1 for row in kept]
        write_predictions(path, self.labels.kind, self.labels.names, table, ids, self.args.threshold)

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("loss", *metrics.METRICS[self.labels.kind])

    @property
    def facts(self) -> dict[str, Any]:
        return {"pipeline_tag": "text-classification", "labels": self.labels.names}

    @property
    def example(self) -> str:
        """Flags of `toolkit predict`, for the closing lines."""
        if is_demo(self.args):
            return '--text "Return the square root of the argument."'
        return '--text "your text"' + (' --text_pair "its pair"' if len(self.text_columns) == 2 else "")

    def sample(self, folder: Path) -> str:
        return ""

    def baseline(self) -> dict[str, dict[str, float]]:
        """What word counts reach on the demo's split; nothing for other data."""
        if not is_demo(self.args) or "validation" not in self.rows:
            return {}
        from toolkit.data.demo import tfidf_baseline

        train, validation = self.rows["train"], self.rows["validation"]
        texts, targets = (train.texts, validation.texts), (train.targets.tolist(), validation.targets.tolist())
        return {"TF-IDF + logistic regression": tfidf_baseline(texts[0], targets[0], texts[1], targets[1])}

    @property
    def _auto_class(self) -> Any:
        from transformers import AutoModelForSequenceClassification

        return AutoModelForSequenceClassification

    def _start(self, model: nn.Module, fresh: Collection[str]) -> None:
        """Let the bias of a fresh head say the base rates: the log-odds of each label, or the mean value.

        From zero, a multi-label head first moves all logits down by several units, and the features with
        them (the start of Lin et al. 2017, section 4.1). Single-label heads are near enough at zero.
        """
        targets = self.rows["train"].targets.astype(np.float64)
        for name, parameter in model.named_parameters():
            if name in fresh and name.endswith("bias") and parameter.shape == (self.labels.num_labels,):
                if self.labels.kind == MULTI:
                    rate = (targets.sum(axis=0) + 0.5) / (len(targets) + 1)
                    parameter.data.copy_(torch.from_numpy(np.log(rate / (1 - rate))))
                elif self.labels.kind == REGRESSION:
                    parameter.data.fill_(targets.mean())

    def _plain_loss(self, table: np.ndarray, targets: np.ndarray) -> float:
        """The mean loss of a split, neither weighted nor smoothed."""
        logits, wanted = torch.from_numpy(table), torch.from_numpy(targets)
        if self.labels.kind == REGRESSION:
            return float(F.mse_loss(logits.squeeze(-1), wanted.double()))
        if self.labels.kind == MULTI:
            return float(F.binary_cross_entropy_with_logits(logits, wanted.double()))
        return float(F.cross_entropy(logits, wanted))

    def _set_labels(self) -> None:
        config, labels = self.config, self.labels
        if labels.kind == REGRESSION:
            config.num_labels = 1
        else:
            config.id2label = dict(enumerate(labels.names))
            config.label2id = {name: i for i, name in enumerate(labels.names)}
        config.problem_type = labels.kind
        config.text_columns = self.text_columns
        if labels.kind == MULTI:
            config.threshold = self.args.threshold
        if config.pad_token_id is None or config.pad_token_id != self.tokenizer.pad_token_id:
            config.pad_token_id = self.tokenizer.pad_token_id

    def _contradictions(self) -> list[str]:
        problems = best_problems(self.args, self.metrics)
        if not 0 < self.args.threshold < 1:
            problems.append(f"--threshold {self.args.threshold}: expected a probability between 0 and 1.")
        if self.labels.kind == SINGLE and len(self.labels.names) > max(20, len(self.rows["train"].texts) // 4):
            warn(
                f"{len(self.labels.names)} classes in {len(self.rows['train'].texts)} training rows: if the labels are "
                "numbers to be predicted, add --problem_type regression."
            )
        if self.labels.kind == SINGLE:
            return problems
        kind = "regression" if self.labels.kind == REGRESSION else "multi-label classification"
        if self.args.label_smoothing_factor:
            problems.append(f"--label_smoothing_factor {self.args.label_smoothing_factor} has no meaning in {kind}.")
        if self.args.class_weights != "none":
            problems.append(f"--class_weights {self.args.class_weights} has no meaning in {kind}.")
        return problems


def _few(names: Any) -> str:
    shown = [str(name) for name in names]
    return ", ".join(shown[:6]) + (", …" if len(shown) > 6 else "")
