"""How fast a run is, against what the device could do, and where its time goes."""

import logging
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from training.step.batch_plan import MicroBatch

log = logging.getLogger("training")
# Dense matrix FLOP/s at half precision, from the makers' data sheets. TF32 is half of it on Ampere
# and later.
PEAKS = {
    "V100": 125e12, "T4": 65e12, "A100": 312e12, "A10": 125e12, "A40": 150e12, "L4": 121e12,
    "L40": 181e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "RTX 4090": 165e12,
}  # fmt: skip
UNPROFILED_STEPS = 2  # before the profile: they allocate, compile and warm up


class Throughput:
    """Rows, tokens and time since the last line of the log. Pauses do not count as time.

    `peak_flops`: of all ranks together, where that is known.
    """

    def __init__(self, flops_per_token: float = 0.0, peak_flops: float | None = None) -> None:
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops
        self.reset()

    def reset(self) -> None:
        self.started = time.perf_counter()
        self.rows = self.tokens = self.padded_tokens = 0
        self.waited = 0.0

    def add(self, micro_batch: MicroBatch) -> None:
        """Count a step, by any of its micro-batches."""
        self.rows += micro_batch.step_rows
        self.tokens += micro_batch.step_tokens
        self.padded_tokens += micro_batch.step_padded_tokens

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Time that is not for training: an evaluation, a checkpoint."""
        before = time.perf_counter()
        yield
        self.started += time.perf_counter() - before

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self.waited += time.perf_counter() - before

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


def flops_per_token(model: nn.Module) -> float:
    """FLOPs of forward and backward for a token of a batch, without attention's own products.

    Two for each weight forward, four backward (Kaplan and others, 2020, section 2.1). A look-up in
    an embedding costs none; a frozen weight needs no gradient of its own.
    """
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in embeddings]
    return float(sum(p.numel() * (6 if p.requires_grad else 4) for p in matrices))


def peak_flops(device: torch.device, precision: str, num_replicas: int) -> float | None:
    """Of all ranks together, each with `num_replicas` devices; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    longest_first = sorted(PEAKS.items(), key=lambda peak: -len(peak[0]))  # L40 is not an L4
    known = [peak for part, peak in longest_first if part in name]
    share = {"bf16": 1.0, "fp16": 1.0, "tf32": 0.5}.get(precision)
    if not known or share is None:
        return None
    return known[0] * share * dist.get_world_size() * num_replicas


def peak_memory(device: torch.device) -> int:
    """The most bytes that this rank had: on the device, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Profiler:
    """A trace of some steps of the main process, for TensorBoard or ui.perfetto.dev, and the ten
    costliest operations in the log. With 0 steps it does nothing."""

    def __init__(self, run: Path, steps: int) -> None:
        self.file = run / "profile" / "main.pt.trace.json"
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        self.key = f"self_{kind}_time_total"
        self.profile: Any = None
        if not steps:
            return
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if kind == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self.profile = torch.profiler.profile(
            activities=kinds,
            schedule=torch.profiler.schedule(
                wait=UNPROFILED_STEPS, warmup=1, active=steps, repeat=1
            ),
            on_trace_ready=self._write,
        )
        self.profile.start()

    def step(self) -> None:
        """Call after each optimizer step."""
        if self.profile is not None:
            self.profile.step()

    def close(self) -> None:
        if self.profile is not None:
            self.profile.stop()
            self.profile = None

    def _write(self, profile: Any) -> None:
        self.file.parent.mkdir(exist_ok=True)
        profile.export_chrome_trace(str(self.file))
        table = profile.key_averages().table(
            sort_by=self.key, row_limit=10, max_name_column_width=50
        )
        log.info("profile: %s\n%s", self.file, table)
