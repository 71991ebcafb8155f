"""The layout of the generated project: which folder imports which, and how large everything is."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, template_files

PREFIX = "{{cookiecutter.project_slug}}/"
PROJECT = ROOT / PREFIX
FILES = [
    Path(name.removeprefix(PREFIX))
    for name in template_files()
    if name.startswith(PREFIX) and name.endswith(".py") and "/tests/" not in name
]
LEAVES = ["settings", "distributed"]
ARROWS = {
    "settings": [],
    "distributed": ["settings"],
    "dataset": LEAVES,
    "step": [*LEAVES, "dataset"],
    "checkpoint": LEAVES,
    "tracking": [*LEAVES, "dataset", "step", "checkpoint"],
    "launch": LEAVES,
    # The user's files: settings, what reads rows and trains a tokenizer, and pretrained.py.
    "model.py": ["settings", "dataset", "checkpoint"],
    "data.py": ["settings", "dataset"],
    "metrics.py": ["settings", "dataset"],
}
SEES_EVERYTHING = {Path("training/launch/worker.py")}  # the life of a rank


def tree(file: Path) -> ast.Module:
    """The file's code; without what only runs when data.py is a script of its own."""
    module = ast.parse((PROJECT / file).read_text(encoding="utf-8"))
    module.body = [
        statement
        for statement in module.body
        if not (isinstance(statement, ast.If) and "__main__" in ast.unparse(statement.test))
    ]
    return module


def imports(file: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of everything that a file imports, inside functions too."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)


def lines(*files: Path) -> int:
    return sum(len((PROJECT / file).read_text(encoding="utf-8").splitlines()) for file in files)


def of_folder(name: str) -> list[Path]:
    return [file for file in FILES if file.parts[:2] == ("training", name)]


@pytest.mark.parametrize("file", FILES, ids=str)
def test_arrows_run_one_way(file: Path) -> None:
    """A folder of training/ imports only those that the table allows."""
    own = file.parts[1] if file.parts[0] == "training" and len(file.parts) > 2 else str(file)
    if own not in ARROWS or file in SEES_EVERYTHING:
        return
    folders = {m.split(".")[1] for m, _ in imports(file) if m.startswith("training.")}
    assert folders <= {own, *ARROWS[own]}
    users_files = {"train", "model", "data", "metrics", "predict"}
    assert not users_files & {module for module, _ in imports(file)}


def test_no_file_imports_itself_by_a_detour() -> None:
    """The files' imports have an order: each can be read after those that it imports."""
    graph = {}
    for file in FILES:
        names = {f"{module}.{name}" for module, name in imports(file)}
        names |= {module for module, _ in imports(file)}
        others = {other: str(other.with_suffix("")).replace("/", ".") for other in FILES}
        graph[file] = {o for o, name in others.items() if name in names and o != file}
    while graph:
        done = {file for file, others in graph.items() if not others & graph.keys()}
        assert done, f"these import each other: {sorted(map(str, graph))}"
        graph = {file: others for file, others in graph.items() if file not in done}


def test_every_folder_says_what_it_is_for() -> None:
    """Seven folders of at most eight files; their __init__.py is a short docstring, no code."""
    folders = {file.parts[1] for file in FILES if file.parts[0] == "training" and file.parts[2:]}
    assert folders == {folder for folder in ARROWS if not folder.endswith(".py")}
    for folder in folders:
        first = Path("training", folder, "__init__.py")
        assert len(of_folder(folder)) - 1 <= 8, folder
        body = tree(first).body
        assert len(body) == 1, first
        text = ast.get_docstring(tree(first)) or ""
        assert 0 < len(text.splitlines()) <= 15, first
        assert "mports" in text or "imported" in text, first
        assert "first" in text, first


def test_it_stays_small() -> None:
    """Whoever makes a file larger than this looks for a simpler shape first."""
    too_long = {str(file): lines(file) for file in FILES if lines(file) > 250}
    assert not too_long
    functions = {
        f"{file}: {node.name}": node.end_lineno - node.lineno + 1
        for file in FILES
        for node in ast.walk(tree(file))
        if isinstance(node, ast.FunctionDef) and node.end_lineno
    }
    functions.pop("train.py: main")
    too_long = {name: length for name, length in functions.items() if length > 60}
    assert not too_long
    users = [Path(name) for name in ("train.py", "model.py", "data.py", "metrics.py")]
    users = [file for file in users if file in FILES]
    assert lines(*users) <= 600
    assert lines(*users, *of_folder("settings"), *of_folder("step")) <= 1900
    assert lines(*FILES) <= 8000  # with all that is planned


def test_no_setting_is_without_effect() -> None:
    """Each is read by name somewhere; those that ReadOptions has too, in `dataset/`."""

    def names(pattern: str, *files: Path) -> set[str]:
        code = [(PROJECT / file).read_text(encoding="utf-8") for file in files]
        return {name for text in code for name in re.findall(pattern, text)}

    def fields(file: str, name: str) -> set[str]:
        classes = (s for s in tree(Path(file)).body if isinstance(s, ast.ClassDef))
        body = next(s for s in classes if s.name == name).body
        return {
            s.target.id
            for s in body
            if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)
        }

    options = names(r"(?:options|self)\.(\w+)", *of_folder("dataset"))
    read = names(r"config\.(\w+)", *FILES)
    read |= options & fields("training/dataset/rows.py", "ReadOptions")
    assert fields("training/settings/config.py", "TrainConfig") <= read


def test_a_step_is_read_in_one_place() -> None:
    """train.py imports at most 25 names of training/, and has one function besides the imports."""
    names = [name for module, name in imports(Path("train.py")) if module.startswith("training")]
    assert len(names) <= 25
    code = [s for s in tree(Path("train.py")).body if isinstance(s, ast.FunctionDef | ast.ClassDef)]
    assert [statement.name for statement in code] == ["main"]
    nested = [n for n in ast.walk(code[0]) if isinstance(n, ast.FunctionDef)][1:]
    assert not nested, "a function inside main changes variables that are assigned far away"
