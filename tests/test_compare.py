"""`toolkit compare`: what is made of the launches of each config, and the command."""

import json
import statistics
from types import SimpleNamespace

import pytest

from tests.comparisons import gpu
from tests.runs import ROOT
from tests.tiny import write_csv
from toolkit.errors import UserError
from toolkit.launch.cases import Case
from toolkit.launch.compare import main, resolution
from toolkit.launch.machine import Machine
from toolkit.launch.trials import Contender, Trial, spread
from toolkit.phases import PHASES

CPU = Machine(0, (), (), None, True, True, False, 2, 8 * 2**30)
SETTINGS = {"strategy": "DDP", "devices_per_process": 1}


def trial(seconds, samples=8, losses=None, warmup=2, **rank):
    """A launch of two ranks whose steps take so many seconds and see 8 samples, 80 tokens each."""
    rows = [
        {
            **{"step": i + 1, "seconds": time, "samples": samples * (i + 1), "tokens": 10 * samples * (i + 1)},
            **{"loss": losses[i] if losses else 1.0, "grad_norm": 1.0},
        }
        for i, time in enumerate(seconds)
    ]
    memory = [{"device": "cpu", "peak_allocated": None, "peak_reserved": None, "peak_resident": 100}]
    known = {"energy": [], "memory": memory, "bytes_held": {"parameters": 4}, "bytes_sent": 3, "began": 5.0}
    return Trial(rows, [known | rank, known | rank], {"replicated": 1, "different": []}, SETTINGS, 4.0, warmup)


def contender(*timed, name="multi_gpu"):
    made = Contender(Case.read(name, CPU), None, None, 1.0)
    made.timed = list(timed)
    return made


def test_speed_is_of_the_steps_behind_the_warm_up():
    one = trial([100.0, 100.0, 1.0, 3.0])
    assert one.per_second("samples") == 16 / 4
    assert one.per_second("tokens") == 160 / 4


def test_energy_is_of_a_step_on_all_devices():
    assert trial([1.0] * 4, energy=[50.0, 60.0, 80.0, 100.0]).joules == 2 * (100 - 60) / 2
    assert trial([1.0] * 4).joules is None


def test_memory_is_the_most_of_each_device():
    def gpus(first, second):
        numbers = [
            {"device": f"cuda:{i}", "peak_allocated": n, "peak_reserved": n + 1} for i, n in enumerate((first, second))
        ]
        return [device | {"peak_resident": 7} for device in numbers]

    alone = contender(trial([1.0] * 4, memory=gpus(30, 10)), trial([1.0] * 4, memory=gpus(20, 12)))
    for one in alone.timed:
        del one.ranks[1]
    summary = alone.summary(alone, [alone])
    assert [device["peak_allocated"] for device in summary["memory"]] == [30, 12]
    assert [device["device"] for device in summary["memory"]] == ["cuda:0", "cuda:1"]
    assert summary["memory_imbalance"] == 30 / 21


def test_efficiency_is_against_one_device_of_the_same_precision():
    single, two = contender(trial([2.0] * 4), name="single_gpu"), contender(trial([1.25] * 4))
    half = contender(trial([0.5] * 4), name="multi_gpu_bf16")
    both = [single, two, half]
    assert two.summary(single, both)["efficiency"] == pytest.approx(2 / 1.25 / 2)
    assert half.summary(single, both)["efficiency"] is None


def test_parity_is_told_beside():
    single = contender(trial([1.0] * 4, losses=[1.0, 2.0, 3.0, 4.0]), name="single_gpu")
    other = contender(trial([1.0] * 4, losses=[1.0, 2.0, 3.0, 4.4]))
    found = other.summary(single, [single, other])["parity"]
    assert found["loss"] == pytest.approx(0.1)
    assert found["verdict"] == "DIFFERENT from step 4 on"


def test_what_may_be_chance():
    """Against the standard error computed from known deviations: 2,000 pairs of normal samples with one of 2 %."""
    import random

    draw = random.Random(0)
    pairs = [[100 * (1 + draw.gauss(0, 0.02)) for _ in range(2)] for _ in range(2000)]
    made = [SimpleNamespace(timed=[SimpleNamespace(samples_per_second=value) for value in pair]) for pair in pairs]
    standard_error = (2 * 0.02**2 / 2) ** 0.5  # of the difference of two means of two
    assert resolution(made, rehearsal=False) == pytest.approx(3 * standard_error, rel=0.05)
    assert resolution([contender(trial([1.0] * 4))], rehearsal=False) is None
    # Between two rehearsals more has been seen than that.
    assert resolution(made, rehearsal=True) == resolution([contender(trial([1.0] * 4))], rehearsal=True) == 0.3


