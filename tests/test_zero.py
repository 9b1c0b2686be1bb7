"""DeepSpeed ZeRO: the losses of one process, the bytes of its formula, and mistakes said plainly."""

import json
import os
import re
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.lm import EXACT, TinyLM, furthest, plain_steps, prepare, random_rows, train
from tests.ranks import on_ranks
from tests.runs import launch, planted, read_rows, run_here
from tests.test_failures import LIMIT, ours
from tests.test_parity import CLIP, STEPS, differences, flags, holds, plain_loop
from tests.tiny import write_csv
from toolkit.data.plan import order
from toolkit.errors import UserError

# Stage, and what is offloaded.
VARIANTS = {"1": (1,), "2": (2,), "3": (3,), "2 offload": (2, "optimizer"), "3 offload": (3, "optimizer", "param")}
FAULTS = [
    "divided by ranks",
    "divided by micro-batches",
    "clipping left out",
    "clipping before unscaling",
    "last micro-batch dropped",
    "one sample twice",
    "one rank not reduced",
    "learning rate late",
]
LM_ROWS = random_rows([3, 9, 5, 14, 7, 20, 4, 11, 6, 8, 13, 17, 5, 9, 30, 2, 12, 21], seed=1)
LM = ["--global_batch_size", 8, "--num_train_epochs", 3, "--per_device_train_batch_size", 2]
LM_CLIP = 1.4
ADAMW = ["--learning_rate", 5e-5, "--lr_scheduler_type", "constant", "--max_grad_norm", LM_CLIP, *LM]
BROKEN = 5  # a sample whose loss is not finite


def environment(stage, *offloaded, **more):
    """What `accelerate launch` tells its processes."""
    devices = {
        f"ACCELERATE_DEEPSPEED_OFFLOAD_{part.upper()}_DEVICE": "cpu" if part in offloaded else "none"
        for part in ("optimizer", "param")
    }
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage), **devices, **more}


class Loaded(TinyLM):
    """Read from a folder, which holds the tied weights once."""

    def model(self, **how):
        from transformers import GPT2LMHeadModel

        return GPT2LMHeadModel.from_pretrained(self.folder, **how)


class Broken(TinyLM):
    """One sample's loss is infinite, with a finite gradient as from a masked class, or not a number."""

    def loss(self, outputs, batch):
        loss = super().loss(outputs, batch)
        at = torch.tensor([i in batch.ids[k : k + 1] for k, i in enumerate([BROKEN] * len(loss))])
        return loss + torch.where(at, self.value, 0.0)

    value = float("inf")


class NotANumber(Broken):
    value = float("nan")


class Unused(TinyLM):
    """With a layer that takes no part in the loss."""

    def model(self, **how):
        model = super().model(**how)
        torch.manual_seed(1)
        model.extra = torch.nn.Linear(4, 4)
        return model


class Demo(TinyLM):
    """The demo model, with a fresh head for two classes."""

    def model(self, **how):
        from transformers import AutoModelForSequenceClassification

        from toolkit.data.demo import demo_model

        return AutoModelForSequenceClassification.from_pretrained(demo_model(), **how)

    def collate(self, rows, ids, epoch):
        batch = super().collate(rows, ids, epoch)
        return replace(batch, targets=torch.zeros(len(rows), dtype=torch.long), weight=float(len(ids)))

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs["logits"].float(), batch.targets, reduction="none")


@contextmanager
def broken_step(fault):
    """The faults of `tests.runs.planted`, where the engine does by itself what they break."""
    from toolkit.strategy import zero

    def not_clipped(settings, rule, size):
        return engine_config(settings, replace(rule, max_grad_norm=0.0), size)

    def not_reduced(self, loss):
        return backward(self, loss * (1 - self.rank))

    def clipped_first(self, loss):
        self.optimizer.override_loss_scale(1.0)
        return backward(self, loss * self.precision.scale)

    engine_config, backward = zero.engine_config, zero.ZeRO.backward
    own = {
        "clipping left out": (zero, "engine_config", not_clipped),
        "one rank not reduced": (zero.ZeRO, "backward", not_reduced),
        "clipping before unscaling": (zero.ZeRO, "backward", clipped_first),
    }
    with planted(None if fault in own else fault), mock.patch.object(*own[fault]) if fault in own else ExitStack():
        yield


