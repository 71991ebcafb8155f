"""Folders that are expensive to make: one process makes them, and all others use them."""

import errno
import hashlib
import json
import logging
import os
import platform
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from training.distributed import watchdog
from training.distributed.ranks import has_terminal
from training.settings.errors import explain_disk_errors

log = logging.getLogger("training")


def build_once(folder: Path, build: Callable[[Path], object], what: str) -> Path:
    """Return `folder`; if it is missing, one process makes `what` with `build`, others wait."""
    deadline = time.monotonic() + (0.0 if has_terminal() else 1.0)
    while time.monotonic() < deadline and not folder.exists():
        time.sleep(0.01)  # the rank whose progress bar can be seen builds first
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{folder}.lock")  # the system releases it when its process is killed
    with suppress(Timeout):
        lock.acquire(0)
    if not lock.is_locked:
        log.info("waiting for the process that prepares %s (%s.lock)", what, folder)
    while not lock.is_locked:
        watchdog.heartbeat()  # it may take hours, and nothing is wrong
        with suppress(Timeout):
            lock.acquire(5.0)
    # A machine's own: over a network the lock may not hold, and a folder may not be seen yet.
    building = folder.with_name(f".building-{folder.name}-{platform.node()}")
    try:
        if folder.name not in os.listdir(folder.parent):  # asks again, where `exists` remembers
            shutil.rmtree(building, ignore_errors=True)  # of a process that was killed
            building.mkdir()
            with explain_disk_errors(building):
                build(building)
            try:
                building.replace(folder)  # an interrupted build leaves nothing that looks complete
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise  # else another machine was faster: what it has made is taken
    finally:
        shutil.rmtree(building, ignore_errors=True)
        lock.release()
    return folder


def content_key(*parts: Any) -> str:
    """A short hash of `parts`, for the name of what is made from them."""
    text = json.dumps(parts, ensure_ascii=False, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]
