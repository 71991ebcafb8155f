"""The update of a step: clipping, AdamW, and the learning rate over the steps."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer

from training.distributed.full_state import full_tensor
from training.distributed.replicas import check_gradients
from training.settings.config import TrainConfig

PLATEAU_FACTOR = 0.5  # what the learning rate is multiplied by
PLATEAU_PATIENCE = 1  # evaluations without a better metric before it acts


def build_optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    """AdamW. Weight decay acts on matrices, not on biases and norms, whatever their names are.

    A group may have an `lr` of its own, the peak of its schedule, and a `name` for the log.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
    decay = {"name": "decay", "params": matrices, "weight_decay": config.weight_decay}
    no_decay = {"name": "no_decay", "params": vectors, "weight_decay": 0.0}
    groups = [group for group in (decay, no_decay) if group["params"]]
    return torch.optim.AdamW(groups, lr=config.lr, fused=True)


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their norm is at most `max_norm`; with 0 leave them as they are.

    Returns the norm before, (). Errors: UserError if a parameter has no gradient.
    """
    check_gradients(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    return full_tensor(clip_grad_norm_(trained, max_norm or math.inf))


def step_if_finite(optimizer: Optimizer, scaler: torch.amp.GradScaler, grad_norm: Tensor) -> Tensor:
    """Take the optimizer's step, unless the gradient is not finite: the same on all ranks.

    Returns whether the step was skipped, (), on the device: nothing waits for it.
    """
    skipped = ~grad_norm.isfinite()
    if scaler.is_enabled():  # it has seen the gradient, too
        scaler.step(optimizer)
        scaler.update()
    else:
        step_unless(skipped, optimizer)
    return skipped


def step_unless(skipped: Tensor, optimizer: Optimizer) -> None:
    """Take the optimizer's step unless `skipped`, (), is true. A first step makes its state."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):  # fused: decides on the device
        vars(optimizer)["found_inf"] = skipped.float()
        optimizer.step()
    elif not skipped:  # another optimizer: this waits for the device
        optimizer.step()


def learning_rates(optimizer: Optimizer) -> dict[str, float]:
    """For the log: `lr`, the highest one, and `lr_NAME` of each group, if they have names."""
    groups = optimizer.param_groups
    named = {f"lr_{group['name']}": group["lr"] for group in groups if "name" in group}
    return {"lr": max(group["lr"] for group in groups), **named}


class Schedule:
    """Learning rate after `steps_done` optimizer steps: warm-up to the peak, then down.

    It is at its peak after the warm-up and at 0 when `total_steps` are done, so no step is taken
    with a learning rate of 0. `plateau` stays at the peak until `evaluated` sees no better score.
    """

    def __init__(self, optimizer: Optimizer, kind: str, total_steps: int, warmup: float) -> None:
        self.optimizer, self.kind, self.total_steps = optimizer, kind, total_steps
        self.warmup_steps = math.ceil(warmup * total_steps)  # `warmup`: a share of them
        self.peaks = [group["lr"] for group in optimizer.param_groups]
        self.steps_done = 0
        self.plateau = {"factor": 1.0, "best": -math.inf, "waited": 0}
        self._set()

    def factor(self, steps_done: int) -> float:
        """The share of the peak learning rate that step number `steps_done` (from 0) uses."""
        warmup, total = self.warmup_steps, self.total_steps
        if steps_done < warmup:
            return (steps_done + 1) / (warmup + 1)
        done = min(1.0, (steps_done - warmup) / max(1, total - warmup))
        if self.kind == "linear":
            return 1.0 - done
        if self.kind == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        return self.plateau["factor"]  # 1 for "constant"

    def step(self) -> None:
        """Call once after each optimizer step."""
        self.steps_done += 1
        self._set()

    def undo_step(self) -> None:
        """Call when a step that was counted turns out to be a skipped one."""
        self.steps_done -= 1
        self._set()

    def evaluated(self, score: float) -> None:
        """For `plateau`: the score of an evaluation; higher is better."""
        if self.kind != "plateau":
            return
        if score > self.plateau["best"]:
            self.plateau |= {"best": score, "waited": 0}
            return
        self.plateau["waited"] += 1
        if self.plateau["waited"] > PLATEAU_PATIENCE:
            self.plateau |= {"factor": self.plateau["factor"] * PLATEAU_FACTOR, "waited": 0}
            self._set()

    def _set(self) -> None:
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * self.factor(self.steps_done)

    def state_dict(self) -> dict[str, Any]:
        return {"steps_done": self.steps_done, "plateau": dict(self.plateau)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps_done = state["steps_done"]
        self.plateau = dict(state["plateau"])
        self._set()
