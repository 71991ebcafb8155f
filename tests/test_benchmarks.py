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
def test_help_is_printed(name: str) -> None:
    assert "usage:" in started(f"benchmarks/{name}", "--help")


@pytest.mark.slow
def test_docs_have_the_printed_tables() -> None:
    """docs/scaling.md has the tables that the command prints, from the parts that were measured."""
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    tables = started("benchmarks/scaling.py", "arithmetic").strip().split("\n\n")
    assert len(tables) == 3
    for table in tables:
        assert f"\n\n{table}\n\n" in page


def cells_of(lines: str, what: str = "") -> dict[str, list[str]]:
    """Cells of Markdown tables by the first one, which may begin with a letter in brackets."""
    rows = [line.strip("| ").split(" | ") for line in lines.splitlines() if what in line]
    return {row[0].rpartition(") ")[2]: [cell.split(" ")[0] for cell in row[1:]] for row in rows}


def test_the_rates_are_those_that_were_measured() -> None:
    """The README's table has the medians of benchmarks/peers.md."""
    page = (ROOT / "README.md").read_text(encoding="utf-8").partition("## How fast")[2]
    trec = (FOLDER / "peers.md").read_text(encoding="utf-8").split("\n## ")[1]
    shown, rates = cells_of(page.split("\n\n")[2]), cells_of(trec.split("\n\n")[2])
    ratios = cells_of(trec, "| samples/s |")
    titles = [title for title in shown if title in rates and title != "system"]
    assert len(titles) == 7
    for title in titles:
        rate, padding, *ratio = shown[title]
        assert [rate, padding] == [rates[title][0], rates[title][2]]
        if not title.startswith("ours"):
            assert ratio[0] == ratios[title][1]


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
