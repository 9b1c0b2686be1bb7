"""`toolkit parity`: is the training the same under every config? Shown on the user's own task."""

import argparse
import json
import math
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from toolkit.arguments import parse
from toolkit.errors import UserError
from toolkit.launch.cases import REFERENCE, Case, all_cases, flags_class, last_error, same_step, split_words
from toolkit.launch.machine import Machine, detect
from toolkit.report.console import say
from toolkit.report.results import read_metrics, to_json, write_text

# Relative differences of loss and grad norm that rounding explains, at learning rates up to HIGHEST_RATE.
TOLERANCE = {"no": (1e-5, 5e-5), "bf16": (1e-2, 2e-2), "fp16": (1e-2, 2e-2)}
HIGHEST_RATE = 5e-5  # larger rates amplify rounding in any two runs
USAGE = """toolkit parity [CONFIG …] [--steps N] [--output_dir DIR] [-- tasks/classify.py …flags]

Trains the task for a few steps with dropout 0 in one process and under each CONFIG (default: every one that
this machine can run), and compares loss and grad norm step by step. A CONFIG in quotes may carry flags:
  toolkit parity zero2 "pipeline_parallel --num_processes 4 --pipeline_stages 4" -- tasks/classify.py --train_file …"""


@dataclass(frozen=True)
class Compared:
    """One step of two runs."""

    step: int
    loss: float
    grad_norm: float
    loss_difference: float  # relative
    norm_difference: float


@dataclass
class Outcome:
    """What became of one config."""

    name: str
    precision: str
    processes: int
    steps: list[Compared] = field(default_factory=list)
    failure: str | None = None
    diagnostics: dict[str, Any] = field(default_factory=dict)

    @property
    def worst(self) -> tuple[float, float]:
        """The largest relative differences of loss and grad norm."""
        return max(s.loss_difference for s in self.steps), max(s.norm_difference for s in self.steps)

    @property
    def verdict(self) -> str:
        if self.failure:
            return self.failure
        loss, norm = TOLERANCE[self.precision]
        different = self.diagnostics.get("replicas", {}).get("different", [])
        if different:
            return f"REPLICAS DIFFER: {', '.join(different[:3])}"
        first = next(
            (s.step for s in self.steps if not (s.loss_difference <= loss and s.norm_difference <= norm)), None
        )
        if first is None:
            return "equal"
        skipped = [str(s.step) for s in self.steps[: first - 1] if not math.isfinite(s.grad_norm)]
        why = f", having left out the update of step {', '.join(skipped)}, which overflowed" if skipped else ""
        return f"DIFFERENT from step {first} on{why}"


def compare(
    rows: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]], precision: str = "no"
) -> list[Compared]:
    """Step by step, the relative differences of two runs' metrics; NaN and null count as infinitely different.

    Args:
        precision: of `rows`. The norm of a step that fp16's loss scale left out is not compared: there is none.
    """

    def number(value: Any) -> float:
        return float("nan" if value is None else value)  # metrics.jsonl has null for NaN, and "Infinity"

    def difference(value: Any, expected: Any) -> float:
        relative = abs(number(value) - number(expected)) / max(abs(number(expected)), 1e-30)
        return relative if relative == relative else float("inf")

    def overflowed(row: dict[str, Any]) -> bool:
        return precision == "fp16" and not row.get("applied", True)

    return [
        Compared(
            row["step"],
            number(row["loss"]),
            number(row["grad_norm"]),
            difference(row["loss"], wanted["loss"]),
            0.0 if overflowed(row) else difference(row["grad_norm"], wanted["grad_norm"]),
        )
        for row, wanted in zip(rows, reference)
    ]


def main(argv: Sequence[str]) -> int:
    """Run `toolkit parity`; 1 where a config differs or fails, 0 otherwise."""
    own, script, task_flags = split_words(argv)
    parser = argparse.ArgumentParser(prog="toolkit parity", usage=USAGE, add_help=False, exit_on_error=False)
    parser.add_argument("configs", nargs="*")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--output_dir", type=Path)
    if "-h" in own or "--help" in own:
        print("usage:", USAGE)
        return 0
    try:
        options = parser.parse_args(own)
    except (argparse.ArgumentError, SystemExit) as error:
        raise UserError(f"toolkit parity: {error}. Flags of the task stand behind `--`.") from None
    if options.steps < 1:
        raise UserError(f"--steps {options.steps}: at least 1.")
    machine = detect()
    flags = short_run(task_flags, options.steps)
    cases = [Case.read(words, machine) for words in options.configs] or _possible(machine, flags)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.output_dir or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        outcomes = run_all(cases, script, flags, folder, machine, len(options.configs) > 0)
        write_text(
            folder / "parity.json", to_json([asdict(outcome) | {"verdict": outcome.verdict} for outcome in outcomes])
        )
        write_text(folder / "parity.md", markdown(outcomes[1:]))
    show(outcomes)
    return 0 if all(outcome.verdict == "equal" for outcome in outcomes) else 1


