"""Pipelines of several processes: the step of one process, whatever the stages, micro-batches and schedule."""

import json
import time

import pytest
import torch
from safetensors.torch import load_file

from tests.lm import EXACT, TinyLM, furthest, plain_steps, prepare, random_rows, train
from tests.ranks import on_ranks
from tests.runs import launch, read_rows, run_here
from tests.test_failures import LIMIT, ours, root_cause
from tests.test_parity import ROWS, differences, flags, holds, plain_loop
from tests.test_step import FIVE, MIXED, OnePoisoned, WithUnused
from tests.tiny import save_tiny_classifier, write_csv
from toolkit.data.plan import order
from toolkit.strategy.schedule import idle_share

SGD = ["--optim", "sgd", "--learning_rate", 1e-2]
SEED = 42  # the default of --seed
DROPOUT = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}


def pipeline(stages, micro_batches=None, schedule="1f1b"):
    words = ["--pipeline_stages", stages, "--pipeline_schedule", schedule]
    return words if micro_batches is None else [*words, "--pipeline_microbatches", micro_batches]


def language_model(batch, steps, *more, stages=2):
    return [*EXACT, "--global_batch_size", batch, "--max_steps", steps, *pipeline(stages), *more]


def figures(trained):
    """What every rank knows, and the parameters of its stage."""
    return {
        "losses": trained.losses,
        "norms": trained.norms,
        "applied": [update.applied for update in trained.updates],
        "weights": {name: p.detach().flatten().tolist() for name, p in trained.strategy.parameters.items()},
        "groups": trained.strategy.groups(),
        "size": trained.strategy.size,
        "name": trained.strategy.name,
        "idle": trained.strategy.idle if trained.updates else None,
    }


class Checkpointed(TinyLM):
    def model(self, **how):
        model = super().model(**how)
        model.activation_checkpointing_enable({"use_reentrant": False})
        return model


class Slow(TinyLM):
    """The passes of its two blocks take equally long, however busy the machine is."""

    def model(self, **how):
        model = super().model(**how)
        for block in model.transformer.h:
            block.mlp.register_forward_pre_hook(lambda *ignored: time.sleep(0.05))
            block.mlp.register_full_backward_hook(lambda *ignored: time.sleep(0.05))
        return model


# One launch of each number of ranks does all that ends well.

ON_TWO = {
    "1f1b": pipeline(2),
    "gpipe": pipeline(2, 5, "gpipe"),
    "one micro-batch": pipeline(2, 1),
    "small bound": [*pipeline(2, 2), "--per_device_train_batch_size", 2],
    "checkpointing": [*pipeline(2, 3), "--gradient_checkpointing"],
    "sgd": [*pipeline(2, 3), *SGD],
    "bf16": pipeline(2),
}
ON_FOUR = {
    "4 stages, 1f1b": pipeline(4),
    "4 stages, gpipe": pipeline(4, 3, "gpipe"),
    "4 stages, one micro-batch": pipeline(4, 1),
    "2 x 2": pipeline(2),
    "2 x 2, uneven": [*pipeline(2, 2, "gpipe"), "--per_device_train_batch_size", 2],
    "2 x 2, sgd": [*pipeline(2, 3), *SGD],
}


def classify(folder, runs):
    for name, words in runs.items():
        more = [*words, "--validation_file", folder / "validation.csv", "--eval_strategy", "no", "--diagnostics"]
        precision = "bf16" if name == "bf16" else "no"
        run_here(flags(folder / "model", folder / "train.csv", folder / name, *more), precision)


def evaluate(trained, task, rows):
    from toolkit.evaluate import outputs

    table = outputs(trained.strategy, task, rows, trained.feed.bound)
    return table[:, 0].tolist()


