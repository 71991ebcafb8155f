"""Between sharded tensors (FSDP2) and the whole ones that a checkpoint holds.

Everything here is called on every rank. Tensors that are not sharded pass as they are, so a
checkpoint has one format, whichever strategy wrote it.
"""

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from training.distributed.ranks import is_main, on_main


def whole(value: Any) -> Any:
    """Nested dicts and lists with their tensors whole. Other ranks than the main one get None for
    what was sharded."""
    if isinstance(value, DTensor):
        full = plain(value.detach())
        return full if is_main() else None
    if isinstance(value, dict):
        return {k: whole(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(whole, value))
    return value


def plain(tensor: Tensor) -> Tensor:
    """`tensor` whole, on every rank."""
    return cast(Any, tensor).full_tensor() if isinstance(tensor, DTensor) else tensor


def like(full: Tensor, own: Tensor) -> Tensor:
    """`full`, which every rank has, as `own` is: whole, or this rank's shard."""
    if not isinstance(own, DTensor):
        return full
    on_device = full.to(own.device, own.dtype)
    return distribute_tensor(on_device, own.device_mesh, own.placements, src_data_rank=None)


def optimizer_state(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's whole state, as the shards that this rank's optimizer has."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    shards: dict[int, dict[str, Tensor]] = {}
    for i, of_one in state["state"].items():
        own = parameters[i]
        shards[i] = {k: like(v, own) if v.shape == own.shape else v for k, v in of_one.items()}
    return state | {"state": shards}


@torch.no_grad()
def load_everywhere(model: nn.Module, read: Callable[[], dict[str, Tensor]]) -> None:
    """Give every rank the weights that `read` returns on the main process."""
    found: dict[str, Tensor] = {}
    on_main(lambda: found.update(read()))
    for name, own in model.state_dict().items():
        full = torch.empty(own.shape, dtype=own.dtype, device=own.device)
        if is_main():
            full.copy_(found[name])
        dist.broadcast(full, src=0)
        own.copy_(like(full, own))
