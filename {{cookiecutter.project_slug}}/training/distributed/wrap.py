"""The model over all ranks: DDP, FSDP, or DataParallel."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import PreTrainedModel

from training.distributed import gradient_compression as compression
from training.settings.config import TrainConfig
from training.settings.errors import UserError

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def num_replicas(strategy: str) -> int:
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
def gradient_sync(wrapped: nn.Module, model: nn.Module, ends_step: bool) -> Iterator[None]:
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
