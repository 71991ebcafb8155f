"""Smaller gradients on the network: DDP's communication hooks for `--gradient-compression`."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


def word_embeddings(model: nn.Module) -> nn.Parameter | None:
    """The table of word embeddings, or None if the model has none."""
    try:
        return getattr(model.get_input_embeddings(), "weight", None)  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None


def reduce_half(kind: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients in `kind`, a half precision. PyTorch's own hooks refuse gloo."""
    gradient = bucket.buffer()
    half = (gradient / dist.get_world_size()).to(kind)
    future = dist.all_reduce(half, async_op=True).get_future()
    return future.then(lambda done: gradient.copy_(done.value()[0]))


def reduce_rows(
    embedding: nn.Parameter | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients; of the word embeddings, only rows that any rank's texts use.

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

    def scatter(done: Any) -> torch.Tensor:
        reduced_rows, *reduced = done.value()[0].split(sizes)
        table[rows] = reduced_rows.view(-1, table.shape[1])
        for gradient, values in zip(gradients, reduced, strict=True):
            gradient.copy_(values.view_as(gradient))
        return buffer

    return dist.all_reduce(flat, async_op=True).get_future().then(scatter)
