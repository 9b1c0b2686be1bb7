"""Save under every strategy, go on under every other: how far the remaining losses are from the uninterrupted run's.

    python benchmarks/checkpoint_matrix.py [--folder FOLDER]

A BERT of 2 layers, AdamW 5e-5, fp32, dropout 0: 15 steps, saved after step 7 in the middle of the second epoch. The
81 pairs take one launch of two processes and some runs here, about 5 minutes on 2 cores. Prints the table in markdown,
rows saved, columns gone on with, and exits with 1 where a difference is above 1e-5 (gradient norm: 5e-5).
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.runs import read_rows, run_here, run_launched
from tests.test_checkpoint_ring import LOSS, NORM, ROWS, SAVED, STEPS, flags, going_on, saving
from tests.tiny import save_tiny_classifier, write_csv
from tests.ways import WAYS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="Where the runs go. Default: a temporary folder.")
    folder = parser.parse_args().folder
    if folder is None:
        with tempfile.TemporaryDirectory() as temporary:
            run_all(Path(temporary))
            sys.exit(show(Path(temporary)))
    folder.mkdir(parents=True)
    run_all(folder)
    sys.exit(show(folder))


def run_all(folder: Path) -> None:
    """Every way saves, and goes on from what every way has saved."""
    save_tiny_classifier(folder / "model")
    write_csv(folder / "train.csv", ROWS, seed=3)
    run_here(flags(folder, "whole", "--dropout", 0))
    saves = {name: saving(folder, way, name) for name, way in WAYS.items()}
    resumes = {
        after: [going_on(folder, way, f"{before}/checkpoint-{SAVED}", f"{before} to {after}") for before in WAYS]
        for after, way in WAYS.items()
    }
    alone = [name for name, way in WAYS.items() if way.processes == 1]
    for name in alone:
        run_here(**saves[name])
    both = [name for name in WAYS if name not in alone]
    launched = [saves[name] for name in both] + [run for name in both for run in resumes[name]]
    run_launched(launched, 2, folder, timeout=1800)
    for name in alone:
        for run in resumes[name]:
            run_here(**run)


def show(folder: Path) -> int:
    """Print the tables; 1 where a limit is exceeded."""
    whole, exceeded = read_rows(folder / "whole"), 0
    for key, limit in {"loss": LOSS, "grad_norm": NORM}.items():
        print(f"\nLargest relative difference of {key} after step {SAVED}:\n")
        print(f"| saved \\ gone on | {' | '.join(WAYS)} |\n|---|{'---|' * len(WAYS)}")
        for before in WAYS:
            found = [furthest(read_rows(folder / f"{before} to {after}"), whole, key) for after in WAYS]
            exceeded |= max(found) > limit
            print(f"| {before} | {' | '.join(f'{value:.1e}' for value in found)} |", flush=True)
    return int(exceeded)


def furthest(rows: list[dict], whole: list[dict], key: str) -> float:
    """The largest relative difference in the steps after the checkpoint."""
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    return max(abs(row[key] / other[key] - 1) for row, other in zip(rows[SAVED:], whole[SAVED:]))


if __name__ == "__main__":
    main()
