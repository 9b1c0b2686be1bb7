"""A training goes on under any other strategy and number of processes, and under the same one bit for bit."""

import pytest
import torch
from safetensors.torch import load_file

from tests.language import byte_tokenizer
from tests.runs import read_rows, run_here, run_launched
from tests.test_language_parity import save_llama
from tests.tiny import save_tiny_classifier, write_csv
from tests.ways import WAYS, Way, mesh, zero

ROWS, GLOBAL, STEPS, SAVED = 43, 10, 15, 7  # 5 steps an epoch, the last of 3 samples; saved in the second epoch
LOSS, NORM = 1e-5, 5e-5  # relative, of the runs that go on to the one that was never interrupted

# From each way to the next and round, so that each saves and goes on once; and three more pairs.
RING = ["one process", "ZeRO-2 x 2", "TP 2", "DDP x 2", "pipeline 2", "DataParallel 2", "FSDP2 x 2", "ZeRO-1 x 2"]
RING += ["ZeRO-3 x 2"]
PAIRS = [*zip(RING, [*RING[1:], RING[0]]), ("ZeRO-3 x 2", "FSDP2 x 2"), ("pipeline 2", "ZeRO-3 x 2")]
PAIRS += [("TP 2", "one process")]

# With dropout on, from the first step, from the middle of an epoch and from its last step.
FROM = (1, 7, 10)
EXACT = {"DDP x 2": WAYS["DDP x 2"], "DDP x 3": Way(3), "ZeRO-2 x 3": zero(2, 3), "ZeRO-3 x 3": zero(3, 3)}
EXACT |= {"FSDP2 x 3": mesh(3)}
TEXT = {"packed": [], "streamed": ["--streaming", "--stream_buffer_size", 16]}
TEXT_FROM = 5


def flags(folder, out, *more):
    words = {
        "--model_name_or_path": folder / "model",
        "--train_file": folder / "train.csv",
        "--output_dir": folder / out,
        "--global_batch_size": GLOBAL,
        "--per_device_train_batch_size": 3,
        "--max_steps": STEPS,
        "--learning_rate": 5e-5,
        "--save_strategy": "no",
        "--eval_strategy": "no",
    }
    return [str(word) for pair in words.items() for word in pair] + [str(word) for word in more]


def saving(folder, way, name):
    """A run that leaves a checkpoint in the middle of an epoch."""
    more = ["--dropout", 0, "--save_strategy", "steps", "--save_steps", SAVED]
    return way.run(flags(folder, name, *more))


def going_on(folder, way, saved, name):
    """A run that goes on from what another one has left."""
    return way.run(flags(folder, name, "--dropout", 0, "--resume_from_checkpoint", folder / saved))


def exact(folder, name, way):
    """A run with dropout that saves after every step, and those that go on from some of them."""
    more = ["--dropout", 0.1, "--save_strategy", "steps", "--save_steps", 1, "--save_total_limit", STEPS]
    whole = way.run(flags(folder, f"{name} whole", *more))
    rest = [
        flags(folder, f"{name} from {step}", "--dropout", 0.1, *resume(folder, f"{name} whole", step)) for step in FROM
    ]
    return [whole, *map(way.run, rest)]


def resume(folder, name, step):
    return ["--resume_from_checkpoint", folder / name / f"checkpoint-{step}"]


