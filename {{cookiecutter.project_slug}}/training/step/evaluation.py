"""Exact evaluation: every row once, and bit-identical results for any number of ranks."""

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm

from training.dataset.token_store import TokenStore
from training.distributed import watchdog
from training.distributed.ranks import is_main, on_main
from training.step.loss import check_logits

Arrays = list[np.ndarray]


@dataclass
class Evaluation:
    """Metrics on every rank; truth and logits on the main process only, elsewhere None."""

    metrics: dict[str, float]
    labels: list[str]
    logits: Any  # array (rows, num_labels)
    truth: Any  # array (rows,) of label ids, or (rows, num_labels) of 0 and 1

    def score(self, metric: str) -> float:
        """The metric with higher values better; NaN if the loss is not finite."""
        if not math.isfinite(self.metrics["loss"]):
            return math.nan
        return -self.metrics[metric] if metric == "loss" else self.metrics[metric]

    def probabilities(self) -> np.ndarray:
        """(rows, num_labels)"""
        return probabilities(self.logits, multi_label=self.truth.ndim == 2)

    def predicted(self) -> np.ndarray:
        """Shaped as `truth`: (rows,), or (rows, num_labels) of 0 and 1."""
        return predictions(self.logits, multi_label=self.truth.ndim == 2)


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the unwrapped `model` on all ranks, `batch_size` rows at a time."""

    model: nn.Module
    device: torch.device
    autocast: Callable[[], AbstractContextManager]
    batch_size: int
    should_stop: Callable[[], bool] = lambda: False  # asked before each batch, on all ranks alike

    def try_longest(self, store: TokenStore) -> None:
        """One batch of the longest rows, to see that evaluation works at all."""
        with _inference(self.model):
            self._logits(store, store.by_length()[-self.batch_size :])

    def evaluate(self, store: TokenStore, description: str = "evaluating") -> Evaluation | None:
        """Metrics over all rows of `store`; None if a stop was asked for meanwhile."""
        # Batches are cut by length, whatever the number of ranks: a row always has the same
        # neighbors and the same padding, so its logits are bit-identical.
        order, world_size = store.by_length(), dist.get_world_size()
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        with _inference(self.model):
            own_logits = self._own_logits(store, batches, description)
        if own_logits is None:
            return None
        shares: list[Any] | None = [None] * world_size if is_main() else None
        dist.gather_object(own_logits, shares)
        logits = truth = None
        if shares is not None:
            truth = store.label_ids().astype(np.int64)
            logits = np.empty((len(store), len(store.labels)), own_logits[0].dtype)
            for rank, share in enumerate(shares):
                for rows, part in zip(batches[rank::world_size], share, strict=True):
                    logits[rows] = part
        metrics = on_main(lambda: compute_metrics(logits, truth))
        return Evaluation(metrics, store.labels, logits, truth)

    def _own_logits(self, store: TokenStore, batches: Arrays, description: str) -> Arrays | None:
        """Logits of this rank's batches: whole batches go to ranks in turn."""
        own, logits = batches[dist.get_rank() :: dist.get_world_size()], []
        longest_share = len(batches[:: dist.get_world_size()])  # all ranks ask equally often
        hidden = None if is_main() else True  # None: hidden if the output is not a terminal
        for i in tqdm(range(longest_share), description, leave=False, disable=hidden):
            if self.should_stop():
                return None
            if i < len(own):
                shape = len(own[i]), int(store.lengths(own[i]).max())
                watchdog.report(description, i + 1, shape)
                logits.append(self._logits(store, own[i]))
            elif isinstance(self.model, FSDPModule):
                self._logits(store, batches[0])  # each forward needs every rank's shards
        watchdog.report(f"the end of {description}")
        dtype = next(self.model.parameters()).dtype  # NumPy has no bf16
        return [part.to("cpu", dtype).numpy() for part in logits]

    def _logits(self, store: TokenStore, rows: np.ndarray) -> torch.Tensor:
        """(rows, num_labels)"""
        inputs = {k: v.to(self.device, non_blocking=True) for k, v in store.inputs(rows).items()}
        with self.autocast():
            logits = self.model(**inputs).logits
        check_logits(logits, len(rows), len(store.labels))
        return logits


@contextmanager
def _inference(model: nn.Module) -> Iterator[None]:
    """No dropout and no gradients; afterwards the model is in training mode."""
    model.eval()
    with torch.no_grad():
        yield
    model.train()


# -- logits to metrics ---------------------------------------------------------------------------


def probabilities(logits: np.ndarray, multi_label: bool) -> np.ndarray:
    """Softmax over labels, or a sigmoid for each label: (rows, num_labels), float64."""
    z = logits.astype(np.float64)
    if multi_label:
        return 0.5 * (1.0 + np.tanh(0.5 * z))
    exp = np.exp(z - z.max(axis=1, keepdims=True))
    return exp / exp.sum(axis=1, keepdims=True)


def predictions(logits: np.ndarray, multi_label: bool) -> np.ndarray:
    """Label ids (rows,); for multi-label 1 where the probability is at least a half."""
    return (logits >= 0).astype(np.int64) if multi_label else logits.argmax(axis=1)


def row_losses(logits: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Cross-entropy of each row, without weights or smoothing: (rows,), float64."""
    z = logits.astype(np.float64)
    if truth.ndim == 2:
        return (np.logaddexp(0.0, z) - truth * z).mean(axis=1)
    return np.logaddexp.reduce(z, axis=1) - z[np.arange(len(z)), truth]


def compute_metrics(logits: Any, truth: Any) -> dict[str, float]:
    """Loss, accuracy and F1. For multi-label, accuracy counts rows with every label right."""
    from sklearn import metrics as sk  # here, since importing it takes a second

    predicted = predictions(logits, multi_label=truth.ndim == 2)
    counts = sk.multilabel_confusion_matrix(truth, predicted)  # (classes, 2, 2)
    twice_right, positives = 2 * counts[:, 1, 1], counts[:, 1].sum(axis=1)
    errors = counts[:, 0, 1] + counts[:, 1, 0]
    f1 = twice_right / np.maximum(twice_right + errors, 1)  # (classes,)
    micro_f1 = twice_right.sum() / max((twice_right + errors).sum(), 1)
    return {
        "loss": float(row_losses(logits, truth).mean()),
        "accuracy": float(sk.accuracy_score(truth, predicted)),
        "macro_f1": float(f1.mean()),
        "weighted_f1": float((f1 * positives).sum() / max(positives.sum(), 1)),
        "micro_f1": float(micro_f1),
        "rows": len(truth),
    }


def confusion(result: Evaluation) -> np.ndarray:
    """Rows of true label i that were given label j: (num_labels, num_labels)."""
    from sklearn import metrics as sk

    return sk.confusion_matrix(result.truth, result.predicted(), labels=range(len(result.labels)))


def report(result: Evaluation) -> str:
    """Precision, recall, F1 and support of every class, and the confusion matrix, as text."""
    from sklearn import metrics as sk

    names, ids = result.labels, range(len(result.labels))
    text = sk.classification_report(
        result.truth, result.predicted(), labels=ids, target_names=names, digits=3, zero_division=0
    )
    if result.truth.ndim == 2:
        return text
    matrix, name_width = confusion(result), max(map(len, names))
    width = max(5, len(str(matrix.max())) + 1)
    title = "confusion matrix: a row per true label, a column per predicted label, in this order"
    text += f"\n{title}\n"
    for name, counts in zip(names, matrix, strict=True):
        cells = "".join(f"{count or '.':>{width}}" for count in counts)
        text += f"{name:>{name_width}} {cells}\n"
    return text
