"""Gradients that travel smaller: communication hooks of DDP, for `--gradient-compression`."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import PreTrainedModel


def word_embeddings(model: PreTrainedModel) -> nn.Parameter | None:
    """None where the model has no table of them."""
    try:
        return getattr(model.get_input_embeddings(), "weight", None)
    except NotImplementedError:
        return None


def reduce_half(kind: torch.dtype, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Gradients travel as `kind`, a half precision. PyTorch's own hooks refuse gloo."""
    whole = bucket.buffer()
    sent = (whole / dist.get_world_size()).to(kind)
    future = dist.all_reduce(sent, async_op=True).get_future()
    return future.then(lambda done: whole.copy_(done.value()[0]))


def reduce_rows(
    embedding: nn.Parameter | None, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """Of word embeddings, only rows that any rank's texts have travel.

    All others are zero on all ranks, so this is exact. (A row counts as zero when the sum of its
    squares is: below 1e-22 each, which no optimizer's step can tell from zero.)
    """
    whole, grads = bucket.buffer(), bucket.gradients()
    places = [i for i, p in enumerate(bucket.parameters()) if p is embedding]
    if not places:
        whole.div_(dist.get_world_size())
        return dist.all_reduce(whole, async_op=True).get_future().then(lambda d: d.value()[0])
    grad = grads.pop(places[0])
    used = torch.linalg.vector_norm(grad, dim=1).ne(0).byte()
    dist.all_reduce(used, dist.ReduceOp.MAX)
    rows = used.nonzero().squeeze(1)
    sent = torch.cat([grad[rows].reshape(-1), *(g.reshape(-1) for g in grads)])
    sent.div_(dist.get_world_size())

    def put_back(done: Any) -> torch.Tensor:
        of_rows, *others = done.value()[0].split([rows.numel() * grad.shape[1],
                                                  *(g.numel() for g in grads)])  # fmt: skip
        grad[rows] = of_rows.view(-1, grad.shape[1])
        for own, other in zip(grads, others, strict=True):
            own.copy_(other.view_as(own))
        return whole

    return dist.all_reduce(sent, async_op=True).get_future().then(put_back)
