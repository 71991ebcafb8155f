"""What a rank that fails leaves behind: a hint of what to do, and its traceback in `errors/`."""

import errno
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from training import watch
from training.config import UserError

# Faults of the disk, or of the place on it: the user can mend them, and a traceback tells nothing.
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
LEAVING = 10.0  # seconds that a checkpoint which is being written is waited for


def is_plain(error: BaseException) -> bool:
    """Whether one line tells it all."""
    if isinstance(error, OSError):
        return error.errno in DISK or isinstance(error, FileNotFoundError | PermissionError)
    return isinstance(error, UserError)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """A fault of the disk becomes a UserError that names `path`: a failed write alone does not."""
    try:
        yield
    except OSError as error:
        if not is_plain(error):
            raise
        raise UserError(f"cannot write {path}: {error.strerror}") from error


def hint(error: BaseException) -> str:
    """What to do about a failure that has a usual cause, or nothing."""
    text = str(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        rows, length = (*watch.now.shape, 0, 0)[:2]
        return (
            f"memory ran out with {rows} rows of {length} tokens at a time: --batch-size "
            f"{max(1, rows // 2)} needs less and learns the same (--eval-batch-size in an "
            "evaluation); so do --gradient-checkpointing and a shorter --max-length"
        )
    if re.search(r"DataLoader worker .*(killed|exited unexpectedly)|Bus error", text):
        return (
            "a loader process was killed, mostly because memory is short: --num-workers 0 has "
            "none; in a container, give it more shared memory (--shm-size)"
        )
    if "Expected to have finished reduction" in text:
        return (
            "a part of model.py took no part in the loss: every parameter must, on every rank, "
            "unless requires_grad_(False) freezes it"
        )
    return ""


def keep(error: BaseException, rank: str) -> None:
    """Add where the rank was, and a hint, to `error`; keep its traceback in the run's folder."""
    error.add_note(f"in: {watch.now}")
    if advice := hint(error):
        error.add_note(f"hint: {advice}")
    text = "".join(traceback.format_exception(error))
    print(f"\n[rank {rank}] {text}", file=sys.stderr, flush=True)
    if watch.errors is not None:
        try:
            watch.errors.mkdir(exist_ok=True)
            with (watch.errors / f"rank{rank}.txt").open("a", encoding="utf-8") as file:
                file.write(f"{time.ctime()}\n{text}\n")
        except OSError:  # the disk may be what failed
            pass


def finish_writing() -> None:
    """Give a checkpoint that is being written the time to get to the disk."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(LEAVING)
