"""LoRA: every strategy against a plain loop over peft's own model; what is saved, merged, gone on from, refused."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.families import make
from tests.language import byte_tokenizer
from tests.runs import read_rows, run_here, run_launched
from tests.test_language_parity import batches_of, chunks_of, loss_of, save_llama
from tests.tiny import save_tiny_bert, write_csv
from tests.ways import WAYS
from toolkit.checkpoint.folder import Checkpoint
from toolkit.cli import main as command
from toolkit.data.plan import order
from toolkit.errors import UserError
from toolkit.generate import load as load_language_model
from toolkit.predict import load as load_classifier

BLOCK, GLOBAL, SEED, STEPS, SAVED = 24, 5, 7, 8, 4
RATE, CLIP = 1e-3, 1.2
LOSS, NORM = 1e-5, 5e-5  # relative
LORA = {"r": 4, "lora_alpha": 12, "lora_dropout": 0.0, "target_modules": "all-linear"}
TAKEN = ["one process", "DDP x 2", "ZeRO-2 x 2", "ZeRO-3 x 2", "FSDP2 x 2", "TP 2", "pipeline 2", "DataParallel 2"]
LABELS = ("neg", "pos", "so-so")


def words(**flags):
    return [
        str(word)
        for name, value in flags.items()
        for word in ([f"--{name}"] if value is True else [f"--{name}", value])
    ]


def adapted(model, data, out, **more):
    flags = {
        "model_name_or_path": model,
        "train_file": data,
        "output_dir": out,
        "cache_dir": out.parent / "cache",
        "global_batch_size": GLOBAL,
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "learning_rate": RATE,
        "max_grad_norm": CLIP,
        "seed": SEED,
        "save_strategy": "steps",
        "save_steps": SAVED,
        "use_peft": True,
        "lora_r": LORA["r"],
        "lora_alpha": LORA["lora_alpha"],
    }
    return words(**{**flags, **more})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama with 40 documents, and a BERT without a head with 30 labelled lines."""
    folder = tmp_path_factory.mktemp("adapters")
    save_llama(folder / "llama")
    draw = np.random.RandomState(5)
    documents = ["x" + "".join(draw.choice(list("abcdefgh "), draw.randint(2, 59))) + "y" for _ in range(40)]
    (folder / "train.txt").write_text("\n\n".join(documents) + "\n")
    save_tiny_bert(folder / "bert", initializer_range=0.2)
    write_csv(folder / "train.csv", 30, labels=LABELS)
    return folder


@pytest.fixture(scope="module")
def runs(folder):
    """Both tasks under every way, those of two processes in one launch."""
    given = {1: [], 2: []}
    for name in TAKEN:
        way = WAYS[name]
        texts = adapted(folder / "llama", folder / "train.txt", folder / f"{name} texts", block_size=BLOCK)
        lines = adapted(folder / "bert", folder / "train.csv", folder / f"{name} lines")
        given[way.processes] += [{**way.run(texts), "task": "language_modeling"}, way.run(lines)]
    texts = adapted(folder / "llama", folder / "train.txt", folder / "merged", block_size=BLOCK, merge_adapter=True)
    given[2].append({**WAYS["FSDP2 x 2"].run(texts), "task": "language_modeling"})
    run_launched(given[2], 2, folder)
    for run in given[1]:
        run_here(**run)
    return folder


def plain_training(model, batches, loss_of_batch):
    """Losses and norms before clipping of a plain loop over the trainable parameters."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE, weight_decay=0.0)
    losses, norms = [], []
    for number, batch in enumerate(batches):
        loss = loss_of_batch(batch)
        loss.backward()
        losses.append(loss.item())
        norms.append(float(torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], CLIP)))
        optimizer.param_groups[0]["lr"] = RATE * (1 - number / STEPS)
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] and min(norms) < CLIP < max(norms)
    return losses, norms


def peft_model(base, task_type, **changes):
    """As a user of peft would make it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(SEED)
    return get_peft_model(base, LoraConfig(**{**LORA, **changes}, task_type=task_type)).train()


@pytest.fixture(scope="module")
def texts(folder):
    """What a causal language model should do."""
    from transformers import AutoModelForCausalLM

    model = peft_model(AutoModelForCausalLM.from_pretrained(folder / "llama", dtype=torch.float32), "CAUSAL_LM")
    chunks = chunks_of(folder / "llama", (folder / "train.txt").read_text(), BLOCK)

    def loss(batch):
        return sum(loss_of(model, chunk) for chunk in batch) / sum(len(chunk) - 1 for chunk in batch)

    return plain_training(model, batches_of(chunks, BLOCK), loss)


