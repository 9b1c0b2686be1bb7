"""One step, any machine: every way to cut a step against a plain PyTorch loop."""

import csv
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from tests.runs import run_here, run_launched
from tests.tiny import write_csv
from toolkit.data.plan import order

ROWS, GLOBAL, EPOCHS, SEED = 43, 10, 5, 7  # 5 steps per epoch, the last of 3 samples
STEPS = EPOCHS * -(-ROWS // GLOBAL)
RATE, CLIP = 5e-5, 1.0
LOSS, NORM = 1e-5, 5e-5  # relative tolerances in fp32

FAULTS_ALONE = [
    "divided by micro-batches",
    "clipping left out",
    "last micro-batch dropped",
    "one sample twice",
    "learning rate late",
]
FAULTS_DDP = ["divided by ranks", "one rank not reduced"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_csv(tmp_path_factory.mktemp("data") / "train.csv", ROWS, seed=3)


def flags(model, data, out, *more):
    words = {
        "--model_name_or_path": model,
        "--train_file": data,
        "--output_dir": out,
        "--global_batch_size": GLOBAL,
        "--num_train_epochs": EPOCHS,
        "--learning_rate": RATE,
        "--max_grad_norm": CLIP,
        "--dropout": 0,
        "--seed": SEED,
    }
    return [str(word) for pair in words.items() for word in pair] + [str(word) for word in more]


def plain_loop(model_folder, file, optimizer=torch.optim.AdamW, rate=RATE):
    """What any tutorial would write: whole padded batches, mean loss, clip, step, linear decay."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    with open(file, encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForSequenceClassification.from_pretrained(model_folder).train()
    settings = {"weight_decay": 0.0} if optimizer is torch.optim.AdamW else {}
    optimizer = optimizer(model.parameters(), lr=rate, **settings)
    losses, norms = [], []
    for epoch in range(EPOCHS):
        for ids in order(SEED, epoch, ROWS, GLOBAL):
            batch = [rows[i] for i in ids]
            inputs = tokenizer(
                [row["text"] for row in batch], padding=True, truncation=True, max_length=64, return_tensors="pt"
            )
            targets = torch.tensor([["neg", "pos"].index(row["label"]) for row in batch])
            loss = F.cross_entropy(model(**inputs).logits, targets)
            loss.backward()
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            for group in optimizer.param_groups:
                group["lr"] = rate * (1 - len(losses) / STEPS)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, norms, model


@pytest.fixture(scope="module")
def reference(tiny_classifier, data):
    losses, norms, _ = plain_loop(tiny_classifier, data)
    above = sum(norm > CLIP for norm in norms)
    assert 3 <= above <= STEPS - 3, f"the clip should act in some steps, not in {above} of {STEPS}: {norms}"
    return losses, norms


def differences(rows, reference):
    """Largest relative differences of loss and grad norm; infinite where steps are missing."""
    losses, norms = reference
    if len(rows) != len(losses):
        return math.inf, math.inf
    loss = max(abs(row["loss"] - x) / abs(x) for row, x in zip(rows, losses))
    norm = max(abs(row["grad_norm"] - x) / abs(x) for row, x in zip(rows, norms))
    return loss, norm


def holds(rows, reference, loss=LOSS, norm=NORM):
    a, b = differences(rows, reference)
    return a <= loss and b <= norm


CUTS = {
    "one process": [],
    "micro-batches of 1": ["--per_device_train_batch_size", 1],
    "micro-batches of 3": ["--per_device_train_batch_size", 3],
    "DataParallel x 2": ["--data_parallel", "--data_parallel_replicas", 2],
    "DataParallel x 4": ["--data_parallel", "--data_parallel_replicas", 4, "--data_parallel_loss", "replica"],
    "collating workers": ["--dataloader_num_workers", 1],
    "gradient checkpointing": ["--gradient_checkpointing"],
    "eager attention": ["--attn_implementation", "eager"],
}


@pytest.mark.parametrize("cut", CUTS)
def test_one_process_in_any_cut(cut, tiny_classifier, data, reference, tmp_path):
    rows = run_here(flags(tiny_classifier, data, tmp_path / "out", *CUTS[cut]))
    assert holds(rows, reference), differences(rows, reference)
    assert [row["learning_rate"] for row in rows] == pytest.approx([RATE * (1 - i / STEPS) for i in range(STEPS)])
    assert [row["samples"] for row in rows][-1] == ROWS * EPOCHS


@pytest.fixture(scope="module")
def launched(tiny_classifier, data, tmp_path_factory):
    """All runs under DDP with 2 and with 3 ranks, in two launches."""
    from tests.runs import read_rows

    folder = tmp_path_factory.mktemp("launched")
    sgd = ["--optim", "sgd", "--learning_rate", 1e-2]
    results = {}
    for processes in (2, 3):
        runs = {
            "adamw": {"flags": flags(tiny_classifier, data, folder / f"adamw{processes}")},
            "uneven": {
                "flags": flags(tiny_classifier, data, folder / f"uneven{processes}", "--per_device_train_batch_size", 2)
            },
            "sgd": {"flags": flags(tiny_classifier, data, folder / f"sgd{processes}", *sgd)},
        }
        if processes == 2:
            runs["bf16"] = {"flags": flags(tiny_classifier, data, folder / "bf16"), "precision": "bf16"}
            for fault in FAULTS_DDP + FAULTS_ALONE:
                out = folder / fault.replace(" ", "_")
                runs[fault] = {
                    "flags": flags(tiny_classifier, data, out, "--per_device_train_batch_size", 3),
                    "fault": fault,
                }
        run_launched(list(runs.values()), processes, folder)
        for name, arguments in runs.items():
            out = arguments["flags"][arguments["flags"].index("--output_dir") + 1]
            results[name, processes] = (read_rows(out), out)
    return results


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("name", ["adamw", "uneven"])
def test_ddp(name, processes, launched, reference):
    rows, _ = launched[name, processes]
    assert holds(rows, reference), differences(rows, reference)


@pytest.mark.parametrize("processes", [0, 2, 3])
def test_final_weights_under_sgd(processes, tiny_classifier, data, launched, tmp_path):
    if processes:
        _, out = launched["sgd", processes]
    else:
        out = tmp_path / "out"
        run_here(flags(tiny_classifier, data, out, "--optim", "sgd", "--learning_rate", 1e-2))
    _, _, model = plain_loop(tiny_classifier, data, torch.optim.SGD, 1e-2)
    saved = load_file(f"{out}/model.safetensors")
    expected = dict(model.named_parameters())
    assert set(saved) == set(expected)
    assert max((saved[name] - value).abs().max().item() for name, value in expected.items()) < 1e-6


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_in_one_process(precision, tiny_classifier, data, reference, tmp_path):
    rows = run_here(flags(tiny_classifier, data, tmp_path / "out"), precision)
    assert holds(rows, reference, 1e-2, 2e-2), differences(rows, reference)
    assert not holds(rows, reference), "the precision asked for had no effect"


def test_bf16_under_ddp(launched, reference):
    rows, _ = launched["bf16", 2]
    assert holds(rows, reference, 1e-2, 2e-2), differences(rows, reference)


@pytest.mark.parametrize("fault", FAULTS_ALONE)
def test_a_planted_fault_is_found_in_one_process(fault, tiny_classifier, data, reference, tmp_path):
    cut = ["--per_device_train_batch_size", 3]
    rows = run_here(flags(tiny_classifier, data, tmp_path / "out", *cut), fault=fault)
    assert len(rows) == STEPS
    assert not holds(rows, reference)


def test_clipping_before_unscaling_is_found(tiny_classifier, data, reference, tmp_path):
    rows = run_here(flags(tiny_classifier, data, tmp_path / "out"), "fp16", "clipping before unscaling")
    assert len(rows) == STEPS
    assert not holds(rows, reference, 1e-2, 2e-2)


@pytest.mark.parametrize("fault", FAULTS_DDP + FAULTS_ALONE)
def test_a_planted_fault_is_found_under_ddp(fault, launched, reference):
    rows, _ = launched[fault, 2]
    assert len(rows) == STEPS
    assert not holds(rows, reference)
