"""The process group, this rank's device, and what ranks say to each other.

Every run has a process group, also a plain `python train.py` (rank 0 of 1): one code path for all.
This is the only file that reads torchrun's variables.
"""

import os
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from training.settings.errors import UserError, needs_no_traceback

T = TypeVar("T")


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


def setup(timeout: float = 1800.0) -> tuple[torch.device, dist.Store]:
    """Join the process group; return this rank's device and the store that all ranks share.

    `timeout`: seconds that a collective waits for the other ranks before it fails.
    """
    rank, local_rank, world_size = rank_from(os.environ)
    device, backend = torch.device("cpu"), "gloo"
    if accelerator := torch.accelerator.current_accelerator(check_available=True):
        count = torch.accelerator.device_count()
        if local_rank >= count:
            advice = f"this machine has {count}; give --nproc-per-node {count}"
            raise UserError(f"local_rank {local_rank} has no device: {advice}")
        device = torch.device(accelerator.type, local_rank)
        torch.accelerator.set_device_index(local_rank)
        # CPU tensors go over gloo: messages between ranks never wait for the device.
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    wait = timedelta(seconds=timeout)
    store: dist.Store = dist.HashStore()
    if world_size > 1:
        store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=wait))
        store.set_timeout(wait)
    # A restarted run must not read the keys of the attempt before.
    store = dist.PrefixStore(f"attempt-{restart_count()}", store)
    group = dist.PrefixStore("group", store)
    dist.init_process_group(backend, timeout=wait, store=group, rank=rank, world_size=world_size)
    return device, store


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
    outcome: list[Any] = [None, None, False]  # result, error's message, whether that says it all
    if is_main():
        try:
            outcome[0] = function()
        except Exception as error:
            dist.broadcast_object_list([None, str(error), needs_no_traceback(error)], src=0)
            raise
    dist.broadcast_object_list(outcome, src=0)
    result, message, is_enough = outcome
    if message is not None:
        raise UserError(message) if is_enough else MainProcessError(message)
    return result


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
