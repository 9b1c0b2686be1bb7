"""Perplexity of a language model that was not trained here, by the toolkit and by a plain PyTorch loop.

    torchrun --nproc_per_node 2 benchmarks/zero_shot.py MODEL_DIR TEXT_FILE …

For each file, packed or not, and micro-batches of 1, 3 and 16 rows: the largest relative difference of the perplexity
from the plain loop's, which takes one chunk of a document at a time.
"""

import argparse
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np


def main() -> None:
    from tests.test_language_task import plain_score

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    asked = parser.parse_args()
    for file in asked.files:
        figures = [score(asked.model, file, packing, rows) for packing in ("best_fit", "none") for rows in (1, 3, 16)]
        if os.environ.get("RANK", "0") == "0":
            total, targets, characters = plain_score(asked.model, file)
            expected = math.exp(total / targets)
            worst = max(abs(of["perplexity"] / expected - 1) for of in figures)
            bits = total / math.log(2) / characters
            print(
                f"{file.name}: perplexity {expected:.4f}, {bits:.4f} bits per character, {targets:,} targets; "
                f"{os.environ.get('WORLD_SIZE', '1')} processes differ by at most {worst:.1e}",
                flush=True,
            )


def score(model: Path, file: Path, packing: str, rows: int) -> dict[str, float]:
    """The toolkit's figures of one file."""
    from accelerate.state import AcceleratorState

    from tasks.language_modeling import LanguageModelingArguments
    from toolkit.arguments import parse
    from toolkit.data.feed import collate
    from toolkit.data.plan import Bound
    from toolkit.evaluate import outputs
    from toolkit.language.task import LanguageModeling
    from toolkit.launch.environment import connect
    from toolkit.strategy import choose
    from toolkit.strategy.base import OptimizerRule

    AcceleratorState._reset_state()
    words = ["--model_name_or_path", model, "--train_file", file, "--validation_file", file, "--packing", packing]
    args = parse(LanguageModelingArguments, [str(word) for word in words])
    task, strategy = LanguageModeling(args), choose(connect(args, []), args)
    samples = task.prepare()["validation"]
    rule = OptimizerRule("adamw", (0.9, 0.999), 1e-8, 0.0, 1.0)
    strategy.build(task, rule, collate(task, samples, np.arange(2), 0))
    return task.score("validation", outputs(strategy, task, samples, Bound(rows)))


if __name__ == "__main__":
    main()
