"""Saving in the background: the step loop waits for a copy in memory, not for the disk."""

import shutil
import threading
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from training.checkpoint import checkpoint
from training.checkpoint.model_folder import Weights
from training.checkpoint.state import TrainState
from training.distributed import watchdog
from training.distributed.full_state import gather_to_main
from training.distributed.ranks import on_main

State = dict[str, Any]


@dataclass
class Saver:
    """Writes a run's checkpoints and best weights, one at a time. Call it on every rank.

    The main process writes, in a thread: one file of weights, as Hugging Face has it. The
    asynchronous save of torch.distributed.checkpoint would write shards.
    """

    run: Path
    state: TrainState
    error: Exception | None = None  # of the write in the background
    _thread: threading.Thread | None = None
    _buffers: Weights = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.saved_step = self.state.progress.step  # a resumed run has that checkpoint
        if not self.state.checked:
            self.state.check()

    def save(self, is_best: bool, is_last: bool) -> None:
        """Begin to write a checkpoint, and if it is the best, `best/`. The last one of a run is
        written at once. Errors: UserError if the one before could not be written."""
        step = self.state.progress.step
        watchdog.report("saving", step)
        is_sharded = isinstance(self.state.model, FSDPModule)
        if is_sharded:
            self.wait()  # no second copy is made while there is one
        weights, state = self.state.folder.weights(), self.state.state_dict()
        if is_sharded:  # every rank has a share
            weights, state = self._copied((weights, state), "", {})
        on_main(partial(self._save, step, weights, state, is_best, is_last))
        self.saved_step = step

    def has_best(self) -> bool:
        """Whether there are best weights. Call on every rank."""
        return on_main((self.run / "best").exists)

    def wait(self) -> None:
        """Until the last checkpoint is on disk. Errors: UserError if it could not be written."""
        on_main(self._wait)

    def _save(
        self, step: int, weights: Weights, state: State, is_best: bool, is_last: bool
    ) -> None:
        self._wait()
        if is_last:
            self._write(step, weights, state, is_best)
            return
        if not isinstance(self.state.model, FSDPModule):
            weights, state = self._copied((weights, state), "", {})
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # until the copies are complete
        arguments = step, weights, state, is_best
        self._thread = threading.Thread(target=self._write, args=arguments, name="checkpoint")
        self._thread.start()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self.error is not None:
            raise self.error

    def _write(self, step: int, weights: Weights, state: State, is_best: bool) -> None:
        """best/ comes first: the checkpoint says that its weights are the best so far."""
        checkpoints = self.run / "checkpoints"
        try:
            if is_best:
                self._write_folder(self.run / "best", step, weights, None)
            self._write_folder(checkpoints / f"step-{step:08d}", step, weights, state)
            keep = self.state.folder.config.keep_checkpoints
            for _, old in checkpoint.saved(checkpoints)[:-keep]:
                shutil.rmtree(old, ignore_errors=True)
        except Exception as error:
            self.error = error

    def _write_folder(self, folder: Path, step: int, weights: Weights, state: State | None) -> None:
        """The model, and the rest of a checkpoint."""

        def write(folder: Path) -> None:
            self.state.folder.write(folder, weights)
            if state is not None:
                torch.save(state, folder / "state.pt")

        size = sum(t.nbytes for t in weights.values())
        copies = 1 if state is None else 3  # AdamW keeps two values a weight
        checkpoint.write_folder(folder, write, step, size * copies)

    def _copied(self, value: Any, name: str, seen: dict[Any, Tensor]) -> Any:
        """A copy of nested dicts and lists; tensors go to memory that is used again each time.

        `seen`: copies by the memory of their tensor. Tied weights stay tied in the copy.
        """
        if isinstance(value, dict):
            return {k: self._copied(v, f"{name}/{k}", seen) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copied(v, f"{name}/{i}", seen) for i, v in enumerate(value))
        if isinstance(value, DTensor):
            return gather_to_main(value)
        if not isinstance(value, Tensor):
            return value
        key = value.data_ptr(), value.shape, value.stride(), value.dtype
        if value.numel() and key in seen:
            return seen[key]
        pinned = value.device.type == "cuda"  # the device then copies without waiting
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)
        self._buffers[name] = seen[key] = buffer.copy_(value.detach(), non_blocking=pinned)
        return buffer
