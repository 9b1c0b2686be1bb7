"""The checkpoints of one run: what the story in `toolkit.fit` says about saving and going on."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from toolkit import adapters
from toolkit.arguments import Arguments
from toolkit.checkpoint.folder import Checkpoint
from toolkit.checkpoint.keeper import Keeper
from toolkit.checkpoint.resume import check_tensors, describe, find
from toolkit.checkpoint.save import Saver
from toolkit.data.plan import Bound
from toolkit.errors import UserError
from toolkit.models import save_config
from toolkit.report.console import say, warn
from toolkit.report.facts import device_name, versions
from toolkit.report.results import libraries_write, to_json
from toolkit.report.run import Run
from toolkit.step import Stepper
from toolkit.strategy.base import Strategy
from toolkit.task import Task

LAST_WAIT = 60.0  # seconds that a run that fails gives to a save in the background


def wanted_checkpoint(run: Run, strategy: Strategy) -> Checkpoint | None:
    """The checkpoint to go on from, the same on all ranks; None: a fresh start. Collective.

    Raises:
        UserError: the one that is named is no checkpoint, or not whole; or there is none, but a finished run.
    """
    if run.resume_from is None:
        return None
    found = None
    if strategy.rank == 0:
        asked = run.args.resume_from_checkpoint
        found = find(run.resume_from, run.folder)
        if found is None and asked not in (None, run.resume_from):  # restarted before its first checkpoint
            found = find(asked, run.folder)
    path = strategy.share(str(found.path) if found else "")
    if path:
        return found or Checkpoint(path)
    if strategy.agree(run.status == "finished") and not run.args.overwrite_output_dir:
        raise UserError(
            f"{run.folder} holds a finished run of another training, and no checkpoint to go on from. Give another "
            "--output_dir, or --overwrite_output_dir to replace its results."
        )
    say(f"no checkpoint in {run.folder} yet: the training begins at step 1")
    return None


class Session:
    """Saves in the course of training, restores, and keeps the best.

    As a context manager: where the run fails, a save in the background is completed before the process ends.

    Args:
        identity: what defines this training, see `toolkit.checkpoint.resume.training`.
    """

    def __init__(self, args: Arguments, stepper: Stepper, task: Task, run: Run, identity: Mapping[str, Any]) -> None:
        self.args, self.stepper, self.task, self.run = args, stepper, task, run
        self.strategy, self.feed, self.identity = stepper.strategy, stepper.feed, identity
        self.keeper = Keeper(args, self.feed.schedule, run.folder)
        self.saver = Saver(self.strategy, run.folder, args.async_save)
        self.evaluation_due = False  # after the last step
        self.saved: int | None = None  # the step of the newest state on disk
        self.best_loaded = False  # in place of the last step's weights

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, UserError):
            self.saver.come_to_an_end(LAST_WAIT)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Take over the state of a checkpoint of this training.

        Raises:
            UserError: its tensors are those of another model.
        """
        state = checkpoint.state
        # Another optimizer, where that is allowed, begins without moments.
        same_optimizer = state["training"]["optim"] == self.args.optim
        check_tensors(checkpoint, self.strategy.entries(), same_optimizer)
        self.strategy.restore(checkpoint.read, state["updates"] if same_optimizer else 0)
        self.strategy.precision.load(state["scale"])
        self.stepper.skipped = state["skipped"]
        self.keeper.load(state["best"], checkpoint.path.parent)
        self.feed.position = state["position"]
        self.evaluation_due = state["evaluation_due"]
        if self.run.continues and state["training"] == self.identity:
            self.saved = checkpoint.step
        self.run.resume(state["run"], checkpoint.path / "metrics.jsonl")
        if state["machine"] == self._machine():
            self.feed.bound = _narrower(self.feed.bound, state["micro_batch_bound"])
        before, now = describe(state["machine"]), describe(self._machine())
        how = before if now == before else f"{before}; now {now}"
        steps = f"step {checkpoint.step} of {self.feed.schedule.total_steps}"
        say(f"going on from {checkpoint.path}, after {steps} ({how})")
        checkpoint.close()

    def save(self, step: int) -> None:
        """Write checkpoint-<step>. Collective.

        Raises:
            UserError: it cannot be written, or an earlier one in the background could not.
        """
        state = {
            "epoch": self.run.epoch,
            "samples": self.run.samples,
            "training": self.identity,
            "updates": self.strategy.updates,
            "scale": self.strategy.precision.state(),
            "skipped": self.stepper.skipped,
            "best": self.keeper.state(),
            "position": self.feed.position,
            "run": self.run.state(),
            "evaluation_due": self.evaluation_due,
            "machine": self._machine(),
            "micro_batch_bound": asdict(self.feed.bound),
            "optimizer_groups": self.strategy.groups(),
            "flags": self.run.flags,
            "versions": versions(),
        }
        metrics = self.run.metrics() if self.strategy.rank == 0 else b""

        def extras(folder: Path) -> None:
            with libraries_write(folder):
                save_config(self.strategy.shell(), folder)
                if adapters.present(self.strategy.model):
                    adapters.complete(folder, self.strategy.model)
                self.task.tokenizer.save_pretrained(folder)
            (folder / "metrics.jsonl").write_bytes(metrics)

        self.saver.save(step, state, extras, self.keeper.rotation())
        self.saved = step

    def stop(self) -> None:
        """Have on disk what the run goes on from. Collective.

        That is the state after the last step, or where the best's weights are in its place already, an earlier one.
        """
        if self.saved != self.run.steps and not self.best_loaded:
            self.save(self.run.steps)
        self.saver.wait()

    def settle(self) -> None:
        """Wait for a save in the background, at the end of training: one that has failed costs no more than itself."""
        try:
            self.saver.wait()
        except UserError as error:
            warn(f"{error.messages[0]} The training is complete: its model is written all the same.")

    def evaluated(self, figures: Mapping[str, Any]) -> None:
        """Take note of an evaluation, as rank 0 has it: elsewhere a last digit may differ. Collective."""
        self.keeper.evaluated(self.run.steps, json.loads(self.strategy.share(to_json(figures))))

    def load_best(self) -> None:
        """Take back the weights of the best evaluation. Collective."""
        best = self.keeper.best
        if best.step is None:
            warn("no evaluation was better than none: the last weights are used")
            return
        if best.step != self.run.steps:
            path = self.strategy.share(self._whole_best() if self.strategy.rank == 0 else "")
            if not path:
                return
            checkpoint = Checkpoint(path)
            self.strategy.restore(checkpoint.read, checkpoint.state["updates"])
            checkpoint.close()
            self.best_loaded = True
        say(f"the best evaluation was at step {best.step}, {best.metric} {best.value:.6g}: its weights are used")

    def _whole_best(self) -> str:
        """Where the best weights are, or nothing where they are not whole: then the last ones are better than none."""
        path = self.keeper.best_checkpoint()
        try:
            if path is None:
                raise UserError(f"there is no checkpoint of step {self.keeper.best.step}.")
            Checkpoint(path).verify()
            return str(path)
        except UserError as error:
            warn(f"the weights of the best evaluation cannot be had, so the last ones are used: {error.messages[0]}")
            return ""

    def _machine(self) -> dict[str, Any]:
        """What may differ when a training goes on."""
        strategy = self.strategy
        return {
            "strategy": strategy.name,
            "world_size": strategy.world_size,
            "precision": strategy.precision.name,
            "device": device_name(strategy.device),
        }


def _narrower(now: Bound, saved: Mapping[str, Any]) -> Bound:
    """The bound of a run that goes on where it was cut before: it may have had to lower its own."""
    return Bound(now.rows, min(now.tokens, float(saved["tokens"])), min(now.area, float(saved["area"])))
