"""Errors that one line explains, and the exit codes of a rank."""

import difflib
import errno
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

USER_ERROR = 2  # exit code of a rank whose error is reported in one line
HUNG = 3  # ... that gave up waiting for another rank
STOPPED_EARLY = 143  # ... that was asked to stop before there was anything to save
DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)  # full or read-only: to be fixed


class UserError(ValueError):
    """A mistake that the user can fix: shown as one line, without a traceback."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ', did you mean X?' with the closest of `known`, or '' if none is close."""
    folded = {other.strip().casefold(): other for other in known}
    match = difflib.get_close_matches(name.strip().casefold(), folded, n=1)
    return f", did you mean {folded[match[0]]}?" if match else ""


def needs_no_traceback(error: BaseException) -> bool:
    """Whether the error's own line says all that the user needs."""
    on_disk = isinstance(error, OSError) and error.errno in DISK
    return on_disk or isinstance(error, UserError | FileNotFoundError | PermissionError)


@contextmanager
def explain_disk_errors(path: Path) -> Iterator[None]:
    """Turn a full or read-only disk into a UserError that names `path`, as OSError may not."""
    try:
        yield
    except OSError as error:
        if not needs_no_traceback(error):
            raise
        raise UserError(f"cannot write {path}: {error.strerror}") from error
