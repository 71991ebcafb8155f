"""Rank processes for the tests, forked from one process that has imported what they need.

Importing torch and transformers takes longer than most tests. `Ranks.run(world_size, function,
*args)` calls `function(*args)` on `world_size` ranks, each in its own process with the variables
that torchrun would set, and returns what each of them returned.
"""

import gc
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
MAX_RANKS = 4
# Of a run; all but the first are imported only where it needs them.
SLOW_IMPORTS = (
    "jobs", "matplotlib.figure", "sklearn.metrics", "torch.utils.tensorboard",
    "transformers.models.bert.modeling_bert",
)  # fmt: skip


class RankError(RuntimeError):
    """A function failed on a rank; `kinds` are the names of the ranks' exceptions."""

    def __init__(self, message: str, kinds: list[str]) -> None:
        super().__init__(message)
        self.kinds = kinds


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def fork_ranks(connections: list[Connection], folder: Path) -> None:
    """Import what the ranks need, then fork one rank for each connection, and wait for them."""
    sys.path[:0] = [str(PROJECT), str(PROJECT / "tests")]
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # CUDA does not survive a fork
    import torch

    torch.set_num_threads(1)  # nor do threads
    for module in SLOW_IMPORTS:
        importlib.import_module(module)
    multiprocessing.set_start_method(None, force=True)  # loaders start as in a real run
    for rank, connection in enumerate(connections):
        if os.fork() == 0:
            log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(log, 1)
            os.dup2(log, 2)
            for other in connections[:rank] + connections[rank + 1 :]:
                other.close()  # its end is seen only when nobody else holds it
            serve(connection)
            os._exit(0)
    for connection in connections:
        connection.close()
    for _ in connections:
        os.wait()


def serve(connection: Connection) -> None:
    """The life of a rank: send the process id, then run what is asked until nobody asks."""
    import torch.distributed as dist

    connection.send(os.getpid())
    while True:
        try:
            environment, function, args = connection.recv()
        except EOFError:
            return
        os.environ.update(environment)
        try:
            answer: tuple = ("ok", function(*args))
        except BaseException as error:
            answer = ("error", type(error).__name__, f"{error}\n{traceback.format_exc()}")
        for loader in multiprocessing.active_children():
            loader.kill()  # a run that is collected would wait seconds for its loaders
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        connection.send(answer)


class Ranks:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.connections: list[Connection] = []
        self.pids: list[int] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        pairs = [context.Pipe() for _ in range(MAX_RANKS)]
        theirs = [pair[1] for pair in pairs]
        self.parent = context.Process(target=fork_ranks, args=(theirs, self.folder))
        self.parent.start()
        for connection in theirs:
            connection.close()
        self.connections = [pair[0] for pair in pairs]
        self.pids = [connection.recv() for connection in self.connections]

    def run(self, world_size: int, function: Callable, *args: Any, timeout: float = 300) -> list:
        """Results in rank order. Errors: RankError with the messages of the ranks that failed."""
        if not self.connections:
            self._start()
        port = free_port()
        connections = self.connections[:world_size]
        for rank, connection in enumerate(connections):
            environment = {
                "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }  # fmt: skip
            connection.send(({k: str(v) for k, v in environment.items()}, function, args))
        answers = []
        for connection in connections:
            if not connection.poll(timeout):
                self.close()
                raise TimeoutError(f"{function.__name__} hangs on {world_size} ranks")
            answers.append(connection.recv())
        failed = [(rank, a) for rank, a in enumerate(answers) if a[0] == "error"]
        if failed:
            text = "\n".join(f"rank {rank}: {a[1]}: {a[2]}" for rank, a in failed)
            raise RankError(text, [a[1] for _, a in failed])
        return [a[1] for a in answers]

    def close(self) -> None:
        for pid in self.pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self.connections:
            self.parent.join()
        for connection in self.connections:
            connection.close()
        self.connections, self.pids = [], []
