"""`toolkit compare`: the same training under several configs on this machine, which is faster and which needs less."""

import argparse
import datetime
import os
import platform
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from toolkit.errors import UserError
from toolkit.launch.cases import REFERENCE, Case, all_cases, split_words
from toolkit.launch.machine import Machine, detect
from toolkit.launch.parity import short_run
from toolkit.launch.trials import Contender
from toolkit.phases import LAST
from toolkit.report.console import say
from toolkit.report.results import new_folder, write_json
from toolkit.strategy.diagnostics import MEASURED_STEP

# Of n normal samples, in standard deviations.
MEAN_RANGE = {2: 1.128, 3: 1.693, 4: 2.059, 5: 2.326, 6: 2.534, 7: 2.704, 8: 2.847, 9: 2.970, 10: 3.078}
# On two shared cores medians moved by up to 27 % from one run of a command to the next (docs/data_parallel.md).
BETWEEN_REHEARSALS = 0.3
USAGE = """toolkit compare [CONFIG …] [--steps 8] [--warmup 3] [--repetitions 2] [--limit SECONDS] [--output_dir DIR]
                       [-- tasks/classify.py …flags]
       toolkit compare --from A.json B.json [--output_dir DIR]

Trains the task for a few steps under each CONFIG (default: every one that this machine can run), each in a launch of
its own and all in turn, several times, and makes a table and a page, compare.html: speed, memory on each device, what
the time goes to, and whether the training is the same. Dropout is 0, so that losses can be compared. A CONFIG in
quotes may carry flags:
  toolkit compare multi_gpu "pipeline_parallel --num_processes 4 --pipeline_stages 4" -- tasks/classify.py …
With --from: earlier comparisons on one page, of two machines or two versions, say.
DIR is a new or an empty folder; default: output/compare, and when there is one, output/compare-2, …"""

RESULT = "compare.json"
FOLDER = Path("output") / "compare"


def main(argv: Sequence[str]) -> int:
    """Run `toolkit compare`; 0 also where configs failed, which is what the comparison then tells."""
    own, script, task_flags = split_words(argv)
    if "-h" in own or "--help" in own:
        print("usage:", USAGE)
        return 0
    options = _options(own)
    if options.earlier:
        from toolkit.report.comparison.merge import merge, read

        comparison = merge([read(file) for file in options.earlier])
        folder = _make(options.output_dir)
    else:
        comparison, folder = measure(options, script, task_flags)
    write_json(folder / RESULT, comparison)
    present(comparison, folder)
    return 0


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="toolkit compare", usage=USAGE, add_help=False, exit_on_error=False)
    parser.add_argument("configs", nargs="*")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repetitions", type=int, default=2)
    parser.add_argument("--limit", type=float, default=900.0)
    parser.add_argument("--output_dir", type=Path)
    parser.add_argument("--from", dest="earlier", nargs="+", type=Path, default=[])
    try:
        options = parser.parse_args(list(words))
    except (argparse.ArgumentError, SystemExit) as error:
        raise UserError(f"toolkit compare: {error}. Flags of the task stand behind `--`.") from None
    # The step whose messages are counted is slowed by that.
    least = {"steps": 1, "warmup": MEASURED_STEP, "repetitions": 1}
    wrong = [
        f"--{name} {getattr(options, name)}: at least {n}." for name, n in least.items() if getattr(options, name) < n
    ]
    if options.earlier and options.configs:
        wrong.append(f"--from compares what was measured before: leave out {', '.join(options.configs)}.")
    unfit = options.output_dir and _unfit(options.output_dir)
    if unfit:
        wrong.append(f"--output_dir {options.output_dir} {unfit}")
    if wrong:
        raise UserError(*wrong)
    return options


def _unfit(folder: Path) -> str | None:
    """Why the folder cannot take a comparison."""
    if any(path.exists() and not path.is_dir() for path in (folder, *folder.parents)):
        return "is a file, or inside of one. Give another --output_dir."
    if not os.access(next(path for path in (folder, *folder.parents) if path.exists()), os.R_OK | os.W_OK | os.X_OK):
        return "cannot be written. Give another --output_dir."
    if folder.exists() and any(folder.iterdir()):
        return (
            "is not empty, and files of two comparisons would mix. Give another --output_dir; --from puts comparisons "
            "together."
        )
    return None


