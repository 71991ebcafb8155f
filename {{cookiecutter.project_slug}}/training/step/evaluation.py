"""Exact evaluation: every row once, the same result to the bit for any number of ranks."""

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
from training.launch.signals import Interrupted
from training.step.loss import check_logits


@dataclass
class Evaluation:
    """Metrics on every rank; rows and their logits on the main process only."""

    metrics: dict[str, float]
    labels: list[str]
    logits: np.ndarray | None = None  # (rows, labels)
    truth: np.ndarray | None = None  # (rows,) label ids, or (rows, labels) of 0 and 1

    def probabilities(self) -> np.ndarray:
        """(rows, labels)"""
        assert self.logits is not None and self.truth is not None
        return probabilities(self.logits, multi_label=self.truth.ndim == 2)

    def predicted(self) -> np.ndarray:
        """Like `truth`: (rows,), or (rows, labels) of 0 and 1."""
        assert self.logits is not None and self.truth is not None
        return predictions(self.logits, multi_label=self.truth.ndim == 2)


def evaluate(
    model: nn.Module,
    store: TokenStore,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager],
    batch_size: int,
    description: str = "evaluating",
    stopping: Callable[[], bool] = lambda: False,
    trial: bool = False,
) -> Evaluation:
    """Evaluate the unwrapped `model` on all rows of `store`, over all ranks.

    `trial`: on the longest rows alone, to see that it works; there are no metrics then.
    Errors: Interrupted when `stopping` says so.
    """
    if trial:
        with torch.no_grad(), _evaluating(model):
            _logits(model, store, store.by_length()[-batch_size:], device, autocast)
        return Evaluation({}, store.labels)
    logits = gather_logits(model, store, device, autocast, batch_size, description, stopping)
    truth = store.label_ids().astype(np.int64) if logits is not None else None
    result = Evaluation({}, store.labels, logits, truth)
    result.metrics = on_main(lambda: compute_metrics(logits, truth))
    return result


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout; then as it was."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def _logits(
    model: nn.Module, store: TokenStore, rows: np.ndarray, device: torch.device,
    autocast: Callable[[], AbstractContextManager],
) -> torch.Tensor:  # fmt: skip
    """(rows, labels)"""
    inputs = {k: v.to(device, non_blocking=True) for k, v in store.inputs(rows).items()}
    with autocast():
        logits = model(**inputs).logits
    check_logits(logits, len(rows), len(store.labels))
    return logits


@torch.no_grad()
def gather_logits(
    model: nn.Module,
    store: TokenStore,
    device: torch.device,
    autocast: Callable[[], AbstractContextManager],
    batch_size: int,
    description: str,
    stopping: Callable[[], bool] = lambda: False,
) -> np.ndarray | None:
    """Logits of all rows in row order, (rows, labels), on the main process; None elsewhere.

    Batches are cut by length, whatever the number of ranks, and go to ranks in turn: a row always
    meets the same neighbours and the same padding, so its logits are the same to the bit.
    `stopping`: asked before each batch, on all ranks alike. Errors: Interrupted when it says so.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    order = store.by_length()
    batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
    mine = batches[rank::world_size]
    parts = []
    most = len(batches[::world_size])  # of any rank: all ask as often whether to stop
    steps = tqdm(range(most), description, leave=False, disable=None if is_main() else True)
    with _evaluating(model):
        for i in steps:
            if stopping():
                raise Interrupted
            if i >= len(mine) and not isinstance(model, FSDPModule):
                continue  # a sharded model needs every rank for each forward
            rows = mine[i] if i < len(mine) else batches[0]
            watchdog.report(description, i + 1, (len(rows), int(store.lengths(rows).max())))
            logits = _logits(model, store, rows, device, autocast)
            if i < len(mine):
                parts.append(logits)
    watchdog.report(f"the end of {description}")
    # Every rank sends the same number of rows; the main process knows how many of them are real.
    dtype = next(model.parameters()).dtype
    sent = torch.zeros(most * batch_size, len(store.labels), dtype=dtype)
    if parts:
        local = torch.cat(parts).to("cpu", dtype)
        sent[: len(local)] = local
    received = [torch.empty_like(sent) for _ in range(world_size)] if is_main() else None
    dist.gather(sent, received, dst=0)
    if received is None:
        return None
    all_logits = np.empty((len(store), len(store.labels)), sent.numpy().dtype)
    for r, part in enumerate(received):
        rows = np.concatenate(batches[r::world_size] or [np.empty(0, np.int64)])
        all_logits[rows] = part[: len(rows)].numpy()
    return all_logits


def probabilities(logits: np.ndarray, multi_label: bool) -> np.ndarray:
    """Softmax over labels, or a sigmoid for each label: (rows, labels), float64."""
    z = logits.astype(np.float64)
    if multi_label:
        return 0.5 * (1.0 + np.tanh(0.5 * z))
    exp = np.exp(z - z.max(axis=1, keepdims=True))
    return exp / exp.sum(axis=1, keepdims=True)


def predictions(logits: np.ndarray, multi_label: bool) -> np.ndarray:
    """Label ids (rows,); for multi-label 1 where the probability is at least a half."""
    return (logits >= 0).astype(np.int64) if multi_label else logits.argmax(axis=1)


def row_losses(logits: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """Cross entropy of each row, without weights or smoothing: (rows,), float64."""
    z = logits.astype(np.float64)
    if truth.ndim == 2:
        return (np.logaddexp(0.0, z) - truth * z).mean(axis=1)
    return np.logaddexp.reduce(z, axis=1) - z[np.arange(len(z)), truth]


def compute_metrics(logits: Any, truth: Any) -> dict[str, float]:
    """loss, accuracy and F1. For multi-label, accuracy counts rows with every label right."""
    from sklearn import metrics as sk  # here: its second must not delay the first step

    predicted = predictions(logits, multi_label=truth.ndim == 2)
    f1 = {
        f"{average}_f1": float(sk.f1_score(truth, predicted, average=average, zero_division=0))
        for average in ("macro", "weighted", "micro")
    }
    return {
        "loss": float(row_losses(logits, truth).mean()),
        "accuracy": float(sk.accuracy_score(truth, predicted)),
        **f1,
        "rows": len(truth),
    }


def confusion(result: Evaluation) -> np.ndarray:
    """Rows of true label i that were given label j: (labels, labels)."""
    from sklearn import metrics as sk

    return sk.confusion_matrix(
        result.truth, result.predicted(), labels=np.arange(len(result.labels))
    )


def report(result: Evaluation) -> str:
    """Precision, recall, F1 and support of every class, and the confusion matrix, as text."""
    from sklearn import metrics as sk

    text = sk.classification_report(
        result.truth,
        result.predicted(),
        labels=np.arange(len(result.labels)),
        target_names=result.labels,
        digits=3,
        zero_division=0,
    )
    if result.truth is None or result.truth.ndim == 2:
        return text
    matrix = confusion(result)
    width = max(5, *(len(str(n)) + 1 for n in matrix.max(axis=0)))
    names = max(map(len, result.labels))
    lines = ["confusion matrix: a row per true label, a column per predicted label, in this order"]
    for label, counts in zip(result.labels, matrix, strict=True):
        lines.append(f"{label:>{names}} " + "".join(f"{n or '.':>{width}}" for n in counts))
    return f"{text}\n" + "\n".join(lines) + "\n"
