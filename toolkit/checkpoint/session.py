"""The checkpoints of one run: what the story in `toolkit.fit` says about saving and going on."""

from dataclasses import asdict
from pathlib import Path

from toolkit.arguments import Arguments
from toolkit.checkpoint.folder import Checkpoint
from toolkit.checkpoint.keeper import Keeper
from toolkit.checkpoint.resume import check_same, find, raise_differences, training
from toolkit.checkpoint.save import LONGEST_SAVE, Saver
from toolkit.report.console import say, warn
from toolkit.report.facts import versions
from toolkit.report.run import Run
from toolkit.step import Stepper
from toolkit.strategy.base import Strategy
from toolkit.task import Task


def wanted_checkpoint(run: Run, strategy: Strategy) -> Checkpoint | None:
    """The checkpoint to go on from, the same on all ranks; None: a fresh start. Collective."""
    if run.resume_from is None:
        return None
    found = find(run.resume_from, run.folder) if strategy.rank == 0 else None
    path = strategy.share(str(found.path) if found else "")
    if not path:
        say(f"no checkpoint in {run.folder} yet: the training begins at step 1")
        return None
    return found or Checkpoint(path)


class Session:
    """Saves in the course of training, restores, and keeps the best.

    Args:
        metrics: names of an evaluation's figures.
    """

    def __init__(self, args: Arguments, stepper: Stepper, task: Task, run: Run, metrics: list[str]) -> None:
        self.args, self.stepper, self.task, self.run = args, stepper, task, run
        self.strategy = strategy = stepper.strategy
        self.feed = feed = stepper.feed
        self.keeper = Keeper(args, feed.schedule, run.folder, metrics)
        self.saver = Saver(strategy, run.folder, lambda path: self.keeper.rotate(), args.async_save)
        self.identity = training(
            args,
            feed.schedule.global_batch,
            feed.schedule.total_steps,
            feed.samples.fingerprint(),
            strategy.model.config.to_dict(),
        )
        self.evaluation_due = False  # after the last step

    def resume(self, checkpoint: Checkpoint) -> None:
        """Take over the state of a checkpoint.

        Raises:
            UserError: it is of another training.
        """
        state = checkpoint.state
        problems = check_same(state["training"], self.identity, self.args.allow_changed or [])
        raise_differences([*problems, *self._other_tensors(checkpoint)], checkpoint.path)
        self.strategy.restore(checkpoint.read, state["updates"])
        self.strategy.precision.load(state["scale"])
        self.stepper.skipped = state["skipped"]
        self.keeper.load(state["best"])
        self.evaluation_due = state["evaluation_due"]
        self.run.resume(state["run"], checkpoint.path / "metrics.jsonl")
        before = f"{state['strategy']} x {state['world_size']}, {state['precision']}"
        now = f"{self.strategy.name} x {self.strategy.world_size}, {self.strategy.precision.name}"
        how = before if now == before else f"{before}; now {now}"
        steps = f"step {checkpoint.step} of {self.feed.schedule.total_steps}"
        say(f"going on from {checkpoint.path}, after {steps} ({how})")
        checkpoint.close()

    def save(self, step: int) -> None:
        """Write checkpoint-<step>. Collective."""
        state = {
            "training": self.identity,
            "total_steps": self.feed.schedule.total_steps,
            "updates": self.strategy.updates,
            "scale": self.strategy.precision.state(),
            "skipped": self.stepper.skipped,
            "best": self.keeper.state(),
            "run": self.run.state(),
            "evaluation_due": self.evaluation_due,
            "strategy": self.strategy.name,
            "world_size": self.strategy.world_size,
            "precision": self.strategy.precision.name,
            "micro_batch_bound": asdict(self.feed.bound),
            "optimizer_groups": self.strategy.groups(),
            "flags": self.run.flags,
            "versions": versions(),
        }
        metrics = self.run.metrics() if self.strategy.rank == 0 else b""

        def extras(folder: Path) -> None:
            shell = self.strategy.shell()
            shell.config.save_pretrained(folder)
            if getattr(shell, "generation_config", None) is not None:
                shell.generation_config.save_pretrained(folder)
            self.task.tokenizer.save_pretrained(folder)
            (folder / "metrics.jsonl").write_bytes(metrics)

        self.saver.save(step, state, extras)
        if self.saver.seconds > LONGEST_SAVE:
            warn(
                f"saving took {self.saver.seconds:.0f} s, but a launcher kills 30 s after SIGTERM: ask for the stop "
                "with SIGUSR1 instead (SLURM: --signal=USR1@120), or use --async_save."
            )

    def load_best(self) -> None:
        """Take back the weights of the best evaluation. Collective."""
        self.saver.wait()
        path = self.strategy.share(str(self.keeper.best_checkpoint() or ""))
        if not path:
            return
        checkpoint = Checkpoint(path)
        self.strategy.restore(checkpoint.read, checkpoint.state["updates"])
        checkpoint.close()
        best = self.keeper.best
        say(f"the best evaluation was at step {best.step}, {self.keeper.metric} {best.value:.4f}: its weights are used")

    def _other_tensors(self, checkpoint: Checkpoint) -> list[str]:
        """Names of the state that the checkpoint has not, or has besides."""
        here, there = set(self.strategy.entries()), set(checkpoint.state["tensors"])
        missing, beside = sorted(here - there), sorted(there - here)
        problems = []
        if missing:
            problems.append(f"it has no {missing[0]}" + (f" and {len(missing) - 1} more" if missing[1:] else "") + ".")
        if beside:
            problems.append(
                f"it has {beside[0]}" + (f" and {len(beside) - 1} more" if beside[1:] else "") + " besides."
            )
        return problems
