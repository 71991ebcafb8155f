"""Saving in the background: the step loop waits for a copy in memory, not for the disk."""

import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.checkpoint import checkpoint


class Saver:
    """Writes a run's checkpoints and best weights, one at a time. Used by the main process alone.

    A thread, not `torch.distributed.checkpoint`: all ranks hold the same weights, one file in
    Hugging Face form is wanted, and a step must be able to ask whether the last write failed.
    """

    def __init__(
        self, run: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, keep: int
    ) -> None:
        self.run, self.model, self.tokenizer, self.keep = run, model, tokenizer, keep
        self.error: Exception | None = None  # of the write in the background
        self._thread: threading.Thread | None = None
        self._buffers: dict[str, Tensor] = {}

    def save(
        self,
        step: int,
        weights: dict[str, Tensor],
        state: dict[str, Any] | None,
        best: bool,
        last: bool = False,
    ) -> None:
        """Begin to write the checkpoint of `step` (if there is a state), and `best/` if so told.

        Waits for the one before it. The `last` one of a run is written at once, without a copy:
        there is nothing to go on with meanwhile.

        Errors: UserError, when the one before could not be written.
        """
        self.wait()
        # Before the checkpoint, which says that these are the best: so it is never ahead of them.
        folders = [self.run / "best"] if best else []
        if state is not None:
            folders.append(self.run / "checkpoints" / f"step-{step:08d}")
        if last:
            self._write(folders, step, weights, state)
            return
        weights = self._copied(weights, "model", {})
        state = self._copied(state, "state", {})
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()  # the copies are there
        self._thread = threading.Thread(
            target=self._write, args=(folders, step, weights, state), name="checkpoint"
        )
        self._thread.start()

    def wait(self) -> None:
        """Until the last checkpoint is on the disk. Errors: UserError, when it could not be."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self.error is not None:
            raise self.error

    def _write(
        self, folders: list[Path], step: int, weights: dict[str, Tensor], state: Any
    ) -> None:
        try:
            for folder in folders:
                own_state = state if folder.name != "best" else None
                checkpoint.save(folder, step, self.model, self.tokenizer, weights, own_state)
            checkpoint.remove_old(self.run / "checkpoints", self.keep)
        except Exception as error:
            self.error = error

    def _copied(self, value: Any, name: str, seen: dict[Any, Tensor]) -> Any:
        """A copy of nested dicts and lists, their tensors in memory that is used again each time.

        `seen`: tensors that share their memory, as tied weights do, share it in the copy.
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
