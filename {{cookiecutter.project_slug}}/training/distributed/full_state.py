"""Full tensors on the main process, sharded ones (FSDP) or replicas on the ranks.

Checkpoints hold full tensors, whichever strategy wrote them. Every rank calls each function here.
On the way one tensor at a time is whole on a device, and only the main process keeps it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from training.distributed import watchdog
from training.distributed.ranks import is_main, on_main

FROM_MAIN = dcp.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole of a tensor that may be sharded, on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def copy_to_main(value: Any) -> Any:
    """A copy of nested dicts and lists in the main process's memory, with full tensors. Elsewhere
    None takes the place of each tensor."""
    if isinstance(value, dict):
        return {key: copy_to_main(content) for key, content in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(copy_to_main(content) for content in value)
    if not isinstance(value, Tensor):
        return value
    full = full_tensor(value)
    return full.to("cpu", copy=True) if is_main() else None


def load_weights(model: nn.Module, read: Callable[[], dict[str, Tensor]]) -> None:
    """Give every rank the weights that `read` returns on the main process."""
    watchdog.report("loading weights")
    weights: dict[str, Any] = {}
    on_main(lambda: weights.update(read()))
    dcp.set_model_state_dict(model, weights, options=FROM_MAIN)


class NamedOptimizerState:
    """The state of an optimizer by names of parameters, which do not depend on their order."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Tensors are those of the optimizer, sharded if they are."""
        if not self.optimizer.state:  # no step was taken yet, or it keeps nothing, as plain SGD
            return self.optimizer.state_dict()
        return dict(dcp.get_optimizer_state_dict(self.model, self.optimizer))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """`state`, with full tensors, is read on the main process only."""
        if on_main(lambda: not state["state"]):
            self.optimizer.load_state_dict(on_main(lambda: state))
        else:
            own = state if is_main() else {}
            dcp.set_optimizer_state_dict(self.model, self.optimizer, own, options=FROM_MAIN)
