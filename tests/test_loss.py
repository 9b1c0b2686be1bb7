"""The losses of classification against torch's own, over a whole global batch and in any cut."""

import csv
import random

import pytest
import torch
import torch.nn.functional as F

from tests.ranks import on_ranks
from tests.runs import read_rows, run_here
from tests.tiny import WORDS, save_tiny_classifier
from toolkit.data.plan import order
from toolkit.errors import UserError

ROWS, GLOBAL, SEED, EPOCHS = 22, 8, 42, 2  # 3 steps per epoch, the last of 6 rows
NAMES = ("a", "b", "c")
SMOOTHED = ["--label_smoothing_factor", 0.2]
WEIGHTED = ["--class_weights", "balanced"]
CASES = {
    "plain": ("one", []),
    "smoothed": ("one", SMOOTHED),
    "weighted": ("one", WEIGHTED),
    "weighted and smoothed": ("one", [*WEIGHTED, *SMOOTHED]),
    "multi-label": ("several", ["--label_separator", "|"]),
    "regression": ("number", ["--problem_type", "regression"]),
}
CUTS = {
    "whole": ["--per_device_train_batch_size", GLOBAL],
    "micro-batches of 1": ["--per_device_train_batch_size", 1],
    "micro-batches of 3": ["--per_device_train_batch_size", 3],
    "DataParallel": ["--data_parallel", "--data_parallel_loss", "replica"],
}


def write(folder):
    """Texts with one label (uneven classes), several labels, and a number each; a model for each."""
    draw = random.Random(0)
    rows = []
    for _ in range(ROWS):
        one = draw.choices(NAMES, [8, 2, 1])[0]
        several = [name for name in NAMES if draw.random() < 0.4]
        text = " ".join(draw.choice(WORDS) for _ in range(draw.randint(2, 30)))
        rows.append({"text": text, "one": one, "several": "|".join(several), "number": f"{draw.gauss(0, 2):.3f}"})
    rows[0]["one"], rows[1]["one"], rows[2]["one"] = NAMES
    rows[3]["several"], rows[4]["several"] = "", "a|b|c"
    with (folder / "train.csv").open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    save_tiny_classifier(folder / "labels", labels=NAMES)
    save_tiny_classifier(folder / "value", labels=("value",))


def flags(folder, case, *more):
    column, own = CASES[case]
    model = folder / ("value" if column == "number" else "labels")
    words = ["--model_name_or_path", model, "--train_file", folder / "train.csv", "--text_column_names", "text"]
    words += ["--label_column_name", column, "--global_batch_size", GLOBAL, "--num_train_epochs", EPOCHS]
    words += ["--cache_dir", folder / "cache", "--dropout", 0, "--eval_strategy", "no", "--learning_rate", "1e-3"]
    return [str(word) for word in [*words, *own, *more]]


def torch_loss(case, logits, rows, counts):
    """The reduction="mean" of torch over the whole batch."""
    if case == "regression":
        return F.mse_loss(logits[:, 0], torch.tensor([float(row["number"]) for row in rows]))
    if case == "multi-label":
        targets = [[float(name in row["several"].split("|")) for name in NAMES] for row in rows]
        return F.binary_cross_entropy_with_logits(logits, torch.tensor(targets))
    weights = torch.tensor([ROWS / (len(NAMES) * count) for count in counts]) if "weighted" in case else None
    smoothing = 0.2 if "smoothed" in case else 0.0
    targets = torch.tensor([NAMES.index(row["one"]) for row in rows])
    return F.cross_entropy(logits, targets, weight=weights, label_smoothing=smoothing, reduction="mean")


def expected(folder, case):
    """Losses and norms of a plain loop over whole batches."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    with (folder / "train.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    counts = [sum(row["one"] == name for row in rows) for name in NAMES]
    model_folder = folder / ("value" if case == "regression" else "labels")
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForSequenceClassification.from_pretrained(model_folder).train()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    batches = [ids for epoch in range(EPOCHS) for ids in order(SEED, epoch, ROWS, GLOBAL)]
    losses, norms = [], []
    for step, ids in enumerate(batches):
        batch = [rows[i] for i in ids]
        inputs = tokenizer([row["text"] for row in batch], padding=True, return_tensors="pt")
        loss = torch_loss(case, model(**inputs).logits, batch, counts)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (1 - step / len(batches))
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


def two_ranks(folder):
    for case in CASES:
        run_here(flags(folder, case, "--output_dir", folder / "two" / case, *CUTS["micro-batches of 3"]))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loss")
    write(folder)
    return folder


@pytest.fixture(scope="module")
def launched(folder):
    on_ranks(two_ranks, 2, folder)
    return folder / "two"


def check(rows, folder, case):
    losses, norms = expected(folder, case)
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-4)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=1e-3)
    assert rows[0]["loss"] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("case", CASES)
def test_loss_in_one_process(case, cut, folder, tmp_path):
    check(run_here(flags(folder, case, "--output_dir", tmp_path / "out", *CUTS[cut])), folder, case)


@pytest.mark.parametrize("case", CASES)
def test_loss_on_two_ranks(case, launched, folder):
    check(read_rows(launched / case), folder, case)


@pytest.mark.parametrize("case", ["regression", "multi-label"])
def test_smoothing_and_weights_have_no_meaning_without_classes(case, folder, tmp_path):
    with pytest.raises(UserError) as stopped:
        run_here(flags(folder, case, "--output_dir", tmp_path / "out", *SMOOTHED, *WEIGHTED))
    first, second = stopped.value.messages
    assert "--label_smoothing_factor 0.2 has no meaning in" in first and case.split("-")[0] in first
    assert "--class_weights balanced has no meaning in" in second
    assert not (tmp_path / "out").exists()
