"""Columns, texts and labels: kinds, names, numbers, and what is refused with which row."""

import numpy as np
import pytest

from toolkit.data.columns import label_column, text_columns, texts
from toolkit.data.labels import Labels, balance, balanced_weights, find_labels
from toolkit.data.sources import read_table
from toolkit.data.tables import Table
from toolkit.errors import UserError


def table(name="train.csv", **columns):
    """A table whose rows start at line 2, as behind a header."""
    rows = len(next(iter(columns.values())))
    return Table(name, columns, list(range(2, rows + 2)))


def refusal(call, *args, **kwargs):
    """The message of the UserError that the call must raise."""
    with pytest.raises(UserError) as caught:
        call(*args, **kwargs)
    return str(caught.value)


def find(train, validation=None, test=None, **options):
    """Labels of column `label` from bare lists of values."""
    splits = {"train": table(label=train)}
    if validation is not None:
        splits["validation"] = table("validation.csv", label=validation)
    if test is not None:
        splits["test"] = table("test.csv", label=test)
    return find_labels(splits, "label", **options)


# --- Columns ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "expected"),
    [
        (["text", "label"], ["text"]),
        (["id", "sentence", "label"], ["sentence"]),
        (["sentence1", "sentence2", "label"], ["sentence1", "sentence2"]),
        (["question", "sentence", "label"], ["question", "sentence"]),
        (["premise", "hypothesis", "label"], ["premise", "hypothesis"]),
        (["review", "label"], ["review"]),
    ],
)
def test_text_columns_are_found(columns, expected):
    assert text_columns(table(**{name: ["a", "b"] for name in columns}), None, "label") == expected


def test_numbers_in_csv_are_not_a_text_column():
    assert text_columns(table(id=["1", "2"], review=["a", "7"], label=["x", "y"]), None, "label") == ["review"]


def test_doubtful_text_columns_are_refused():
    message = refusal(text_columns, table(title=["a"], body=["b"], label=["x"]), None, "label")
    assert "`title`, `body`, `label`" in message and "--text_column_names" in message
    assert "more than one" in refusal(text_columns, table(text=["a"], text_a=["b"], text_b=["b"]), None, None)
    assert "no text column" in refusal(text_columns, table(x=[1], label=["a"]), None, "label")


def test_text_columns_asked_for():
    both = table(a=["x"], b=["y"], label=["z"])
    assert text_columns(both, ["b", "a"], "label") == ["b", "a"]
    assert "Did you mean `label`" in refusal(text_columns, both, ["labels"], None)
    assert "is the label column" in refusal(text_columns, both, ["label"], "label")
    assert "two different" in refusal(text_columns, both, ["a", "a"], "label")
    assert "two different" in refusal(text_columns, both, ["a", "b", "label"], None)


def test_label_column():
    assert label_column(table(text=["a"], labels=["x"]), None) == "labels"
    assert label_column(table(text=["a"], coarse=["x"]), "coarse") == "coarse"
    message = refusal(label_column, table(text=["a"], coarse=["x"]), None)
    assert "`text`, `coarse`" in message and "--label_column_name" in message
    assert "--column_names" in message  # the header may be a row of data
    assert "more than one" in refusal(label_column, table(text=["a"], label=["x"], score=[1]), None)
    assert "Did you mean `label`?" in refusal(label_column, table(text=["a"], label=["x"]), "lable")
    assert label_column(table(text=["a"]), None, required=False) is None
    assert label_column(table(text=["a"]), "label", required=False) is None


# --- Texts ------------------------------------------------------------------------------------------------


def test_empty_texts_follow_the_policy(tmp_path, capsys):
    path = tmp_path / "a.csv"
    path.write_text('text,label\n,pos\n"",neg\n   ,pos\nok,neg\n', encoding="utf-8")
    source = read_table(str(path))
    message = refusal(texts, source, ["text"], "error")
    assert all(f"a.csv:{line}" in message for line in (2, 3, 4)) and "3 of 4 rows" in message
    assert "--empty_text" in message
    assert texts(source, ["text"], "drop") == (["ok"], [3])
    warning = capsys.readouterr().err
    assert "3 of 4 rows" in warning and "a.csv:2" in warning
    assert texts(source, ["text"], "keep") == (["", "", "   ", "ok"], [0, 1, 2, 3])
    assert "nothing is left" in refusal(texts, source.select([0, 1]), ["text"], "drop")
    assert "--empty_text 'skip'" in refusal(texts, source, ["text"], "skip")


