"""What a rank that fails leaves behind: advice for the user, and its traceback in `errors/`."""

import re
import sys
import threading
import time
import traceback

import torch

from training.distributed import watchdog

CHECKPOINT_TIMEOUT_S = 10.0  # how long to wait for a checkpoint that is being written


def advice_for(error: BaseException) -> str:
    """What to do about a failure that has a usual cause, or "".

    The errors that are recognized by their text are plain RuntimeErrors: nothing else tells.
    """
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        rows, length = 0, 0
        if watchdog.position.shape:
            rows, length = watchdog.position.shape[0], watchdog.position.shape[-1]
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


def write_traceback(error: BaseException, rank: str) -> None:
    """Add to `error` where the rank was, and advice; print it, and keep it in the run's folder."""
    error.add_note(f"in: {watchdog.position}")
    if advice := advice_for(error):
        error.add_note(f"hint: {advice}")
    text = "".join(traceback.format_exception(error))
    print(f"\n[rank {rank}] {text}", file=sys.stderr, flush=True)
    if watchdog.errors_folder is not None:
        try:
            watchdog.errors_folder.mkdir(exist_ok=True)
            with (watchdog.errors_folder / f"rank{rank}.txt").open("a", encoding="utf-8") as file:
                file.write(f"{time.ctime()}\n{text}\n")
        except OSError:  # the disk may be what failed
            pass


def wait_for_checkpoint() -> None:
    """Let a checkpoint that is being written reach the disk."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(CHECKPOINT_TIMEOUT_S)
