"""The model over all ranks: DDP, FSDP, or DataParallel, by `--strategy`."""

from collections.abc import Callable
from contextlib import AbstractContextManager as Context
from contextlib import nullcontext
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from training.distributed.gradient_compression import reduce_half, reduce_rows, word_embeddings
from training.settings.config import TrainConfig
from training.settings.errors import UserError

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def num_replicas(strategy: str) -> int:
    """Replicas of the model in this process: more than one only with `dp`. Errors: UserError."""
    if strategy != "dp":
        return 1
    if dist.get_world_size() > 1:
        raise UserError("--strategy dp is one process with every GPU: give --nproc-per-node 1")
    return torch.accelerator.device_count() or 1


def make_autocast(device: torch.device, precision: str) -> Callable[[], torch.autocast]:
    """A function that makes the context of a forward: half precision, or no change."""
    half = HALF.get(precision)
    return partial(torch.autocast, device.type, half, enabled=half is not None)


def wrap(
    model: nn.Module, with_loss: nn.Module, device: torch.device, config: TrainConfig
) -> nn.Module:
    """What a step calls: `with_loss`, which holds `model`, over all ranks, with rank 0's weights.

    With FSDP the parameters of `model` become shards in place: build the optimizer after it.
    """
    for parameter in model.parameters():
        # Fused AdamW goes through a weight and its moments in memory order. Weights converted from
        # TensorFlow are transposed in memory; moments from a checkpoint are not.
        parameter.data = parameter.data.contiguous()
    if config.strategy == "dp":
        return nn.DataParallel(with_loss) if device.type == "cuda" else with_loss
    half = HALF.get(config.gradient_compression)
    if config.strategy == "fsdp":
        shard(model, device, half)
        return with_loss
    ddp = DistributedDataParallel(
        with_loss,
        device_ids=None if device.type == "cpu" else [device.index],
        gradient_as_bucket_view=True,  # gradients live in the buckets: one copy less
        forward_sync_buffers=False,  # encoders' buffers are constants
    )
    if half is not None:
        ddp.register_comm_hook(half, reduce_half)
    elif config.gradient_compression == "rows":
        ddp.register_comm_hook(word_embeddings(model), reduce_rows)
    return ddp


def shard(model: nn.Module, device: torch.device, reduce_dtype: torch.dtype | None) -> None:
    """Shard the parameters over all ranks, layer by layer (FSDP2)."""
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.data, src=0)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    layers = [layer for m in model.modules() if isinstance(m, nn.ModuleList) for layer in m]
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=policy)


def gradient_sync(wrapped: nn.Module, model: nn.Module, ends_step: bool) -> Context[None]:
    """Around forward and backward: ranks reduce gradients only in a step's last micro-batch."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(ends_step)
    if isinstance(wrapped, DistributedDataParallel) and not ends_step:
        return wrapped.no_sync()
    return nullcontext()
