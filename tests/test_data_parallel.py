"""nn.DataParallel's rehearsal on a CPU: how rows are split, that nothing else changes, when it is refused."""

import math
from unittest import mock

import pytest
import torch

from tests.lm import EXACT, TinyLM, furthest, plain_steps, prepare, random_rows, train
from toolkit.arguments import Arguments
from toolkit.data.plan import order
from toolkit.errors import UserError
from toolkit.evaluate import outputs
from toolkit.launch.environment import connect
from toolkit.strategy.data_parallel import Replica

FORMS = ["gathered", "replica"]


def flags(replicas, batch, steps, *more):
    words = [
        "--data_parallel",
        "--data_parallel_replicas",
        replicas,
        "--global_batch_size",
        batch,
        "--max_steps",
        steps,
    ]
    return [*EXACT, *words, *more]


def watch(run):
    """The first token of each row that each replica's forward sees, call by call."""
    seen = []
    forward = Replica.forward

    def recording(self, targets=None, **inputs):
        seen.append(inputs["input_ids"][:, 0].tolist())
        return forward(self, targets, **inputs)

    with mock.patch.object(Replica, "forward", recording):
        result = run()
    return seen, result


@pytest.mark.parametrize("form", FORMS)
def test_64_samples_on_two_replicas_are_0_to_31_and_32_to_63(form):
    rows = random_rows([10] * 64)
    for sample, tokens in enumerate(rows.tokens):
        tokens[0] = sample  # a row is known by its first token
    task = TinyLM(rows, vocab_size=64)
    trained = prepare(task, flags(2, 64, 1, "--data_parallel_loss", form))
    work = next(iter(trained.feed))
    batch = task.collate([rows[i] for i in range(64)], list(range(64)), 0)
    whole = type(work)(work.step, [batch], work.tokens, work.padded)
    seen, _ = watch(lambda: trained.stepper.take(whole))
    assert seen == [list(range(32)), list(range(32, 64))]


