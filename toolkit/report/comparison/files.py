"""The comparison as a csv file and as a table on the terminal."""

import csv
import io
from pathlib import Path
from typing import Any

from toolkit.report.comparison import words
from toolkit.report.comparison.columns import columns
from toolkit.report.comparison.verdict import recommend, stated
from toolkit.report.comparison.words import get
from toolkit.report.results import write_text

SPREADS = {
    "samples_per_second": ("throughput", "samples_per_second"),
    "tokens_per_second": ("throughput", "tokens_per_second"),
    "step_seconds": ("step_seconds",),
    "startup_seconds": ("startup_seconds",),
}
PLAIN = (
    *("name", "machine", "title", "precision", "processes", "devices", "failure", "phases_failure"),
    *("efficiency", "memory_imbalance"),
)
WIDTH = 120  # columns of a terminal that is none
FOOTNOTE = (
    "samples/s: median (least to most). memory: peak of the fullest device; max/mean: over devices. sent: in a step, "
    "by the rank that sends most. loss: largest relative difference from the reference."
)


def write_csv(comparison: dict[str, Any], path: Path) -> None:
    """Write one line a config; bytes, seconds and numbers at full precision, an empty field where there is none.

    Lists over devices or ranks are columns numbered from 0. A rehearsal says so in every line.
    """
    lines = [_line(config, comparison) for config in comparison["configs"]]
    fields = dict.fromkeys(key for line in lines for key in line)
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(fields), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_text(Path(path), stream.getvalue())


def _line(config: dict[str, Any], comparison: dict[str, Any]) -> dict[str, Any]:
    line = {key: config.get(key) for key in PLAIN if key != "machine" or key in config}
    for name, keys in SPREADS.items():
        line |= {f"{name}_{part}": get(config, *keys, part) for part in ("median", "least", "most")}
    line |= {f"step_{phase}_seconds": get(config, "phases", phase) for phase in (*words.PHASES, "total")}
    for number, memory in enumerate(config.get("memory") or ()):
        for kind in ("peak_allocated", "peak_reserved", "peak_resident"):
            line[f"{kind}_{number}"] = memory.get(kind)
    for rank, state in enumerate(config.get("held") or ()):
        line |= {f"held_{kind}_{rank}": state.get(kind) for kind in words.HELD}
    line |= {f"bytes_sent_{rank}": sent for rank, sent in enumerate(config.get("bytes_sent") or ())}
    line["energy_joules_per_step"] = config.get("energy_joules_per_step")
    line |= {f"{name}_difference": get(config, "parity", name) for name in ("loss", "grad_norm")}
    line["training"] = words.outcome(config, comparison["reference"])
    line["rehearsal"] = words.REHEARSAL if _rehearsed(config, comparison) else ""
    return line


def _rehearsed(config: dict[str, Any], comparison: dict[str, Any]) -> bool:
    """Of runs side by side each knows for itself."""
    run = next((run for run in comparison.get("runs", ()) if run["label"] == config["machine"]), comparison)
    return run["rehearsal"]


def terminal_table(comparison: dict[str, Any]) -> None:
    """Print the most important figures, the label of a rehearsal and what is recommended. Names are never cut."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    configs, reference = comparison["configs"], comparison["reference"]
    chosen = [column for column in columns(configs) if column.short]
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("config", overflow="fold", min_width=max(len(word) for c in configs for word in _name(c).split()))
    for column in chosen:
        table.add_column(column.short, justify="right", no_wrap=True)
    table.add_column("training", overflow="fold")
    for config in configs:
        told = "failed" if config.get("failure") else words.outcome(config, reference)
        style = None if words.same_training(config, reference) else "red"
        table.add_row(*map(Text, (_name(config), *(column.shown(config) for column in chosen), told)), style=style)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    if comparison["rehearsal"]:
        console.print(Text(words.REHEARSAL, style="bold yellow"))
    for line in comparison.get("differences", ()):
        console.print(Text(f"The runs differ in {words.printable(line)}", style="bold yellow"))
    console.print(table)
    console.print(Text(" ".join(filter(None, (FOOTNOTE, stated(comparison))))))
    for config in configs:
        if config.get("failure"):
            console.print(Text(words.printable(words.told(config, reference)), style="red"))
        elif words.unprofiled(config):
            console.print(Text(words.printable(f"{words.label(config)}: {words.unprofiled(config)}"), style="yellow"))
    console.print(Text(recommend(comparison)["why"], style="bold"))


def _name(config: dict[str, Any]) -> str:
    return words.printable(words.label(config))
