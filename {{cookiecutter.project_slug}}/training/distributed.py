"""Ranks: the process group, the device, what ranks tell each other, and leaving together.

Every run has a process group, also a plain `python train.py` (rank 0 of 1), so the rest of the
project has one code path. This is the only file that reads torchrun's variables.
"""

import ctypes
import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.nn.parallel import DistributedDataParallel

from training.config import TrainConfig, UserError

T = TypeVar("T")


def rank_from(environment: Mapping[str, str]) -> tuple[int, int, int]:
    """(rank, local_rank, world_size) of this process.

    torchrun's variables win, also inside a Slurm job, where SLURM_PROCID is the launcher's.
    Slurm's own count only when `srun` started several of us directly. Errors: UserError.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    given = [name for name in names if name in environment]
    if len(given) == len(names):
        rank, local_rank, world_size = (int(environment[name]) for name in names)
    elif given:
        missing = ", ".join(name for name in names if name not in environment)
        raise UserError(f"{given[0]} is set but {missing} is not; start with ./launch.sh")
    elif int(environment.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        if "MASTER_ADDR" not in environment or "MASTER_PORT" not in environment:
            raise UserError("srun started several tasks without MASTER_ADDR; use launch.sbatch")
        names = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS")
        rank, local_rank, world_size = (int(environment[name]) for name in names)
    else:
        rank, local_rank, world_size = 0, 0, 1
    if not 0 <= local_rank <= rank < world_size:
        raise UserError(f"rank {rank}, local_rank {local_rank} and world size {world_size} clash")
    return rank, local_rank, world_size


def setup(timeout: float = 1800.0) -> torch.device:
    """Join the process group and return this rank's device.

    `timeout`: seconds that a collective waits for the other ranks before it fails.
    """
    rank, local_rank, world_size = rank_from(os.environ)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        device, backend = torch.device("cpu"), "gloo"
    else:
        count = torch.accelerator.device_count()
        if local_rank >= count:
            raise UserError(
                f"local_rank {local_rank} has no device: this machine has {count}; "
                f"give --nproc-per-node {count}"
            )
        device = torch.device(accelerator.type, local_rank)
        torch.accelerator.set_device_index(local_rank)
        # CPU tensors go over gloo: what ranks say to each other never waits for the device.
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    options: dict[str, Any] = {"backend": backend, "timeout": timedelta(seconds=timeout)}
    if world_size == 1:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    else:
        options |= {"init_method": "env://", "rank": rank, "world_size": world_size}
    dist.init_process_group(**options)
    return device


def run(main: Callable[[TrainConfig, torch.device], None], config: TrainConfig) -> None:
    """Call `main(config, device)` in a process group, then leave with the right exit code.

    On success everything that holds the process group (model, optimizer, hooks) is a local of
    `main` and is gone when it returns; only then is the group destroyed. A DDP model that outlives
    its group keeps gloo's threads alive, and the interpreter now and then aborts at its exit.
    On failure other ranks may wait in a collective, so this rank leaves at once, without a
    farewell that could hang; the launcher then ends the others.
    """
    die_with_launcher()
    try:
        record(_call)(main, config)
    except (UserError, FileNotFoundError, PermissionError) as error:
        if has_terminal():
            print(f"\ntrain.py: {error}", file=sys.stderr, flush=True)
        _leave(2)
    except KeyboardInterrupt:
        _leave(130)
    except BaseException:
        rank = dist.get_rank() if dist.is_initialized() else os.environ.get("RANK", "0")
        print(f"\n[rank {rank}] {traceback.format_exc()}", file=sys.stderr, flush=True)
        _leave(1)
    gc.collect()
    reduce_tensor(torch.zeros(1))  # nobody leaves while others still talk
    dist.destroy_process_group()


def _call(main: Callable[[TrainConfig, torch.device], None], config: TrainConfig) -> None:
    main(config, setup(config.timeout))


def _leave(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def die_with_launcher() -> None:
    """Ask Linux to end this process when the launcher dies, so that no orphan holds a GPU."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


# -- what ranks tell each other ------------------------------------------------------------------