@pytest.mark.parametrize(
    ("rows", "replicas", "parts"),
    [(64, 2, [32, 32]), (5, 2, [3, 2]), (1, 4, [1]), (9, 4, [3, 3, 3]), (6, 4, [2, 2, 2]), (4, 1, [4])],
)
def test_rows_are_split_as_torch_chunks_them(rows, replicas, parts):
    task = TinyLM(random_rows([10] * rows))
    trained = prepare(task, flags(replicas, rows, 1, "--per_device_train_batch_size", rows))
    seen, _ = watch(lambda: trained.stepper.take(next(iter(trained.feed))))
    if replicas == 1:
        # torch's DataParallel calls its module itself: one replica is the model.
        assert sorted(map(len, seen)) == parts
    assert [len(part) for part in seen] == parts == [len(part) for part in torch.arange(rows).chunk(replicas)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("replicas", [1, 2, 3, 4])
def test_l01_l03_the_step_is_that_of_one_device(replicas, form):
    rows = random_rows([31, 4, 12, 20, 7])
    batches = order(42, 0, 5, 4)
    losses, norms, weights = plain_steps(TinyLM(rows).model(), rows, batches)
    for more in ([], ["--per_device_train_batch_size", 1]):
        trained = train(TinyLM(rows), flags(replicas, 4, 2, "--data_parallel_loss", form, *more))
        assert all(isinstance(loss, float) for loss in trained.losses)  # one scalar, not one for each replica
        assert trained.losses == pytest.approx(losses, rel=1e-6)
        assert trained.norms == pytest.approx(norms, rel=1e-5)
        assert furthest(trained.weights, weights) < 1e-6


@pytest.mark.parametrize("form", FORMS)
def test_l01_nothing_is_warned(form, recwarn):
    train(TinyLM(random_rows([10] * 4)), flags(2, 4, 2, "--data_parallel_loss", form))
    assert not [str(warning.message) for warning in recwarn if "gather" in str(warning.message)]


@pytest.mark.parametrize("form", FORMS)
def test_l05_a_last_batch_smaller_than_the_replicas(form):
    rows = random_rows([10] * 9)
    task = TinyLM(rows)
    words = flags(4, 4, 3, "--data_parallel_loss", form, "--per_device_train_batch_size", 1)
    trained = train(task, words)
    losses, _, weights = plain_steps(TinyLM(rows).model(), rows, order(42, 0, 9, 4))  # 4, 4, 1
    assert trained.losses == pytest.approx(losses, rel=1e-6)
    assert furthest(trained.weights, weights) < 1e-6
    table = outputs(trained.strategy, task, rows, trained.feed.bound)
    assert table.shape == (9, 1) and not math.isnan(table.sum())
    with torch.no_grad():
        batch = task.collate([rows[i] for i in range(9)], list(range(9)), 0)
        alone = task.loss(trained.strategy.model(**batch.inputs), batch)
    assert torch.allclose(torch.from_numpy(table[:, 0]).float(), alone, rtol=1e-5)


def test_a_micro_batch_is_what_all_replicas_share():
    trained = prepare(TinyLM(random_rows([10] * 16)), flags(2, 16, 1, "--per_device_train_batch_size", 4))
    assert [len(batch.ids) for batch in next(iter(trained.feed)).batches] == [8, 8]
    # HF's arithmetic counts every device.
    words = ["--data_parallel", "--per_device_train_batch_size", 4, "--gradient_accumulation_steps", 3]
    trained = prepare(TinyLM(random_rows([10] * 64)), [*words, "--max_steps", 1])
    assert trained.feed.schedule.global_batch == 24


@pytest.mark.parametrize("form", FORMS)
def test_dropout_repeats_and_differs_between_replicas(form):
    dropout = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    words = flags(2, 4, 3, "--data_parallel_loss", form)
    runs = [train(TinyLM(random_rows([10] * 4), **dropout), words) for _ in range(2)]
    assert runs[0].losses == runs[1].losses
    assert furthest(runs[0].weights, runs[1].weights) == 0
    assert runs[0].losses != train(TinyLM(random_rows([10] * 4), **dropout), [*words, "--seed", 1]).losses
    # Four equal rows: were the masks of both replicas alike, so would be their outputs.
    rows = random_rows([10] * 4)
    rows.tokens = [rows.tokens[0]] * 4
    task = TinyLM(rows, **dropout)
    strategy = prepare(task, words).strategy
    batch = task.collate([rows[i] for i in range(4)], [0, 1, 2, 3], 0)
    strategy.seed(7)
    logits = strategy.forward(**batch.inputs)["logits"]
    assert not torch.equal(logits[:2], logits[2:])


def test_names_and_state_are_clean():
    plain = prepare(TinyLM(random_rows([10] * 4)), [*EXACT, "--max_steps", 1]).strategy
    strategy = prepare(TinyLM(random_rows([10] * 4)), flags(2, 4, 1)).strategy
    assert [name for name, _ in strategy.weights()] == [name for name, _ in plain.weights()]
    assert strategy.groups() == plain.groups()
    assert list(strategy.parameters) == list(plain.parameters)
    with strategy.inference():
        assert not strategy.model.training
    assert strategy.model.training


def test_the_rehearsal_is_labelled():
    strategy = prepare(TinyLM(random_rows([10] * 4)), flags(3, 4, 1)).strategy
    assert "rehearsal with 3 replicas" in strategy.name and "nothing about speed or memory" in strategy.name
    default = prepare(TinyLM(random_rows([10] * 4)), ["--data_parallel", "--max_steps", 1])
    assert default.strategy.devices == 2


def test_l09_it_is_refused_under_a_multi_process_launch(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="--data_parallel drives all GPUs from one process, but 2 were started"):
        connect(Arguments(data_parallel=True))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"data_parallel_replicas": 2}, "--data_parallel_replicas needs --data_parallel"),
        ({"data_parallel": True, "data_parallel_replicas": 0}, "--data_parallel_replicas 0: at least 1"),
    ],
)
def test_flags_that_do_not_belong(given, said):
    with pytest.raises(UserError, match=said):
        connect(Arguments(**given))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_is_entered_inside_the_replicas(precision, form):
    kinds = []

    class Watched(TinyLM):
        def model(self, **how):
            model = super().model(**how)
            model.lm_head.register_forward_hook(lambda module, inputs, output: kinds.append(output.dtype))
            return model

    trained = prepare(Watched(random_rows([10] * 4)), flags(2, 4, 1, "--data_parallel_loss", form), precision)
    kinds.clear()
    trained.stepper.take(next(iter(trained.feed)))
    assert kinds == [{"bf16": torch.bfloat16, "fp16": torch.float16}[precision]] * 2
