"""Files and flags to tables: what is read, what is refused, and where the message points."""

import csv
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from toolkit.arguments import Arguments
from toolkit.data.sources import read_splits, read_table
from toolkit.errors import UserError


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return str(path)

    return write


def refusal(call, *args, **kwargs):
    """The message of the UserError that the call must raise."""
    with pytest.raises(UserError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def splits(**flags):
    return read_splits(Arguments(**flags))


# --- CSV and TSV -------------------------------------------------------------------------------------------


def test_values_stay_as_written(write):
    table = read_table(write("a.csv", "text,label\nnull,NA\nhello,ok\nnan,NA\n 1.0 ,None\n"))
    assert table.columns == {"text": ["null", "hello", "nan", " 1.0 "], "label": ["NA", "ok", "NA", "None"]}


def test_rows_know_their_lines(write):
    path = write("a.csv", '\ntext,label\n\n"a\nb",x\nc,y\n')
    table = read_table(path)
    assert table.lines == [4, 6]
    assert table.place(1) == f"{path}:6"
    assert table.select([1]).place(0) == f"{path}:6"


def test_byte_order_mark_is_dropped(write):
    assert list(read_table(write("a.csv", b"\xef\xbb\xbftext,label\na,b\n")).columns) == ["text", "label"]


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_delimiter_comes_from_the_header(write, delimiter):
    other = ";" if delimiter == "," else ","
    path = write("a.csv", f"text{delimiter}label\na{other} b{delimiter}pos\n")
    assert read_table(path).columns == {"text": [f"a{other} b"], "label": ["pos"]}


def test_tsv_is_parted_by_tabs_and_names_may_be_given(write):
    table = read_table(write("a.tsv", "a, b\tpos\n"), column_names=["text", "label"])
    assert table.columns == {"text": ["a, b"], "label": ["pos"]}


@pytest.mark.parametrize("name", ["tab", "\\t", "\t"])
def test_delimiter_by_name(write, name):
    assert read_table(write("a.csv", "a,b\tc\n1\t2\n"), delimiter=name).columns == {"a,b": ["1"], "c": ["2"]}


def test_wrong_delimiter_is_an_error_that_names_the_right_one(write):
    message = refusal(read_table, write("a.csv", "text;label\na, b;pos\n"), delimiter=",")
    assert "--delimiter ';'" in message and "a.csv:1" in message
    message = refusal(read_table, write("b.tsv", "text,label\na,b\n"))
    assert "--delimiter ','" in message
    message = refusal(read_table, write("c.csv", "text^label\na^b\n"))
    assert "--delimiter '^'" in message
    message = refusal(read_table, write("d.csv", "a;b\nc;d\n"), column_names=["text", "label"])
    assert "--delimiter ';'" in message
    assert "--delimiter" in refusal(read_table, write("e.csv", "a;b,c\n1,2\n"))
    assert "one character" in refusal(read_table, write("f.csv", "a,b\n1,2\n"), delimiter="::")


def test_a_quoted_header_of_one_column_may_hold_a_delimiter(write):
    assert read_table(write("a.csv", '"text; all"\nhello\n')).columns == {"text; all": ["hello"]}


def test_header_faults(write):
    assert "'text'" in refusal(read_table, write("a.csv", "text,text,label\na,b,c\n"))
    assert "column 2 of 3" in refusal(read_table, write("b.csv", "text,,label\na,b,c\n"))
    path = write("c.csv", "text,label\na,b\n")
    assert "--column_names" in refusal(read_table, path, column_names=["text", "label"])
    assert "'x'" in refusal(read_table, path, column_names=["x", "x"])


def test_rows_of_the_wrong_width_are_counted_and_placed(write):
    content = "text,label\n" + "a,b\n" + "a,b,c\n" * 7 + "a\n"
    message = refusal(read_table, write("a.csv", content))
    assert "line 3 has 3" in message and "(8 of 9 rows)" in message and "3 more" in message
    assert "line 2 has 1" in refusal(read_table, write("b.csv", "text,label\nonly\na,b\n"))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        # The closing quote is another field's opening quote.
        ('text,label\n"good",pos\n"he said hi,neg\nbad,neg\n"ok",pos\n', 3),
        # Nothing closes it.
        ("text,label\ngood,pos\n" + '"he said hi,neg\n' + "bad,neg\n" * 3, 3),
        ('label,text\npos,"he said hi\nneg,bad\n', 2),
        # A later field's end closes it, which is valid CSV.
        ('text,label\ngood,pos\n"he said hi,neg\nbad,neg\nso he said",pos\nok,neg\n', 3),
        ('label,text\npos,good\nneg,"he said hi\npos,bad\npos,so he said"\nneg,ok\n', 3),
        ('text,score\r\ngood,3.5\r\n"he said hi,1.25\r\nso he said",4.5\r\n', 3),
        # Text behind a closing quote.
        ('text,label\nfine,pos\n"hi" he said,neg\n', 3),
    ],
)
def test_unbalanced_quote_never_loses_rows_silently(write, content, line):
    path = write("a.csv", content)
    message = refusal(read_table, path)
    assert (f"a.csv:{line}:" in message or f"line {line}" in message) and "--quoting none" in message
    # Switched off, each line behind the header is a row.
    assert len(read_table(path, quoting="none")) == content.count("\n") - 1


