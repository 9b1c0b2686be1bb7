"""Going on from a checkpoint: at the right sample, with the losses of the run that was never interrupted."""

import json
import os
import pickle
import shutil
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from transformers import PreTrainedModel

from tests.runs import read_rows, run_here, run_launched
from tests.tiny import LINES, save_tiny_bert, save_tiny_classifier, write_csv
from toolkit.checkpoint.folder import Checkpoint, named
from toolkit.cli import main as command
from toolkit.data.plan import order
from toolkit.errors import UserError
from toolkit.step import Stepper
from toolkit.strategy.precision import Precision

ROWS, GLOBAL, EPOCHS, SEED = 43, 10, 3, 7
STEPS = 15  # 5 an epoch, the last of 3 samples
EVERY = 4
ZERO2 = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    save_tiny_classifier(folder / "model", hidden_dropout_prob=0.1)
    write_csv(folder / "train.csv", ROWS, seed=3)
    write_csv(folder / "dev.csv", 11, seed=4)
    return folder


def flags(files, out, *more, **changed):
    words = {
        "model_name_or_path": files / "model",
        "train_file": files / "train.csv",
        "validation_file": files / "dev.csv",
        "output_dir": out,
        "global_batch_size": GLOBAL,
        "num_train_epochs": EPOCHS,
        "seed": SEED,
        "save_strategy": "steps",
        "save_steps": EVERY,
        "save_total_limit": 9,
        **changed,
    }
    return [str(word) for name, value in words.items() if value is not None for word in (f"--{name}", value)] + [
        str(word) for word in more
    ]


@pytest.mark.parametrize("kind", ["missing", "of another shape"])
def test_what_the_checkpoint_replaces_is_not_said_to_be_initialised_anew(kind, files, tmp_path, capfd):
    if kind == "missing":
        save_tiny_bert(tmp_path / "model")
    else:
        save_tiny_classifier(tmp_path / "model", labels=("neg", "pos", "so-so"))
    words = flags(files, tmp_path / "out", model_name_or_path=tmp_path / "model", resume_from_checkpoint="auto")
    said = []
    for steps in (5, 6):
        run_here([*words, "--max_steps", str(steps), "--allow_changed", "total_steps"])
        said.append("initialised anew" in capfd.readouterr().err)
    assert said == [True, False]  # there was no checkpoint at first


@contextmanager
def watched():
    """The micro-batches of every step that is taken meanwhile."""
    seen = []

    def take(self, work, *rest):
        seen.append(work.batches)
        return real(self, work, *rest)

    real = Stepper.take
    with mock.patch.object(Stepper, "take", take):
        yield seen


@contextmanager
def power_cut(step):
    """The process ends after this step, without another word."""

    def take(self, work, *rest):
        if work.step.number > step:
            raise KeyboardInterrupt
        return real(self, work, *rest)

    real = Stepper.take
    with mock.patch.object(Stepper, "take", take), pytest.raises(KeyboardInterrupt):
        yield


@pytest.fixture(scope="module")
def straight(files, tmp_path_factory):
    """The run that is never interrupted, with dropout, and its checkpoints after steps 4, 8 and 12."""
    out = tmp_path_factory.mktemp("straight") / "out"
    run_here(flags(files, out))
    assert [step for step, _ in named(out)] == [12, 8, 4]
    return out


