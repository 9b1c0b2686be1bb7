"""What the launches of one config tell: speed, memory, the parts of a step, and whether the training is the same."""

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from toolkit.launch.cases import Case, last_error
from toolkit.launch.parity import Outcome, compare
from toolkit.report.console import say
from toolkit.report.results import read_metrics


@dataclass
class Trial:
    """One launch that came to its end.

    Args:
        rows: of metrics.jsonl, one a step.
        ranks: of diagnostics.json, one a process.
        startup: seconds from the launch to the first step of the slowest rank.
        warmup: steps that do not count.
    """

    rows: list[dict[str, Any]]
    ranks: list[dict[str, Any]]
    replicas: dict[str, Any]
    settings: dict[str, Any]
    startup: float
    warmup: int

    @property
    def counted(self) -> list[dict[str, Any]]:
        return self.rows[self.warmup :]

    @property
    def seconds(self) -> float:
        return sum(row["seconds"] for row in self.counted)

    def per_second(self, what: str) -> float:
        """`samples` or `tokens` in a second."""
        return (self.counted[-1][what] - self.rows[self.warmup - 1][what]) / self.seconds

    @property
    def samples_per_second(self) -> float:
        return self.per_second("samples")

    @property
    def joules(self) -> float | None:
        """Energy of a step on all devices; None where not every device tells."""
        used = [rank["energy"] for rank in self.ranks]
        if not all(len(of) == len(self.rows) for of in used):
            return None
        return sum(of[-1] - of[self.warmup - 1] for of in used) / len(self.counted)


@dataclass
class Contender:
    """One config, and what was measured of it until now. A launch that fails is the last one of its config.

    Args:
        folder: for the runs and what they print.
        limit: seconds that a launch may take.
        failure: why the config could not be measured.
        phases_failure: why only its phases could not.
    """

    case: Case
    script: Path
    folder: Path
    limit: float
    failure: str | None = None
    phases_failure: str | None = None
    timed: list[Trial] = field(default_factory=list)
    phases: list[dict[str, float]] = field(default_factory=list)  # seconds of a step, for each rank

    def time(self, flags: Sequence[str], warmup: int) -> None:
        """One repetition."""
        if self.failure:
            return
        what = f"repetition {len(self.timed) + 1}"
        trial = self._launch(flags, warmup, what)
        if isinstance(trial, str):
            self.failure = f"{what}: {trial}"
        else:
            self.timed.append(trial)
            say(f"  {self.case.name}: {trial.samples_per_second:.1f} samples/s")

    def profile(self, flags: Sequence[str]) -> None:
        """What the time goes to."""
        if self.failure:
            return
        trial = self._launch(flags, 0, "profile")
        if isinstance(trial, str):
            self.phases_failure = trial
        else:
            self.phases = [rank["phases"] for rank in trial.ranks if rank["phases"]]

    def _launch(self, flags: Sequence[str], warmup: int, what: str) -> Trial | str:
        """The launch, or why it failed."""
        out = self.folder / "".join(c if c.isalnum() or c in "-_." else "_" for c in self.case.name)
        log = out.with_name(f"{out.name} {what}.log")
        began = time.time()
        code = self.case.run(self.script, [*flags, "--output_dir", str(out), "--overwrite_output_dir"], log, self.limit)
        if code != 0:
            reason = f"no end after {self.limit:g} s" if code is None else last_error(log)
            say(f"  {self.case.name}: {what} failed: {reason}")
            return reason
        found, settings = (json.loads((out / name).read_text("utf-8")) for name in ("diagnostics.json", "run.json"))
        rows = [row for row in read_metrics(out / "metrics.jsonl") if "loss" in row]
        startup = max(rank["began"] for rank in found["ranks"]) - began
        return Trial(rows, found["ranks"], found["replicas"], settings, startup, warmup)

    @property
    def settings(self) -> dict[str, Any]:
        """run.json."""
        return self.timed[-1].settings

    @property
    def devices(self) -> int:
        return self.case.processes * self.settings["devices_per_process"]

    def summary(self, reference: "Contender", others: Sequence["Contender"]) -> dict[str, Any]:
        """The config's part of compare.json."""
        name, precision = self.case.name, self.case.config.precision
        known = {"name": name, "precision": precision, "processes": self.case.processes, "failure": self.failure}
        if not self.timed:
            return known
        last = self.timed[-1]
        parity = Outcome(name, precision, self.case.processes, compare(last.rows, reference.timed[-1].rows, precision))
        parity.diagnostics = {"replicas": last.replicas}
        memory = self._memory()
        taken = [device["peak_allocated"] or device["peak_resident"] for device in memory]
        alone = next((c for c in others if c.devices == 1 and c.case.config.precision == precision), None)
        speed = spread(trial.samples_per_second for trial in self.timed)
        joules = [trial.joules for trial in self.timed]
        return known | {
            "title": self.settings["strategy"],
            "devices": self.devices,
            "throughput": {
                "samples_per_second": speed,
                "tokens_per_second": spread(trial.per_second("tokens") for trial in self.timed),
            },
            "efficiency": alone
            and speed["median"] / self.devices / statistics.median(t.samples_per_second for t in alone.timed),
            "startup_seconds": spread(trial.startup for trial in self.timed),
            "step_seconds": spread(row["seconds"] for trial in self.timed for row in trial.counted),
            "phases": {name: statistics.mean(of[name] for of in self.phases) for name in self.phases[0]}
            if self.phases
            else None,
            "phases_failure": self.phases_failure,
            "phases_of_ranks": self.phases,
            "memory": memory,
            "memory_imbalance": max(taken) / statistics.mean(taken),
            "held": [rank["bytes_held"] for rank in last.ranks],
            "bytes_sent": [rank["bytes_sent"] for rank in last.ranks],
            "energy_joules_per_step": None if None in joules else statistics.median(joules),
            "parity": {"loss": parity.worst[0], "grad_norm": parity.worst[1], "verdict": parity.verdict},
            "losses": [row["loss"] for row in last.rows],
        }

    def _memory(self) -> list[dict[str, Any]]:
        """Of each device the most over the repetitions."""
        found = []
        for rank, of in enumerate(self.timed[-1].ranks):
            for index, device in enumerate(of["memory"]):
                same = [trial.ranks[rank]["memory"][index] for trial in self.timed]
                peaks = {key: max((m[key] for m in same if m[key] is not None), default=None) for key in device}
                found.append({"rank": rank, **peaks, "device": device["device"]})
        return found


def spread(values: Any) -> dict[str, Any]:
    """Median, least, most and all of them."""
    values = list(values)
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "all": values}
