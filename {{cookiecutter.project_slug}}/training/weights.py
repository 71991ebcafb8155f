"""The weight of each row's loss, from the weight of its class."""

import json
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from training.config import TrainConfig, UserError
from training.tokens import TokenStore


def weighted_sum(losses: Tensor, weight: Tensor) -> Tensor:
    """Sum of losses times weights: (batch,), (batch,) -> (). Errors: UserError for a mean loss.

    A sum that is not finite has a gradient that is not finite either, so that every rank sees it.
    """
    if losses.shape != weight.shape:
        raise UserError(
            f"model.py: loss_per_row must return one loss per row, of shape {tuple(weight.shape)}, "
            f"not {tuple(losses.shape)}"
        )
    total = (losses * weight.to(losses.dtype)).sum()
    return total * torch.where(total.detach().isfinite(), 1.0, math.nan)


class WithLoss(nn.Module):
    """A model with its loss: what a step calls.

    The loss is taken where the logits are, so that nn.DataParallel need not collect them on one
    GPU. Inputs, labels, weight: tensors of (batch, ...) -> the weighted sum of the losses, (1,).
    """

    def __init__(
        self, model: nn.Module, loss_per_row: Callable[..., Tensor], labels: int,
        label_smoothing: float, autocast: Callable[[], AbstractContextManager],
    ) -> None:  # fmt: skip
        super().__init__()
        self.model, self.loss_per_row, self.labels = model, loss_per_row, labels
        self.label_smoothing, self.autocast = label_smoothing, autocast

    def forward(self, inputs: dict[str, Tensor], labels: Tensor, weight: Tensor) -> Tensor:
        with self.autocast():
            logits = self.model(**inputs).logits  # (batch, labels)
        check_logits(logits, len(labels), self.labels)
        losses = self.loss_per_row(logits, labels, self.label_smoothing)
        return weighted_sum(losses, weight).reshape(1)


def check_logits(logits: Tensor, rows: int, labels: int) -> None:
    """Errors: UserError when the model does not give a number for each label of each row."""
    if logits.shape != (rows, labels):
        raise UserError(
            f"model.py gives logits of shape {tuple(logits.shape)} for {rows} rows; there are "
            f"{labels} labels"
        )


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
