"""How fast a run is against what the device could do, and where its time goes."""

import logging
import resource
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

log = logging.getLogger("training")
# Dense matrix FLOP/s at half precision, from the makers' data sheets. TF32 is half of it on Ampere
# and later.
PEAKS = {
    "V100": 125e12, "T4": 65e12, "A100": 312e12, "A10": 125e12, "A40": 150e12, "L4": 121e12,
    "L40": 181e12, "H100": 989e12, "H200": 989e12, "B200": 2250e12, "RTX 4090": 165e12,
}  # fmt: skip
SKIPPED = 2  # steps before the profile: they allocate, compile and warm up


def flops_per_token(model: nn.Module) -> float:
    """FLOPs of forward and backward for a token of a batch, without attention's own products.

    Two for each weight forward, four backward (Kaplan and others, 2020, section 2.1). A look-up in
    an embedding is none; a weight that is frozen needs no gradient of its own.
    """
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    matrices = [p for p in model.parameters() if p.ndim == 2 and id(p) not in looked_up]
    return float(sum(p.numel() * (6 if p.requires_grad else 4) for p in matrices))


def peak_flops(device: torch.device, precision: str, copies: int) -> float | None:
    """Of all ranks together, each with so many devices; None where it is not known."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    # Longest first: L40 is not an L4.
    known = [peak for part, peak in sorted(PEAKS.items(), key=lambda p: -len(p[0])) if part in name]
    of_half = {"bf16": 1.0, "fp16": 1.0, "tf32": 0.5}.get(precision)
    return known[0] * of_half * dist.get_world_size() * copies if known and of_half else None


def peak_memory(device: torch.device) -> int:
    """The most bytes that this rank had: of the device, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


class Profiler:
    """A trace of some steps of the main process, for TensorBoard or ui.perfetto.dev; and the ten
    costliest operations in the log. With 0 steps it does nothing."""

    def __init__(self, run: Path, steps: int, device: torch.device) -> None:
        self.file = run / "profile" / "main.pt.trace.json"
        self.key = f"self_{device.type}_time_total"
        self.profile: Any = None
        if not steps:
            return
        kinds = [torch.profiler.ProfilerActivity.CPU]
        if device.type == "cuda":
            kinds.append(torch.profiler.ProfilerActivity.CUDA)
        self.profile = torch.profiler.profile(
            activities=kinds,
            schedule=torch.profiler.schedule(wait=SKIPPED, warmup=1, active=steps, repeat=1),
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
