"""compare.html: the whole comparison on one page that needs nothing but a browser."""

import shlex
from collections.abc import Sequence
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from toolkit.report.comparison import charts, words
from toolkit.report.comparison.columns import Column, columns
from toolkit.report.comparison.markup import Cell, name, table, tag, text
from toolkit.report.comparison.verdict import recommend, stated
from toolkit.report.results import write_text

Config = dict[str, Any]
# The page may not fetch anything, whatever stands in it.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def write_page(comparison: dict[str, Any], folder: Path) -> Path:
    """Write compare.html.

    Args:
        comparison: the content of a compare.json, or several of them merged.
        folder: where it goes; it exists.

    Returns:
        The file.
    """
    verdict = recommend(comparison)
    configs = comparison["configs"]
    body = [
        _header(comparison),
        tag(
            "main",
            _labels(comparison),
            _section("Summary", _summary(comparison, verdict)),
            _section("Throughput", charts.throughput(configs, verdict["config"], stated(comparison))),
            _section("Memory of each device", charts.memory(configs)),
            _section("Where the time of a step goes", charts.phases(configs)),
            _section("Loss", charts.losses(configs)),
            _section("All figures", _table(comparison, verdict["config"])),
            _section("What a rank holds and sends", _held(configs)),
            _section("Settings and versions", _settings(comparison)),
            _section("How it was measured", _method(comparison)),
        ),
    ]
    head = [
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">',
        tag("title", text(_title(comparison))),
        tag("style", _asset("page.css")),
    ]
    page = tag("html", tag("head", *head), tag("body", *body, tag("script", _asset("page.js"))), lang="en")
    path = Path(folder) / "compare.html"
    write_text(path, f"<!doctype html>\n{page}\n")
    return path


def _asset(name: str) -> str:
    return files("toolkit.report.comparison").joinpath(name).read_text(encoding="utf-8")


def _title(comparison: dict[str, Any]) -> str:
    return f"{len(comparison['configs'])} configs compared: {Path(str(comparison['settings'].get('script'))).name}"


def _header(comparison: dict[str, Any]) -> str:
    runs = comparison.get("runs") or [comparison | {"label": words.machine(comparison["machine"])}]
    where = "; ".join(f"{run['label']}, {run['created'].replace('T', ' ')}" for run in runs)
    toggle = tag("button", "Dark theme", type="button", id="theme", aria_pressed="false", hidden=True)
    return tag("header", tag("h1", text(_title(comparison))), toggle, tag("p", text(where)))


def _labels(comparison: dict[str, Any]) -> str:
    """What must be known before anything is read."""
    found = []
    if comparison["rehearsal"]:
        rehearsed = [run["label"] for run in comparison.get("runs", ()) if run["rehearsal"]]
        on = f" ({'; '.join(rehearsed)})" if rehearsed else ""
        found.append(tag("p", tag("strong", text(words.REHEARSAL)), text(f"{on}."), class_="notice rehearsal"))
    if comparison.get("differences"):
        lines = [tag("li", text(line)) for line in comparison["differences"]]
        found.append(tag("div", tag("strong", "The runs differ in:"), tag("ul", *lines), class_="notice differences"))
    return "".join(found)


def _section(heading: str, content: str) -> str:
    anchor = heading.lower().replace(" ", "-")
    return tag("section", tag("h2", text(heading), id=anchor), content, aria_labelledby=anchor)


def _summary(comparison: dict[str, Any], verdict: dict[str, Any]) -> str:
    configs, reference = comparison["configs"], comparison["reference"]
    ran = [config for config in configs if not config.get("failure")]
    same = [config for config in ran if words.same_training(config, reference)]
    alone = "runs" not in comparison  # what different machines do cannot be ranked
    here = "in this rehearsal" if comparison["rehearsal"] else "here"
    cards = [("recommended", verdict["config"] or "none", "" if verdict["config"] else "see below")]
    cards.append(("same training", f"{len(same)} of {len(ran)}", "configs that ran"))
    fast = max((config for config in ran if words.speed(config)), key=words.speed, default=None)
    if fast and alone:
        cards.append((f"fastest {here}", fast["name"], f"{words.number(words.speed(fast))} samples/s"))
    small = min((config for config in ran if words.fullest(config)), key=words.fullest, default=None)
    if small and alone:
        cards.append((f"least memory {here}", small["name"], f"{words.size(words.fullest(small))} on a device"))
    shown = [
        tag("li", tag("span", text(title)), tag("b", text(one)), tag("span", text(more))) for title, one, more in cards
    ]
    out = [words.told(config, reference) for config in configs if config not in same]
    return (
        tag("ul", *shown, class_="cards")
        + "".join(tag("p", text(line), class_="why") for line in verdict["why"].splitlines())
        + "".join(tag("p", text(line), class_="failed") for line in out)
    )