def test_spread():
    assert spread(iter([3.0, 1.0])) == {"median": 2.0, "least": 1.0, "most": 3.0, "all": [3.0, 1.0]}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--warmup", "2"], "--warmup 2: at least 3"),
        (["--repetitions", "0", "--steps", "0"], "--steps 0: at least 1"),
        (["--nonsense"], "Flags of the task stand behind"),
        (["zero2", "--from", "a.json"], "leave out zero2"),
        (["--from", "no.json"], "no.json: cannot be read"),
        (["--output_dir", f"{ROOT}/README.md"], "README.md is a file"),
        (["--output_dir", f"{ROOT}/README.md/deep", "--from", "a.json"], "inside of one"),
    ],
)
def test_mistakes_of_the_user(words, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        main(words)
    assert told in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [[], ["--from", "full/compare.json"]])
@pytest.mark.parametrize("name", ["compare.json", "runs", ".theirs"])
def test_a_folder_that_is_not_empty_is_refused_before_anything_else(words, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full" / name).mkdir(parents=True)
    monkeypatch.setattr("toolkit.launch.compare.detect", lambda: pytest.fail("it goes on"))
    with pytest.raises(UserError, match=r"--output_dir full is not empty.* Give another .*; --from puts"):
        main([*words, "--output_dir", "full"])
    assert [path.name for path in (tmp_path / "full").iterdir()] == [name]


def test_the_default_folder_is_a_new_one_each_time_and_an_empty_one_may_be_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "one.json").write_text(json.dumps(gpu()))
    (tmp_path / "empty").mkdir()
    for _ in range(2):
        assert main(["--from", "one.json", "one.json"]) == 0
    assert main(["--from", "one.json", "--output_dir", "empty"]) == 0
    assert {str(path.parent.relative_to(tmp_path)) for path in tmp_path.rglob("compare.json")} == {
        *("output/compare", "output/compare-2", "empty")
    }


@pytest.fixture(scope="module")
def compared(tiny_classifier, tmp_path_factory):
    """One command: three configs, one of which runs out of memory; and one that cannot run here."""
    folder = tmp_path_factory.mktemp("compare")
    data = write_csv(folder / "train.csv", 64, seed=1)
    wrong = folder / "wrong <b>.yaml"
    wrong.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n")
    words = [
        "single_gpu",
        "data_parallel",
        "multi_gpu",
        f"'{wrong}'",
        "--steps",
        "2",
        "--output_dir",
        str(folder / "out"),
    ]
    task = [str(ROOT / "tests" / "greedy.py"), "--model_name_or_path", str(tiny_classifier), "--train_file", str(data)]
    assert main([*words, "--", *task, "--global_batch_size", "6"]) == 0
    return json.loads((folder / "out" / "compare.json").read_text())


def test_the_command(compared):
    assert compared["settings"]["global_batch_size"] == 6
    assert compared["reference"] == "single_gpu"
    single, parallel, _, _ = compared["configs"]
    for config in (single, parallel):
        assert config["failure"] is None
        speed = config["throughput"]["samples_per_second"]
        assert len(speed["all"]) == 2 and speed["median"] == pytest.approx(statistics.mean(speed["all"]))
        assert config["parity"]["verdict"] == "equal"
        phases = config["phases"]
        assert sum(phases[name] for name in PHASES) + phases["unattributed"] == pytest.approx(phases["total"])
        assert len(config["losses"]) == 5
        assert config["startup_seconds"]["least"] > 1
        assert config["memory"][0]["peak_resident"] > 100e6
    assert "DataParallel" in parallel["title"] and parallel["devices"] == 2


def test_a_config_that_fails_is_a_row_with_its_reason(compared):
    _, _, two, wrong = compared["configs"]
    assert "out of memory in step 5" in two["failure"]
    assert "cannot run here" in wrong["failure"]


def test_a_config_whose_profiled_launch_alone_fails_keeps_its_figures(tmp_path, monkeypatch):
    def fails(case, script, flags, log, limit):
        log.write_text("error: no room for a trace\n")
        return 1

    made = contender(trial([1.0] * 4))
    made.folder = tmp_path
    monkeypatch.setattr(Case, "run", fails)
    made.profile([])
    summary = made.summary(made, [made])
    assert summary["failure"] is None and summary["throughput"]["samples_per_second"]["median"] == 8
    assert summary["phases"] is None and summary["phases_failure"] == "error: no room for a trace"
    made.time([], 2)
    assert made.failure == "repetition 2: error: no room for a trace"


def test_a_launch_that_does_not_end_is_ended(tiny_classifier, tmp_path):
    script = tmp_path / "sleepy.py"
    script.write_text("import time\ntime.sleep(300)\n")
    made = Contender(Case.read("single_gpu", CPU), script, tmp_path, 8.0)
    made.time([], 3)
    assert made.failure == "repetition 1: no end after 8 s"
