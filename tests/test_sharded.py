"""FSDP2, HSDP, tensor parallelism and their product, against plain PyTorch loops on one process."""

import copy
import csv
import json
import os
import re
from contextlib import nullcontext
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import nn

from tests.lm import IGNORED, TinyLM, prepare, random_rows, train
from tests.ranks import start
from tests.runs import launch, read_rows, run_here
from tests.test_failures import LIMIT, ours, root_cause
from tests.test_parity import (
    CLIP,
    EPOCHS,
    FAULTS_ALONE,
    RATE,
    ROWS,
    STEPS,
    differences,
    flags,
    holds,
    plain_loop,
)
from tests.tiny import save_tiny_bert, save_tiny_classifier, write_csv
from toolkit.data.plan import order
from toolkit.errors import UserError
from toolkit.strategy import sharded, tensor
from toolkit.strategy.blocks import blocks

# Replicas x shards x tensor ranks, and whether parameters are kept on the CPU.
TWO = {"FSDP2": (1, 2, 1, False), "FSDP2 offload": (1, 2, 1, True), "TP 2": (1, 1, 2, False)}
FOUR = {"HSDP 2 x 2": (2, 2, 1, False), "FSDP2 x TP": (1, 2, 2, False)}
FAULTS = ["divided by ranks", *FAULTS_ALONE, "one rank not reduced", "clipping before unscaling"]
# Of 7 validation rows three micro-batches: on some rank one is a filler.
SGD = ["--optim", "sgd", "--learning_rate", 1e-2, "--per_device_eval_batch_size", 3]
LM_ROWS = random_rows(np.random.RandomState(1).randint(4, 30, 27))
LM_BATCH, LM_EPOCHS = 8, 3
LM_STEPS = LM_EPOCHS * -(-len(LM_ROWS) // LM_BATCH)  # the last of an epoch has 3 rows
LM_FLAGS = ["--global_batch_size", LM_BATCH, "--num_train_epochs", LM_EPOCHS, "--learning_rate", RATE]
LM_FLAGS += ["--max_grad_norm", CLIP, "--seed", 7, "--per_device_train_batch_size", 3]


def launcher_says(replicas, shards, tensors, offload=False, **more):
    """The environment that `accelerate launch` makes of such a config."""
    said = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_OFFLOAD_PARAMS": str(offload).lower()}
    said["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "true"  # accelerate's own default
    sizes = {"DP_REPLICATE": replicas, "DP_SHARD": shards, "TP": tensors}
    said["ACCELERATE_USE_PARALLELISM_CONFIG"] = str((replicas, tensors) != (1, 1)).lower()
    return {**said, **{f"PARALLELISM_CONFIG_{name}_SIZE": str(size) for name, size in sizes.items()}, **more}


class Decoder(TinyLM):
    """A Llama of 2 layers with grouped queries and tied embeddings."""

    def model(self, **how):
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True, use_cache=False))


SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


class WithUnused(Decoder):
    """Has a layer that takes no part in the loss, which is not a number on the poisoned rank."""

    poisoned = False

    def model(self, **how):
        model = super().model()
        model.extra = nn.Linear(3, 3)
        return model

    def loss(self, outputs, batch):
        rows = super().loss(outputs, batch)
        return rows * float("nan") if self.poisoned else rows


class MiniLM(TinyLM):
    def model(self, **how):
        from transformers import AutoModelForSequenceClassification

        from toolkit.data.demo import demo_model

        return AutoModelForSequenceClassification.from_pretrained(demo_model(), num_labels=2, **how)

    def loss(self, outputs, batch):
        return outputs["logits"].float().square().sum(1)


# What runs on the ranks of a launch.


