"""Folders that are expensive to make: one process makes them, and all others use them."""

import ast
import hashlib
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from training.distributed import watchdog
from training.distributed.ranks import has_terminal
from training.settings.errors import explain_disk_errors

log = logging.getLogger("training")


def build_once(folder: Path, build: Callable[[Path], None], what: str) -> Path:
    """Return `folder`; if it is missing, one process makes `what` with `build`, others wait."""
    deadline = time.monotonic() + (0.0 if has_terminal() else 1.0)
    while time.monotonic() < deadline and not folder.exists():
        time.sleep(0.01)  # the rank whose progress bar can be seen builds first
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(f"{folder}.lock")  # the system releases it when its process is killed
    with suppress(Timeout):
        lock.acquire(0)
    if not lock.is_locked:
        log.info("waiting for the process that prepares %s (%s.lock)", what, folder)
    while not lock.is_locked:
        watchdog.heartbeat()  # it may take hours, and nothing is wrong
        with suppress(Timeout):
            lock.acquire(5.0)
    building = folder.with_name(f".building-{folder.name}")
    try:
        if not folder.exists():
            shutil.rmtree(building, ignore_errors=True)  # of a process that was killed
            building.mkdir()
            with explain_disk_errors(building):
                build(building)
            building.replace(folder)  # an interrupted build leaves nothing that looks complete
    finally:
        shutil.rmtree(building, ignore_errors=True)
        lock.release()
    return folder


def content_key(*parts: Any) -> str:
    """A short hash of `parts`, for the name of what is made from them."""
    text = json.dumps(parts, ensure_ascii=False, sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def code_of(file: Path) -> dict[str, str]:
    """The code of a module and of all modules of its project that it imports, also inside functions
    and by a detour: {path: code}. The machinery in training/ is left out."""
    file = file.resolve()
    root, found, waiting = file.parent, {}, [file]
    while waiting:
        file = waiting.pop()
        name, code = file.relative_to(root).as_posix(), file.read_bytes()
        found[name] = code.decode("utf-8", "replace")
        tree = ast.parse(code, str(file))
        tree.body = [node for node in tree.body if not _is_script(node)]
        for other in _imported_files(tree, file, root):
            if not other.is_file() or root not in other.parents:
                continue
            inside = [parent for parent in other.parents if root in parent.parents]
            foreign = any((parent / "pyvenv.cfg").exists() for parent in inside)
            name = other.relative_to(root).as_posix()
            if not foreign and not name.startswith("training/") and name not in found:
                waiting.append(other)
    return found


def _is_script(node: ast.stmt) -> bool:
    """Whether it is `if __name__ == "__main__"`: the rows do not depend on that."""
    return isinstance(node, ast.If) and "__main__" in ast.dump(node.test)


def _imported_files(tree: ast.AST, file: Path, root: Path) -> Iterator[Path]:
    """The files that the imports of `file` would name in its project, whether they exist or not."""
    for node in ast.walk(tree):
        names, base = [], root
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            prefix = f"{node.module}." if node.module else ""
            names = [prefix + alias.name for alias in node.names]
            base = file.parents[node.level - 1] if node.level else root
        for name in names:
            folder = base
            yield folder / "__init__.py"
            for part in name.split("."):
                yield folder / f"{part}.py"
                folder /= part
                yield folder / "__init__.py"