def test_none_nan_and_numbers():
    source = table(text=["a", None, float("nan"), 7, 1.5])
    assert texts(source, ["text"], "keep")[0] == ["a", "", "", "7", "1.5"]
    assert texts(source, ["text"], "drop") == (["a", "7", "1.5"], [0, 3, 4])


def test_pairs_are_empty_when_both_are():
    source = table(a=["x", "y", "z", ""], b=["p", "", 3, None])
    assert texts(source, ["a", "b"], "drop") == ([("x", "p"), ("y", ""), ("z", "3")], [0, 1, 2])
    assert "train.csv:5:" in refusal(texts, source, ["a", "b"], "error")


def test_what_is_no_text_is_refused():
    message = refusal(texts, table(text=["a", ["b", "c"]]), ["text"], "error")
    assert "train.csv:3" in message and "list" in message
    assert "Did you mean `text`?" in refusal(texts, table(text=["a"]), ["texts"], "error")


# --- Kinds and names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "options", "kind"),
    [
        (["a", "b"], {}, "single_label_classification"),
        (["1", "2"], {}, "single_label_classification"),
        ([1.0, 2.0], {}, "single_label_classification"),
        ([True, False], {}, "single_label_classification"),
        ([str(i) for i in range(300)], {}, "single_label_classification"),
        (["3.8", "5.0"], {}, "regression"),
        ([3.8, 5], {}, "regression"),
        (["1", "2"], {"problem_type": "regression"}, "regression"),
        (["3.8", "5.0"], {"problem_type": "single_label"}, "single_label_classification"),
        ([["a"], []], {}, "multi_label_classification"),
        (["a,b", ""], {"separator": ","}, "multi_label_classification"),
        (["a,b", "c"], {"separator": ",", "problem_type": "multi_label"}, "multi_label_classification"),
        (["a,b", "c"], {"problem_type": "single_label_classification"}, "single_label_classification"),
    ],
)
def test_kind_comes_from_the_data_or_the_flag(values, options, kind):
    assert find(values, **options).kind == kind


@pytest.mark.parametrize(
    ("values", "names"),
    [
        (["2", "1", "3", "1"], ["1", "2", "3"]),
        ([30, 10, 20], ["10", "20", "30"]),
        ([str(i) for i in range(12)], [str(i) for i in range(12)]),
        (["10", "9", "-1"], ["-1", "9", "10"]),
        (["b", "a", "10", "9"], ["10", "9", "a", "b"]),
        (["NA", "ok", "null", "None", "nan"], ["NA", "None", "nan", "null", "ok"]),
        ([2.0, 1.0], ["1", "2"]),
        (["2.0", "1.0"], ["1.0", "2.0"]),
        ([True, False], ["false", "true"]),
    ],
)
def test_names_are_as_written_and_in_order(values, names):
    labels = find(values)
    assert labels.names == names and labels.num_labels == len(names)


def test_ids_point_to_the_written_names():
    values = ["30", "10", "20", "10"]
    ids = find(values).targets(table(label=values), required=True)
    assert ids.dtype == np.int64 and ids.tolist() == [2, 0, 1, 0]
    digits = [str(i) for i in range(12)]
    assert find(digits).targets(table(label=digits), required=True).tolist() == list(range(12))


def test_order_of_an_existing_head_is_kept_only_with_the_same_names():
    assert find(["a", "b"], known={0: "b", 1: "a"}).names == ["b", "a"]
    assert find(["a", "b"], known={1: "a", 0: "b"}).names == ["b", "a"]
    assert find(["a", "b"], known={0: "LABEL_0", 1: "LABEL_1"}).names == ["a", "b"]
    assert find(["a", "b"], known={0: "c", 1: "b", 2: "a"}).names == ["a", "b"]
    assert find([1.5, 2.5], known={0: "LABEL_0"}).names == []


