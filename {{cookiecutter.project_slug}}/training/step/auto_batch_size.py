"""`--batch-size auto`: the most rows that a device's memory holds in one forward and backward.

The global batch stays as it is, so what is learned does not change: where fewer rows fit, more
micro-batches are accumulated.
"""

import gc
import logging

import numpy as np
import torch
from torch import nn

from training.dataset.token_store import TokenStore
from training.distributed.ranks import reduce_tensor
from training.distributed.wrap import gradient_sync
from training.settings.config import AUTO, TrainConfig
from training.step.batch_plan import BatchPlan

log = logging.getLogger("training")


def fit_batch_size(
    config: TrainConfig, plan: BatchPlan, wrapped: nn.Module, model: nn.Module
) -> None:
    """With `--batch-size auto`, halve the plan's until one of the longest rows fits, on every rank.

    Random numbers are left as they were. Errors: UserError if not even one row fits.
    """
    if config.batch_size != AUTO:
        return
    rows, device = plan.store.by_length(), next(model.parameters()).device
    devices = [] if device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=device.type):
        while _runs_out_of_memory(rows[-plan.sizes.batch_size :], plan.store, wrapped, model):
            plan.halve()
    sizes = plan.sizes
    log.info(
        f"batch_size auto: {sizes.batch_size} rows at a time fit, with "
        f"{sizes.gradient_accumulation_steps} accumulation steps"
    )


def _runs_out_of_memory(
    rows: np.ndarray, store: TokenStore, wrapped: nn.Module, model: nn.Module
) -> bool:
    """Whether a forward and backward of `rows` runs out of memory on any rank."""
    batch = store.batch(rows).to(next(model.parameters()).device)
    ran_out = False
    try:
        with gradient_sync(wrapped, model, ends_step=False):
            wrapped(batch.inputs, batch.labels, batch.weight).sum().backward()
    except torch.OutOfMemoryError:
        ran_out = True
    model.zero_grad()
    gc.collect()
    if torch.accelerator.is_available():
        torch.get_device_module().empty_cache()
    return bool(reduce_tensor(torch.tensor(int(ran_out))).item())
