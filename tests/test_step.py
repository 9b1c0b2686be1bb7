"""The step by itself, with a language model of a few lines: normalisation, failures, updates."""

import math
import os
import re

import numpy as np
import pytest
import torch
from torch import nn

from tests.lm import EXACT, IGNORED, Rows, TinyLM, furthest, plain_steps, prepare, random_rows, train
from tests.ranks import on_ranks, start
from toolkit.data.plan import order
from toolkit.errors import UserError

ALONE = ["--per_device_train_batch_size", 1]
DATA_PARALLEL = ["--data_parallel", "--data_parallel_replicas", 2]
UNEVEN = [4, 31]  # A01: 3 and 30 targets
MIXED = [31, 4, 12, 20, 7, 7, 25, 3]
FIVE = [10, 9, 8, 7, 6]
SEED = 42  # the flags' default


def flags(batch, steps, *more):
    return [*EXACT, "--global_batch_size", batch, "--max_steps", steps, *more]


def half_empty(lengths):
    """A07: rows of which every second one has no target."""
    rows = random_rows(lengths)
    for labels in rows.labels[1::2]:
        labels[:] = [IGNORED] * len(labels)
    return rows


@pytest.mark.parametrize("more", [[], ALONE, DATA_PARALLEL, [*DATA_PARALLEL, "--data_parallel_loss", "replica"]])
def test_a01_targets_weigh_the_same_in_every_cut(more):
    rows = random_rows(UNEVEN)
    losses, _, weights = plain_steps(TinyLM(rows).model(), rows, [[0, 1]])
    trained = train(TinyLM(rows), flags(2, 1, *more))
    assert trained.losses == pytest.approx(losses, rel=1e-6)
    assert furthest(trained.weights, weights) < 1e-6


def test_a03_loss_and_norm_are_not_divided_by_micro_batches():
    rows = random_rows([10] * 8)
    batches = order(SEED, 0, 8, 4)
    losses, norms, weights = plain_steps(TinyLM(rows).model(), rows, batches)
    for more in ([], ALONE):
        trained = train(TinyLM(rows), flags(4, 2, *more))
        assert trained.losses == pytest.approx(losses, rel=1e-6)
        assert trained.norms == pytest.approx(norms, rel=1e-5)
        assert furthest(trained.weights, weights) < 1e-6


def test_a05_every_step_has_its_own_global_batch():
    trained = train(TinyLM(random_rows([10] * 4)), flags(2, 2, *ALONE))
    assert [len(batches) for batches in trained.ids] == [2, 2]
    steps = [sorted(i for ids in batches for i in ids) for batches in trained.ids]
    assert steps == [sorted(batch.tolist()) for batch in order(SEED, 0, 4, 2)]


@pytest.mark.parametrize("more", [[], ALONE])
def test_a07_a_row_without_targets_counts_for_nothing(more):
    rows = half_empty([9, 12])
    losses, _, weights = plain_steps(TinyLM(rows).model(), rows, [[0]])
    trained = train(TinyLM(rows), flags(2, 1, *more))
    assert trained.losses == pytest.approx(losses, rel=1e-6)
    assert furthest(trained.weights, weights) < 1e-6


def test_a07_a_step_without_any_target_is_an_error():
    rows = Rows([[1, 2, 3], [4, 5]], [[IGNORED] * 3, [IGNORED] * 2])
    with pytest.raises(UserError, match=r"step 1: none of the samples .* has a target"):
        train(TinyLM(rows), flags(2, 1))


class SmallMemory(TinyLM):
    """A11: a forward pass of more than `limit` rows does not fit."""

    limit = 4

    def model(self, **how):
        model = super().model(**how)
        forward = model.forward
        self.passes = []

        def limited(*args, **inputs):
            rows = len(inputs["input_ids"])
            if rows > self.limit:
                raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
            self.passes.append(rows)
            return forward(*args, **inputs)

        model.forward = limited
        return model


