"""Folders that are costly to make: made once, by one process, and then shared."""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from training.distributed import watchdog
from training.distributed.ranks import has_terminal
from training.settings.errors import explain_disk_errors

log = logging.getLogger("training")


def build_once(folder: Path, build: Callable[[Path], None], what: str) -> Path:
    """`folder`, made by `build` if it is not there yet, by one process while others wait.

    It is built under another name and renamed, so an interrupted build leaves nothing that could
    be taken for a whole one. The lock is the system's: it goes with a process that is killed.
    """
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + (0.0 if has_terminal() else 1.0)
    while time.monotonic() < until:  # the rank whose progress bar can be seen begins
        if folder.exists():
            return folder
        time.sleep(0.01)
    lock = FileLock(f"{folder}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        log.info("waiting for the process that prepares %s (%s.lock)", what, folder)
        while not _acquired(lock, 5.0):
            watchdog.heartbeat()  # it may take hours, and nothing is wrong
    building = folder.with_name(f".building-{folder.name}")
    try:
        if not folder.exists():
            shutil.rmtree(building, ignore_errors=True)  # of a process that was killed
            building.mkdir()
            with explain_disk_errors(building):
                build(building)
            os.replace(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
        lock.release()
    return folder


def _acquired(lock: FileLock, seconds: float) -> bool:
    try:
        lock.acquire(seconds)
    except Timeout:
        return False
    return True


def content_key(*parts: Any) -> str:
    """A short name for everything that `parts` say."""
    text = json.dumps(parts, ensure_ascii=False, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
