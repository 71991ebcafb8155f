"""The model over all ranks: DDP, FSDP, or DataParallel, by `--strategy`."""

from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP
from transformers import PreTrainedModel

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


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context of a forward on `device`: half precision, or no change."""
    half = HALF.get(precision)
    return torch.autocast(device.type, half, enabled=half is not None)


def wrap(
    model: nn.Module, with_loss: nn.Module, device: torch.device, config: TrainConfig
) -> nn.Module:
    """What a step calls: `with_loss`, which holds `model`, over all ranks, with rank 0's weights.

    With FSDP the parameters of `model` become shards in place: build the optimizer after it.
    """
    for parameter in model.parameters():
        # Fused AdamW goes through a weight and its moments in memory order. Weights converted from
        # TensorFlow are transposed in memory; moments from a checkpoint are not. And a new copy is
        # aligned in memory, as weights that were read in place from a file are not: results of
        # matrix products depend on that, in their last bits.
        parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
    if config.strategy == "dp":
        return nn.DataParallel(with_loss) if device.type == "cuda" else with_loss
    half = HALF.get(config.gradient_compression)
    if config.strategy == "fsdp":
        # Weights travel as the forward uses them, gradients as in DDP. Autocast remains: it keeps
        # activations in fp32 where that matters.
        compute = HALF.get(config.precision)
        reduce = half or (torch.float32 if compute else None)
        shard(model, device, MixedPrecisionPolicy(compute, reduce, cast_forward_inputs=False))
        return with_loss
    # Gradients live in the buckets, which saves a copy; buffers of encoders are constants.
    ddp = DDP(with_loss, gradient_as_bucket_view=True)
    ddp.broadcast_buffers = False  # in forwards; the argument is another one from torch 2.13 on
    if half is not None:
        ddp.register_comm_hook(half, reduce_half)
    elif config.gradient_compression == "rows":
        ddp.register_comm_hook(word_embeddings(model), reduce_rows)
    return ddp


def shard(model: nn.Module, device: torch.device, policy: MixedPrecisionPolicy) -> None:
    """Shard the parameters over all ranks (FSDP2), layer by layer: of a model on the CPU, one layer
    at a time is whole on `device`. Errors: UserError."""
    if scalars := [name for name, p in model.named_parameters() if not p.ndim]:
        raise UserError(f"model.py: with --strategy fsdp, {scalars[0]} must have the shape (1,)")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    # Inner layers before those that hold them; one may stand in several lists.
    layers = dict.fromkeys(layer for inner_first in reversed(lists) for layer in inner_first)
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    # What has no forward, as lists, or shares parameters with others goes with what holds it.
    alone = [layer for layer in layers if type(layer).forward is not nn.Module.forward
             and all(uses[id(p)] == 1 for p in layer.parameters())]  # fmt: skip
    for module in (*alone, model):
        for tensor in (*module.parameters(), *module.buffers()):
            if not isinstance(tensor, DTensor):  # not of a layer inside
                tensor.data = tensor.data.to(device)
                dist.broadcast(tensor.data, src=0)
        if module is not model:
            gather_in_forward(module)
        sharded = fully_shard(module, mesh=mesh, mp_policy=policy)
        # Sum, then divide: asked for the average, gloo gives the sum in torch 2.8.
        sharded.set_force_sum_reduction_for_comms(device.type == "cpu")


def gather_in_forward(layer: nn.Module) -> None:
    """Let `layer.forward(...)`, as SqueezeBERT calls it, gather the layer's weights as `layer(...)`
    does by FSDP's hooks. Call it before `layer` is sharded."""
    forward = layer.forward
    own = [name for name, p in layer.named_parameters() if not isinstance(p, DTensor)]

    def gathering_forward(*args: Any, **kwargs: Any) -> Any:
        is_sharded = isinstance(layer.get_parameter(own[0]), DTensor)
        return layer(*args, **kwargs) if is_sharded else forward(*args, **kwargs)

    if own:
        layer.forward = gathering_forward


def gradient_sync(wrapped: nn.Module, model: nn.Module, ends_step: bool) -> AbstractContextManager:
    """Around forward and backward: ranks reduce gradients only in a step's last micro-batch."""
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(ends_step)
    if isinstance(wrapped, DDP) and not ends_step:
        return wrapped.no_sync()
    return nullcontext()


def hugging_face_parts(model: nn.Module) -> list[PreTrainedModel]:
    """The outermost Hugging Face models in `model`, or itself if it is one."""
    if isinstance(model, PreTrainedModel):
        return [model]
    return [part for child in model.children() for part in hugging_face_parts(child)]


def word_embeddings(model: nn.Module) -> nn.Parameter | None:
    """The table of word embeddings, or None if the model has none."""
    try:
        return getattr(model.get_input_embeddings(), "weight", None)  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None


def reduce_half(kind: torch.dtype, bucket: dist.GradBucket) -> Future[Tensor]:
    """DDP's hook that averages gradients in `kind`, a half precision. PyTorch's refuse gloo."""
    gradient = bucket.buffer()
    half = (gradient / dist.get_world_size()).to(kind)
    future = dist.all_reduce(half, async_op=True).get_future()
    return future.then(lambda done: gradient.copy_(done.value()[0]))


def reduce_rows(embedding: nn.Parameter | None, bucket: dist.GradBucket) -> Future[Tensor]:
    """DDP's hook that averages gradients; of the word embeddings, only rows that any rank uses.

    All other rows are zero on all ranks, so this is exact. (A row counts as zero if the sum of its
    squares is: below 1e-22 each, which no optimizer's step can tell from zero.)
    """
    buffer, gradients = bucket.buffer(), bucket.gradients()
    position = [i for i, p in enumerate(bucket.parameters()) if p is embedding]
    if not position:
        buffer.div_(dist.get_world_size())
        return dist.all_reduce(buffer, async_op=True).get_future().then(lambda d: d.value()[0])
    table = gradients.pop(position[0])
    used = torch.linalg.vector_norm(table, dim=1).ne(0).byte()
    dist.all_reduce(used, dist.ReduceOp.MAX)
    rows = used.nonzero().squeeze(1)
    parts = [part.reshape(-1) for part in (table[rows], *gradients)]
    sizes = [len(part) for part in parts]
    flat = torch.cat(parts).div_(dist.get_world_size())

    def scatter(done: Future[list[Tensor]]) -> Tensor:
        reduced_rows, *reduced = done.value()[0].split(sizes)
        table[rows] = reduced_rows.view(-1, table.shape[1])
        for gradient, values in zip(gradients, reduced, strict=True):
            gradient.copy_(values.view_as(gradient))
        return buffer

    return dist.all_reduce(flat, async_op=True).get_future().then(scatter)
