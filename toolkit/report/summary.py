"""Figures as a person reads them: one line in the course of training, a table at its end."""

from collections.abc import Mapping, Sequence
from typing import Any

BESIDE = ("samples", "runtime", "samples_per_second", "f1")  # no figures of quality; f1 is f1_macro again


def quality(figures: Mapping[str, Any]) -> dict[str, float]:
    """The figures of quality among those of an evaluation."""
    return {key: value for key, value in figures.items() if key not in BESIDE}


def line(figures: Mapping[str, Any]) -> str:
    """One line, such as `loss 0.3120  accuracy 0.8872`."""
    return "  ".join(f"{_words(key)} {value:.4f}" for key, value in quality(figures).items())


def result_rows(
    results: Mapping[str, Mapping[str, Any]], baselines: Mapping[str, Mapping[str, float]]
) -> list[tuple[str, str]]:
    """The figures of each split, with those of the baselines beside them that are of the validation split."""
    rows = []
    for split, figures in results.items():
        for key, value in quality(figures).items():
            beside = [f"{name}: {known[key]:.4f}" for name, known in baselines.items() if key in known]
            shown = f"{value:.4f}" + (f"   ({', '.join(beside)})" if beside and split == "validation" else "")
            rows.append((f"{split} {_words(key)}", shown))
    return rows


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Two columns, the second one aligned."""
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name:<{width}}{value}" for name, value in rows)


def _words(key: str) -> str:
    return key.replace("_", " ")
