"""From a micro-batch to its part of a step's loss: logits are checked, rows are weighted."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from training.dataset.token_store import TokenStore
from training.distributed.wrap import make_autocast
from training.settings.config import TrainConfig
from training.settings.errors import UserError
from training.step.compile import CompileCounter

RowLoss = Callable[..., Tensor]


class ModelWithLoss(nn.Module):
    """What a step calls. Inputs, labels, weight: (batch, ...) -> weighted sum of losses, (1,).

    The loss is taken where the logits are, so that nn.DataParallel need not collect them on one
    GPU. `loss_per_row` is that of model.py.
    """

    def __init__(
        self, model: nn.Module, loss_per_row: RowLoss, num_labels: int, config: TrainConfig
    ) -> None:
        super().__init__()
        self.model, self.loss_per_row, self.num_labels = model, loss_per_row, num_labels
        self.config = config
        self.autocast = make_autocast(next(model.parameters()).device, config.precision)
        self.compile_counter = CompileCounter() if config.compile else None
        if self.compile_counter is not None:  # in place; evaluations call the model as it is
            self.compile(backend=self.compile_counter)

    def forward(self, inputs: dict[str, Tensor], labels: Tensor, weight: Tensor) -> Tensor:
        with self.autocast():
            logits = self.model(**inputs).logits  # (batch, num_labels)
        check_logits(logits, len(labels), self.num_labels)
        losses = self.loss_per_row(logits, labels, self.config)  # (batch,)
        return weighted_sum(losses, weight).reshape(1)


def weighted_sum(losses: Tensor, weight: Tensor) -> Tensor:
    """Sum of losses times weights: (batch,), (batch,) -> (). Errors: UserError for a mean loss.

    A sum that is not finite gets a gradient that is not finite either, so that every rank sees it.
    """
    if losses.shape != weight.shape:
        raise UserError(
            f"model.py: loss_per_row must return one loss per row, of shape {tuple(weight.shape)}, "
            f"not {tuple(losses.shape)}"
        )
    total = (losses * weight.to(losses.dtype)).sum()
    return total * torch.where(total.detach().isfinite(), 1.0, math.nan)


def check_logits(logits: Tensor, rows: int, num_labels: int) -> None:
    """Errors: UserError unless the model gives one number for each label of each row."""
    if logits.shape != (rows, num_labels):
        raise UserError(
            f"model.py gives logits of shape {tuple(logits.shape)} for {rows} rows; there are "
            f"{num_labels} labels"
        )


# -- weights of rows -----------------------------------------------------------------------------


def row_weight(config: TrainConfig, train: TokenStore) -> Callable[[np.ndarray], np.ndarray]:
    """A function from row numbers to the weights of their losses, (n,) -> (n,) float64."""
    if config.class_weights == "none":
        return lambda rows: np.ones(len(rows))
    weights = class_weights(config.class_weights, train.labels, train.label_counts())
    return lambda rows: weights[train.label_ids(rows)]


def class_weights(kind: str, labels: list[str], counts: np.ndarray) -> np.ndarray:
    """(num_labels,): "balanced" is rows / (labels x rows of the label), as in scikit-learn; a label
    without rows has weight 1. Any other `kind` is a JSON file {label: weight}. Errors: UserError.
    """
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
