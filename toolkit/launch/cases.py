"""The same short training under several configs, each in its own launch."""

import argparse
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from toolkit.errors import UserError
from toolkit.launch.check import flags_class, problems
from toolkit.launch.config import Config, configs_folder, find_config, read_config, with_launch_flags
from toolkit.launch.machine import Machine

REFERENCE = "single_gpu"


@dataclass(frozen=True)
class Case:
    """One way to run the task: a config, and the task flags that go with it."""

    name: str
    config: Config
    processes: int
    flags: list[str]

    @classmethod
    def read(cls, words: str, machine: Machine) -> "Case":
        """From a config's name or path; behind it may stand flags: `pipeline_parallel --pipeline_stages 4`.

        `--num_processes` among them is the launcher's. Without it: one process a GPU; without GPUs what the
        config says.

        Raises:
            UserError: there is no such config, or the words are none.
        """
        name, asked, flags = _case_words(words)
        config = read_config(find_config(name))
        processes = asked or config.local_processes
        if asked is None and machine.gpus and config.kind != "NO":
            processes = machine.gpus
        given = {flag for flag in flags if flag.startswith("--")}
        needed, at = list(config.flags), 0
        while at < len(needed):  # what the config's head asks for, unless it is given
            values = next((i for i, word in enumerate(needed[at + 1 :]) if word.startswith("--")), len(needed) - at - 1)
            if needed[at] not in given:
                flags += needed[at : at + 1 + values]
            at += 1 + values
        return cls(words, with_launch_flags(config, ["--num_processes", str(processes)]), processes, flags)

    def problems(self, machine: Machine, task_flags: Sequence[str]) -> list[str]:
        """What stops this case from running here."""
        return problems(self.config, machine, [*task_flags, *self.flags])

    def run(self, script: Path, task_flags: Sequence[str], log: Path, limit: float | None = None) -> int | None:
        """Launch it and wait; the exit code. What it prints goes to `log`. Ctrl-C ends it too.

        Args:
            limit: seconds after which it is ended; the answer is then None.
        """
        command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
        command += ["--config_file", str(self.config.path), "--num_processes", str(self.processes)]
        command += [str(script), *task_flags, *self.flags]
        threads = max(1, len(os.sched_getaffinity(0)) // self.processes) if hasattr(os, "sched_getaffinity") else 1
        environment = {"OMP_NUM_THREADS": str(threads), **os.environ}
        with log.open("w", encoding="utf-8") as stream:
            process = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream, start_new_session=True)
            try:
                return process.wait(limit)
            except subprocess.TimeoutExpired:
                return None
            finally:
                if process.poll() is None:
                    _end(process)


def _end(process: subprocess.Popen) -> None:
    """End a launch with all its ranks; the launcher gives them 30 seconds."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(40)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def last_error(log: Path) -> str:
    """What a failed launch said about its cause, in one line."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    told = [line for line in lines if line.startswith(("error:", "[rank")) or "Error" in line.split(":")[0]]
    return (told or lines or ["it said nothing"])[0 if told else -1]


def all_cases(machine: Machine) -> list[Case]:
    """Every checked-in config but the reference."""
    names = sorted(file.stem for file in configs_folder().glob("*.yaml"))
    return [Case.read(name, machine) for name in names if name != REFERENCE]


def _case_words(words: str) -> tuple[str, int | None, list[str]]:
    """The config's name, the number of processes where it is said, and the task flags."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--num_processes", type=int)
    try:
        name, *flags = shlex.split(words)
        options, flags = parser.parse_known_args(flags)
    except (ValueError, argparse.ArgumentError) as error:
        reason = error if words.strip() else "empty"
        raise UserError(f'CONFIG "{words}": {reason}. Give a name, or in quotes a name with flags.') from None
    if name.endswith(".py"):
        raise UserError(f"{name} is no config: the task script and its flags stand behind `--`: -- {name} …flags.")
    if options.num_processes is not None and options.num_processes < 1:
        raise UserError(f'CONFIG "{words}": --num_processes {options.num_processes}: expected at least 1.')
    return name, options.num_processes, flags


def split_words(argv: Sequence[str]) -> tuple[list[str], Path, list[str]]:
    """`CONFIG … -- tasks/x.py flags` as (configs and options, script, task flags).

    Raises:
        UserError: what stands behind `--` does not begin with a script.
    """
    argv = list(argv)
    at = argv.index("--") if "--" in argv else len(argv)
    own, task = argv[:at], argv[at + 1 :]
    script = configs_folder().parent / "tasks" / "classify.py"
    if task:
        script = Path(task.pop(0))
        if script.suffix != ".py" or not script.is_file():
            raise UserError(f"{script}: behind `--` the task script comes first: -- tasks/classify.py …flags.")
    return own, script, task


def without_flag(words: Sequence[str], name: str) -> list[str]:
    """The words without a flag and its value."""
    kept, skip = [], False
    for word in words:
        if skip:
            skip = False
        elif word == name:
            skip = True
        elif not word.startswith(f"{name}="):
            kept.append(word)
    return kept


def same_step(task_flags: Sequence[str]) -> list[str]:
    """The task's flags with the global batch said outright, so that it does not depend on the number of devices.

    Raises:
        UserError: the flags contradict each other or cannot be read.
    """
    from toolkit.arguments import parse
    from toolkit.errors import raise_all
    from toolkit.settings import batch_sizes

    args = parse(flags_class(), list(task_flags))
    sizes, wrong = batch_sizes(args, 1)
    raise_all(wrong)
    return [*without_flag(task_flags, "--gradient_accumulation_steps"), "--global_batch_size", str(sizes.global_batch)]