def texts(folder, name, how):
    """The same of a language model, from one step."""
    words = ["--model_name_or_path", folder / "llama", "--train_file", folder / "lines.txt", "--block_size", 24]
    words += ["--document_separator", "line", "--max_steps", 9, "--global_batch_size", 6, "--dropout", 0.1, *how]
    words += ["--per_device_train_batch_size", 1, "--eval_strategy", "no", "--cache_dir", folder / "cache"]
    whole = [*words, "--output_dir", folder / f"{name} whole", "--save_strategy", "steps", "--save_steps", TEXT_FROM]
    rest = [*words, "--output_dir", folder / f"{name} rest", *resume(folder, f"{name} whole", TEXT_FROM)]
    return [{"flags": list(map(str, run)), "task": "language_modeling"} for run in (whole, rest)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All runs: those of one process here, those of two and of three ranks in one launch each."""
    folder = tmp_path_factory.mktemp("ring")
    save_tiny_classifier(folder / "model")
    write_csv(folder / "train.csv", ROWS, seed=3)
    save_llama(folder / "llama")
    byte_tokenizer().save_pretrained(folder / "llama")
    (folder / "lines.txt").write_text("".join(f"{'abcdefgh ' * (i % 5)}{i}\n" for i in range(40)))
    runs = [(way.processes, saving(folder, way, name)) for name, way in WAYS.items()]
    runs += [(1, WAYS["one process"].run(flags(folder, "whole", "--dropout", 0)))]
    for before, after in PAIRS:
        run = going_on(folder, WAYS[after], f"{before}/checkpoint-{SAVED}", f"{before} to {after}")
        runs.append((WAYS[after].processes, run))
    # 2 -> 1 -> 3 processes in one training.
    alone = flags(folder, "2 1", "--dropout", 0, "--save_strategy", "steps", "--save_steps", 11)
    runs.append((1, WAYS["one process"].run([*alone, *map(str, resume(folder, "DDP x 2", SAVED))])))
    runs += [(3, going_on(folder, Way(3), "2 1/checkpoint-11", "2 1 3"))]
    runs += [(way.processes, run) for name, way in EXACT.items() for run in exact(folder, name, way)]
    runs += [(3, run) for name, how in TEXT.items() for run in texts(folder, name, how)]
    # What one process saves comes first, and goes on last.
    late = [run for processes, run in runs if processes == 1 and "--resume_from_checkpoint" in run["flags"]]
    for processes, run in runs:
        if processes == 1 and run not in late:
            run_here(**run)
    run_launched([run for processes, run in runs if processes == 2], 2, folder, timeout=600)
    for run in late:
        run_here(**run)
    run_launched([run for processes, run in runs if processes == 3], 3, folder, timeout=600)
    return folder


def close(folder, name, since=0):
    """The losses of a run after a step are those of the one that was never interrupted."""
    whole, rows = read_rows(folder / "whole"), read_rows(folder / name)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for key, limit in {"loss": LOSS, "grad_norm": NORM}.items():
        assert max(abs(row[key] / other[key] - 1) for row, other in zip(rows[since:], whole[since:])) < limit
    assert [row["samples"] for row in rows] == [row["samples"] for row in whole]


def equal(left, right):
    """The weights of two runs have the same bits."""
    one, other = load_file(left / "model.safetensors"), load_file(right / "model.safetensors")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_the_ring_is_round():
    assert sorted(RING) == sorted(WAYS) and len(set(PAIRS)) == len(WAYS) + 3


@pytest.mark.parametrize("before, after", PAIRS)
def test_from_one_way_to_another(before, after, folder):
    close(folder, before)  # saving changes nothing
    close(folder, f"{before} to {after}")


def test_from_two_processes_to_one_to_three(folder):
    close(folder, "2 1")
    close(folder, "2 1 3")


@pytest.mark.parametrize("step", FROM)
@pytest.mark.parametrize("name", EXACT)
def test_the_same_way_goes_on_bit_for_bit(name, step, folder):
    equal(folder / f"{name} from {step}", folder / f"{name} whole")
    key = "grad_norm"  # a last digit of a norm shows what weights after few steps may hide
    one, other = read_rows(folder / f"{name} from {step}"), read_rows(folder / f"{name} whole")
    assert [row[key] for row in one] == [row[key] for row in other]


@pytest.mark.parametrize("name", TEXT)
def test_a_language_model_goes_on_bit_for_bit(name, folder):
    equal(folder / f"{name} rest", folder / f"{name} whole")
