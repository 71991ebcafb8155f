"""Promise 4: an evaluation counts every row once; any number of ranks gives the same bits."""

from collections.abc import Callable
from pathlib import Path

import jobs
import numpy as np
import pytest
from conftest import make_rows, write_tsv
from ranks import Ranks
from sklearn import metrics as sk

from training.settings.config import TrainConfig
from training.step.evaluation import compute_metrics, predictions, probabilities, row_losses

Settings = Callable[..., TrainConfig]


@pytest.mark.parametrize("rows", [3, 5, 45])
def test_bit_identical_for_any_number_of_ranks(
    ranks: Ranks, settings: Settings, tmp_path: Path, rows: int
) -> None:
    """Per-row logits and metrics of 1 to 4 ranks are identical, also with fewer rows than ranks."""
    val = write_tsv(tmp_path / "val.tsv", make_rows(rows, seed=9))
    config = settings(val_file=(str(val),), eval_batch_size=2)
    one, truth, metrics = ranks.run(1, jobs.evaluate_rows, config)[0]
    assert one.shape == (rows, 3)
    for world_size in (2, 3, 4):
        logits, again, other = ranks.run(world_size, jobs.evaluate_rows, config)[0]
        assert logits.tobytes() == one.tobytes()
        assert (again == truth).all()
        assert other == metrics
    assert metrics["rows"] == rows


def test_metrics_equal_those_of_scikit_learn() -> None:
    """Metrics come from all rows at once: no mean of batches or ranks."""
    rng = np.random.default_rng(0)
    logits, truth = rng.normal(size=(57, 4)), rng.integers(0, 3, 57)
    found, predicted = compute_metrics(logits, truth), logits.argmax(1)
    assert found["accuracy"] == sk.accuracy_score(truth, predicted)
    assert found["macro_f1"] == sk.f1_score(truth, predicted, average="macro")
    expected = sk.log_loss(truth, probabilities(logits, False), labels=range(4))
    assert found["loss"] == pytest.approx(expected, rel=1e-12)


def test_multi_label_losses_and_predictions() -> None:
    """The loss in NumPy is torch's binary cross entropy; a label is given from a half on."""
    import torch
    import torch.nn.functional as F

    rng = np.random.default_rng(0)
    logits, truth = rng.normal(size=(9, 4)) * 5, rng.integers(0, 2, (9, 4))
    expected = F.binary_cross_entropy_with_logits(
        torch.from_numpy(logits), torch.from_numpy(truth).double(), reduction="none"
    ).mean(1)
    np.testing.assert_allclose(row_losses(logits, truth), expected.numpy(), rtol=1e-12)
    assert (predictions(logits, True) == (probabilities(logits, True) >= 0.5)).all()


def test_extreme_logits_are_finite() -> None:
    logits = np.array([[1e4, -1e4], [0.0, 0.0]])
    assert row_losses(logits, np.array([1, 0])).tolist() == [2e4, np.log(2)]
    assert np.isfinite(probabilities(logits, False)).all()
