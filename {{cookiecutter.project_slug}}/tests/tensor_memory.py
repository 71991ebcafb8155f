"""How much memory tensors take while a checkpoint is written or read, by rank."""

import gc
import weakref
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

PLAIN = (torch.Tensor, torch.nn.Parameter)


class TensorMemory(TorchDispatchMode):
    """Inside a `with`, follows the tensors that are made there: the most bytes that they have at
    once, and the most full tensors, which are those of the shape of a whole sharded parameter."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.full = {tuple(p.shape) for p in model.parameters() if isinstance(p, DTensor)}
        self.known = {storage_of(t) for t in gc.get_objects() if type(t) in PLAIN}
        self.live: dict[int, tuple[int, bool]] = {}  # by storage: bytes, whether a full tensor
        self.peak_bytes = self.peak_full = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does with the local tensors comes here again
        output = func(*args, **(kwargs or {}))
        for tensor in tree_iter(output):
            if type(tensor) in PLAIN:  # a wrapper has no memory of its own
                self._see(tensor)
        return output

    def _see(self, tensor: torch.Tensor) -> None:
        key, storage = storage_of(tensor), tensor.untyped_storage()
        if key in self.known:
            return
        if key not in self.live:
            weakref.finalize(storage, self.live.pop, key, None)
        is_full = tensor.ndim > 1 and tuple(tensor.shape) in self.full
        self.live[key] = storage.nbytes(), is_full or self.live.get(key, (0, False))[1]
        self.peak_bytes = max(self.peak_bytes, sum(size for size, _ in self.live.values()))
        self.peak_full = max(self.peak_full, sum(full for _, full in self.live.values()))


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