def test_texts_with_line_breaks_are_read_and_counted(write, tmp_path, capsys):
    rows = [
        ["Hello, world\nand bye", "pos"],
        ["first\n\nthird, with a comma\n", "neg"],
        ['she said "no", twice\r\nand left', "pos"],
        ["one line, pos", "neg"],
    ]
    path = tmp_path / "a.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["text", "label"], *rows])
    table = read_table(str(path))
    assert [list(row) for row in zip(*table.columns.values())] == rows
    assert "3 of 4 rows hold line breaks" in capsys.readouterr().err


def test_blank_lines_are_rows_of_one_column_files_only(write):
    assert read_table(write("a.csv", "text\na\n\nb\n\n\n")).columns["text"] == ["a", "", "b"]
    assert len(read_table(write("b.csv", "text,label\na,b\n\nc,d\n\n"))) == 2


def test_unicode_line_separators_do_not_part_rows(write):
    table = read_table(write("a.csv", "text,label\na\u2028b\x0bc\x85,x\nd\0e,y\n"))
    assert table.columns["text"] == ["a\u2028b\x0bc\x85", "d\0e"]
    table = read_table(write("a.jsonl", '{"text": "a\u2028b"}\n{"text": "c\\u0000"}\n'))
    assert table.columns["text"] == ["a\u2028b", "c\0"]


def test_one_huge_line(write):
    big = "word " * 1_000_000
    assert read_table(write("a.csv", f"text,label\n{big},x\nb,y\n")).columns["text"] == [big, "b"]


@pytest.mark.parametrize(
    ("content", "place", "hint"),
    [
        ("text,label\na,b\ncaf\xe9,c\n".encode("latin-1"), "a.csv:3", "WINDOWS-1252"),
        ("text,label\na,b\n".encode("utf-16"), "a.csv:1", "UTF-16"),
    ],
)
def test_other_encodings_are_named_by_line(write, content, place, hint):
    message = refusal(read_table, write("a.csv", content))
    assert place in message and "not UTF-8" in message and hint in message


def test_reading_does_not_depend_on_the_locale(write):
    family = "\U0001f468\u200d\U0001f469\u200d\U0001f467 \u05e9\u05dc\u05d5\u05dd e\u0301 \0"
    paths = [
        write("a.csv", f"text,label\n{family},x\n"),
        write("a.jsonl", json.dumps({"text": family}, ensure_ascii=False)),
    ]
    code = (
        "import sys; from toolkit.data.sources import read_table\n"
        "for path in sys.argv[1:]: print(ascii(read_table(path).columns['text'][0]))"
    )
    environment = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code, *paths], env=environment, cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == [ascii(family)] * 2


# --- JSON, Parquet, saved and Hub data sets -----------------------------------------------------------------


