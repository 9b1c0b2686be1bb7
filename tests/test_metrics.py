"""Scores against figures worked out by hand."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest

from toolkit.classification import metrics

SINGLE, MULTI, REGRESSION = metrics.SINGLE_LABEL, metrics.MULTI_LABEL, metrics.REGRESSION


def by_hand(wanted, said):
    """F1 and support of one class from two lists of true and false, by counting."""
    hits = sum(w and p for w, p in zip(wanted, said))
    total = sum(wanted) + sum(said)
    return 2 * hits / total if total else 0.0, sum(wanted)


@pytest.mark.parametrize("classes", [2, 5])
def test_single_label_agrees_with_counting(classes):
    draw = np.random.default_rng(0)
    logits, targets = draw.normal(size=(200, classes)), draw.integers(0, classes, 200)
    logits[np.arange(200), targets] += 1
    predicted = [max(range(classes), key=lambda k: row[k]) for row in logits.tolist()]
    scores = metrics.score(SINGLE, logits, targets, [str(name) for name in range(classes)])
    each = [by_hand([t == k for t in targets.tolist()], [p == k for p in predicted]) for k in range(classes)]
    # Matthews' coefficient of k classes is the correlation of centred one-hot matrices (Gorodkin 2004).
    true, said = (np.eye(classes)[rows] - np.eye(classes)[rows].mean(axis=0) for rows in (targets, predicted))
    assert scores == pytest.approx(
        {
            "accuracy": sum(t == p for t, p in zip(targets.tolist(), predicted)) / 200,
            "f1": sum(f1 for f1, _ in each) / classes,
            "f1_macro": sum(f1 for f1, _ in each) / classes,
            "f1_weighted": sum(f1 * support for f1, support in each) / 200,
            "mcc": (true * said).sum() / math.sqrt((true * true).sum() * (said * said).sum()),
        },
        abs=1e-12,
    )
    counts = [[0] * classes for _ in range(classes)]
    for t, p in zip(targets.tolist(), predicted):
        counts[t][p] += 1
    assert metrics.report(SINGLE, logits, targets, list("abcde")[:classes])["confusion"]["counts"] == counts


@pytest.mark.parametrize(
    ("kind", "targets"), [(SINGLE, [0, 1]), (MULTI, [[0, 1], [1, 0]]), (REGRESSION, [0.5, 1.5])], ids=str
)
def test_the_names_are_known_before_there_are_scores(kind, targets):
    scores = metrics.score(kind, np.eye(2), np.array(targets), ["a", "b"])
    assert [name for name in scores if name != "threshold"] == list(metrics.METRICS[kind])


def test_macro_f1_is_over_classes_that_occur():
    """As scikit-learn does: class 2 of 3 is neither true nor predicted."""
    logits = np.array([[2.0, 0, 0], [2.0, 0, 0], [0, 2.0, 0]])
    assert metrics.score(SINGLE, logits, np.array([0, 1, 1]), ["a", "b", "c"])["f1"] == pytest.approx(2 / 3)


def test_majority_collapse():
    """94 rows of one class, 6 of the other, always the first predicted."""
    targets = np.array([0] * 94 + [1] * 6)
    logits = np.tile([1.0, -1.0], (100, 1))
    scores = metrics.score(SINGLE, logits, targets, ["common", "rare"])
    assert scores["accuracy"] == pytest.approx(0.94)
    assert scores["f1_macro"] == pytest.approx((2 * 94 / (94 + 100)) / 2)
    assert scores["mcc"] == 0.0
    classes = metrics.report(SINGLE, logits, targets, ["common", "rare"])["classes"]
    assert [entry["recall"] for entry in classes] == [1.0, 0.0]
    assert [entry["support"] for entry in classes] == [94, 6]
    (warning,) = metrics.warnings(SINGLE, logits, targets, ["common", "rare"])
    assert "only one class is ever predicted: 'common'" in warning
    assert "94.0%" in warning


def test_no_warning_where_predictions_differ_or_rows_do_not():
    assert metrics.warnings(SINGLE, np.eye(2), np.array([0, 0]), ["a", "b"]) == []
    assert metrics.warnings(SINGLE, np.array([[1.0, 0], [1.0, 0]]), np.array([0, 0]), ["a", "b"]) == []


def test_multi_label_agrees_with_counting():
    draw = np.random.default_rng(1)
    targets = (draw.random((100, 4)) < 0.3).astype(np.float32)
    targets[:, 3] = 0  # a label that never occurs
    logits = draw.normal(size=(100, 4)) + 2 * targets - 1
    logits[:, 3] = -9
    wanted, said = targets > 0.5, 1 / (1 + np.exp(-logits)) >= 0.4
    scores = metrics.score(MULTI, logits, targets, list("abcd"), threshold=0.4)
    macro = sum(by_hand(wanted[:, k].tolist(), said[:, k].tolist())[0] for k in range(4)) / 4
    assert scores == pytest.approx(
        {
            "f1_micro": by_hand(wanted.ravel().tolist(), said.ravel().tolist())[0],
            "f1": macro,
            "f1_macro": macro,
            "subset_accuracy": sum(w == p for w, p in zip(wanted.tolist(), said.tolist())) / 100,
            "threshold": 0.4,
        }
    )
    classes = metrics.report(MULTI, logits, targets, list("abcd"), threshold=0.4)["classes"]
    recalls = [(wanted & said)[:, k].sum() / max(1, wanted[:, k].sum()) for k in range(4)]
    assert [entry["recall"] for entry in classes] == pytest.approx(recalls)
    assert metrics.warnings(MULTI, np.full((3, 2), -5.0), np.eye(3)[:, :2], ["a", "b"])[0].startswith(
        "every row gets the same labels: no label"
    )


def test_regression_agrees_with_the_formulas():
    draw = np.random.default_rng(2)
    targets = draw.integers(0, 11, 60) / 2  # with ties, as graded scores have
    logits = (targets + draw.normal(size=60))[:, None].round(1)
    predicted = logits[:, 0]

    def correlation(a, b):
        a, b = a - a.mean(), b - b.mean()
        return (a * b).sum() / math.sqrt((a * a).sum() * (b * b).sum())

    def ranks(values):
        return np.array([(values < v).sum() + ((values == v).sum() + 1) / 2 for v in values])

    assert metrics.score(REGRESSION, logits, targets, []) == pytest.approx(
        {
            "pearson": correlation(predicted, targets),
            "spearman": correlation(ranks(predicted), ranks(targets)),
            "mse": sum((predicted - targets) ** 2) / 60,
            "mae": sum(abs(predicted - targets)) / 60,
        }
    )
    assert "does not tell the rows apart" in metrics.warnings(REGRESSION, np.zeros((3, 1)), targets[:3], [])[0]


@pytest.mark.parametrize(
    ("kind", "logits", "targets"),
    [
        (SINGLE, [[0.1, 0.9]], [1]),
        (SINGLE, [[0.1, 0.9]], [0]),
        (MULTI, [[-3.0, -2.0]], [[0.0, 0.0]]),
        (REGRESSION, [[2.5]], [3.0]),
    ],
)
def test_one_row_is_fine_and_nothing_is_nan(kind, logits, targets):
    names = [] if kind == REGRESSION else ["a", "b"]
    scores = metrics.score(kind, np.array(logits, dtype=np.float32), np.array(targets), names)
    assert all(type(value) is float and math.isfinite(value) for value in scores.values())
    json.dumps(metrics.report(kind, np.array(logits), np.array(targets), names), allow_nan=False)
    assert metrics.warnings(kind, np.array(logits), np.array(targets), names) == []


def test_constant_predictions_have_no_correlation():
    scores = metrics.score(REGRESSION, np.ones((4, 1)), np.array([1.0, 2, 3, 4]), [])
    assert (scores["pearson"], scores["spearman"]) == (0.0, 0.0)


def test_probabilities_of_extreme_logits():
    assert metrics.probabilities(SINGLE, np.array([[1e4, 0.0]])).tolist() == [[1.0, 0.0]]
    assert metrics.probabilities(MULTI, np.array([[1e4, -1e4, 0.0]])).tolist() == [[1.0, 0.0, 0.5]]


def test_direction_of_better():
    less = ("eval_loss", "dev_loss", "eval_stsb_loss", "test_mse", "rmse", "eval_mae", "perplexity", "Word_Error")
    more = ("accuracy", "eval_f1", "test_mcc", "eval_pearson", "f1_macro", "loss_free_score")
    assert not any(metrics.greater_is_better(name) for name in less)
    assert all(metrics.greater_is_better(name) for name in more)


def test_two_evaluations_at_once_share_nothing(tmp_path):
    """Metric libraries keep cache files that collide between runs: here no file is opened at all."""
    code = (
        "import sys, builtins, numpy as np\n"
        "from toolkit.classification import metrics\n"
        "sys.addaudithook(lambda event, args: event == 'open' and 'w' in str(args[1]) and sys.exit(3))\n"
        "print(metrics.score(metrics.SINGLE_LABEL, np.eye(4), np.arange(4), list('abcd'))['accuracy'])\n"
    )
    runs = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [run.communicate()[0].strip() for run in runs] == ["1.0", "1.0"]
    assert [run.returncode for run in runs] == [0, 0]