def test_one_label_written_in_two_ways_is_refused():
    assert "'pos' and 'pos '" in refusal(find, ["pos", "pos ", "neg"])
    assert "'1' and '1.0'" in refusal(find, ["1", "1.0", "2"])


def test_mixed_numbers_and_text_are_refused():
    message = refusal(find, ["3.8", "NA", "2.5"])
    assert "'NA' at train.csv:3" in message and "--problem_type single_label" in message
    assert find(["3.8", "NA", "2.5"], problem_type="single_label").names == ["2.5", "3.8", "NA"]


def test_contradicting_flags():
    assert "Did you mean" in refusal(find, ["a", "b"], problem_type="multilabel")
    assert "--label_separator" in refusal(find, ["a", "b"], problem_type="single_label", separator=",")
    assert "list at train.csv:2" in refusal(find, [["a"]], problem_type="regression")
    assert "--label_separator" in refusal(find, ["a", "b"], problem_type="multi_label")
    assert "is empty" in refusal(find, ["a", "b"], separator="")


# --- Splits that do not agree -----------------------------------------------------------------------------


def test_label_only_in_validation_or_test():
    message = refusal(find, ["a", "b"], validation=["a", "c", "c"], test=["d"])
    assert "validation split" in message and "'c' (first at validation.csv:3)" in message
    assert "test split" in message and "'d' (first at test.csv:2)" in message
    assert "'a', 'b'" in message


def test_different_types_per_split():
    message = refusal(find, ["1", "0"], validation=["none", "1"])
    assert "numbers in train.csv ('1' at train.csv:2)" in message
    assert "text in validation.csv ('none' at validation.csv:2)" in message
    message = refusal(find, [["a"], ["b"]], validation=["a", "b"])
    assert "lists in train.csv" in message and "text in validation.csv" in message
    message = refusal(find, [0.5, 1.5], validation=["high", "low"])
    assert "validation.csv:2" in message and "numbers in train.csv" in message
    # Only a different look is no fault.
    assert find(["1", "a"], validation=["1"]).names == ["1", "a"]
    assert find([1, 0], validation=["1", "0"]).names == ["0", "1"]


def test_one_class_is_refused():
    message = refusal(find, ["a", "a", "a"])
    assert "one class 'a'" in message
    assert find(["1", "1"], problem_type="regression").kind == "regression"


@pytest.mark.parametrize("missing", [None, "", "  ", float("nan")])
def test_missing_labels_are_placed(missing):
    assert "train.csv:3" in refusal(find, ["a", missing, "b"])
    assert "validation.csv:2" in refusal(find, ["a", "b"], validation=[missing, "a"])
    assert "test.csv:3" in refusal(find, ["a", "b"], test=["a", missing])
    assert "train.csv:3" in refusal(find, ["1.5", missing, "2"])


@pytest.mark.parametrize("bad", ["nan", "inf", "-Infinity", float("inf"), "1_0", "", None, True])
def test_regression_needs_finite_numbers(bad):
    message = refusal(find, ["1.5", bad, "2"], problem_type="regression")
    assert "train.csv:3" in message and "finite number" in message


def test_label_column_absent():
    splits = {"train": table(text=["a"], lable=["x"]), "validation": table("validation.csv", text=["a"])}
    message = refusal(find_labels, splits, "label")
    assert "train split" in message and "Did you mean `lable`?" in message and "validation split" in message
    assert "no training row has a label" in refusal(find, ["", None])


def test_test_split_without_labels():
    labels = find(["a", "b"], test=["", None])
    assert labels.targets(table(label=["", None]), required=False) is None
    assert labels.targets(table(text=["x"]), required=False) is None
    assert labels.targets(table(label=["b"]), required=False).tolist() == [1]
    assert "no column `label`" in refusal(labels.targets, table(text=["x"]), required=True)


# --- Numbers ----------------------------------------------------------------------------------------------


