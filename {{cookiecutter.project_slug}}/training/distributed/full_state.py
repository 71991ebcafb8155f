"""Full tensors on the main process, sharded ones (FSDP) or replicas on the ranks.

Checkpoints hold full tensors, whichever strategy wrote them. Every rank calls each function here.
On the way one tensor at a time is whole, on the main process only: a rank sends its shard, or gets
it. (torch.distributed.checkpoint makes each tensor whole on every rank.)
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


def buffers(tensor: DTensor) -> tuple[Tensor, Tensor, list[Tensor] | None]:
    """For an exchange with the main process: this rank's rows, as many as each has at most; all
    rows, and these cut by ranks, which are empty and None but on the main process."""
    own, world_size = tensor.to_local(), dist.get_world_size()
    rows = -(-len(tensor) // world_size)
    full = own.new_zeros(rows * world_size if is_main() else 0, *own.shape[1:])
    return own.new_zeros(rows, *own.shape[1:]), full, [*full.split(rows)] if is_main() else None


@torch.no_grad()
def copy_to_main(value: Any) -> Any:
    """A copy of nested dicts and lists in the main process's memory, with full tensors. Elsewhere
    None takes the place of each tensor."""
    if isinstance(value, dict):
        return {key: copy_to_main(content) for key, content in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copy_to_main(content) for content in value)
    if isinstance(value, DTensor):
        rows, full, parts = buffers(value)
        rows[: len(value.to_local())] = value.to_local()
        dist.gather(rows, parts)
        value = full[: len(value)]
    elif not isinstance(value, Tensor):
        return value
    return value.to("cpu", copy=True) if is_main() else None


@torch.no_grad()
def fill_from_main(tensor: Tensor, source: Tensor | None) -> None:
    """Give a tensor, or its shards, the values of the main process's full tensor `source`."""
    if isinstance(tensor, DTensor):
        rows, full, parts = buffers(tensor)
        if source is not None:
            full[: len(tensor)] = source
        dist.scatter(rows, parts)
        tensor.to_local().copy_(rows[: len(tensor.to_local())])
    else:
        if source is not None:
            tensor.copy_(source)
        dist.broadcast(tensor, src=0)


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
        saved, groups = on_main(lambda: (kinds(state["state"]), state["param_groups"]))
        if saved:
            own = get_optimizer_state_dict(self.model, self.optimizer)["state"]  # zeros
            if kinds(own) != saved:
                raise UserError("the checkpoint holds the state of another optimizer")
            for name, values in own.items():
                for key, tensor in values.items():
                    fill_from_main(tensor, state["state"][name][key] if is_main() else None)
        for group, now in zip(groups, self.optimizer.param_groups, strict=True):
            now.update(group | {"params": now["params"]})


def kinds(state: dict[str, Any]) -> dict[str, set[str]]:
    """What an optimizer keeps for each parameter."""
    return {name: set(values) for name, values in state.items()}
