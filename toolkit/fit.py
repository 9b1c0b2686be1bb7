"""The story of a run, top to bottom: set up, data, model, steps, evaluation, export."""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from toolkit.arguments import Arguments
from toolkit.data.feed import Feed, collate
from toolkit.data.plan import Bound, Schedule
from toolkit.errors import UserError, raise_all
from toolkit.evaluate import outputs
from toolkit.launch.environment import World, connect
from toolkit.report.console import say
from toolkit.report.run import Run
from toolkit.settings import (
    DEFAULT_EVAL_ROWS,
    batch_sizes,
    check_flags,
    evaluation_steps,
    learning_rate,
    make_schedule,
)
from toolkit.step import Stepper
from toolkit.strategy import choose
from toolkit.strategy.base import OptimizerRule, Strategy
from toolkit.strategy.memory import CudaMeter, default_bound, find_bound, out_of_memory
from toolkit.task import Samples, Task

EARLY_BATCHES = 2  # evaluation batches before the first step, so that errors of evaluation show at once


def fit(task: Task, args: Arguments) -> None:
    """Train, evaluate and export `task`, writing all results to `args.output_dir`.

    Raises:
        UserError: anything that the user can mend, as early as it can be known.
    """
    problems = check_flags(args)
    world = connect(args, problems)
    strategy = choose(world, args)
    sizes, problems = batch_sizes(args, strategy.data_world * strategy.devices)
    raise_all(problems)
    with Run(task.name, args, world) as run:
        say(world.describe(strategy.name, strategy.devices))
        splits = task.prepare()
        if not len(splits["train"]):
            raise UserError("there is nothing to train on: the training split has no rows.")
        schedule = make_schedule(args, sizes.global_batch, splits["train"].lengths)
        say(sizes.note or f"global batch {sizes.global_batch} samples")
        say(f"{schedule.samples} samples, {schedule.steps_per_epoch} steps per epoch, {schedule.total_steps} in all")
        feed = _prepare(task, args, world, strategy, splits["train"], schedule, sizes.rows)
        run.describe(strategy, splits, schedule, feed.bound)
        evaluation = Evaluation(task, args, strategy, splits, feed)
        evaluation.try_out()
        _train(args, strategy, feed, evaluation, run)
        _finish(task, strategy, evaluation, run)


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
        world.device,
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
    find_bound(strategy, feed, rule, CudaMeter(world.device) if world.device.type == "cuda" else None)
    return feed


def _train(args: Arguments, strategy: Strategy, feed: Feed, evaluation: "Evaluation", run: Run) -> None:
    schedule = feed.schedule
    stepper = Stepper(strategy, feed, learning_rate(args, schedule.total_steps), args.seed, args.skip_nonfinite_steps)
    due = evaluation_steps(args, schedule)
    with run.training(schedule, feed):
        for work in feed:
            update, work = stepper.take(work)
            run.step(work, update, stepper.learning_rate(work.step.number))
            last = work.step.number == schedule.total_steps
            if due(work.step.number, work.step.ends_epoch) and not last:
                run.evaluated(work, evaluation.run("validation"))


def _finish(task: Task, strategy: Strategy, evaluation: "Evaluation", run: Run) -> None:
    """The model, before anything else can fail; then the final evaluation, predictions and summary."""
    if run.args.diagnostics:
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
    tables: dict[str, np.ndarray] = field(default_factory=dict)

    def run(self, split: str) -> dict[str, Any]:
        """The figures of a split; none where there is no such split or it has no labels."""
        if split not in self.splits:
            return {}
        start = time.perf_counter()
        samples = self.splits[split]
        table = self.tables[split] = outputs(self.strategy, self.task, samples, self._bound())
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
        """A few batches of every split, to fail now rather than after training."""
        for samples in (samples for split, samples in self.splits.items() if split != "train"):
            outputs(self.strategy, self.task, samples, self._bound(), EARLY_BATCHES)

    def _bound(self) -> Bound:
        rows = (self.args.per_device_eval_batch_size or DEFAULT_EVAL_ROWS) * self.strategy.devices
        return Bound(rows, self.feed.bound.tokens, self.feed.bound.area)
