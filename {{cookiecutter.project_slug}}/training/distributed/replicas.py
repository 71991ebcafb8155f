"""Do all ranks train the same model? Checks that stop the run with a sentence if they do not."""

import logging

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from training.distributed.ranks import gather
from training.settings.errors import UserError

log = logging.getLogger("training")


def check_replicas(model: nn.Module, on_drift: str) -> None:
    """Compare the weights of all ranks. If they differ, `on_drift` is what to do: "stop" (Errors:
    RuntimeError that names the ranks), or "warn"; with "off" nothing is compared.
    """
    if on_drift == "off":
        return
    replicated = [p.detach() for p in model.parameters() if not isinstance(p, DTensor)]
    if not replicated:
        return  # every rank holds other shards
    checksums = gather(tuple(torch.stack([checksum(p) for p in replicated]).tolist()))
    usual = max(checksums, key=checksums.count)
    different = [rank for rank, own in enumerate(checksums) if own != usual]
    if different:
        others = len(checksums) - len(different)
        problem = f"the weights of ranks {different} differ from those of the other {others}"
        advice = "look for random numbers or data that change weights on some ranks only, then"
        advice += " for a broken device; the last checkpoint may hold such weights, too"
        if on_drift == "warn":
            log.warning(f"the replicas diverged: {problem}")
            return
        raise RuntimeError(
            f"the replicas diverged: {problem}; {advice}; if devices are of different kinds, last "
            "bits may differ: --on-replica-drift warn"
        )


def checksum(weights: torch.Tensor) -> torch.Tensor:
    """The sum of the bits, eight bytes at a time, as integers: exact in any order of adding."""
    flat = weights.contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:  # part of a larger tensor, not aligned to eight bytes
        flat = flat.clone()
    even = len(flat) // 8 * 8
    return flat[:even].view(torch.int64).sum() + flat[even:].sum(dtype=torch.int64)


def check_gradients(model: nn.Module) -> None:
    """Errors: UserError if a parameter did not contribute to this rank's loss. DDP names none."""
    missing = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    if missing:
        names = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        problem = f"{names} did not contribute to the loss on rank {dist.get_rank()}"
        advice = "use them on every rank, remove them, or freeze them with requires_grad_(False)"
        raise UserError(f"model.py: {problem}; {advice}")
