"""What is measured, and which direction is better. EDIT ME to add, change or remove a metric.

`METRICS` is name -> (function, whether higher is better). Each is computed over all rows of a
split at once, goes to the log, TensorBoard, `metrics.jsonl` and `results.json`, and can be chosen
by `--metric`. A function takes two arrays and returns one number; NaN where there is none:

    probabilities   (rows, num_labels) float64: softmax; with --multi-label a sigmoid per label
    truth           (rows,) label ids; with --multi-label (rows, num_labels) of 0 and 1

To add Matthews' correlation, write one line in METRICS and import its function where it is called:

    "mcc": (lambda p, truth: sklearn_metrics().matthews_corrcoef(truth, predicted(p, truth)), True),

The loss of model.py is measured in any case, under the name `loss`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np


def sklearn_metrics() -> Any:
    """sklearn.metrics, imported when it is first needed: it takes a second."""
    import sklearn.metrics

    return sklearn.metrics


def predicted(probabilities: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Shaped as `truth`: the likeliest label; with --multi-label 1 from a half on."""
    return (probabilities >= 0.5).astype(int) if truth.ndim == 2 else probabilities.argmax(axis=1)


def accuracy(probabilities: np.ndarray, truth: np.ndarray) -> float:
    """The share of right rows; with --multi-label all labels of a row must be right."""
    return sklearn_metrics().accuracy_score(truth, predicted(probabilities, truth))


def f1(average: str) -> Callable[[np.ndarray, np.ndarray], float]:
    """F1 over classes: `macro`, the plain mean of those that have rows in the split; `weighted` by
    their rows; `micro`, from the counts of all classes."""

    def score(probabilities: np.ndarray, truth: np.ndarray) -> float:
        labels = np.arange(probabilities.shape[1])
        if average != "micro":  # a class without rows has no F1
            labels = np.flatnonzero(truth.any(axis=0)) if truth.ndim == 2 else np.unique(truth)
        if not len(labels):
            return 0.0
        return sklearn_metrics().f1_score(
            truth, predicted(probabilities, truth), labels=labels, average=average, zero_division=0
        )

    return score


def log_loss(probabilities: np.ndarray, truth: np.ndarray) -> float:
    """Cross-entropy, without class weights or smoothing; with --multi-label its mean over labels.

    A probability of 0 counts as the smallest float, or 1e-16 as the rest of 1: it stays finite.
    """
    if truth.ndim == 2:
        rest = np.maximum(1.0 - probabilities, np.finfo(float).eps)
        of_truth = np.where(truth == 1, probabilities, rest)
    else:
        of_truth = probabilities[np.arange(len(truth)), truth]
    return -np.log(np.maximum(of_truth, np.finfo(float).tiny)).mean()


METRICS: dict[str, tuple[Callable[[np.ndarray, np.ndarray], float], bool]] = {
    "accuracy": (accuracy, True),
    "macro_f1": (f1("macro"), True),
    "weighted_f1": (f1("weighted"), True),
    "micro_f1": (f1("micro"), True),
    "log_loss": (log_loss, False),
}
