"""Checkpoints: written whole or not at all, verified when read, the newest kept.

`step-00000123/` holds the model and tokenizer in Hugging Face form, `state.pt` with everything else
that a run needs to go on to the bit, and `manifest.json` with the size and hash of each file.
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
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from training.settings.errors import UserError

log = logging.getLogger("training")
VERSION = 2
MANIFEST = "manifest.json"


def write_folder(folder: Path, write: Callable[[Path], None], step: int = 0, size: int = 0) -> None:
    """Make `folder` by `write`, under a temporary name, flushed to disk, then renamed.

    An existing `folder` is replaced, and is kept aside until the new one stands. On any error the
    temporary folder is removed and the old one is as it was. `size`: bytes that it needs, about.
    Errors: UserError when the disk is the fault.
    """
    writing = folder.with_name(f".writing-{folder.name}")
    old = folder.with_name(f".old-{folder.name}")
    shutil.rmtree(writing, ignore_errors=True)
    try:
        writing.mkdir()  # no parents: where the run's folder is gone, this is not the place
        write(writing)
        mode = writing.stat().st_mode & 0o666  # as umask says
        files = {}
        for path in sorted(p for p in writing.rglob("*") if p.is_file()):
            path.chmod(mode)  # safetensors keeps its files for their owner
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
        if folder.parent.is_dir() and not isinstance(error, PermissionError):
            free = shutil.disk_usage(folder.parent).free / 2**20
            reason += f" (it needs about {size / 2**20:,.1f} MiB, {free:,.1f} MiB are free)"
        raise UserError(f"cannot write {folder}: {reason}") from error
    finally:
        shutil.rmtree(writing, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def recover(folder: Path) -> None:
    """Tidy up in `folder` what a killed `write_folder` left: half a folder, or one set aside."""
    for half in folder.glob(".writing-*"):
        shutil.rmtree(half, ignore_errors=True)
    for old in folder.glob(".old-*"):
        whole = folder / old.name.removeprefix(".old-")
        if whole.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            os.replace(old, whole)


def save(
    folder: Path,
    step: int,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    weights: dict[str, torch.Tensor],
    state: dict[str, Any] | None = None,
) -> None:
    """Write the model and tokenizer so that `transformers` loads them, without the network.

    `weights`: a state of the model. `state`: what else a checkpoint holds.
    """

    def write(folder: Path) -> None:
        # A dict of its own: it takes the weights out of the one that it is given.
        model.save_pretrained(folder, state_dict=dict(weights))
        tokenizer.save_pretrained(folder)
        if state is not None:
            torch.save(state, folder / "state.pt")

    size = sum(t.nbytes for t in weights.values())
    write_folder(folder, write, step, size * (1 if state is None else 3))  # AdamW has two a weight


def remove_old(checkpoints: Path, keep: int) -> None:
    """Remove all but the newest `keep`, by number."""
    for _, old in saved(checkpoints)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def set_aside_after(checkpoints: Path, step: int) -> None:
    """Rename what is there of later steps, which a run that goes on from `step` makes anew.

    They are of another course of the run, or damaged; the user may want them all the same.
    """
    for number, folder in saved(checkpoints):
        if number > step:
            aside = folder.with_name(f"aside-{time.strftime('%Y%m%d-%H%M%S')}-{folder.name}")
            os.replace(folder, aside)
            log.warning("going on from step %d; set aside as %s: %s", step, aside.name, folder)


def saved(checkpoints: Path) -> list[tuple[int, Path]]:
    """The checkpoints in a folder, (step, path), oldest first, by number."""
    found = {}
    for path in sorted(checkpoints.glob("*step-*")):  # one that was set aside comes first
        if match := re.fullmatch(r"(?:\.old-)?step-(\d+)", path.name):
            found[int(match[1])] = path
    return sorted(found.items())


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


def load_state(content: bytes, folder: Path) -> dict[str, Any]:
    """The content of `folder`'s state.pt. Only tensors and plain types are ever unpickled.

    Errors: UserError when there is anything else in it.
    """
    try:
        return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{folder}/state.pt holds more than data, not loaded: {reason}") from None


def check_same_run(saved: dict[str, Any], now: dict[str, Any], insist: bool) -> None:
    """Refuse to continue a run with settings under which it would have learned something else,
    unless told to `insist`."""
    if saved["total_steps"] != now["total_steps"]:
        log.warning(
            "the schedule was made for %d steps and now is for %d: the learning rate goes on from "
            "where it would be then", saved["total_steps"], now["total_steps"],
        )  # fmt: skip
        saved = saved | {"total_steps": now["total_steps"]}
    different = [k for k in now if _plain(saved.get(k)) != _plain(now[k])]
    if not different:
        return
    shown = "; ".join(f"{k} was {saved.get(k)!r}, now {now[k]!r}" for k in different)
    if not insist:
        raise UserError(
            f"this run cannot be continued with other settings: {shown:.500}; give another "
            "--run-name to start a new one, or insist with --resume-anyway"
        )
    log.warning("continued anyway, though rows may come twice or never in this epoch: %s", shown)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