@pytest.mark.parametrize("lengths", [[10] * 32, MIXED * 4])
def test_a11_out_of_memory_cuts_the_step_finer(lengths, capfd):
    rows = random_rows(lengths)
    plenty = train(TinyLM(rows), flags(16, 2))
    task = SmallMemory(rows)
    scarce = train(task, flags(16, 2))
    assert len(scarce.updates) == 2
    assert scarce.losses == pytest.approx(plenty.losses, rel=1e-6)
    assert furthest(scarce.weights, plenty.weights) < 1e-6
    assert max(task.passes) <= 4
    said = capfd.readouterr().err
    assert "out of memory in step 1" in said and "The global batch stays the same" in said
    if len(set(lengths)) == 1:
        assert scarce.feed.bound.rows_at(10) == 4  # 16, 8, 4, and not less than needed
        assert "in step 2" not in said


def test_a11_a_single_sample_that_does_not_fit_is_an_error():
    task = SmallMemory(random_rows([10] * 4))
    trained = prepare(task, flags(4, 1))
    task.limit = 0
    with pytest.raises(UserError, match=r"step 1 .* 1 rows? .*lower --max_length"):
        trained.stepper.take(next(iter(trained.feed)))


def test_an_error_that_is_not_about_memory_is_not_swallowed():
    task = SmallMemory(random_rows([10] * 4))
    trained = prepare(task, flags(4, 1))
    trained.strategy.model.forward = lambda **inputs: (_ for _ in ()).throw(RuntimeError("shapes do not match"))
    with pytest.raises(RuntimeError, match="shapes do not match"):
        trained.stepper.take(next(iter(trained.feed)))


def test_k03_a_nan_weight_stops_the_run():
    trained = prepare(TinyLM(random_rows([10] * 8)), flags(4, 5))
    with torch.no_grad():
        trained.strategy.model.transformer.h[0].mlp.c_fc.weight[0, 0] = math.nan
    ids = ", ".join(map(str, order(SEED, 0, 8, 4)[0]))
    with pytest.raises(UserError) as stopped:
        trained.stepper.take(next(iter(trained.feed)))
    message = str(stopped.value)
    for part in ("step 1:", "loss nan", "learning rate 1,", f"samples {ids}:", "--skip_nonfinite_steps"):
        assert part in message
    others = [p for n, p in trained.weights.items() if n != "transformer.h.0.mlp.c_fc.weight"]
    assert all(p.isfinite().all() for p in others), "the update was made all the same"


def test_k03_a_diverged_run_stops_with_its_learning_rate():
    with pytest.raises(UserError, match=r"step [2-5]: loss .* learning rate 1e\+30"):
        train(TinyLM(random_rows([10] * 8)), [*flags(4, 5), "--learning_rate", "1e30"])


class OnePoisoned(TinyLM):
    """The loss of sample 3 is not finite, in every epoch."""

    def loss(self, outputs, batch):
        bad = torch.tensor([i == 3 for i in batch.ids] + [False] * (len(batch.targets) - len(batch.ids)))
        return torch.where(bad, math.inf, 1.0) * super().loss(outputs, batch)


def test_k03_some_steps_may_be_skipped(capfd):
    rows = random_rows([10] * 8)
    trained = train(OnePoisoned(rows), flags(4, 2, "--skip_nonfinite_steps", 1))
    poisoned = [3 in batch for batch in order(SEED, 0, 8, 4)]
    assert [update.applied for update in trained.updates] == [not bad for bad in poisoned]
    assert "skipped (1 of 1 allowed)" in capfd.readouterr().err
    healthy = [batch for batch, bad in zip(order(SEED, 0, 8, 4), poisoned) if not bad]
    _, _, weights = plain_steps(TinyLM(rows).model(), rows, healthy)
    assert furthest(trained.weights, weights) < 1e-6
    with pytest.raises(UserError, match=r"step [34]: loss inf"):
        train(OnePoisoned(rows), flags(4, 4, "--skip_nonfinite_steps", 1))


