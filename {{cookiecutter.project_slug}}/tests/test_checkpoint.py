"""Checkpoints: whole or not there, verified, the newest kept by number, only data loaded."""

import json
import pickle
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jobs
import pytest
import torch
from conftest import lines_of
from ranks import RankError, Ranks

from training.checkpoint import checkpoint
from training.settings.config import TrainConfig
from training.settings.errors import UserError

Settings = Callable[..., TrainConfig]


def make(folder: Path, step: int, text: str = "x" * 100) -> Path:
    path = folder / f"step-{step:08d}"

    def write(folder: Path) -> None:
        (folder / "state.pt").write_text(text, "utf-8")

    checkpoint.write_folder(path, write)
    return path


def test_failed_write_leaves_the_old_one(tmp_path: Path) -> None:
    """Disk full in the middle: one line with the path, nothing half-written."""
    path = make(tmp_path, 1)

    def fail(folder: Path) -> None:
        (folder / "state.pt").write_text("half", "utf-8")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match=r"cannot write .*step-00000001: No space left"):
        checkpoint.write_folder(path, fail)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert checkpoint.problem_of(path) is None


def test_full_disk_and_file_modes(tmp_path: Path) -> None:
    """A full disk is one line, whichever library finds it; files are readable as umask says."""

    def full(folder: Path) -> None:
        with open("/dev/full", "wb") as disk:
            torch.save({"x": torch.zeros(10**6)}, disk)

    with pytest.raises(UserError, match=r"cannot write .*step-1.* MiB are free"):
        checkpoint.write_folder(tmp_path / "step-1", full)
    assert not list(tmp_path.iterdir())

    def private(folder: Path) -> None:
        (folder / "a").touch(mode=0o600)

    checkpoint.write_folder(tmp_path / "best", private)
    (tmp_path / "other").touch()
    modes = [p.stat().st_mode & 0o777 for p in (tmp_path / "best" / "a", tmp_path / "other")]
    assert modes[0] == modes[1]


def test_killed_between_renames(tmp_path: Path) -> None:
    """A replaced folder that was set aside is put back."""
    best = tmp_path / "best"
    checkpoint.write_folder(best, lambda p: None)
    best.rename(tmp_path / ".old-best")
    (tmp_path / ".writing-best").mkdir()
    checkpoint.recover(tmp_path)
    assert checkpoint.problem_of(best) is None
    assert [p.name for p in tmp_path.iterdir()] == ["best"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "delete", "no manifest"])
def test_damaged_checkpoint_is_passed_over(tmp_path: Path, damage: str) -> None:
    """The previous good one is taken; with none left it is an error, no silent new start."""
    old, new = make(tmp_path, 9), make(tmp_path, 10)

    def hurt(path: Path) -> None:
        state = path / "state.pt"
        if damage == "truncate":
            state.write_text("x" * 50, "utf-8")
        elif damage == "flip":
            state.write_text("y" + "x" * 99, "utf-8")
        elif damage == "delete":
            state.unlink()
        else:
            (path / checkpoint.MANIFEST).unlink()

    hurt(new)
    assert checkpoint.newest(tmp_path) == old
    hurt(old)
    with pytest.raises(UserError, match="none of the 2 checkpoints"):
        checkpoint.newest(tmp_path)
    assert checkpoint.newest(tmp_path / "nothing") is None


def test_newest_is_by_number(tmp_path: Path) -> None:
    for step in (900, 1000, 950, 123456789):
        make(tmp_path, step)
    (tmp_path / "step-old").mkdir()
    assert [step for step, _ in checkpoint.saved(tmp_path)] == [900, 950, 1000, 123456789]


def test_other_format_version(tmp_path: Path) -> None:
    path = make(tmp_path, 1)
    manifest = json.loads((path / checkpoint.MANIFEST).read_text("utf-8"))
    (path / checkpoint.MANIFEST).write_text(json.dumps(manifest | {"version": 99}), "utf-8")
    with pytest.raises(UserError, match="checkpoint format 99, this code reads format 5"):
        checkpoint.newest(tmp_path)


