"""From a micro-batch to its part of a step's loss: logits are checked, rows are weighted."""

import inspect
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from training.dataset.token_store import TokenStore
from training.distributed.prepare_model import CompileCounter
from training.distributed.wrap import autocast
from training.settings.config import TrainConfig
from training.settings.errors import UserError, did_you_mean

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
        try:
            inspect.signature(loss_per_row).bind("logits", "labels", config)
        except TypeError as error:
            rule = "loss_per_row must take (logits, labels, config)"
            raise UserError(f"model.py: {rule}: {error}") from None
        self.model, self.loss_per_row, self.num_labels = model, loss_per_row, num_labels
        self.config = config
        self.compile_counter = CompileCounter() if config.compile else None
        if self.compile_counter is not None:  # in place; evaluations call the model as it is
            self.compile(backend=self.compile_counter)

    def forward(self, inputs: dict[str, Tensor], labels: Tensor, weight: Tensor) -> Tensor:
        with autocast(labels.device, self.config.precision):
            logits = logits_of(self.model(**inputs))  # (batch, num_labels)
        check_logits(logits, len(labels), self.num_labels)
        losses = self.loss_per_row(logits, labels, self.config)  # (batch,)
        return weighted_sum(losses, weight).reshape(1)


def weighted_sum(losses: Tensor, weight: Tensor) -> Tensor:
    """Sum of losses times weights: (batch,), (batch,) -> (). Errors: UserError for a mean loss.

    A sum that is not finite gets a gradient that is not finite either, so that every rank sees it.
    """
    check_losses(losses, len(weight))
    total = (losses * weight.to(losses.dtype)).sum()
    return total * torch.where(total.detach().isfinite(), 1.0, math.nan)


def logits_of(output: Any) -> Tensor:
    """What the model gives: the logits, or an object that has them. Errors: UserError."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        rule = "the logits, (batch, num_labels), or an object with .logits"
        raise UserError(f"model.py: forward must return {rule}, not a {type(output).__name__}")
    return logits


def check_forward_arguments(model: nn.Module, inputs: dict[str, Tensor]) -> None:
    """Errors: UserError if `forward` does not take each tensor of a batch by its name, or needs
    something else."""
    parameters = inspect.signature(model.forward).parameters.values()
    takes = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    needed = [p.name for p in parameters if p.name in takes and p.default is p.empty]
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    unknown = [] if takes_all else [name for name in inputs if name not in takes]
    missing = [name for name in needed if name not in inputs]
    if unknown or missing:
        verb, names = ("does not take", unknown) if unknown else ("needs", missing)
        raise UserError(
            f"model.py: forward of {type(model).__name__} takes {', '.join(takes)}: it {verb} "
            f"{', '.join(names)}; a batch has {', '.join(inputs)}, and inputs of data.py's rows "
            "(for predict.py: --split)"
        )


def check_losses(losses: Any, rows: int) -> None:
    """Errors: UserError unless loss_per_row gave one number for each row."""
    shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
    if shape != (rows,):
        raise UserError(
            f"model.py: loss_per_row must return one loss per row, of shape ({rows},), not {shape}"
        )


def check_logits(logits: Tensor, rows: int, num_labels: int) -> None:
    """Errors: UserError unless the model gives one number for each label of each row."""
    if logits.shape != (rows, num_labels):
        raise UserError(
            f"model.py: forward gives logits of shape {tuple(logits.shape)} for {rows} rows; it "
            f"must be {(rows, num_labels)}, one for each label"
        )


# -- weights of rows -----------------------------------------------------------------------------


def row_weight(
    config: TrainConfig, train: TokenStore, store: TokenStore | None = None
) -> Callable[[np.ndarray], np.ndarray]:
    """A function from row numbers to the weights of their losses, (n,) -> (n,) float64.

    The rows are those of `store`, by default of `train`, whose labels are counted.
    """
    if config.class_weights == "none":
        return lambda rows: np.ones(len(rows))
    weights = class_weights(config.class_weights, train.labels, train.label_counts())
    measured = train if store is None else store
    return lambda rows: weights[measured.label_ids(rows)]


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
        names = set(given) if isinstance(given, dict) else set()
        missing, unknown = sorted(set(labels) - names), sorted(names - set(labels))
        others = [f"{name!r}{did_you_mean(name, missing)}" for name in unknown]
        raise UserError(
            f"{kind} must give a weight for each label, and for nothing else; missing: "
            f"{', '.join(map(repr, missing)) or 'none'}; unknown: {', '.join(others) or 'none'}"
        )
    weights = [given[label] for label in labels]
    if not all(type(w) in (int, float) and 0 < w < float("inf") for w in weights):
        raise UserError(f"{kind}: weights must be positive numbers, not {weights}")
    return np.array(weights, np.float64)
