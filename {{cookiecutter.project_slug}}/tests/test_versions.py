"""Older and newer versions of torch and transformers: what is too old is refused in one line."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jobs
import pytest
from ranks import Ranks

from training.settings import versions
from training.settings.config import TrainConfig

PROJECT = Path(__file__).resolve().parent.parent
COMMANDS = {
    "launch.sh": ["./launch.sh"],
    "launch.sh predict.py": [sys.executable, "-P", "-m", "training.launch.launcher", "predict.py"],
    "train.py": [sys.executable, "train.py"],
    "predict.py": [sys.executable, "predict.py", "--model", "runs/first/best", "a text"],
}


def oldest_of(name: str) -> str:
    return ".".join(map(str, versions.OLDEST[name]))


def test_pyproject_names_the_same_versions() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text("utf-8"))["project"]
    bounds = [line for line in project["dependencies"] if ">=" in line or "<" in line]
    assert bounds == [f"{name}>={oldest_of(name)}" for name in versions.OLDEST]


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(("name", "installed"), [("torch", "2.7.1"), ("transformers", "4.57.6")])
def test_too_old_versions_are_refused(
    tmp_path: Path, command: str, name: str, installed: str
) -> None:
    """In one line with exit code 2, by every way to start, before PyTorch is imported."""
    about = tmp_path / f"{name}-{installed}.dist-info" / "METADATA"
    about.parent.mkdir()
    about.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {installed}\n")
    (tmp_path / "torch.py").write_text("raise SystemExit('PyTorch was imported')")
    path = os.pathsep.join([str(tmp_path), str(PROJECT)])  # before what is installed
    environment = os.environ | {"PYTHONPATH": path, "PYTHON": sys.executable}
    first, *others = COMMANDS[command]
    done = subprocess.run([PROJECT / first, *others], cwd=PROJECT, env=environment, text=True,
                          capture_output=True, timeout=120)  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    expected = f"is older than {oldest_of(name)}: {sys.executable} -m pip install '{name}>="
    assert f": {name} {installed} {expected}{oldest_of(name)}'" in done.stderr


@pytest.mark.parametrize("installed", ["2.8.0", "2.8.0a0+5228986c39.nv25.5", "2.10.0+cu130", "3.0"])
def test_versions_that_are_not_too_old(monkeypatch: pytest.MonkeyPatch, installed: str) -> None:
    """2.10 is newer than 2.8, and the pre-releases of clusters' images are taken."""
    names = {"torch": installed, "transformers": "5.0.0rc1"}
    monkeypatch.setattr(versions, "version", names.__getitem__)
    versions.check_versions("train.py")


def test_buffers_are_rank_0s_once(ranks: Ranks) -> None:
    """DDP takes them at the start, not in each forward, whatever the argument is called."""
    for rank, values in enumerate(ranks.run(2, jobs.buffers_in_ddp, TrainConfig())):
        assert values == [0, rank]


@pytest.mark.parametrize("names", [["gradient"], ["gradient", "activation"]])
def test_checkpointing_by_either_name(names: list[str]) -> None:
    """Where transformers has the new name too, the old one is not called: it warns."""
    methods: Any = {f"{name}_checkpointing_enable": name for name in names}
    chosen: Any = versions.activation_checkpointing(SimpleNamespace(**methods))
    assert chosen == names[-1]


@pytest.mark.parametrize(
    ("installed", "spares"), [("2.8.0", False), ("2.9.1+cu128", False), ("2.10.0", True)]
)
def test_where_the_garbage_collector_spares_tensors(
    monkeypatch: pytest.MonkeyPatch, installed: str, spares: bool
) -> None:
    monkeypatch.setattr(versions, "version", lambda name: installed)
    assert versions.collector_spares_tensors() is spares


def test_garbage_is_collected_between_steps(ranks: Ranks, settings: Any) -> None:
    """Where nothing else collects it: at each line of the log, when there are no gradients."""
    config = settings(max_steps=6, log_every=2, strategy="fsdp")
    assert ranks.run(2, jobs.gradients_when_collecting, config) == [[0, 0, 0]] * 2