def lm_on_ranks(folder):
    """TinyLM under every variant; losses, norms, and on rank 0 the weights in files."""
    results = {}

    def run(name, task, words, variant, precision="no"):
        with mock.patch.dict(os.environ, environment(*VARIANTS[variant])):
            trained = train(task, [*words, "--output_dir", folder / "unused"], precision)
        weights = {key: tensor for key, tensor in trained.strategy.weights() if tensor is not None}
        if weights:
            save_file({key: tensor.clone() for key, tensor in weights.items()}, folder / f"{name}.safetensors")
        results[name] = {
            "losses": trained.losses,
            "norms": trained.norms,
            "applied": [update.applied for update in trained.updates],
            "micro-batches": [len(ids) for ids in trained.ids],
            "trained": [names for group in trained.strategy.groups() for names in group["names"]],
            "decayed": trained.strategy.groups()[0]["names"],
            "parts": sum(tensor.numel() for _, _, tensor in trained.strategy.parts()),
            "size": trained.strategy.size,
        }

    for variant in VARIANTS:
        task = Loaded(LM_ROWS)
        task.folder = folder / "model"
        run(f"adamw {variant}", task, ADAMW, variant)
        run(f"sgd {variant}", TinyLM(LM_ROWS), [*EXACT, *LM], variant)
        for kind in (Broken, NotANumber):
            words = [*EXACT, *LM, "--skip_nonfinite_steps", 3]
            run(f"{kind.__name__} {variant}", kind(LM_ROWS), words, variant)
    for variant in ("2", "3"):
        run(f"unused {variant}", Unused(LM_ROWS), [*ADAMW, "--weight_decay", 0.1], variant)
    return results


def held_on_ranks(folder):
    """Bytes held for each parameter of the demo model, between the passes and the update of the second step."""
    from toolkit.strategy.base import Seed

    results = {}
    for name, variant in VARIANTS.items():
        with mock.patch.dict(os.environ, environment(*variant)):
            trained = prepare(Demo(LM_ROWS), [*LM, "--output_dir", folder / "unused"])
        strategy, feed = trained.strategy, trained.feed
        first, second, *_ = feed.schedule.steps()
        strategy.update(5e-5, strategy.run(feed.work(first).batches, 8.0, Seed(0, 1)))
        strategy.run(feed.work(second).batches, 8.0, Seed(0, 2))
        results[name] = {key: size / strategy.size.parameters for key, size in strategy.held().items()}
        strategy.forward.destroy()
    return results


def classify_on_ranks(folder):
    """tasks/classify.py under every variant, in other precisions, and with faults."""
    for name, words, variant, precision, fault in json.loads((folder / "runs.json").read_text()):
        with mock.patch.dict(os.environ, environment(*VARIANTS[variant])), broken_step(fault):
            run_here([*words, "--output_dir", str(folder / name)], precision)


@pytest.fixture(scope="module")
def lm(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm")
    TinyLM(LM_ROWS).model().save_pretrained(folder / "model")
    return on_ranks(lm_on_ranks, 2, folder, timeout=300), folder


def lm_loop():
    """TinyLM's losses and norms in a plain loop."""
    task = TinyLM(LM_ROWS)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0)
    losses, norms = [], []
    for epoch in range(3):
        for ids in order(42, epoch, len(LM_ROWS), 8):
            batch = task.collate([LM_ROWS[i] for i in ids], ids, epoch)
            loss = task.loss(model(**batch.inputs), batch).sum() / batch.weight
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), LM_CLIP)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_decoder_with_tied_embeddings(variant, lm):
    losses, norms = lm_loop()
    assert 2 <= sum(norm > LM_CLIP for norm in norms) <= len(norms) - 2, norms
    for rank in lm[0]:
        result = rank[f"adamw {variant}"]
        assert len(set(result["micro-batches"])) > 1  # the last batch of an epoch is short
        assert result["losses"] == pytest.approx(losses, rel=1e-5)
        assert result["norms"] == pytest.approx(norms, rel=5e-5)
        assert all(result["applied"])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", ["sgd", "Broken", "NotANumber"])
def test_a_loss_that_is_not_finite_changes_no_weight(kind, variant, lm):
    (result, other), folder = (rank[f"{kind} {variant}"] for rank in lm[0]), lm[1]
    batches = [ids for epoch in range(3) for ids in order(42, epoch, len(LM_ROWS), 8)]
    sound = [kind == "sgd" or BROKEN not in ids for ids in batches]
    losses, norms, weights = plain_steps(TinyLM(LM_ROWS).model(), LM_ROWS, [b for b, ok in zip(batches, sound) if ok])
    assert result["applied"] == other["applied"] == sound
    assert [x for x, ok in zip(result["losses"], sound) if ok] == pytest.approx(losses, rel=1e-5)
    assert [x for x, ok in zip(result["norms"], sound) if ok] == pytest.approx(norms, rel=5e-5)
    saved = load_file(folder / f"{kind} {variant}.safetensors")
    assert torch.equal(saved.pop("lm_head.weight"), saved["transformer.wte.weight"])
    assert furthest(saved, {name: tensor.detach() for name, tensor in weights.items()}) < 1e-6


