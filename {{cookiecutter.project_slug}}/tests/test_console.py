"""What a run says before its first step about the hardware that it has."""

from collections.abc import Callable

import pytest
import torch

from training.settings.batch_sizes import batch_sizes
from training.settings.config import TrainConfig
from training.tracking.console import suggestions

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


def lines(config: TrainConfig, ranks: int, device: torch.device) -> list[str]:
    return list(suggestions(config, batch_sizes(config, ranks), ranks, device))


def test_half_precision_is_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 on a GPU that computes in bf16 itself; not elsewhere, and not if one is chosen."""

    def supported(native: bool) -> Callable[..., bool]:
        return lambda including_emulation=True: native or including_emulation

    monkeypatch.setattr("torch.cuda.is_bf16_supported", supported(True))
    (line,) = lines(TrainConfig(), 2, CUDA)
    assert "--precision bf16" in line
    assert "tf32" in line
    assert not lines(TrainConfig(precision="tf32"), 2, CUDA)
    assert not lines(TrainConfig(), 2, CPU)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", supported(False))
    assert not lines(TrainConfig(), 2, CUDA)


def test_few_rows_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default global batch of 32 on 16 ranks: two rows each. What it names keeps its word."""
    assert not lines(TrainConfig(), 4, CPU)
    (line,) = lines(TrainConfig(), 16, CPU)
    assert line.startswith("each rank has only 2 rows a step: 2 ranks would give the same result")
    assert "--global-batch-size 256 would use all 16" in line
    assert batch_sizes(TrainConfig(), 2).gradient_accumulation_steps == 1
    assert batch_sizes(TrainConfig(global_batch_size=256), 16).batch_size == 16
    (line,) = lines(TrainConfig(global_batch_size=16), 16, CPU)
    assert line.startswith("each rank has only 1 row a step: 1 rank would give the same result")
