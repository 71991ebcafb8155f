"""Where a run is: what a checkpoint holds besides the weights, so that it goes on to the bit."""

import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch.optim import Optimizer

from training.checkpoint import checkpoint
from training.checkpoint.rng import rng_state, set_rng_state
from training.distributed import full_state as sharding
from training.distributed.ranks import gather, on_main
from training.tracking.throughput import RunningLoss

log = logging.getLogger("training")


@dataclass
class Progress:
    """How far a run is; the same on every rank."""

    step: int = 0  # optimizer steps done
    epoch: int = 0
    step_in_epoch: int = 0
    best_score: float = -math.inf
    best_step: int = 0
    waited: int = 0  # evaluations without a better score
    evaluation_due: bool = False  # stopped before the evaluation of this step was over

    def end_step(self, steps_per_epoch: int) -> None:
        self.step, self.step_in_epoch = self.step + 1, self.step_in_epoch + 1
        if self.step_in_epoch == steps_per_epoch:
            self.epoch, self.step_in_epoch = self.epoch + 1, 0

    def should_stop_early(self, patience: int) -> bool:
        """Whether so many evaluations brought no better score; with patience 0 never."""
        return 0 < patience <= self.waited

    def evaluated(self, score: float) -> bool:
        """Whether a score, of which higher is better, is the best so far. Never true of NaN."""
        if score > self.best_score:
            self.best_score, self.best_step, self.waited = score, self.step, 0
            return True
        self.waited += 1
        return False


class Part(Protocol):
    """The optimizer, the schedule, ...: whatever has a state of its own."""

    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state_dict: dict[str, Any]) -> Any: ...


def collect(
    at: Progress, parts: Mapping[str, Part], loss: RunningLoss, learned: dict[str, Any]
) -> dict[str, Any]:
    """The state of a run. Call on every rank."""
    mine = {"rng": rng_state(loss.loss.device), "loss": loss.state()}
    states = {name: sharding.whole(part.state_dict()) for name, part in parts.items()}
    return {"at": asdict(at), "ranks": gather(mine), "learned": learned, **states}


def restore(
    source: Path, at: Progress, parts: Mapping[str, Part], loss: RunningLoss,
    learned: dict[str, Any], insist: bool,
) -> None:  # fmt: skip
    """Bring everything but the weights to where the checkpoint `source` was. On every rank.

    Errors: UserError when the run would have learned something else, unless `insist`.
    """
    state = checkpoint.load_state(on_main((source / "state.pt").read_bytes), source)
    checkpoint.check_same_run(state["learned"], learned, insist)
    for name, value in state["at"].items():
        setattr(at, name, value)
    for name, part in parts.items():
        if isinstance(part, Optimizer):
            state[name] = sharding.optimizer_state(state[name], part)
        if state[name]:  # empty: that of a scaler which was not in use
            part.load_state_dict(state[name])
    rank, world_size, device = dist.get_rank(), dist.get_world_size(), loss.loss.device
    of_ranks = state["ranks"]
    loss.weight += of_ranks[0]["loss"][1]
    if len(of_ranks) == world_size:
        loss.loss += of_ranks[rank]["loss"][0]
        set_rng_state(of_ranks[rank]["rng"], device)
    else:
        loss.loss += sum(r["loss"][0] for r in of_ranks) if rank == 0 else 0.0
        log.warning("the run had %d ranks and now has %d: the same rows in the same steps, "
                    "other dropout", len(of_ranks), world_size)  # fmt: skip
    batch = state["learned"]["global_batch_size"], learned["global_batch_size"]
    if batch[0] != batch[1]:  # the running epoch goes on at about the row where it was
        at.step_in_epoch = at.step_in_epoch * batch[0] // batch[1]
    log.info("resuming after step %d from %s", at.step, source)
