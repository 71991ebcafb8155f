"""Checkpoints: written whole or not at all, verified when read, the newest kept.

`step-00000123/` holds the model and tokenizer in Hugging Face form, `state.pt` with everything else
that a run needs to go on to the bit, and `manifest.json` with the size and hash of each file.
"""

import hashlib
import io
import json
import logging
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.config import UserError

log = logging.getLogger("training")
VERSION = 1
MANIFEST = "manifest.json"


def write_folder(folder: Path, write: Callable[[Path], None], step: int = 0) -> None:
    """Make `folder` by `write`, under a temporary name, flushed to disk, then renamed.

    An existing `folder` is replaced, and is kept aside until the new one stands. On any error the
    temporary folder is removed and the old one is as it was.
    """
    writing = folder.with_name(f".writing-{folder.name}")
    old = folder.with_name(f".old-{folder.name}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(writing, ignore_errors=True)
    try:
        writing.mkdir()
        write(writing)
        files = {}
        for path in sorted(p for p in writing.rglob("*") if p.is_file()):
            path.chmod(0o666 & ~_umask())  # safetensors keeps its files for their owner
            with path.open("rb+") as file:
                os.fsync(file.fileno())
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            name = path.relative_to(writing).as_posix()
            files[name] = {"size": path.stat().st_size, "sha256": digest}
        manifest = json.dumps({"version": VERSION, "step": step, "files": files}, indent=1)
        with (writing / MANIFEST).open("w", encoding="utf-8") as file:
            file.write(manifest)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(writing)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
            os.replace(folder, old)
        os.replace(writing, folder)
        _sync_folder(folder.parent)
    except (OSError, RuntimeError, SafetensorError) as error:
        if not (
            isinstance(error, OSError) or re.search(r"os error|file write|writing file", str(error))
        ):
            raise  # no fault of the disk
        reason = getattr(error, "strerror", None) or str(error)
        free = shutil.disk_usage(folder.parent).free / 2**20
        raise UserError(f"cannot write {folder}: {reason} ({free:,.0f} MiB are free)") from error
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _umask() -> int:
    os.umask(mask := os.umask(0o077))
    return mask


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def recover(folder: Path) -> None:
    """Put back what `write_folder` had set aside when it was killed between its two renames."""
    old = folder.with_name(f".old-{folder.name}")
    if old.exists() and not folder.exists():
        os.replace(old, folder)


def export(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, step: int
) -> None:
    """Write the model and tokenizer so that `transformers` loads them, without the network."""

    def write(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    write_folder(folder, write, step)


def save(
    checkpoints: Path,
    step: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    state: dict[str, Any],
    keep: int,
) -> Path:
    """Write the checkpoint of `step`; only then remove all but the newest `keep` of this run."""

    def write(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        torch.save(state, folder / "state.pt")

    folder = checkpoints / f"step-{step:08d}"
    write_folder(folder, write, step)
    for _, old in saved(checkpoints)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def saved(checkpoints: Path) -> list[tuple[int, Path]]:
    """The checkpoints in a folder, (step, path), oldest first, by number."""
    found = []
    for path in checkpoints.glob("step-*"):
        if match := re.fullmatch(r"step-(\d+)", path.name):
            found.append((int(match[1]), path))
    return sorted(found)


def problem_of(folder: Path) -> str | None:
    """What is wrong with a checkpoint, or None. Errors: UserError for another format version."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["version"] != VERSION:
            raise UserError(
                f"{folder} has checkpoint format {manifest['version']}, this code reads {VERSION}"
            )
        for name, expected in manifest["files"].items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != expected["size"]:
                return f"{name} has {path.stat().st_size} bytes instead of {expected['size']}"
            with path.open("rb") as file:
                if hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                    return f"{name} has changed since it was written"
    except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
        return f"{MANIFEST}: {error}"
    return None


def step_of(folder: Path) -> int:
    """The step whose weights are in a folder that is known to be good."""
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["step"]


def newest(checkpoints: Path) -> Path | None:
    """The newest good checkpoint; a damaged one is passed over with a warning.

    Errors: UserError when there are checkpoints and none is good: to start again from step 0
    without a word would cost the user what the run has learned.
    """
    found = saved(checkpoints)
    for _, folder in reversed(found):
        problem = problem_of(folder)
        if problem is None:
            return folder
        log.warning("passing over the damaged checkpoint %s: %s", folder, problem)
    if found:
        raise UserError(
            f"none of the {len(found)} checkpoints in {checkpoints} can be read; "
            "give another --run-name to start again"
        )
    return None


def load_state(content: bytes) -> dict[str, Any]:
    """The content of `state.pt`. Only tensors and plain types are ever unpickled."""
    return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)


def check_same_run(saved: dict[str, Any], now: dict[str, Any]) -> None:
    """Refuse to continue a run with settings under which it would have learned something else."""
    if saved["total_steps"] != now["total_steps"]:
        log.warning(
            "the schedule was made for %d steps and now is for %d: the learning rate goes on from "
            "where it would be then", saved["total_steps"], now["total_steps"],
        )  # fmt: skip
        saved = saved | {"total_steps": now["total_steps"]}
    different = [k for k in now if _plain(saved.get(k)) != _plain(now[k])]
    if different:
        shown = "; ".join(f"{k} was {saved.get(k)!r}, now {now[k]!r}" for k in different)
        raise UserError(
            f"this run cannot be continued with other settings: {shown:.500}; "
            "give another --run-name to start a new one"
        )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
