"""Where every rank is, and which one the others wait for when there is no progress.

A rank records where it is with `report`. A thread publishes that in the ranks' store. When progress
stops, it reads what the others have published, reports who is missing, and ends the process.
"""

import faulthandler
import json
import os
import sys
import threading
import time
import traceback
from collections import defaultdict
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from training.distributed.ranks import rank_name
from training.settings.config import PROJECT
from training.settings.errors import HUNG, UserError

START = "start-up"
COLLECTIVE_MARGIN_S = 60.0  # seconds that a collective waits longer than the watchdog
DUMP_TIMEOUT_S = 30.0  # of PyTorch's flight recorder, which may wait for a device that hangs
# PyTorch's variables, the newer one first, for the path of its dump without the rank at its end.
DUMP_VARIABLES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


class Position(NamedTuple):
    """Where a rank is, for error messages."""

    phase: str = START
    step: int = 0  # of the optimizer, or the batch of an evaluation
    shape: tuple[int, ...] = (0, 0)  # (batch, length) of the current tokens

    def __str__(self) -> str:
        return f"{self.phase}, step {self.step}" if self.step else self.phase


position = Position()
errors_folder: Path | None = None  # for tracebacks; None until the run has a folder
_last_progress = time.monotonic()


def report(phase: str, step: int = 0, shape: tuple[int, ...] = (0, 0)) -> None:
    """Record where this rank is. Every call counts as progress."""
    global position
    position = Position(phase, step, shape)
    heartbeat()


def heartbeat() -> None:
    """Progress without a change of position, as in a long loop over files."""
    global _last_progress
    _last_progress = time.monotonic()


def write_error(text: str, with_threads: bool = False) -> None:
    """Print why this rank fails; keep it in `errors/`, and with it where each thread is."""
    print(f"\n[rank {rank_name()}] {text}", file=sys.stderr, flush=True)
    if errors_folder is None:
        return
    with suppress(OSError):  # the disk may be what failed
        errors_folder.mkdir(parents=True, exist_ok=True)
        with (errors_folder / f"rank{rank_name()}.txt").open("a", encoding="utf-8") as file:
            print(time.ctime(), text, sep="\n", file=file, flush=True)
            if with_threads:
                faulthandler.dump_traceback(file)


def dump_flight_recorder() -> str:
    """Write what the last collectives of this rank were; the path, or "" if that is not known."""
    prefix = next(filter(None, map(os.environ.get, DUMP_VARIABLES)), "")
    name = "_dump_nccl_trace" if torch.cuda.is_initialized() else "_dump_fr_trace"  # from gloo
    recorder = getattr(torch._C._distributed_c10d, name, None)
    if not prefix or recorder is None:
        return ""
    path = Path(f"{prefix}{dist.get_rank()}")
    with suppress(OSError, RuntimeError):
        path.write_bytes(recorder())
    return str(path) if path.exists() else ""


class Watchdog(threading.Thread):
    """Ends this rank when it has waited too long, with a line that names the missing ranks.

    Timeouts: seconds without progress, until training begins and after; 0 is no limit.
    """

    def __init__(self, store: dist.Store, start_timeout: float, step_timeout: float) -> None:
        super().__init__(name="watchdog", daemon=True)
        # Its own connection: the main thread may be waiting on the other.
        self.store: dist.Store = store.clone()  # type: ignore[attr-defined]
        self.store.set_timeout(timedelta(seconds=30))  # where the main machine is gone
        self.start_timeout, self.step_timeout = start_timeout, step_timeout
        quarters = [timeout / 4 for timeout in (start_timeout, step_timeout) if timeout]
        self.interval = min([2.0, *quarters])  # seconds
        self.stopped = threading.Event()
        heartbeat()

    def run(self) -> None:
        while not self.stopped.wait(self.interval):
            try:
                self._publish()
                if not self._is_late():
                    continue
                before = self._read_all()
                self.stopped.wait(2.5 * self.interval)
                self._publish()
                text = self._describe_wait(before, self._read_all())
            except (dist.DistError, RuntimeError) as error:  # the store's machine is gone
                text = f"the main process's machine does not answer ({str(error).splitlines()[0]})"
            if self._is_late() and not self.stopped.is_set():
                write_error(text, with_threads=True)
                get_error_handler().record_exception(UserError(text))  # for the launcher, to print
                # If the device keeps Python's lock, only this ends the process.
                faulthandler.dump_traceback_later(DUMP_TIMEOUT_S, exit=True)
                if path := dump_flight_recorder():
                    text += f"; the last collectives are in {path}"
                    get_error_handler().record_exception(UserError(text))
                os._exit(HUNG)

    def stop(self) -> None:
        self.stopped.set()
        if self.is_alive():
            self.join()

    def _timeout(self) -> float:
        return self.start_timeout if position.phase == START else self.step_timeout

    def _is_late(self) -> bool:
        return 0 < self._timeout() < time.monotonic() - _last_progress

    def _publish(self) -> None:
        state = time.monotonic(), str(position), _current_line()
        self.store.set(f"watch/{dist.get_rank()}", json.dumps(state))

    def _read_all(self) -> dict[int, list[Any]]:
        """By rank: the time when it published this (0: never), its position, its line."""
        states = {rank: [0, START, ""] for rank in range(dist.get_world_size())}
        for rank in states:
            if self.store.check([f"watch/{rank}"]):
                states[rank] = json.loads(self.store.get(f"watch/{rank}"))
        return states

    def _describe_wait(self, before: dict[int, list[Any]], after: dict[int, list[Any]]) -> str:
        """Which ranks do not answer, and where the others are, from two readings."""
        text = f"no progress for {self._timeout():.0f} s"
        silent, waiting = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
        for rank, (published, place, line) in after.items():
            if published == before[rank][0]:
                silent[place].append(rank)
            else:
                waiting[f"in {place}, at {line}"].append(rank)
        if not silent and len(waiting) == 1:
            text += f": all {len(after)} ranks wait {next(iter(waiting))}; no rank is missing: look"
            return f"{text} at the devices and the network between them (NCCL_DEBUG=INFO)"
        if silent:
            groups = [f"{_ranks(ranks)}, last seen in {place}" for place, ranks in silent.items()]
            text += f": no answer from {'; from '.join(groups)}; waiting"
        fewest_first = sorted(waiting, key=lambda place: len(waiting[place]))
        groups = [f"{_ranks(waiting[place])} {place}" for place in fewest_first[:8]]
        return f"{text}: {'; '.join(groups)}"


def _current_line() -> str:
    """The line of the project that the main thread is at."""
    frames = sys._current_frames()
    for frame, line in traceback.walk_stack(frames.get(threading.main_thread().ident or 0)):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PROJECT) and "site-packages" not in path.parts:
            return f"{path.relative_to(PROJECT)}:{line} in {frame.f_code.co_name}"
    return "no line of this project"


def _ranks(ranks: list[int]) -> str:
    return f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))}"
