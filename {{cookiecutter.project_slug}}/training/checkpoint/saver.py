"""Saving in the background: the step loop waits for a copy in memory, not for the disk."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.checkpoint import checkpoint
from training.checkpoint.state import TrainState
from training.distributed import watchdog
from training.distributed.full_state import full_weights
from training.distributed.ranks import on_main


class Saver:
    """Writes a run's checkpoints and best weights, one at a time. Call it on every rank.

    The main process writes, in a thread. torch.distributed.checkpoint's asynchronous save would
    write shards; here one file in Hugging Face form is wanted, whatever the number of ranks.
    """

    def __init__(
        self,
        run: Path,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        state: TrainState,
        keep: int,
    ) -> None:
        self.run, self.model, self.tokenizer = run, model, tokenizer
        self.state, self.keep = state, keep
        self.saved_step = state.progress.step  # a resumed run has the checkpoint of its first step
        self.error: Exception | None = None  # of the write in the background
        self._thread: threading.Thread | None = None
        self._buffers: dict[str, Tensor] = {}

    def save(self, is_best: bool, is_last: bool) -> None:
        """Begin to write a checkpoint, and if it is the best, `best/`; wait for the one before.

        The last one of a run is written at once, without a copy. Errors: UserError if the one
        before could not be written.
        """
        step = self.state.progress.step
        watchdog.report("saving", step)
        weights, state = full_weights(self.model), self.state.state_dict()
        on_main(partial(self._save, step, weights, state, is_best, is_last))
        self.saved_step = step

    def has_best(self) -> bool:
        """Whether there are best weights. Call on every rank."""
        return on_main((self.run / "best").exists)

    def wait(self) -> None:
        """Until the last checkpoint is on disk. Errors: UserError if it could not be written."""
        on_main(self._wait)

    def _save(
        self,
        step: int,
        weights: dict[str, Tensor],
        state: dict[str, Any],
        is_best: bool,
        is_last: bool,
    ) -> None:
        self._wait()
        if is_last:
            self._write(step, weights, state, is_best)
            return
        weights = self._copied(weights, "model", {})
        state = self._copied(state, "state", {})
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

    def _write(
        self, step: int, weights: dict[str, Tensor], state: dict[str, Any], is_best: bool
    ) -> None:
        """best/ comes first: the checkpoint says that its weights are the best so far."""
        write = partial(
            checkpoint.save, step=step, model=self.model, tokenizer=self.tokenizer, weights=weights
        )
        try:
            if is_best:
                write(self.run / "best")
            write(self.run / "checkpoints" / f"step-{step:08d}", state=state)
            checkpoint.remove_old(self.run / "checkpoints", self.keep)
        except Exception as error:
            self.error = error

    def _copied(self, value: Any, name: str, seen: dict[Any, Tensor]) -> Any:
        """A copy of nested dicts and lists; tensors go to memory that is used again each time.

        `seen`: copies by the memory of their tensor. Tied weights stay tied in the copy.
        """
        if isinstance(value, dict):
            return {k: self._copied(v, f"{name}/{k}", seen) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self._copied(v, f"{name}/{i}", seen) for i, v in enumerate(value))
        if not isinstance(value, Tensor):
            return value
        key = value.data_ptr(), value.shape, value.stride(), value.dtype
        if value.numel() and key in seen:
            return seen[key]
        pinned = value.device.type == "cuda"  # the device then copies without waiting
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != value.shape or buffer.dtype != value.dtype:
            buffer = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned)
            self._buffers[name] = buffer
        seen[key] = buffer.copy_(value.detach(), non_blocking=pinned)
        return buffer
