"""`toolkit predict`: labels for new texts from a finished run, or from any sequence classifier."""

import csv
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.arguments import flag, parse
from toolkit.data.demo import on_hub
from toolkit.data.values import is_broken
from toolkit.errors import UserError, raise_all
from toolkit.report.console import say, warn

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class PredictArguments:
    """Flags of `toolkit predict`."""

    text: str | None = flag(None, "The text to label; for several give a --file.")
    text_pair: str | None = flag(None, "Its second text, for a model of text pairs.")
    file: str | None = flag(None, "CSV, TSV, JSON, JSONL or Parquet file of texts.")
    output: str | None = flag(None, "CSV file to write, one line for each row of --file. Default: predictions.csv.")
    overwrite: bool = flag(False, "Replace --output where it exists.")
    text_column_names: list[str] | None = flag(None, "Column of the texts, or the two columns of pairs.")
    empty_text: str = flag("error", "Rows without text: stop, or label them all the same.", ("error", "keep"))
    delimiter: str | None = flag(None, "Column delimiter of CSV files. Default: found from the header.")
    quoting: str = flag("csv", "csv: quotes group a field; none: a quote is a character.", ("csv", "none"))
    column_names: list[str] | None = flag(None, "Column names of CSV/TSV files without a header line.")
    max_length: int | None = flag(None, "Longest text in tokens. Default: what model and tokenizer allow.")
    batch_size: int = flag(32, "Texts in one forward pass.")
    threshold: float | None = flag(
        None, "Least probability of a label that is given (multi-label models). Default: the training run's, else 0.5."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run `toolkit predict MODEL_DIR --text "…"` or `… --file F`; the exit code."""
    argv = list(sys.argv[1:] if argv is None else argv)
    name = argv.pop(0) if argv and not argv[0].startswith("-") else None
    args = parse(PredictArguments, argv, "toolkit predict MODEL_DIR: label texts with a finished run.")
    output = Path(args.output or "predictions.csv")
    raise_all(_problems(name, args, output, argv))
    texts: list[Any] = [(args.text, args.text_pair) if args.text_pair is not None else args.text]
    if args.file is not None:
        texts = _read(args)
    model, tokenizer = load(name)
    kind, names = describe(model.config)
    _check_columns(name, model.config, texts)
    threshold = args.threshold if args.threshold is not None else getattr(model.config, "threshold", 0.5)
    logits = infer(model, tokenizer, texts, args.batch_size, args.max_length)
    if args.file is None:
        print(_spoken(kind, names, logits, threshold))
        return 0
    write_predictions(output, kind, names, logits, threshold=threshold)
    say(f"{len(texts):,} predictions written to {output}")
    return 0


def load(name: str) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase]":
    """The classifier in float32, in evaluation mode, on the first device, and its tokenizer.

    Args:
        name: a folder or a Hub name. Code that comes with a model is never run, pickles are never read.

    Raises:
        UserError: there is no such model, or it is not a sequence classifier.
    """
    folder = Path(name)
    if not folder.is_dir() and not on_hub(name):
        raise UserError(
            f"model {name}: no such folder, and no model of the Hugging Face Hub that can be had from here. "
            "Give the --output_dir of a finished run, or a Hub name."
        )
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise UserError(
            f"model {name}: the folder has no config.json, so no finished run is in it. "
            "Give the --output_dir of a run that has ended."
        )
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer, logging

    from toolkit import adapters

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        how = {"dtype": torch.float32, "use_safetensors": True, "trust_remote_code": False}
        model, found = adapters.from_pretrained(
            AutoModelForSequenceClassification, name, output_loading_info=True, **how
        )
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except UserError:
        raise
    except Exception as error:  # each library has its own way to say that a file is missing, foreign or broken
        reason = " ".join(str(error).split())
        raise UserError(f"model {name} cannot be loaded as a sequence classifier: {reason}") from None
    if found["missing_keys"]:
        raise UserError(
            f"model {name} is not a finished classifier: {', '.join(sorted(found['missing_keys']))} "
            "are not in its weights, and random ones would give random labels. Fine-tune it first with "
            "tasks/classify.py."
        )
    return model.eval().to(_device()), tokenizer


def describe(config: Any) -> tuple[str, list[str]]:
    """The problem type of a classifier's config, and its label names in order of id (regression: none)."""
    kind = config.problem_type or ("regression" if config.num_labels == 1 else "single_label_classification")
    labels = range(0 if kind == "regression" else config.num_labels)
    return kind, [str(config.id2label[label]) for label in labels]


def infer(
    model: "PreTrainedModel",
    tokenizer: "PreTrainedTokenizerBase",
    texts: Sequence[str] | Sequence[tuple[str, str]],
    batch_size: int = 32,
    max_length: int | None = None,
) -> "np.ndarray":
    """Logits of texts or text pairs, float32 [n, k], in the order of `texts`.

    Texts longer than the model are cut, with a warning that counts them. Padding is on the right always:
    the classifiers of decoder-only models look for the last token before it.
    """
    import numpy as np
    import torch

    from toolkit.data.encoding import max_tokens

    limit, warning = max_tokens(tokenizer, model.config, max_length)
    if warning:
        warn(warning)
    tokenizer.padding_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.config.pad_token_id is None:
        model.config.pad_token_id = tokenizer.pad_token_id
    columns = [list(column) for column in zip(*texts)] if isinstance(texts[0], tuple) else [list(texts)]
    lengths = [len(row) for row in tokenizer(*columns, verbose=False)["input_ids"]]
    cut = sum(length > limit for length in lengths)
    if cut:
        warn(f"{cut} of {len(texts)} texts are longer than {limit} tokens: what is beyond is not read.")
    # Similar lengths share a batch, so that little is padding; results go back to their own row.
    ranked = np.argsort(lengths, kind="stable")
    logits = np.empty((len(texts), model.config.num_labels), dtype=np.float32)
    with torch.inference_mode():
        for start in range(0, len(texts), batch_size):
            rows = ranked[start : start + batch_size]
            parts = [[column[row] for row in rows] for column in columns]
            inputs = tokenizer(*parts, truncation=True, max_length=limit, padding=True, return_tensors="pt")
            logits[rows] = model(**inputs.to(model.device)).logits.float().cpu().numpy()
    return logits


def write_predictions(
    path: Path,
    kind: str,
    names: Sequence[str],
    logits: "np.ndarray",
    ids: Sequence[int] | None = None,
    threshold: float = 0.5,
) -> None:
    """Write `predictions.csv`: a header and one line a row, in the order of the input rows.

    Columns: `prediction`, the label's name (multi-label: the names joined by commas; regression: the value);
    then for a classifier `probability_<name>` for each class.

    Args:
        logits: float [n, k].
        ids: number of the input row of each row of `logits`, where not every input row has one: written as
            a first column `row`, in ascending order. None: row k of `logits` is input row k.
    """
    import numpy as np

    from toolkit.classification.metrics import predictions, probabilities
    from toolkit.report.results import write_text

    if ids is not None:
        if len(ids) != len(logits) or len(set(ids)) < len(ids):
            raise ValueError("ids must name each row of logits once")
        order = np.argsort(ids)
        ids, logits = np.asarray(ids)[order].tolist(), logits[order]
    chosen = predictions(kind, logits, threshold)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if kind == "regression":
        header, lines = ["prediction"], [[f"{value:.6g}"] for value in chosen]
    else:
        header = ["prediction", *(f"probability_{name}" for name in names)]
        lines = [
            [_label(kind, names, row), *(f"{chance:.6f}" for chance in chances)]
            for row, chances in zip(chosen, probabilities(kind, logits))
        ]
    writer.writerow(header if ids is None else ["row", *header])
    writer.writerows(lines if ids is None else ([id, *line] for id, line in zip(ids, lines)))
    write_text(path, text.getvalue())


def _problems(name: str | None, args: PredictArguments, output: Path, argv: Sequence[str]) -> list[str]:
    problems = []
    if name is None:
        problems.append("toolkit predict: say which model first: toolkit predict MODEL_DIR --text '…'.")
    if (args.text is None) == (args.file is None):
        problems.append("toolkit predict: give either --text or --file.")
    if sum(word.split("=")[0] == "--text" for word in argv) > 1:
        problems.append("--text is given more than once: put several texts into a --file.")
    if args.text is not None and not (args.text + (args.text_pair or "")).strip():
        problems.append("--text is empty: there is nothing to label.")
    if is_broken(f"{args.text}{args.text_pair}"):
        problems.append("--text holds half a character (a lone surrogate, or bytes that are not UTF-8): write it anew.")
    if args.text_pair is not None and args.text is None:
        problems.append("--text_pair belongs to --text; for a file name two --text_column_names.")
    if args.batch_size < 1:
        problems.append(f"--batch_size {args.batch_size}: expected at least 1.")
    if args.max_length is not None and args.max_length < 1:
        problems.append(f"--max_length {args.max_length}: expected at least 1.")
    if args.threshold is not None and not 0 <= args.threshold <= 1:
        problems.append(f"--threshold {args.threshold}: a probability is a number from 0 to 1.")
    if args.file is not None and output.is_dir():
        problems.append(f"--output {output} is a folder: name a CSV file.")
    elif args.file is not None and output.exists() and not args.overwrite:
        problems.append(f"--output {output} exists and is left alone: give another --output, or --overwrite.")
    if args.file is not None and not output.parent.is_dir():
        problems.append(f"--output {output}: the folder {output.parent} does not exist.")
    return problems


def _read(args: PredictArguments) -> list[Any]:
    from toolkit.data.columns import label_column, text_columns, texts
    from toolkit.data.sources import read_table

    table = read_table(args.file, args.delimiter, args.quoting, args.column_names)
    asked = args.text_column_names
    label = None if asked else label_column(table, None, required=False)
    return texts(table, text_columns(table, asked, label), args.empty_text)[0]


def _check_columns(name: str, config: Any, texts: list[Any]) -> None:
    """Refuse single texts for a model of pairs, and pairs for a model of single texts, where the config tells."""
    columns = getattr(config, "text_columns", None)
    given = 2 if isinstance(texts[0], tuple) else 1
    if columns and len(columns) != given:
        wanted = "pairs of texts: add --text_pair, or name two columns" if given == 1 else "single texts, not pairs"
        raise UserError(f"model {name} was trained on {wanted} ({', '.join(columns)}).")


def _spoken(kind: str, names: Sequence[str], logits: "np.ndarray", threshold: float) -> str:
    """The prediction of one row for the screen: every label with its probability, the likeliest first."""
    from toolkit.classification.metrics import predictions, probabilities

    if kind == "regression":
        return f"{predictions(kind, logits)[0]:.4g}"
    chosen = _label(kind, names, predictions(kind, logits, threshold)[0]) or "(no label)"
    ranked = sorted(zip(probabilities(kind, logits)[0], names), reverse=True)
    return "\n".join([chosen, *(f"  {chance:.3f}  {name}" for chance, name in ranked)])


def _label(kind: str, names: Sequence[str], prediction: Any) -> str:
    if kind == "multi_label_classification":
        return ",".join(name for name, given in zip(names, prediction, strict=True) if given)
    return names[prediction]


def _device() -> str:
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
