"""From flags to the numbers of a step: global batch, steps, learning rate. All faults at once."""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from toolkit.arguments import Arguments, changed
from toolkit.data.plan import Schedule, StreamSchedule
from toolkit.errors import nearest, raise_all

if TYPE_CHECKING:
    from toolkit.task import Streamed

DEFAULT_GLOBAL_BATCH = 32
DEFAULT_EVAL_ROWS = 64
POLYNOMIAL_END = 1e-7  # transformers' default for the last learning rate


@dataclass(frozen=True)
class BatchSizes:
    """The global batch, and the most rows of one micro-batch per device."""

    global_batch: int
    rows: int | None
    note: str | None = None  # how an inferred global batch came about


def check_flags(args: Arguments) -> list[str]:
    """What is wrong with the flags by themselves, whatever data and machine."""
    whole = (
        "global_batch_size per_device_train_batch_size gradient_accumulation_steps per_device_eval_batch_size "
        "max_steps logging_steps max_train_samples max_eval_samples max_length preprocessing_num_workers "
        "save_total_limit early_stopping_patience"
    )
    problems = [
        f"--{name} {value}: expected at least 1."
        for name in whole.split()
        if (value := getattr(args, name)) is not None and value < 1
    ]
    ranges = {
        "learning_rate": (0, math.inf),
        "weight_decay": (0, math.inf),
        "warmup_steps": (0, math.inf),
        "max_grad_norm": (0, math.inf),
        "adam_beta1": (0, 1),
        "adam_beta2": (0, 1),
        "adam_epsilon": (0, math.inf),
        "label_smoothing_factor": (0, 1),
        "skip_nonfinite_steps": (0, math.inf),
        "dataloader_num_workers": (0, math.inf),
        "seed": (0, 2**32),
    }
    for name, (low, high) in ranges.items():
        value = getattr(args, name)
        if not low <= value < high:
            limit = f"from {low} to below {high}" if high < math.inf else f"of {low} or more"
            problems.append(f"--{name} {value}: expected a finite number {limit}.")
    named = ("model_name_or_path", "config_name", "tokenizer_name")
    problems += [f"--{name} is empty: is a variable not set?" for name in named if getattr(args, name) == ""]
    if args.dropout is not None and not 0 <= args.dropout < 1:
        problems.append(f"--dropout {args.dropout}: expected a number from 0 to below 1.")
    if not 0 < args.num_train_epochs < math.inf:
        problems.append(f"--num_train_epochs {args.num_train_epochs}: expected a number above 0.")
    for name in ("warmup_steps", "eval_steps", "save_steps"):
        steps = getattr(args, name) or 0.0
        if 1 <= steps < math.inf and steps != int(steps):
            problems.append(f"--{name} {steps}: a whole number of steps, or a share of them below 1.")
    if args.eval_strategy == "steps" and args.eval_steps is None:
        problems.append("--eval_strategy steps needs --eval_steps.")
    if args.eval_strategy != "steps" and args.eval_steps is not None:
        problems.append(f"--eval_steps has no effect with --eval_strategy {args.eval_strategy}: use steps.")
    if args.save_strategy != "steps" and "save_steps" in getattr(args, "given", changed(args)):
        problems.append(f"--save_steps has no effect with --save_strategy {args.save_strategy}: use steps.")
    for name in ("eval_steps", "save_steps"):
        steps = getattr(args, name)
        if steps is not None and not 0 < steps < math.inf:
            problems.append(f"--{name} {steps}: a number of steps, or a share of them below 1.")
    if args.eval_strategy == "no" and (asked := best_flags(args)):
        problems.append(f"{asked}: with --eval_strategy no there is no best; use epoch or steps.")
    if args.allow_changed and not args.resume_from_checkpoint:
        problems.append("--allow_changed has no effect without --resume_from_checkpoint.")
    if args.lr_scheduler_type == "constant" and args.warmup_steps:
        problems.append("--warmup_steps has no effect with a constant schedule: use constant_with_warmup.")
    if args.lr_scheduler_type == "polynomial" and args.learning_rate <= POLYNOMIAL_END:
        problems.append(f"a polynomial schedule ends at {POLYNOMIAL_END}: --learning_rate must be above that.")
    from toolkit import adapters  # torch comes with it

    problems += adapters.problems(args)
    problems += _attention_problems(args.attn_implementation)
    if args.hub_model_id and not args.push_to_hub:
        problems.append("--hub_model_id has no effect without --push_to_hub.")
    if args.gradient_accumulation_steps is not None and args.per_device_train_batch_size is None:
        problems.append(
            "--gradient_accumulation_steps alone says nothing: add --per_device_train_batch_size, or give "
            "--global_batch_size and let the machine decide how to cut it."
        )
    return problems


