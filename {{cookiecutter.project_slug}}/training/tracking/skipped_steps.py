"""Steps whose loss or gradient is not finite: skipped on all ranks alike, counted, listed.

All ranks see it in the reduced gradient; a loss that is not finite makes the gradient so
(`weighted_sum`). The host reads what happened one step later: no step waits for the device.
"""

import json
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from training.checkpoint.state import Progress
from training.distributed.ranks import is_main
from training.settings.errors import UserError, explain_disk_errors
from training.step.batch_plan import BatchPlan
from training.step.optimizer import Schedule
from training.tracking.tracker import Tracker

log = logging.getLogger("training")
COUNTS = ("in_a_row", "taken_in_a_row", "seeks_scale", "overflows")  # kept in checkpoints


@dataclass
class SkippedSteps:
    """Lists them, undoes them in the schedule, and ends the run after --max-bad-steps in a row."""

    tracker: Tracker
    plan: BatchPlan
    schedule: Schedule
    scaler: torch.amp.GradScaler
    in_a_row: int = 0
    taken_in_a_row: int = 0
    # fp16 finds its loss scale by overflowing: at the start, and whenever the scale has grown. Such
    # steps are skipped, too, but nothing is wrong with their rows.
    seeks_scale: bool = True
    overflows: int = 0
    # Of the last step: whether it was skipped, the event of that flag's copy, and which step.
    _pending: tuple[Tensor, Any, dict[str, int]] | None = None

    def add(self, skipped: Tensor, progress: Progress) -> None:
        """Note whether a step was skipped, before `progress` counts it; act on the one before.

        Call on every rank. Errors: UserError if too many steps in a row were skipped.
        """
        self.act_on_last()
        place = progress.step_in_epoch
        where = {"step": progress.step + 1, "epoch": progress.epoch, "step_in_epoch": place}
        on_cuda = skipped.device.type == "cuda"  # copied while the next step is computed
        flag = torch.empty((), dtype=torch.bool, pin_memory=on_cuda)
        flag.copy_(skipped, non_blocking=on_cuda)
        copied = torch.cuda.current_stream().record_event() if on_cuda else None
        self._pending = flag, copied, where

    def act_on_last(self) -> None:
        """Act on the step that was noted last. Errors: as in `add`."""
        if self._pending is None:
            return
        flag, copied, where = self._pending
        self._pending = None
        if copied is not None:
            copied.synchronize()
        if not flag:
            if self.overflows:
                counted = f"{self.overflows} steps that overflowed and were skipped"
                log.info(f"fp16: the loss scale is {self.scaler.get_scale():g}, after {counted}")
            self.in_a_row, self.overflows = 0, 0
            self.taken_in_a_row += 1
            if self.scaler.is_enabled():
                interval = self.scaler.get_growth_interval()
                self.seeks_scale = self.taken_in_a_row % interval == 0  # it has grown
            return
        self.taken_in_a_row = 0
        self.schedule.undo_step()
        scale = self.scaler.get_scale()
        overflowed = self.scaler.is_enabled() and scale >= 1.0
        if overflowed and self.seeks_scale:
            self.overflows += 1
            return
        self.in_a_row += 1
        rows = self.plan.global_batch(where["step_in_epoch"], where["epoch"])
        file = self.tracker.run / "bad_batches.jsonl"
        if is_main():
            stored = self.plan.store.stored(rows).tolist()
            line = where | {"in_a_row": self.in_a_row, "loss_scale": scale, "rows": stored}
            with explain_disk_errors(file), file.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(line) + "\n")
        reason = "fp16 overflowed" if overflowed else "its loss or gradient is not finite"
        count = f"{self.in_a_row} in a row; {file.name} lists its rows"
        log.warning(f"step {where['step']} was skipped: {reason} ({count})")
        if self.in_a_row >= self.tracker.config.max_bad_steps:
            raise UserError(
                f"{self.in_a_row} steps in a row, the last of them step {where['step']}, had a "
                "loss or gradient that is not finite: lower --lr, try --precision bf16 or fp32, "
                f"look at the rows in {file}; the last checkpoint is kept"
            )

    def state_dict(self) -> dict[str, Any]:
        pending = self._pending and [bool(self._pending[0]), self._pending[2]]
        return {"pending": pending, **{name: getattr(self, name) for name in COUNTS}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update({name: state[name] for name in COUNTS})
        pending = state["pending"]
        self._pending = pending and (torch.tensor(pending[0]), None, pending[1])
