"""Scores of a classifier, from the logits of all evaluation rows, each row once.

Computed by scikit-learn and scipy in memory: nothing is fetched, and nothing on disk is shared by two runs.
`kind` is transformers' `problem_type`: `single_label_classification`, `multi_label_classification` or
`regression`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

SINGLE_LABEL = "single_label_classification"
MULTI_LABEL = "multi_label_classification"
REGRESSION = "regression"
METRICS = {
    SINGLE_LABEL: ("accuracy", "f1", "f1_macro", "f1_weighted", "mcc"),
    MULTI_LABEL: ("f1_micro", "f1", "f1_macro", "subset_accuracy"),
    REGRESSION: ("pearson", "spearman", "mse", "mae"),
}


def probabilities(kind: str, logits: np.ndarray) -> np.ndarray:
    """Logits [n, k] as probabilities, float64 [n, k]: a softmax over classes, or a sigmoid for each label."""
    logits = np.asarray(logits, dtype=np.float64)
    if kind == MULTI_LABEL:
        return 0.5 * (1.0 + np.tanh(0.5 * logits))  # the sigmoid, without overflow
    exponents = np.exp(logits - logits.max(axis=1, keepdims=True))
    return exponents / exponents.sum(axis=1, keepdims=True)


def predictions(kind: str, logits: np.ndarray, threshold: float = 0.5) -> np.ndarray:
    """What a model says for logits [n, k].

    Returns:
        Single label: class ids, int64 [n]. Multi-label: bool [n, k], true where the probability is at least
        `threshold`. Regression: values, float64 [n].
    """
    if kind == SINGLE_LABEL:
        return np.argmax(logits, axis=1)
    if kind == MULTI_LABEL:
        return probabilities(kind, logits) >= threshold
    return np.asarray(logits, dtype=np.float64)[:, 0]


def score(
    kind: str, logits: np.ndarray, targets: np.ndarray, names: Sequence[str], threshold: float = 0.5
) -> dict[str, float]:
    """The figures of an evaluation.

    Args:
        logits: float [n, k], n at least 1; k is 1 for regression.
        targets: class ids int [n], or 0/1 [n, k] for multi-label, or values [n] for regression.
        names: the k class names; not used for regression.
        threshold: least probability of a label that counts as predicted (multi-label).

    Returns:
        Single label: `accuracy`, `f1` and `f1_macro` (the same number), `f1_weighted`, `mcc`. Multi-label:
        `f1_micro`, `f1` and `f1_macro`, `subset_accuracy`, `threshold`. Regression: `pearson`, `spearman`,
        `mse`, `mae`. As in scikit-learn, the macro average of a single label is over the classes that
        occur in targets or predictions, that of multi-label over all k. What is not defined is 0.0, never
        NaN: F1 of a label that neither occurs nor is predicted; MCC and the correlations where predictions or
        targets are constant, as they always are with one row. (Only a non-finite logit makes the errors of a
        regression non-finite.)
    """
    from sklearn import metrics

    predicted = predictions(kind, logits, threshold)
    targets = np.asarray(targets)
    if kind == REGRESSION:
        return _score_regression(predicted, targets.astype(np.float64))

    def f1(average: str) -> float:
        return float(metrics.f1_score(targets, predicted, average=average, zero_division=0.0))

    if kind == MULTI_LABEL:
        return {
            "f1_micro": f1("micro"),
            "f1": f1("macro"),
            "f1_macro": f1("macro"),
            "subset_accuracy": float(metrics.accuracy_score(targets, predicted)),
            "threshold": float(threshold),
        }
    return {
        "accuracy": float(metrics.accuracy_score(targets, predicted)),
        "f1": f1("macro"),
        "f1_macro": f1("macro"),
        "f1_weighted": f1("weighted"),
        "mcc": float(metrics.matthews_corrcoef(targets, predicted)) if len(targets) > 1 else 0.0,
    }


def report(
    kind: str, logits: np.ndarray, targets: np.ndarray, names: Sequence[str], threshold: float = 0.5
) -> dict[str, Any]:
    """Precision, recall, F1 and support of each class, and for a single label the confusion matrix.

    Returns:
        JSON-able; arguments as for `score`. `classes` is a list of {name, precision, recall, f1, support} in
        the order of `names`; `confusion` is {names, rows: "true", columns: "predicted", counts}. A figure
        without anything to divide by is 0.0. For regression: {"count": n}.
    """
    from sklearn import metrics

    predicted = predictions(kind, logits, threshold)
    targets = np.asarray(targets)
    if kind == REGRESSION:
        return {"count": len(predicted)}
    ids = list(range(len(names)))
    figures = metrics.precision_recall_fscore_support(targets, predicted, labels=ids, zero_division=0.0)
    classes = [
        {"name": name, "precision": float(p), "recall": float(r), "f1": float(f), "support": int(n)}
        for name, p, r, f, n in zip(names, *figures, strict=True)
    ]
    if kind == MULTI_LABEL:
        return {"classes": classes}
    counts = metrics.confusion_matrix(targets, predicted, labels=ids).tolist()
    return {
        "classes": classes,
        "confusion": {"names": list(names), "rows": "true", "columns": "predicted", "counts": counts},
    }


def warnings(
    kind: str, logits: np.ndarray, targets: np.ndarray, names: Sequence[str], threshold: float = 0.5
) -> list[str]:
    """What a good score may hide: a model that says the same of every row although the rows differ."""
    predicted = predictions(kind, logits, threshold)
    targets = np.asarray(targets)
    if len(predicted) < 2 or (predicted != predicted[:1]).any() or not (targets != targets[:1]).any():
        return []
    if kind == REGRESSION:
        return [f"every prediction is {predicted[0]:.4g}: the model does not tell the rows apart."]
    if kind == SINGLE_LABEL:
        share = float((targets == predicted[0]).mean())
        return [
            f"only one class is ever predicted: {names[predicted[0]]!r}, for all {len(targets)} rows; it is "
            f"right for {share:.1%} of them. Look at macro F1 and each class's recall, not at accuracy."
        ]
    labels = ", ".join(repr(names[label]) for label in np.flatnonzero(predicted[0])) or "no label"
    return [f"every row gets the same labels: {labels}. A lower --threshold shows weaker predictions."]


def greater_is_better(name: str) -> bool:
    """False for losses, errors and perplexity, whatever stands before (`eval_loss`, `dev_mse`)."""
    return not name.lower().endswith(("loss", "mse", "mae", "error", "perplexity"))


def _score_regression(predicted: np.ndarray, targets: np.ndarray) -> dict[str, float]:
    from scipy import stats
    from sklearn import metrics

    constant = len(targets) < 2 or np.ptp(predicted) == 0 or np.ptp(targets) == 0
    if not np.isfinite(predicted).all():
        return {"pearson": 0.0, "spearman": 0.0, "mse": np.inf, "mae": np.inf}
    return {
        "pearson": 0.0 if constant else float(stats.pearsonr(predicted, targets).statistic),
        "spearman": 0.0 if constant else float(stats.spearmanr(predicted, targets).statistic),
        "mse": float(metrics.mean_squared_error(targets, predicted)),
        "mae": float(metrics.mean_absolute_error(targets, predicted)),
    }
