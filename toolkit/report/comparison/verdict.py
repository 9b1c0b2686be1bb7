"""Which config to choose, after a comparison."""

from collections.abc import Sequence
from typing import Any

from toolkit.launch.strategies import simplicity
from toolkit.report.comparison import words

MUCH_LESS = 0.8  # of the memory: worth a line to those who run short of it


def recommend(comparison: dict[str, Any]) -> dict[str, str | None]:
    """The config to choose, and why.

    The fastest one among those that fit and whose training was the same; a simpler one where the difference is
    within the spread; none after a rehearsal, which knows nothing about speed.

    Args:
        comparison: the content of a compare.json, or several of them merged.

    Returns:
        `config`: its name or None; `why`: some sentences, a line for each run.
    """
    if "runs" in comparison:
        return _of_each_run(comparison)
    reference = comparison["reference"]
    same = [c for c in comparison["configs"] if words.same_training(c, reference) and words.speed(c) is not None]
    if not same:
        return {"config": None, "why": "No config can be recommended: none ran and trained what the reference did."}
    if comparison["rehearsal"]:
        return {"config": None, "why": _rehearsed(same, reference)}
    fastest = max(same, key=words.speed)
    as_fast = [config for config in same if _as_fast(config, fastest, comparison.get("resolution"))]
    chosen = min(as_fast, key=lambda config: (simplicity(config.get("title") or ""), -words.speed(config)))
    return {"config": chosen["name"], "why": _measured(chosen, fastest, same, reference)}


def stated(comparison: dict[str, Any]) -> str | None:
    """In words: below which difference two configs cannot be told apart; None where that is not known."""
    resolution = comparison.get("resolution")
    return resolution and f"Medians that differ by less than {resolution:.1%} may do so by chance."


def _as_fast(config: dict[str, Any], fastest: dict[str, Any], resolution: float | None) -> bool:
    """Whether the difference may be chance: the ranges overlap, or it is below the stated one."""
    most = words.get(config, "throughput", "samples_per_second", "most")
    least = words.get(fastest, "throughput", "samples_per_second", "least")
    return most >= least or words.speed(config) >= (1 - (resolution or 0.0)) * words.speed(fastest)


def _rehearsed(same: Sequence[dict[str, Any]], reference: str) -> str:
    others = [config for config in same if config["name"] != reference]
    differences = [config["parity"]["loss"] for config in others]
    why = "No config is recommended: this was a rehearsal on a CPU, and speed must be measured on the real devices."
    if differences:
        who = f"{others[0]['name']} trains" if len(others) == 1 else f"{len(others)} of the configs train"
        why += (
            f" What can be said: {who} what {reference} trains (the loss differs by at "
            f"most {words.relative(max(differences))}), so speed and memory alone decide."
        )
    states = [config for config in same if words.most_held(config)]
    if len({words.size(words.most_held(config)) for config in states}) > 1:
        least, most = min(states, key=words.most_held), max(states, key=words.most_held)
        why += (
            " The training state that a rank holds is the same on as many GPUs: "
            f"from {words.size(words.most_held(least))} ({least['name']}) to {words.size(words.most_held(most))} "
            f"({most['name']}), activations not counted."
        )
    return why


def _measured(chosen: dict[str, Any], fastest: dict[str, Any], same: Sequence[dict[str, Any]], reference: str) -> str:
    def figures(config: dict[str, Any]) -> str:
        return f"{words.spread(config['throughput']['samples_per_second'])} samples/s"

    devices = f"{chosen['devices']} device{'s' * (chosen['devices'] != 1)}"
    name = f"{chosen['name']} ({chosen['title']})"
    if chosen is fastest:
        why = f"{name} is the fastest of the {len(same)} configs that train the same: {figures(chosen)} on {devices}"
    else:
        why = (
            f"{name} makes {figures(chosen)} on {devices}, and the fastest, {fastest['name']}, {figures(fastest)}: "
            "the difference is within the spread, so the simpler one is as good"
        )
    first = next((config for config in same if config["name"] == reference), None)
    if first is not None and chosen is not first:
        why += f", {words.number(words.speed(chosen) / words.speed(first))} times {reference}"
    why += "."
    sized = [config for config in same if words.fullest(config)]
    if words.fullest(chosen):
        why += f" Its fullest device needs {words.size(words.fullest(chosen))}."
        thrifty = min(sized, key=words.fullest)
        if words.fullest(thrifty) < MUCH_LESS * words.fullest(chosen):
            why += (
                f" If memory runs short: {thrifty['name']} needs {words.size(words.fullest(thrifty))}, "
                f"at {figures(thrifty)}."
            )
    return why


def _of_each_run(comparison: dict[str, Any]) -> dict[str, str | None]:
    """Of runs side by side each has its own; one name only where all agree."""
    found = []
    for run in comparison["runs"]:
        own = [config for config in comparison["configs"] if config["machine"] == run["label"]]
        alone = {key: run.get(key) for key in ("reference", "rehearsal", "resolution")} | {"configs": own}
        found.append((run["label"], recommend(alone)))
    names = {verdict["config"] for _, verdict in found}
    return {
        "config": names.pop() if len(names) == 1 else None,
        "why": "\n".join(f"{label}: {verdict['why']}" for label, verdict in found),
    }
