"""Do all ranks train the same model? Checks that end the run with a sentence where they do not."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from training.distributed.ranks import gather
from training.settings.errors import UserError


def check_replicas(model: nn.Module) -> None:
    """Stop when the ranks' weights have drifted apart. Errors: RuntimeError naming the ranks."""
    copies = [p.detach() for p in model.parameters() if not isinstance(p, DTensor)]
    if not copies:
        return  # every rank holds other parts
    sums = gather(tuple(torch.stack([_sum_of_bits(p) for p in copies]).tolist()))
    most = max(sums, key=sums.count)
    if odd := [rank for rank, other in enumerate(sums) if other != most]:
        raise RuntimeError(
            f"the replicas diverged: the weights of ranks {odd} differ from those of the other "
            f"{len(sums) - len(odd)}; look for random numbers or data that only some ranks change "
            "weights by, then for a broken device; the last checkpoint may hold them, too"
        )


def _sum_of_bits(weights: torch.Tensor) -> torch.Tensor:
    """Eight bytes at a time, as integers: exact, in whatever order the device adds; no copy."""
    flat = weights.contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:  # a part of a larger tensor, which cannot be read so
        flat = flat.clone()
    even = len(flat) // 8 * 8
    return flat[:even].view(torch.int64).sum() + flat[even:].sum(dtype=torch.int64)


def check_gradients(model: nn.Module, parameters: list[nn.Parameter]) -> None:
    """Errors: UserError when a part of the model had no share in this rank's loss.

    DDP would wait for its gradient, and say at the next step that a reduction has not finished.
    """
    if any(p.grad is None for p in parameters):
        left = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
        raise UserError(
            f"model.py: {', '.join(left[:5])}{', ...' * (len(left) > 5)} took no part in the loss "
            f"on rank {dist.get_rank()}; use them on every rank, remove them, or freeze them with "
            "requires_grad_(False)"
        )
