"""From flags to the numbers of a step: global batch, steps, learning rate."""

import math

import numpy as np
import pytest
import torch

from toolkit.arguments import SCHEDULES, Arguments
from toolkit.errors import UserError
from toolkit.settings import batch_sizes, check_flags, evaluation_steps, learning_rate, make_schedule


def schedule(samples, batch, **flags):
    return make_schedule(Arguments(**flags), batch, np.full(samples, 7))


def rates(total, **flags):
    of = learning_rate(Arguments(**flags), total)
    return [of(step) for step in range(1, total + 2)]


def sizes(devices, **flags):
    found, problems = batch_sizes(Arguments(**flags), devices)
    assert not problems
    return found.global_batch, found.rows


def problem(devices=1, **flags):
    args = Arguments(**flags)
    problems = [*check_flags(args), *batch_sizes(args, devices)[1]]
    assert len(problems) == 1, problems
    return problems[0]


def test_b01_the_rate_depends_on_the_step_alone():
    plan = schedule(16, 4, num_train_epochs=1)
    assert plan.total_steps == 4
    assert rates(4, learning_rate=1.0)[:4] == [1.0, 0.75, 0.5, 0.25]
    # HF's arithmetic on two ranks of 2 rows gives the same global batch, so the same rates.
    assert sizes(2, per_device_train_batch_size=2, gradient_accumulation_steps=1) == (4, 2)


def test_b03_total_steps_are_of_the_global_batch():
    plan = schedule(16, 4, num_train_epochs=3)
    assert (plan.total_steps, plan.steps_per_epoch, plan.epochs) == (12, 4, 3)
    assert len(list(plan.steps())) == 12


def test_b05_planned_steps_are_performed_and_the_rate_ends_at_zero():
    plan = schedule(5, 2, num_train_epochs=2)
    steps = list(plan.steps())
    assert plan.total_steps == len(steps) == 6
    assert rates(6, learning_rate=1.0)[6] == 0.0
    assert rates(6, learning_rate=1.0)[5] > 0


@pytest.mark.parametrize(
    ("samples", "batch", "flags", "total"),
    [
        (10, 4, {"num_train_epochs": 0.5}, 2),
        (10, 4, {"num_train_epochs": 1.1}, 4),
        (3, 4, {"num_train_epochs": 0.1}, 1),
        (10, 4, {"max_steps": 7, "num_train_epochs": 1}, 7),
        (30, 1, {"num_train_epochs": 0.1}, 3),  # 0.1 x 30 is a little above 3 in binary
    ],
)
def test_parts_of_an_epoch_and_max_steps(samples, batch, flags, total):
    plan = schedule(samples, batch, **flags)
    assert plan.total_steps == len(list(plan.steps())) == total


def test_b07_the_default_has_no_warm_up_and_the_flag_has_an_effect():
    assert rates(4, learning_rate=1.0)[0] == 1.0
    assert rates(4, learning_rate=1.0, warmup_steps=2)[:4] == [0.0, 0.5, 1.0, 0.5]
    assert rates(8, learning_rate=1.0, warmup_steps=0.25)[:3] == [0.0, 0.5, 1.0]  # a share of the steps
    assert rates(8, learning_rate=1.0, warmup_steps=0.3)[:4] == pytest.approx([0, 1 / 3, 2 / 3, 1])  # rounded up
    with pytest.raises(UserError, match="--warmup_steps 100 is longer than the whole run of 4 steps"):
        schedule(16, 4, num_train_epochs=1, warmup_steps=100)


@pytest.mark.parametrize("limit", [{}, {"max_steps": 5}])
def test_b09_an_epoch_shorter_than_a_batch_is_one_short_step(limit):
    plan = schedule(3, 4, num_train_epochs=2, **limit)
    steps = list(plan.steps())
    assert [len(step.ids) for step in steps] == [3] * (5 if limit else 2)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 3])
def test_schedules_are_those_of_transformers(name, warmup):
    from transformers import get_scheduler

    if name == "constant" and warmup:
        return  # refused, see below
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=5e-5)
    scheduler = get_scheduler(name, optimizer, warmup, 20)
    expected = []
    for _ in range(20):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert rates(20, lr_scheduler_type=name, warmup_steps=warmup)[:20] == pytest.approx(expected, rel=1e-9)


def test_a_learning_rate_of_zero():
    assert set(rates(4, learning_rate=0.0)) == {0.0}


def test_the_global_batch():
    assert sizes(1) == (32, None)
    assert sizes(8) == (32, None)  # the same on every machine
    assert sizes(8, global_batch_size=5) == (5, None)
    assert sizes(2, global_batch_size=64, per_device_train_batch_size=4) == (64, 4)
    assert sizes(2, per_device_train_batch_size=4) == (32, 4)
    assert sizes(4, per_device_train_batch_size=4, gradient_accumulation_steps=3) == (48, 4)
    assert sizes(4, per_device_train_batch_size=4, gradient_accumulation_steps=3, global_batch_size=48) == (48, 4)
    found, _ = batch_sizes(Arguments(per_device_train_batch_size=4, gradient_accumulation_steps=3), 2)
    assert found.note == "global batch 4 per device x 3 accumulation steps x 2 devices = 24"


