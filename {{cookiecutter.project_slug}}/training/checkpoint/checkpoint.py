"""Checkpoints: written whole or not at all, verified when read, the newest kept.

`step-00000123/` holds the model (see model_folder.py), `state.pt` with everything else that a run
needs to resume bit-identically, and `manifest.json` with size and hash of each file.
"""

import hashlib
import io
import json
import logging
import os
import pickle
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from training.settings.errors import UserError

log = logging.getLogger("training")
FORMAT = 5
MANIFEST = "manifest.json"
# safetensors and torch.save have no error type of their own for a disk that fails.
DISK_ERROR = re.compile(r"os error|file write|writing file")


def write_folder(folder: Path, write: Callable[[Path], None], step: int = 0, size: int = 0) -> None:
    """Make `folder` by `write`, under a temporary name, flushed to disk, then renamed.

    An existing `folder` is replaced only when the new one is complete. `size`: about how many bytes
    it needs. Errors: UserError if the disk is at fault.
    """
    writing = folder.with_name(f".writing-{folder.name}")
    old = folder.with_name(f".old-{folder.name}")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        writing.mkdir()  # no parents: if the run's folder was removed, it is not made again
        write(writing)
        mode = writing.stat().st_mode & 0o666  # as umask says
        files = {}
        for path in sorted(p for p in writing.rglob("*") if p.is_file()):
            path.chmod(mode)  # safetensors keeps its files for their owner
            _sync(path)
            name = path.relative_to(writing).as_posix()
            files[name] = {"size": path.stat().st_size, "sha256": _digest(path)}
        manifest = json.dumps({"version": FORMAT, "step": step, "files": files}, indent=1)
        (writing / MANIFEST).write_text(manifest, encoding="utf-8")
        _sync(writing / MANIFEST)
        _sync(writing)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(folder, old)
        os.replace(writing, folder)
        _sync(folder.parent)
    except (OSError, RuntimeError, SafetensorError) as error:
        if not isinstance(error, OSError) and not DISK_ERROR.search(str(error)):
            raise
        reason = getattr(error, "strerror", None) or str(error)
        if folder.parent.is_dir() and not isinstance(error, PermissionError):
            free = shutil.disk_usage(folder.parent).free / 2**20
            reason += f" (it needs about {size / 2**20:,.1f} MiB, {free:,.1f} MiB are free)"
        raise UserError(f"cannot write {folder}: {reason}") from error
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def recover(folder: Path) -> None:
    """Clean up after a `write_folder` that was killed: remove incomplete folders, and give a
    complete one that was about to be replaced its name back."""
    for incomplete in folder.glob(".writing-*"):
        shutil.rmtree(incomplete, ignore_errors=True)
    for old in folder.glob(".old-*"):
        complete = folder / old.name.removeprefix(".old-")
        if complete.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(old, complete)


def rename_later(checkpoints: Path, step: int) -> None:
    """Rename checkpoints of later steps, which a run that resumes from `step` will write again."""
    for number, folder in saved(checkpoints):
        if number > step:
            aside = folder.with_name(f"aside-{time.strftime('%Y%m%d-%H%M%S')}-{folder.name}")
            os.replace(folder, aside)
            log.warning(f"resuming from step {step}; {folder} is renamed to {aside.name}")


def saved(checkpoints: Path) -> list[tuple[int, Path]]:
    """The checkpoints in a folder, (step, path), oldest first, by number."""
    found = {}
    for path in sorted(checkpoints.glob("*step-*")):  # .old-step-... sorts first
        if match := re.fullmatch(r"(?:\.old-)?step-(\d+)", path.name):
            found[int(match[1])] = path
    return sorted(found.items())


def problem_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None. Errors: UserError for another format version."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["version"] != FORMAT:
            raise UserError(
                f"{folder} has checkpoint format {manifest['version']}, this code reads format "
                f"{FORMAT}; resume it with the code that wrote it, or give another --run-name"
            )
        for name, expected in manifest["files"].items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if (size := path.stat().st_size) != expected["size"]:
                return f"{name} has {size} bytes instead of {expected['size']}"
            if _digest(path) != expected["sha256"]:
                return f"{name} has changed since it was written"
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        return f"{MANIFEST}: {error}"
    return None


def step_of(folder: Path) -> int:
    """The step whose weights are in a folder that is known to be good."""
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["step"]


def newest(checkpoints: Path) -> Path | None:
    """The newest good checkpoint; damaged ones are skipped with a warning.

    Errors: UserError if there are checkpoints and none is good: the run must not silently start
    again from step 0.
    """
    found = saved(checkpoints)
    for _, folder in reversed(found):
        problem = problem_of(folder)
        if problem is None:
            return folder
        log.warning(f"skipping the damaged checkpoint {folder}: {problem}")
    if found:
        raise UserError(
            f"none of the {len(found)} checkpoints in {checkpoints} can be read; "
            "give another --run-name to start from the beginning"
        )
    return None


def check_content(name: str, content: Any) -> None:
    """Errors: UserError unless state.pt can hold `content` and be read again."""
    file = io.BytesIO()
    try:
        torch.save(content, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.PickleError, AttributeError, TypeError):
        rule = "tensors, numbers, texts, and lists and dicts of them"
        raise UserError(f"{name} has a state that a checkpoint cannot hold: only {rule}") from None


def load_state(folder: Path) -> dict[str, Any]:
    """The content of state.pt. Errors: UserError if it is more than tensors and plain types."""
    try:
        return torch.load(folder / "state.pt", map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{folder}/state.pt holds more than data, not loaded: {reason}") from None
