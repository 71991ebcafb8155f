"""The process group, this rank's device, and what ranks say to each other.

Every run has a process group, also a plain `python train.py` (rank 0 of 1): one code path for all.
This is the only file that reads torchrun's variables.
"""

import itertools
import json
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from training.settings.errors import HUNG, UserError, needs_no_traceback

log = logging.getLogger("training")
T = TypeVar("T")
CONNECT_TIMEOUT_S = 180.0  # of the first collective, once all ranks are there
_store: dist.Store = dist.HashStore()  # that of the process group
_calls = itertools.count()  # of `on_local_main`, the same on all ranks of a machine


def rank_from(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, local_rank, world_size) of this process, by the variables of torchrun, else of `srun`.

    Inside torchrun SLURM_PROCID would be that of the launcher. Errors: UserError.
    """
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE"]
    given = [name for name in names if name in environment]
    if not given and int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        if "MASTER_ADDR" not in environment or "MASTER_PORT" not in environment:
            raise UserError("srun started several tasks without MASTER_ADDR; use launch.sbatch")
        names = ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"]
    elif not given:
        return 0, 0, 1
    elif given != names:
        missing = ", ".join(name for name in names if name not in given)
        raise UserError(f"{given[0]} is set but {missing} is not; start with ./launch.sh")
    rank, local_rank, world_size = (int(environment[name]) for name in names)
    if not 0 <= local_rank <= rank < world_size:
        raise UserError(f"rank {rank}, local_rank {local_rank} and world size {world_size} clash")
    return rank, local_rank, world_size


def restart_count() -> int:
    """How often the launcher has started the ranks again after a crash (`--max-restarts`)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def find_accelerator() -> torch.device | None:
    """The kind of device that ranks compute on, or None: the CPU. Sums of losses are float64, which
    Apple's GPUs do not have."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return None if accelerator and accelerator.type == "mps" else accelerator


def choose_device(local_rank: int) -> torch.device:
    """This rank's device, from now on the current one. Errors: UserError if there is none left."""
    accelerator = find_accelerator()
    if accelerator is None:
        if torch.accelerator.current_accelerator(check_available=True):
            log.warning("this machine's GPU has no float64: training on the CPU")
        return torch.device("cpu")
    count = torch.accelerator.device_count()
    if count == 1 and not dist.is_torchelastic_launched():
        local_rank = 0  # each rank sees a device of its own: `srun --gpus-per-task=1`
    if local_rank >= count:
        advice = f"this machine has {count}; give --nproc-per-node {count}"
        raise UserError(f"local_rank {local_rank} has no device: {advice}")
    torch.accelerator.set_device_index(local_rank)
    return torch.device(accelerator.type, local_rank)


def setup(timeout: float = 1800.0) -> tuple[torch.device, dist.Store]:
    """Join the process group; return this rank's device and the store that all ranks share.

    `timeout`: seconds that a collective waits for the other ranks before it fails.
    Errors: UserError, also if the devices cannot communicate.
    """
    global _store, _calls
    rank, local_rank, world_size = rank_from(os.environ)
    device = choose_device(local_rank)
    backend, bound = "gloo", None
    if device.type != "cpu":
        # CPU tensors go over gloo: messages between ranks never wait for the device.
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
        bound = device  # so that the devices are connected now, not when they are first used
    wait = timedelta(seconds=timeout)
    store: dist.Store = dist.HashStore()
    if world_size > 1:
        store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=wait))
        store.set_timeout(wait)
    # A restarted run must not read the keys of the attempt before.
    _store = store = dist.PrefixStore(f"attempt-{restart_count()}", store)
    _calls = itertools.count()
    group = dist.PrefixStore("group", store)
    if store.add("arrived", 1) == world_size:
        store.set("all", "arrived")
    store.wait(["all"], wait)
    with _explain_failure(rank, device):
        dist.init_process_group(
            backend, timeout=wait, store=group, rank=rank, world_size=world_size, device_id=bound
        )
        total = reduce_tensor(torch.ones(1, device=device)).item()
        if total != world_size:
            raise RuntimeError(f"the sum of {world_size} ones is {total}")
    return device, store


