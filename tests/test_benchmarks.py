"""The benchmarks start, and what the documents quote is what they print. They are not measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "benchmarks"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py") if path.name != "pretrained.py")


def started(*arguments: str) -> str:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True,
                          timeout=120)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_it_says_how_to_use_it(name: str) -> None:
    assert "usage:" in started(f"benchmarks/{name}", "--help")


@pytest.mark.slow
def test_the_arithmetic_is_the_document_s() -> None:
    """docs/scaling.md has the tables that the command prints, from the parts that were measured."""
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    tables = started("benchmarks/scaling.py", "arithmetic").strip().split("\n\n")
    assert len(tables) == 3
    for table in tables:
        assert f"\n\n{table}\n\n" in page


@pytest.mark.slow
def test_the_plan_is_simulated() -> None:
    """The functions that data.py and scaling.py run for a thousand ranks, here for four."""
    of_plan = started("benchmarks/data.py", "--child", "plan_cost", "20000", "64", "4", "1")
    cost = json.loads(of_plan.splitlines()[-1])
    assert cost["steps"] == 313
    assert cost["step"] > 0
    assert cost["order"] > 0
    spread = json.loads(started("benchmarks/data.py", "--child", "imbalance", "20000", "64", "4"))
    assert 1.0 <= spread["median"] < spread["random_median"]