def two_ranks(folder):
    classify(folder, ON_TWO)
    rows = random_rows(MIXED)
    exported = train(TinyLM(rows), language_model(8, 2))
    scores = evaluate(exported, TinyLM(rows), random_rows(MIXED[:7]))
    weights = {name: tensor for name, tensor in exported.strategy.weights() if tensor is not None}
    written = len(weights)
    if written:
        exported.strategy.shell().save_pretrained(folder / "lm", state_dict=weights)
    unused = train(WithUnused(rows), language_model(4, 2, "--weight_decay", 0.1))
    names = [name for name, _ in unused.strategy.weights()]
    checkpointed = train(Checkpointed(rows, **DROPOUT), language_model(8, 3))
    held = prepare(TinyLM(rows), language_model(8, 2, "--optim", "adamw", "--learning_rate", 1e-3))
    works = iter(held.feed)
    held.stepper.take(next(works))
    return {
        "mixed": figures(train(TinyLM(rows), language_model(8, 2))),
        "five rows": figures(train(TinyLM(random_rows(FIVE)), language_model(5, 2))),
        "one row": figures(train(TinyLM(random_rows([10])), language_model(4, 2))),
        "untied": figures(train(TinyLM(rows, tie_word_embeddings=False), language_model(8, 2))),
        "fp16": figures(train(TinyLM(rows), language_model(8, 2), "fp16")),
        "poisoned": figures(
            train(OnePoisoned(random_rows([10] * 8)), language_model(4, 2, "--skip_nonfinite_steps", 1))
        ),
        "dropout": [figures(train(TinyLM(rows, **DROPOUT), language_model(8, 3))) for _ in range(2)],
        "dropout, checkpointed": figures(checkpointed),
        "unused": figures(unused),
        "unused names": names,
        "scores": scores,
        "written": written,
        "held": held_between(held, next(works)),
        "idle": {
            count: train(Slow(rows), language_model(8, 2, "--pipeline_microbatches", count)).strategy.idle
            for count in (1, 8)
        },
    }


def held_between(trained, work):
    """Bytes held between the passes and the update of a second step, and how many parameters are there."""
    from toolkit.strategy.base import Seed

    trained.strategy.run(work.batches, sum(batch.weight for batch in work.batches), Seed(0, 2))
    return trained.strategy.held(), sum(p.numel() for p in trained.strategy.parameters.values())


def four_ranks(folder):
    classify(folder, ON_FOUR)
    rows = random_rows(MIXED)
    task = TinyLM(rows)
    trained = train(task, language_model(8, 2))
    return {
        "mixed": figures(trained),
        "scores": evaluate(trained, task, random_rows(MIXED[:7])),
        "five rows": figures(train(TinyLM(random_rows(FIVE)), language_model(5, 2))),
        "one row": figures(train(TinyLM(random_rows([10])), language_model(4, 2))),
        "poisoned": figures(
            train(OnePoisoned(random_rows([10] * 8)), language_model(4, 2, "--skip_nonfinite_steps", 1))
        ),
    }


def prepare_folder(folder):
    """A classifier of 4 layers, and data."""
    # With these initial weights the norm is above the clip in about half of the steps.
    save_tiny_classifier(folder / "model", num_hidden_layers=4, initializer_range=0.15)
    write_csv(folder / "train.csv", ROWS, seed=3)
    write_csv(folder / "validation.csv", 7, seed=4)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return prepare_folder(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="module")
def reference(folder):
    losses, norms, _ = plain_loop(folder / "model", folder / "train.csv")
    assert 3 <= sum(norm > 1 for norm in norms) <= len(norms) - 3, norms  # the clip acts in some steps
    return losses, norms


@pytest.fixture(scope="module")
def two(folder):
    return on_ranks(two_ranks, 2, folder)


@pytest.fixture(scope="module")
def four(folder):
    return on_ranks(four_ranks, 4, folder)


@pytest.mark.parametrize("name", [name for name in [*ON_TWO, *ON_FOUR] if "sgd" not in name and name != "bf16"])
def test_the_step_is_that_of_one_process(name, folder, reference, request):
    request.getfixturevalue("two" if name in ON_TWO else "four")
    rows = read_rows(folder / name)
    assert holds(rows, reference), differences(rows, reference)