@pytest.mark.parametrize("variant", ["2", "3"])
def test_unused_parameters_and_decay_groups(variant, lm):
    result, folder = lm[0][0][f"unused {variant}"], lm[1]
    model = Unused(LM_ROWS).model()
    assert set(result["trained"]) == {name for name, _ in model.named_parameters() if "extra" not in name}
    matrices = {name for name, p in model.named_parameters() if p.dim() == 2 and "extra" not in name}
    assert set(result["decayed"]) == matrices
    saved = load_file(folder / f"unused {variant}.safetensors")
    assert torch.equal(saved["extra.weight"], model.extra.weight)
    assert result["size"][:2] == [
        sum(p.numel() for p in model.parameters()),
        sum(p.numel() for p in model.parameters()) - 20,
    ]
    share = 2 if variant == "3" else 1
    assert result["parts"] == pytest.approx(result["size"][1] / share, rel=0.01)


@pytest.fixture(scope="module")
def held(tmp_path_factory, minilm):
    return on_ranks(held_on_ranks, 2, tmp_path_factory.mktemp("held"), timeout=300)


def part_of(rank):
    """Share of the demo model that two ranks' parts of its decayed and other parameters touch, in whole parameters."""
    named = dict(Demo(LM_ROWS).model().named_parameters())
    decayed = [p.numel() for name, p in named.items() if p.dim() == 2 and "LayerNorm" not in name]
    others = [p.numel() for name, p in named.items() if p.dim() == 1 or "LayerNorm" in name]
    touched = 0
    for group in (decayed, others):
        ends = [sum(group[: i + 1]) for i in range(len(group))]
        half = sum(group) / 2
        touched += sum(n for n, end in zip(group, ends) if (end - n < half if rank == 0 else end > half))
    return touched / (sum(decayed) + sum(others))


@pytest.mark.parametrize("variant", VARIANTS)
def test_bytes_held_after_a_step(variant, held):
    """On each of two ranks, for every parameter; the formulas are in `ZeRO.held`."""
    for rank, found in enumerate(held):
        expected = {
            "1": (4, 4 * part_of(rank), 12 / 2),
            "2": (4, 4 * part_of(rank), 12 / 2),
            "3": (4 / 2, 4 / 2, 12 / 2),
            "2 offload": (4, 4 / 2 + 4 * part_of(rank), 16 / 2),
            "3 offload": (4 / 2, 8 / 2, 12 / 2),
        }[variant]
        assert tuple(found[variant].values()) == pytest.approx(expected, rel=0.05)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    return write_csv(folder / "train.csv", 43, seed=3), write_csv(folder / "validation.csv", 13, seed=4)


