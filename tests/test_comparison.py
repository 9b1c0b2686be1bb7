"""What is made out of a comparison: recommendation, merge, csv, terminal table, pictures, the page's markup."""

import copy
import csv
import json
import re
import xml.etree.ElementTree as ElementTree
from html import unescape
from pathlib import Path

import pytest

from tests.comparisons import ODD, gpu, rehearsal
from toolkit.errors import UserError
from toolkit.launch.strategies import simplicity
from toolkit.report.comparison import words
from toolkit.report.comparison.files import terminal_table, write_csv
from toolkit.report.comparison.merge import merge, read
from toolkit.report.comparison.page import write_page
from toolkit.report.comparison.pictures import write_pictures
from toolkit.report.comparison.verdict import recommend

ROOT = Path(__file__).resolve().parents[1]
EVERY_OUTPUT = "Rehearsal on CPU: parity and mechanics are real, speed and memory are of the rehearsal"


def of(comparison, name):
    return next(config for config in comparison["configs"] if config["name"] == name)


def with_speed(comparison, name, least, median, most):
    of(comparison, name)["throughput"]["samples_per_second"] = {
        "least": least,
        "median": median,
        "most": most,
        "all": [least, most],
    }


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "–"),
        (0, "0"),
        (1234.5, "1,234"),
        (41.23, "41.2"),
        (0.9312, "0.931"),
        (0.00123, "0.00123"),
        (99.96, "100.0"),
    ],
)
def test_three_digits(value, said):
    assert words.number(value) == said


def test_sizes_and_times():
    assert [words.size(value) for value in (None, 0, 999, 91_200_000, 12_345_678_900)] == [
        *("–", "0 B", "999 B", "91.2 MB", "12.3 GB")
    ]
    assert [words.seconds(value) for value in (None, 0.0831, 1.239)] == ["–", "83.1 ms", "1.24 s"]
    assert words.spread({"median": 41.2, "least": 40.1, "most": 42}) == "41.2 (40.1 to 42.0)"
    assert words.spread({"median": 41.2, "least": 41.2, "most": 41.2}) == "41.2"
    assert words.get({"parity": {"loss": "Infinity"}}, "parity", "loss") == float("inf")
    assert words.get({"parity": None}, "parity", "loss") is None


def test_the_fastest_is_recommended():
    verdict = recommend(gpu())
    assert verdict["config"] == "multi_gpu"
    assert "multi_gpu (DDP) is the fastest of the 9 configs that train the same" in verdict["why"]
    assert "1,530 (1,507 to 1,553) samples/s on 2 devices, 1.88 times single_gpu" in verdict["why"]
    assert "Its fullest device needs 5.40 GB. If memory runs short: fsdp2 needs 4.00 GB" in verdict["why"]


def test_within_the_spread_the_simpler_one_is_recommended():
    comparison = gpu()
    with_speed(comparison, "pipeline_parallel --pipeline_stages 2", 1550, 1560, 1570)
    assert recommend(comparison)["config"] == "multi_gpu"
    assert "within the spread" in recommend(comparison)["why"]
    assert recommend(comparison)["config"] == "multi_gpu"  # 1,530 of 1,560: less than the 2.1 % that it states
    with_speed(comparison, "pipeline_parallel --pipeline_stages 2", 1570, 1600, 1650)
    assert recommend(comparison)["config"] == "pipeline_parallel --pipeline_stages 2"
    with_speed(comparison, "pipeline_parallel --pipeline_stages 2", 1550, 1600, 1650)
    assert recommend(comparison)["config"] == "multi_gpu"  # which came to 1,553


def test_simplicity():
    names = ["one process", "DDP", "DataParallel", "ZeRO-1", "ZeRO-2", "FSDP2", "HSDP 2 x 2", "ZeRO-3", "TP 2"]
    names += ["FSDP2 x TP 2 x 2", "HSDP x TP 2 x 2 x 2", "pipeline of 2 stages", "another", "ZeRO-2 with CPU offload"]
    assert sorted(reversed(names), key=simplicity) == names


def test_one_that_trains_differently_or_failed_is_not_recommended():
    comparison = gpu()
    of(comparison, "multi_gpu")["parity"]["verdict"] = "DIFFERENT from step 3 on"
    assert recommend(comparison)["config"] == "zero1"
    for config in comparison["configs"]:
        config["failure"] = "it crashed"
    assert recommend(comparison) == {
        "config": None,
        "why": "No config can be recommended: none ran and trained what the reference did.",
    }


def test_a_reference_without_parity_is_itself():
    comparison = gpu()
    of(comparison, "single_gpu")["parity"] = None
    assert words.same_training(of(comparison, "single_gpu"), "single_gpu")
    of(comparison, "fsdp2")["parity"] = None
    assert not words.same_training(of(comparison, "fsdp2"), "single_gpu")


