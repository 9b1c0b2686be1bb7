"""Packed language modelling on any machine: every strategy against a plain loop over single documents."""

import json
import math
import os
import re
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.families import LLAMA
from tests.language import byte_tokenizer
from tests.lm import TinyLM, prepare, random_rows
from tests.ranks import on_ranks
from tests.runs import read_rows, run_here
from toolkit.data.plan import order
from toolkit.language.packing import best_fit

BLOCK, GLOBAL, SEED, STEPS = 24, 5, 7, 8
REAL_BLOCK = 128
RATE, CLIP = 5e-5, 2.5
LOSS, NORM = 1e-5, 5e-5  # relative


def fsdp(shards, tensors):
    """What the launcher says of FSDP2, or of tensor parallelism."""
    return {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": "1",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": str(shards),
        "PARALLELISM_CONFIG_TP_SIZE": str(tensors),
    }


def zero(stage):
    return {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": str(stage)}


# Flags, and what the launcher says.
WAYS = {
    "DDP": ([], {}),
    "DDP with gradient checkpointing": (["--gradient_checkpointing"], {}),  # N07
    "pipeline": (["--pipeline_stages", 2, "--pipeline_microbatches", 2], {}),
    "TP": ([], fsdp(1, 2)),
    "FSDP2": ([], fsdp(2, 1)),
    "ZeRO-2": ([], zero(2)),
    "ZeRO-3": ([], zero(3)),
}


def save_llama(folder, **changes):
    """A tiny Llama over bytes with grouped queries and tied embeddings, 260 tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    settings = {**LLAMA, "vocab_size": 260, "initializer_range": 0.1, "tie_word_embeddings": True, **changes}
    LlamaForCausalLM(LlamaConfig(**settings)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def plain_training(folder, batches, clip=CLIP):
    """Losses, norms before clipping and the model of a plain loop.

    Args:
        batches: of each step, chunks of token ids; each goes through the model by itself.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    losses, norms = [], []
    for number, chunks in enumerate(batches):
        targets = sum(len(chunk) - 1 for chunk in chunks)
        losses.append(0.0)
        for chunk in chunks:
            loss = loss_of(model, chunk) / targets
            loss.backward()
            losses[-1] += loss.item()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.param_groups[0]["lr"] = RATE * (1 - number / len(batches))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, model


def loss_of(model, chunk):
    """Sum over a chunk by itself."""
    logits = model(input_ids=torch.tensor([chunk])).logits[0].float()
    return F.cross_entropy(logits[:-1], torch.tensor(chunk[1:]), reduction="sum")


def chunks_of(folder, text, block):
    """Of the documents between blank lines: at most a block each, the last token of one the first of the next."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    parts = [part.strip("\n") for part in re.split(r"\n(?:[^\S\n]*\n)+", text.lstrip("\n")) if part.strip()]
    documents = [[*tokenizer(part)["input_ids"], tokenizer.eos_token_id] for part in parts]
    return [doc[at : at + block] for doc in documents for at in range(0, len(doc) - 1, block - 1)]


def batches_of(chunks, block):
    """The chunks of each step, packed into blocks, epoch after epoch."""
    samples = best_fit([len(chunk) for chunk in chunks], block)
    steps = [ids for epoch in range(STEPS) for ids in order(SEED, epoch, len(samples), GLOBAL)][:STEPS]
    return [[chunks[i] for sample in ids for i in samples[sample]] for ids in steps]


def flags(model, data, out, block=BLOCK, *more):
    given = {
        "--model_name_or_path": model,
        "--train_file": data,
        "--output_dir": out,
        "--cache_dir": out.parent / "cache",
        "--block_size": block,
        "--global_batch_size": GLOBAL,
        "--per_device_train_batch_size": 2,
        "--max_steps": STEPS,
        "--learning_rate": RATE,
        "--max_grad_norm": CLIP,
        "--seed": SEED,
    }
    return [str(word) for pair in given.items() for word in pair] + [str(word) for word in more]


def on_two_ranks(folder):
    for words, launcher in json.loads((folder / "runs.json").read_text()):
        with mock.patch.dict(os.environ, launcher):
            run_here(words, task="language_modeling")
    return [noise(seed) for seed in (1, 1, 2)]


def noise(seed):
    """What dropout makes of four equal rows on this rank, and the weights before."""
    rows = random_rows([9])
    rows.tokens, rows.labels = rows.tokens * 4, rows.labels * 4
    words = ["--global_batch_size", 4, "--max_steps", 1, "--seed", seed, "--learning_rate", 0]
    trained = prepare(TinyLM(rows, embd_pdrop=0.5), words)
    seen = []
    trained.strategy.model.transformer.drop.register_forward_hook(lambda *given: seen.append(given[-1].sum().item()))
    weights = sum(p.double().sum().item() for p in trained.strategy.model.parameters())
    for work in trained.feed:
        trained.stepper.take(work)
    return {"weights": weights, "seen": seen}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and 40 documents of 3 to 60 letters."""
    folder = tmp_path_factory.mktemp("parity")
    save_llama(folder / "model")
    draw = np.random.RandomState(5)
    documents = ["x" + "".join(draw.choice(list("abcdefgh "), draw.randint(2, 59))) + "y" for _ in range(40)]
    (folder / "train.txt").write_text("\n\n".join(documents) + "\n")
    (folder / "uneven.txt").write_text("ab\n\nbc\n\n" + "abcdefgh " * 4 + "abcd\n")  # 2, 2 and 40 targets
    return folder


@pytest.fixture(scope="module")
def real(folder):
    """Folder of a real model, with its training text and another text in our folder; None where it cannot be had."""
    root = os.environ.get("TOOLKIT_TEST_DATA", "")
    model = os.path.join(root, "models", "stories260K", "hf")
    if not os.path.isdir(model):
        return None
    with open(os.path.join(root, "data", "tinyshakespeare", "input.txt"), encoding="utf-8") as file:
        text = file.read()
    (folder / "shakespeare.txt").write_text(text[:20_000])
    (folder / "rest.txt").write_text(text[-20_000:])
    return model


def zero_shot(model, folder, out):
    """Flags of one step that changes nothing, with an evaluation."""
    more = ["--validation_file", folder / "rest.txt", "--learning_rate", 0, "--max_steps", 1]
    return flags(model, folder / "shakespeare.txt", out, REAL_BLOCK, *more)


def uneven(folder, out, rows):
    """Flags of an evaluation of texts shorter than a block, also the training text."""
    data = folder / "uneven.txt"
    more = ["--validation_file", data, "--learning_rate", 0, "--max_steps", 1, "--packing", "none"]
    return flags(folder / "model", data, out, 64, *more, "--per_device_eval_batch_size", rows)


@pytest.fixture(scope="module")
def launched(folder, real):
    """All runs of two ranks in one launch, and what dropout did."""
    runs = [[uneven(folder, folder / "uneven both", 1), {}]]
    for name, (more, said) in WAYS.items():
        runs.append([flags(folder / "model", folder / "train.txt", folder / name, BLOCK, *more), said])
        if real:
            out = folder / f"{name} real"
            runs.append([flags(real, folder / "shakespeare.txt", out, REAL_BLOCK, *more), said])
    if real:
        runs.insert(0, [zero_shot(real, folder, folder / "zero shot"), {}])
    (folder / "runs.json").write_text(json.dumps(runs))
    (folder / "noise.json").write_text(json.dumps(on_ranks(on_two_ranks, 2, folder, timeout=300)))
    return folder


@pytest.fixture(scope="module")
def reference(folder):
    chunks = chunks_of(folder / "model", (folder / "train.txt").read_text(), BLOCK)
    losses, norms, _ = plain_training(folder / "model", batches_of(chunks, BLOCK))
    assert min(norms) < CLIP < max(norms)
    return losses, norms


def same(rows, reference):
    assert [row["loss"] for row in rows] == pytest.approx(reference[0], rel=LOSS)
    assert [row["grad_norm"] for row in rows] == pytest.approx(reference[1], rel=NORM)


@pytest.mark.parametrize("more", [[], ["--attn_implementation", "eager"]], ids=["as it is", "eager attention"])
def test_one_process(more, folder, reference, tmp_path):
    words = flags(folder / "model", folder / "train.txt", tmp_path / "one", BLOCK, *more)
    same(run_here(words, task="language_modeling"), reference)


@pytest.mark.parametrize("way", WAYS)
def test_two_processes(way, launched, reference):
    same(read_rows(launched / way), reference)


@pytest.mark.parametrize("way", WAYS)
def test_every_way_was_taken_and_gives_the_same_model(way, launched):
    """Tied embeddings included; under AdamW weights whose gradient is nearly zero carry amplified rounding."""
    from transformers import AutoModelForCausalLM

    assert way.split()[0] in json.loads((launched / way / "run.json").read_text())["strategy"]
    tokens = torch.arange(4, 28)[None]
    ours, others = (AutoModelForCausalLM.from_pretrained(launched / name)(tokens).logits for name in ("DDP", way))
    torch.testing.assert_close(ours, others, rtol=0, atol=1e-3)


def test_a_real_model_on_a_real_text(real, launched):
    if not real:
        pytest.skip("TOOLKIT_TEST_DATA holds no models/stories260K")
    data = launched / "shakespeare.txt"
    reference = plain_training(real, batches_of(chunks_of(real, data.read_text(), REAL_BLOCK), REAL_BLOCK))[:2]
    same(run_here(flags(real, data, launched / "one real", REAL_BLOCK), task="language_modeling"), reference)
    for way in WAYS:
        same(read_rows(launched / f"{way} real"), reference)


def test_zero_shot_perplexity_whatever_the_processes(real, launched):
    from transformers import AutoModelForCausalLM

    if not real:
        pytest.skip("TOOLKIT_TEST_DATA holds no models/stories260K")
    model = AutoModelForCausalLM.from_pretrained(real, dtype=torch.float32).eval()
    chunks = chunks_of(real, (launched / "rest.txt").read_text(), REAL_BLOCK)
    with torch.no_grad():
        mean = sum(loss_of(model, chunk).item() for chunk in chunks) / sum(len(chunk) - 1 for chunk in chunks)
    run_here(zero_shot(real, launched, launched / "zero shot one"), task="language_modeling")
    for name in ("zero shot", "zero shot one"):
        found = json.loads((launched / name / "eval_results.json").read_text())["eval_perplexity"]
        assert found == pytest.approx(math.exp(mean), rel=1e-5)


def test_d05_i01_an_evaluation_is_one_number_for_texts_of_any_length(launched):
    """Of 3 short texts with 2, 2 and 40 targets, in batches of 1, 2, 3, and of 1 on two processes."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(launched / "model", dtype=torch.float32).eval()
    chunks = chunks_of(launched / "model", (launched / "uneven.txt").read_text(), 64)
    assert [len(chunk) - 1 for chunk in chunks] == [2, 2, 40]
    with torch.no_grad():
        mean = sum(loss_of(model, chunk).item() for chunk in chunks) / 44
    for rows in (1, 2, 3):
        run_here(uneven(launched, launched / f"uneven {rows}", rows), task="language_modeling")
    for name in ("uneven 1", "uneven 2", "uneven 3", "uneven both"):
        found = json.loads((launched / name / "eval_results.json").read_text())
        assert found["eval_loss"] == pytest.approx(mean, rel=1e-5)
        assert found["eval_perplexity"] == pytest.approx(math.exp(mean), rel=1e-5)


def test_e05_noise_differs_between_ranks_and_repeats_with_the_seed(launched):
    first, second = json.loads((launched / "noise.json").read_text())
    assert len({run["weights"] for rank in (first, second) for run in rank}) == 1
    assert first[0] == first[1] and second[0] == second[1]
    assert first[0]["seen"] != second[0]["seen"]
    assert first[0]["seen"] != first[2]["seen"]