@pytest.fixture(scope="module")
def classified(tiny_classifier, tiny_bert, files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("classified")
    data, validation = files

    def words(*more, model=tiny_classifier):
        return flags(model, data, "", "--per_device_train_batch_size", 3, *more)

    sgd = [
        "--optim",
        "sgd",
        "--learning_rate",
        1e-2,
        "--validation_file",
        validation,
        "--per_device_eval_batch_size",
        2,
    ]
    runs = []
    for variant in VARIANTS:
        runs.append((f"adamw {variant}", words(), variant, "no", None))
        runs.append((f"sgd {variant}", words(*sgd), variant, "no", None))
    runs.append(("checkpointing", words("--gradient_checkpointing"), "3", "no", None))
    for variant in ("2", "3"):
        runs += [(f"{half} {variant}", words(), variant, half, None) for half in ("bf16", "fp16")]
    runs += [(f"fresh head {variant}", words(model=tiny_bert), variant, "no", None) for variant in ("2", "3")]
    for fault in FAULTS:
        # Of a single micro-batch the last cannot be dropped.
        cut = ["--per_device_train_batch_size", 1] if "dropped" in fault else []
        runs.append((fault, words(*cut), "2", "fp16" if "unscaling" in fault else "no", fault))
    (folder / "runs.json").write_text(json.dumps(runs))
    on_ranks(classify_on_ranks, 2, folder, timeout=600)
    return folder


@pytest.fixture(scope="module")
def reference(tiny_classifier, files):
    losses, norms, _ = plain_loop(tiny_classifier, files[0])
    assert 3 <= sum(norm > CLIP for norm in norms) <= STEPS - 3, norms
    return losses, norms


@pytest.mark.parametrize("run", [*(f"adamw {variant}" for variant in VARIANTS), "checkpointing"])
def test_a_classifier(run, classified, reference):
    rows = read_rows(classified / run)
    assert holds(rows, reference), differences(rows, reference)


@pytest.mark.parametrize("variant", ["2", "3"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(precision, variant, classified, reference):
    rows = read_rows(classified / f"{precision} {variant}")
    assert holds(rows, reference, 1e-2, 2e-2), differences(rows, reference)
    assert not holds(rows, reference), "the precision asked for had no effect"


@pytest.mark.parametrize("variant", ["2", "3"])
def test_n09_f07_a_fresh_head(variant, classified, tiny_bert, files, tmp_path):
    run_here(flags(tiny_bert, files[0], tmp_path / "alone"))
    alone = read_rows(tmp_path / "alone")
    expected = [row["loss"] for row in alone], [row["grad_norm"] for row in alone]
    rows = read_rows(classified / f"fresh head {variant}")
    assert holds(rows, expected), differences(rows, expected)


@pytest.mark.parametrize("variant", VARIANTS)
def test_f01_f05_the_exported_model_and_its_evaluation(variant, classified, tiny_classifier, files):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = classified / f"sgd {variant}"
    _, _, trained = plain_loop(tiny_classifier, files[0], torch.optim.SGD, 1e-2)
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    assert furthest(dict(model.named_parameters()), dict(trained.named_parameters())) < 1e-6
    lines = files[1].read_text().splitlines()[1:]
    texts, labels = zip(*(line.rsplit(",", 1) for line in lines))
    inputs = AutoTokenizer.from_pretrained(folder)(list(texts), padding=True, return_tensors="pt")
    with torch.no_grad():
        logits = model.eval()(**inputs).logits
        assert torch.allclose(logits, trained.eval()(**inputs).logits, atol=1e-5)
    loss = F.cross_entropy(logits, torch.tensor([["neg", "pos"].index(label) for label in labels]))
    results = json.loads((folder / "eval_results.json").read_text())
    assert results["eval_samples"] == 13
    assert results["eval_loss"] == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, classified, reference):
    rows = read_rows(classified / fault)
    assert len(rows) == STEPS
    assert not holds(rows, reference, *((1e-2, 2e-2) if "unscaling" in fault else ()))


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_fails(stage, tiny_classifier, files, tmp_path):
    words = ["--model_name_or_path", tiny_classifier, "--train_file", files[0], "--max_steps", 1_000_000]
    words = ["tests/faults.py", "fail", "1", "3", *words, "--global_batch_size", 8, "--output_dir", tmp_path / "out"]
    result = launch(list(map(str, words)), 2, timeout=LIMIT, **environment(stage))
    assert result.returncode != 0
    assert ours(result.stderr)[-2:] == ["ZeroDivisionError: planted in this rank", "after step 3 of 1000000"]
    assert sum("Traceback" in line for line in ours(result.stderr)) == 1


MISTAKES = {
    "stage 4": ({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "4"}, "ZeRO stage 4 is not one of 1, 2 and 3"),
    "nvme": ({"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "nvme"}, "offload_optimizer_device: nvme"),
    "offload of a whole model": ({"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu"}, "needs ZeRO stage 3"),
    "json: batch": ({"train_batch_size": 64}, "train_batch_size is set, but a step is the task's"),
    "json: accumulation": ({"gradient_accumulation_steps": 4}, "gradient_accumulation_steps is set"),
    "json: optimizer": ({"optimizer": {"type": "Lion"}}, "optimizer is set.*--optim"),
    "json: precision": ({"bf16": {"enabled": True}}, "bf16 is enabled, but the accelerate config says no"),
    "json: not there": (None, "cannot be read"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_settings_that_contradict_the_task(mistake, tmp_path):
    from toolkit.strategy.zero import read_settings

    given, message = MISTAKES[mistake]
    if mistake.startswith("json"):
        file = tmp_path / "ds.json"
        if given:
            file.write_text(json.dumps({"zero_optimization": {"stage": 2}, **given}))
        given = {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}
    with mock.patch.dict(os.environ, environment(2) | given), pytest.raises(UserError) as error:
        read_settings("no")
    assert re.search(message, str(error.value))


def test_j13_clipping_that_contradicts_the_task():
    from toolkit.strategy.base import OptimizerRule, Size
    from toolkit.strategy.zero import engine_config, read_settings

    rule = OptimizerRule("adamw", (0.9, 0.999), 1e-8, 0.0, 1.0)
    with mock.patch.dict(os.environ, environment(2, ACCELERATE_GRADIENT_CLIPPING="0.5")):
        settings = read_settings("no")
    with pytest.raises(UserError, match=r"gradient_clipping is 0.5, but --max_grad_norm is 1.0"):
        engine_config(settings, rule, Size(10, 10, 10))
    with mock.patch.dict(os.environ, environment(2, ACCELERATE_GRADIENT_CLIPPING="1.0")):
        assert engine_config(read_settings("no"), rule, Size(10, 10, 10))["gradient_clipping"] == 1.0


def test_a_build_that_was_killed_is_named(tmp_path, monkeypatch):
    from toolkit.strategy.zero import check_build_lock

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    check_build_lock("cpu_adam")
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    check_build_lock("cpu_adam")  # of this run
    os.utime(lock, (0, 0))
    with pytest.raises(UserError, match=re.escape(str(lock.parent))):
        check_build_lock("cpu_adam")
