"""Asked to stop: by a signal or by --max-time, on any rank, at any time; answered by all alike."""

import math
import os
import signal
import time
from typing import Any

import torch
import torch.distributed as dist

from training.distributed.ranks import on_main
from training.settings.config import seconds_of

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
STARTED = time.time()
RANKS_AT_ONCE = 32  # so many agree in each step; 1,024 in every 32nd, as it takes longer


class StoppedEarly(BaseException):
    """Asked to stop before there was anything to save: this rank leaves at once.

    No Exception, so that nothing on the way out takes it for a failure that it could handle.
    """


class Interrupted(Exception):
    """An evaluation was left on all ranks, since any of them was asked to stop."""


class StopRequest:
    """SIGTERM, SIGINT, SIGUSR1 or the end of --max-time on any rank: all save and stop at one step.

    Until `ready` is called a signal ends the rank at once. A second SIGINT always does. The ranks'
    flags are reduced in the background, on the CPU, and read one step later: a step never waits for
    it, and never for the device.
    """

    def __init__(self, max_time: str | None = None) -> None:
        self.asked = self.is_ready = False
        # Of the launch, whose ranks may have been started again since.
        launched = float(os.environ.get("LAUNCHED_AT", STARTED))
        self.deadline = launched + seconds_of(max_time) if max_time else float("inf")
        self._calls = 0
        self._pending: tuple[torch.Tensor, Any] | None = None
        self._before = {number: signal.signal(number, self._on_signal) for number in SIGNALS}

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.asked and number == signal.SIGINT:
            os._exit(130)
        self.asked = True
        if not self.is_ready:
            raise StoppedEarly

    def ready(self) -> None:
        """From now on a request is answered by all ranks together."""
        self.is_ready = True

    def agreed(self, error: Exception | None = None) -> bool:
        """Call once a step on every rank: whether any rank had been asked by the step before.

        The reduction goes from rank to rank, so among thousands it would be slower than a step:
        beyond RANKS_AT_ONCE not every call makes one.

        `error`: what the main process met in the background; every rank then raises it.
        """
        self._calls += 1
        if self._calls % math.ceil(dist.get_world_size() / RANKS_AT_ONCE):
            return False
        asked = self.asked or time.time() > self.deadline
        flags = torch.tensor([asked, error is not None], dtype=torch.int32)
        before, self._pending = self._pending, (flags, dist.all_reduce(flags, async_op=True))
        if before is None:
            return False
        any_asked, any_error = self._finish(*before)
        if any_error:
            on_main(lambda: _raise(error))
        return any_asked

    def close(self) -> None:
        """Wait for the reduction that is under way, and let go of the signals."""
        if self._pending is not None:
            self._finish(*self._pending)
            self._pending = None  # it holds the process group
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @staticmethod
    def _finish(flags: torch.Tensor, work: Any) -> list[bool]:
        work.wait()
        return [count > 0 for count in flags.tolist()]


def _raise(error: Exception | None) -> None:
    if error is not None:
        raise error
