"""metrics.py: its functions equal scikit-learn's, and what a user makes of METRICS works or is
refused before the first step. Metrics that a user has removed or renamed are skipped."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import lines_of, make_rows, write_tsv
from ranks import RankError, Ranks
from sklearn import metrics as sk
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from metrics import METRICS, log_loss
from training.settings.config import TrainConfig
from training.settings.errors import UserError
from training.step.evaluation import Evaluation, as_float, probabilities
from training.tracking.results import report

Settings = Callable[..., TrainConfig]


def run_of(config: TrainConfig) -> Path:
    return Path(config.runs_dir) / str(config.run_name)


def measured(name: str, probabilities: np.ndarray, truth: np.ndarray) -> float:
    """A metric of metrics.py. Skips the test if the user has removed it."""
    if name not in METRICS:
        pytest.skip(f"metrics.py has no {name} any more")
    return METRICS[name][0](probabilities, truth)


# -- what metrics.py gives -------------------------------------------------------------------------


def test_metrics_are_well_formed() -> None:
    TrainConfig(metric="loss").check_metric(METRICS)


@pytest.mark.parametrize("name", ["accuracy", "macro_f1", "weighted_f1", "micro_f1", "log_loss"])
def test_they_equal_those_of_scikit_learn(name: str) -> None:
    """One label a row, with a class that has no rows; and several."""
    rng = np.random.default_rng(0)
    logits, truth = rng.normal(size=(57, 4)), rng.integers(0, 3, 57)
    p = probabilities(logits, False)
    if name == "log_loss":
        expected = sk.log_loss(truth, p, labels=range(4))
    elif name == "accuracy":
        expected = sk.accuracy_score(truth, logits.argmax(1))
    else:
        present = range(4 if name == "micro_f1" else 3)
        options: dict[str, Any] = {"labels": present, "average": name.removesuffix("_f1")}
        expected = sk.f1_score(truth, logits.argmax(1), **options)
    assert measured(name, p, truth) == pytest.approx(expected, rel=1e-12)
    several = rng.integers(0, 2, (57, 4)) * [1, 1, 1, 0]
    p = probabilities(logits, True)
    if name == "log_loss":
        pairs = torch.from_numpy(logits), torch.from_numpy(several).double()
        expected = F.binary_cross_entropy_with_logits(*pairs).item()
    elif name == "accuracy":
        expected = sk.accuracy_score(several, logits >= 0)
    else:
        options = {"labels": present, "average": name.removesuffix("_f1")}
        expected = sk.f1_score(several, logits >= 0, **options)
    assert measured(name, p, several) == pytest.approx(expected, rel=1e-12)


def test_log_loss_of_certain_rows_is_finite() -> None:
    """Where a probability underflows, and where the rest of one does."""
    logits = np.array([[1e4, -1e4], [0.0, 0.0]])
    wrong = log_loss(probabilities(logits, False), np.array([1, 0]))
    assert wrong == pytest.approx((708.4 + np.log(2)) / 2, rel=1e-3)
    assert log_loss(probabilities(logits, False), np.array([0, 0])) == pytest.approx(np.log(2) / 2)
    certain = probabilities(np.array([[40.0, -40.0]]), True)
    assert log_loss(certain, np.array([[1, 1]])) == pytest.approx(20)
    assert 17 < log_loss(certain, np.array([[0, 0]])) < 21


def test_report_has_the_averages_of_the_metrics() -> None:
    """To the printed digits, with a class that has no rows, for one label a row and for several."""
    rng = np.random.default_rng(1)
    names, logits = ["a", "b", "c", "d"], rng.normal(size=(40, 4))
    for truth in (rng.integers(0, 3, 40), rng.integers(0, 2, (40, 4)) * [1, 1, 0, 1]):
        p = probabilities(logits, truth.ndim == 2)
        f1s = [measured(name, p, truth) for name in ("macro_f1", "weighted_f1", "micro_f1")]
        values = {"loss": 1.0, "mine": 0.25, "rows": 40}
        text = report(Evaluation(values, {}, names, logits, truth))
        lines = {line[:12].strip(): line.split()[-4:] for line in text.split("\n") if line}
        assert [lines[average][2] for average in ("macro avg", "weighted avg")] == [
            f"{f1:.3f}" for f1 in f1s[:2]
        ]
        assert lines["micro avg" if truth.ndim == 2 else "accuracy"][-2] == f"{f1s[2]:.3f}"
        predicted = logits >= 0 if truth.ndim == 2 else logits.argmax(1)
        by_class = sk.f1_score(truth, predicted, average=None, labels=range(4), zero_division=0)
        assert [lines[name][2] for name in names] == [f"{f1:.3f}" for f1 in by_class]
        assert lines["c" if truth.ndim == 2 else "d"][3] == "0"
        assert "loss 1.0000  mine 0.2500\n" in text


def test_one_macro_f1_everywhere(ranks: Ranks, settings: Settings, tmp_path: Path) -> None:
    """Train rows of three classes, val rows of two, and a model that always gives the first one:
    1/3 in the log, metrics.jsonl, TensorBoard, results.json and report.txt (public report 12)."""
    if "macro_f1" not in METRICS:
        pytest.skip("metrics.py has no macro_f1 any more")
    rows = [("a cat", "animal"), ("a dog", "animal"), ("some rice", "food"), ("an egg", "food")]
    val = write_tsv(tmp_path / "val.tsv", rows)
    config = settings(val_file=(str(val),), metric="macro_f1", lr=0.0, max_steps=1)
    ranks.run(2, jobs.run_always_the_first_label, config)
    run = run_of(config)
    (line,) = lines_of(config, "val")
    assert line["macro_f1"] == pytest.approx(1 / 3)
    results = json.loads((run / "results.json").read_text("utf-8"))
    assert results["val"]["macro_f1"] == line["macro_f1"]
    assert "macro F1 0.3333" in (run / "log.txt").read_text("utf-8")
    report = (run / "report.txt").read_text("utf-8")
    assert re.search(r"macro avg +0\.250 +0\.500 +0\.333 +4\n", report)
    assert re.search(r"weather +0\.000 +0\.000 +0\.000 +0\n", report)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert events.Scalars("val/macro_f1")[0].value == pytest.approx(1 / 3)


# -- what the machinery takes ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "value", [0.5, 1, np.float32(0.5), np.array(0.5), torch.tensor(0.5), np.int64(1), float("nan")]
)
def test_numbers_are_taken(value: Any) -> None:
    result = as_float("mcc", value)
    assert type(result) is float
    assert result == float(value) or result != result


@pytest.mark.parametrize(
    ("value", "given"),
    [
        (None, "None"), ("0.5", "'0.5'"), (1j, "1j"), (True, "True"),
        (np.bool_(True), "np.True_"), (np.array([0.5]), r"ndarray of shape \(1,\)"),
        (torch.ones(2, 2), r"Tensor of shape \(2, 2\)"), (np.array(None), "array"),
    ],
)  # fmt: skip
def test_what_is_not_a_number_is_refused(value: Any, given: str) -> None:
    with pytest.raises(UserError, match=rf"^metrics.py: mcc must return .*float\), not {given}"):
        as_float("mcc", value)


def test_score_has_higher_values_better() -> None:
    """By the metric's direction; not finite, or with a loss that is not: NaN, which is no best."""
    values = {"loss": 2.0, "up": 3.0, "down": 4.0, "none": np.nan, "endless": np.inf}
    directions = {"loss": False, "up": True, "down": False, "none": True, "endless": True}
    result = Evaluation(values, directions, [], None, None)
    assert [result.score(name) for name in ("loss", "up", "down")] == [-2.0, 3.0, -4.0]
    assert np.isnan([result.score("none"), result.score("endless")]).all()
    values["loss"] = np.inf
    assert np.isnan(result.score("up"))


