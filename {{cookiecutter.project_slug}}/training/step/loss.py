"""From a micro-batch to its part of a step's loss: what the model gives is checked and weighed."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from training.settings.errors import UserError


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
