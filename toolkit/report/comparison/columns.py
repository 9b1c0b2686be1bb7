"""The columns of the table, for page and terminal."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from toolkit.report.comparison import words
from toolkit.report.comparison.words import get

Config = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """One figure of a config: by which it is sorted, how it is shown, and its heading on a terminal, if it is there."""

    heading: str
    value: Callable[[Config], float | None]
    shown: Callable[[Config], str]
    short: str | None = None


def _at(*keys: str) -> Callable[[Config], Any]:
    return lambda config: get(config, *keys)


def _plain(heading: str, value: Callable[[Config], Any], say: Callable[[Any], str], short: str | None = None) -> Column:
    return Column(heading, value, lambda config: say(value(config)), short)


def _spread(heading: str, *keys: str, say: Callable[[Any], str] = words.number, short: str | None = None) -> Column:
    return Column(heading, _at(*keys, "median"), lambda config: words.spread(get(config, *keys), say), short)


COLUMNS = (
    _plain("devices", _at("devices"), words.count, "devices"),
    _spread("samples/s", "throughput", "samples_per_second", short="samples/s"),
    _spread("tokens/s", "throughput", "tokens_per_second"),
    _spread("time of a step", "step_seconds", say=words.seconds),
    _plain("scaling efficiency", _at("efficiency"), words.share, "efficiency"),
    _plain("peak memory, fullest device", words.fullest, words.size, "memory"),
    _plain("max/mean over devices", _at("memory_imbalance"), words.number, "max/mean"),
    _plain("state held by a rank", words.most_held, words.size),
    _plain("sent in a step", words.most_sent, words.size, "sent"),
    _spread("start-up", "startup_seconds", say=words.seconds),
    _plain("energy of a step, J", _at("energy_joules_per_step"), words.number),
    _plain("loss differs by", _at("parity", "loss"), words.relative, "loss"),
    _plain("grad norm differs by", _at("parity", "grad_norm"), words.relative),
)


def columns(configs: Sequence[Config]) -> list[Column]:
    """Those in which some config has a figure."""
    return [column for column in COLUMNS if any(column.value(config) is not None for config in configs)]
