"""Rank processes that stay: importing torch and transformers takes longer than most tests.

`Ranks.run(world_size, function, *args)` calls `function(*args)` on so many ranks, each in its own
process with the variables that torchrun would set, and returns what each of them returned.
"""

import gc
import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
MOST = 4


class RankError(RuntimeError):
    """A function failed on a rank; `kinds` are the names of the ranks' exceptions."""

    def __init__(self, message: str, kinds: list[str]) -> None:
        super().__init__(message)
        self.kinds = kinds


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def serve(connection: Connection, log: str) -> None:
    """The life of a rank process."""
    sys.path[:0] = [str(PROJECT), str(PROJECT / "tests")]
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import jobs  # noqa: F401  # the slow imports, before anybody waits in a collective
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    connection.send("ready")
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
        gc.collect()
        if dist.is_initialized():
            dist.destroy_process_group()
        connection.send(answer)


class Ranks:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[tuple[Any, Connection]] = []

    def _start(self, count: int) -> None:
        context = multiprocessing.get_context("spawn")
        before = len(self.processes)
        while len(self.processes) < count:
            ours, theirs = context.Pipe()
            log = self.folder / f"rank{len(self.processes)}.log"
            process = context.Process(target=serve, args=(theirs, str(log)))
            process.start()
            theirs.close()
            self.processes.append((process, ours))
        for _, connection in self.processes[before:]:
            assert connection.recv() == "ready"

    def run(self, world_size: int, function: Callable, *args: Any, timeout: float = 300) -> list:
        """Results in rank order. Errors: RankError with the messages of the ranks that failed."""
        assert world_size <= MOST
        self._start(world_size)
        port = free_port()
        connections = [connection for _, connection in self.processes[:world_size]]
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
        for process, connection in self.processes:
            process.kill()
            process.join()
            connection.close()
        self.processes.clear()
