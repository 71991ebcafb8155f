"""How much memory tensors take while a checkpoint is written or read, by rank."""

import ctypes
import gc
import math
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

STATUS = Path("/proc/self/status")
PLAIN = (torch.Tensor, torch.nn.Parameter)


class TensorMemory(TorchDispatchMode):
    """Inside a `with`, follows the tensors that are made there.

    `peak_bytes`: the most bytes that they have at once. `peak_full`: the most full tensors at once,
    which are matrices of one of `shapes`, small ones aside. `growth`: by how many bytes the
    resident memory of the process was higher than before, at most; 0 where this is not Linux.
    """

    def __init__(self, shapes: Iterable[tuple[int, ...]]) -> None:
        super().__init__()
        self.full = {shape for shape in shapes if len(shape) > 1 and math.prod(shape) >= 1024}
        gc.collect()
        self.known = {storage_of(t) for t in gc.get_objects() if type(t) in PLAIN}
        self.live: dict[int, tuple[int, bool]] = {}  # by storage: bytes, whether a full tensor
        self.bytes = self.peak_bytes = self.num_full = self.peak_full = 0

    def __enter__(self) -> Self:
        if STATUS.exists():
            ctypes.CDLL(None).malloc_trim(0)  # or memory that was freed would serve again
            STATUS.with_name("clear_refs").write_text("5")  # the peak is what it is now
        self.before = peak_memory()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self.growth = peak_memory() - self.before
        super().__exit__(*error)

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
        was_full = key in self.live and self.live[key][1]  # this may be a part of it
        if key in self.live:
            self._forget(key)  # its size may be another one
        else:
            weakref.finalize(storage, self._forget, key)
        is_full = was_full or tuple(tensor.shape) in self.full
        self.live[key] = storage.nbytes(), is_full
        self.bytes, self.num_full = self.bytes + storage.nbytes(), self.num_full + is_full
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        self.peak_full = max(self.peak_full, self.num_full)

    def _forget(self, key: int) -> None:
        size, is_full = self.live.pop(key)
        self.bytes, self.num_full = self.bytes - size, self.num_full - is_full


def peak_memory() -> int:
    """Bytes of the process that were in memory at once, at most, since this was last reset."""
    if not STATUS.exists():
        return 0
    return int(STATUS.read_text("utf-8").split("VmHWM:")[1].split()[0]) * 1024


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
