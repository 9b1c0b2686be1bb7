"""The story of a run, top to bottom: set up, data, model, steps, evaluation, export."""

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.arguments import Arguments
from toolkit.attention import unpads
from toolkit.checkpoint.notice import Notice
from toolkit.checkpoint.resume import check_same, training
from toolkit.checkpoint.session import Session, wanted_checkpoint
from toolkit.data.feed import Feed, collate
from toolkit.data.plan import Bound, Schedule
from toolkit.errors import UserError, raise_all
from toolkit.evaluate import Stopped, outputs
from toolkit.launch.environment import World, connect
from toolkit.launch.machine import detect
from toolkit.launch.recommend import simpler_hint
from toolkit.report.console import say
from toolkit.report.run import Run
from toolkit.settings import (
    DEFAULT_EVAL_ROWS,
    batch_sizes,
    best_problems,
    check_flags,
    evaluation_steps,
    learning_rate,
    make_schedule,
)
from toolkit.step import Stepper
from toolkit.strategy import choose
from toolkit.strategy.base import OptimizerRule, Strategy
from toolkit.strategy.cost import overhead
from toolkit.strategy.memory import CudaMeter, default_bound, find_bound, out_of_memory
from toolkit.task import Samples, Streamed, Task

EARLY_BATCHES = 2  # evaluation batches before the first step, so that errors of evaluation show at once


def fit(task: Task, args: Arguments) -> None:
    """Train, evaluate and export `task`, writing all results to `args.output_dir`.

    Raises:
        UserError: anything that the user can mend, as early as it can be known.
    """
    notice = Notice()
    world = connect(args, check_flags(args))
    strategy = choose(world, args)
    sizes, problems = batch_sizes(args, strategy.data_world * strategy.devices)
    raise_all(problems)
    with notice, Run(task.name, args, world) as run:
        say(world.describe(strategy.name, strategy.devices))
        run.folder = Path(strategy.share(str(run.folder)))  # rank 0 may have numbered it
        if strategy.agree(run.finished):
            say(f"{run.folder}: this run has finished, there is nothing to go on with")
            return
        checkpoint = wanted_checkpoint(run, strategy)
        task.resumes = checkpoint is not None
        splits = task.prepare()
        if not len(splits["train"]):
            raise UserError("there is nothing to train on: the training split has no rows.")
        raise_all(best_problems(args, task.metrics if "validation" in splits else ()))
        train = splits["train"]
        schedule = make_schedule(
            args, sizes.global_batch, train.lengths, train if isinstance(train, Streamed) else None
        )
        say(sizes.note or f"global batch {sizes.global_batch} samples")
        say(str(schedule))
        identity = training(args, schedule, train.fingerprint(), task.config)
        if checkpoint:
            check_same(checkpoint, identity, args.allow_changed or [])
        feed = _prepare(task, args, world, strategy, splits["train"], schedule, sizes.rows)
        run.describe(strategy, splits, schedule, feed.bound)
        rate = learning_rate(args, schedule.total_steps)
        stepper = Stepper(strategy, feed, rate, args.seed, args.skip_nonfinite_steps, notice)
        evaluation = Evaluation(task, args, strategy, splits, feed, notice)
        evaluation.try_out()
        session = Session(args, stepper, task, run, identity)
        if checkpoint:
            session.resume(checkpoint)
        notice.training_begins()
        with session:
            try:
                _train(args, stepper, evaluation, run, session)
                _finish(task, strategy, evaluation, run, session)
            except Stopped:
                session.stop()
                run.interrupted()


def _prepare(
    task: Task,
    args: Arguments,
    world: World,
    strategy: Strategy,
    samples: Samples,
    schedule: Schedule,
    rows: int | None,
) -> Feed:
    """Build the model under the strategy, and find out how large a micro-batch may be."""
    rule = OptimizerRule(
        args.optim, (args.adam_beta1, args.adam_beta2), args.adam_epsilon, args.weight_decay, args.max_grad_norm
    )
    bound = default_bound(rows, strategy.devices, world.device)
    feed = Feed(
        task,
        samples,
        schedule,
        strategy.data_rank,
        strategy.data_world,
        bound,
        overhead(world.device, world.precision, strategy.agree(detect().amx)),
        world.device.type == "cuda",
        args.dataloader_num_workers,
        strategy.micro_batches,
    )
    probe = collate(task, samples, np.arange(min(2 * strategy.devices, len(samples))), 0)
    try:
        strategy.build(task, rule, probe)
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise UserError(f"the model does not fit on {world.device}: use a config that shards or splits it.") from error
    unpadded = "attention_mask" in probe.inputs and unpads(strategy.model)
    feed.padding = strategy.agree(not unpadded)
    if not strategy.alone:
        machine = detect()
        hint = simpler_hint(strategy.size.parameters, min(machine.gpu_memory, default=machine.memory))
        if hint:
            say(hint)
    find_bound(strategy, feed, rule, CudaMeter(world.device) if world.device.type == "cuda" else None)
    return feed


