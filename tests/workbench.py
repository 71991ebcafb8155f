"""Runs the scripts of projects that have been edited, without the seconds that imports take.

One process imports what a project needs of other packages. For each call it forks a process that
imports the project's own modules as they are now, and that forks the ranks.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from conftest import clean_environment

TIMEOUT_S = 300.0  # a bound for what hangs, not a promise
TRAIN = "runpy.run_path('train.py', run_name='__main__')"
PREDICT = "runpy.run_path('predict.py', run_name='__main__')"

SERVER = """
import json, os, runpy, signal, socket, sys, traceback

import torch

torch.set_num_threads(1)  # threads do not survive a fork
first = sys.argv[1]
sys.path.insert(0, first)
import matplotlib.figure, sklearn.metrics, torch.utils.tensorboard
import transformers.models.bert.modeling_bert
import train, predict
for name, module in list(sys.modules.items()):
    if (getattr(module, "__file__", None) or "").startswith(first):
        del sys.modules[name]
sys.path.remove(first)


def leave(code, namespace):
    status = 1
    try:
        exec(code, namespace)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1 if end.code else 0
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(status)


def serve(project, code, words, world_size, output, timeout):
    signal.alarm(int(timeout))  # the end of this process, and so of the call
    os.setpgid(0, 0)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1), os.dup2(file, 2)
    os.chdir(project)
    sys.path[:0] = [project, project + "/tests"]
    sys.argv = words
    import train, predict  # its own

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    ranks = []
    for rank in range(world_size):
        ranks.append(os.fork())
        if not ranks[-1]:
            values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size,
                      "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            os.environ.update({name: str(value) for name, value in values.items()})
            leave(code, {"runpy": runpy, "sys": sys, "__name__": "__main__"})
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]


print("ready", flush=True)
for line in sys.stdin:
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        codes = serve(**json.loads(line))
        os.write(write, json.dumps(codes).encode())
        os._exit(0)
    os.close(write)
    os.waitpid(pid, 0)
    try:
        os.killpg(pid, signal.SIGKILL)  # ranks of a call that was ended
    except ProcessLookupError:
        pass
    answer = os.read(read, 1 << 16).decode()
    os.close(read)
    print(answer or "[]", flush=True)
"""


class Done(NamedTuple):
    codes: list[int]  # of each rank; none if the call hung
    output: str  # of all ranks


class Workbench:
    """Calls code in projects. Close it at the end."""

    def __init__(self, project: Path, folder: Path) -> None:
        """`project`: one whose imports are those of all; `folder`: for what is printed."""
        self.folder, self.calls = folder, 0
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-c", SERVER, str(project)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, encoding="utf-8",
            env=clean_environment(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1"), cwd=folder,
        )  # fmt: skip

    def _answer(self, request: str = "") -> str:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(request)
        self.process.stdin.flush()
        return self.process.stdout.readline()

    def call(
        self, project: Path, code: str, flags: Sequence[str] = (), world_size: int = 1
    ) -> Done:
        """Execute `code` in the folder `project`, on ranks, with these words in `sys.argv`."""
        if not self.calls:
            assert self._answer() == "ready\n"
        self.calls += 1
        output = self.folder / f"{self.calls}.log"
        output.touch()
        request = {
            "project": str(project), "code": code, "words": ["train.py", *flags],
            "world_size": world_size, "output": str(output), "timeout": TIMEOUT_S,
        }  # fmt: skip
        codes = json.loads(self._answer(json.dumps(request) + "\n"))
        return Done(codes, output.read_text("utf-8", "replace"))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
