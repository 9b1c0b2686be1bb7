"""Fine-tune a text classifier: one label, several labels, or a number; one text or a pair.

    accelerate launch --config_file accelerate_configs/single_gpu.yaml tasks/classify.py \
        --model_name_or_path M --train_file train.csv --validation_file dev.csv
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from toolkit.arguments import Arguments, flag, parse
from toolkit.launch.guard import guarded


@dataclass
class ClassifyArguments(Arguments):
    """Flags of classification."""

    text_column_names: list[str] | None = flag(None, "The text column, or the two columns of a pair.")
    label_column_name: str | None = flag(None, "The label column.")
    problem_type: str | None = flag(
        None,
        "What the labels are. Default: found from the data.",
        ("single_label", "multi_label", "regression"),
    )
    label_separator: str | None = flag(None, "What separates the labels of one multi-label cell.")
    empty_text: str = flag("error", "What to do with rows without text.", ("error", "drop", "keep"))
    class_weights: str = flag(
        "none", "balanced: a class counts as much as any other.", ("none", "balanced"), defines=True
    )
    threshold: float = flag(0.5, "Probability from which a label of a multi-label row is given.")


def main() -> None:
    args = parse(ClassifyArguments, description=__doc__)
    # Not earlier: --help and mistakes in flags should not wait for torch.
    from toolkit.classification.data import set_demo_flags
    from toolkit.classification.task import Classification
    from toolkit.fit import fit

    set_demo_flags(args)
    fit(Classification(args), args)


if __name__ == "__main__":
    guarded(main)
