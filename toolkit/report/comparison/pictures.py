"""The charts as pictures of their own, for a document or a talk."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from toolkit.report.comparison import words
from toolkit.report.comparison.words import get
from toolkit.report.plots import write_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Config = dict[str, Any]
PHASE_COLOURS = ("#b8860b", "#1f63b5", "#7a35c2", "#c0440e", "#127a43", "#8a97a8")  # as words.PHASES
BAR, PALE = "#1f63b5", "#a9c5e8"
WIDTH, ROW, REST = 8.0, 0.42, 1.7  # inches: of a picture, of one bar, of what surrounds the bars
DASH = 4  # widths of a curve that one config draws before the next one does
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes"))


def write_pictures(comparison: dict[str, Any], folder: Path) -> list[Path]:
    """Write throughput, memory, phases and losses as .png and .svg.

    Args:
        comparison: the content of a compare.json, or several of them merged.
        folder: where they go; it exists.

    Returns:
        The files. A picture for which nothing was measured is left out.
    """
    ran = [config for config in comparison["configs"] if not config.get("failure")]
    timed = [config for config in ran if words.speed(config) is not None]
    sized = [config for config in ran if words.fullest(config) is not None]
    profiled = [config for config in ran if config.get("phases")]
    curves = [config for config in ran if config.get("losses")]
    written = []
    for name, draw, configs, bars in (
        ("throughput", _throughput, timed, len(timed)),
        ("memory", _memory, sized, sum(len(config["memory"]) for config in sized)),
        ("phases", _phases, profiled, len(profiled)),
        ("losses", _losses, curves, 8),
    ):
        if configs:
            written += _picture(Path(folder) / f"compare_{name}", draw, configs, bars, comparison["rehearsal"])
    return written


def _picture(
    path: Path, draw: Callable[["Axes", Sequence[Config]], None], configs: Sequence[Config], bars: int, rehearsal: bool
) -> list[Path]:
    # The object interface with the Agg canvas: pyplot would choose a backend, and keep state.
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    written = []
    with rc_context({"svg.fonttype": "none", "text.parse_math": False}):  # a name may hold a dollar sign
        figure = Figure(figsize=(WIDTH, REST + ROW * bars), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="x", alpha=0.25)
        axes.set_axisbelow(True)
        draw(axes, configs)
        if rehearsal:
            figure.suptitle(words.REHEARSAL, fontsize=9, fontweight="bold", color="#8a5a00")
        for ending in ("png", "svg"):
            written.append(path.with_suffix(f".{ending}"))
            write_figure(written[-1], figure)
    return written


def _throughput(axes: "Axes", configs: Sequence[Config]) -> None:
    figures = [get(config, "throughput", "samples_per_second") for config in configs]
    medians = [figure["median"] for figure in figures]
    below = [figure["median"] - figure["least"] for figure in figures]
    above = [figure["most"] - figure["median"] for figure in figures]
    bars = axes.barh(range(len(configs)), medians, xerr=(below, above), color=BAR, ecolor="black", capsize=3)
    axes.bar_label(bars, [f"  {words.number(value)}" for value in medians])
    axes.margins(x=0.12)
    _name_rows(axes, [_name(config) for config in configs])
    axes.set_xlabel("samples per second: median, least to most")


def _memory(axes: "Axes", configs: Sequence[Config]) -> None:
    devices = [(config, one) for config in configs for one in config["memory"]]
    scale, unit = next(entry for entry in UNITS if max(words.peak(one) for _, one in devices) >= entry[0])
    rows = range(len(devices))
    axes.barh(rows, [words.peak(one) / scale for _, one in devices], color=PALE, label="reserved")
    taken = [(row, one["peak_allocated"]) for row, (_, one) in zip(rows, devices) if one.get("peak_allocated")]
    if taken:
        axes.barh([row for row, _ in taken], [size / scale for _, size in taken], color=BAR, label="allocated")
        axes.legend(frameon=False)
    _name_rows(axes, [f"{_name(config)}  {words.device(one)}" for config, one in devices])
    axes.set_xlabel(f"peak memory of each device, {unit}" + ("" if taken else " (resident)"))


def _phases(axes: "Axes", configs: Sequence[Config]) -> None:
    starts = [0.0] * len(configs)
    for phase, colour in zip(words.PHASES, PHASE_COLOURS):
        lengths = [config["phases"].get(phase) or 0.0 for config in configs]
        axes.barh(range(len(configs)), lengths, left=starts, color=colour, label=phase)
        starts = [start + length for start, length in zip(starts, lengths)]
    axes.figure.legend(frameon=False, ncols=len(words.PHASES), fontsize=8, loc="outside lower center")
    _name_rows(axes, [_name(config) for config in configs])
    axes.set_xlabel("seconds of a step")


def _losses(axes: "Axes", configs: Sequence[Config]) -> None:
    from matplotlib.ticker import MaxNLocator

    # Where curves coincide, each draws every so many points of the line.
    for number, config in enumerate(configs):
        dashes = (-DASH * number, (DASH, DASH * (len(configs) - 1))) if len(configs) > 1 else "-"
        steps = range(1, 1 + len(config["losses"]))
        values = [float("nan") if loss is None else float(loss) for loss in config["losses"]]
        axes.plot(steps, values, linewidth=2, linestyle=dashes)
        axes.plot([], [], linewidth=2, color=axes.lines[-1].get_color(), label=_name(config))
    axes.legend(frameon=False, fontsize=8)
    axes.set_ylabel("loss")
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _name(config: Config) -> str:
    return words.printable(words.label(config))


def _name_rows(axes: "Axes", names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()  # as in the table: the first config on top
