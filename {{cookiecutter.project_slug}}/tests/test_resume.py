"""Promise 5: a run that was stopped and resumed is bit-identical to one that never stopped."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jobs
import numpy as np
import pytest
import torch
from conftest import lines_of
from ranks import RankError, Ranks

from training.checkpoint import checkpoint
from training.settings.config import TrainConfig

Settings = Callable[..., TrainConfig]
NUMBERS = ("step", "loss", "lr", "grad_norm")


def end_of(config: TrainConfig, step: int = 14) -> dict[str, torch.Tensor]:
    folder = Path(config.runs_dir) / str(config.run_name) / "checkpoints"
    return jobs.weights_of(folder / f"step-{step:08d}")


@pytest.mark.parametrize("log_every", [1, 5])
@pytest.mark.parametrize("schedule", ["linear", "plateau"])
def test_resumed_equals_uninterrupted(
    ranks: Ranks, settings: Settings, log_every: int, schedule: str
) -> None:
    """Stopped in mid-epoch, at the epoch's end and right after it; dropout on, two ranks."""
    whole = settings(run_name="whole", log_every=log_every, schedule=schedule, batch_size=8)
    ranks.run(2, jobs.run, whole)
    for step in (3, 7, 8) if log_every == 1 else (4, 9):
        config = replace(whole, run_name=f"stopped-{step}")
        ranks.run(2, jobs.run_stopped_at, config, step)
        assert all(line["step"] <= step for line in lines_of(config))
        ranks.run(2, jobs.run, config)
        for a, b in zip(lines_of(whole), lines_of(config), strict=True):
            assert [a[name] for name in NUMBERS] == [b[name] for name in NUMBERS]
        assert lines_of(whole, "val") == lines_of(config, "val")
        expected, found = end_of(whole), end_of(config)
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_resume_on_other_ranks(ranks: Ranks, settings: Settings) -> None:
    """On another number of ranks and another accumulation: the same losses in the same steps."""
    whole = settings(run_name="whole", precision="fp64", dropout=0.0)
    ranks.run(2, jobs.run, whole)
    config = replace(whole, run_name="moved", batch_size=5)
    ranks.run(2, jobs.run_stopped_at, config, 3)
    ranks.run(3, jobs.run, config)
    for name in ("step", "loss", "grad_norm"):
        expected = [line[name] for line in lines_of(whole)]
        np.testing.assert_allclose([line[name] for line in lines_of(config)], expected, rtol=1e-9)


def test_fp16_scale_survives(ranks: Ranks, settings: Settings) -> None:
    """The loss scale resumes where it was, also when fp16 begins only with the resumed run."""
    whole = settings(run_name="whole", precision="fp16")
    ranks.run(1, jobs.run, whole)
    config = replace(whole, run_name="stopped")
    ranks.run(1, jobs.run_stopped_at, config, 5)
    ranks.run(1, jobs.run, config)
    scales = [[line["loss_scale"] for line in lines_of(c)] for c in (whole, config)]
    assert scales[0] == scales[1]
    assert scales[0][0] > 1


def test_other_settings_are_refused(ranks: Ranks, settings: Settings) -> None:
    """A resumed run that would learn something else is refused, with the difference."""
    config = settings(max_steps=2)
    ranks.run(1, jobs.run, config)
    for change in ({"seed": 7}, {"global_batch_size": 16}, {"lr": 1.0}):
        with pytest.raises(RankError, match=f"{next(iter(change))} was"):
            ranks.run(1, jobs.run, replace(config, max_steps=4, **change))
    ranks.run(1, jobs.run, replace(config, max_steps=4, batch_size=4))  # this learns the same


def test_other_rows_are_refused(ranks: Ranks, settings: Settings, files: dict[str, Path]) -> None:
    """Said before the weights are loaded, which from scratch have another vocabulary's shape."""
    config = settings(max_steps=2, model="from-scratch")
    ranks.run(1, jobs.run, config)
    with pytest.raises(
        RankError, match="train_rows was '203 rows, 3 labels', now '45 rows"
    ) as error:
        ranks.run(1, jobs.run, replace(config, max_steps=4, train_file=(str(files["val"]),)))
    assert error.value.kinds == ["UserError"]


