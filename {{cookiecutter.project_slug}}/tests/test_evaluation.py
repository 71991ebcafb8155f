"""Promise 4: an evaluation counts every row once; any number of ranks gives the same bits."""

from collections.abc import Callable
from pathlib import Path

import jobs
import numpy as np
import pytest
import torch
from conftest import make_rows, write_tsv
from ranks import Ranks

from model import loss_per_row
from training.settings.config import TrainConfig
from training.step.evaluation import predictions, probabilities

Settings = Callable[..., TrainConfig]


@pytest.mark.parametrize(
    ("rows", "changes"),
    [(3, {}), (5, {}), (45, {}), (5, {"strategy": "fsdp", "precision": "bf16"})],
)
def test_bit_identical_for_any_number_of_ranks(
    ranks: Ranks, settings: Settings, tmp_path: Path, rows: int, changes: dict[str, str]
) -> None:
    """Per-row logits and metrics of 1 to 4 ranks are identical, also with fewer rows than ranks."""
    val = write_tsv(tmp_path / "val.tsv", make_rows(rows, seed=9))
    config = settings(val_file=(str(val),), eval_batch_size=2, **changes)
    one, truth, metrics = ranks.run(1, jobs.evaluate_rows, config)[0]
    assert one.shape == (rows, 3)
    for world_size in (2, 3, 4):
        logits, again, other = ranks.run(world_size, jobs.evaluate_rows, config)[0]
        assert logits.tobytes() == one.tobytes()
        assert (again == truth).all()
        assert other == metrics
    assert metrics["rows"] == rows


def test_loss_is_that_of_the_model_file(ranks: Ranks, settings: Settings) -> None:
    """The mean over all rows, whatever model.py makes of it; a row of each forward is alone."""
    config = settings(eval_batch_size=1, precision="fp64")
    logits, truth, metrics = ranks.run(2, jobs.evaluate_rows, config)[0]
    losses = loss_per_row(torch.from_numpy(logits), torch.from_numpy(truth), config)
    assert metrics["loss"] == pytest.approx(losses.mean().item(), rel=1e-6)


def test_predictions_are_those_of_the_probabilities() -> None:
    """A label of several is given from a half on; probabilities of any logits are finite."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(9, 4)) * 5
    logits[0] = [0.0, -1e-30, 1e4, -1e4]
    several = probabilities(logits, True)
    np.testing.assert_allclose(several, torch.from_numpy(logits).sigmoid().numpy(), rtol=1e-12)
    assert (predictions(several, True)[1:] == (logits[1:] >= 0)).all()
    assert predictions(several, True)[0].tolist() == [1, 1, 1, 0]
    assert probabilities(np.array([[-40.0]]), True)[0, 0] == pytest.approx(np.exp(-40), rel=1e-12)
    one = probabilities(logits, False)
    np.testing.assert_allclose(one, torch.from_numpy(logits).softmax(1).numpy(), rtol=1e-12)
    assert (predictions(one, False) == logits.argmax(1)).all()