def _train(args: Arguments, stepper: Stepper, evaluation: "Evaluation", run: Run, session: Session) -> None:
    """All steps that are left, with what is due after each.

    Raises:
        Stopped: on all ranks, when one was asked to stop.
    """
    schedule, keeper = stepper.feed.schedule, session.keeper
    due = evaluation_steps(args, schedule)

    def evaluate() -> None:
        session.evaluation_due = True  # should a stop come in the middle of it
        figures = evaluation.run("validation")
        session.evaluation_due = False
        run.evaluated(figures)
        session.evaluated(figures)

    with run.training(schedule, stepper.feed):
        if session.evaluation_due:
            evaluate()
        for work in () if keeper.enough else stepper.feed.after(run.steps):
            update, work = stepper.take(work, session.saver.failed)
            step = work.step
            run.step(work, update, stepper.learning_rate(step.number))
            if stepper.failed:
                session.saver.wait()  # which says why
            # The last one comes with the end of the run, unless it may be the best.
            if due(step.number, step.ends_epoch) and (step.number < schedule.total_steps or keeper.compares):
                evaluate()
            if stepper.stop:
                say(f"asked to stop: step {step.number} is the last for now; a second Ctrl-C stops at once")
            if stepper.stop or keeper.due(step.number, step.ends_epoch):
                session.save(step.number)
                run.pause()
                # Or a signal came while saving, which need not be done twice.
                if stepper.strategy.agree(stepper.notice.come):
                    raise Stopped
            if keeper.enough:
                say(
                    f"no better {keeper.metric} in {keeper.best.since} evaluations: stopped early at step {step.number}"
                )
                break
        session.settle()


def _finish(task: Task, strategy: Strategy, evaluation: "Evaluation", run: Run, session: Session) -> None:
    """The model, before anything else can fail; then the final evaluation, predictions and summary."""
    if run.args.load_best_model_at_end:
        session.load_best()
    if run.args.diagnostics or run.args.profile:
        from toolkit.strategy.diagnostics import report

        run.diagnosed(report(strategy))
    run.export(strategy, task)
    results = {split: evaluation.run(split) for split in ("validation", "test") if split in evaluation.splits}
    run.close(task, results, evaluation.tables)


@dataclass
class Evaluation:
    """Scores splits, and keeps the last table of each."""

    task: Task
    args: Arguments
    strategy: Strategy
    splits: dict[str, Samples]
    feed: Feed
    notice: Notice = field(default_factory=Notice)
    tables: dict[str, np.ndarray] = field(default_factory=dict)

    def run(self, split: str) -> dict[str, Any]:
        """The figures of a split; none where there is no such split or it has no labels."""
        if split not in self.splits:
            return {}
        start = time.perf_counter()
        samples = self.splits[split]
        table = self.tables[split] = outputs(self.strategy, self.task, samples, self._bound(), notice=self.notice)
        finite = np.isfinite(table).all(axis=1)
        if not finite.all():
            missing = np.flatnonzero(~finite)
            raise UserError(
                f"the model's outputs for {len(missing)} of {len(table)} samples of the {split} split are not finite "
                f"(first: sample {missing[0]}). Its weights have probably diverged: lower --learning_rate."
            )
        seconds = time.perf_counter() - start
        figures = self.task.score(split, table)
        return {
            **figures,
            "samples": len(samples),
            "runtime": seconds,
            "samples_per_second": len(samples) / seconds,
        }

    def try_out(self) -> None:
        """A few batches of every split, and scores of a table of their size, to fail now rather than after training."""
        for split, samples in self.splits.items():
            if split != "train":
                table = outputs(self.strategy, self.task, samples, self._bound(), EARLY_BATCHES)
                self.task.score(split, np.ones_like(table))

    def _bound(self) -> Bound:
        rows = (self.args.per_device_eval_batch_size or DEFAULT_EVAL_ROWS) * self.strategy.devices
        return Bound(rows, self.feed.bound.tokens, self.feed.bound.area)