def test_json_forms(write):
    rows = [{"text": "a", "label": 1}, {"text": "b"}]
    columns = {"text": ["a", "b"], "label": [1, None]}
    lines = "\n\n".join(json.dumps(row) for row in rows)
    assert read_table(write("a.json", json.dumps(rows))).columns == columns
    assert read_table(write("b.json", json.dumps({"version": 1, "data": rows}))).columns == columns
    assert read_table(write("c.json", lines)).columns == columns
    table = read_table(write("d.jsonl", "\ufeff" + lines))
    assert table.columns == columns and table.lines == [1, 3]


def test_json_faults_name_the_line(write):
    assert "a.jsonl:2" in refusal(read_table, write("a.jsonl", '{"text": "a"}\n{"text": b}\n'))
    assert "b.json:2" in refusal(read_table, write("b.json", '[{"text": "a"},\n{"text" "b"}]'))
    assert "c.jsonl:2: expected an object" in refusal(read_table, write("c.jsonl", '{"text": "a"}\n["b"]\n'))
    assert "list of objects" in refusal(read_table, write("d.json", '{"text": ["a"]}'))
    assert "d.json, row 1" in refusal(read_table, write("d.json", '["text"]'))
    many = refusal(read_table, write("e.jsonl", "{\n" * 9))
    assert "e.jsonl:1" in many and "4 more lines" in many


def test_lone_surrogate_is_reported_by_row(write):
    message = refusal(read_table, write("a.jsonl", '{"text": "fine \\ud83d\\ude00"}\n{"text": "half \\ud83d"}\n'))
    assert "a.jsonl:2" in message and "`text`" in message and "surrogate" in message
    assert "row 2" in refusal(read_table, write("b.json", '[{"t": ["a"]}, {"t": ["\\udc00"]}]'))


