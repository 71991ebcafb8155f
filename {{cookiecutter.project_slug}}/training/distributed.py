"""Ranks: the process group, the device, what ranks tell each other, the model over all of them.

Every run has a process group, also a plain `python train.py` (rank 0 of 1), so the rest of the
project has one code path. This is the only file that reads torchrun's variables.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from training import compression, crash
from training.config import TrainConfig, UserError

T = TypeVar("T")
HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


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


def own_rank() -> str:
    """For messages, also before there is a process group."""
    return os.environ.get("RANK", "0")


def is_launched() -> bool:
    """Whether torchrun, or our launcher, has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def restarts() -> int:
    """How often the ranks have been started again after a crash (`--max-restarts`)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))


def setup(timeout: float = 1800.0) -> tuple[torch.device, dist.Store]:
    """Join the process group; return this rank's device and the store that all ranks share.

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
    patience = timedelta(seconds=timeout)
    store: dist.Store = dist.HashStore()
    if world_size > 1:
        store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=patience))
        store.set_timeout(patience)
    store = dist.PrefixStore(f"attempt-{restarts()}", store)  # none reads what another wrote
    dist.init_process_group(
        backend=backend, timeout=patience, store=dist.PrefixStore("group", store), rank=rank,
        world_size=world_size,
    )  # fmt: skip
    return device, store


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
            outcome[1] = (str(caught), crash.is_plain(caught))
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


# -- the model on several ranks ------------------------------------------------------------------


def copies(strategy: str) -> int:
    """Copies of the model that this process runs: more than one with DataParallel alone.

    Errors: UserError when DataParallel is to run on several ranks.
    """
    if strategy != "dp":
        return 1
    if dist.get_world_size() > 1:
        raise UserError("--strategy dp is one process with every GPU: give --nproc-per-node 1")
    return torch.accelerator.device_count() or 1


def autocast(device: torch.device, precision: str) -> Callable[[], torch.autocast]:
    """What makes the context of a forward: of half precision, or one that changes nothing."""
    half = HALF.get(precision)
    return partial(torch.autocast, device.type, half, enabled=half is not None)


def wrap(
    model: PreTrainedModel, with_loss: nn.Module, device: torch.device, config: TrainConfig
) -> nn.Module:
    """What a step calls: `with_loss`, which holds `model`, over all ranks by `--strategy`.

    Every rank starts with the main process's weights. With "fsdp" the parameters of `model` become
    shards in place: build the optimizer after it.
    """
    strategy = config.strategy
    half = HALF.get(config.gradient_compression)
    if strategy == "dp":
        return nn.DataParallel(with_loss) if device.type == "cuda" else with_loss
    if strategy == "fsdp":
        broadcast_weights(model)
        options: dict[str, Any] = {"mesh": init_device_mesh(device.type, (dist.get_world_size(),))}
        if half is not None:
            options["mp_policy"] = MixedPrecisionPolicy(reduce_dtype=half)
        for layers in [m for m in model.modules() if isinstance(m, nn.ModuleList)]:
            for layer in layers:
                fully_shard(layer, **options)
        fully_shard(model, **options)
        return with_loss
    ddp = DistributedDataParallel(
        with_loss,
        device_ids=None if device.type == "cpu" else [device.index],
        gradient_as_bucket_view=True,  # gradients live in the buckets: one copy less
        forward_sync_buffers=False,  # encoders' buffers are constants
    )
    if half is not None:
        ddp.register_comm_hook(half, compression.reduce_half)
    elif config.gradient_compression == "rows":
        ddp.register_comm_hook(compression.word_embeddings(model), compression.reduce_rows)
    return ddp


@contextmanager
def accumulating(wrapped: nn.Module, model: nn.Module, ends_step: bool) -> Iterator[None]:
    """Around forward and backward of a micro-batch: gradients stay on their rank till the last."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(ends_step)
    if isinstance(wrapped, DistributedDataParallel) and not ends_step:
        with wrapped.no_sync():
            yield
    else:
        yield


def broadcast_weights(model: nn.Module) -> None:
    """Give every rank the main process's weights and buffers."""
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, src=0)