def on_two_ranks(folder):
    for name, mesh in TWO.items():
        classify(folder, name, mesh, "--per_device_train_batch_size", 2, "--gradient_checkpointing")
        classify(folder, f"{name} sgd", mesh, "--validation_file", folder / "validation.csv", *SGD)
    for precision in ("bf16", "fp16"):
        classify(folder, precision, TWO["FSDP2"], precision=precision)
    for fault in FAULTS:
        precision = "fp16" if "unscaling" in fault else "no"
        with one_rank_not_reduced() if fault == "one rank not reduced" else nullcontext():
            planted = None if fault == "one rank not reduced" else fault
            classify(
                folder, fault, TWO["FSDP2"], "--per_device_train_batch_size", 3, precision=precision, fault=planted
            )
    with mock.patch.dict(os.environ, launcher_says(*TWO["FSDP2"])):
        run_here(flags(folder / "bare", folder / "train.csv", folder / "fresh head"))
    return {
        "lm": {name: language_model(folder, name, mesh) for name, mesh in TWO.items()},
        "not a number": not_a_number(),
        "families": {family: difference_when_split(family) for family in FAMILIES},
        "held": held(TWO["FSDP2"]),
    }


def on_four_ranks(folder):
    for name, mesh in FOUR.items():
        classify(folder, name, mesh, "--per_device_train_batch_size", 1, FSDP_TRANSFORMER_CLS_TO_WRAP="BertLayer")
        classify(folder, f"{name} sgd", mesh, "--validation_file", folder / "validation.csv", *SGD)
    return {"lm": {name: language_model(folder, name, mesh) for name, mesh in FOUR.items()}}


def one_rank_not_reduced():
    """The second rank's gradients reach no one, itself included."""
    backward = sharded.Sharded.backward
    deaf = lambda self, loss: backward(self, loss * (self.rank == 0))  # noqa: E731
    return mock.patch.object(sharded.Sharded, "backward", deaf)


def classify(folder, name, mesh, *words, precision="no", fault=None, **more):
    with mock.patch.dict(os.environ, launcher_says(*mesh, **more)):
        run_here(flags(folder / "model", folder / "train.csv", folder / name, *words), precision, fault)


def language_model(folder, name, mesh):
    """Train, export, and keep the logits that the trained model gives inside the strategy."""
    with mock.patch.dict(os.environ, launcher_says(*mesh)):
        trained = train(Decoder(LM_ROWS), LM_FLAGS)
    strategy = trained.strategy
    with strategy.inference():
        logits = strategy.infer(strategy.task.collate([LM_ROWS[0]], [0], 0))["logits"]
    weights = {key: value for key, value in strategy.weights() if value is not None}
    names = sorted(weights)
    if weights:
        strategy.shell().save_pretrained(folder / f"{name} lm", state_dict=weights)
        torch.save(logits, folder / f"{name} lm" / "logits.pt")
    return {"losses": trained.losses, "norms": trained.norms, "names": names, "size": strategy.size}


def not_a_number():
    """One step whose loss is no number on rank 1 alone; and a layer that no loss reaches."""
    with mock.patch.dict(os.environ, launcher_says(*TWO["FSDP2"])):
        trained = prepare(WithUnused(LM_ROWS), [*LM_FLAGS, "--skip_nonfinite_steps", 1])
    strategy, applied, moved = trained.strategy, [], []
    for work in trained.feed:
        before = {name: p.detach().clone() for name, p in strategy.parameters.items()}
        strategy.task.poisoned = work.step.number == 2 and strategy.rank == 1
        applied.append(trained.stepper.take(work)[0].applied)
        moved.append(sum(not torch.equal(before[name], p) for name, p in strategy.parameters.items()))
        if work.step.number == 3:
            break
    return {"applied": applied, "moved": moved, "names": list(strategy.parameters)}


def held(mesh):
    """Bytes held in the second step, and of parameters in all."""
    with mock.patch.dict(os.environ, launcher_says(*mesh)):
        trained = prepare(MiniLM(LM_ROWS), [*LM_FLAGS, "--max_steps", 2])
    works = iter(trained.feed)
    trained.stepper.take(next(works))
    trained.strategy.run(next(works).batches, 1.0, mock.Mock(of=lambda *place: 0))
    return {**trained.strategy.held(), "whole": 4 * trained.strategy.size.parameters}


FAMILIES = {
    "bert": {},
    "roberta": {"pad_token_id": 0},
    "electra": {"embedding_size": 16},
    "distilbert": {"dim": 32, "hidden_dim": 64, "n_heads": 4, "n_layers": 2},
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": True, "pad_token_id": 7},
    "qwen3": {"head_dim": 8, "tie_word_embeddings": False},
}


