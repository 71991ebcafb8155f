"""AdamW's groups and the learning rate over the steps."""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

from model import build_model, build_tokenizer
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


def test_only_matrices_decay(settings: Callable[..., TrainConfig]) -> None:
    """Each trained weight is in one group, frozen ones in none; biases and norms do not decay."""
    config = settings(weight_decay=0.3, lr=0.1)
    model = build_model(config, build_tokenizer(config, iter(())), ["a", "b", "c"])
    next(model.parameters()).requires_grad_(False)
    optimizer = build_optimizer(model, config)
    groups = optimizer.param_groups
    trained = [id(p) for p in model.parameters() if p.requires_grad]
    assert sorted(id(p) for group in groups for p in group["params"]) == sorted(trained)
    if [group.get("name") for group in groups] != ["decay", "no_decay"]:
        pytest.skip("build_optimizer makes groups of its own, and says which of them decay")
    assert all(p.ndim >= 2 for p in groups[0]["params"])
    assert all(p.ndim < 2 for p in groups[1]["params"])
    assert [group["weight_decay"] for group in groups] == [0.3, 0.0]
    assert learning_rates(optimizer) == dict.fromkeys(("lr", "lr_decay", "lr_no_decay"), 0.1)


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
