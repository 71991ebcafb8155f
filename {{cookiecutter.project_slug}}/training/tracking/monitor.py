"""The bookkeeping of a step: where the rank is, the loss, skipped steps, speed, the log."""

import gc
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from training.checkpoint.state import Progress
from training.dataset.token_store import Batch
from training.distributed import watchdog
from training.distributed.ranks import gather, reduce_tensor
from training.distributed.replicas import check_replicas
from training.distributed.wrap import num_replicas
from training.step.batch_plan import BatchPlan
from training.step.loss import ModelWithLoss
from training.step.optimizer import Schedule, learning_rates
from training.tracking.skipped_steps import SkippedSteps
from training.tracking.throughput import Throughput, flops_per_token, peak_flops
from training.tracking.tracker import Tracker


class RunningLoss:
    """The loss since the last line of the log. It stays on the device until that line is due."""

    def __init__(self, device: torch.device) -> None:
        self.loss, self.weight = torch.zeros(2, dtype=torch.float64, device=device)

    def add(self, loss: Tensor, weight_sum: float, skipped: Tensor) -> None:
        """This rank's weighted sum of a step's losses, and the step's weight sum of all ranks."""
        self.loss += torch.where(skipped, 0.0, loss)
        self.weight += (~skipped).double() * weight_sum

    def mean(self) -> float:
        """Over the rows of all ranks since the last call; NaN if all steps were skipped."""
        total, weight = reduce_tensor(self.loss).item(), self.weight.item()
        self.loss.zero_()
        self.weight.zero_()
        return total / weight if weight else math.nan

    def state_dict(self) -> dict[str, Any]:
        """Call on every rank."""
        return {"loss": gather(self.loss.item()), "weight": self.weight.item()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        losses, world_size = state["loss"], dist.get_world_size()
        if len(losses) != world_size:  # resumed on another number of ranks
            losses = [sum(losses)] + [0.0] * (world_size - 1)
        self.loss += losses[dist.get_rank()]
        self.weight += state["weight"]


@dataclass
class Monitor:
    """Follows a run step by step. Off the logging step it reads nothing back from the device."""

    tracker: Tracker
    progress: Progress
    plan: BatchPlan
    with_loss: ModelWithLoss
    schedule: Schedule
    scaler: torch.amp.GradScaler

    def __post_init__(self) -> None:
        config, self.device = self.tracker.config, next(self.with_loss.parameters()).device
        self.running_loss = RunningLoss(self.device)
        self.skipped_steps = SkippedSteps(self.tracker, self.plan, self.schedule, self.scaler)
        peak = peak_flops(self.device, config.precision, num_replicas(config.strategy))
        self.throughput = Throughput(flops_per_token(self.with_loss.model), peak)

    def start(self, loader: Iterable[Batch]) -> None:
        """Begin to measure, right before the first step."""
        self.batches = self._stream(loader)
        self.throughput.reset()

    def _stream(self, loader: Iterable[Batch]) -> Iterator[Batch]:
        """Batches of this rank, epoch after epoch, from where `progress` is."""
        while True:
            self.plan.set_epoch(self.progress.epoch, self.progress.step_in_epoch)
            yield from loader

    def micro_batches(self) -> Iterator[Batch]:
        """This rank's micro-batches of the next step, on the device."""
        ends_step = False
        while not ends_step:
            began = time.perf_counter()
            batch = next(self.batches).to(self.device)
            self.throughput.waited += time.perf_counter() - began
            shape = tuple(batch.inputs["input_ids"].shape)
            watchdog.report("training", self.progress.step + 1, shape)
            ends_step = batch.plan.ends_step
            yield batch
        self.last = batch.plan

    def check_replicas(self, was_evaluated: bool) -> None:
        """Compare the ranks' weights at evaluations and every --check-replicas-every steps."""
        config = self.tracker.config
        every = config.check_replicas_every
        if was_evaluated or (every and self.progress.step % every == 0):
            check_replicas(self.with_loss.model, config.on_replica_drift)

    def end_step(self, loss_sum: Tensor, grad_norm: Tensor, skipped: Tensor) -> None:
        """Count a step, and log every --log-every steps. Call on every rank, with this rank's
        weighted sum of losses and the norm of the gradient before clipping."""
        self.throughput.add(self.last)
        self.skipped_steps.add(skipped, self.progress)
        self.running_loss.add(loss_sum, self.last.weight_sum, skipped)
        self.progress.end_step(self.plan.steps_per_epoch)
        self.tracker.advance()
        step, every = self.progress.step, self.tracker.config.log_every
        if step % every == 0 or step == self.tracker.total_steps:
            values = {
                "loss": self.running_loss.mean(),
                **learning_rates(self.schedule.optimizer),
                "grad_norm": grad_norm.item(),
                "loss_scale": self.scaler.get_scale(),
                **self.throughput.rates(),
            }
            if self.with_loss.compile_counter is not None:
                values["compilations"] = self.with_loss.compile_counter.graphs
            self.tracker.train_step(values)
            if not gc.isenabled():  # see worker.py: now there are no gradients
                gc.collect()
            self.throughput.reset()

    def state_dict(self) -> dict[str, Any]:
        return {
            "running_loss": self.running_loss.state_dict(),
            "skipped_steps": self.skipped_steps.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.running_loss.load_state_dict(state["running_loss"])
        self.skipped_steps.load_state_dict(state["skipped_steps"])