def test_code_in_a_checkpoint_is_refused(tmp_path: Path) -> None:
    """Only tensors and plain types are unpickled."""

    class Evil:
        def __reduce__(self) -> tuple:
            return (print, ("owned",))

    (tmp_path / "state.pt").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(UserError, match="holds more than data, not loaded"):
        checkpoint.load_state(tmp_path)


def test_run_keeps_the_newest_and_the_best(ranks: Ranks, settings: Settings) -> None:
    """keep 2 of 12, the best at the first evaluation: best/ and the newest two remain and load."""
    config = settings(save_every=1, max_steps=12, keep_checkpoints=2, lr=0.0, evals_per_epoch=7)
    ranks.run(2, jobs.run, config)
    run = Path(config.runs_dir) / "run"
    assert [step for step, _ in checkpoint.saved(run / "checkpoints")] == [11, 12]
    assert json.loads((run / "results.json").read_text("utf-8"))["best_step"] == 1
    assert sorted(p.name for p in run.iterdir() if p.name != ".lock") == [
        "best", "checkpoints", "config.toml", "log.txt", "metrics.jsonl", "report.txt",
        "results.json", "tensorboard",
    ]  # fmt: skip
    state = checkpoint.load_state(run / "checkpoints" / "step-00000012")
    assert state["progress"]["step"] == 12


def test_damaged_newest_in_a_run(ranks: Ranks, settings: Settings) -> None:
    """--resume auto falls back to the checkpoint before; the run ends as the whole one."""
    whole = settings(run_name="whole", save_every=3)
    ranks.run(2, jobs.run, whole)
    config = replace(whole, run_name="hurt")
    ranks.run(2, jobs.run_stopped_at, config, 5)
    checkpoints = Path(config.runs_dir) / "hurt" / "checkpoints"
    assert [step for step, _ in checkpoint.saved(checkpoints)] == [3, 5]
    file = checkpoints / "step-00000005" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    ranks.run(2, jobs.run, config)
    assert [line["loss"] for line in lines_of(config)] == [line["loss"] for line in lines_of(whole)]


def test_a_new_run_takes_over_the_best(ranks: Ranks, settings: Settings) -> None:
    """Resumed under another name: the old best weights come along, or are forgotten if gone."""
    config = settings(lr=0.0, epochs=1)  # nothing is ever better than the first evaluation
    ranks.run(1, jobs.run, config)
    runs = Path(config.runs_dir)
    source = str(runs / "run" / "checkpoints" / "step-00000007")
    longer = replace(config, epochs=2, resume=source)
    ranks.run(1, jobs.run, replace(longer, run_name="second"))
    shutil.rmtree(runs / "run" / "best")
    ranks.run(1, jobs.run, replace(longer, run_name="third"))
    for name, expected in (("second", 7), ("third", 14)):
        results = json.loads((runs / name / "results.json").read_text("utf-8"))
        assert (name, results["best_step"]) == (name, expected)
        assert checkpoint.step_of(runs / name / "best") == expected


def test_resume_from_a_path(ranks: Ranks, settings: Settings, tmp_path: Path) -> None:
    """A run's folder or one checkpoint, in place or into a run of another name."""
    config = settings(save_every=2, max_steps=6)
    ranks.run(1, jobs.run_stopped_at, config, 4)
    run = Path(config.runs_dir) / "run"
    two = run / "checkpoints" / "step-00000002"
    shutil.copytree(two, tmp_path / "copy")
    other = replace(config, resume=str(two), run_name="other")
    ranks.run(1, jobs.run, other)
    assert [line["step"] for line in lines_of(other)] == [3, 4, 5, 6]
    results = json.loads((run.parent / "other" / "results.json").read_text("utf-8"))
    assert results["best_step"] == 6  # the only evaluation
    assert checkpoint.step_of(run.parent / "other" / "best") == 6
    ranks.run(1, jobs.run, replace(config, resume=str(run), run_name=None))
    assert [line["step"] for line in lines_of(config)] == [1, 2, 3, 4, 5, 6]
    for bad in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(RankError, match=f"--resume {bad}"):
            ranks.run(1, jobs.run, replace(config, resume=str(bad)))
    with pytest.raises(RankError, match="exists; give another --run-name"):
        ranks.run(1, jobs.run, replace(config, resume="never"))
