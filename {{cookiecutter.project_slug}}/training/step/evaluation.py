"""Exact evaluation: every row once, and bit-identical results for any number of ranks."""

import math
import numbers
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from tqdm import tqdm

from training.dataset.token_store import Splits, TokenStore
from training.distributed import watchdog
from training.distributed.ranks import is_main, on_main
from training.distributed.wrap import autocast
from training.settings.config import TrainConfig
from training.settings.errors import UserError
from training.step.loss import RowLoss, check_logits, check_losses, logits_of, row_weight

Arrays = list[np.ndarray]
Metrics = Mapping[str, tuple[Callable[[np.ndarray, np.ndarray], float], bool]]
LOGITS_AT_A_TIME = 1 << 22  # for the loss, so that memory does not double


@dataclass
class Evaluation:
    """Metrics on every rank; truth and logits on the main process only, elsewhere None."""

    metrics: dict[str, float]  # loss, all of metrics.py, and rows
    higher_is_better: dict[str, bool]
    labels: list[str]
    logits: Any  # array (rows, num_labels)
    truth: Any  # array (rows,) of label ids, or (rows, num_labels) of 0 and 1

    def score(self, metric: str) -> float:
        """The metric with higher values better; NaN, never the best, if it or the loss is not
        finite."""
        value = self.metrics[metric]
        if not math.isfinite(self.metrics["loss"]) or not math.isfinite(value):
            return math.nan
        return value if self.higher_is_better[metric] else -value

    def probabilities(self) -> np.ndarray:
        """(rows, num_labels)"""
        return probabilities(self.logits, multi_label=self.truth.ndim == 2)

    def predicted(self) -> np.ndarray:
        """Shaped as `truth`: (rows,), or (rows, num_labels) of 0 and 1."""
        return predictions(self.probabilities(), multi_label=self.truth.ndim == 2)


