"""The charts of the page: SVG bars and lines that take their colours from the page's theme.

Text stands beside the drawings rather than in them, so it keeps its size on a narrow screen.
"""

import math
from collections.abc import Sequence
from typing import Any

from toolkit.report.comparison import words
from toolkit.report.comparison.markup import Cell, name, table, tag, text
from toolkit.report.comparison.words import get

Config = dict[str, Any]
COLOURS = 10  # of the curves, in page.css
DASH = 9  # pixels of a curve that one config draws before the next one does
UNEVEN = 1.1  # max/mean over devices that is worth a word


def throughput(configs: Sequence[Config], recommended: str | None, stated: str | None) -> str:
    """A bar each for the median of samples/s, with range and repetitions on it; `stated`: what may be chance."""
    figures = [get(config, "throughput", "samples_per_second") for config in configs]
    scale = _scale([figure["most"] for figure in figures if figure])
    rows = []
    for config, figure in zip(configs, figures):
        if not figure:
            rows.append(_without(config))
            continue
        said, best = words.spread(figure), config["name"] == recommended
        drawing = _svg(
            f"{words.label(config)}: {said} samples/s",
            _bar(0, figure["median"], scale, "bar best" if best else "bar"),
            _line(figure["least"], figure["most"], scale),
            *(tag("circle", cx=_percent(one, scale), cy="50%", r=3, class_="dot") for one in figure.get("all") or ()),
        )
        rows.append(_row(config, drawing, said, figure["median"], "recommended" if best else ""))
    return _figure(f"Samples per second. The line spans the repetitions, a dot is one of them. {stated or ''}", rows)


def memory(configs: Sequence[Config]) -> str:
    """A bar for every device of every config."""
    scale = _scale([words.peak(one) for config in configs for one in config.get("memory") or ()])
    rows = []
    for config in configs:
        devices = [one for one in config.get("memory") or () if words.peak(one) is not None]
        if not devices:
            rows.append(_without(config))
            continue
        bars = [tag("li", *_device(config, one, scale)) for one in devices]
        rows.append(
            tag("li", _name(config), tag("ul", *bars, class_="devices"), tag("p", _balance(config), class_="value"))
        )
    return _figure(
        "Peak memory of each device. On a GPU: what tensors took (full) of what was reserved (outline); on a CPU: "
        "what the process took (resident).",
        rows,
    )


def phases(configs: Sequence[Config]) -> str:
    """Where the time of a step goes: stacked bars of one scale."""
    known = [config for config in configs if config.get("phases")]
    if not known and not any(map(words.unprofiled, configs)):
        return tag("p", "No step was profiled.")
    scale = _scale([config["phases"]["total"] for config in known])
    rows = []
    for config in configs:
        measured = config.get("phases")
        if not measured:
            rows.append(_without(config, words.unprofiled(config)))
            continue
        start, parts = 0.0, []
        for phase in words.PHASES:
            length = max(0.0, measured.get(phase) or 0.0)
            parts.append(_bar(start, length, scale, f"phase {phase}", f"{phase}: {words.seconds(length)}"))
            start += length
        said = ", ".join(f"{phase} {words.seconds(measured.get(phase))}" for phase in words.PHASES)
        drawing = _svg(f"{words.label(config)}: {said}", *parts)
        rows.append(_row(config, drawing, words.seconds(measured["total"]), measured["total"]))
    legend = [tag("li", _swatch(f"phase {phase}"), text(phase)) for phase in words.PHASES]
    figure = _figure("Seconds of a step by what they went to.", rows, tag("ul", *legend, class_="legend"))
    return figure + (_phase_table(known) if known else "")


def losses(configs: Sequence[Config]) -> str:
    """All loss curves in one picture. Where they coincide, each draws every so many pixels."""
    known = [config for config in configs if any(_finite(loss) for loss in config.get("losses") or ())]
    if not known:
        return tag("p", "No losses were recorded.")
    finite = [loss for config in known for loss in config["losses"] if _finite(loss)]
    low, high = min(finite), max(finite)
    room = 0.05 * (high - low) or 0.5
    low, high = low - room, high + room
    steps = max(len(config["losses"]) for config in known)
    curves = []
    for at, config in enumerate(known):
        points = [_points(stretch, steps, low, high) for stretch in _stretches(config["losses"])]
        dashes = {"stroke_dasharray": f"{DASH} {DASH * (len(known) - 1)}", "stroke_dashoffset": -DASH * at}
        for kind, more in (("faint", {}), ("", dashes if len(known) > 1 else {})):
            curves += [tag("polyline", points=one, class_=f"curve {kind} c{at % COLOURS}", **more) for one in points]
    drawing = tag(
        "svg",
        *curves,
        viewBox="0 0 1000 1000",
        preserveAspectRatio="none",
        role="img",
        aria_label=f"Loss of {len(known)} configs over {steps} steps, between {low:.4g} and {high:.4g}; "
        "the figures stand in the table below.",
    )
    axis = [tag("span", f"{value:.3f}") for value in (high, (low + high) / 2, low)]
    legend = [tag("li", _swatch(f"c{at % COLOURS}"), name(words.label(config))) for at, config in enumerate(known)]
    plot = tag("div", tag("div", *axis, class_="y", aria_hidden="true"), drawing, class_="plot")
    ends = tag("div", tag("span", "step 1"), tag("span", f"step {steps}"), class_="x", aria_hidden="true")
    caption = (
        "Loss of every step. Curves that coincide show as one line of many colours; a curve that leaves the others "
        "did not train the same."
    )
    figure = tag("figure", tag("figcaption", text(caption)), plot, ends, tag("ul", *legend, class_="legend"))
    return figure + tag("details", tag("summary", "All losses, step by step"), _loss_table(known, steps))


