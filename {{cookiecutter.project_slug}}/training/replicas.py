"""Do all ranks train the same model? Checks that end the run with a sentence where they do not."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from training.config import UserError
from training.distributed import gather


def check_replicas(model: nn.Module) -> None:
    """Stop when the ranks' weights have drifted apart. Errors: RuntimeError naming the ranks."""
    # The bits of the weights, added as integers: exact, in whatever order the device adds.
    copies = [p.detach() for p in model.parameters() if not isinstance(p, DTensor)]
    if not copies:
        return  # every rank holds other parts
    bits = [p.contiguous().view(torch.int16) for p in copies]
    sums = gather(tuple(torch.stack([b.sum(dtype=torch.int64) for b in bits]).tolist()))
    most = max(sums, key=sums.count)
    if odd := [rank for rank, other in enumerate(sums) if other != most]:
        raise RuntimeError(
            f"the replicas diverged: the weights of ranks {odd} differ from those of the other "
            f"{len(sums) - len(odd)}; look for random numbers or data that only some ranks change "
            "weights by, then for a broken device; the last checkpoint may hold them, too"
        )


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