def short_run(task_flags: Sequence[str], steps: int) -> list[str]:
    """The user's flags, made into a short training whose steps can be compared."""
    args = parse(flags_class(), list(task_flags))
    flags = [*same_step(task_flags), "--max_steps", str(steps), "--dropout", "0", "--eval_strategy", "no"]
    flags += ["--max_eval_samples", "7", "--diagnostics"]
    if args.learning_rate > HIGHEST_RATE:
        say(f"--learning_rate {args.learning_rate:g} amplifies rounding: {HIGHEST_RATE:g} is compared instead")
        flags += ["--learning_rate", str(HIGHEST_RATE)]
    return flags


def run_all(
    cases: Sequence[Case], script: Path, flags: Sequence[str], folder: Path, machine: Machine, show_steps: bool
) -> list[Outcome]:
    """The reference and then each case, one after another.

    Raises:
        UserError: the reference itself fails.
    """
    reference, rows = _run(Case.read(REFERENCE, machine), script, flags, folder, machine)
    if reference.failure:
        raise UserError(f"the run in one process, which the others are compared with, failed: {reference.failure}")
    reference.steps = compare(rows, rows)
    outcomes = [reference]
    for case in cases:
        outcome, own = _run(case, script, flags, folder, machine)
        outcome.steps = compare(own, rows, outcome.precision)
        if not outcome.failure and len(own) != len(rows):
            outcome.failure = f"{len(own)} steps instead of {len(rows)}"
        outcomes.append(outcome)
        say(f"{case.name}: {outcome.verdict}")
        for step in outcome.steps if show_steps else ():
            say(
                f"  step {step.step:>3}  loss {step.loss:<10.6g} differs by {step.loss_difference:.1e}"
                f"   grad norm {step.grad_norm:<10.6g} by {step.norm_difference:.1e}"
            )
    return outcomes


def _run(
    case: Case, script: Path, flags: Sequence[str], folder: Path, machine: Machine
) -> tuple[Outcome, list[dict[str, Any]]]:
    outcome = Outcome(case.name, case.config.precision, case.processes)
    wrong = case.problems(machine, flags)
    if wrong:
        outcome.failure = f"cannot run here: {wrong[0]}"
        return outcome, []
    out = folder / case.name.replace(" ", "_").replace("/", "_")
    log = folder / f"{out.name}.log"
    say(f"{case.name}: {case.processes} process{'es' * (case.processes > 1)} …")
    code = case.run(script, [*flags, "--output_dir", str(out), "--overwrite_output_dir"], log)
    if code:
        outcome.failure = f"failed: {last_error(log)}"
    metrics, measured = out / "metrics.jsonl", out / "diagnostics.json"
    rows = [row for row in read_metrics(metrics) if "loss" in row] if metrics.is_file() else []
    if measured.is_file():
        outcome.diagnostics = json.loads(measured.read_text(encoding="utf-8"))
    return outcome, rows


def _possible(machine: Machine, flags: Sequence[str]) -> list[Case]:
    return [case for case in all_cases(machine) if not case.problems(machine, flags)]


HEADINGS = ("config", "ranks", "loss", "norm", "replicas", "MB sent", "MB held", "idle", "verdict")


def cells(outcome: Outcome) -> tuple[str, ...]:
    """A line of the table: largest relative differences, and what one step sends and holds on the busiest rank."""
    replicas, sent, held, idle = "", "", "", ""
    if outcome.diagnostics:
        ranks, found = outcome.diagnostics["ranks"], outcome.diagnostics["replicas"]
        replicas = f"{found['replicated']} identical" if found["replicated"] else "none"
        if found["different"]:
            replicas = f"{len(found['different'])} differ"
        sent = f"{max(rank['bytes_sent'] for rank in ranks) / 1e6:.1f}"
        most = {key: max(rank["bytes_held"].get(key, 0) for rank in ranks) / 1e6 for key in ranks[0]["bytes_held"]}
        held = " + ".join(f"{value:.1f}" for value in most.values())
        shares = [rank["idle_share"] for rank in ranks if rank["idle_share"] is not None]
        if shares:
            idle = ", ".join(f"{share:.0%}" for share in shares) + f" (formula {ranks[0]['expected_idle_share']:.0%})"
    loss, norm = (f"{value:.1e}" for value in outcome.worst) if outcome.steps else ("", "")
    return outcome.name, str(outcome.processes), loss, norm, replicas, sent, held, idle, outcome.verdict


def show(outcomes: Sequence[Outcome]) -> None:
    """The table on the terminal."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    steps = outcomes[0].steps
    norms = [step.grad_norm for step in steps]
    print(f"Largest relative difference from one process over {len(steps)} steps. There the loss goes from")
    print(f"{steps[0].loss:.4f} to {steps[-1].loss:.4f}, with grad norms from {min(norms):.3g} to {max(norms):.3g}.")
    table = Table(box=SIMPLE)
    for heading in HEADINGS:
        table.add_column(heading, no_wrap=heading not in ("config", "verdict"), overflow="fold")
    for outcome in outcomes[1:]:
        table.add_row(*cells(outcome))
    console = Console()
    Console(width=None if console.is_terminal else 160).print(table)
    print("MB held: parameters + gradients + optimizer state; MB sent: by one step; both of the rank with most")


def markdown(outcomes: Sequence[Outcome]) -> str:
    """The same table for a document."""
    lines = [HEADINGS, ("---",) * len(HEADINGS), *(cells(outcome) for outcome in outcomes)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