def test_a_rehearsal_recommends_nothing_and_says_what_it_knows():
    verdict = recommend(rehearsal())
    assert verdict["config"] is None
    assert "speed must be measured on the real devices" in verdict["why"]
    assert "8 of the configs train what single_gpu trains (the loss differs by at most 8.8e-07)" in verdict["why"]
    # 4 bytes x 22.714M parameters x (0.5 + 0.5 + 1), and x 4
    assert "from 182 MB (fsdp2) to 363 MB (single_gpu)" in verdict["why"]
    two = rehearsal()
    two["configs"] = [of(two, "single_gpu"), of(two, "multi_gpu")]  # which hold the same
    why = recommend(two)["why"]
    assert "What can be said: multi_gpu trains what single_gpu trains" in why and "training state" not in why


def test_runs_side_by_side():
    one, other = gpu(), rehearsal()
    merged = merge([one, other])
    assert [config["machine"] for config in merged["configs"]] == ["2 x NVIDIA H200"] * 10 + ["EPYC"] * 10
    assert merged["rehearsal"] and [run["rehearsal"] for run in merged["runs"]] == [False, True]
    assert "settings steps: 8 (2 x NVIDIA H200), 6 (EPYC)" in merged["differences"]
    assert not any("global_batch" in line for line in merged["differences"])
    verdict = recommend(merged)
    assert verdict["config"] is None
    assert "2 x NVIDIA H200: multi_gpu (DDP) is the fastest" in verdict["why"]
    assert "EPYC: No config is recommended" in verdict["why"]
    assert one == gpu() and other == rehearsal()  # what was given is left as it was


def test_runs_of_one_machine_are_told_apart():
    later = gpu() | {"created": "2026-12-01T08:00:00"}
    labels = [run["label"] for run in merge([gpu(), later])["runs"]]
    assert labels == ["2 x NVIDIA H200, 2026-11-30T21:40:00", "2 x NVIDIA H200, 2026-12-01T08:00:00"]
    merged = merge([gpu(), gpu()])
    assert len({run["label"] for run in merged["runs"]}) == 2
    assert merged["differences"] == []
    assert recommend(merged)["config"] == "multi_gpu"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "cannot be read"),
        ("{", "is not JSON"),
        ("[1]", "is not a comparison, `configs` is missing"),
        ('{"configs": []}', "is not a comparison, `machine` is missing"),
        ('{"configs": [], "runs": []}', "holds several runs already"),
    ],
)
def test_a_file_that_is_no_comparison(content, said, tmp_path):
    path = tmp_path / "compare.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=said):
        read(path)


def test_csv(tmp_path):
    comparison = gpu()
    write_csv(comparison, tmp_path / "compare.csv")
    lines = list(csv.DictReader((tmp_path / "compare.csv").open(encoding="utf-8", newline="")))
    assert [line["name"] for line in lines] == [config["name"] for config in comparison["configs"]]
    line, config = lines[1], comparison["configs"][1]
    assert float(line["samples_per_second_median"]) == config["throughput"]["samples_per_second"]["median"]
    assert int(line["peak_reserved_0"]) == config["memory"][0]["peak_reserved"]
    assert int(line["peak_reserved_1"]) == config["memory"][1]["peak_reserved"]
    assert int(line["held_optimizer_0"]) == config["held"][0]["optimizer"]
    assert float(line["step_backward_seconds"]) == config["phases"]["backward"]
    assert (lines[0]["peak_reserved_1"], line["rehearsal"], line["training"]) == ("", "", "equal")
    assert lines[-1]["failure"].startswith("out of memory") and lines[-1]["samples_per_second_median"] == ""
    write_csv(merge([comparison, rehearsal()]), tmp_path / "both.csv")
    both = list(csv.DictReader((tmp_path / "both.csv").open(encoding="utf-8", newline="")))
    assert [line["rehearsal"] for line in both] == [""] * 10 + [EVERY_OUTPUT] * 10