def family(name):
    """A tiny model of this family with random weights: a classifier of an encoder, or a decoder."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    sizes = SIZES if name != "distilbert" else {"vocab_size": 50, "max_position_embeddings": 64}
    config = AutoConfig.for_model(name, **{**sizes, **FAMILIES[name]})
    decodes = name in ("llama", "qwen2", "qwen3")
    torch.manual_seed(1)
    return (AutoModelForCausalLM if decodes else AutoModelForSequenceClassification).from_config(config).eval()


def difference_when_split(name):
    """The largest difference of logits and gradients from the whole model, over the largest entry of each."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor

    whole = family(name)
    split = copy.deepcopy(whole)
    tensor.split(split, init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",)))
    tokens = torch.randint(1, 50, (3, 12), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(12) < torch.tensor([[12], [7], [9]])).long()
    logits = [model(input_ids=tokens, attention_mask=mask).logits for model in (whole, split)]
    for one in logits:
        (one.tanh() * mask.sum()).sum().backward()
    gather = lambda grad: grad.full_tensor() if isinstance(grad, DTensor) else grad  # noqa: E731
    expected = dict(whole.named_parameters())
    pairs = [tuple(logits)] + [
        (expected[key].grad, gather(p.grad)) for key, p in split.named_parameters() if expected[key].grad is not None
    ]
    assert len(expected) == len(dict(split.named_parameters()))  # tied ones are tied still
    largest = max(grad.abs().max() for grad, _ in pairs[1:])
    far = lambda pair, scale: float((pair[0] - pair[1]).detach().abs().max() / scale)  # noqa: E731
    cut = sum(isinstance(p, DTensor) for p in split.parameters())
    return [far(pairs[0], logits[0].abs().max()), max(far(pair, largest) for pair in pairs[1:]), cut]


# What is expected, from loops without any of the toolkit's training code.


def lm_loop():
    """AdamW over whole padded batches with the mean loss over their targets, clipped, under linear decay."""
    model = Decoder(LM_ROWS).model().train()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    losses, norms = [], []
    for epoch in range(LM_EPOCHS):
        for ids in order(7, epoch, len(LM_ROWS), LM_BATCH):
            pad = lambda rows, value: nn.utils.rnn.pad_sequence(  # noqa: E731
                [torch.tensor(rows[i]) for i in ids], batch_first=True, padding_value=value
            )
            tokens, labels = pad(LM_ROWS.tokens, 0), pad(LM_ROWS.labels, IGNORED)
            logits = model(input_ids=tokens, attention_mask=(tokens > 0).long()).logits
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
            loss.backward()
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            for group in optimizer.param_groups:
                group["lr"] = RATE * (1 - len(losses) / LM_STEPS)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, norms


@pytest.fixture(scope="module")
def expected(folder):
    losses, norms, _ = plain_loop(folder / "model", folder / "train.csv")
    assert 3 <= sum(norm > CLIP for norm in norms) <= STEPS - 3
    return losses, norms


@pytest.fixture(scope="module")
def expected_lm():
    losses, norms = lm_loop()
    assert 3 <= sum(norm > CLIP for norm in norms) <= LM_STEPS - 3, norms
    return losses, norms


@pytest.fixture(scope="module")
def expected_sgd(folder):
    return plain_loop(folder / "model", folder / "train.csv", torch.optim.SGD, 1e-2)[2]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    save_tiny_classifier(folder / "model")
    save_tiny_bert(folder / "bare")
    write_csv(folder / "train.csv", ROWS, seed=3)
    write_csv(folder / "validation.csv", 7, seed=5)
    return folder


@pytest.fixture(scope="module")
def launched(folder):
    """What the ranks returned, by rank: two ranks, then four."""
    results = {}
    for function, ranks in ((on_two_ranks, 2), (on_four_ranks, 4)):
        result = start(function, ranks, folder, timeout=400)
        assert result.returncode == 0, result.stdout + result.stderr
        results[ranks] = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    return results


@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_a_classifier_trains_as_one_process_does(name, launched, folder, expected):
    rows = read_rows(folder / name)
    assert holds(rows, expected), differences(rows, expected)
    assert rows[-1]["samples"] == ROWS * EPOCHS


@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_a_decoder_with_tied_embeddings_trains_as_one_process_does(name, launched, expected_lm):
    for result in launched[4 if name in FOUR else 2]:
        run = result["lm"][name]
        rows = [{"loss": loss, "grad_norm": norm} for loss, norm in zip(run["losses"], run["norms"])]
        assert holds(rows, expected_lm), differences(rows, expected_lm)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(precision, launched, folder, expected):
    rows = read_rows(folder / precision)
    assert holds(rows, expected, 1e-2, 2e-2), differences(rows, expected)
    assert not holds(rows, expected), "the precision asked for had no effect"


@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_final_weights_and_evaluation(name, launched, folder, expected_sgd):
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    out = folder / f"{name} sgd"
    saved, wanted = load_file(out / "model.safetensors"), dict(expected_sgd.named_parameters())
    assert {key: value.shape for key, value in saved.items()} == {key: value.shape for key, value in wanted.items()}
    assert max((saved[key] - value).abs().max().item() for key, value in wanted.items()) < 1e-6
    model = AutoModelForSequenceClassification.from_pretrained(out).eval()
    assert type(model).__name__ == "BertForSequenceClassification"
    with open(folder / "validation.csv", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    inputs = AutoTokenizer.from_pretrained(out)([row["text"] for row in rows], padding=True, return_tensors="pt")
    with torch.no_grad():
        logits, theirs = model(**inputs).logits, expected_sgd.eval()(**inputs).logits
    assert (logits - theirs).abs().max() < 1e-5
    targets = torch.tensor([["neg", "pos"].index(row["label"]) for row in rows])
    figures = json.loads((out / "eval_results.json").read_text())
    assert figures["eval_samples"] == 7
    assert figures["eval_loss"] == pytest.approx(F.cross_entropy(theirs, targets).item(), rel=1e-5)
    assert figures["eval_accuracy"] == pytest.approx((theirs.argmax(1) == targets).float().mean().item())


@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_f03_f05_the_exported_decoder_gives_the_trained_models_logits(name, launched, folder):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / f"{name} lm").eval()
    logits = torch.load(folder / f"{name} lm" / "logits.pt")
    with torch.no_grad():
        again = model(input_ids=torch.tensor([LM_ROWS.tokens[0]])).logits
    assert (again - logits).abs().max() < 1e-5
    first, *others = [result["lm"][name] for result in launched[4 if name in FOUR else 2]]
    assert first["names"] == sorted(model.state_dict()) and "lm_head.weight" in first["names"]
    assert not any(other["names"] for other in others)
    assert first["size"][0] == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault, launched, folder, expected):
    rows = read_rows(folder / fault)
    assert len(rows) == STEPS
    assert not holds(rows, expected, *((1e-2, 2e-2) if "unscaling" in fault else ()))


