"""What a run leaves behind: its settings, its log, its model, its results. Rank 0 writes."""

import dataclasses
import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import torch

from toolkit import adapters
from toolkit.arguments import Arguments, changed
from toolkit.checkpoint.folder import named
from toolkit.checkpoint.resume import AUTO, same_flags
from toolkit.data.feed import Feed, Work
from toolkit.data.plan import Bound, Schedule
from toolkit.errors import UserError
from toolkit.launch.environment import World, restarts
from toolkit.models import save_config
from toolkit.report.console import say, warn
from toolkit.report.facts import peak_memory, versions
from toolkit.report.progress import Progress
from toolkit.report.results import (
    RESULTS,
    MetricsLog,
    Unwritable,
    check_output,
    claim_output,
    last_folder,
    model_written_to,
    new_folder,
    read_metrics,
    remove_checkpoints,
    write_bytes,
    write_json,
)
from toolkit.report.summary import conclude, line
from toolkit.report.tracker import Tracker
from toolkit.strategy.base import Strategy, Update
from toolkit.task import Samples, Task


class Run:
    """The output folder of one run, as a context manager.

    Nothing in the folder is touched before the first step: a run that stops at a mistake in flags or data
    leaves it as it was.

    Args:
        name: the task's, for the default folder output/<name>.
    """

    def __init__(self, name: str, args: Arguments, world: World) -> None:
        self.name, self.args, self.world = name, args, world
        self.writes = world.rank == 0
        self.started = time.perf_counter()
        self.settings: dict[str, Any] = {}
        self.losses: list[float] = []
        self.samples = self.tokens = self.padded = self.micro_batches = 0
        self.epoch = 0.0  # epochs behind the last step
        self.folder = Path(args.output_dir or Path("output") / name)
        self.before = 0.0  # seconds of training before this process
        self.earlier = b""  # metrics.jsonl up to the step that this run goes on from
        # A group that the launcher has restarted goes on without being asked to, from where it has come by now.
        self.resume_from: str | None = AUTO if restarts() else args.resume_from_checkpoint
        # Whether it goes on with the run of this folder, whose results then are its own.
        self.continues = self.resume_from is not None and (
            self.resume_from == AUTO or Path(self.resume_from).resolve().parent == self.folder.resolve()
        )
        self.overwrite = args.overwrite_output_dir or self.continues
        self.exported = False
        self.log: MetricsLog | None = None
        self.tracker: Tracker | None = None

    def __enter__(self) -> "Run":
        if self.writes:
            if not self.args.output_dir:
                self.folder = (last_folder(self.folder) if self.continues else None) or new_folder(self.folder)
            self.made = not self.folder.exists() or not self.args.output_dir
            check_output(self.folder, self.overwrite)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and self.losses:
            error.add_note(f"after step {len(self.losses)} of {self.schedule.total_steps}")
        if self.log is not None:
            with suppress(OSError, Unwritable):  # the disk is still full
                if error is not None:
                    self._write_settings(status="failed")
                self.log.close()
        elif self.writes and self.made:
            with suppress(OSError):  # somebody has put a file there
                self.folder.rmdir()
        if self.tracker is not None:
            self.tracker.close()
        if self.log is not None and isinstance(error, Unwritable):
            raise UserError(f"{error.reason} {self._saved()}") from None

    def _saved(self) -> str:
        """What is whole in the folder, and how to get the rest."""
        checkpoint = [path.name for _, path in named(self.folder)[:1]]
        model = ["the model"] if self.exported else []
        results = [name for name in RESULTS if (self.folder / name).is_file()]
        how = "go on" if checkpoint else "begin anew"
        flag = "--resume_from_checkpoint auto" if checkpoint else "--overwrite_output_dir"
        return (
            f"Saved there already: {', '.join([*checkpoint, *model, *results])}. Make room, and {how} by the same "
            f"command with {flag}."
        )

    def describe(self, strategy: Strategy, splits: dict[str, Samples], schedule: Schedule, bound: Bound) -> None:
        """Note the settings as they came about."""
        if "validation" not in splits:
            warn(
                "there is no validation data, so the model is not scored: add --validation_file or "
                "--validation_split_percentage."
            )
        self.settings |= {
            "strategy": strategy.name,
            "effective": self.world.describe(strategy.name, strategy.devices),
            "world_size": self.world.size,
            "data_world": strategy.data_world,
            "devices_per_process": strategy.devices,
            "device": str(self.world.device),
            "precision": self.world.precision,
            "global_batch_size": schedule.global_batch,
            "total_steps": schedule.total_steps,
            "micro_batch_bound": dataclasses.asdict(bound),
            "optimizer_groups": strategy.groups(),
            **strategy.size._asdict(),
            "samples": {split: len(samples) for split, samples in splits.items()} | {"train": schedule.samples},
            "data_fingerprint": {split: samples.fingerprint() for split, samples in splits.items()},
        }

    @contextmanager
    def training(self, schedule: Schedule, feed: Feed) -> Iterator[None]:
        """Around all steps: the progress bar and metrics.jsonl."""
        self.feed, self.schedule = feed, schedule
        if self.writes:
            claim_output(self.folder, self.overwrite)
            if not self.continues:
                remove_checkpoints(self.folder)  # of an earlier run, whose results go too
            self._write_settings(status="running")
            write_bytes(self.folder / "metrics.jsonl", self.earlier)
            self.log = MetricsLog(self.folder / "metrics.jsonl")
            if self.args.report_to != "none":
                self.tracker = Tracker(self.args.report_to, self.name, self.folder, self.changed_flags)
        if self.world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.world.device)  # what was tried before does not count
        self.train_started = self.last = time.perf_counter()
        with Progress(schedule.total_steps, self.args.logging_steps) as self.progress:
            yield
        self.train_seconds = self.before + time.perf_counter() - self.train_started

    def step(self, work: Work, update: Update, lr: float) -> None:
        """Log one optimizer step."""
        now = time.perf_counter()
        seconds, self.last = now - self.last, now
        number, samples = work.step.number, len(work.step.ids)
        self.epoch = work.step.passed
        self.losses.append(update.loss)
        self.samples += samples
        self.tokens += work.tokens
        self.padded += work.padded
        self.micro_batches += len(work.batches)
        row = {
            "step": number,
            "epoch": self.epoch,
            "loss": update.loss,
            "grad_norm": update.grad_norm,
            "learning_rate": lr,
            "samples": self.samples,
            "tokens": self.tokens,
            "seconds": seconds,
            "samples_per_second": samples / seconds,
            "tokens_per_second": work.tokens / seconds,
            "applied": update.applied,
        }
        if self.log is not None:
            self.log.write(**row)
        self.progress.update(number, update.loss, lr, update.grad_norm, samples / seconds)
        if self.tracker is not None and (number % self.args.logging_steps == 0 or number == 1):
            self.tracker.log({f"train/{key}": row[key] for key in ("loss", "grad_norm", "learning_rate")}, number)

    def evaluated(self, figures: dict[str, Any]) -> None:
        """Log an evaluation in the course of training."""
        if not figures:
            return
        row = {f"eval_{key}": value for key, value in figures.items()}
        if self.log is not None:
            self.log.write(step=self.steps, epoch=self.epoch, **row)
        self.progress.say(f"step {self.steps}: " + line(figures))
        if self.tracker is not None:
            self.tracker.log({f"eval/{key}": value for key, value in figures.items()}, self.steps)
        self.pause()

    def pause(self) -> None:
        """The next step's time starts here."""
        self.last = time.perf_counter()

    @property
    def steps(self) -> int:
        """Steps done, those before this process included."""
        return len(self.losses)

    @property
    def status(self) -> str | None:
        """What an earlier run in this folder says of itself."""
        return self._earlier_settings().get("status")

    @property
    def finished(self) -> bool:
        """Whether the run that shall be gone on with has come to its end, and is the one that is asked for."""
        earlier = self._earlier_settings() if self.continues and not self.args.allow_changed else {}
        return earlier.get("status") == "finished" and same_flags(earlier["flags"], self.args)

    def _earlier_settings(self) -> dict[str, Any]:
        try:
            return json.loads((self.folder / "run.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    @property
    def flags(self) -> dict[str, Any]:
        """All flags, for a file."""
        return _plain(dataclasses.asdict(self.args))

    @property
    def changed_flags(self) -> dict[str, Any]:
        """Those that are not at their default."""
        return _plain(changed(self.args))

    def metrics(self) -> bytes:
        """metrics.jsonl so far."""
        return (self.folder / "metrics.jsonl").read_bytes()

    def state(self) -> dict[str, Any]:
        """What a run that goes on needs beside metrics.jsonl."""
        seconds = self.before + time.perf_counter() - self.train_started
        return {"tokens": self.tokens, "padded": self.padded, "micro_batches": self.micro_batches, "seconds": seconds}

    def resume(self, state: dict[str, Any], metrics: Path) -> None:
        """Go on from `state` and the metrics.jsonl beside it."""
        rows = [row for row in read_metrics(metrics) if "loss" in row]
        self.losses = [math.nan if row["loss"] is None else float(row["loss"]) for row in rows]
        self.samples, self.epoch = (rows[-1]["samples"], rows[-1]["epoch"]) if rows else (0, 0.0)
        self.tokens, self.padded = state["tokens"], state["padded"]
        self.micro_batches, self.before = state["micro_batches"], state["seconds"]
        self.earlier = metrics.read_bytes()

    def interrupted(self) -> None:
        """Say how to go on, also to launch.sh."""
        if self.writes:
            self.settings["interrupted_at"] = self.steps
            self._write_settings(status="interrupted")
        told = os.environ.get("TOOLKIT_INTERRUPTED_FILE")
        if told and self.world.local_rank == 0:  # each machine has a launch.sh of its own
            Path(told).write_text("interrupted\n")
        say(
            f"stopped after step {self.steps} of {self.schedule.total_steps}, as asked: the same command with "
            "--resume_from_checkpoint auto goes on from there"
        )

    def diagnosed(self, report: dict[str, Any]) -> None:
        """Write what `--diagnostics` and `--profile` measured."""
        if self.writes:
            write_json(self.folder / "diagnostics.json", report)

    def export(self, strategy: Strategy, task: Task) -> None:
        """Write the model as `from_pretrained` reads it, or its adapters alone as peft does."""
        model, merge = strategy.model, self.args.merge_adapter
        weights = dict(strategy.weights(lambda name: merge or adapters.own(model, name)))
        if not self.writes:
            return
        with model_written_to(self.folder):
            if adapters.present(model) and not merge:
                adapters.save(self.folder, model, weights)
                save_config(strategy.shell(), self.folder)
            else:
                weights = adapters.merged(model, weights) if merge else weights
                strategy.shell().save_pretrained(self.folder, state_dict=weights)
            task.tokenizer.save_pretrained(self.folder)
        self.exported = True

    def close(self, task: Task, results: dict[str, dict[str, Any]], tables: dict[str, np.ndarray]) -> None:
        """Write the results and say how it went."""
        if not self.writes:
            return
        train = {
            "epoch": self.epoch,
            "train_loss": float(np.mean(self.losses)),
            "train_runtime": self.train_seconds,
            "train_samples": self.schedule.samples,
            "train_samples_per_second": self.samples / self.train_seconds,
            "train_steps_per_second": self.steps / self.train_seconds,
        }
        files = {"train": train}
        for split, figures in results.items():
            prefix = "eval" if split == "validation" else split
            files[prefix] = {f"{prefix}_{key}": value for key, value in figures.items()}
            details = task.details(split, tables[split])
            if details:
                write_json(self.folder / f"{prefix}_report.json", details)
        for prefix, figures in files.items():
            write_json(self.folder / f"{prefix}_results.json", figures)
        write_json(self.folder / "all_results.json", {k: v for figures in files.values() for k, v in figures.items()})
        if self.log is not None and results.get("validation"):
            self.log.write(step=self.steps, epoch=train["epoch"], **files["eval"])
            if self.tracker is not None:
                evaluation = {f"eval/{key}": value for key, value in results["validation"].items()}
                self.tracker.log(evaluation, self.steps)
        if "test" in tables:
            task.write_predictions(self.folder / "predictions.csv", "test", tables["test"])
        conclude(self, task, results)
        self.settings["cut"] = {
            "micro_batches_per_step": self.micro_batches / len(self.losses),
            "padding_share": 1 - self.tokens / self.padded,
            "micro_batch_bound": dataclasses.asdict(self.feed.bound),
        }
        self.settings["peak_memory_bytes"] = peak_memory(self.world.device)
        self._write_settings(status="finished")
        if self.args.push_to_hub:
            from toolkit.report.hub import push

            push(self.folder, self.args.hub_model_id or self.folder.name)

    def _write_settings(self, status: str) -> None:
        content = {"status": status, "task": self.name, "flags": self.flags, **self.settings, "versions": versions()}
        write_json(self.folder / "run.json", content)


def _plain(flags: dict[str, Any]) -> dict[str, Any]:
    plain = int | float | str | list | None
    return {key: value if isinstance(value, plain) else str(value) for key, value in flags.items()}