def test_bf16(two, folder, reference):
    rows = read_rows(folder / "bf16")
    assert holds(rows, reference, 1e-2, 2e-2), differences(rows, reference)
    assert not holds(rows, reference), "the precision asked for had no effect"


@pytest.mark.parametrize("name", ["sgd", "2 x 2, sgd"])
def test_final_weights_under_sgd(name, folder, request):
    request.getfixturevalue("two" if name in ON_TWO else "four")
    _, _, model = plain_loop(folder / "model", folder / "train.csv", torch.optim.SGD, 1e-2)
    saved = load_file(folder / name / "model.safetensors")
    assert furthest(saved, dict(model.named_parameters())) < 1e-6


@pytest.mark.parametrize("name", ["1f1b", "4 stages, gpipe", "2 x 2, uneven"])
def test_the_exported_model_scores_as_the_trained_one(name, folder, request):
    import csv

    import torch.nn.functional as F
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    request.getfixturevalue("two" if name in ON_TWO else "four")
    model = AutoModelForSequenceClassification.from_pretrained(folder / name).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder / name)
    with open(folder / "validation.csv", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    inputs = tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
    with torch.no_grad():
        loss = F.cross_entropy(model(**inputs).logits, torch.tensor([["neg", "pos"].index(r["label"]) for r in rows]))
    results = json.loads((folder / name / "eval_results.json").read_text())
    assert results["eval_samples"] == 7
    assert results["eval_loss"] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("name", ["1f1b", "2 x 2"])
def test_diagnostics(name, folder, request):
    request.getfixturevalue("two" if name in ON_TWO else "four")
    found = json.loads((folder / name / "diagnostics.json").read_text())
    assert found["replicas"]["different"] == []
    assert (found["replicas"]["replicated"] > 0) == (name == "2 x 2")
    assert all(0 < rank["idle_share"] < 1 and rank["bytes_sent"] > 0 for rank in found["ranks"])


# With a language model whose embeddings are tied, so that the first and the last stage share a parameter.


@pytest.mark.parametrize("processes", [2, 4])
@pytest.mark.parametrize(
    ("name", "rows", "batches"),
    [
        ("mixed", random_rows(MIXED), [list(range(8))] * 2),
        ("one row", random_rows([10]), [[0]] * 2),  # all other micro-batches are empty
        ("five rows", random_rows(FIVE), [[0, 1, 2, 3, 4]] * 2),
    ],
)
def test_tied_embeddings(name, rows, batches, processes, request):
    ranks = request.getfixturevalue("two" if processes == 2 else "four")
    losses, norms, weights = plain_steps(TinyLM(rows).model(), rows, batches)
    names = set()
    for rank in ranks:
        assert rank[name]["losses"] == pytest.approx(losses, rel=1e-5)
        assert rank[name]["norms"] == pytest.approx(norms, rel=5e-5)
        assert rank[name]["losses"] == ranks[0][name]["losses"] and rank[name]["norms"] == ranks[0][name]["norms"]
        for key, value in rank[name]["weights"].items():
            assert (torch.tensor(value).view_as(weights[key]) - weights[key]).abs().max() < 1e-6
        names |= set(rank[name]["weights"])
        assert "transformer.wte.weight" in rank[name]["weights"]
    assert names == set(weights)
    assert sum(len(rank[name]["weights"]) for rank in ranks) == (len(weights) + 1) * processes / 2


def test_untied_embeddings(two):
    rows = random_rows(MIXED)
    model = TinyLM(rows, tie_word_embeddings=False).model()
    losses, norms, _ = plain_steps(model, rows, [list(range(8))] * 2)
    for rank in two:
        assert rank["untied"]["losses"] == pytest.approx(losses, rel=1e-5)
        assert rank["untied"]["norms"] == pytest.approx(norms, rel=5e-5)


def test_fp16_has_the_norm_of_fp32(two):
    rows = random_rows(MIXED)
    losses, norms, _ = plain_steps(TinyLM(rows).model(), rows, [list(range(8))] * 2)
    for rank in two:
        assert rank["fp16"]["norms"] == pytest.approx(norms, rel=2e-2)
        assert rank["fp16"]["losses"] == pytest.approx(losses, rel=1e-2)


@pytest.mark.parametrize("processes", [2, 4])
def test_a_loss_that_is_not_finite_changes_nothing_on_any_rank(processes, request):
    ranks = request.getfixturevalue("two" if processes == 2 else "four")
    rows = random_rows([10] * 8)
    batches = order(SEED, 0, 8, 4)
    _, _, weights = plain_steps(TinyLM(rows).model(), rows, [batch for batch in batches if 3 not in batch])
    for rank in ranks:
        assert rank["poisoned"]["applied"] == [3 not in batch for batch in batches]
        for key, value in rank["poisoned"]["weights"].items():
            assert (torch.tensor(value).view_as(weights[key]) - weights[key]).abs().max() < 1e-6


def test_dropout_repeats_also_where_layers_run_again(two):
    for rank in two:
        first, second = rank["dropout"]
        assert first == {**second, "idle": first["idle"]}
        assert rank["dropout, checkpointed"] == {**first, "idle": rank["dropout, checkpointed"]["idle"]}
        assert len(set(first["losses"])) == 3


def test_the_whole_model_is_described_and_named_on_every_rank(two):
    rows = random_rows(MIXED)
    plain = prepare(WithUnused(rows), [*EXACT, "--max_steps", 1, "--weight_decay", 0.1]).strategy
    for rank in two:
        assert rank["unused"]["groups"] == plain.groups()
        assert tuple(rank["unused"]["size"]) == tuple(plain.size)
        assert rank["unused names"] == [name for name, _ in plain.weights()]
        assert "spare.weight" not in rank["unused"]["weights"]
    assert [rank["written"] for rank in two] == [len(plain.model.state_dict()) - 2, 0]  # without the spare layer
    assert two[0]["mixed"]["name"] == "pipeline of 2 stages (1f1b)"


def test_a_language_model_is_exported_and_scored(two, four, folder):
    from transformers import GPT2LMHeadModel

    rows = random_rows(MIXED[:7])
    task = TinyLM(rows)
    model = GPT2LMHeadModel.from_pretrained(folder / "lm").eval()
    batch = task.collate([rows[i] for i in range(7)], list(range(7)), 0)
    with torch.no_grad():
        expected = task.loss(model(**batch.inputs), batch).tolist()
    for rank in [*two, *four]:
        assert rank["scores"] == pytest.approx(expected, rel=1e-5)
    assert model.lm_head.weight is model.transformer.wte.weight


def test_a_stage_holds_16_bytes_for_each_of_its_parameters(two):
    for rank in two:
        held, parameters = rank["held"]
        steps = 8 * 4 * 2  # AdamW keeps a step number for each parameter
        assert held["parameters"] == held["gradients"] == 4 * parameters
        assert 0 <= held["optimizer"] - 8 * parameters <= 8 * steps


@pytest.mark.parametrize("micro_batches", [1, 8])
def test_the_measured_idle_share_is_that_of_the_formula(micro_batches, two):
    for rank in two:
        assert rank["idle"][str(micro_batches)] == pytest.approx(idle_share(2, micro_batches), abs=0.1)


def test_a_rank_that_fails_ends_the_job(folder, tmp_path):
    words = flags(folder / "model", folder / "train.csv", tmp_path / "out", "--max_steps", 1_000_000, *pipeline(2))
    result = launch(["tests/faults.py", "fail", "1", "3", *words], 2, timeout=LIMIT)
    assert result.returncode != 0
    lines = ours(result.stderr)
    assert lines[-2:] == ["ZeroDivisionError: planted in this rank", "after step 3 of 1000000"]
    assert sum("Traceback" in line for line in lines) == 1
    assert "rank      : 1 " in root_cause(result.stderr)
