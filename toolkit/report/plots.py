"""Pictures of a training."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

from toolkit.report.results import read_metrics, write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def training_plot(metrics_jsonl: Path, png: Path) -> None:
    """Draw loss and learning rate against the optimizer step, with the evaluations as points.

    Args:
        metrics_jsonl: the log of a run; rows with `eval_loss` are evaluations, rows with `loss` are steps.
        png: the picture to write.
    """
    # The object interface with the Agg canvas: pyplot would choose a backend, and keep state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    rows = read_metrics(metrics_jsonl)
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    losses, rates = figure.subplots(2, 1, sharex=True, height_ratios=(3, 1))
    steps, values = _series(rows, "loss")
    # The loss of single batches is noisy: it stands back, behind its running mean.
    losses.plot(steps, values, color="tab:blue", alpha=0.3, linewidth=0.8, label="training, each step")
    losses.plot(steps, _running_mean(values), color="tab:blue", linewidth=1.8, label="training, running mean")
    eval_steps, eval_values = _series(rows, "eval_loss")
    if eval_steps:
        losses.plot(eval_steps, eval_values, "o-", color="tab:orange", linewidth=1, label="evaluation")
    losses.set_ylabel("loss")
    losses.legend(frameon=False)
    rates.plot(*_series(rows, "learning_rate"), color="tab:gray")
    rates.set_ylabel("learning rate")
    rates.set_xlabel("optimizer step")
    rates.xaxis.set_major_locator(MaxNLocator(integer=True))
    rates.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    for axes in (losses, rates):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    write_figure(png, figure)


def write_figure(path: Path, figure: "Figure") -> None:
    """Write a picture in the format of its ending."""
    content = io.BytesIO()
    figure.savefig(content, dpi=150, format=path.suffix.removeprefix("."))
    write_bytes(path, content.getvalue())


def _series(rows: list[dict], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the rows that have the key; null (NaN) is left out."""
    points = [(row["step"], float(row[key])) for row in rows if row.get(key) is not None and "step" in row]
    return [step for step, _ in points], [value for _, value in points]


def _running_mean(values: list[float]) -> list[float]:
    """The exponential running mean over about a thirtieth of the run, corrected for its start."""
    decay = 1 - 1 / max(1, len(values) / 30)
    means, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = decay * total + value, decay * weight + 1
        means.append(total / weight)
    return means
