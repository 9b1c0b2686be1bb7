"""How the figures of a comparison are read and said: one place for page, pictures, terminal and csv."""

import math
from collections import Counter
from typing import Any

from toolkit import phases

REHEARSAL = "Rehearsal on CPU: parity and mechanics are real, speed and memory are of the rehearsal"
PHASES = (*phases.PHASES, "unattributed")
HELD = ("parameters", "gradients", "optimizer")
NONE = "–"


def get(record: Any, *keys: str) -> Any:
    """What stands under the keys, one inside the other; None where one is missing or null.

    Texts that stand for numbers JSON does not have ("Infinity") become numbers.
    """
    for key in keys:
        record = record.get(key) if isinstance(record, dict) else None
    return float(record) if record in ("Infinity", "-Infinity") else record


def printable(value: Any) -> str:
    """Any text; characters that do not print, or turn the direction of writing, show as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in str(value))


def label(config: dict[str, Any]) -> str:
    """The config's name, with its machine where several runs stand side by side."""
    return f"{config['name']} · {config['machine']}" if "machine" in config else config["name"]


def about(config: dict[str, Any]) -> str:
    """Strategy, precision and machine, as far as they are known and said."""
    precision = {"no": "fp32", None: None}.get(config.get("precision"), config.get("precision"))
    return ", ".join(part for part in (config.get("title"), precision, config.get("machine")) if part)


def unprofiled(config: dict[str, Any]) -> str | None:
    """Why a config that ran has no phases, where its profiled launch failed."""
    failure = config.get("phases_failure")
    return failure and f"its phases could not be measured: {failure}"


def same_training(config: dict[str, Any], reference: str) -> bool:
    """Whether the config trained, and trained what the reference did."""
    if config.get("failure"):
        return False
    return get(config, "parity", "verdict") == "equal" or (config["name"] == reference and not config.get("parity"))


def outcome(config: dict[str, Any], reference: str) -> str:
    """In words: whether it ran and trained the same."""
    if config.get("failure"):
        return f"failed: {config['failure']}"
    if config["name"] == reference:
        return "the reference"
    return get(config, "parity", "verdict") or "not compared"


def told(config: dict[str, Any], reference: str) -> str:
    """The same as a line of its own."""
    between = " " if config.get("failure") else ": "
    return f"{label(config)}{between}{outcome(config, reference)}"


def speed(config: dict[str, Any]) -> float | None:
    """Median samples per second."""
    return get(config, "throughput", "samples_per_second", "median")


def peak(memory: dict[str, Any]) -> int | None:
    """Bytes that one device had to give: on a GPU what was reserved, on a CPU what the process took."""
    known = (memory.get(key) for key in ("peak_reserved", "peak_allocated", "peak_resident"))
    return next((value for value in known if value is not None), None)


def fullest(config: dict[str, Any]) -> int | None:
    """Bytes of the device with most."""
    return max((value for memory in config.get("memory") or () if (value := peak(memory)) is not None), default=None)


def device(memory: dict[str, Any]) -> str:
    """A short name of the device; processes that share a CPU go by their rank."""
    return f"rank {memory['rank']}" if memory["device"] == "cpu" else str(memory["device"])


def held(state: dict[str, Any]) -> int:
    """Bytes of one rank's parameters, gradients and optimizer state."""
    return sum(state.get(kind) or 0 for kind in HELD)


def most_held(config: dict[str, Any]) -> int | None:
    """The same, of the rank with most."""
    return max(map(held, config.get("held") or ()), default=None)


def most_sent(config: dict[str, Any]) -> int | None:
    """Bytes sent in one step, of the rank that sends most."""
    return max((value for value in config.get("bytes_sent") or () if value is not None), default=None)


def gpus(described: dict[str, Any]) -> str:
    """`2 x NVIDIA H200`; empty where there is none."""
    return ", ".join(f"{count} x {kind}" for kind, count in Counter(described.get("gpus") or ()).items())


def machine(described: dict[str, Any]) -> str:
    """The machine in a few words."""
    cores = f"{described['cores']} cores" if described.get("cores") else None
    return ", ".join(part for part in (gpus(described), described.get("cpu"), cores) if part) or "a machine"


def number(value: float | None) -> str:
    """Three significant digits."""
    if value is None or math.isnan(value):
        return NONE
    if value == 0 or math.isinf(value):
        return f"{value:.0f}"
    return f"{value:,.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"


def count(value: int | None) -> str:
    """A whole number."""
    return NONE if value is None else f"{value:,}"


def size(value: float | None) -> str:
    """Bytes, in units of a thousand."""
    if value is None:
        return NONE
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{number(value / scale)} {unit}"
    return f"{value:.0f} B"


def seconds(value: float | None) -> str:
    """Seconds, or milliseconds below one."""
    if value is None:
        return NONE
    return f"{number(value)} s" if value >= 1 else f"{number(1000 * value)} ms"


def share(value: float | None) -> str:
    """Per cent."""
    return NONE if value is None else f"{value:.0%}"


def relative(value: float | None) -> str:
    """A relative difference."""
    return NONE if value is None else f"{value:.1e}"


def spread(figure: dict[str, Any] | None, say: Any = number) -> str:
    """`41.2 (40.1 to 42.0)`: the median, with the least and the most of the repetitions."""
    if not figure or figure.get("median") is None:
        return NONE
    least, most = figure.get("least"), figure.get("most")
    return say(figure["median"]) + (f" ({say(least)} to {say(most)})" if least != most else "")
