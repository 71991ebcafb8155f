"""What cannot work fails before the first step, with one line; any module that can work does."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import edited
import jobs
import numpy as np
import pytest
import torch
from conftest import lines_of, make_rows
from ranks import RankError, Ranks

from training.checkpoint.model_folder import load_model
from training.dataset.rows import Row
from training.settings.config import TrainConfig
from training.settings.errors import UserError

Settings = Callable[..., TrainConfig]
WORKING = ["build_two_layer_head", "build_pooled", "build_lstm"]


def run_of(config: TrainConfig) -> Path:
    return Path(config.runs_dir) / str(config.run_name)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("build", WORKING)
def test_any_module(
    ranks: Ranks, settings: Settings, tmp_path: Path, build: str, strategy: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """It trains, resumes bit-identically, and predict.py gives the probabilities of evaluation."""
    whole = settings(run_name="whole", dropout=0.0, strategy=strategy, save_every=3)
    ranks.run(2, jobs.run_built_by, whole, build)
    config = replace(whole, run_name="stopped")
    ranks.run(2, jobs.run_built_by, config, build, 5)
    ranks.run(2, jobs.run_built_by, config, build)
    states = [jobs.weights_of(run_of(c) / "checkpoints/step-00000014") for c in (whole, config)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    if strategy == "ddp":
        one = replace(whole, run_name="one")
        ranks.run(1, jobs.run_built_by, one, build)
        first, second = ([line["loss"] for line in lines_of(c)] for c in (whole, one))
        np.testing.assert_allclose(first, second, rtol=1e-5)
    import model
    import predict

    moved = tmp_path / "elsewhere" / "best"
    shutil.move(run_of(config) / "best", moved)
    monkeypatch.setattr(model, "build_model", getattr(edited, build))
    texts, truth = zip(*make_rows(45, seed=2), strict=True)
    classifier = predict.Classifier(moved)
    probabilities = classifier.probabilities([Row(text) for text in texts])
    ids = [classifier.labels.index(label) for label in truth]
    loss = -np.log(probabilities[np.arange(len(ids)), ids]).mean()
    results = json.loads((run_of(config) / "results.json").read_text("utf-8"))
    assert loss == pytest.approx(results["val"]["loss"], rel=1e-5)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        ("build_pooled_without_mask", "logits of a row change by .*a mean must leave padding out"),
        ("build_last_step", "logits of a row change by .* use attention_mask"),
        ("build_without_mask", "takes input_ids: it does not take attention_mask"),
        ("build_projected", "saved and built again, the model gives other logits"),
        ("build_small_table", r"in embedding and is asked for number \d+"),
        ("build_normalized", r"training changes the buffers norm\.running_mean, .*LayerNorm"),
        ("build_not_logits", "forward must return the logits, .* not a tuple"),
    ],
)
def test_what_cannot_work(ranks: Ranks, settings: Settings, build: str, message: str) -> None:
    config = settings()
    with pytest.raises(RankError, match=message) as error:
        ranks.run(2, jobs.run_built_by, config, build)
    assert set(error.value.kinds) == {"UserError"}
    assert len(str(error.value).partition("\n")[0]) < 400
    assert not run_of(config).exists()


def test_unused_parameters_are_frozen(ranks: Ranks, settings: Settings) -> None:
    """They are named in one line, stay as they are, and stay frozen when the run is resumed."""
    config = settings(epochs=1)
    ranks.run(2, jobs.run_built_by, config, "build_with_unused_layer", 4)
    ranks.run(2, jobs.run_built_by, config, "build_with_unused_layer")
    log = (run_of(config) / "log.txt").read_text("utf-8")
    shown = "does not depend on them: head_of_old.weight, head_of_old.bias\n"
    assert log.count(shown) == 1
    facts = json.loads((run_of(config) / "best/training.json").read_text("utf-8"))
    assert facts["frozen"] == ["head_of_old.weight", "head_of_old.bias"]


def test_model_py_was_edited_after_the_checkpoint(ranks: Ranks, settings: Settings) -> None:
    """To resume, and to predict: a sentence that says what differs, not a traceback."""
    config = settings(save_every=2)
    ranks.run(2, jobs.run_stopped_at, config, 3)
    message = r"classifier\.0\.bias.*; undo the change of model.py, or train"
    with pytest.raises(RankError, match=message) as error:
        ranks.run(2, jobs.run_built_by, config, "build_two_layer_head")
    assert set(error.value.kinds) == {"UserError"}
    checkpoint = next((run_of(config) / "checkpoints").glob("step-*"))
    with pytest.raises(UserError, match=message):
        load_model(checkpoint, edited.build_two_layer_head, False)
    with pytest.raises(UserError, match="is not a model folder of a run"):
        load_model(run_of(config), edited.build_two_layer_head, False)


def test_files_stand_for_their_content(
    ranks: Ranks, settings: Settings, tmp_path: Path, tiny_model: Path
) -> None:
    """The same model elsewhere, or gone, resumes; class weights changed in place do not."""
    weights = tmp_path / "w.json"
    weights.write_text('{"animal": 1, "food": 2, "weather": 3}')
    first = shutil.copytree(tiny_model, tmp_path / "a")
    config = settings(model=str(first), class_weights=str(weights), save_every=2)
    ranks.run(2, jobs.run_stopped_at, config, 3)
    second = shutil.move(first, tmp_path / "b")
    weights.write_text('{"weather": 3, "food": 2, "animal": 1}\n')  # the same
    moved = replace(config, model=str(second))
    ranks.run(2, jobs.run_stopped_at, moved, 5)
    weights.write_text('{"weather": 3, "food": 2, "animal": 50}')
    with pytest.raises(RankError, match=r"class_weights is .*w\.json. as before, with another"):
        ranks.run(2, jobs.run, moved)
    weights.write_text('{"weather": 3, "food": 2, "animal": 1}')
    shutil.rmtree(second)
    ranks.run(2, jobs.run, moved)
    assert json.loads((run_of(config) / "results.json").read_text("utf-8"))["step"] == 14
