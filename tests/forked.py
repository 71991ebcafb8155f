"""Launches that need no imports: the project's launcher, forked from a process that has done them.

It is for tests of what the launcher and its ranks do once they run; `launch.sh`, and what happens
while Python starts, need a real launch.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

TIMEOUT_S = 120.0  # a bound for what hangs, not a promise

# Forks a launcher for each line that it reads. With "fork ranks" their ranks are forked too, in the
# place of `subprocess.Popen`, and have imported what `train.py` needs.
SERVER = """
import json, logging, os, signal, subprocess, sys, time, traceback
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler
from training.launch import agent, launcher
from training.settings.flags import parse_args

if sys.argv[1] == "fork ranks":
    import matplotlib.figure, sklearn.metrics, torch.utils.tensorboard
    import train
    from training.launch import worker


def enter(stdout, stderr, environment):
    os.setsid()
    for stream, file in ((stdout, 1), (stderr, 2)):
        if stream is not None:
            os.dup2(stream if isinstance(stream, int) else stream.fileno(), file)
    os.environ.clear()
    os.environ.update(environment)
    for number in (*agent.STOP_SIGNALS, signal.SIGQUIT, signal.SIGCHLD, signal.SIGALRM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def leave(function, *arguments):
    try:
        code = function(*arguments) or 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)


class Rank:
    def __init__(self, args, env, stdout, stderr, start_new_session):
        self.returncode, self.pid = None, os.fork()
        if self.pid == 0:
            enter(stdout, stderr, env)
            logging.disable(logging.NOTSET)
            sys.argv = [word for word in args if word.endswith("train.py")][:1]
            sys.argv += args[args.index(sys.argv[0]) + 1 :]
            leave(lambda: worker.run(train.main, parse_args(sys.argv[1:])))

    def poll(self):
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout):
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.01)


if sys.argv[1] == "fork ranks":
    subprocess_handler.Popen = Rank
pid = os.fork()
if pid == 0:
    leave(exec, sys.argv[2], {"sys": sys})
if os.waitpid(pid, 0)[1]:
    sys.exit(1)
sys.stdout.reconfigure(write_through=True)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    words, environment, output, folder, umask, ignored = json.loads(line)
    if os.fork():
        continue
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid:  # waits for the launcher, and writes its exit code
        print(pid)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with open(output + ".writing", "w") as file:
            file.write(str(code))
        os.rename(output + ".writing", output + ".code")
        os._exit(0)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    out = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    enter(out, out, environment)
    os.chdir(folder)
    os.umask(umask)
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)
    leave(launcher.main, words)
"""


class Launcher:
    """A forked launcher, as a Popen."""

    def __init__(self, pid: int, output: Path) -> None:
        self.pid, self.output = pid, output

    def poll(self) -> int | None:
        file = Path(f"{self.output}.code")
        return int(file.read_text()) if file.exists() else None

    def wait(self, timeout: float = TIMEOUT_S) -> int:
        end = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("launcher", timeout)
            time.sleep(0.01)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forked:
    """Starts launchers of `project`. Close it at the end."""

    def __init__(
        self, project: Path, environment: dict[str, str], fork_ranks: bool, first: str = ""
    ) -> None:
        """`first`: code that a fork executes before the first launch."""
        self.project = project
        self.environment = environment | {"PYTHONPATH": str(project)}  # as launch.sh does
        self.lock = threading.Lock()
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVER, "fork ranks" if fork_ranks else "", first],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8", env=self.environment,
        )  # fmt: skip

    def start(
        self, flags: Sequence[str], variables: dict[str, str], output: Path,
        folder: Path | None = None, umask: int = 0o022, ignored: Sequence[int] = (),
    ) -> Launcher:  # fmt: skip
        """`launch.sh FLAGS`, called in `folder`. `ignored`: signals, as nohup ignores SIGHUP."""
        assert self.process.stdin is not None and self.process.stdout is not None
        output.touch()
        words = [str(self.project / "train.py"), *flags]
        request = json.dumps([
            words, self.environment | variables, str(output), str(folder or self.project), umask,
            list(ignored),
        ])  # fmt: skip
        with self.lock:
            self.process.stdin.write(request + "\n")
            self.process.stdin.flush()
            return Launcher(int(self.process.stdout.readline()), output)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