def test_parquet(tmp_path):
    import pyarrow as pa
    from pyarrow.parquet import write_table

    path = tmp_path / "part=1" / "a.parquet"
    path.parent.mkdir()
    write_table(pa.table({"text": ["a", None], "label": [1, 2], "tags": [["x"], []]}), path)
    table = read_table(str(path))
    assert table.columns == {"text": ["a", None], "label": [1, 2], "tags": [["x"], []]}
    assert table.place(1) == f"{path}, row 2"
    assert table.select([1, 0]).select([0]).place(0) == f"{path}, row 2"
    (tmp_path / "b.parquet").write_text("no")
    assert "not readable as Parquet" in refusal(read_table, str(tmp_path / "b.parquet"))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A saved Dataset and a saved DatasetDict whose class ids have names."""
    import datasets

    datasets.disable_progress_bars()
    features = datasets.Features(
        {
            "text": datasets.Value("string"),
            "label": datasets.ClassLabel(names=["neg", "pos"]),
            "tags": datasets.List(datasets.ClassLabel(names=["x", "y"])),
        }
    )
    rows = {"text": ["a", "b", "c"], "label": [1, 0, -1], "tags": [[1], [], [0, 1]]}
    data = datasets.Dataset.from_dict(rows, features=features)
    folder = tmp_path_factory.mktemp("saved")
    data.select([2, 0]).save_to_disk(folder / "one")
    datasets.DatasetDict({"train": data, "dev": data.select([0]), "test": data}).save_to_disk(folder / "all")
    datasets.DatasetDict({"unsupervised": data}).save_to_disk(folder / "other")
    return folder


def test_saved_data_sets(saved):
    one = {"text": ["c", "a"], "label": [None, "pos"], "tags": [["x", "y"], ["y"]]}
    assert read_table(str(saved / "one")).columns == one
    assert splits(train_file=str(saved / "one"))["train"].columns == one
    found = splits(dataset_name=str(saved / "all"))
    assert {split: len(table) for split, table in found.items()} == {"train": 3, "validation": 1, "test": 3}
    assert found["validation"].place(0) == f"{saved / 'all'}[dev], row 1"
    assert "--dataset_name" in refusal(read_table, str(saved / "all"))
    assert "unsupervised" in refusal(splits, dataset_name=str(saved / "other"))
    assert "save_to_disk" in refusal(read_table, str(saved))


def test_hub_names(monkeypatch):
    import datasets

    calls = []

    def load(name, config, **options):
        calls.append((name, config, options))
        if name == "gone":
            raise ConnectionError("no route\nto the Hub")
        return datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": ["a"]})})

    monkeypatch.setattr(datasets, "load_dataset", load)
    found = splits(dataset_name="glue", dataset_config_name="sst2", cache_dir="c")
    assert found["train"].name == "glue[train]" and list(found) == ["train"]
    assert calls == [("glue", "sst2", {"cache_dir": "c"})]
    message = refusal(splits, dataset_name="gone")
    assert "gone" in message and "no route" in message and "--train_file" in message


# --- Files that are not there, or hold nothing ----------------------------------------------------------------


def test_missing_files_name_the_nearest(write, tmp_path):
    write("train.csv", "text,label\na,b\n")
    assert "Did you mean `train.csv`?" in refusal(read_table, str(tmp_path / "trian.csv"))
    assert "does not exist" in refusal(read_table, str(tmp_path / "none" / "train.csv"))


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.json", "a.jsonl"])
@pytest.mark.parametrize("content", ["", "\n \n", "\ufeff"])
def test_empty_files(write, name, content):
    assert "empty" in refusal(read_table, write(name, content))


def test_no_rows(write):
    assert "no rows" in refusal(read_table, write("a.csv", "text,label\n"))
    assert "no rows" in refusal(read_table, write("b.csv", "text\n\n\n"))
    assert "no rows" in refusal(read_table, write("a.json", "[]"))


def test_unknown_kind_lists_the_known(write):
    message = refusal(read_table, write("a.xlsx", "x"))
    assert "'.xlsx'" in message and ".parquet" in message


# --- Splits -----------------------------------------------------------------------------------------------


@pytest.fixture
def numbered(write):
    return lambda rows, name="train.csv": write(name, "text,label\n" + "".join(f"t{i},x\n" for i in range(rows)))


def test_no_data_flags_give_nothing():
    assert splits() == {}


def test_files_of_all_splits(numbered):
    paths = {f"{split}_file": numbered(n, f"{split}.csv") for n, split in enumerate(("train", "validation", "test"), 3)}
    found = splits(**paths)
    assert {split: len(table) for split, table in found.items()} == {"train": 3, "validation": 4, "test": 5}


def test_held_out_rows_depend_on_the_seed_alone(numbered):
    path = numbered(10)
    first = splits(train_file=path, validation_split_percentage=30)
    again = splits(train_file=path, validation_split_percentage=30, global_batch_size=7)
    other = splits(train_file=path, validation_split_percentage=30, seed=1)
    assert first == again and first["validation"] != other["validation"]
    train, held = (first[split].columns["text"] for split in ("train", "validation"))
    assert len(train) == 7 and sorted(train + held) == [f"t{i}" for i in range(10)]
    assert train == sorted(train) and held == sorted(held)
    assert first["validation"].place(0) == f"{path}:{int(held[0][1:]) + 2}"


@pytest.mark.parametrize(("rows", "percentage", "held"), [(10, 5, 1), (10, 99.9, 9), (2, 50, 1), (200, 12.5, 25)])
def test_both_sides_of_the_split_have_a_row(numbered, rows, percentage, held):
    found = splits(train_file=numbered(rows), validation_split_percentage=percentage)
    assert (len(found["train"]), len(found["validation"])) == (rows - held, held)


def test_one_row_cannot_be_split_but_can_be_trained_on(numbered):
    assert "one row" in refusal(splits, train_file=numbered(1), validation_split_percentage=50)
    assert len(splits(train_file=numbered(1))["train"]) == 1


def test_first_samples_are_taken_after_the_split(numbered):
    path = numbered(100)
    whole = splits(train_file=path, validation_split_percentage=20)
    part = splits(train_file=path, validation_split_percentage=20, max_train_samples=5, max_eval_samples=3)
    assert part["train"].columns["text"] == whole["train"].columns["text"][:5]
    assert part["validation"].columns["text"] == whole["validation"].columns["text"][:3]
    assert len(splits(train_file=path, max_train_samples=1000)["train"]) == 100


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"dataset_name": "d", "train_file": "f.csv"}, ("--dataset_name", "--train_file")),
        ({"validation_file": "f.csv", "test_file": "g.csv"}, ("--validation_file and --test_file", "--train_file")),
        ({"validation_split_percentage": 5}, ("--validation_split_percentage needs",)),
        ({"train_file": "f.csv", "validation_split_percentage": 0}, ("between 0 and 100",)),
        ({"train_file": "f.csv", "validation_split_percentage": 100}, ("between 0 and 100",)),
        ({"train_file": "f.csv", "validation_file": "g.csv", "validation_split_percentage": 5}, ("one of them",)),
        ({"train_file": "f.csv", "max_train_samples": 0}, ("--max_train_samples 0",)),
        ({"train_file": "f.csv", "max_eval_samples": -1}, ("--max_eval_samples -1",)),
        ({"train_file": "f.json", "delimiter": ","}, ("--delimiter is for CSV",)),
        ({"train_file": "f.json", "column_names": ["a"]}, ("--column_names is for CSV",)),
        ({"train_file": "f.csv", "dataset_config_name": "c"}, ("--dataset_config_name needs",)),
    ],
)
def test_contradicting_flags(flags, words):
    message = refusal(splits, **flags)
    assert all(word in message for word in words)


def test_a_data_set_with_its_own_validation_is_not_split(saved):
    message = refusal(splits, dataset_name=str(saved / "all"), validation_split_percentage=10)
    assert "[dev]" in message


def test_the_faults_of_all_files_come_at_once(write, tmp_path):
    message = refusal(splits, train_file=write("a.csv", ""), validation_file=str(tmp_path / "gone.csv"))
    assert "a.csv: the file is empty" in message and "gone.csv: no such file" in message


def test_tables_do_not_change(numbered):
    with pytest.raises(dataclasses.FrozenInstanceError):
        read_table(numbered(1)).name = "other"


# --- Real files -------------------------------------------------------------------------------------------

REAL = [
    ("sst2/train.csv", 6920, {}),
    ("sst2/dev.csv", 872, {}),
    ("sst2/test.csv", 1821, {}),
    ("rotten_tomatoes/train.csv", 8530, {}),
    ("rotten_tomatoes/validation.csv", 1066, {}),
    ("rotten_tomatoes/test.csv", 1066, {}),
    ("trec/train.csv", 5452, {}),
    ("trec/test.csv", 500, {}),
    *((f"stsb/{name}.csv", rows, {"column_names": ["sentence1", "sentence2", "score"]})
      for name, rows in (("train", 5749), ("dev", 1500), ("test", 1379))),
    *((f"goemotions/{name}.tsv", rows, {"quoting": "none", "column_names": ["text", "labels", "id"]})
      for name, rows in (("train", 43410), ("dev", 5426), ("test", 5427))),
    *((f"id_smsa/{name}.tsv", rows, {"column_names": ["text", "label"]})
      for name, rows in (("train", 11000), ("valid", 1260), ("test", 500))),
    *((f"cola/{name}.tsv", rows, {"quoting": "none", "column_names": ["source", "label", "mark", "sentence"]})
      for name, rows in (("in_domain_train", 8551), ("in_domain_dev", 527), ("out_of_domain_dev", 516))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "rows", "options"), REAL)
def test_real_files_have_the_rows_of_their_documentation(real_data, name, rows, options):
    assert len(read_table(str(real_data / name), **options)) == rows


def test_the_index_column_of_pandas_is_a_column(tmp_path):
    file = tmp_path / "frame.csv"
    file.write_text(",text,label\n0,good,pos\n1,bad,neg\n")
    table = read_table(str(file))
    assert list(table.columns) == ["row", "text", "label"] and table.columns["text"] == ["good", "bad"]