def _phase_table(configs: Sequence[Config]) -> str:
    rows = []
    for config in configs:
        measured = config["phases"]
        shown = [Cell(words.seconds(measured.get(phase)), measured.get(phase)) for phase in (*words.PHASES, "total")]
        left = (measured.get("unattributed") or 0.0) / measured["total"] if measured["total"] else None
        rows.append([Cell(name(words.label(config))), *shown, Cell(words.share(left), left)])
    headings = ("config", *words.PHASES, "total", "share unattributed")
    return table("Time of a step in its parts, mean over ranks, from a profiled launch of its own", headings, rows)


def _loss_table(configs: Sequence[Config], steps: int) -> str:
    rows = []
    for step in range(steps):
        found = [config["losses"][step] if step < len(config["losses"]) else None for config in configs]
        rows.append([Cell(str(step + 1)), *(Cell(f"{x:.7g}" if _finite(x) else words.NONE, x) for x in found)])
    return table("Loss of each step", ("step", *map(words.label, configs)), rows)


def _device(config: Config, one: dict[str, Any], scale: float) -> tuple[str, str, str]:
    """Name, drawing and figures of one device."""
    taken, given = one.get("peak_allocated"), words.peak(one)
    on_gpu = taken is not None
    said = f"{words.size(taken)} of {words.size(given)}" if on_gpu else words.size(given)
    drawing = _svg(
        f"{words.label(config)}, {words.device(one)}: {said}",
        _bar(0, given, scale, "bar reserved") if on_gpu else "",
        _bar(0, taken if on_gpu else given, scale, "bar"),
    )
    return (
        tag("span", text(words.device(one)), class_="device"),
        drawing,
        tag("span", text(said), class_="value", data_value=given),
    )


def _balance(config: Config) -> str:
    imbalance = config.get("memory_imbalance")
    if imbalance is None or len(config["memory"]) < 2:
        return ""
    said = f"max/mean {words.number(imbalance)}"
    if imbalance >= UNEVEN:
        most = max((one for one in config["memory"] if words.peak(one) is not None), key=words.peak)
        said = f"uneven: {words.device(most)} holds {words.number(imbalance)} x the mean, and runs out first"
    return text(said)


def _name(config: Config, mark: str = "") -> str:
    more = [tag("small", text(words.about(config))), tag("small", text(mark), class_="mark") if mark else ""]
    return tag("span", tag("b", name(config["name"])), " ", *more, class_="name")


def _row(config: Config, drawing: str, said: str, value: float, mark: str = "") -> str:
    return tag("li", _name(config, mark), drawing, tag("span", text(said), class_="value", data_value=value))


def _without(config: Config, why: str | None = None) -> str:
    """The row of a config that has nothing to draw."""
    failure = config.get("failure")
    said = f"failed: {failure}" if failure else why or "not measured"
    return tag("li", _name(config), tag("span", text(said), class_="failed"))


def _figure(caption: str, rows: Sequence[str], legend: str = "") -> str:
    return tag("figure", tag("figcaption", text(caption)), legend, tag("ul", *rows, class_="bars"))


def _svg(label: str, *content: str) -> str:
    return tag("svg", tag("title", text(label)), *content, role="img", aria_label=label, class_="row")


def _bar(start: float, length: float, scale: float, kind: str, title: str = "") -> str:
    inside = tag("title", text(title)) if title else ""
    return tag(
        "rect",
        inside,
        x=_percent(start, scale),
        width=_percent(length, scale),
        height="100%",
        class_=kind,
        data_value=length,
    )


def _line(least: float, most: float, scale: float) -> str:
    return tag("line", x1=_percent(least, scale), x2=_percent(most, scale), y1="50%", y2="50%", class_="range")


def _swatch(kind: str) -> str:
    square = tag("rect", width="100%", height="100%", class_=kind)
    return tag("svg", square, class_="swatch", aria_hidden="true")


def _scale(values: Sequence[float | None]) -> float:
    """What the full width stands for; a little more than the most, so that nothing is cut off at the edge."""
    return 1.02 * max((value for value in values if value is not None), default=1.0) or 1.0


def _percent(value: float, scale: float) -> str:
    return f"{100 * value / scale:.3f}%"


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _stretches(values: Sequence[Any]) -> list[list[tuple[int, float]]]:
    """The (index, value) of values, broken where one is missing."""
    stretches: list[list[tuple[int, float]]] = [[]]
    for index, value in enumerate(values):
        if _finite(value):
            stretches[-1].append((index, value))
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]


def _points(stretch: Sequence[tuple[int, float]], steps: int, low: float, high: float) -> str:
    width = max(1, steps - 1)
    return " ".join(f"{1000 * at / width:.2f},{1000 * (high - value) / (high - low):.2f}" for at, value in stretch)
