"""Figures as a person reads them: one line in the course of training, a plot, a card and a table at its end."""

import shlex
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from toolkit.report.console import say
from toolkit.report.facts import versions
from toolkit.report.progress import duration

if TYPE_CHECKING:
    from toolkit.report.run import Run
    from toolkit.task import Task

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


def conclude(run: "Run", task: "Task", results: dict[str, dict[str, Any]]) -> None:
    """Write the plot and the model card of a run, and show the closing table."""
    from toolkit.report.card import model_card
    from toolkit.report.plots import training_plot

    training_plot(run.folder / "metrics.jsonl", run.folder / "training.png")
    figures = results.get("validation", {})
    facts = {
        "name": run.folder.name,
        "base_model": run.args.model_name_or_path,
        "adapter": run.args.use_peft and not run.args.merge_adapter,
        **task.facts,
        "results": quality(figures),
        "settings": run.changed_flags,
        "versions": versions(),
    }
    model_card(run.folder / "README.md", facts)
    baseline = run.settings["baseline"] = task.baseline()
    rate = run.samples / run.train_seconds
    rows = [
        *result_rows(results, baseline),
        ("training", f"{duration(run.train_seconds)}, {rate:.1f} samples/s"),
        ("all in all", duration(time.perf_counter() - run.started)),
        ("model", str(run.folder)),
    ]
    if task.example:
        rows.append(("try it", f"toolkit {task.command} {shlex.quote(str(run.folder))} {task.example}"))
    say(table(rows))
    sample = task.sample(run.folder)
    if sample:
        say(f"a sample of what it writes:\n{sample}")


def _words(key: str) -> str:
    return key.replace("_", " ")