@pytest.mark.parametrize(
    ("metrics", "chosen", "message"),
    [
        ({"mcc": len}, "loss", r"mcc must be \(function, True or False.*not of type builtin"),
        ({"mcc": (len, 1)}, "loss", "mcc must be .*not of type tuple"),
        ({"mcc": ("len", True)}, "loss", "mcc must be .*not of type tuple"),
        ({"loss": (len, True)}, "loss", "no metric can have the name 'loss'"),
        ({"rows": (len, True)}, "loss", "no metric can have the name 'rows'"),
        ({"step": (len, True)}, "loss", "no metric can have the name 'step'"),
        ({"mcc": (len, True)}, "mc", "one of mcc, loss, not 'mc', did you mean mcc?"),
        ({}, "accuracy", "one of loss, not 'accuracy'"),
    ],
)
def test_wrong_dictionaries_are_refused(metrics: Any, chosen: str, message: str) -> None:
    with pytest.raises(UserError, match=re.sub(r"\?", r"\\?", message)):
        TrainConfig(metric=chosen).check_metric(metrics)


BROKEN = {
    "metric raises": r"metrics.py: broken must return .*but raised ZeroDivisionError: division by "
    r"zero, line \d+ of jobs.py",
    "metric gives None": r"metrics.py: broken must return one number \(a float\), not None",
    "metric gives an array": r"metrics.py: broken must .* not ndarray of shape \(45, 3\)",
    "metric changes its input": "broken must return .*raised ValueError: .*read-only",
    "metric fails on test rows": "broken must return .*raised AssertionError",
    "metric without direction": r"broken must be \(function, True or False",
    "mean loss in evaluation": r"one loss per row, of shape \(45,\), not \(\)",
}