def _make(folder: Path | None) -> Path:
    """The folder for the results, which is there from now on."""
    if folder is None:
        return new_folder(FOLDER)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def measure(options: argparse.Namespace, script: Path, task_flags: Sequence[str]) -> tuple[dict[str, Any], Path]:
    """Launch everything, and put the figures together.

    Returns:
        What compare.json holds, and the folder for it.

    Raises:
        UserError: the flags are wrong, or not one config can run.
    """
    machine = detect()
    steps = options.warmup + options.steps
    flags = short_run(task_flags, steps)
    named = [Case.read(words, machine) for words in options.configs]
    cases = named or [case for case in all_cases(machine) if not case.problems(machine, flags)]
    if REFERENCE not in [case.name for case in cases]:
        cases.insert(0, Case.read(REFERENCE, machine))
    folder = _make(options.output_dir)
    logs = folder / "runs"
    logs.mkdir()
    contenders = [Contender(case, script, logs, options.limit) for case in cases]
    for contender in contenders:
        contender.failure = next(
            (f"cannot run here: {wrong}" for wrong in contender.case.problems(machine, flags)), None
        )
    try:
        for repetition in range(options.repetitions):
            say(f"repetition {repetition + 1} of {options.repetitions}")
            for contender in contenders:
                contender.time(flags, options.warmup)
        say("what the time goes to")
        profiled = [*flags, "--max_steps", str(LAST + 1), "--profile"]
        for contender in contenders:
            contender.profile(profiled)
    except KeyboardInterrupt:
        say("stopped: what was measured until now is kept")
    return assemble(contenders, machine, options, script, task_flags), folder


def assemble(
    contenders: Sequence[Contender],
    machine: Machine,
    options: argparse.Namespace,
    script: Path,
    task_flags: Sequence[str],
) -> dict[str, Any]:
    """What compare.json holds."""
    ran = [contender for contender in contenders if contender.timed]
    if not ran:
        failures = [f"{contender.case.name}: {contender.failure}" for contender in contenders]
        raise UserError("not one config could be measured.", *failures)
    reference = next((contender for contender in ran if contender.case.name == REFERENCE), ran[0])
    settings = reference.settings
    return {
        "created": datetime.datetime.now().isoformat(timespec="seconds"),
        "rehearsal": not machine.gpus,
        "machine": {
            "name": " + ".join(f"{n} x {gpu}" for gpu, n in Counter(machine.gpu_names).items()) or processor(),
            "cpu": processor(),
            "cores": machine.cores,
            "memory": machine.memory,
            "gpus": list(machine.gpu_names),
            "system": platform.platform(),
        },
        "versions": settings["versions"] | {"python": platform.python_version()},
        "settings": {
            "script": str(script),
            "flags": list(task_flags),
            "global_batch_size": settings["global_batch_size"],
            "warmup_steps": options.warmup,
            "steps": options.steps,
            "repetitions": options.repetitions,
            "model": settings["flags"]["model_name_or_path"],
            "parameters": settings["parameters"],
        },
        "reference": reference.case.name,
        "resolution": resolution(ran, rehearsal=not machine.gpus),
        "configs": [contender.summary(reference, ran) for contender in contenders],
    }


def resolution(contenders: Sequence[Contender], rehearsal: bool) -> float | None:
    """The relative difference of two configs' samples per second below which it may be chance; None: not known.

    Three standard errors of a difference of two means. The standard deviation of one repetition is estimated from the
    ranges of all configs together, by the mean range of normal samples (Tippett 1925). A rehearsal's is at least what
    its figures move between two runs of one command, which repetitions within a run do not show.
    """
    least = BETWEEN_REHEARSALS if rehearsal else 0.0
    speeds = [[one.samples_per_second for one in contender.timed] for contender in contenders]
    several = [of for of in speeds if len(of) > 1]
    if not several:
        return least or None
    ranges = [(max(of) - min(of)) / (sum(of) / len(of)) / MEAN_RANGE[min(len(of), 10)] for of in several]
    deviation = sum(ranges) / len(ranges)
    return max(least, 3 * deviation * (2 / min(map(len, several))) ** 0.5)


def processor() -> str:
    """The processor's name, as the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def present(comparison: dict[str, Any], folder: Path) -> None:
    """The table on the terminal, compare.csv, the pictures and the page."""
    from toolkit.report.comparison.files import terminal_table, write_csv
    from toolkit.report.comparison.page import write_page
    from toolkit.report.comparison.pictures import write_pictures

    write_csv(comparison, folder / "compare.csv")
    write_pictures(comparison, folder)
    page = write_page(comparison, folder)
    terminal_table(comparison)
    say(f"{page}: open it in a browser")