def is_main() -> bool:
    return dist.get_rank() == 0


def has_terminal() -> bool:
    """Whether what this process prints is seen: local rank 0, or no rank at all."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def reduce_tensor(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> torch.Tensor:
    """The reduction of `tensor` over all ranks; `tensor` itself stays as it is.

    For a mean, reduce a sum and a count and divide: a mean of the ranks' means is wrong where
    they hold different numbers of rows.
    """
    result = tensor.detach().clone()
    dist.all_reduce(result, op)
    return result


def on_main(function: Callable[[], T]) -> T:
    """Call `function` on the main process; every rank gets its result, or raises its error."""
    outcome: list[Any] = [None, None]
    error: Exception | None = None
    if is_main():
        try:
            outcome[0] = function()
        except Exception as caught:
            error = caught
            known = isinstance(caught, UserError | FileNotFoundError | PermissionError)
            outcome[1] = (str(caught), known)
    dist.broadcast_object_list(outcome, src=0)
    if error is not None:
        raise error
    if outcome[1] is not None:
        message, known = outcome[1]
        raise UserError(message) if known else RuntimeError(f"on the main process: {message}")
    return outcome[0]


def gather(value: T) -> list[T]:
    """`value` of every rank, in rank order, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def same_everywhere(value: Any, what: str) -> None:
    """Refuse to go on when `value` differs between ranks, as with data files that differ."""
    values = gather(value)
    odd = [rank for rank, other in enumerate(values) if other != values[0]]
    if odd:
        other = odd[0]
        raise UserError(f"{what} of rank {other}, {values[other]}, is not rank 0's, {values[0]}")


class StopRequest:
    """SIGTERM, SIGINT or SIGUSR1 on any rank: all ranks save and stop at the same step.

    A second SIGINT stops at once. The ranks' flags are reduced in the background, on the CPU, and
    read one step later: a step never waits for it, and never for the device.
    """

    def __init__(self) -> None:
        self.requested = False
        self._pending: tuple[torch.Tensor, Any] | None = None
        signals = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        self._before = {number: signal.signal(number, self._on_signal) for number in signals}

    def _on_signal(self, number: int, frame: Any) -> None:
        if self.requested and number == signal.SIGINT:
            os._exit(130)
        self.requested = True

    def agreed(self) -> bool:
        """Call once a step on every rank: whether any rank had been asked by the step before."""
        before, flag = self._pending, torch.tensor([int(self.requested)], dtype=torch.int32)
        self._pending = flag, dist.all_reduce(flag, dist.ReduceOp.MAX, async_op=True)
        return before is not None and self._finish(*before)

    def close(self) -> None:
        """Wait for the reduction that is under way, and let go of the signals."""
        if self._pending is not None:
            self._finish(*self._pending)
            self._pending = None  # it holds the process group
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @staticmethod
    def _finish(flag: torch.Tensor, work: Any) -> bool:
        work.wait()
        return bool(flag.item())


# -- the model on several ranks ------------------------------------------------------------------


def wrap(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """`model` in DDP, which starts by giving every rank the main process's weights."""
    return DistributedDataParallel(
        model,
        device_ids=None if device.type == "cpu" else [device.index],
        gradient_as_bucket_view=True,  # gradients live in the buckets: one copy less
        forward_sync_buffers=False,  # encoders' buffers are constants
    )


def broadcast_weights(model: nn.Module) -> None:
    """Give every rank the main process's weights and buffers."""
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, src=0)


def check_replicas(model: nn.Module) -> None:
    """Stop when the ranks' weights have drifted apart. Errors: RuntimeError naming the ranks."""
    # The bits of the weights, added as integers: exact, in whatever order the device adds.
    bits = [p.detach().contiguous().view(torch.int16) for p in model.parameters()]
    sums = gather([int(b.sum(dtype=torch.int64)) for b in bits])
    odd = [rank for rank, other in enumerate(sums) if other != sums[0]]
    if odd:
        raise RuntimeError(f"the weights of ranks {odd} differ from rank 0's: replicas diverged")
