"""`--batch-size auto`: the most rows that a device's memory holds in one forward and backward.

The global batch stays as it is, so what is learned does not change: where fewer rows fit, more
micro-batches are accumulated.
"""

import gc
import logging
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from training.dataset.token_store import TokenStore
from training.distributed.ranks import reduce_tensor
from training.distributed.wrap import gradient_sync
from training.settings.config import AUTO, TrainConfig
from training.step.batch_plan import BatchPlan

log = logging.getLogger("training")


class LongestRows(NamedTuple):
    """What to ask a TokenStore for."""

    rows: np.ndarray
    weight: np.ndarray
    length: int = 0


def fit_batch_size(
    config: TrainConfig,
    plan: BatchPlan,
    store: TokenStore,
    wrapped: nn.Module,
    model: nn.Module,
    device: torch.device,
) -> None:
    """Halve the plan's batch size until one of the longest rows fits, on every rank.

    Random numbers are left as they were. With a batch size that is set it does nothing.
    Errors: UserError if not even one row fits.
    """
    if config.batch_size != AUTO:
        return
    rows = store.by_length()
    devices = [] if device.type == "cpu" else [device]
    kind = "cuda" if device.type == "cpu" else device.type
    with torch.random.fork_rng(devices, device_type=kind):
        while _runs_out_of_memory(rows[-plan.sizes.batch_size :], store, wrapped, model, device):
            plan.halve()
    log.info(
        "batch_size auto: %d rows at a time fit, with %d accumulation steps",
        plan.sizes.batch_size,
        plan.sizes.gradient_accumulation_steps,
    )


def _runs_out_of_memory(
    rows: np.ndarray, store: TokenStore, wrapped: nn.Module, model: nn.Module, device: torch.device
) -> bool:
    """Whether a forward and backward of `rows` runs out of memory on any rank."""
    batch = store[LongestRows(rows, np.ones(len(rows)))].to(device)
    ran_out = False
    try:
        with gradient_sync(wrapped, model, ends_step=False):
            wrapped(batch.inputs, batch.labels, batch.weight).sum().backward()
    except torch.OutOfMemoryError:
        ran_out = True
    for parameter in model.parameters():
        parameter.grad = None
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()
    return bool(reduce_tensor(torch.tensor(int(ran_out))).item())
