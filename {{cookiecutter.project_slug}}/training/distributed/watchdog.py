"""Where every rank is, and which one the others wait for when nothing moves any more.

A rank says where it is with `at`. A thread publishes that in the ranks' store now and then; when
the rank itself has not moved for too long, the thread reads what the others have published, says
who is missing, and ends the process. A collective alone could only say that somebody did not come.
"""

import faulthandler
import json
import os
import sys
import threading
import time
from collections import defaultdict
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from training.settings.config import PROJECT
from training.settings.errors import HUNG, UserError

START = "start-up"
COLLECTIVE_MARGIN_S = 60.0  # seconds that a collective waits longer than the watchdog


class Position(NamedTuple):
    """Where a rank is, for the words of an error."""

    phase: str = START
    step: int = 0  # of the optimizer, or the batch of an evaluation
    shape: tuple[int, ...] = ()  # (batch, length) of the tokens in work

    def __str__(self) -> str:
        return self.phase + (f", step {self.step}" if self.step else "")


position = Position()
errors_folder: Path | None = None  # folder for tracebacks, once the run has one
_since = time.monotonic()


def report(phase: str, step: int = 0, shape: tuple[int, ...] = ()) -> None:
    """Say where this rank is. Every call counts as progress."""
    global position, _since
    position, _since = Position(phase, step, shape), time.monotonic()


def heartbeat() -> None:
    """Say that this rank is still where it was, and at work."""
    global _since
    _since = time.monotonic()


class Watchdog(threading.Thread):
    """Ends this rank, with a line that names the missing ones, when it has waited too long.

    `start_timeout`, `step_timeout`: seconds without progress, until training begins and after.
    """

    def __init__(self, store: dist.Store, start_timeout: float, step_timeout: float) -> None:
        super().__init__(name="watchdog", daemon=True)
        # Its own connection: the main thread may be waiting on the other.
        self.store: dist.Store = store.clone()  # type: ignore[attr-defined]
        self.store.set_timeout(timedelta(seconds=30))  # where the main machine is gone
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.limits = start_timeout, step_timeout
        self.interval = min([2.0, *(limit / 4 for limit in self.limits if limit)])
        self.main = threading.main_thread().ident
        self.over = threading.Event()
        self.count = 0
        heartbeat()

    def run(self) -> None:
        while not self.over.wait(self.interval):
            try:
                self._publish()
                if not self._late():
                    continue
                before = self._published()
                if self.over.wait(2.5 * self.interval) or not self._late():
                    continue
                self._publish()
                text = self._missing(before, self._published())
            except (dist.DistError, RuntimeError) as error:  # the store's machine is gone
                if not self._late():
                    continue
                text = f"the main process's machine does not answer ({str(error).splitlines()[0]})"
            self._give_up(text)

    def stop(self) -> None:
        self.over.set()
        if self.is_alive():
            self.join()

    def _late(self) -> bool:
        limit = self.limits[position.phase != START]
        return 0 < limit < time.monotonic() - _since

    def _publish(self) -> None:
        self.count += 1
        told = [self.count, str(position), _where(self.main)]
        self.store.set(f"watch/{self.rank}", json.dumps(told))

    def _published(self) -> dict[int, list[Any]]:
        keys = {rank: f"watch/{rank}" for rank in range(self.world_size)}
        return {
            r: json.loads(self.store.get(key)) for r, key in keys.items() if self.store.check([key])
        }

    def _missing(self, before: dict[int, list[Any]], after: dict[int, list[Any]]) -> str:
        """Who does not answer; else where everybody is."""
        waited = f"no progress for {self.limits[position.phase != START]:.0f} s"
        silent: dict[str, list[int]] = defaultdict(list)
        places: dict[str, list[int]] = defaultdict(list)
        for rank in range(self.world_size):
            count, place, where = after.get(rank, [0, START, ""])
            if before.get(rank, [0])[0] == count:
                silent[place].append(rank)
            else:
                places[f"in {place}, at {where}"].append(rank)
        if silent:
            said = [f"{_ranks(r)}, last heard of in {place}" for place, r in silent.items()]
            waited += f": no answer from {'; from '.join(said)}"
        fewest_first = sorted(places.items(), key=lambda item: len(item[1]))
        said = [f"{_ranks(ranks)} {place}" for place, ranks in fewest_first[:8]]
        return f"{waited}{'; waiting: ' if silent else ': '}{'; '.join(said)}"

    def _give_up(self, text: str) -> None:
        print(f"\n[rank {self.rank}] {text}", file=sys.stderr, flush=True)
        if errors_folder is not None:
            with suppress(OSError):  # it has to end, whatever the disk is like
                errors_folder.mkdir(parents=True, exist_ok=True)
                with (errors_folder / f"rank{self.rank}.txt").open("a", encoding="utf-8") as file:
                    print(f"{time.ctime()}  {text}", file=file, flush=True)
                    faulthandler.dump_traceback(file)  # of every thread
        get_error_handler().record_exception(UserError(text))  # for the launcher
        os._exit(HUNG)


def _where(thread: int | None) -> str:
    """The line of the project that a thread is in."""
    frame = sys._current_frames().get(thread or 0)
    while frame is not None:
        file, root = frame.f_code.co_filename, f"{PROJECT}{os.sep}"
        if file.startswith(root) and "site-packages" not in file:
            return f"{file.removeprefix(root)}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return "no line of this project"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