def test_best_survives_a_worse_evaluation_after_resume(ranks: Ranks, settings: Settings) -> None:
    """The best score and the patience count are part of the state."""
    config = settings(evals_per_epoch=7, early_stopping_patience=3, lr=0.0, epochs=3)
    ranks.run(2, jobs.run_stopped_at, config, 2)
    ranks.run(2, jobs.run, config)
    steps = [line["step"] for line in lines_of(config, "val")]
    assert steps == [1, 2, 3, 4]  # the first is the best; three more, then it stops


def test_no_evaluation_but_at_the_end(ranks: Ranks, settings: Settings) -> None:
    """--evals-per-epoch 0: epochs go by without one, and a stop between them is resumed."""
    config = settings(evals_per_epoch=0, epochs=3)
    ranks.run(2, jobs.run_stopped_at, config, 9)
    ranks.run(2, jobs.run, config)
    assert [line["step"] for line in lines_of(config)] == list(range(1, 22))
    assert [line["step"] for line in lines_of(config, "val")] == [21]


def test_transposed_weights_resume(
    ranks: Ranks, settings: Settings, tiny_model: Path, tmp_path: Path
) -> None:
    """Matrices that are transposed in memory, as in checkpoints converted from TensorFlow: a fused
    optimizer goes through memory, and its restored moments have the usual order."""
    folder = shutil.copytree(tiny_model, tmp_path / "transposed")
    (folder / "model.safetensors").unlink()
    weights = jobs.weights_of(tiny_model)
    transposed = {k: w.t().contiguous().t() if w.ndim == 2 else w for k, w in weights.items()}
    torch.save(transposed, folder / "pytorch_model.bin")
    whole = settings(model=str(folder), epochs=1, save_every=2, keep_checkpoints=9)
    ranks.run(1, jobs.run, whole)
    source = Path(whole.runs_dir) / "run" / "checkpoints" / "step-00000002"
    config = replace(whole, run_name="resumed", resume=str(source))
    ranks.run(1, jobs.run, config)
    expected, found = end_of(whole, 7), end_of(config, 7)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_last_weights_are_best_without_validation(ranks: Ranks, settings: Settings) -> None:
    """Also if the run was stopped at its very last step, and then only has to be finished."""
    config = settings(val_file=(), val_fraction=0.0, max_steps=3)
    ranks.run(1, jobs.run_stopped_at, config, 3)
    best = Path(config.runs_dir) / "run" / "best"
    assert not best.exists()
    ranks.run(1, jobs.run, config)
    assert checkpoint.step_of(best) == 3


@pytest.mark.parametrize("model", ["a folder", "from-scratch"])
def test_finished_run_resumes_with_more_epochs(
    ranks: Ranks, settings: Settings, model: str
) -> None:
    """--epochs raised trains longer; the steps so far are not repeated. The first checkpoint was
    written together with the best weights."""
    config = settings(epochs=1, **({"model": model} if model == "from-scratch" else {}))
    ranks.run(1, jobs.run, config)
    ranks.run(1, jobs.run, config)  # nothing to do
    ranks.run(1, jobs.run, replace(config, epochs=2))
    assert [line["step"] for line in lines_of(config)] == list(range(1, 15))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("array", r"state.parts\['own'\] has a state that a checkpoint cannot hold: only tensors"),
        ("list", r"state.parts\['own'\]: .* must have state_dict .*; a list does not"),
        ("late", "add own before state.restore in train.py"),
    ],
)
def test_a_part_that_could_not_resume(
    ranks: Ranks, settings: Settings, kind: str, message: str
) -> None:
    """It is refused in the run that would save it, not in the one that needs it."""
    with pytest.raises(RankError, match=message) as error:
        ranks.run(2, jobs.run_with_part, settings(max_steps=2), kind)
    assert set(error.value.kinds) == {"UserError"}


def test_a_checkpoint_without_a_part(ranks: Ranks, settings: Settings) -> None:
    """An older one is refused by a sentence, or taken with --resume-anyway."""
    config = settings(max_steps=2)
    ranks.run(2, jobs.run, config)
    longer = replace(config, max_steps=3)
    with pytest.raises(RankError, match=r"was written without own; .*--resume-anyway"):
        ranks.run(2, jobs.run_with_part, longer, "good")
    ranks.run(2, jobs.run_with_part, replace(longer, resume_anyway=True), "good")
