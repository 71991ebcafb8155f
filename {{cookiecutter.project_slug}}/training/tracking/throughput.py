"""How fast a run is, against what the device could do, and where its time goes."""

import logging
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
    """Rows, tokens and time since the last line of the log. Pauses do not count as time."""

    def __init__(self, flops_per_token: float = 0.0, peak_flops: float | None = None) -> None:
        self.flops_per_token, self.peak_flops = flops_per_token, peak_flops  # of all ranks
        self.reset()

    def reset(self) -> None:
        self.started = time.perf_counter()
        self.waited = 0.0  # seconds, for data
        self.rows = self.tokens = self.padded_tokens = 0

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

    def rates(self) -> dict[str, float]:
        """Of all ranks together; `padding`, `data_wait` and `mfu` (of the peak) are shares."""
        seconds = max(time.perf_counter() - self.started, 1e-9)
        flops = self.padded_tokens * self.flops_per_token / seconds
        rates = {
            "samples_per_second": self.rows / seconds,
            "tokens_per_second": self.tokens / seconds,
            "padding": 1.0 - self.tokens / max(self.padded_tokens, 1),
            "data_wait": self.waited / seconds,
            "flops_per_second": flops,
        }
        return rates | ({"mfu": flops / self.peak_flops} if self.peak_flops else {})


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
    share = {"bf16": 1.0, "fp16": 1.0, "tf32": 0.5}.get(precision)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    known = [part for part in PEAKS if part in name]
    if not known or share is None:
        return None
    peak = PEAKS[max(known, key=len)]  # an L40 is not an L4
    return peak * share * dist.get_world_size() * num_replicas


def peak_memory(device: torch.device) -> int:
    """The most bytes that this rank had: on the device, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def start_profile(run: Path, steps: int) -> torch.profiler.profile:
    """Begin a trace of some steps, for TensorBoard or ui.perfetto.dev, and the ten costliest
    operations in the log. Call its `step` after each optimizer step."""
    file = run / "profile" / "main.pt.trace.json"

    def write(profile: torch.profiler.profile) -> None:
        file.parent.mkdir(exist_ok=True)
        profile.export_chrome_trace(str(file))
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        operations = profile.key_averages()
        table = operations.table(f"self_{kind}_time_total", row_limit=10, max_name_column_width=50)
        log.info(f"profile: {file}\n{table}")

    schedule = torch.profiler.schedule(wait=UNPROFILED_STEPS, warmup=1, active=steps, repeat=1)
    profile = torch.profiler.profile(schedule=schedule, on_trace_ready=write)
    profile.start()
    return profile
