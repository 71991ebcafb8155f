"""Full tensors on the main process, sharded ones (FSDP) or replicas on the ranks.

Checkpoints hold full tensors, whichever strategy wrote them. Every rank calls each function here.
Only the main process ever has a full tensor, one at a time on its device: the other ranks send it
their shard, or get it. (torch.distributed.checkpoint makes each tensor whole on every rank.)
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from training.distributed import watchdog
from training.distributed.ranks import is_main, on_main
from training.settings.errors import UserError


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def exchange_buffers(tensor: DTensor) -> tuple[Tensor, Tensor, list[Tensor] | None]:
    """This rank's rows, filled up to the number that every rank sends; on the main process room for
    all rows, and its parts by rank."""
    own, world_size = tensor.to_local(), dist.get_world_size()
    rows = -(-len(tensor) // world_size)
    sent = own.new_zeros(rows, *own.shape[1:])
    sent[: len(own)] = own
    full = own.new_zeros(rows * world_size if is_main() else 0, *own.shape[1:])
    return sent, full, list(full.split(rows)) if is_main() else None


@torch.no_grad()
def gather_to_main(tensor: DTensor) -> Tensor | None:
    """The full tensor in the main process's memory; None elsewhere."""
    sent, full, parts = exchange_buffers(tensor)
    dist.gather(sent, parts)
    return full[: len(tensor)].to("cpu", copy=True) if is_main() else None


@torch.no_grad()
def fill_from_main(own: Any, source: Any) -> Any:
    """`own`, a tensor or its shards, with the values of `source`, the main process's full tensor;
    of anything else that `source` is, a copy."""
    if isinstance(own, DTensor):
        received, full, parts = exchange_buffers(own)
        if is_main():
            full[: len(own)] = source
        dist.scatter(received, parts)
        own.to_local().copy_(received[: len(own.to_local())])
    elif isinstance(own, Tensor):
        if is_main():
            own.copy_(source)
        dist.broadcast(own, src=0)
    else:
        return on_main(lambda: source)
    return own


def load_weights(model: nn.Module, read: Callable[[], dict[str, Tensor]]) -> None:
    """Give every rank the weights that `read` returns on the main process."""
    watchdog.report("loading weights")
    weights: dict[str, Tensor] = {}
    on_main(lambda: weights.update(read()))
    for name, tensor in model.state_dict().items():
        fill_from_main(tensor, weights.get(name))


class NamedOptimizerState:
    """The state of an optimizer by names of parameters, which do not depend on their order."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Tensors are those of the optimizer, sharded if they are."""
        if not self.optimizer.state:  # no step was taken yet, or it keeps nothing, as plain SGD
            return self.optimizer.state_dict()
        return dict(get_optimizer_state_dict(self.model, self.optimizer))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """`state`, with full tensors, is read on the main process only. Errors: UserError."""
        keys, groups = on_main(lambda: (keys_of(state["state"]), state["param_groups"]))
        if keys:
            own: Any = get_optimizer_state_dict(self.model, self.optimizer)["state"]  # made: zeros
            if keys_of(own) != keys:
                raise UserError("the checkpoint has the state of another optimizer")
            for name, values in own.items():
                source = state["state"][name] if is_main() else {}
                values |= {key: fill_from_main(v, source.get(key)) for key, v in values.items()}
        for group, now in zip(groups, self.optimizer.param_groups, strict=True):
            now.update(group | {"params": now["params"]})


def keys_of(state: dict[str, Any]) -> dict[str, set[str]]:
    return {name: set(values) for name, values in state.items()}
