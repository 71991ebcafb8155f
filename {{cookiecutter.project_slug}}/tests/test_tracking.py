"""What a run leaves to look at: metrics.jsonl, TensorBoard, the report, results.json."""

import io
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import pytest
from conftest import lines_of
from ranks import Ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from training.checkpoint.state import Progress
from training.settings.config import TrainConfig
from training.tracking.console import ConsoleHandler, start_console
from training.tracking.tracker import _forget_after

Settings = Callable[..., TrainConfig]


@pytest.fixture(scope="module")
def stopped_and_resumed(
    ranks: Ranks, tmp_path_factory: Any, files: dict[str, Path], tiny_model: Path
) -> TrainConfig:
    """A run of two ranks that was stopped at step 5 of 14 and resumed, with a test file."""
    folder = tmp_path_factory.mktemp("tracking")
    config = TrainConfig(
        model=str(tiny_model), max_length=48, epochs=2, lr=3e-3, log_every=1, timeout=20.0,
        train_file=(str(files["train"]),), val_file=(str(files["val"]),), save_every=3,
        test_file=(str(files["val"]),), cache_dir=str(folder / "cache"),
        runs_dir=str(folder / "runs"), run_name="run",
    )  # fmt: skip
    ranks.run(2, jobs.run_stopped_at, config, 5)
    # What a run that is killed after its checkpoint of step 5 would have left besides.
    with (folder / "runs" / "run" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 6, "split": "train", "loss": 9.0}\n{"step": 7, "spl')
    ranks.run(2, jobs.run, config)
    return config


def run_of(config: TrainConfig) -> Path:
    return Path(config.runs_dir) / str(config.run_name)


def test_each_step_once(stopped_and_resumed: TrainConfig) -> None:
    """metrics.jsonl and every TensorBoard curve continue without doubled or missing steps."""
    assert [line["step"] for line in lines_of(stopped_and_resumed)] == list(range(1, 15))
    assert [line["step"] for line in lines_of(stopped_and_resumed, "val")] == [7, 14]
    events = EventAccumulator(str(run_of(stopped_and_resumed) / "tensorboard"))
    events.Reload()
    tags = events.Tags()["scalars"]
    for tag in ("loss", "lr_decay", "lr_no_decay", "grad_norm", "samples_per_second", "padding"):
        assert [e.step for e in events.Scalars(f"train/{tag}")] == list(range(1, 15)), tag
    assert [e.step for e in events.Scalars("val/accuracy")] == [7, 14]
    losses = [line["loss"] for line in lines_of(stopped_and_resumed)]
    assert [e.value for e in events.Scalars("train/loss")] == pytest.approx(losses, rel=1e-6)
    assert "val/confusion" in events.Tags()["images"]
    assert {"val/animal", "val/food", "val/weather"} <= set(events.Tags()["tensors"])
    assert {"final/val_accuracy", "final/test_macro_f1"} <= set(tags)
    hparams = [p for p in events.summary_metadata if p.startswith("_hparams_")]
    assert hparams


def test_one_writer(stopped_and_resumed: TrainConfig) -> None:
    """One event file for each start of the run: not one per rank."""
    assert len(list((run_of(stopped_and_resumed) / "tensorboard").iterdir())) == 2


def test_results_and_report(stopped_and_resumed: TrainConfig) -> None:
    """The report is of the best weights; its numbers are those of results.json."""
    run = run_of(stopped_and_resumed)
    results = json.loads((run / "results.json").read_text("utf-8"))
    assert results["stopped"] is False
    assert results["world_size"] == 2
    assert results["labels"] == ["animal", "food", "weather"]
    assert results["val"]["rows"] == results["test"]["rows"] == 45
    best = max(lines_of(stopped_and_resumed, "val"), key=lambda line: line["accuracy"])
    assert (results["best_step"], results["val"]["accuracy"]) == (best["step"], best["accuracy"])
    assert results["val"] == results["test"]  # the same rows here
    report = (run / "report.txt").read_text("utf-8")
    for label in results["labels"]:
        assert report.count(label) == 4  # two reports with a confusion matrix each
    matrix = [line.split()[1:] for line in report.split("in this order\n")[1].split("\n")[:3]]
    assert sum(int(n) for row in matrix for n in row if n != ".") == 45


def test_results_of_a_stopped_run(ranks: Ranks, settings: Settings) -> None:
    config = settings()
    ranks.run(2, jobs.run_stopped_at, config, 2)
    results = json.loads((run_of(config) / "results.json").read_text("utf-8"))
    assert (results["stopped"], results["step"]) == (True, 2)


def test_averages_between_lines_of_the_log(ranks: Ranks, settings: Settings) -> None:
    """With --log-every 3 a line's loss is the mean over the rows of its three steps."""
    every, third = settings(run_name="1"), settings(run_name="3", log_every=3)
    ranks.run(2, jobs.many_runs, [every, third])
    losses = [line["loss"] for line in lines_of(every)]
    lines = lines_of(third)
    assert [line["step"] for line in lines] == [3, 6, 9, 12, 14]
    assert lines[1]["loss"] == pytest.approx(sum(losses[3:6]) / 3)
    short = (32 * losses[5] + 11 * losses[6]) / 43  # steps 6 and 7; the latter has 11 rows
    assert lines[2]["loss"] != pytest.approx(short)
    expected = (11 * losses[6] + 32 * (losses[7] + losses[8])) / 75
    assert lines[2]["loss"] == pytest.approx(expected)


def test_trains_without_tensorboard(ranks: Ranks, settings: Settings) -> None:
    """A broken TensorBoard costs the curves, not the run."""
    config = settings(max_steps=1, metric="loss")
    code = (
        "import sys; sys.modules['torch.utils.tensorboard'] = None\n"
        "import os; sys.path.insert(0, os.getcwd())\n"
        "import train; from training.launch import worker; from training.settings import flags\n"
        "worker.run(train.main, flags.load_config(sys.argv[1:]))"
    )
    settings_file = Path(config.runs_dir).parent / "config.toml"
    settings_file.write_text(config.to_toml(), "utf-8")
    project = Path(jobs.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", code, "--config", str(settings_file)],
                          cwd=project, capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "no TensorBoard" in done.stdout
    assert not (run_of(config) / "tensorboard").exists()


def test_console_on_a_full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cannot be shown is no reason to stop training."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        ConsoleHandler().emit(logging.makeLogRecord({"msg": "x" * 10_000}))
        monkeypatch.undo()
        with suppress(OSError):
            full.flush()


def test_console_without_the_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    """A label that the screen's encoding cannot show is shown escaped; it ends nothing."""
    screen = io.BytesIO()
    with io.TextIOWrapper(screen, "ascii", write_through=True) as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        start_console(True)
        logging.getLogger("training").info("label 地方 🐶")
        logging.getLogger("training").handlers.clear()
        assert b"label \\u5730\\u65b9 \\U0001f436" in screen.getvalue()


def test_forgets_steps_that_come_again(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st', "utf-8")
    _forget_after(path, Progress(step=2))
    assert path.read_text("utf-8") == '{"step": 1}\n{"step": 2}\n'
    path.write_text('{"step": 2, "split": "val"}\n{"step": 2, "split": "train"}\n', "utf-8")
    _forget_after(path, Progress(step=2, evaluation_due=True))
    assert path.read_text("utf-8") == '{"step": 2, "split": "train"}\n'
    path.write_text('{"step": 2, "split": "val", "rows": 9}\n{"step": 2, "in_a_row": 1}\n', "utf-8")
    _forget_after(path, Progress(step=2))
    assert path.read_text("utf-8") == '{"step": 2, "split": "val", "rows": 9}\n'


def test_two_runs_of_one_name(ranks: Ranks, settings: Settings) -> None:
    """The second is refused while the first is at work."""
    from filelock import FileLock

    config = replace(settings(), max_steps=1)
    run_of(config).mkdir(parents=True)
    with (
        FileLock(run_of(config) / ".lock"),
        pytest.raises(Exception, match="another process is training in"),
    ):
        ranks.run(1, jobs.run, config)