def rows(out):
    """Every row of metrics.jsonl, without what depends on the clock."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if "second" not in k and "runtime" not in k} for line in lines]


def weights(out):
    return load_file(out / "model.safetensors")


def equal(left, right):
    assert rows(left) == rows(right)
    a, b = weights(left), weights(right)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def refused(words, **more):
    with pytest.raises(UserError) as error:
        run_here(words, **more)
    return error.value.messages


# The right sample


@pytest.mark.parametrize("step", [4, 8, 12])
def test_c01_c03_the_rest_of_the_epochs_in_the_order_they_had(step, files, straight, tmp_path):
    with watched() as seen:
        run_here(flags(files, tmp_path / "out", resume_from_checkpoint=straight / f"checkpoint-{step}"))
    equal(tmp_path / "out", straight)
    batches = [ids.tolist() for epoch in range(EPOCHS) for ids in order(SEED, epoch, ROWS, GLOBAL)]
    assert [sorted(i for batch in step for i in batch.ids) for step in seen] == [sorted(ids) for ids in batches[step:]]
    assert sorted(i for ids in batches[:5] for i in ids) == list(range(ROWS)) and batches[5] != batches[0]


def test_c05_micro_batches_are_not_steps(files, tmp_path):
    cut = {"global_batch_size": None, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    words = {**cut, "max_steps": 8, "save_steps": 3}
    run_here(flags(files, tmp_path / "a", **words))
    again = run_here(flags(files, tmp_path / "b", **words, resume_from_checkpoint=tmp_path / "a" / "checkpoint-3"))
    equal(tmp_path / "b", tmp_path / "a")
    assert [row["step"] for row in again] == list(range(1, 9))
    assert [row["learning_rate"] for row in again] == pytest.approx([5e-5 * (1 - i / 8) for i in range(8)])
    assert [row["samples"] for row in again] == [4 * i for i in range(1, 9)]


def test_c09_the_masks_of_a_masked_model(files, tmp_path):
    save_tiny_bert(tmp_path / "bert", hidden_dropout_prob=0.1)
    (tmp_path / "text.txt").write_text("\n".join(LINES))
    words = flags(
        files,
        tmp_path / "a",
        *("--objective", "masked", "--document_separator", "line"),
        model_name_or_path=tmp_path / "bert",
        train_file=tmp_path / "text.txt",
        validation_file=None,
        global_batch_size=4,
        save_steps=3,
        max_steps=8,
    )
    with watched() as straight:
        run_here(words, task="language_modeling")
    words[words.index("--output_dir") + 1] = str(tmp_path / "b")
    words += ["--resume_from_checkpoint", str(tmp_path / "a" / "checkpoint-3")]
    with watched() as resumed:
        run_here(words, task="language_modeling")
    equal(tmp_path / "b", tmp_path / "a")
    assert len(resumed) == 5
    for before, after in zip(straight[3:], resumed, strict=True):
        for batch, again in zip(before, after, strict=True):
            assert batch.ids == again.ids and torch.equal(batch.targets, again.targets)
            assert torch.equal(batch.inputs["input_ids"], again.inputs["input_ids"])
    other = [*words, "--mlm_probability", "0.3", "--output_dir", str(tmp_path / "c")]
    assert "--mlm_probability: 0.15" in refused(other, task="language_modeling")[1]
    logits_are_equal(tmp_path / "a" / "checkpoint-6", "AutoModelForMaskedLM", tmp_path / "exported")


def logits_are_equal(path, kind, target):
    """A checkpoint and the model exported from it load by themselves, with all weights and the same logits."""
    import transformers

    assert command(["checkpoint", "export", str(path), "--output_dir", str(target)]) == 0
    load = getattr(transformers, kind).from_pretrained
    first, found = load(path, output_loading_info=True)
    second = load(target)
    assert not found["missing_keys"] and not found["unexpected_keys"] and not found["mismatched_keys"]
    assert first.config.architectures == [type(first).__name__]
    tokens = torch.arange(6, 14)[None]
    with torch.no_grad():
        a, b = (model.eval()(input_ids=tokens).logits for model in (first, second))
    assert torch.equal(a, b)
    checkpoint = Checkpoint(path)
    for name, p in first.state_dict().items():
        if name in checkpoint.names("model"):
            assert torch.equal(p, checkpoint.read("model", name))
    transformers.AutoTokenizer.from_pretrained(path)
    return a


def test_the_folder_of_a_checkpoint_is_a_model(straight, tmp_path):
    logits_are_equal(straight / "checkpoint-8", "AutoModelForSequenceClassification", tmp_path / "model")
    assert sorted(file.name for file in (tmp_path / "model").iterdir()) == [
        *("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    ]


# Killed, and gone on


def test_steps_behind_the_last_checkpoint_are_taken_again_and_logged_once(files, straight, tmp_path, capfd):
    out = tmp_path / "out"
    with power_cut(10):
        run_here(flags(files, out))
    assert len(read_rows(out)) == 10
    (out / "checkpoint-12.writing").mkdir()
    with power_cut(14):
        run_here(flags(files, out, resume_from_checkpoint="auto"))
    assert "checkpoint-12.writing: its writing was cut off" in capfd.readouterr().err
    run_here(flags(files, out, resume_from_checkpoint="auto"))
    equal(out, straight)
    said = capfd.readouterr().err
    assert f"going on from {out / 'checkpoint-12'}, after step 12 of 15 (one process, fp32, CPU)" in said
    run_here(flags(files, out, resume_from_checkpoint="auto"))
    assert "this run has finished" in capfd.readouterr().err
    equal(out, straight)


def test_auto_before_the_first_checkpoint_begins_anew(files, straight, tmp_path, capfd):
    out = tmp_path / "out"
    with power_cut(2):
        run_here(flags(files, out, resume_from_checkpoint="auto"))
    run_here(flags(files, out, resume_from_checkpoint="auto"))
    equal(out, straight)
    assert capfd.readouterr().err.count("the training begins at step 1") == 2


def test_without_an_output_folder_auto_goes_on_in_the_last_one(files, straight, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "output" / "classify").mkdir(parents=True)
    words = flags(files, None)
    last = tmp_path / "output" / "classify-2"
    with power_cut(9), mock.patch("tests.runs.read_rows"):
        run_here(words)
    with mock.patch("tests.runs.read_rows"):
        run_here([*words, "--resume_from_checkpoint", "auto"])
    equal(last, straight)
    assert not (tmp_path / "output" / "classify-3").exists()


def test_a_restarted_group_goes_on_from_its_own_checkpoints(files, straight, tmp_path, monkeypatch, capfd):
    words = flags(files, tmp_path / "out", resume_from_checkpoint=straight / "checkpoint-4")
    for step, attempt in ((6, 0), (9, 1), (15, 2)):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
        if step < STEPS:
            with power_cut(step):
                run_here(words)
        else:
            run_here(words)
    equal(tmp_path / "out", straight)
    said = capfd.readouterr().err
    assert said.count("checkpoint-4, after step 4") == 2 and said.count("out/checkpoint-8, after step 8") == 1


def flip(path):
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "flipped byte": (flip, "model-00001-of-00001.safetensors", "SHA-256 differs"),
    "missing shard": (Path.unlink, "optimizer-00001-of-00001.safetensors", "is missing"),  # C13
    "truncated state": (lambda path: os.truncate(path, 100), "state.json", "cannot be read"),
    "other state": (
        lambda path: path.write_text(path.read_text().replace('"step": 12', '"step": 11')),
        "state.json",
        "SHA",
    ),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_c13_a_damaged_checkpoint(kind, files, straight, tmp_path, capfd):
    damage, name, said = DAMAGES[kind]
    out = tmp_path / "out"
    with power_cut(13):
        run_here(flags(files, out))
    damage(out / "checkpoint-12" / name)
    left = {file.name: file.read_bytes() for file in (out / "checkpoint-12").iterdir()}
    words = flags(files, tmp_path / "other", resume_from_checkpoint=out / "checkpoint-12")
    messages = refused(words)
    assert said in messages[0] and not (tmp_path / "other").exists()
    assert "--resume_from_checkpoint auto" in messages[-1]  # what to do
    with mock.patch.object(Stepper, "take", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        run_here(flags(files, out, resume_from_checkpoint="auto"))
    error = capfd.readouterr().err
    assert "passed over" in error and "checkpoint-12" in error and said in error and "checkpoint-8, after" in error
    assert {file.name: file.read_bytes() for file in (out / "checkpoint-12").iterdir()} == left
    assert command(["checkpoint", "verify", str(out)]) == 2
    assert said in capfd.readouterr().err
    run_here(flags(files, out, resume_from_checkpoint="auto"))
    equal(out, straight)
    assert command(["checkpoint", "verify", str(out)]) == 0
    for _, path in named(out):
        flip(path / "model-00001-of-00001.safetensors")
    (out / "run.json").unlink()
    messages = refused(flags(files, out, resume_from_checkpoint="auto"))
    assert "none of the checkpoints" in messages[0] and "--overwrite_output_dir" in messages[-1]
    capfd.readouterr()
    assert command(["checkpoint", "export", str(out), "--output_dir", str(tmp_path / "model")]) == 2
    assert "--overwrite_output_dir" not in capfd.readouterr().err  # the advice to a training


def test_no_checkpoint_where_one_is_named(files, straight, tmp_path):
    words = flags(files, tmp_path / "out", resume_from_checkpoint=tmp_path / "none")
    assert "no such folder" in refused(words)[0]
    words = flags(files, tmp_path / "out", resume_from_checkpoint=straight)
    assert f"It holds {straight / 'checkpoint-12'}: did you mean that?" in refused(words)[0]


def test_another_runs_results_are_not_overwritten(files, straight, tmp_path):
    shutil.copytree(straight, tmp_path / "other")
    words = flags(files, tmp_path / "other", resume_from_checkpoint=straight / "checkpoint-4")
    assert "holds the results of another run" in refused(words)[0]
    run_here([*words, "--overwrite_output_dir"])
    assert [step for step, _ in named(tmp_path / "other")] == [12, 8]  # its own, and none of before
    equal(tmp_path / "other", straight)
    for _, path in named(tmp_path / "other"):
        shutil.rmtree(path)
    words = flags(files, tmp_path / "other", resume_from_checkpoint="auto", seed=8)
    assert "holds a finished run of another training" in refused(words)[0]


# The same training


def other_data(files, tmp_path):
    text = (files / "train.csv").read_text().splitlines()
    (tmp_path / "other.csv").write_text("\n".join([text[0], *text[2:], text[1]]))
    return tmp_path / "other.csv"


def test_every_difference_is_named_before_the_model_is_loaded(files, straight, tmp_path, capfd):
    save_tiny_classifier(tmp_path / "larger", hidden_dropout_prob=0.1, hidden_size=64, num_hidden_layers=3)
    words = flags(
        files,
        tmp_path / "out",
        *("--learning_rate", 1e-3, "--optim", "sgd", "--class_weights", "balanced", "--max_steps", 20),
        resume_from_checkpoint=straight / "checkpoint-8",
        model_name_or_path=tmp_path / "larger",
        train_file=other_data(files, tmp_path),
        global_batch_size=11,
        seed=8,
    )
    with mock.patch("toolkit.classification.task.load_model", side_effect=AssertionError("too late")):
        messages = refused(words)
    assert "checkpoint-8 is a checkpoint of another training" in messages[0]
    expected = {
        "--learning_rate: 5e-05 in the checkpoint, 0.001 here.",
        "--optim: adamw in the checkpoint, sgd here.",
        "--seed: 7 in the checkpoint, 8 here.",
        "--class_weights: none in the checkpoint, balanced here.",
        "--global_batch_size: 10 in the checkpoint, 11 here.",
        "the length of the run, and with it the schedule (total_steps): 15 in the checkpoint, 20 here.",
        "the training data (data): other texts or labels, another order, tokenizer or length.",
        "the model (model): hidden_size 32 in the checkpoint, 64 here; num_hidden_layers 2 in the checkpoint, 3 here.",
    }
    assert set(messages[1:-1]) == expected
    allowed = "optim,learning_rate,seed,class_weights,global_batch_size,total_steps,data,model"
    assert messages[-1].endswith(f"--allow_changed {allowed}")
    assert not (tmp_path / "out").exists()
    # What is allowed does not make the tensors fit.
    messages = refused([*words, "--allow_changed", allowed])
    assert "is a checkpoint of another model" in messages[0] and "it has no model/bert.encoder.layer.2" in messages[1]
    assert "Did you mean `learning_rate`?" in refused([*words, "--allow_changed", "learning_rat"])[0]
    assert "seed, " in refused([*words, "--allow_changed", "nonsense"])[0]  # all names there are


def test_dropout_of_the_flag_is_told_once(files, straight, tmp_path):
    messages = refused(flags(files, tmp_path / "out", "--dropout", 0, resume_from_checkpoint=straight / "checkpoint-8"))
    assert messages[1:-1] == ["--dropout: None in the checkpoint, 0.0 here."]


def test_what_is_allowed_changes_from_there_on(files, straight, tmp_path, capfd):
    words = flags(
        files,
        tmp_path / "a",
        *("--learning_rate", 1e-3, "--num_train_epochs", 4, "--allow_changed", "learning_rate,total_steps"),
        resume_from_checkpoint=straight / "checkpoint-8",
    )
    changed = run_here(words)
    before = read_rows(straight)[:8]
    assert len(changed) == 20 and changed[:8] == before
    assert [row["learning_rate"] for row in changed[8:]] == pytest.approx([1e-3 * (1 - i / 20) for i in range(8, 20)])
    assert "changed, as allowed: --learning_rate: 5e-05 in the checkpoint, 0.001 here." in capfd.readouterr().err
    # Another optimizer begins without moments.
    sgd = flags(
        files,
        tmp_path / "b",
        *("--optim", "sgd", "--allow_changed", "optim"),
        resume_from_checkpoint=straight / "checkpoint-8",
    )
    assert len(run_here(sgd)) == STEPS
    back = flags(files, tmp_path / "c", "--allow_changed", "optim", resume_from_checkpoint=tmp_path / "b/checkpoint-12")
    assert len(run_here(back)) == STEPS
    # Adam's first update after that is one of unbiased moments: about the learning rate for every weight.
    start = Checkpoint(tmp_path / "b" / "checkpoint-12")
    step = [(weights(tmp_path / "c")[name] - start.read("model", name)).abs().max() for name in start.names("model")]
    rates = sum(row["learning_rate"] for row in read_rows(tmp_path / "c")[12:])
    assert 0.5 * rates < max(step) < 1.5 * rates


def test_a_finished_run_is_extended_when_that_is_meant(files, straight, tmp_path):
    shutil.copytree(straight, tmp_path / "out")
    longer = flags(files, tmp_path / "out", "--max_steps", 17, resume_from_checkpoint="auto")
    assert "(total_steps): 15 in the checkpoint, 17 here." in refused(longer)[1]
    equal(tmp_path / "out", straight)  # nothing was changed
    shorter = flags(files, tmp_path / "out", "--max_steps", 3, resume_from_checkpoint="auto")
    ends = refused([*shorter, "--allow_changed", "total_steps"])
    assert "is after step 12, and the run is to end after step 3." in ends[0]
    equal(tmp_path / "out", straight)
    done = run_here([*longer, "--allow_changed", "total_steps"])
    assert [row["step"] for row in done] == list(range(1, 18))


@pytest.mark.parametrize("kind", [OSError, SafetensorError])
def test_a_model_that_cannot_be_written_costs_what_came_behind_the_checkpoint(kind, files, straight, tmp_path):
    full = mock.patch.object(PreTrainedModel, "save_pretrained", side_effect=kind("No space left on device"))
    with full:
        messages = refused(flags(files, tmp_path / "out"))
    assert f"the model cannot be written to {tmp_path / 'out'}: No space left on device. " in messages[0]
    assert "Saved there already: checkpoint-12, run.json, metrics.jsonl. Make room, and go on" in messages[0]
    run_here(flags(files, tmp_path / "out", resume_from_checkpoint="auto"))
    equal(tmp_path / "out", straight)


def test_a_model_of_the_same_config_with_other_tensors(files, straight, tmp_path):
    """The config of a wider table is said to be that of the narrow one."""
    copy = shutil.copytree(straight / "checkpoint-8", tmp_path / "checkpoint-8")
    save_tiny_classifier(tmp_path / "wider", hidden_dropout_prob=0.1, max_position_embeddings=80)
    words = flags(
        files,
        tmp_path / "out",
        *("--allow_changed", "model"),
        model_name_or_path=tmp_path / "wider",
        resume_from_checkpoint=copy,
    )
    messages = refused(words)
    assert "position_embeddings.weight is [64, 32] in it, and [80, 32] here" in messages[1]


# Another machine


@pytest.fixture(scope="module")
def launched(files, straight, tmp_path_factory):
    """On two ranks: going on from the checkpoint of one process, and checkpoints to go on from alone."""
    folder = tmp_path_factory.mktemp("launched")
    still = {"dropout": 0}
    run_here(flags(files, folder / "alone", **still))
    runs = [
        {"flags": flags(files, folder / "ddp on", resume_from_checkpoint=folder / "alone" / "checkpoint-8", **still)},
        {"flags": flags(files, folder / "ddp", "--async_save", **still)},
        {"flags": flags(files, folder / "zero2", "--async_save", **still), "environment": ZERO2},
        {"flags": flags(files, folder / "fsdp2", "--async_save", **still), "environment": FSDP2},
    ]
    run_launched(runs, 2, folder)
    return folder


def close(left, right):
    assert [row["step"] for row in left] == [row["step"] for row in right]
    for name, limit in (("loss", 1e-5), ("grad_norm", 5e-5)):
        assert max(abs(a[name] - b[name]) / b[name] for a, b in zip(left, right)) < limit
    assert [row["samples"] for row in left] == [row["samples"] for row in right]


def test_c07_from_one_process_to_two(launched):
    close(read_rows(launched / "ddp on"), read_rows(launched / "alone"))


@pytest.mark.parametrize("name", ["ddp", "zero2", "fsdp2"])
def test_m11_from_two_processes_to_one(name, launched, files, tmp_path, capfd):
    close(read_rows(launched / name), read_rows(launched / "alone"))
    words = flags(files, tmp_path / "out", dropout=0, resume_from_checkpoint=launched / name / "checkpoint-4")
    close(run_here(words), read_rows(launched / "alone"))
    called = {"ddp": "DDP", "zero2": "ZeRO-2", "fsdp2": "FSDP2"}[name]
    said = capfd.readouterr().err
    assert f"after step 4 of 15 ({called} x 2, fp32, CPU; now one process, fp32, CPU)" in said
    assert command(["checkpoint", "verify", str(launched / name)]) == 0
    logits = logits_are_equal(
        launched / name / "checkpoint-8", "AutoModelForSequenceClassification", tmp_path / "model"
    )
    alone = Checkpoint(launched / "alone" / "checkpoint-8")
    other = Checkpoint(launched / name / "checkpoint-8")
    assert set(alone.state["tensors"]) == set(other.state["tensors"]) and logits.shape == (1, 2)
    assert len({file for file in other.files if file.startswith("model-")}) == 2  # both ranks wrote


def test_fp16_goes_on_with_its_loss_scale(files, tmp_path, capfd):
    with mock.patch.object(Precision, "patience", 3), mock.patch.object(Precision, "start", 2.0**10):
        words = flags(files, tmp_path / "a")
        run_here(words, "fp16")
        scale = Checkpoint(tmp_path / "a" / "checkpoint-8").state["scale"]
        assert scale == {"scale": 2.0**12, "since": 2}
        more = flags(files, tmp_path / "b", resume_from_checkpoint=tmp_path / "a" / "checkpoint-8")
        run_here(more, "fp16")
    equal(tmp_path / "b", tmp_path / "a")
    assert Checkpoint(tmp_path / "b" / "checkpoint-12").state["scale"] == {"scale": 2.0**14, "since": 0}
    # Under another precision the scale means nothing, and half precision after full begins with its own.
    other = run_here(flags(files, tmp_path / "c", resume_from_checkpoint=tmp_path / "a" / "checkpoint-8"))
    assert "(one process, fp16, CPU; now one process, fp32, CPU)" in capfd.readouterr().err
    assert Checkpoint(tmp_path / "c" / "checkpoint-12").state["scale"]["scale"] == 1
    assert [row["loss"] for row in other] == pytest.approx([row["loss"] for row in read_rows(tmp_path / "a")], rel=1e-2)
    run_here(flags(files, tmp_path / "d", resume_from_checkpoint=tmp_path / "c" / "checkpoint-12"), "fp16")


def test_a_bound_that_had_to_be_lowered_stays_low(files, tmp_path):
    def take(self, work, *rest):
        if work.step.number == 3:
            self.feed.bound = self.feed.bound.halved(4, 20)
        return real(self, work, *rest)

    real = Stepper.take
    with mock.patch.object(Stepper, "take", take), power_cut(5):
        run_here(flags(files, tmp_path / "out"))
    assert Checkpoint(tmp_path / "out" / "checkpoint-4").state["micro_batch_bound"]["tokens"] == 40
    run_here(flags(files, tmp_path / "out", resume_from_checkpoint="auto"))
    settings = json.loads((tmp_path / "out" / "run.json").read_text())
    assert settings["cut"]["micro_batch_bound"]["tokens"] == 40


def test_a_loss_that_was_no_number_is_no_hindrance(files, tmp_path):
    def run(self, batches, weight, seed):
        return real(self, batches, weight, seed) * (float("nan") if seed.step == 2 else 1)

    from toolkit.strategy.single import SingleProcess

    real = SingleProcess.run
    with mock.patch.object(SingleProcess, "run", run):
        words = flags(files, tmp_path / "out", "--skip_nonfinite_steps", 1)
        with power_cut(9):
            run_here(words)
        done = run_here([*words, "--resume_from_checkpoint", "auto"])
    assert len(done) == STEPS and done[1]["loss"] is None and not done[1]["applied"]
    state = Checkpoint(tmp_path / "out" / "checkpoint-12").state
    assert state["updates"] == 11 and state["skipped"] == 1


# Nothing in the folder is executed


class Bomb:
    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return (os.mkdir, (self.path,))


PICKLES = [
    *("pytorch_model.bin", "pytorch_model-00001-of-00001.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt"),
    *("scaler.pt", "scheduler.bin", "sampler.bin", "random_states_0.pkl", "custom_checkpoint_0.pkl", "rng_state.pth"),
    *(
        "rng_state_0.pth",
        "training_args.bin",
        ".metadata",
        "adapter_model.bin",
        "model.pt",
        "mp_rank_00_model_states.pt",
    ),
]


def test_n05_a_planted_pickle_is_not_executed(files, straight, tmp_path, capfd):
    planted = shutil.copytree(straight / "checkpoint-8", tmp_path / "run" / "checkpoint-8")
    sentinel = tmp_path / "executed"
    for name in PICKLES:
        (planted / name).write_bytes(pickle.dumps(Bomb(sentinel)))
    index = {"weight_map": {"x": "pytorch_model-00001-of-00001.bin"}}
    (planted / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    (planted / "modeling.py").write_text(f"import os\nos.mkdir({str(sentinel)!r})\n")
    run_here(flags(files, tmp_path / "out", resume_from_checkpoint=planted))
    equal(tmp_path / "out", straight)
    logits_are_equal(planted, "AutoModelForSequenceClassification", tmp_path / "model")
    assert not {*PICKLES, "modeling.py"} & {file.name for file in (tmp_path / "model").iterdir()}
    assert command(["checkpoint", "show", str(planted)]) == 0
    assert command(["checkpoint", "verify", str(planted)]) == 0
    assert not sentinel.exists()


@pytest.mark.parametrize(
    "name", ["model-00001-of-00001.safetensors", "optimizer-00001-of-00001.safetensors", "state.json"]
)
def test_n05_a_pickle_in_the_place_of_a_file_is_refused(name, files, straight, tmp_path):
    from toolkit.checkpoint.folder import _read_state, write_state
    from toolkit.checkpoint.tensors import checksum

    planted = shutil.copytree(straight / "checkpoint-8", tmp_path / "checkpoint-8")
    state = _read_state(planted)
    (planted / name).write_bytes(pickle.dumps(Bomb(tmp_path / "executed")))
    words = flags(files, tmp_path / "out", resume_from_checkpoint=planted)
    refused(words)
    if name != "state.json":  # with sizes and checksums to match
        state["files"][name] = {"bytes": (planted / name).stat().st_size, "sha256": checksum(planted / name)}
        write_state(planted, state)
        assert "cannot be read" in refused(words)[0]
        state["files"]["../../outside"] = {"bytes": 1, "sha256": "x"}
        write_state(planted, state)
        assert "no part of the checkpoint" in refused(words)[0]
    assert not (tmp_path / "executed").exists()


def test_code_that_a_checkpoint_names_is_not_trusted(files, straight, tmp_path):
    import transformers

    from toolkit.checkpoint.folder import _read_state, write_state
    from toolkit.checkpoint.tensors import checksum

    planted = shutil.copytree(straight / "checkpoint-8", tmp_path / "checkpoint-8")
    config = json.loads((planted / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}
    (planted / "config.json").write_text(json.dumps(config))
    (planted / "mine.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'executed')!r})\n")
    state = _read_state(planted)
    file = planted / "config.json"
    state["files"]["config.json"] = {"bytes": file.stat().st_size, "sha256": checksum(file)}
    write_state(planted, state)
    run_here(flags(files, tmp_path / "out", resume_from_checkpoint=planted))
    equal(tmp_path / "out", straight)
    assert command(["checkpoint", "export", str(planted), "--output_dir", str(tmp_path / "model")]) == 0
    with pytest.raises(ValueError, match="trust_remote_code"):
        transformers.AutoConfig.from_pretrained(planted, trust_remote_code=False)
    assert not (tmp_path / "executed").exists()


# The command


def test_show_says_what_a_checkpoint_is(straight, tmp_path, capsys):
    assert command(["checkpoint", "show", str(straight)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("one process, fp32, CPU") == 3 and "step           8 of 15, epoch 1.60" in shown
    assert "loss" in shown and "finished" in shown and "adamw, 12 updates" in shown
    copy = shutil.copytree(straight / "checkpoint-4", tmp_path / "checkpoint-4")
    (tmp_path / "run.json").write_text(json.dumps({"status": "interrupted", "interrupted_at": 4}))
    assert command(["checkpoint", "show", str(copy)]) == 0
    assert "interrupted at step 4" in capsys.readouterr().out


def test_the_command_says_what_is_wrong(straight, tmp_path, capsys):
    calls = {
        "Did you mean `verify`": ["verfy", straight],
        "comes next": ["show"],
        "unexpected --all": ["verify", straight, "--all"],
        "a new folder for the model": ["export", straight],
        "exists; nothing was changed": ["export", straight, "--output_dir", straight],
        "no such folder": ["show", tmp_path / "none"],
        "has no state.json": ["verify", tmp_path],
    }
    for said, words in calls.items():
        assert command(["checkpoint", *map(str, words)]) == 2
        shown = capsys.readouterr()
        assert said in shown.err and not shown.out
    assert command(["checkpoint", "--help"]) == 0 and "export PATH" in capsys.readouterr().out
    damaged = shutil.copytree(straight / "checkpoint-8", tmp_path / "run" / "checkpoint-8")
    flip(damaged / "tokenizer.json")
    assert command(["checkpoint", "export", str(damaged), "--output_dir", str(tmp_path / "model")]) == 2
    assert "tokenizer.json: its content is not what was written" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
