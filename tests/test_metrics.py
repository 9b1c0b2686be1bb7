"""Scores against scikit-learn, scipy and figures worked out by hand."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
from sklearn import metrics as sk

from toolkit.classification import metrics

SINGLE, MULTI, REGRESSION = metrics.SINGLE_LABEL, metrics.MULTI_LABEL, metrics.REGRESSION


@pytest.mark.parametrize("classes", [2, 5])
def test_single_label_agrees_with_scikit_learn(classes):
    draw = np.random.default_rng(0)
    logits, targets = draw.normal(size=(200, classes)), draw.integers(0, classes, 200)
    logits[np.arange(200), targets] += 1
    predicted = logits.argmax(axis=1)
    scores = metrics.score(SINGLE, logits, targets, [str(name) for name in range(classes)])
    assert scores == pytest.approx(
        {
            "accuracy": sk.accuracy_score(targets, predicted),
            "f1": sk.f1_score(targets, predicted, average="macro"),
            "f1_macro": sk.f1_score(targets, predicted, average="macro"),
            "f1_weighted": sk.f1_score(targets, predicted, average="weighted"),
            "mcc": sk.matthews_corrcoef(targets, predicted),
        },
        abs=1e-12,
    )
    confusion = metrics.report(SINGLE, logits, targets, list("abcde")[:classes])["confusion"]
    assert confusion["counts"] == sk.confusion_matrix(targets, predicted).tolist()


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


def test_multi_label_agrees_with_scikit_learn():
    draw = np.random.default_rng(1)
    targets = (draw.random((100, 4)) < 0.3).astype(np.float32)
    targets[:, 3] = 0  # a label that never occurs
    logits = draw.normal(size=(100, 4)) + 2 * targets - 1
    logits[:, 3] = -9
    predicted = 1 / (1 + np.exp(-logits)) >= 0.4
    scores = metrics.score(MULTI, logits, targets, list("abcd"), threshold=0.4)
    macro = sk.f1_score(targets, predicted, average="macro", zero_division=0)
    assert scores == pytest.approx(
        {
            "f1_micro": sk.f1_score(targets, predicted, average="micro"),
            "f1": macro,
            "f1_macro": macro,
            "subset_accuracy": sk.accuracy_score(targets, predicted),
            "threshold": 0.4,
        }
    )
    classes = metrics.report(MULTI, logits, targets, list("abcd"), threshold=0.4)["classes"]
    assert [entry["recall"] for entry in classes] == pytest.approx(
        sk.recall_score(targets, predicted, average=None, zero_division=0)
    )
    assert metrics.warnings(MULTI, np.full((3, 2), -5.0), np.eye(3)[:, :2], ["a", "b"])[0].startswith(
        "every row gets the same labels: no label"
    )


def test_regression_agrees_with_scipy():
    from scipy import stats

    draw = np.random.default_rng(2)
    targets = draw.integers(0, 11, 60) / 2  # with ties, as graded scores have
    logits = (targets + draw.normal(size=60))[:, None].round(1)
    scores = metrics.score(REGRESSION, logits, targets, [])
    assert scores["pearson"] == pytest.approx(stats.pearsonr(logits[:, 0], targets).statistic)
    assert scores["spearman"] == pytest.approx(stats.spearmanr(logits[:, 0], targets).statistic)
    assert scores["mse"] == pytest.approx(sk.mean_squared_error(targets, logits[:, 0]))
    assert scores["mae"] == pytest.approx(sk.mean_absolute_error(targets, logits[:, 0]))
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
