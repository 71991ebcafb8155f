"""FLOP/s and MFU, profiles, and the kernels that compute."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import jobs
import pytest
import torch
from conftest import lines_of
from ranks import Ranks
from torch import nn

from training.launch.worker import choose_kernels
from training.settings.config import TrainConfig
from training.tracking import throughput

Settings = Callable[..., TrainConfig]
CUDA = torch.device("cuda", 0)


def test_flops_of_a_token() -> None:
    """Six for each weight of a matrix; four for a frozen one, none for a table or a bias."""
    model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 4), nn.LayerNorm(4), nn.Linear(4, 3))
    assert throughput.flops_per_token(model) == 6 * (8 * 4 + 4 * 3)
    model[1].requires_grad_(False)
    assert throughput.flops_per_token(model) == 4 * 8 * 4 + 6 * 4 * 3


def test_peaks_of_known_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all ranks; half of it for TF32; unknown for other precisions and devices."""
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 8)

    def peak(name: str, precision: str) -> float | None:
        monkeypatch.setattr("torch.cuda.get_device_name", lambda device: name)
        return throughput.peak_flops(CUDA, precision, 1)

    assert peak("NVIDIA H100 80GB HBM3", "bf16") == 8 * 989e12
    assert peak("NVIDIA A100-SXM4-40GB", "tf32") == 8 * 156e12
    assert peak("NVIDIA L40S", "fp16") == 8 * 181e12
    assert peak("NVIDIA L4", "fp16") == 8 * 121e12
    assert peak("NVIDIA H100 80GB HBM3", "fp32") is None
    assert peak("Another GPU", "bf16") is None
    assert throughput.peak_flops(torch.device("cpu"), "bf16", 1) is None


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What choose_kernels changes is put back."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.get_float32_matmul_precision()
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision(before)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


def test_kernels(kernels: None) -> None:
    choose_kernels(TrainConfig())
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cuda.matmul.allow_tf32
    choose_kernels(TrainConfig(deterministic=True, precision="tf32"))
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert torch.backends.cuda.matmul.allow_tf32


def test_profile(ranks: Ranks, settings: Settings) -> None:
    """A trace that a browser opens, in the run's folder; FLOP/s in each line of the log."""
    config = settings(profile=2, max_steps=8)
    ranks.run(1, jobs.run, config)
    (trace,) = (Path(config.runs_dir) / "run" / "profile").iterdir()
    assert trace.name.endswith(".pt.trace.json")
    names = {event.get("name") for event in json.loads(trace.read_text("utf-8"))["traceEvents"]}
    assert "aten::addmm" in names
    assert all(line["flops_per_second"] > 0 for line in lines_of(config))