@pytest.fixture(scope="module")
def lines(folder):
    """What a classifier should do, whose fresh head is trained whole."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    rows = [line.rsplit(",", 1) for line in (folder / "train.csv").read_text().splitlines()[1:]]
    torch.manual_seed(SEED)
    base = AutoModelForSequenceClassification.from_pretrained(folder / "bert", num_labels=3, dtype=torch.float32)
    model = peft_model(base, "SEQ_CLS", target_modules=r".*\.layer\..*(query|key|value|dense)")  # the blocks'
    tokenizer = AutoTokenizer.from_pretrained(folder / "bert")

    def loss(batch):
        given = tokenizer([rows[i][0] for i in batch], padding=True, return_tensors="pt")
        return F.cross_entropy(model(**given).logits, torch.tensor([LABELS.index(rows[i][1]) for i in batch]))

    batches = [ids.tolist() for epoch in range(2) for ids in order(SEED, epoch, len(rows), GLOBAL)][:STEPS]
    return plain_training(model, batches, loss)


@pytest.mark.parametrize("task", ["texts", "lines"])
@pytest.mark.parametrize("way", TAKEN)
def test_every_strategy_trains_adapters_as_a_plain_loop_does(task, way, runs, request):
    losses, norms = request.getfixturevalue(task)
    rows = read_rows(runs / f"{way} {task}")
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=LOSS)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=NORM)


@pytest.mark.parametrize("way", TAKEN)
def test_what_is_saved_is_what_is_trained_and_peft_reads_it(way, runs):
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    given = torch.arange(4, 28)[None]
    plain = AutoModelForCausalLM.from_pretrained(runs / "llama")(given).logits
    found = {}
    for out in (runs / f"{way} texts", runs / f"{way} texts" / f"checkpoint-{SAVED}"):
        names = set(load_file(out / "adapter_model.safetensors"))
        assert len(names) == 2 * 7 * 2 and all(".lora_" in name for name in names)
        model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(runs / "llama"), out)
        found[out] = model(given).logits
    first, last = found.values()
    assert (first - plain).abs().max() > 1e-3 < (last - first).abs().max()
    torch.testing.assert_close(
        load_language_model(str(runs / f"{way} texts"))[0](given).logits, first, rtol=0, atol=1e-5
    )
    one = load_language_model(str(runs / "one process texts"))[0](given).logits
    torch.testing.assert_close(first, one, rtol=0, atol=1e-3)

    checkpoint = Checkpoint(runs / f"{way} texts" / f"checkpoint-{SAVED}")
    assert len(checkpoint.names("model")) == 28 == len(checkpoint.names("exp_avg"))
    names = set(load_file(runs / f"{way} lines" / "adapter_model.safetensors"))
    assert len(names) == 2 * 6 * 2 + 2 and "base_model.model.classifier.weight" in names
    base = AutoModelForSequenceClassification.from_pretrained(runs / "bert", num_labels=3)
    model = PeftModel.from_pretrained(base, runs / f"{way} lines").eval()
    ours = load_classifier(str(runs / f"{way} lines"))[0]
    assert [*ours.config.id2label.values()] == list(LABELS)
    torch.testing.assert_close(model(given).logits, ours(given).logits, rtol=0, atol=1e-5)


def test_a_merged_model_is_the_adapted_one(runs):
    from transformers import AutoModelForCausalLM

    given = torch.arange(4, 28)[None]
    merged, found = AutoModelForCausalLM.from_pretrained(runs / "merged", output_loading_info=True)
    assert not (found["missing_keys"] or found["unexpected_keys"] or (runs / "merged" / "adapter_config.json").exists())
    adapter = load_language_model(str(runs / "FSDP2 x 2 texts"))[0]
    torch.testing.assert_close(merged(given).logits, adapter(given).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", ["ZeRO-3 x 2", "pipeline 2"])
def test_a_run_goes_on_from_another_strategys_checkpoint(way, runs, texts, tmp_path):
    saved = runs / f"{way} texts" / f"checkpoint-{SAVED}"
    more = {"block_size": BLOCK, "resume_from_checkpoint": saved}
    rows = run_here(adapted(runs / "llama", runs / "train.txt", tmp_path / "on", **more), task="language_modeling")
    assert [row["loss"] for row in rows[SAVED:]] == pytest.approx(texts[0][SAVED:], rel=LOSS)
    with pytest.raises(UserError) as error:
        flags = adapted(runs / "llama", runs / "train.txt", tmp_path / "other", **{**more, "lora_r": 2})
        run_here(flags, task="language_modeling")
    assert any("--lora_r: 4 in the checkpoint, 2 here" in message for message in error.value.messages)
    assert command(["checkpoint", "export", str(saved), "--output_dir", str(tmp_path / "taken")]) == 0
    assert not [*(tmp_path / "taken").glob("model*")]
    load_language_model(str(tmp_path / "taken"))
    with pytest.raises(UserError, match="taken is an adapter of a causal language model, and"):
        load_classifier(str(tmp_path / "taken"))


@pytest.mark.parametrize(
    ("kind", "task", "more", "wanted"),
    [
        ("texts", "classify", {}, "a causal language model, and a classifier"),
        ("lines", "language_modeling", {}, "a classifier, and a causal language model"),
        ("lines", "language_modeling", {"objective": "masked"}, "a classifier, and a masked language model"),
    ],
)
def test_an_adapter_of_another_task_is_refused_before_data_are_read(runs, kind, task, more, wanted, tmp_path):
    flags = {"model_name_or_path": runs / f"one process {kind}", "train_file": tmp_path / "none.csv", **more}
    with pytest.raises(UserError, match=f"is an adapter of {wanted} is needed here"):
        run_here(words(**flags, output_dir=tmp_path / "out"), task=task)


def test_an_adapter_is_evaluated_and_trained_on_as_any_model(runs, tmp_path):
    """All of its weights are; a second adapter on top would be lost without the first."""
    more = {"validation_file": runs / "train.csv", "max_steps": 1, "learning_rate": 0}
    flags = adapted(runs / "one process lines", runs / "train.csv", tmp_path / "out", **more)
    at = flags.index("--use_peft")
    run_here(flags[:at] + flags[at + 5 :])  # without --use_peft, --lora_r and --lora_alpha
    found = json.loads((tmp_path / "out" / "eval_results.json").read_text())["eval_loss"]
    model, tokenizer = load_classifier(str(runs / "DDP x 2 lines"))
    rows = [line.rsplit(",", 1) for line in (runs / "train.csv").read_text().splitlines()[1:]]
    logits = model(**tokenizer([row[0] for row in rows], padding=True, return_tensors="pt")).logits
    expected = F.cross_entropy(logits, torch.tensor([LABELS.index(row[1]) for row in rows]))
    assert found == pytest.approx(expected.item(), rel=1e-5)
    with pytest.raises(UserError, match="is an adapter itself"):
        run_here(flags)


def test_conv1d_layers_with_dropout_and_checkpointing(tmp_path):
    """GPT-2's matrices lie the other way round; dropout is seeded as all other."""
    from transformers import AutoModelForCausalLM

    make("GPT2", vocab_size=260).save_pretrained(tmp_path / "gpt")
    byte_tokenizer().save_pretrained(tmp_path / "gpt")
    (tmp_path / "train.txt").write_text("\n\n".join("abcdefgh"[at:] * 3 for at in range(8)))
    losses = {}
    for name, more in {
        "one": {"lora_dropout": 0.5},
        "same": {"lora_dropout": 0.5, "merge_adapter": True},
        "frugal": {"gradient_checkpointing": True},
        "none": {"lora_target_modules": "c_attn,mlp.c_fc,c_proj"},
    }.items():
        flags = adapted(tmp_path / "gpt", tmp_path / "train.txt", tmp_path / name, block_size=BLOCK, **more)
        losses[name] = [row["loss"] for row in run_here(flags, task="language_modeling")]
    assert losses["one"] == losses["same"] and losses["one"][1:] != losses["none"][1:]
    assert losses["frugal"] == pytest.approx(losses["none"], rel=1e-6)
    given = torch.arange(4, 28)[None]
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "same").eval()(given).logits
    adapter = load_language_model(str(tmp_path / "one"))[0](given).logits
    torch.testing.assert_close(merged, adapter, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("more", "said", "count"),
    [
        ({"lora_target_modules": "q_prog,score"}, "q_prog: LlamaForCausalLM has no linear layer .* mean `q_proj`", 2),
        ({"lora_target_modules": "lm_head"}, "lm_head: LlamaForCausalLM has no linear layer", 1),
        ({"lora_r": 0, "lora_dropout": 1, "lora_alpha": 0}, "--lora_r 0", 3),
        ({"lora_target_modules": "all-linear,q_proj"}, "stands alone", 1),
    ],
)
def test_mistakes_are_told_before_the_model_is_read(more, said, count, folder, tmp_path):
    flags = adapted(folder / "llama", folder / "train.txt", tmp_path / "out", block_size=BLOCK, **more)
    with pytest.raises(UserError, match=said) as error:
        run_here(flags, task="language_modeling")
    assert len(error.value.messages) == count


def test_flags_without_use_peft_and_models_from_scratch(folder, tmp_path):
    flags = adapted(folder / "llama", folder / "train.txt", tmp_path / "out")
    without = [word for word in flags if word != "--use_peft"]
    with pytest.raises(UserError, match="--lora_r has no effect without --use_peft") as error:
        run_here([*without, "--merge_adapter"], task="language_modeling")
    assert len(error.value.messages) == 3
    with pytest.raises(UserError, match="trained from scratch"):
        run_here(
            words(use_peft=True, config_name=folder / "llama", output_dir=tmp_path / "new"), task="language_modeling"
        )
