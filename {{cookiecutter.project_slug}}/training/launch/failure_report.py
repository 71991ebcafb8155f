"""A failed run in a few lines: which rank failed first, why, and where in the project."""

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from training.settings.config import PROJECT
from training.settings.errors import HUNG, STOPPED_EARLY, USER_ERROR


def report_failures(failures: dict[int, Any], asked: list[int], log_dir: str) -> int:
    """Tell which rank failed first, why and where, in a few lines; return the exit code.

    `failures`: by rank, torchrun's ProcessFailure of each that did not end with exit code 0.
    """
    rank, first = min(failures.items(), key=failure_order)
    stopped = [-number for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    ends = [failure.exitcode for failure in failures.values()] if asked else [first.exitcode]
    if any(code in (*stopped, STOPPED_EARLY) for code in ends):
        print("launch: stopped while starting; there was nothing to save", file=sys.stderr)
        return 128 + asked[0] if asked else STOPPED_EARLY
    error, where, hints = _recorded(first)
    if first.exitcode == USER_ERROR and 0 in failures and failures[0].exitcode == USER_ERROR:
        return USER_ERROR  # rank 0 has said why
    lines = []
    logs = sorted(Path(log_dir).glob(f"*/attempt_*/{first.local_rank}/stderr.log"))
    if logs and not (first.exitcode in (USER_ERROR, HUNG) and error):
        lines += logs[-1].read_text("utf-8", "replace").splitlines()[-20:]
    if first.exitcode == USER_ERROR:
        lines = lines or [f"launch: rank {rank}: {error or 'ended with exit code 2'}"]
    elif first.exitcode == HUNG:
        lines.append(f"launch: {error}")
    else:
        lines.append(f"launch: rank {rank} failed first, {describe_exit(first)}")
        lines[-1] += f": {error}" if error else ""
        lines += [f"  at {where}"] if where else []
        lines += [f"  {hint}" for hint in hints]
        others = ", ".join(str(other) for other in sorted(failures) if other != rank)
        lines += [f"  after it ended: rank {others}"] if others else []
        lines.append(f"  what each rank but the first of this machine printed: {log_dir}")
    print(*lines, sep="\n", file=sys.stderr)
    return first.exitcode if first.exitcode > 0 else 128 - first.exitcode


def describe_exit(failure: Any) -> str:
    """How a rank ended, in words."""
    if failure.exitcode >= 0:
        return f"exit code {failure.exitcode}"
    hint = " (was memory short?)" if failure.exitcode == -signal.SIGKILL else ""
    return f"killed by {signal.Signals(-failure.exitcode).name}{hint}"


def failure_order(item: tuple[int, Any]) -> tuple[bool, float, int]:
    """Sorts failures by time. A rank that torchrun ended with SIGTERM is never the first."""
    rank, failure = item
    if os.path.isfile(failure.error_file):
        seconds = os.stat(failure.error_file).st_mtime
    elif failure.exitcode == -signal.SIGKILL:
        # Known in whole seconds, of when it was noticed; by then others may have recorded that the
        # connection to it was lost. torchrun's own SIGKILL comes five seconds after a failure.
        seconds = failure.timestamp - 2
    else:
        seconds = failure.timestamp + 1
    return failure.exitcode == -signal.SIGTERM, seconds, rank


def _recorded(failure: Any) -> tuple[str, str, list[str]]:
    """The first line of the exception that a rank recorded, where in the project it arose, and
    what was noted about it."""
    if not isinstance(failure.message, dict):
        return "", "", []
    stack = failure.message["extraInfo"]["py_callstack"]
    frames = re.findall(r'File "(.+?)", line (\d+), in (\S+)', stack)
    frames = [f for f in frames if f[0].startswith(f"{PROJECT}{os.sep}")] or frames
    where = "{}:{} in {}".format(*frames[-1]) if frames else ""
    hints = re.findall(r"^(?:in|hint): .*", stack, re.MULTILINE)
    return failure.message["message"].partition("\n")[0].removeprefix("UserError: "), where, hints
