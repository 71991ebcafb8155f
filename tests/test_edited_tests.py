"""A project's quick tests pass as they are after right edits: none of them turns red for one."""

import shutil
import sys
from pathlib import Path

import pytest
from conftest import Run
from patches import read_all
from test_edits import make_edits

# Several edits in one project, since a suite takes a minute. With -m '' all of them.
TOGETHER = {
    "bert": "two_layer_head focal_loss layer_wise_lr ece ema tags two_forwards",
    "number": "number",
    "pooling": "mean_pooling lion mcc sqlite",
    "lstm": "lstm",
    "head": "step_hook sgd",
}
LONG = ("pooling", "lstm", "head")


def test_every_edit_is_among_them() -> None:
    assert sorted(" ".join(TOGETHER.values()).split()) == [edit.name for edit in read_all()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long if n in LONG else []) for n in TOGETHER]
)
def test_own_tests(name: str, baked: Path, tmp_path: Path, run: Run) -> None:
    project = tmp_path / "project"
    shutil.copytree(baked, project, ignore=shutil.ignore_patterns("__pycache__"))
    make_edits(project, [edit for edit in read_all() if edit.name in TOGETHER[name].split()])
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", "--tb", "short"]
    done = run(project, *tests, check=False, timeout=1800, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-10000:]