@pytest.mark.parametrize("edit", BROKEN)
def test_broken_metrics_end_the_run_before_a_step(
    ranks: Ranks, settings: Settings, tmp_path: Path, edit: str
) -> None:
    """On all ranks, with one sentence that names the file and the metric; also in a resumed run."""
    test = write_tsv(tmp_path / "test.tsv", make_rows(12, seed=5))
    config = settings(test_file=(str(test),), eval_batch_size=4)
    with pytest.raises(RankError, match=BROKEN[edit]) as error:
        ranks.run(2, jobs.run_edited, config, edit)
    assert error.value.kinds == ["UserError", "UserError"]
    assert not (run_of(config) / "metrics.jsonl").exists() or not lines_of(config)


def test_a_metric_edited_between_stop_and_resume(ranks: Ranks, settings: Settings) -> None:
    config = settings()
    ranks.run(2, jobs.run_stopped_at, config, 2)
    with pytest.raises(RankError, match=BROKEN["metric raises"]):
        ranks.run(2, jobs.run_edited, config, "metric raises")
    assert [line["step"] for line in lines_of(config)] == [1, 2]


def test_a_wrong_name_that_no_command_line_has_checked(ranks: Ranks, settings: Settings) -> None:
    with pytest.raises(RankError, match="not 'acuracy', did you mean accuracy"):
        ranks.run(2, jobs.run, settings(metric="acuracy"))


def test_a_run_without_metrics(ranks: Ranks, settings: Settings) -> None:
    """METRICS may be empty: the loss chooses."""
    config = settings(metric="loss", max_steps=7)
    ranks.run(2, jobs.run_edited, config, "no metrics")
    (line,) = lines_of(config, "val")
    assert set(line) == {"step", "epoch", "split", "loss", "rows"}
    log = (run_of(config) / "log.txt").read_text("utf-8")
    assert f"val at step 7: loss {line['loss']:.4f}  (45 rows)  best loss so far" in log


def test_a_metric_without_a_value(ranks: Ranks, settings: Settings) -> None:
    """NaN is no error: no value in metrics.jsonl and results.json, and never the best."""
    config = settings(metric="nothing")
    ranks.run(2, jobs.run_edited, config, "metric gives NaN")
    assert [line["nothing"] for line in lines_of(config, "val")] == [None, None]
    results = json.loads((run_of(config) / "results.json").read_text("utf-8"))
    assert results["val"]["nothing"] is None
    assert results["val"]["loss"] > 0
    assert not (run_of(config) / "best").exists()


@pytest.mark.parametrize("higher_is_better", [False, True])
def test_direction(ranks: Ranks, settings: Settings, higher_is_better: bool) -> None:
    """A metric that rises with every evaluation. If lower is better, the first weights stay the
    best, the plateau schedule lowers the rate, and the run stops early; if higher is, none of it.
    """
    config = settings(
        metric="rising", schedule="plateau", warmup_ratio=0.0, early_stopping_patience=3, epochs=5,
        keep_checkpoints=9,
    )  # fmt: skip
    ranks.run(2, jobs.run_with_rising_metric, config, higher_is_better)
    run = run_of(config)
    results = json.loads((run / "results.json").read_text("utf-8"))
    rates = {line["step"]: line["lr"] for line in lines_of(config)}
    assert len(lines_of(config, "val")) == (5 if higher_is_better else 4)
    first_or_last = (35, 35, False, config.lr) if higher_is_better else (28, 7, True, config.lr / 2)
    assert (results["step"], results["best_step"], results["early"], rates[28]) == first_or_last
    best = run / f"checkpoints/step-{results['best_step']:08}"
    kept, weights = jobs.weights_of(best), jobs.weights_of(run / "best")
    assert all(torch.equal(weights[name], kept[name]) for name in kept)


@pytest.mark.parametrize("class_weights", ["none", "balanced"])
@pytest.mark.parametrize("edit", ["", "focal loss"])
def test_val_loss_is_the_function_of_train_loss(
    ranks: Ranks, settings: Settings, files: dict[str, Path], edit: str, class_weights: str
) -> None:
    """One global batch of all rows and the same rows to validate on: the same number."""
    config = settings(
        val_file=(str(files["train"]),), global_batch_size=203, precision="fp64", dropout=0.0,
        lr=0.0, max_steps=1, class_weights=class_weights, label_smoothing=0.1,
    )  # fmt: skip
    ranks.run(2, jobs.run_edited, config, edit)
    train, val = lines_of(config)[0], lines_of(config, "val")[0]
    assert val["rows"] == 203
    assert val["loss"] == pytest.approx(train["loss"], rel=1e-12)