@contextmanager
def _explain_failure(rank: int, device: torch.device) -> Iterator[None]:
    """Turn a first collective that fails or does not end into one line. Errors: UserError."""
    problem = f"the first collective on {device} (rank {rank}, {platform.node()})"
    advice = "check the network interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME) and the firewall"
    if device.type == "cuda":
        advice = f"run again with NCCL_DEBUG=INFO; {advice}, in a container also --shm-size"

    def give_up() -> None:
        text = f"{problem} has not ended in {CONNECT_TIMEOUT_S:.0f} s: {advice}"
        print(f"\n{text}", file=sys.stderr, flush=True)
        get_error_handler().record_exception(UserError(text))  # for the launcher
        os._exit(HUNG)

    timer = threading.Timer(CONNECT_TIMEOUT_S, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    except RuntimeError as error:  # of any of PyTorch's backends
        reason = " ".join(str(error).split())
        raise UserError(f"{problem} failed ({reason:.400}): {advice}") from error
    finally:
        timer.cancel()


def is_main() -> bool:
    return dist.get_rank() == 0


def rank_name() -> str:
    """This process's rank for messages, also before there is a process group."""
    return str(dist.get_rank()) if dist.is_initialized() else os.environ.get("RANK", "0")


def has_terminal() -> bool:
    """Whether the output of this process is shown: local rank 0, or a process without ranks."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def reduce_tensor(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """The reduction of `tensor` over all ranks; `tensor` itself stays as it is.

    For a mean, divide a reduced sum by a reduced count: ranks hold different numbers of rows.
    """
    result = tensor.detach().clone()
    dist.all_reduce(result, op)
    return result


class MainProcessError(RuntimeError):
    """What the other ranks raise when the main process has failed."""


def on_main(function: Callable[[], T]) -> T:
    """Call `function` on the main process; every rank gets its result, or raises its error."""
    if not dist.is_initialized():
        return function()
    outcome: list[Any] = [None, None, False]  # result, error's message, whether that says it all
    if is_main():
        try:
            outcome[0] = function()
        except Exception as error:
            dist.broadcast_object_list([None, str(error), needs_no_traceback(error)], src=0)
            raise
    dist.broadcast_object_list(outcome, src=0)
    return _result_of(*outcome)


def _result_of(result: Any, message: str | None, is_enough: bool) -> Any:
    """The result of a call on another rank. Errors: UserError or MainProcessError if it failed."""
    if message is not None:
        raise UserError(message) if is_enough else MainProcessError(message)
    return result


def _machine() -> str:
    """This rank's machine. Two may have one name, so its number counts too, where it is known."""
    return f"{platform.node()} {os.environ.get('GROUP_RANK', os.environ.get('SLURM_NODEID'))}"


@contextmanager
def local_main_first(what: str, name: str = "") -> Iterator[bool]:
    """In the `with`, local rank 0 of each machine goes first: what it downloads is then in the
    cache. Yields whether this rank comes later, and need not ask the network. If `name` is a folder
    here, nobody waits."""
    key = f"{_machine()}: {what} {name}"
    is_ordered = dist.is_initialized() and not (name and os.path.isdir(name))
    later = is_ordered and rank_from(os.environ)[1] > 0
    while later and not _store.check([key]):
        time.sleep(0.1)  # `wait` would answer no signal, and keep PyTorch's threads from the store
    try:
        yield later
    finally:
        if is_ordered and not later:
            _store.set(key, "done")


def on_local_main(function: Callable[[], str]) -> str:
    """Call `function` on local rank 0 of each machine; the machine's ranks get its result, or raise
    its error."""
    if not dist.is_initialized():
        return function()
    place = f"{_machine()}: outcome of call {next(_calls)}"
    with local_main_first(place) as later:
        if later:
            return _result_of(*json.loads(_store.get(place)))
        outcome: list[Any] = [None, "local rank 0 of this machine has failed", False]
        try:
            outcome = [function(), None, False]
        except Exception as error:
            outcome = [None, str(error), needs_no_traceback(error)]
            raise
        finally:
            _store.set(place, json.dumps(outcome))
        return outcome[0]


def gather(value: T) -> list[T]:
    """`value` of every rank, in rank order, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check_same_on_all_ranks(value: Any, what: str) -> None:
    """Errors: UserError if `value` differs between ranks, for example because files differ."""
    first, *others = gather(value)
    for rank, other in enumerate(others, start=1):
        if other != first:
            raise UserError(f"{what} differs: rank {rank} has {other}, rank 0 has {first}")
