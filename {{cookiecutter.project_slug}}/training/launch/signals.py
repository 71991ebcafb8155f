"""Requests to stop, by a signal or by --max-time: on any rank, answered by all ranks together.

Which signal, in which phase, does what, and the exit code (constants in `settings/errors.py`):

    to            signal                 phase              what happens                  exit code
    ------------  ---------------------  -----------------  ----------------------------  ---------
    the launcher  any                    before the ranks   it ends                       128 + n
                  TERM INT USR1 HUP (1)  ranks running      each rank gets TERM: below    0, 128 + n
                  INT again              ranks running      ranks get INT, then KILL (2)  130
                  QUIT                   ranks running      ranks get QUIT, then KILL     131
                  KILL                   ranks running      Linux ends the ranks too      137
    a rank        TERM INT USR1          importing          it ends; so do the others     143 (3)
                  TERM INT USR1          starting           it ends; so do the others     143 (3)
                  TERM INT USR1          training           all save after a step         0
                  TERM INT USR1          evaluating         all leave it, and save        0
                  INT again              any                this rank ends                130
    --max-time    (none)                 training and       as TERM to a rank             0
                                         evaluating
    the watchdog  (none)                 any                a rank waited too long for    3 HUNG
                                                            another: report, end

n is the signal's number; the exit code is the launcher's (a plain `python train.py` has its own).
(1) HUP stays ignored under nohup. 128 + n if the ranks were still starting: nothing to save.
(2) after SHUTDOWN_TIMEOUT_S; also for ranks that do not end when another one has failed.
(3) STOPPED_EARLY; 128 + n if the launcher was asked. Starting ends with `StopRequest.ready`.
Without a signal: 0 finished, 2 USER_ERROR, 1 any other error; a rank killed by signal n, 128 + n.
With --max-restarts no error but USER_ERROR ends the run, unless it was asked to stop.
"""

import math
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from training.distributed.ranks import on_main

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
STARTED = time.time()
RANKS_AT_ONCE = 32  # with more, a reduction takes longer than a step: not every step makes one


class StoppedEarly(BaseException):
    """Asked to stop before there was anything to save. Not an Exception: nothing handles it."""


def seconds_of(max_time: str) -> int:
    """Seconds in "HH:MM"."""
    hours, minutes = max_time.split(":")
    return int(hours) * 3600 + int(minutes) * 60


class StopRequest:
    """SIGTERM, SIGINT, SIGUSR1 or the end of --max-time on any rank: all ranks stop at one step.

    Until `ready` is called a signal ends the rank at once. A second SIGINT always does.
    """

    def __init__(self, max_time: str | None = None) -> None:
        self.asked = self.is_ready = False
        launched = float(os.environ.get("LAUNCHED_AT", STARTED))  # ranks may be started again later
        self.deadline = launched + seconds_of(max_time) if max_time else math.inf
        self._calls = 0
        self._flags = torch.zeros(2)  # how many ranks have been asked, and have met an error
        self._reduction: Any = None  # on the CPU, so that a step never waits for the device
        self._old_handlers = {number: signal.signal(number, self._on_signal) for number in SIGNALS}

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.asked and number == signal.SIGINT:
            os._exit(130)
        self.asked = True
        if not self.is_ready:
            raise StoppedEarly

    def ready(self) -> None:
        """From now on all ranks answer a request together."""
        self.is_ready = True

    def agreed(self, error: Exception | None = None) -> bool:
        """Call once a step on every rank: whether any rank had been asked by the step before.

        `error`: what the main process met in the background; every rank then raises it.
        """
        self._calls += 1
        if self._calls % math.ceil(dist.get_world_size() / RANKS_AT_ONCE):
            return False
        num_asked, num_errors = self._end_reduction()
        asked = self.asked or time.time() > self.deadline
        self._flags = torch.tensor([asked, error is not None], dtype=torch.int32)
        self._reduction = dist.all_reduce(self._flags, async_op=True)
        if num_errors:
            on_main(lambda: _raise(error))
        return num_asked > 0

    def _end_reduction(self) -> Any:
        """Wait for the reduction that the call before has begun, and return its flags."""
        if self._reduction is not None:
            self._reduction.wait()
            self._reduction = None  # it holds the process group
        return self._flags.tolist()

    def close(self) -> None:
        """Wait for the reduction that is under way, and give the signals back."""
        self._end_reduction()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