def test_n09_f07_a_fresh_head_is_that_of_one_process(launched, folder, tmp_path):
    rows = run_here(flags(folder / "bare", folder / "train.csv", tmp_path / "out"))
    assert holds(read_rows(folder / "fresh head"), ([r["loss"] for r in rows], [r["grad_norm"] for r in rows]))
    trained, alone = (load_file(out / "model.safetensors") for out in (folder / "fresh head", tmp_path / "out"))
    assert (trained["classifier.weight"] - alone["classifier.weight"]).abs().max() < 1e-5


def test_a_loss_that_is_no_number_on_one_rank_changes_nothing_on_any(launched):
    for result in launched[2]:
        found = result["not a number"]
        assert found["applied"] == [True, False, True]
        assert found["moved"][1] == 0 < min(found["moved"][0], found["moved"][2])
        assert "model.norm.weight" in found["names"] and not any("extra" in name for name in found["names"])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_split_over_two_ranks(name, launched):
    for result in launched[2]:
        logits, gradients, cut = result["families"][name]
        assert logits < 1e-6 and gradients < 1e-6
        assert cut >= 2 * 6  # six matrices a block


def test_bytes_held(launched):
    for result in launched[2]:
        found = result["held"]
        for kind, share in {"parameters": 1 / 2, "gradients": 1 / 2, "optimizer": 1}.items():
            assert found[kind] == pytest.approx(found["whole"] * share, rel=0.05)


