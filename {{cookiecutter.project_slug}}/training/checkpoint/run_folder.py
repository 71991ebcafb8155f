"""A run's folder: its name, who may write to it, and the checkpoint that it resumes from."""

import os
import shutil
import time
from pathlib import Path

from filelock import FileLock, Timeout

from training.checkpoint import checkpoint
from training.checkpoint.state import Progress
from training.distributed import watchdog
from training.distributed.ranks import on_main, restart_count
from training.settings.config import TrainConfig
from training.settings.errors import UserError

_locks: list[FileLock] = []  # the system frees them when the process ends, however it ends


def choose(config: TrainConfig) -> tuple[Path, Path | None]:
    """The run's folder, not created yet, and the checkpoint that it resumes from, if any.

    Call on every rank. Errors: UserError if the folder cannot be used.
    """
    return on_main(lambda: _choose(config))


def _choose(config: TrainConfig) -> tuple[Path, Path | None]:
    runs_dir, source = Path(config.runs_dir), None
    if config.resume not in ("auto", "never"):
        source = Path(config.resume)
        if not source.is_dir():
            raise UserError(f"--resume {source}: no such folder; give a run or a checkpoint")
    restarted = restart_count() > 0
    if config.run_name is not None:
        run = runs_dir / config.run_name
    elif source is not None:  # the run that the checkpoint belongs to
        run = source.parent.parent if source.parent.name == "checkpoints" else source
    else:
        now = time.strftime("%Y%m%d-%H%M%S")
        candidates = [runs_dir / now, *(runs_dir / f"{now}-{n}" for n in range(2, 1000))]
        run = next(path for path in candidates if not path.exists())
    _check_writable(run)
    if restarted and (own := checkpoint.newest(run / "checkpoints")):
        return run, own  # by --max-restarts: --resume was for the first start
    if config.resume == "never" and not restarted and run.exists() and any(run.iterdir()):
        raise UserError(f"{run} exists; give another --run-name, or --resume auto to continue it")
    if source is not None and (source / checkpoint.MANIFEST).exists():
        if problem := checkpoint.problem_of(source):
            raise UserError(f"--resume {source}: {problem}")
        return run, source
    found = checkpoint.newest((source or run) / "checkpoints")
    if source is not None and found is None:
        raise UserError(f"--resume {source}: there is no checkpoint in it")
    return run, found


def _check_writable(run: Path) -> None:
    """Errors: UserError now, instead of at the first checkpoint."""
    parent = next(path for path in (run, *run.parents) if path.exists())
    if not parent.is_dir():
        raise UserError(f"cannot make the run folder {run}: {parent} is not a folder")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"cannot write the run folder {run}: no permission in {parent}")


def claim(run: Path, source: Path | None, progress: Progress) -> None:
    """Create the folder and lock other runs out of it. Call on every rank.

    A run that resumes from another run's checkpoint `source` takes over its best weights, if they
    are still those of `progress.best_step`. Errors: UserError if another process trains there.
    """
    if not on_main(lambda: _claim(run, source, progress)):
        progress.forget_best()
    watchdog.errors_folder = run / "errors"


def _claim(run: Path, source: Path | None, progress: Progress) -> bool:
    """As `claim`. Returns whether there are best weights."""
    try:
        (run / "checkpoints").mkdir(parents=True, exist_ok=True)
        lock = FileLock(run / ".lock", blocking=False)
        lock.acquire()
    except Timeout:
        raise UserError(f"another process is training in {run}; give another --run-name") from None
    except OSError as error:
        raise UserError(f"cannot write the run folder {run}: {error.strerror}") from None
    _locks.append(lock)
    checkpoint.recover(run)
    checkpoint.recover(run / "checkpoints")
    checkpoint.rename_later(run / "checkpoints", progress.step)
    if source is not None and not (run / "best").exists():
        best = source.parent.parent / "best"
        if checkpoint.problem_of(best) is None and checkpoint.step_of(best) == progress.best_step:
            shutil.copytree(best, run / "best")
    return (run / "best").exists()


def release() -> None:
    """Unlock the folder."""
    while _locks:
        _locks.pop().release()