@dataclass(frozen=True)
class Evaluator:
    """Evaluates the unwrapped `model` on all ranks.

    `loss_per_row` is that of model.py, `metrics` is METRICS of metrics.py. Errors: UserError.
    """

    model: nn.Module
    config: TrainConfig
    loss_per_row: RowLoss
    metrics: Metrics
    splits: Splits
    should_stop: Callable[[], bool] = lambda: False  # asked before each batch, on all ranks alike

    def __post_init__(self) -> None:
        self.config.check_metric(self.metrics)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    def dry_run(self) -> None:
        """What would fail in an evaluation fails now: the longest rows of each split go through the
        model, and all its rows are measured as if their logits were these."""
        for store in (self.splits[name] for name in self.splits if name != "train"):
            self._try(store)

    def _try(self, store: TokenStore) -> None:
        longest = store.by_length()[-self.config.eval_batch_size :]
        device, shape = self.device, (len(store), len(store.labels))
        devices = [] if device.type == "cpu" else [device]
        with torch.random.fork_rng(devices, device_type=device.type), inference(self.model):
            (logits,) = self._on_host([self._logits(store, longest)])
        measured = on_main(lambda: self._measure(store, np.resize(logits, shape)))
        if not math.isfinite(measured["loss"]):
            what = "loss_per_row gives" if np.isfinite(logits).all() else "the model's logits make"
            raise UserError(f"model.py: {what} a loss that is not finite, before any step")

    def evaluate(self, store: TokenStore, description: str = "evaluating") -> Evaluation | None:
        """Metrics over all rows of `store`; None if a stop was asked for meanwhile."""
        # Batches are cut by length, whatever the number of ranks: a row always has the same
        # neighbors and the same padding, so its logits are bit-identical.
        order, world_size = store.by_length(), dist.get_world_size()
        size = self.config.eval_batch_size
        batches = [order[i : i + size] for i in range(0, len(order), size)]
        with inference(self.model):
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
        metrics = on_main(lambda: self._measure(store, logits))
        directions = {name: is_higher for name, (_, is_higher) in self.metrics.items()}
        return Evaluation(metrics, directions | {"loss": False}, store.labels, logits, truth)

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
        return self._on_host(logits)

    def _on_host(self, logits: list[torch.Tensor]) -> Arrays:
        # NumPy has no bf16
        return [p.to("cpu", torch.promote_types(p.dtype, torch.float32)).numpy() for p in logits]

    def _logits(self, store: TokenStore, rows: np.ndarray) -> torch.Tensor:
        """(rows, num_labels)"""
        device = self.device
        inputs = {k: v.to(device, non_blocking=True) for k, v in store.inputs(rows).items()}
        with autocast(device, self.config.precision):
            logits = logits_of(self.model(**inputs))
        check_logits(logits, len(rows), len(store.labels))
        return logits

    def _measure(self, store: TokenStore, logits: Any) -> dict[str, float]:
        """Loss, metrics and number of rows: (rows, num_labels) -> values. On the main process."""
        truth = store.label_ids().astype(np.int64)
        values = {"loss": self._loss(store, logits, truth)}
        arrays = probabilities(logits, multi_label=truth.ndim == 2), truth
        for array in arrays:
            array.flags.writeable = False  # no metric changes what the next one sees
        for name, (function, _) in self.metrics.items():
            try:
                value = function(*arrays)
            except Exception as error:
                if np.isfinite(logits).all():
                    raise UserError(_describe_failure(name, error)) from error
                value = math.nan  # the weights are broken, not the metric
            values[name] = as_float(name, value)
        return values | {"rows": len(truth)}

    @torch.no_grad()
    def _loss(self, store: TokenStore, logits: np.ndarray, truth: np.ndarray) -> float:
        """The weighted mean over rows, as in training: of the same function, in the same dtype."""
        weight = row_weight(self.config, self.splits["train"], store)(np.arange(len(store)))
        rows, total = max(1, LOGITS_AT_A_TIME // logits.shape[1]), 0.0
        for part in (slice(i, i + rows) for i in range(0, len(truth), rows)):
            given = torch.from_numpy(logits[part]), torch.from_numpy(truth[part])
            losses = self.loss_per_row(*given, self.config)
            check_losses(losses, len(given[1]))
            total += (losses.double().numpy() * weight[part]).sum()
        return float(total / weight.sum())


@contextmanager
def inference(model: nn.Module) -> Iterator[None]:
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
        exp = np.exp(-np.abs(z))  # exact also for small probabilities
        return np.where(z >= 0, 1.0, exp) / (1.0 + exp)
    exp = np.exp(z - z.max(axis=1, keepdims=True))
    return exp / exp.sum(axis=1, keepdims=True)


def predictions(probabilities: np.ndarray, multi_label: bool) -> np.ndarray:
    """Label ids (rows,); for multi-label 1 where the probability is at least a half."""
    return (probabilities >= 0.5).astype(np.int64) if multi_label else probabilities.argmax(axis=1)


def as_float(name: str, value: Any) -> float:
    """What a metric gave. Errors: UserError unless it is a real number, of Python or of NumPy or
    PyTorch without dimensions."""
    number = value.item() if getattr(value, "shape", None) == () else value
    if not isinstance(number, bool) and isinstance(number, numbers.Real):
        return float(number)
    shape = f" of shape {tuple(value.shape)}" if getattr(value, "shape", ()) else ""
    given = f"{type(value).__name__}{shape}" if shape else f"{value!r:.60}"
    raise UserError(f"metrics.py: {name} must return one number (a float), not {given}")


def _describe_failure(name: str, error: Exception) -> str:
    """One line on a metric that raised: where in metrics.py, and what."""
    frames = traceback.extract_tb(error.__traceback__)[1:2]  # the first one is the call
    where = "".join(f", line {frame.lineno} of {Path(frame.filename).name}" for frame in frames)
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return f"metrics.py: {name} must return one number (a float), but raised {reason:.200}{where}"