def test_an_exception_in_one_rank_ends_all(folder, tmp_path):
    out = tmp_path / "out"
    words = ["--model_name_or_path", folder / "model", "--train_file", folder / "train.csv", "--output_dir", out]
    words += ["--global_batch_size", 8, "--max_steps", 1_000_000]
    command = ["tests/faults.py", "fail", "1", "5", *map(str, words)]
    result = launch(command, 2, timeout=LIMIT, **launcher_says(*TWO["FSDP2"]))
    lines = ours(result.stderr)
    assert result.returncode != 0
    assert lines[-2:] == ["ZeroDivisionError: planted in this rank", "after step 5 of 1000000"]
    assert sum("Traceback" in line for line in lines) == 1
    assert "planted in this rank" in root_cause(result.stderr)


# Mistakes.


def says(function, *arguments):
    with pytest.raises(UserError) as caught:
        function(*arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    "environment, words",
    [
        ({"FSDP_VERSION": "1"}, "fsdp_version: 1, which is also the default, is not supported"),
        ({"FSDP_ACTIVATION_CHECKPOINTING": "true"}, "--gradient_checkpointing"),
        ({"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP"}, "only TRANSFORMER_BASED_WRAP is supported"),
        ({"FSDP_IGNORED_MODULES": "embeddings"}, "fsdp_ignored_modules is not supported"),
        ({"FSDP_STATE_DICT_TYPE": "LOCAL_STATE_DICT"}, "fsdp_config: FSDP2 does not support LOCAL_STATE_DICT"),
    ],
)
def test_fsdp_config_is_refused(environment, words, monkeypatch):
    for name, value in {**launcher_says(1, 2, 1), **environment}.items():
        monkeypatch.setenv(name, value)
    assert words in says(sharded.read_plugin)


def test_mesh_sizes(monkeypatch):
    sizes = lambda *mesh: [monkeypatch.setenv(*entry) for entry in launcher_says(*mesh).items()]  # noqa: E731
    sizes(1, 2, 1)
    assert sharded.mesh_sizes(3) == (1, 3, 1)  # without a parallelism_config
    sizes(2, 4, 2)
    assert sharded.mesh_sizes(16) == (2, 4, 2)
    assert re.search(r"2 x dp_shard_size 4 x tp_size 2 = 16, but there are 8 processes", says(sharded.mesh_sizes, 8))
    sizes(2, 1, 2)
    assert "pure data parallelism" in says(sharded.mesh_sizes, 4)
    sizes(1, 2, 2)
    monkeypatch.setenv("PARALLELISM_CONFIG_CP_SIZE", "2")
    assert "context and sequence parallelism" in says(sharded.mesh_sizes, 8)


def test_j17_classes_to_wrap():
    model = family("bert")
    block = type(model.bert.encoder.layer[0])
    assert sharded.wrapped_classes(model, None) == sharded.wrapped_classes(model, ["BertLayer"]) == {block}
    message = says(sharded.wrapped_classes, model, ["BertLayers"])
    assert "BertForSequenceClassification has no BertLayers. Did you mean `BertLayer`?" in message
    assert blocks(model)[0] == "bert.encoder.layer"
    assert "no list of repeated blocks" in says(blocks, nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    "name, ranks, words",
    [
        ("gpt2", 2, "no tensor parallel plan for models of type gpt2. Use accelerate_configs/fsdp2.yaml, zero3.yaml"),
        ("mixtral", 2, "mixtral has moe_tp_experts, packed_colwise, which is not supported"),
        ("bert", 5, "5 does not divide the model's num_attention_heads 12"),
        ("qwen2", 4, ""),
        ("distilbert", 8, "8 does not divide the model's num_attention_heads 12"),
    ],
)
def test_models_that_cannot_be_split(name, ranks, words):
    from transformers import AutoConfig

    config = AutoConfig.for_model(name)
    assert words in says(tensor.check, config, ranks) if words else tensor.check(config, ranks) is None


def test_key_value_heads_must_divide():
    from transformers import LlamaConfig

    assert "num_key_value_heads 2" in says(tensor.check, LlamaConfig(**SIZES), 4)
