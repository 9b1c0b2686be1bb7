"""`toolkit parity`: the comparison, the cases, the command."""

import json
import math
import re

import pytest

from tests.tiny import write_csv
from toolkit.errors import UserError
from toolkit.launch.cases import Case, last_error, same_step, split_words, without_flag
from toolkit.launch.machine import Machine
from toolkit.launch.parity import Outcome, compare, main, short_run

CPU = Machine(0, (), (), None, True, True, False, 2, 8 * 2**30)
GPUS = Machine(4, ("x",) * 4, (2**34,) * 4, None, True, True, False, 8, 2**36)


def rows(losses, norms):
    return [{"step": i + 1, "loss": loss, "grad_norm": norm} for i, (loss, norm) in enumerate(zip(losses, norms))]


def outcome(losses, norms, precision="no"):
    return Outcome("x", precision, 2, compare(rows(losses, norms), rows([1.0, 2.0, 4.0], [1.0, 1.0, 1.0])))


@pytest.mark.parametrize(
    ("losses", "norms", "precision", "verdict"),
    [
        ([1.0, 2.0, 4.0], [1.0, 1.0, 1.0], "no", "equal"),
        ([1.0, 2.00001, 4.0], [1.0, 1.0, 1.00004], "no", "equal"),
        ([1.0, 2.0, 4.0001], [1.0, 1.0, 1.0], "no", "DIFFERENT from step 3 on"),
        ([1.0, 2.0, 4.0], [1.0, 1.0001, 1.0], "no", "DIFFERENT from step 2 on"),
        ([1.0, 2.0, 4.02], [1.0, 1.01, 1.0], "bf16", "equal"),
        ([1.0, 2.0, 4.05], [1.0, 1.0, 1.0], "bf16", "DIFFERENT from step 3 on"),
        ([math.nan, 2.0, 4.0], [1.0, 1.0, 1.0], "bf16", "DIFFERENT from step 1 on"),
    ],
)
def test_verdict(losses, norms, precision, verdict):
    assert outcome(losses, norms, precision).verdict == verdict


def test_a_step_that_overflowed_has_no_norm_to_compare():
    """As metrics.jsonl has it: infinity is a text, NaN is null."""
    expected = rows([1.0, 2.0], [1.0, 1.0])
    found = rows([1.0, 2.0], ["Infinity", 1.0])
    found[0]["applied"] = False
    norms = {
        precision: [step.norm_difference for step in compare(found, expected, precision)]
        for precision in ("fp16", "no")
    }
    assert norms == {"fp16": [0.0, 0.0], "no": [math.inf, 0.0]}
    assert compare(rows([None, 2.0], [None, 1.0]), expected)[0].loss_difference == math.inf


def test_a_difference_behind_a_step_without_an_update_says_so():
    expected = rows([1.0, 2.0, 4.0, 8.0], [1.0] * 4)
    found = rows([1.0, 2.0, 4.1, 8.1], [1.0, "Infinity", 1.0, 1.0])
    found[1]["applied"] = False
    verdict = Outcome("x", "fp16", 2, compare(found, expected, "fp16")).verdict
    assert verdict == "DIFFERENT from step 3 on, having left out the update of step 2, which overflowed"


def test_replicas_that_differ_are_no_success():
    result = outcome([1.0, 2.0, 4.0], [1.0, 1.0, 1.0])
    result.diagnostics = {"replicas": {"replicated": 3, "different": ["a.weight"]}}
    assert "REPLICAS DIFFER: a.weight" in result.verdict


def test_a_case_reads_its_flags_and_what_the_config_asks_for():
    case = Case.read("pipeline_parallel --num_processes 4 --pipeline_stages 4", CPU)
    assert (case.processes, case.flags) == (4, ["--pipeline_stages", "4"])
    assert Case.read("pipeline_parallel", CPU).flags == ["--pipeline_stages", "2"]
    assert Case.read("data_parallel", CPU).flags == ["--data_parallel"]
    assert Case.read("multi_gpu", GPUS).processes == 4
    assert Case.read("single_gpu", GPUS).processes == 1
    with pytest.raises(UserError, match="multi_gpu"):
        Case.read("multi_gpus", CPU)


def test_the_global_batch_is_said_outright(tmp_path):
    words = ["--per_device_train_batch_size", "4", "--gradient_accumulation_steps", "3", "--seed", "1"]
    assert same_step(words) == ["--per_device_train_batch_size", "4", "--seed", "1", "--global_batch_size", "12"]
    assert same_step([])[-2:] == ["--global_batch_size", "32"]
    assert without_flag(["--a=1", "--b", "2", "--ab", "3"], "--b") == ["--a=1", "--ab", "3"]
    assert short_run(["--learning_rate", "1e-3"], 5)[-2:] == ["--learning_rate", "5e-05"]


@pytest.mark.parametrize(
    "words, said",
    [
        ("", "empty"),
        ("zero2 'x", "No closing quotation"),
        ("zero2 --num_processes two", "--num_processes: invalid int value: 'two'"),
        ("zero2 --num_processes", "--num_processes: expected one argument"),
        ("zero2 --num_processes=0", "expected at least 1"),
        ("tasks/classify.py", "stand behind `--`"),
    ],
)
def test_a_case_that_cannot_be_read(words, said):
    with pytest.raises(UserError, match=re.escape(said)):
        Case.read(words, CPU)


def test_words_before_and_after_the_dashes(tmp_path):
    own, script, task = split_words(["zero2", "--steps", "3"])
    assert (own, script.name, task) == (["zero2", "--steps", "3"], "classify.py", [])
    with pytest.raises(UserError, match="the task script comes first"):
        split_words(["zero2", "--", "--train_file", "x"])


def test_the_cause_of_a_failed_launch(tmp_path):
    log = tmp_path / "log"
    log.write_text("loading\n\nerror: the config is wrong.\nTraceback of torchrun\n")
    assert last_error(log) == "error: the config is wrong."
    log.write_text("")
    assert last_error(log) == "it said nothing"


def test_the_command_on_a_users_task(tiny_classifier, tmp_path, capsys):
    data = write_csv(tmp_path / "train.csv", 24, seed=1)
    out = tmp_path / "parity"
    task = ["tasks/classify.py", "--model_name_or_path", str(tiny_classifier), "--train_file", str(data)]
    task += ["--global_batch_size", "10", "--per_device_train_batch_size", "3"]
    assert main(["multi_gpu", "--steps", "4", "--output_dir", str(out), "--", *task]) == 0
    shown = capsys.readouterr()
    assert "step   4" in shown.err and "equal" in shown.out
    reference, ddp = json.loads((out / "parity.json").read_text())
    assert (reference["name"], ddp["name"], ddp["verdict"]) == ("single_gpu", "multi_gpu", "equal")
    assert [step["step"] for step in ddp["steps"]] == [1, 2, 3, 4]
    assert ddp["diagnostics"]["replicas"]["different"] == []
    assert "| multi_gpu | 2 |" in (out / "parity.md").read_text()


def test_a_config_that_fails_is_a_line_with_its_reason(tiny_classifier, tmp_path, capsys):
    data = write_csv(tmp_path / "train.csv", 24, seed=1)
    task = ["tasks/classify.py", "--model_name_or_path", str(tiny_classifier), "--train_file", str(data)]
    broken = tmp_path / "broken.yaml"
    broken.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n")
    assert main([str(broken), "--steps", "1", "--", *task]) == 1
    assert "cannot run here" in capsys.readouterr().out
