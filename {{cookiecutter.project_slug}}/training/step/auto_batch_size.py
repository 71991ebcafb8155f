"""`--batch-size auto`: the most rows that a device's memory holds in a whole step.

The global batch stays as it is, so what is learned does not change: where fewer rows fit, more
micro-batches are accumulated.
"""

import gc
import logging

import torch
from torch import nn
from torch.optim import Optimizer

from training.dataset.token_store import Batch
from training.distributed.ranks import reduce_tensor
from training.distributed.wrap import gradient_sync
from training.settings.config import AUTO, TrainConfig
from training.step.batch_plan import BatchPlan
from training.step.optimizer import clip_gradients, step_unless

log = logging.getLogger("training")


def fit_batch_size(
    config: TrainConfig, plan: BatchPlan, wrapped: nn.Module, model: nn.Module, optimizer: Optimizer
) -> None:
    """With `--batch-size auto`, halve the plan's until one of the longest rows fits, on every rank.

    Weights and random numbers are left as they were. Errors: UserError if not even one row fits.
    """
    if config.batch_size != AUTO:
        return
    rows, device = plan.store.by_length(), next(model.parameters()).device
    devices = [] if device.type == "cpu" else [device]
    fitting_steps = 0  # the first one makes AdamW's moments; the second one has to fit beside them
    with torch.random.fork_rng(devices, device_type=device.type):
        while fitting_steps < 2:
            batch = plan.store.batch(rows[-plan.sizes.batch_size :]).to(device)
            if _runs_out_of_memory(batch, wrapped, model, optimizer):
                plan.halve()
            else:
                fitting_steps += 1
    sizes = plan.sizes
    log.info(
        f"batch_size auto: {sizes.batch_size} rows at a time fit, with "
        f"{sizes.gradient_accumulation_steps} accumulation steps"
    )


def _runs_out_of_memory(
    batch: Batch, wrapped: nn.Module, model: nn.Module, optimizer: Optimizer
) -> bool:
    """Whether a step that changes no weight runs out of memory on any rank."""
    ran_out = torch.tensor(0)
    try:
        # No rank waits for another in here: it could be the one that has run out.
        with gradient_sync(wrapped, model, ends_step=False):
            wrapped(batch.inputs, batch.labels, batch.weight).sum().backward()
        is_skipped = clip_gradients(model, max_norm=0).new_ones((), dtype=torch.bool)
        step_unless(is_skipped, optimizer)
    except torch.OutOfMemoryError:
        ran_out += 1
    optimizer.zero_grad()
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.memory.empty_cache()
    return bool(reduce_tensor(ran_out).item())