def test_j11_numbers_that_disagree():
    said = problem(2, global_batch_size=32, per_device_train_batch_size=4, gradient_accumulation_steps=3)
    assert "--global_batch_size 32 contradicts 4 per device x 3 accumulation steps x 2 devices = 24" in said
    assert "--gradient_accumulation_steps alone" in problem(gradient_accumulation_steps=2)
    said = problem(per_device_train_batch_size=64)
    assert "--per_device_train_batch_size 64" in said and "Set --global_batch_size" in said
    assert "more than the global batch of 8" in problem(per_device_train_batch_size=16, global_batch_size=8)


def test_j11_accumulation_set_elsewhere(monkeypatch):
    from toolkit.launch.environment import connect

    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "8")
    with pytest.raises(UserError, match="gradient_accumulation_steps is 8"):
        connect(Arguments(per_device_train_batch_size=4, gradient_accumulation_steps=2))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"global_batch_size": 0}, "--global_batch_size 0: expected at least 1"),
        ({"attn_implementation": "spda"}, "unknown attention implementation, expected one of eager, "),
        ({"attn_implementation": "SDPA"}, "sdpa. Did you mean `sdpa`?"),
        ({"attn_implementation": "sdpa_cpu"}, "unknown attention implementation"),
        ({"max_steps": -1}, "--max_steps -1: expected at least 1"),
        ({"per_device_eval_batch_size": 0}, "--per_device_eval_batch_size 0"),
        ({"learning_rate": -1.0}, "--learning_rate -1.0"),
        ({"learning_rate": math.nan}, "--learning_rate nan"),
        ({"learning_rate": math.inf}, "--learning_rate inf"),
        ({"max_grad_norm": math.inf}, "--max_grad_norm inf"),
        ({"adam_beta2": 1.0}, "--adam_beta2 1.0"),
        ({"label_smoothing_factor": 1.0}, "--label_smoothing_factor 1.0"),
        ({"seed": -1}, "--seed -1"),
        ({"dropout": 1.0}, "--dropout 1.0"),
        ({"num_train_epochs": 0.0}, "--num_train_epochs 0.0"),
        ({"warmup_steps": 2.5}, "--warmup_steps 2.5: a whole number"),
        ({"eval_strategy": "steps"}, "--eval_strategy steps needs --eval_steps"),
        ({"eval_steps": 5.0}, "--eval_steps has no effect"),
        ({"eval_steps": 0.0, "eval_strategy": "steps"}, "--eval_steps 0.0"),
        ({"eval_steps": 2.5, "eval_strategy": "steps"}, "--eval_steps 2.5"),
        ({"eval_steps": math.inf, "eval_strategy": "steps"}, "--eval_steps inf"),
        ({"save_steps": 5.0}, "--save_steps has no effect"),
        ({"save_steps": 0.0, "save_strategy": "steps"}, "--save_steps 0.0"),
        ({"save_steps": 2.5, "save_strategy": "steps"}, "--save_steps 2.5"),
        ({"save_total_limit": 0}, "--save_total_limit 0"),
        ({"early_stopping_patience": 0}, "--early_stopping_patience 0"),
        ({"load_best_model_at_end": True, "eval_strategy": "no"}, "--load_best_model_at_end: with --eval_strategy no"),
        ({"allow_changed": ["seed"]}, "--allow_changed has no effect"),
        ({"warmup_steps": 2, "lr_scheduler_type": "constant"}, "use constant_with_warmup"),
        ({"hub_model_id": "me/model"}, "--push_to_hub"),
        ({"lr_scheduler_type": "polynomial", "learning_rate": 0.0}, "polynomial"),
    ],
)
def test_flags_out_of_range(flags, words):
    assert words in problem(**flags)


def test_an_infinite_warm_up_is_refused():
    assert any("--warmup_steps inf" in line for line in check_flags(Arguments(warmup_steps=math.inf)))


def test_all_problems_at_once():
    assert len(check_flags(Arguments(max_steps=0, seed=-1, dropout=2.0, eval_steps=3.0))) == 4
    assert check_flags(Arguments(model_name_or_path="")) == ["--model_name_or_path is empty: is a variable not set?"]
    assert check_flags(Arguments()) == []


@pytest.mark.parametrize(
    ("flags", "evaluated"),
    [
        ({"eval_strategy": "no"}, []),
        ({}, [3, 6, 7]),
        ({"eval_strategy": "steps", "eval_steps": 2}, [2, 4, 6]),
        ({"eval_strategy": "steps", "eval_steps": 0.4}, [3, 6]),
        ({"eval_strategy": "steps", "eval_steps": 0.01}, [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_when_to_evaluate(flags, evaluated):
    args = Arguments(**flags)
    plan = make_schedule(args, 4, np.full(10, 7))
    plan = type(plan)(10, 4, 7, 0)
    due = evaluation_steps(args, plan)
    assert [step.number for step in plan.steps() if due(step.number, step.ends_epoch)] == evaluated
