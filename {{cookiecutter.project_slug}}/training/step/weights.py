"""The weight of each row's loss, from the weight of its class."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from training.dataset.token_store import TokenStore
from training.settings.config import TrainConfig
from training.settings.errors import UserError


def row_weight(config: TrainConfig, train: TokenStore) -> Callable[[np.ndarray], np.ndarray]:
    """A function from row numbers to their weights, (n,) -> (n,) float64.

    The weighted mean is taken over the whole global batch, by the sum of its weights, so it is the
    same for any number of ranks.
    """
    if config.class_weights == "none":
        return lambda rows: np.ones(len(rows))
    weights = class_weights(config.class_weights, train.labels, train.label_counts())
    return lambda rows: weights[train.label_ids(rows)]


def class_weights(kind: str, labels: list[str], counts: np.ndarray) -> np.ndarray:
    """(labels,): "balanced" is rows / (labels x rows of the label), as scikit-learn has it; a label
    without rows has weight 1. Otherwise a JSON file {label: weight}. Errors: UserError."""
    if kind == "balanced":
        return np.where(counts > 0, counts.sum() / (len(counts) * np.maximum(counts, 1)), 1.0)
    try:
        given = json.loads(Path(kind).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"class_weights {kind!r} is not none, balanced or a readable JSON file: {error}"
        ) from None
    if not isinstance(given, dict) or set(given) != set(labels):
        raise UserError(f"{kind} must give a weight for each of the labels {', '.join(labels)}")
    weights = [given[label] for label in labels]
    if not all(type(w) in (int, float) and 0 < w < float("inf") for w in weights):
        raise UserError(f"{kind}: weights must be positive numbers, not {weights}")
    return np.array(weights, np.float64)
