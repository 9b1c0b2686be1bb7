"""Scores of a classifier, from the logits of all evaluation rows, each row once.

Everything is computed in memory from arrays: nothing is fetched, and nothing on disk is shared by two runs.
`kind` is transformers' `problem_type`: `single_label_classification`, `multi_label_classification` or
`regression`.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

SINGLE_LABEL = "single_label_classification"
MULTI_LABEL = "multi_label_classification"
REGRESSION = "regression"


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
    predicted = predictions(kind, logits, threshold)
    targets = np.asarray(targets)
    if kind == REGRESSION:
        return _score_regression(predicted, targets.astype(np.float64))
    wanted, said = _indicators(kind, predicted, targets, len(names))
    f1 = np.array([figures["f1"] for figures in _figures(wanted, said)])
    if kind == MULTI_LABEL:
        return {
            "f1_micro": _f1(int((wanted & said).sum()), int(said.sum()), int(wanted.sum())),
            "f1": float(f1.mean()),
            "f1_macro": float(f1.mean()),
            "subset_accuracy": float((wanted == said).all(axis=1).mean()),
            "threshold": float(threshold),
        }
    support, claims = wanted.sum(axis=0), said.sum(axis=0)
    macro = float(f1[support + claims > 0].mean())
    return {
        "accuracy": float((predicted == targets).mean()),
        "f1": macro,
        "f1_macro": macro,
        "f1_weighted": float((f1 * support).sum() / support.sum()),
        "mcc": _mcc(int((predicted == targets).sum()), support, claims),
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
    predicted = predictions(kind, logits, threshold)
    if kind == REGRESSION:
        return {"count": len(predicted)}
    wanted, said = _indicators(kind, predicted, np.asarray(targets), len(names))
    classes = [{"name": name, **figures} for name, figures in zip(names, _figures(wanted, said), strict=True)]
    if kind == MULTI_LABEL:
        return {"classes": classes}
    counts = (wanted.T.astype(int) @ said.astype(int)).tolist()
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
    return {
        "pearson": _correlation(predicted, targets),
        "spearman": _correlation(_ranks(predicted), _ranks(targets)),
        "mse": float(np.mean((predicted - targets) ** 2)),
        "mae": float(np.mean(np.abs(predicted - targets))),
    }


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    if len(a) < 2 or (a == a[0]).all() or (b == b[0]).all():
        return 0.0
    with np.errstate(invalid="ignore", divide="ignore"):
        return _finite(np.corrcoef(a, b)[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values share the mean of their ranks."""
    _, group, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[group]


def _indicators(kind: str, predicted: np.ndarray, targets: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Which labels each row has, and which it is given: two bool arrays [n, k]."""
    if kind == MULTI_LABEL:
        return targets > 0.5, predicted
    return targets[:, None] == np.arange(k), predicted[:, None] == np.arange(k)


def _figures(wanted: np.ndarray, said: np.ndarray) -> list[dict[str, float]]:
    """Precision, recall, F1 and support of each of the k labels."""
    hits, claims, support = (wanted & said).sum(axis=0), said.sum(axis=0), wanted.sum(axis=0)
    return [
        {
            "precision": float(hit / max(claim, 1)),
            "recall": float(hit / max(true, 1)),
            "f1": _f1(int(hit), int(claim), int(true)),
            "support": int(true),
        }
        for hit, claim, true in zip(hits, claims, support)
    ]


def _f1(hits: int, claims: int, support: int) -> float:
    return 2 * hits / (claims + support) if claims + support else 0.0


def _mcc(hits: int, support: np.ndarray, claims: np.ndarray) -> float:
    """Matthews correlation of k classes (Gorodkin 2004, the R_K statistic), from the counts of each class."""
    n = float(support.sum())
    true, said = support.astype(np.float64), claims.astype(np.float64)
    scale = np.sqrt((n * n - said @ said) * (n * n - true @ true))
    return float((hits * n - true @ said) / scale) if scale > 0 else 0.0


def _finite(value: float) -> float:
    return float(value) if np.isfinite(value) else 0.0
