"""What a run without a model or data of its own trains on."""

from typing import Any

from toolkit.errors import raise_all


def set_demo_flags(args: Any) -> None:
    """The place where a demo's model, data and settings go into the flags; there is none yet.

    Raises:
        UserError: a model or training data are missing.
    """
    problems = []
    if args.model_name_or_path is None:
        problems.append("--model_name_or_path: which model to train, a folder or a Hub name.")
    if not (args.train_file or args.dataset_name):
        problems.append(
            "no training data: give text, JSONL, CSV or Parquet files with --train_file, or --dataset_name."
        )
    raise_all(problems)
