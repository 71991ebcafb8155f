"""Full tensors on the main process, sharded ones (FSDP) or replicas on the ranks.

Checkpoints hold full tensors, whichever strategy wrote them. Every rank calls each function here.
Sharded tensors are gathered one at a time into the main process's memory.
"""

from collections.abc import Callable
from typing import Any

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


def gathering(model: nn.Module) -> dcp.StateDictOptions:
    """Sharded tensors go to the CPU of the main process. Others are not copied at all."""
    is_sharded = any(isinstance(p, DTensor) for p in model.parameters())
    return dcp.StateDictOptions(full_state_dict=True, cpu_offload=is_sharded)


def full_weights(model: nn.Module) -> dict[str, Any]:
    """The weights by name; of a sharded model on the main process only, elsewhere empty."""
    return dcp.get_model_state_dict(model, options=gathering(model))


def load_weights(model: nn.Module, read: Callable[[], dict[str, Tensor]]) -> None:
    """Give every rank the weights that `read` returns on the main process."""
    watchdog.report("loading weights")
    weights: dict[str, Any] = {}
    on_main(lambda: weights.update(read()))
    dcp.set_model_state_dict(model, weights, options=FROM_MAIN)


class FullOptimizerState:
    """The state of an optimizer as a part of a checkpoint, by names of parameters."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        """Complete on the main process."""
        if not self.optimizer.state:  # no step was taken yet, or it keeps nothing, as plain SGD
            return self.optimizer.state_dict()
        options = gathering(self.model)
        return dict(dcp.get_optimizer_state_dict(self.model, self.optimizer, options=options))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """`state` is read on the main process only."""
        if on_main(lambda: not state["state"]):
            self.optimizer.load_state_dict(on_main(lambda: state))
        else:
            own = state if is_main() else {}
            dcp.set_optimizer_state_dict(self.model, self.optimizer, own, options=FROM_MAIN)
