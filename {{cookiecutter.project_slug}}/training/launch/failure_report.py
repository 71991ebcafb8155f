"""A failed run in a few lines: which rank failed first, why, and where in the project."""

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

from training.settings.config import PROJECT
from training.settings.errors import HUNG, STOPPED_EARLY, USER_ERROR

STOPPED_EARLY_CODES = (STOPPED_EARLY, -signal.SIGTERM, -signal.SIGUSR1, -signal.SIGINT)


def report_failures(failures: dict[int, Any], stop_signals: list[int], log_dir: str) -> int:
    """Print which rank failed first, why and where; return the launcher's exit code.

    `failures`: torchrun's ProcessFailure by rank. `stop_signals`: what the launcher has received.
    """
    rank, first = min(failures.items(), key=failure_order)
    code = exit_code(first)
    asked = failures.values() if stop_signals else [first]  # else the others ended because of it
    if any(exit_code(failure) in STOPPED_EARLY_CODES for failure in asked):
        print("launch: stopped while starting; there was nothing to save", file=sys.stderr)
        return 128 + stop_signals[0] if stop_signals else STOPPED_EARLY
    if code == USER_ERROR and 0 in failures and failures[0].exitcode == USER_ERROR:
        return USER_ERROR  # rank 0 has printed why
    error, details = _recorded_error(first)
    logs = sorted(Path(log_dir).glob(f"*/attempt_*/{first.local_rank}/stderr.log"))
    shows_log = logs and not (code in (USER_ERROR, HUNG) and error)
    log_tail = logs[-1].read_text("utf-8", "replace").splitlines()[-20:] if shows_log else []
    if code == HUNG:
        report = [f"launch: {error}"]
    elif code == USER_ERROR:
        report = [] if log_tail else [f"launch: rank {rank}: {error or 'ended with exit code 2'}"]
    else:
        reason = f"{describe_exit(first)}: {error}" if error else describe_exit(first)
        if others := ", ".join(str(other) for other in sorted(failures) if other != rank):
            details.append(f"ended because of that: rank {others}")
        details.append(f"output of all ranks but the first of this machine: {log_dir}")
        report = [f"launch: rank {rank} failed first, {reason}", *(f"  {line}" for line in details)]
    print(*log_tail, *report, sep="\n", file=sys.stderr)
    return code if code > 0 else 128 - code


def exit_code(failure: Any) -> int:
    """Of a rank; 1 if it has recorded its error, and torchrun's SIGTERM met it on its way out."""
    recorded = os.path.isfile(failure.error_file)
    return 1 if recorded and failure.exitcode == -signal.SIGTERM else failure.exitcode


def describe_exit(failure: Any) -> str:
    """How a rank ended, in words."""
    code = exit_code(failure)
    if code >= 0:
        return f"exit code {code}"
    if code == -signal.SIGKILL:
        return "killed by SIGKILL: probably out of memory (killed by the kernel)"
    return f"killed by {signal.Signals(-code).name}"


def failure_order(item: tuple[int, Any]) -> tuple[bool, float, int]:
    """Sorts failures by time; those that another rank's failure has caused come last."""
    rank, failure = item
    seconds = failure.timestamp + 1
    if os.path.isfile(failure.error_file):
        seconds = os.stat(failure.error_file).st_mtime
    elif failure.exitcode == -signal.SIGKILL:
        # Known in whole seconds, of when it was noticed; by then others may have recorded that the
        # connection to it was lost. The launcher's own SIGKILL comes five seconds after a failure.
        seconds = failure.timestamp - 2
    is_repeated = "MainProcessError: " in str(failure.message)
    return is_repeated or exit_code(failure) == -signal.SIGTERM, seconds, rank


def _recorded_error(failure: Any) -> tuple[str, list[str]]:
    """A line that describes the exception that a rank has recorded; its place and its notes."""
    if not isinstance(failure.message, dict):
        return "", []
    # PyTorch records "Type: text" and Python's traceback, both only as text.
    kind, _, text = failure.message["message"].partition(": ")
    summary = text.strip().partition("\n")[0].rstrip()
    if kind != "UserError":
        summary = f"{kind}: {summary}" if summary else kind
    traceback = failure.message["extraInfo"]["py_callstack"]
    frames = re.findall(r'File "(.+?)", line (\d+), in (\S+)', traceback)
    frames = [f for f in frames if f[0].startswith(f"{PROJECT}{os.sep}")] or frames
    details = ["at {}:{} in {}".format(*frame) for frame in frames[-1:]]
    return summary, details + re.findall(r"^(?:in|hint): .*", traceback, re.MULTILINE)