def _attention_problems(name: str | None) -> list[str]:
    """A kernel of the Hub, `owner/name`, is not looked up here."""
    if name is None or "/" in name:
        return []
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    from toolkit.attention import PADDED, UNPADDED

    # A name with a bar is for generation, not training.
    known = {"eager", *(key for key in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in key)} - {PADDED, UNPADDED}
    if name in known:
        return []
    return [
        f"--attn_implementation {name}: unknown attention implementation, expected one of {', '.join(sorted(known))}."
        f"{nearest(name.lower(), known)}"
    ]


def best_flags(args: Arguments) -> str:
    """The flags given that need an evaluation to be the best, for a message; empty: there is none."""
    names = ("load_best_model_at_end", "early_stopping_patience", "metric_for_best_model")
    return " and ".join(f"--{name}" for name in names if getattr(args, name))


def best_metric(args: Arguments) -> str:
    """The figure that tells the best evaluation."""
    return (args.metric_for_best_model or "loss").removeprefix("eval_")


def best_problems(args: Arguments, metrics: Collection[str]) -> list[str]:
    """What stands against telling the best evaluation, where that is asked for.

    Args:
        metrics: names of an evaluation's figures; none where nothing is evaluated.
    """
    asked, metric = best_flags(args), best_metric(args)
    if not asked or metric in metrics:
        return []
    if not metrics:
        return [f"{asked}: there is no labelled validation data to tell the best by."]
    return [f"--metric_for_best_model {metric}: an evaluation has {', '.join(metrics)}.{nearest(metric, metrics)}"]


def batch_sizes(args: Arguments, devices: int) -> tuple[BatchSizes, list[str]]:
    """The global batch, from the flags and the number of data-parallel devices."""
    rows, accumulation, wanted = (
        args.per_device_train_batch_size,
        args.gradient_accumulation_steps,
        args.global_batch_size,
    )
    if rows is not None and accumulation is not None:
        product = rows * accumulation * devices
        sum_text = f"{rows} per device x {accumulation} accumulation steps x {devices} devices = {product}"
        problems = []
        if wanted is not None and wanted != product:
            problems.append(f"--global_batch_size {wanted} contradicts {sum_text}: leave one of them out.")
        return BatchSizes(product, rows, f"global batch {sum_text}"), problems
    chosen = wanted or DEFAULT_GLOBAL_BATCH
    problems = []
    if rows is not None and rows > chosen:
        problems.append(
            f"--per_device_train_batch_size {rows} is only the upper bound of a micro-batch, and more than the global "
            f"batch of {chosen}. Set --global_batch_size (samples per optimizer step), or add "
            "--gradient_accumulation_steps 1 to mean HF Trainer's arithmetic."
        )
    return BatchSizes(chosen, rows), problems


def make_schedule(
    args: Arguments, global_batch: int, lengths: np.ndarray, stream: "Streamed | None" = None
) -> Schedule | StreamSchedule:
    """All steps of the run.

    Args:
        lengths: of the training samples.
        stream: where they come from in their stead; needs `--max_steps`.

    Raises:
        UserError: the warm-up is longer than the run.
    """
    per_epoch = -(-len(lengths) // global_batch)
    total = args.max_steps or max(1, math.ceil(args.num_train_epochs * per_epoch - 1e-9))
    if args.warmup_steps >= 1 and args.warmup_steps > total:
        raise_all(
            [
                f"--warmup_steps {args.warmup_steps:g} is longer than the whole run of {total} steps: the rate "
                "would never be reached. Use fewer, or a share below 1."
            ]
        )
    if stream is not None:
        return StreamSchedule(stream, global_batch, total)
    by_length = lengths if args.train_sampling_strategy == "group_by_length" else None
    return Schedule(len(lengths), global_batch, total, args.seed, by_length)


def learning_rate(args: Arguments, total_steps: int) -> Callable[[int], float]:
    """The learning rate of step number 1, 2, … as transformers' schedules of these names define it."""
    import torch
    from transformers import get_scheduler

    share = args.warmup_steps if args.warmup_steps < 1 else 0
    warmup = math.ceil(share * total_steps) if share else int(args.warmup_steps)
    # A polynomial's factor depends on the rate itself.
    placeholder = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=args.learning_rate)
    schedule = get_scheduler(args.lr_scheduler_type, placeholder, warmup, total_steps)
    factor = schedule.lr_lambdas[0]
    return lambda step: args.learning_rate * factor(step - 1)


def evaluation_steps(args: Arguments, schedule: Schedule) -> Callable[[int, bool], bool]:
    """Whether to evaluate after a step, given its number and whether it ends an epoch."""
    if args.eval_strategy == "no":
        return lambda number, ends_epoch: False
    if args.eval_strategy == "epoch":
        return lambda number, ends_epoch: ends_epoch
    share = args.eval_steps if args.eval_steps < 1 else 0
    every = max(1, math.ceil(share * schedule.total_steps)) if share else int(args.eval_steps)
    return lambda number, ends_epoch: number % every == 0
