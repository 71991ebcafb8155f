"""The edits in edits/: what users change in a project, each as a patch with a few words before it.

`python tools/edits.py` writes the table of docs/edits.md from them; `test_edits.py` makes each edit
in a new project. If a patch no longer applies, that is an error: correct it by hand.
"""

import os
import re
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

EDITS = Path(__file__).resolve().parent / "edits"
PAGE = EDITS.parent.parent / "docs" / "edits.md"
INTRODUCTION = """# Edits that stay right

What users change in a project, and what is checked of each. `tests/edits/` has them as patches, and
`tests/test_edits.py` makes each one in a new project. This page is written by
`python tools/edits.py`.

Of each edit it is checked that

- it trains on two ranks, and writes the report and the results;
- a run that was stopped and resumed ends with bit-identical weights and state;
- all losses, of training and validation, are the same to 1e-5 for 1 rank × 32 rows and for
  2 ranks × 2 accumulation steps × 8 rows;
- `predict.py` gives the probabilities of the evaluation, from a `best/` that was moved away, with
  the encoder's folder, the token store and the run gone;
- the project's own quick tests pass as they are;
- the project's README names the files, in "Edit this to change that".

"""


@dataclass(frozen=True)
class Edit:
    name: str
    title: str
    readme: list[str]  # how rows of the README's table begin, which name the files
    checked: str  # besides what is checked of all
    settings: list[str]  # lines of config.toml
    files: dict[str, tuple[int, int]]  # lines that were added and removed
    new_files: list[str]

    @property
    def patch(self) -> Path:
        return EDITS / f"{self.name}.patch"


def read(patch: Path) -> Edit:
    words, *diffs = re.split("^diff --git ", patch.read_text("utf-8"), flags=re.MULTILINE)
    title, *facts = filter(None, words.splitlines())
    values: dict[str, list[str]] = {"Row of the README": [], "Also checked": [], "Setting": []}
    for fact in facts:
        key, _, value = fact.partition(": ")
        values[key].append(value)
    files, new_files = {}, []
    for diff in diffs:
        head, *places = re.split("^@@.*\n", diff, flags=re.MULTILINE)
        name = head.partition("+++ b/")[2].strip()
        marks = Counter(line[:1] for place in places for line in place.splitlines())
        files[name] = marks["+"], marks["-"]
        new_files += [name] if "--- /dev/null" in head else []
    return Edit(patch.stem, title.rstrip("."), values["Row of the README"],
                "; ".join(values["Also checked"]), values["Setting"], files, new_files)  # fmt: skip


def read_all() -> list[Edit]:
    return [read(patch) for patch in sorted(EDITS.glob("*.patch"))]


def apply(edit: Edit, project: Path) -> None:
    """Make the edit in a project. Errors: AssertionError if the patch does not apply."""
    # In a repository's subfolder, git would leave out silently what is not in it.
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(project.resolve().parent)}
    done = subprocess.run(["git", "apply", str(edit.patch)], cwd=project, env=environment,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, f"{edit.patch} does not apply: {done.stderr}"


def rows_of_readme(readme: str) -> dict[str, set[str]]:
    """The table "Edit this to change that": what to change, and the files that are named for it."""
    table = readme.partition("## Edit this to change that\n\n")[2].partition("\n\n")[0]
    rows = [line.strip("| ").split(" | ", 1) for line in table.splitlines()[2:]]
    return {first: set(re.findall(r"`([\w/]+\.(?:py|toml))`", rest)) for first, rest in rows}


def page(edits: list[Edit]) -> str:
    """docs/edits.md"""
    lines = ["| edit | files to open | lines added, removed | also checked |", "|---|---|---|---|"]
    for edit in edits:
        names = ", ".join(
            f"`{name}`" + (" (new)" if name in edit.new_files else "") for name in edit.files
        )
        added, removed = (sum(counts) for counts in zip(*edit.files.values(), strict=True))
        link = f"[{edit.title}](../tests/edits/{edit.patch.name})"
        cells = link, f"{len(edit.files)}: {names}", f"+{added} −{removed}", edit.checked
        lines.append(f"| {' | '.join(cells)} |".replace("  ", " "))
    return INTRODUCTION + "\n".join(lines) + "\n"
