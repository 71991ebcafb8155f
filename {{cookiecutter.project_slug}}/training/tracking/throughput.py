"""What adds up between two lines of the log: loss, rows, tokens, and time."""

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from training.distributed.ranks import reduce_tensor
from training.step.batch_plan import MicroBatch


class RunningLoss:
    """Loss since the last line of the log. It stays on the device until that line is due."""

    def __init__(self, device: torch.device) -> None:
        self.of_step, self.loss, self.weight = torch.zeros(3, dtype=torch.float64, device=device)

    def add(self, loss: torch.Tensor) -> None:
        """This rank's weighted sum over a micro-batch."""
        self.of_step += loss.detach()

    def end_step(self, weight_sum: float, skipped: torch.Tensor) -> None:
        """`weight_sum`: of all ranks. A skipped step leaves no trace in the mean."""
        self.loss += torch.where(skipped, 0.0, self.of_step)
        self.weight += (~skipped).double() * weight_sum
        self.of_step.zero_()

    def drop_step(self) -> None:
        """The step is done again."""
        self.of_step.zero_()

    def mean(self) -> float:
        """Over the rows of all ranks; then it starts anew. NaN if all steps were skipped."""
        total, weight = reduce_tensor(self.loss).item(), self.weight.item()
        self.loss.zero_()
        self.weight.zero_()
        return total / weight if weight else math.nan

    def state(self) -> list[float]:
        return [self.loss.item(), self.weight.item()]


class Meter:
    """Rows, tokens and time since the last line of the log. Pauses do not count as time."""

    def __init__(self, flops_per_token: float = 0.0, peak_flops: float | None = None) -> None:
        """`peak_flops`: of all ranks together, where that is known."""
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.reset()

    def reset(self) -> None:
        self.started = time.perf_counter()
        self.rows = self.tokens = self.padded_tokens = 0
        self.waited = 0.0

    def add(self, micro_batch: MicroBatch) -> None:
        self.rows += micro_batch.step_rows
        self.tokens += micro_batch.step_tokens
        self.padded_tokens += micro_batch.step_padded_tokens

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Not training time: an evaluation, a checkpoint."""
        before = time.perf_counter()
        yield
        self.started += time.perf_counter() - before

    def timed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """`batches`, with the time that is spent waiting for them."""
        iterator = iter(batches)
        while True:
            before = time.perf_counter()
            batch = next(iterator, None)
            self.waited += time.perf_counter() - before
            if batch is None:
                return
            yield batch

    def rates(self) -> dict[str, float]:
        """Of all ranks together; `padding`, `data_wait` and `mfu` (of the peak) are shares."""
        seconds = max(time.perf_counter() - self.started, 1e-9)
        flops = self.padded_tokens * self.flops_per_token / seconds
        mfu = {"mfu": flops / self.peak_flops} if self.peak_flops else {}
        return {
            "samples_per_second": self.rows / seconds,
            "tokens_per_second": self.tokens / seconds,
            "padding": 1.0 - self.tokens / max(self.padded_tokens, 1),
            "data_wait": self.waited / seconds,
            "flops_per_second": flops,
            **mfu,
        }
