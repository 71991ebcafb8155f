"""What a rank that fails leaves behind: advice for the user, and its traceback in `errors/`."""

import re
import threading
import traceback

import torch

from training.distributed import watchdog

CHECKPOINT_TIMEOUT_S = 10.0  # how long to wait for a checkpoint that is being written


def advice_for(error: BaseException) -> str:
    """What to do about a failure that has a usual cause, or "".

    Errors that are recognized by their text are plain RuntimeErrors: there is no type or code.
    """
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        rows, length = watchdog.position.shape
        return (
            f"memory ran out with {rows} rows of {length} tokens at a time: --batch-size "
            f"{max(1, rows // 2)} needs less and gives the same result (--eval-batch-size in an "
            "evaluation); --gradient-checkpointing and a shorter --max-length need less too"
        )
    if re.search(r"DataLoader worker .*(killed|exited unexpectedly)|Bus error", text):
        return (
            "a loader process was killed, mostly because memory is short: --num-workers 0 starts "
            "none; in a container, give it more shared memory (--shm-size)"
        )
    if "Expected to have finished reduction" in text:
        return (
            "a parameter of model.py did not contribute to the loss: every one must, on every "
            "rank, unless requires_grad_(False) freezes it"
        )
    return ""


def write_traceback(error: BaseException) -> None:
    """Add to `error` where the rank was, and advice; print it, and keep it in the run's folder."""
    error.add_note(f"in: {watchdog.position}")
    if advice := advice_for(error):
        error.add_note(f"hint: {advice}")
    watchdog.write_error("".join(traceback.format_exception(error)))


def wait_for_checkpoint() -> None:
    """Let a checkpoint that is being written reach the disk."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(CHECKPOINT_TIMEOUT_S)
