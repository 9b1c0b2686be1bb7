"""Training on a stream: the steps of a plain loop, on any number of processes, and on from any step."""

import json

import numpy as np
import pytest

from tests.families import make
from tests.language import Flags, byte_tokenizer
from tests.runs import read_rows, run_here, run_launched
from tests.test_language_parity import plain_training, save_llama
from toolkit.data.plan import Step
from toolkit.errors import UserError
from toolkit.language.packing import best_fit
from toolkit.language.stream import Stream
from toolkit.language.streamed import Streamed, Untokenised, buffers
from toolkit.language.tokens import CAUSAL, Encoder

LINES, BLOCK, GLOBAL, BUFFER, SEED, STEPS = 30, 24, 4, 8, 7, 13
LONG = 50  # letters of a line that becomes three chunks


def words(*flags):
    return [str(word) for word in flags]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A causal and a masked model over bytes, and files of 30 lines: of 1 to 14 letters, or up to 50."""
    folder = tmp_path_factory.mktemp("streaming")
    save_llama(folder / "llama")
    make("Bert", vocab_size=260).save_pretrained(folder / "bert")
    byte_tokenizer(mask=True).save_pretrained(folder / "bert")
    draw = np.random.RandomState(3)
    for name, longest in {"short": 15, "long": LONG + 1}.items():
        lines = ["".join(draw.choice(list("abcdefgh "), draw.randint(1, longest))) + "z" for _ in range(LINES)]
        (folder / f"{name}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (folder / "three.txt").write_text("one\ntwo\nthree\n")
    return folder


def flags(folder, out, file="long", model="llama", **more):
    given = {
        "model_name_or_path": folder / model,
        "train_file": folder / f"{file}.txt",
        "output_dir": folder / out,
        "cache_dir": folder / "cache",
        "document_separator": "line",
        "stream_buffer_size": BUFFER,
        "block_size": BLOCK,
        "global_batch_size": GLOBAL,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "seed": SEED,
        **more,
    }
    return ["--streaming", *words(*(word for name, value in given.items() for word in (f"--{name}", value)))]


def train(*args, **more):
    return run_here(flags(*args, **more), task="language_modeling")


SAVING = {"save_strategy": "steps", "save_steps": 5}
MASKED = {"model": "bert", "objective": "masked"}
RUNS = {"packed": SAVING, "padded": {"packing": "none"}, "masked": MASKED}
DROPOUT = {**SAVING, **MASKED, "dropout": 0.2}


@pytest.fixture(scope="module")
def alone(folder):
    """The step rows of every kind of run on one process; the packed one, and one with dropout, save on the way."""
    runs = {**RUNS, "dropout": DROPOUT}
    return {name: train(folder, f"{name} alone", **more) for name, more in runs.items()}


@pytest.fixture(scope="module")
def both(folder, alone):
    """The same on two processes, and a run that goes on there from step 5 of one process."""
    on = {"resume_from_checkpoint": folder / "packed alone" / "checkpoint-5"}
    runs = [
        {"flags": flags(folder, f"{name} both", **more), "task": "language_modeling"}
        for name, more in {**RUNS, "on": on}.items()
    ]
    run_launched(runs, 2, folder)
    return {name: read_rows(folder / f"{name} both") for name in (*RUNS, "on")}


def samples_of(file, packed):
    """All samples of a file of short lines in the order of the stream, epoch by epoch: lists of chunks."""
    documents = [[*(byte + 4 for byte in line), 2] for line in file.read_bytes().splitlines()]
    epoch = 0
    while True:
        for number, start in enumerate(range(0, len(documents), BUFFER)):
            part = documents[start : start + BUFFER]
            found = [[document] for document in part]
            if packed:
                found = [[part[i] for i in block] for block in best_fit([len(d) for d in part], BLOCK)]
            draw = np.random.RandomState(np.random.MT19937(np.random.SeedSequence([SEED, epoch, number])))
            yield epoch, [found[i] for i in draw.permutation(len(found))]
        epoch += 1


def batches_of(file, packed):
    """Global batches of chunks; an epoch's last may be smaller."""
    batches, batch, epoch = [], [], 0
    for now, samples in samples_of(file, packed):
        if now > epoch and batch:
            batches, batch = [*batches, batch], []
        epoch = now
        for sample in samples:
            batch.append(sample)
            if len(batch) == GLOBAL:
                batches, batch = [*batches, batch], []
        if len(batches) > STEPS:
            return [[chunk for sample in batch for chunk in sample] for batch in batches[:STEPS]]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_the_steps_are_those_of_a_plain_loop(packed, folder):
    """Two epochs, the second in another order."""
    rows = train(folder, f"short {packed}", "short", packing="best_fit" if packed else "none")
    losses, norms, _ = plain_training(folder / "llama", batches_of(folder / "short.txt", packed))
    assert [row["loss"] for row in rows] == pytest.approx(losses, rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx(norms, rel=5e-5)
    assert rows[-1]["epoch"] > 1


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_take_the_same_steps(name, alone, both):
    assert len(both[name]) == STEPS
    for key in ("loss", "grad_norm", "samples", "tokens", "epoch"):
        ours, theirs = ([row[key] for row in rows[name]] for rows in (both, alone))
        assert ours == pytest.approx(theirs, rel=5e-5 if key == "grad_norm" else 1e-5)


def test_nothing_of_an_epoch_is_lost(folder, alone):
    """Its tokens are those of all lines with their ends, and a chunk that goes on has one of the chunk before."""
    lengths = [len(line) + 1 for line in (folder / "long.txt").read_bytes().splitlines()]
    chunks = sum(max(1, -(-(length - 1) // (BLOCK - 1))) for length in lengths)
    assert chunks > LINES
    assert {row["tokens"] for row in alone["packed"]} & {sum(lengths) + chunks - LINES}
    padded = next(row for row in alone["padded"] if row["epoch"] >= 1)
    assert padded["epoch"] == 1 and padded["samples"] == chunks and padded["tokens"] == sum(lengths) + chunks - LINES


@pytest.mark.parametrize("step", [5, 10])
def test_a_resumed_run_goes_on_bit_for_bit(step, folder, alone):
    """In the middle of a buffer, with dropout and masks."""
    checkpoint = folder / "dropout alone" / f"checkpoint-{step}"
    rows = train(folder, f"on {step}", **DROPOUT, resume_from_checkpoint=checkpoint)
    for key in ("loss", "grad_norm", "tokens", "samples", "epoch"):
        assert [row[key] for row in rows] == [row[key] for row in alone["dropout"]]


def test_a_run_goes_on_with_more_processes(alone, both):
    assert [row["loss"] for row in both["on"]] == pytest.approx([row["loss"] for row in alone["packed"]], rel=1e-5)
    assert [row["tokens"] for row in both["on"]] == [row["tokens"] for row in alone["packed"]]


def test_a_stream_shorter_than_a_batch_is_an_epoch_a_step(folder):
    out = "three lines"
    more = {"packing": "none", "global_batch_size": 8, "max_steps": 3, "eval_strategy": "epoch"}
    rows = train(folder, out, "three", validation_file=folder / "short.txt", **more)
    assert [(row["epoch"], row["samples"]) for row in rows] == [(1, 3), (2, 6), (3, 9)]
    lines = [json.loads(line) for line in (folder / out / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["epoch"]) for line in lines if "eval_loss" in line] == [(1, 1), (2, 2), (3, 3)]
    results = json.loads((folder / out / "all_results.json").read_text())
    assert results["epoch"] == 3 and results["train_samples"] is None
    settings = json.loads((folder / out / "run.json").read_text())
    assert settings["samples"]["train"] is None and settings["samples"]["validation"] > 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--train_sampling_strategy", "group_by_length"], "group_by_length needs all"),
        (["--dataloader_num_workers", 2], "read between the steps"),
        (["--packing", "concatenate"], "not with --streaming"),
        (["--max_train_samples", 3], "max_train_samples needs all"),
    ],
)
def test_what_a_stream_cannot_do_is_said(more, message, folder):
    with pytest.raises(UserError, match=message):
        run_here([*flags(folder, "none"), *words(*more)], task="language_modeling")


def test_the_number_of_steps_is_asked_for(folder):
    given = flags(folder, "none")
    at = given.index("--max_steps")
    with pytest.raises(UserError, match="needs --max_steps"):
        run_here(given[:at] + given[at + 2 :], task="language_modeling")


def streamed(folder, file, how, block=BLOCK, check=lambda tokens: None, tokenizer=None):
    from tasks.language_modeling import LanguageModelingArguments
    from toolkit.arguments import parse

    args = parse(LanguageModelingArguments, flags(folder, "none", file))
    return Streamed(args, tokenizer or byte_tokenizer(), block, how, None, check)


@pytest.mark.parametrize("how", ["best_fit", "none"])
def test_what_is_tried_has_the_greatest_length(how, folder):
    samples = streamed(folder, "three", how)
    assert samples.lengths.max() == BLOCK == len(samples[len(samples) - 1]["positions"])
    drawn = next(samples.batches(2, None))
    assert [len(drawn.samples[i]["tokens"]) <= drawn.samples.lengths[i] for i in range(len(drawn.samples))]


def test_a_fingerprint_is_of_files_cutting_and_tokenizer(folder):
    other = byte_tokenizer()
    other.add_tokens(["one", "two", "three"])
    ways = [("three", "none"), ("three", "best_fit"), ("short", "none")]
    found = [streamed(folder, *way).fingerprint() for way in ways]
    found.append(streamed(folder, "three", "none", tokenizer=other).fingerprint())
    assert len(set(found)) == 4
    assert streamed(folder, "three", "none").fingerprint() == found[0]


def test_samples_are_named_by_their_places(folder):
    drawn = next(streamed(folder, "three", "none").batches(3, None))
    names = Step(1, 0, np.arange(3), True, 1.0, drawn).names
    assert sorted(names) == [f"{folder / 'three.txt'}:{line}" for line in (1, 2, 3)]
    assert Step(1, 0, np.array([4, 2]), True).names == ["4", "2"]


def test_tokens_that_the_model_has_not_are_refused(folder):
    def check(tokens):
        if (tokens >= 100).any():
            raise UserError("tokenizer and model do not belong together")

    with pytest.raises(UserError, match="do not belong together"):
        streamed(folder, "three", "none", check=check)


def test_a_record_is_tokenised_by_who_trains_on_it(folder):
    """Where nothing is packed, and its bytes say that it is one chunk."""

    class Counting(Encoder):
        def __call__(self, documents):
            documents = list(documents)
            self.seen = getattr(self, "seen", []) + [document.text for document in documents]
            return super().__call__(documents)

    encoder = Counting(byte_tokenizer(), CAUSAL)
    args = Flags(train_file=[str(folder / "long.txt")], document_separator="line", max_steps=1)
    batch = next(Stream(args, byte_tokenizer(), buffers(encoder, BLOCK, "none")).batches(LINES))
    lines = (folder / "long.txt").read_text().splitlines()
    assert encoder.seen == [line for line in lines if len(line) + 1 > BLOCK - 2] != []
    short = next(sample for sample in batch if isinstance(sample, Untokenised))
    before = len(encoder.seen)
    short.row()
    assert encoder.seen[before:] == [short.record.document().text]