def test_fp16_overflow_skips_the_step_and_goes_on():
    rows = random_rows([10] * 12)
    trained = prepare(TinyLM(rows), flags(4, 3), "fp16")
    precision = trained.strategy.precision
    precision.scale = 2.0**40  # far too large: gradients overflow in float16
    works = iter(trained.feed)
    before = {name: p.detach().clone() for name, p in trained.weights.items()}
    first, _ = trained.stepper.take(next(works))
    assert not first.applied and math.isfinite(first.loss) and not math.isfinite(first.grad_norm)
    assert furthest(trained.weights, before) == 0
    assert precision.scale == 2.0**39
    precision.scale = 2.0**10
    second, _ = trained.stepper.take(next(works))
    assert second.applied and furthest(trained.weights, before) > 0
    assert trained.stepper.skipped == 0  # no fault
    # The step is consumed: the second one has the second global batch.
    losses, _, _ = plain_steps(TinyLM(rows).model(), rows, [order(SEED, 0, 12, 4)[1]])
    assert second.loss == pytest.approx(losses[0], rel=1e-2)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_fp16_overflows_with_any_number_of_ranks_alike(ranks):
    """The loss is multiplied by the number of data ranks, which must not cost room below the largest number."""

    def norm(scale, data_world):
        trained = prepare(TinyLM(random_rows([10] * 12)), flags(4, 1), "fp16")
        trained.strategy.data_world = data_world  # whose mean is this one rank's gradient times their number
        trained.strategy.precision.scale = scale
        update, _ = trained.stepper.take(next(iter(trained.feed)))
        return update.grad_norm / data_world

    scale = 2.0**16
    while math.isfinite(expected := norm(2 * scale, 1)):
        scale *= 2
    assert norm(scale, ranks) == pytest.approx(norm(scale, 1), rel=1e-3)
    assert not math.isfinite(expected)
    assert ranks == 3 or not math.isfinite(norm(2 * scale, ranks))


def test_fp16_that_overflows_at_any_scale_stops():
    trained = prepare(TinyLM(random_rows([10] * 12)), flags(4, 3), "fp16")
    trained.strategy.precision.scale = 1.0
    with torch.no_grad():
        trained.strategy.model.lm_head.weight.mul_(1e6)  # logits beyond float16
    with pytest.raises(UserError, match="step 1"):
        trained.stepper.take(next(iter(trained.feed)))


@pytest.mark.parametrize("more", [[], ALONE, DATA_PARALLEL, [*DATA_PARALLEL, "--data_parallel_loss", "replica"]])
def test_k05_fp16_clips_by_the_unscaled_norm(more):
    rows = random_rows(MIXED * 2)
    sgd = ["--optim", "sgd", "--learning_rate", 1, "--global_batch_size", 4, "--max_steps", 5, "--max_grad_norm", 0.5]
    exact = train(TinyLM(rows), sgd)
    half = train(TinyLM(rows), [*sgd, *more], "fp16")
    assert min(exact.norms) > 0.5, "the clip should act"
    assert half.norms == pytest.approx(exact.norms, rel=2e-2)
    assert half.losses == pytest.approx(exact.losses, rel=1e-2)


class WithUnused(TinyLM):
    """A model with a layer that the loss does not reach."""

    def model(self, **how):
        model = super().model(**how)
        model.spare = nn.Linear(4, 4)
        return model


def test_parameters_without_gradient_are_named_once_and_left_out(capfd):
    trained = train(WithUnused(random_rows(MIXED)), [*flags(4, 3), "--weight_decay", 0.1])
    said = capfd.readouterr().err
    assert re.findall(r"2 parameters take no part in the loss .*: (.*)", said) == ["spare.weight, spare.bias"]
    named = [name for group in trained.strategy.groups() for name in group["names"]]
    assert not [name for name in named if name.startswith("spare")]
    fresh = WithUnused(random_rows(MIXED)).model()
    assert torch.equal(trained.weights["spare.weight"], fresh.spare.weight)
    assert {"spare.weight", "spare.bias"} <= {name for name, _ in trained.strategy.weights()}


def test_decay_acts_on_matrices_outside_normalisation():
    trained = prepare(TinyLM(random_rows(MIXED)), [*flags(4, 1), "--weight_decay", 0.1])
    groups = {group["weight_decay"]: set(group["names"]) for group in trained.strategy.groups()}
    matrices = {"transformer.wte.weight", "transformer.wpe.weight"}
    for layer in (0, 1):
        for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            matrices.add(f"transformer.h.{layer}.{name}.weight")
    assert groups[0.1] == matrices
    assert groups[0.0] == set(trained.weights) - matrices
    assert "transformer.ln_f.weight" in groups[0.0] and "transformer.h.0.mlp.c_fc.bias" in groups[0.0]