@pytest.mark.parametrize("make", [gpu, rehearsal, lambda: merge([gpu(), rehearsal()])])
def test_terminal_table(make, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    comparison = make()
    terminal_table(comparison)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 120
    assert (EVERY_OUTPUT in " ".join(shown.split())) == comparison["rehearsal"]
    assert recommend(comparison)["why"].split()[-1] in shown
    assert "…" not in shown
    for name in ("fsdp2", "tensor_parallel", "pipeline_parallel", "--pipeline_stages"):
        assert name in shown
    assert "out of memory" in " ".join(shown.split())
    assert re.search(r"multi_gpu +2 +1,530 \(1,507 to 1,553\)", " ".join(shown.split())) or comparison["rehearsal"]


def test_pictures(tmp_path):
    from PIL import Image

    written = write_pictures(rehearsal(), tmp_path)
    names = ("throughput", "memory", "phases", "losses")
    assert sorted(path.name for path in written) == sorted(f"compare_{n}.{e}" for n in names for e in ("png", "svg"))
    for path in written:
        if path.suffix == ".png":
            with Image.open(path) as picture:
                assert picture.format == "PNG"
        else:
            said = "".join(ElementTree.parse(path).getroot().itertext())
            assert EVERY_OUTPUT in said and "$x_1$" in said
    comparison = gpu()
    comparison["configs"] = [comparison["configs"][-1]]
    assert write_pictures(comparison, tmp_path) == []


def test_nothing_breaks_out_of_the_page(tmp_path):
    comparison = gpu()
    of(comparison, ODD)["failure"] = "</script><script>alert(1)</script>"
    comparison["settings"]["flags"] = ["--text", "<img src=x onerror=alert(1)>"]
    page = write_page(comparison, tmp_path).read_text(encoding="utf-8")
    assert page.count("<script>") == page.count("</script>") == 1
    assert "<img" not in page and "<b>&quot;zero2" not in page
    assert "\u202e" not in page and r"\u202egnp.yaml" in page
    assert '"zero2" & $x_1$' in unescape(page)
    assert not re.search(r"<\w+[^>]*\s(src|href)=", page)


def test_what_was_not_measured_is_left_out(tmp_path):
    comparison = rehearsal()
    for config in comparison["configs"]:
        for key in ("phases", "memory", "held", "bytes_sent", "losses", "parity", "memory_imbalance", "step_seconds"):
            config.pop(key, None)
    page = write_page(comparison, tmp_path).read_text(encoding="utf-8")
    assert "No step was profiled." in page and "No losses were recorded." in page
    comparison["configs"] = [{"name": "zero2", "failure": "no DeepSpeed here"}]
    assert "No config can be recommended" in write_page(comparison, tmp_path).read_text(encoding="utf-8")
    write_csv(comparison, tmp_path / "compare.csv")
    terminal_table(comparison)


@pytest.mark.parametrize("names", [["zero1"], [config["name"] for config in gpu()["configs"]]])
def test_a_config_without_phases_says_why_and_is_no_failed_one(names, tmp_path, capsys):
    comparison = gpu()
    for name in names:
        of(comparison, name).update(phases=None, phases_failure="error: <no room>")
    page = unescape(write_page(comparison, tmp_path).read_text(encoding="utf-8"))
    assert "its phases could not be measured: error: <no room>" in page
    write_csv(comparison, tmp_path / "compare.csv")
    lines = csv.DictReader((tmp_path / "compare.csv").open(encoding="utf-8", newline=""))
    line = next(line for line in lines if line["name"] == "zero1")
    assert (line["failure"], line["phases_failure"], line["step_total_seconds"]) == ("", "error: <no room>", "")
    terminal_table(comparison)
    assert "zero1: its phases could not be measured: error: <no room>" in " ".join(capsys.readouterr().out.split())
    assert write_pictures(comparison, tmp_path) and recommend(comparison)["config"] == "multi_gpu"


def test_losses_with_gaps(tmp_path):
    comparison = copy.deepcopy(gpu())
    of(comparison, "zero1")["losses"][4] = None
    page = write_page(comparison, tmp_path).read_text(encoding="utf-8")
    assert "nan" not in page.lower().replace("finance", "")
    # Two curves of 4 and 6 points, drawn faintly and in dashes; every other config one of 11.
    counts = [len(points.split()) for points in re.findall(r'points="([^"]+)"', page)]
    assert sorted(set(counts)) == [4, 6, 11]
    assert (counts.count(4), counts.count(6), counts.count(11)) == (2, 2, 16)


def test_every_config_stands_in_the_docs():
    page = (ROOT / "docs" / "configs.md").read_text(encoding="utf-8")
    rows = {line.split("|")[1].strip().strip("`"): line for line in page.splitlines() if line.startswith("| `")}
    assert set(rows) == {file.stem for file in (ROOT / "accelerate_configs").glob("*.yaml")}
    for name, row in rows.items():
        assert f"./launch.sh {name} " in row
        assert len(row.split("|")) == 9  # seven cells, none left out
        assert all(cell.strip() for cell in row.split("|")[1:-1])


def test_strict_json_survives(tmp_path):
    (tmp_path / "compare.json").write_text(json.dumps(gpu()))
    assert read(tmp_path / "compare.json") == gpu()
