"""AdamW's groups and the learning rate over the steps."""

import itertools
import math

import pytest
import torch
from torch import nn

from training.settings.config import TrainConfig
from training.step.optimizer import PLATEAU_FACTOR, Schedule, build_optimizer, learning_rates


def make(kind: str, total: int = 20, warmup: float = 0.2) -> Schedule:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=2.0)
    return Schedule(optimizer, kind, total, warmup)


def rates(schedule: Schedule, steps: int) -> list[float]:
    """The learning rate that each step uses, and the one after the last."""
    found = [schedule.optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        schedule.step()
        found.append(schedule.optimizer.param_groups[0]["lr"])
    return found


def test_only_matrices_decay() -> None:
    """Biases and norms do not decay, whatever they are called; frozen weights are in no group."""
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3), nn.Linear(3, 2))
    model[3].requires_grad_(False)
    config = TrainConfig(train_file=("a",), weight_decay=0.3, lr=0.1)
    decay, plain = build_optimizer(model, config).param_groups
    assert [tuple(p.shape) for p in decay["params"]] == [(5, 4), (3, 4)]
    assert [tuple(p.shape) for p in plain["params"]] == [(4,), (4,), (3,)]
    assert (decay["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert learning_rates(build_optimizer(model, config)) == dict.fromkeys(
        ("lr", "lr_decay", "lr_no_decay"), 0.1
    )


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant", "plateau"])
def test_warmup_and_end(kind: str) -> None:
    """It rises to the peak in the warm-up and no step is taken at 0; linear and cosine end at 0."""
    found = rates(make(kind), 20)
    assert found[:5] == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0])
    assert max(found) == 2.0
    assert all(rate > 0 for rate in found[:20])
    if kind in ("linear", "cosine"):
        assert found[20] == 0
        assert all(a > b for a, b in itertools.pairwise(found[4:]))
        middle = {"linear": 1.0, "cosine": 1 + math.cos(math.pi / 2)}[kind]
        assert found[12] == pytest.approx(middle)
    else:
        assert found[4:] == [2.0] * 17


def test_plateau_waits_for_two_bad_evaluations() -> None:
    schedule = make("plateau", warmup=0.0)
    for score, expected in [(0.5, 1), (0.4, 1), (0.6, 1), (0.6, 1), (0.6, PLATEAU_FACTOR)]:
        schedule.evaluated(score)
        assert rates(schedule, 1)[1] == 2.0 * expected
    other = make("plateau", warmup=0.0)
    other.load_state_dict(schedule.state_dict())
    assert rates(other, 0) == [2.0 * PLATEAU_FACTOR]


def test_no_warmup_and_one_step() -> None:
    assert rates(make("linear", total=1, warmup=0.0), 1) == [2.0, 0.0]
    assert rates(make("cosine", total=1, warmup=0.9), 1)[0] > 0
