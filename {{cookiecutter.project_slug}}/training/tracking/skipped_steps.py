"""Steps whose loss or gradient is not finite: skipped on all ranks alike, counted, listed.

The gradient tells, which all ranks share once it is reduced; a loss that is not finite makes it so
(`weighted_sum`). The optimizer skips on the device, and the host reads what happened one step
later: no step waits for the device.
"""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training.checkpoint.state import Progress
from training.dataset.token_store import TokenStore
from training.distributed.ranks import is_main
from training.settings.errors import UserError, explain_disk_errors
from training.step.batch_plan import BatchPlan
from training.step.optimizer import Schedule

log = logging.getLogger("training")


def step_if_finite(
    optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, grad_norm: Tensor
) -> Tensor:
    """Take the optimizer's step, unless the gradient is not finite. Returns whether it was skipped,
    as a tensor on the device."""
    skipped = ~grad_norm.isfinite()
    if scaler.is_enabled():  # it has seen the gradient, too
        scaler.step(optimizer)
        scaler.update()
    elif getattr(optimizer, "_step_supports_amp_scaling", False):  # the fused ones: on the device
        vars(optimizer)["found_inf"] = skipped.float()
        optimizer.step()
    elif not skipped:  # another optimizer: this waits for the device
        optimizer.step()
    return skipped


class SkippedSteps:
    """Keeps count, takes the step back from the schedule, and ends the run when they are many."""

    def __init__(
        self, run: Path, plan: BatchPlan, store: TokenStore, schedule: Schedule,
        scaler: torch.amp.GradScaler, most: int,
    ) -> None:  # fmt: skip
        self.file = run / "bad_batches.jsonl"
        self.plan, self.store, self.schedule, self.scaler = plan, store, schedule, scaler
        self.most, self.in_a_row = most, 0
        self._last: tuple[Tensor, Any, dict[str, int]] | None = None

    def add(self, skipped: Tensor, at: Progress) -> None:
        """Note a step that is over, before `at` counts it; act on the one before. On every rank.

        Errors: UserError when that was the `most`th skipped step in a row.
        """
        self.settle()
        where = {"step": at.step + 1, "epoch": at.epoch, "step_in_epoch": at.step_in_epoch}
        if skipped.device.type == "cuda":  # on its way to the host while the next step is computed
            flag = torch.empty((), dtype=torch.bool, pin_memory=True)
            flag.copy_(skipped, non_blocking=True)
            self._last = flag, torch.cuda.current_stream().record_event(), where
        else:
            self._last = skipped.cpu(), None, where

    def settle(self) -> None:
        """Act on the last step that was noted. Errors: as in `add`."""
        if self._last is None:
            return
        flag, copied, where = self._last
        self._last = None
        if copied is not None:
            copied.synchronize()
        if not flag:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        self.schedule.undo_step()
        rows = self.store.stored(self.plan.global_batch(where["step_in_epoch"], where["epoch"]))
        line = where | {"in_a_row": self.in_a_row, "loss_scale": self.scaler.get_scale()}
        if is_main():
            with explain_disk_errors(self.file), self.file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line | {"rows": rows.tolist()}) + "\n")
        fp16 = self.scaler.is_enabled() and line["loss_scale"] >= 1.0
        reason = "fp16 overflowed" if fp16 else "its loss or gradient is not finite"
        log.warning("step %d was skipped: %s (%d in a row; its rows are in %s)", where["step"],
                    reason, self.in_a_row, self.file.name)  # fmt: skip
        if self.in_a_row >= self.most:
            raise UserError(
                f"{self.in_a_row} steps in a row, the last of them step {where['step']}, had a "
                "loss or gradient that is not finite: lower --lr, try --precision bf16 or fp32, "
                f"look at the rows in {self.file}; the last checkpoint stands"
            )

    def state_dict(self) -> dict[str, Any]:
        last = self._last and [bool(self._last[0]), self._last[2]]
        return {"in_a_row": self.in_a_row, "last": last}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.in_a_row, last = state["in_a_row"], state["last"]
        self._last = last and (torch.tensor(last[0]), None, last[1])