def _table(comparison: dict[str, Any], recommended: str | None) -> str:
    chosen = columns(comparison["configs"])
    rows = []
    for config in comparison["configs"]:
        head = tag("b", name(config["name"])) + tag("small", text(words.about(config)))
        if config["name"] == recommended:
            head += tag("small", "recommended", class_="mark")
        told = words.outcome(config, comparison["reference"])
        good = words.same_training(config, comparison["reference"])
        training = Cell(tag("span", text(told), class_="told" if good else "told failed"))
        rows.append([Cell(head), training, *(_figure(column, config) for column in chosen)])
    headings = ["config", "training", *(column.heading for column in chosen)]
    return table("Median (least to most of the repetitions)", headings, rows, sortable=True)


def _figure(column: Column, config: Config) -> Cell:
    """The median with its range below."""
    median, _, least_to_most = column.shown(config).partition(" (")
    below = tag("small", text(least_to_most.removesuffix(")"))) if least_to_most else ""
    return Cell(text(median) + below, column.value(config))


def _held(configs: Sequence[Config]) -> str:
    rows = []
    for config in configs:
        sent = config.get("bytes_sent") or []
        ranks = [
            (rank, state, sent[rank] if rank < len(sent) else None)
            for rank, state in enumerate(config.get("held") or ())
        ]
        for (state, bytes_sent), group in _grouped(ranks):
            numbers = [words.held(state), *(state.get(kind) for kind in words.HELD), bytes_sent]
            rows.append(
                [
                    Cell(name(words.label(config))),
                    Cell(f"{group[0]} to {group[-1]}" if len(group) > 1 else str(group[0]), group[0]),
                    *(Cell(words.size(value), value) for value in numbers),
                ]
            )
    if not rows:
        return tag("p", "Not measured.")
    headings = ("config", "ranks", "state, all", *words.HELD, "sent in a step")
    return table("Training state of a rank in memory, and what it sends in one step", headings, rows)


def _grouped(ranks: Sequence[tuple[int, dict, Any]]) -> list[tuple[tuple[dict, Any], list[int]]]:
    """Neighbouring ranks with the same figures as one."""
    return [(key, [rank for rank, *_ in group]) for key, group in groupby(ranks, key=lambda entry: entry[1:])]


def _settings(comparison: dict[str, Any]) -> str:
    found = []
    for run in comparison.get("runs") or [comparison]:
        machine = run["machine"] | {"gpus": words.gpus(run["machine"]) or "none"}
        if machine.get("memory"):
            machine["memory"] = words.size(machine["memory"])
        facts = {**run["settings"], "reference": run["reference"], **machine}
        facts |= run["versions"]
        rows = [
            [Cell(text(key.replace("_", " "))), Cell(tag("code", text(_said(value))))] for key, value in facts.items()
        ]
        caption = "Settings, machine and versions" + (f": {run['label']}" if "label" in run else "")
        found.append(table(caption, ("what", "value"), rows))
    return "".join(found)


def _said(value: Any) -> str:
    if isinstance(value, list):
        return shlex.join(map(str, value)) or "none"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _method(comparison: dict[str, Any]) -> str:
    settings = comparison["settings"]
    told = (
        f"Every config trained on the same global batches of {settings.get('global_batch_size')} samples in a launch "
        f"of its own: {settings.get('warmup_steps')} steps that do not count, then {settings.get('steps')} that do, "
        f"{settings.get('repetitions')} times, the configs in turn, so that a drift of the machine hits all alike.",
        "Figures are medians, with the least and the most of the repetitions behind them; two configs whose ranges "
        "overlap cannot be told apart by this comparison.",
        "Scaling efficiency is the throughput over that of the reference times the number of devices. Parts of a step "
        "come from a short profiled launch: communication is what is not hidden behind computation, and what no part "
        "accounts for is shown as unattributed.",
        f"Losses and gradient norms are compared step by step with {comparison['reference']}; the largest relative "
        "difference counts.",
    )
    return "".join(tag("p", text(line)) for line in told)