def test_regression_targets_of_any_length():
    labels = Labels("regression", [], "label")
    assert labels.num_labels == 1
    for values in (["3.8"], ["1", "2.5", "-1e2"]):
        targets = labels.targets(table(label=values), required=True)
        assert targets.dtype == np.float32 and targets.shape == (len(values),)
        np.testing.assert_array_equal(targets, np.array([float(v) for v in values], np.float32))


@pytest.mark.parametrize(
    ("values", "separator"),
    [
        (["2,10", "", "2", "10 , 1"], ","),
        ([["2", "10"], [], ["2"], ["10", "1"]], None),
        ([[2, 10], [], [2], [10, 1]], None),
        (["2|10", "  ", 2, "10|1"], "|"),
    ],
)
def test_multi_label_targets(values, separator):
    labels = find(values, separator=separator)
    assert labels.names == ["1", "2", "10"]
    targets = labels.targets(table(label=values), required=True)
    assert targets.dtype == np.float32
    assert targets.tolist() == [[0, 1, 1], [0, 0, 0], [0, 1, 0], [1, 0, 1]]


def test_multi_label_faults():
    assert "train.csv:3" in refusal(find, [["a"], None])
    assert "train.csv:3" in refusal(find, [["a"], "b"])
    assert "train.csv:3" in refusal(find, [["a"], [None]])
    message = refusal(find, [[0, 1, 0], [1, 0, 0]])
    assert "twice" in message and "zeros and ones" in message
    assert "'c' (first at validation.csv:2)" in refusal(find, ["a,b"], validation=["c,a"], separator=",")
    assert "no training row has a label" in refusal(find, [[], []])


def test_balance_is_one_line():
    assert balance(np.array([0, 1, 1, 1]), ["neg", "pos"]) == "2 classes: pos 3 (75.0%), neg 1 (25.0%)"
    many = balance(np.repeat(np.arange(20), np.arange(20, 0, -1)), [f"c{i}" for i in range(20)])
    assert many.startswith("20 classes: c0 20 ") and many.endswith("11 more, least c19 1 (0.5%)")
    multi = balance(np.array([[1, 0], [1, 1]], np.float32), ["a", "b"])
    assert multi == "2 labels: a 2 (100.0%), b 1 (50.0%)"
    assert balance(np.array([1, 4], np.float32), []) == "targets from 1 to 4, mean 2.5"


def test_balanced_weights_are_scikit_learns():
    from sklearn.utils.class_weight import compute_class_weight

    targets = np.array([0] * 7 + [1] * 2 + [2])
    weights = balanced_weights(targets, 3)
    assert weights.dtype == np.float32
    expected = compute_class_weight("balanced", classes=np.arange(3), y=targets)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)
    assert balanced_weights(np.array([0, 0]), 2)[1] == 0


# --- Real files -------------------------------------------------------------------------------------------


def test_real_label_columns(real_data):
    def read(name, **options):
        return read_table(str(real_data / name), **options)

    stsb = read("stsb/dev.csv", column_names=["sentence1", "sentence2", "score"])
    assert find_labels({"train": stsb}, label_column(stsb, None)).kind == "regression"
    assert text_columns(stsb, None, "score") == ["sentence1", "sentence2"]

    emotions = read("goemotions/test.tsv", quoting="none", column_names=["text", "labels", "id"])
    labels = find_labels({"train": emotions}, "labels", separator=",")
    targets = labels.targets(emotions, required=True)
    assert labels.names == [str(i) for i in range(28)]
    assert int((targets.sum(axis=1) > 1).sum()) == 837  # as the data's own documentation counts

    trec = {"train": read("trec/train.csv"), "test": read("trec/test.csv")}
    assert find_labels(trec, "coarse").names == ["ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM"]
    assert len(find_labels(trec, "fine").names) == 50
    assert text_columns(trec["train"], None, "coarse") == ["text"]

    cola = read("cola/in_domain_dev.tsv", quoting="none", column_names=["source", "label", "mark", "sentence"])
    assert find_labels({"train": cola}, "label").names == ["0", "1"]
    assert text_columns(cola, None, "label") == ["sentence"]