@pytest.mark.parametrize(
    ("name", "shape", "decayed"),
    [
        ("bert.encoder.layer.0.attention.output.LayerNorm.weight", (8,), False),
        ("model.layers.0.input_layernorm.weight", (8, 1), False),
        ("h.0.ln_1.weight", (2, 8), False),
        ("layer.0.batch_norm.weight", (2, 8), False),
        ("encoder.normalizer_free.dense.weight", (8, 8), True),
        ("classifier.weight", (2, 8), True),
        ("classifier.bias", (2,), False),
        ("decoder.vln.weight", (8, 8), True),
        ("weight", (8, 8), True),
    ],
)
def test_decay_by_name_and_full_shape(name, shape, decayed):
    from toolkit.strategy.base import OptimizerRule

    assert OptimizerRule("adamw", (0.9, 0.999), 1e-8, 0.1, 1.0).decayed(name, shape) is decayed


def test_decay_is_that_of_torch():
    rows = random_rows(MIXED)
    words = ["--global_batch_size", 8, "--max_steps", 3, "--learning_rate", 0.1, "--weight_decay", 0.5]
    trained = train(TinyLM(rows), [*words, "--lr_scheduler_type", "constant", "--max_grad_norm", 0])
    model = TinyLM(rows).model()
    parameters = dict(model.named_parameters())
    matrices = [p for p in parameters.values() if p.ndim == 2]
    others = [p for p in parameters.values() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    losses = []
    for epoch in range(3):
        optimizer.zero_grad()
        batch = TinyLM(rows).collate([rows[i] for i in order(SEED, epoch, 8, 8)[0]], range(8), 0)
        loss = TinyLM(rows).loss(model(**batch.inputs), batch).sum() / batch.weight
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    # Adam divides rounding by rounding where a gradient is about zero: key biases differ, losses do not.
    assert trained.losses == pytest.approx(losses, rel=1e-4)
    assert torch.allclose(trained.weights["transformer.wte.weight"], parameters["transformer.wte.weight"], atol=1e-3)


class WithBatchNorm(TinyLM):
    def model(self, **how):
        model = super().model(**how)
        normalise = nn.BatchNorm1d(32)
        final = model.transformer.ln_f
        model.transformer.ln_f = nn.Sequential(final, _Channels(normalise))
        return model


class _Channels(nn.Module):
    def __init__(self, normalise):
        super().__init__()
        self.normalise = normalise

    def forward(self, hidden):
        return self.normalise(hidden.transpose(1, 2)).transpose(1, 2)


def test_batch_normalisation_is_said(capfd):
    prepare(WithBatchNorm(random_rows(MIXED)), flags(4, 1))
    assert "batch normalisation: its training depends on how a step is cut" in capfd.readouterr().err
    prepare(TinyLM(random_rows(MIXED)), flags(4, 1))
    assert "batch normalisation" not in capfd.readouterr().err


# Under DDP. One launch does all that ends well.


def two_ranks(folder):
    def run(task, *words, precision="no", noise=False):
        trained = prepare(task, words, precision)
        for work in trained.feed:
            if noise and os.environ["RANK"] == "0":
                torch.rand(7), np.random.rand(7)  # E03: what one rank does alone
            trained.ids.append([batch.ids for batch in work.batches])
            trained.updates.append(trained.stepper.take(work)[0])
        return {
            "losses": trained.losses,
            "norms": trained.norms,
            "weights": {name: p.detach().flatten().tolist() for name, p in trained.weights.items()},
            "applied": [update.applied for update in trained.updates],
            "ids": trained.ids,
        }

    return {
        "uneven": run(TinyLM(random_rows(UNEVEN)), *flags(2, 1)),
        "half empty": run(TinyLM(half_empty([9, 12])), *flags(2, 1)),
        "five rows": run(TinyLM(random_rows(FIVE)), *flags(5, 2, "--per_device_train_batch_size", 2)),
        "one row": run(TinyLM(random_rows([10])), *flags(4, 2)),
        "several micro-batches": run(TinyLM(random_rows(MIXED)), *flags(8, 2, *ALONE)),
        "noise": run(TinyLM(random_rows(MIXED)), *flags(3, 6), noise=True),
        "unused": run(WithUnused(random_rows(MIXED)), *flags(4, 3)),
        "poisoned": run(OnePoisoned(random_rows([10] * 8)), *flags(4, 2, "--skip_nonfinite_steps", 1)),
        "fp16": run(TinyLM(random_rows(MIXED)), *flags(8, 2), precision="fp16"),
    }


@pytest.fixture(scope="module")
def ddp(tmp_path_factory):
    return on_ranks(two_ranks, 2, tmp_path_factory.mktemp("two_ranks"))


@pytest.mark.parametrize(
    ("name", "rows", "batches"),
    [
        ("uneven", random_rows(UNEVEN), [[0, 1]]),
        ("half empty", half_empty([9, 12]), [[0]]),
        ("five rows", random_rows(FIVE), [[0, 1, 2, 3, 4]] * 2),
        ("one row", random_rows([10]), [[0]] * 2),
        ("several micro-batches", random_rows(MIXED), [list(range(8))] * 2),
        ("noise", random_rows(MIXED), [*order(SEED, 0, 8, 3), *order(SEED, 1, 8, 3)]),
    ],
)
def test_ddp_takes_the_step_of_one_process(name, rows, batches, ddp):
    losses, norms, weights = plain_steps(TinyLM(rows).model(), rows, batches)
    for rank in ddp:
        assert rank[name]["losses"] == pytest.approx(losses, rel=1e-5)
        assert rank[name]["norms"] == pytest.approx(norms, rel=5e-5)  # K07: of all micro-batches, once
        found = {key: torch.tensor(value).reshape(weights[key].shape) for key, value in rank[name]["weights"].items()}
        assert furthest(found, weights) < 1e-6


@pytest.mark.parametrize(("name", "samples", "per_epoch"), [("five rows", 5, 1), ("one row", 1, 1), ("noise", 8, 3)])
def test_a09_e01_e03_ranks_share_the_rows_of_an_epoch(name, samples, per_epoch, ddp):
    runs = [rank[name]["ids"] for rank in ddp]
    assert len(runs[0]) == len(runs[1]) == 2 * per_epoch
    for epoch in (0, 1):
        steps = slice(epoch * per_epoch, (epoch + 1) * per_epoch)
        seen = [i for run in runs for batches in run[steps] for ids in batches for i in ids]
        assert sorted(seen) == list(range(samples))
    for step in range(2 * per_epoch):
        assert len(runs[0][step]) == len(runs[1][step])  # the same number of passes, a filler where need be


def test_ddp_leaves_unused_parameters_out(ddp):
    fresh = WithUnused(random_rows(MIXED)).model()
    for rank in ddp:
        assert rank["unused"]["weights"]["spare.weight"] == fresh.spare.weight.flatten().tolist()


def test_ddp_skips_on_all_ranks(ddp):
    for rank in ddp:
        assert rank["poisoned"]["applied"] == [3 not in batch for batch in order(SEED, 0, 8, 4)]
    assert ddp[0]["poisoned"]["weights"] == ddp[1]["poisoned"]["weights"]


def test_ddp_fp16_has_the_norm_of_fp32(ddp):
    rows = random_rows(MIXED)
    losses, norms, _ = plain_steps(TinyLM(rows).model(), rows, [list(range(8))] * 2)
    for rank in ddp:
        assert rank["fp16"]["norms"] == pytest.approx(norms, rel=2e-2)
        assert rank["fp16"]["losses"] == pytest.approx(losses, rel=1e-2)


def out_of_memory_on_one_rank(folder):
    task = SmallMemory(random_rows([10] * 32))
    trained = prepare(task, flags(16, 2))
    task.limit = 4 if os.environ["RANK"] == "1" else 100
    for work in trained.feed:
        trained.stepper.take(work)


def test_a11_under_ddp_all_ranks_end_and_the_command_is_said(tmp_path):
    result = start(out_of_memory_on_one_rank, 2, tmp_path, timeout=60)
    assert result.returncode != 0
    assert "out of memory in step 1 with a micro-batch of 8 rows of 10 tokens" in result.stderr
    assert "tests/ranks.py" in result.stderr and "--per_device_train_batch_size 4" in result.stderr
    ours = result.stderr.split("ChildFailedError")[0]  # then comes torchrun's summary, a traceback of its own
    assert "Error" not in ours.split("error: out of memory")[0]
