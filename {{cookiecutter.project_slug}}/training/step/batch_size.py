"""When a device's memory is too small: find a micro-batch that fits, or go on with a smaller one.

The global batch stays as it is, so what is learned does not change: more micro-batches are
accumulated instead. All ranks change their micro-batch together.
"""

import gc
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from training.checkpoint.rng import rng_state, set_rng_state
from training.dataset.token_store import TokenStore
from training.distributed.ranks import reduce_tensor
from training.distributed.wrap import gradient_sync
from training.settings.config import AUTO, TrainConfig

log = logging.getLogger("training")
BUCKET = 25 * 2**20  # bytes of gradients that are reduced together, as in DDP


class Longest(NamedTuple):
    """Rows to make a batch of."""

    rows: np.ndarray
    weight: np.ndarray
    length: int = 0


class Memory:
    """Forward and backward of micro-batches that may not fit.

    With `--oom shrink` gradients are reduced when every rank has said that it got through the step,
    not during backward: a rank that ran out could not take part.
    """

    def __init__(
        self, wrapped: nn.Module, model: nn.Module, parameters: list[nn.Parameter],
        plan: Any, config: TrainConfig,
    ) -> None:  # fmt: skip
        self.wrapped, self.model, self.parameters = wrapped, model, parameters
        self.plan, self.shrinks = plan, config.oom == "shrink"
        self.unknown = config.batch_size == AUTO
        self.ran_out = False  # this rank, in this step

    @contextmanager
    def trying(self, ends_step: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch, which exchange gradients if it is the
        last of its step."""
        try:
            with gradient_sync(self.wrapped, self.model, ends_step and not self.shrinks):
                yield
        except torch.OutOfMemoryError:
            if not self.shrinks:
                raise
            self.ran_out = True
        if self.ran_out:
            self._release()

    def must_repeat(self, loss: Any) -> bool:
        """After the last micro-batch of a step, on every rank: whether any rank ran out of memory.

        Then the micro-batch of all is halved, and gradients and loss are dropped; else gradients
        are reduced. Errors: UserError when a single row is too much.
        """
        if not self.shrinks:
            return False
        if not self._anywhere(self.ran_out):
            self._reduce()
            return False
        self.ran_out = False
        loss.drop_step()
        self._release()
        self.plan.halve()
        log.warning("memory ran out: the step is repeated with at most %d rows at a time; what is "
                    "learned stays the same", self.plan.sizes.batch_size)  # fmt: skip
        return True

    def fit(self, store: TokenStore, device: torch.device) -> None:
        """With `--batch-size auto`: halve it until one of the longest rows fits, on every rank."""
        if not self.unknown:
            return
        random, rows = rng_state(device), store.by_length()
        while True:
            rows = rows[-self.plan.sizes.batch_size :]
            batch = store[Longest(rows, np.ones(len(rows)))]
            inputs = {k: v.to(device) for k, v in batch.inputs.items()}
            ran_out = False
            try:
                with gradient_sync(self.wrapped, self.model, False):
                    labels, weight = batch.labels.to(device), batch.weight.to(device)
                    self.wrapped(inputs, labels, weight).sum().backward()
            except torch.OutOfMemoryError:
                ran_out = True
            self._release()
            if not self._anywhere(ran_out):
                break
            self.plan.halve()
        set_rng_state(random, device)  # a try leaves no trace
        sizes = self.plan.sizes
        log.info("batch_size auto: %d rows at a time fit, x %d accumulated", sizes.batch_size,
                 sizes.gradient_accumulation_steps)  # fmt: skip

    def _anywhere(self, mine: bool) -> bool:
        return bool(reduce_tensor(torch.tensor(int(mine))).item())

    def _release(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        gc.collect()
        if torch.accelerator.is_available():
            torch.accelerator.memory.empty_cache()

    def _reduce(self) -> None:
        """Average the gradients over ranks, some at a time."""
        grads = [p.grad for p in self.parameters if p.grad is not None]
        while grads:
            part = [grads.pop()]
            while grads and sum(g.nbytes for g in part) + grads[-1].nbytes <= BUCKET:
                part.append(grads.pop())
            flat = torch.cat([g.reshape(-1) for g in part]).div_(dist.get_world_size())
            dist.all_reduce(flat)
            for grad, reduced in zip(part, flat.split([g.numel() for g in part]), strict=True):
                grad.copy_(reduced.view_as(grad))
