"""What is said of versions of torch and transformers is the same everywhere, and was tried."""

import ast
import re
import tomllib
from pathlib import Path

from conftest import ROOT

PROJECT = ROOT / "{{cookiecutter.project_slug}}"


def oldest() -> dict[str, str]:
    """The oldest supported versions, by name: OLDEST of versions.py."""
    code = ast.parse((PROJECT / "training" / "settings" / "versions.py").read_text("utf-8"))
    (value,) = (s.value for s in code.body if isinstance(s, ast.Assign))
    return {k: ".".join(map(str, numbers)) for k, numbers in ast.literal_eval(value).items()}


def bounds(names: list[str]) -> dict[str, str]:
    return dict(name.split(">=") for name in names if name.split(">=")[0] in oldest())


def test_the_lower_bounds_are_the_same_everywhere() -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text("utf-8"))["project"]
    group = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["dependency-groups"]
    assert bounds(project["dependencies"]) == bounds(group["test"]) == oldest()
    for file in (ROOT / "docs" / "versions.md", ROOT / "README.md", PROJECT / "README.md"):
        text = " ".join(file.read_text("utf-8").split())
        said = " and ".join(f"{name} {version} and later" for name, version in oldest().items())
        assert said in text, f"{file.relative_to(ROOT)} does not say: {said}"


def test_the_oldest_and_the_newest_were_tried() -> None:
    """docs/versions.md has a row of both with the oldest of the other, and all is well in each."""
    text = Path(ROOT, "docs", "versions.md").read_text("utf-8")
    table = text.partition("|---|")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n")[1:]]
    for column, version in enumerate(oldest().values()):
        versions = {row[column] for row in rows}
        assert any(v.startswith(f"{version}.") for v in versions) and len(versions) > 1
    for row in rows:
        assert row[2:-1] == ["yes"] * 4
        assert re.fullmatch(r"\d+ passed(, \d+ skipped)?", row[-1])
