"""torch.compile with few shapes: the training rows choose the lengths that batches are padded to.

PyTorch compiles for the first shape that it sees, and for any length when a second one comes. What
else it takes for granted of a shape makes it compile again, seconds in mid-run. So with `--compile`
batches have all their rows (some may be fillers) and one of at most LENGTHS lengths.
"""

import logging
from typing import Any

import numpy as np
import torch
from torch import nn

from training.dataset.token_store import ROWS_AT_A_TIME, TokenStore
from training.settings.config import TrainConfig

log = logging.getLogger("training")
LENGTHS = 8  # as many as torch.compile keeps versions of the same code, by default
FINEST = 512  # lengths are told apart so finely; more takes long and saves nothing


def choose_lengths(store: TokenStore, most: int = LENGTHS) -> np.ndarray:
    """At most `most` lengths to pad rows to, so that padding is least: ascending, (lengths,)."""
    counts = np.zeros(1, np.int64)
    for begin in range(0, len(store), ROWS_AT_A_TIME):
        end = begin + ROWS_AT_A_TIME
        found = np.bincount(store.lengths(slice(begin, end)), minlength=len(counts))
        found[: len(counts)] += counts
        counts = found
    longest = len(counts) - 1
    unit = -(-longest // FINEST)
    rounded = np.minimum(-(-np.arange(len(counts)) // unit) * unit, longest)
    counts = np.bincount(rounded, weights=counts)
    sizes = np.flatnonzero(counts)
    rows = np.cumsum(counts[sizes])
    # Computed for all rows of at most sizes[j], the best way: with one length, then with more.
    tokens = rows * sizes
    between = (rows[None, :] - rows[:, None]) * sizes[None, :]  # rows above sizes[i], at sizes[j]
    between[np.tril_indices(len(sizes))] = np.inf
    cuts = []
    for _ in range(min(most, len(sizes)) - 1):
        total = tokens[:, None] + between
        cuts.append(total.argmin(axis=0))
        tokens = np.minimum(total.min(axis=0), rows * sizes)
    chosen = [len(sizes) - 1]
    for cut in reversed(cuts):
        chosen.append(int(cut[chosen[-1]]))
    return sizes[sorted(set(chosen))]


class Compiler:
    """Compiles what a step calls, and counts how often. Without `--compile` it does nothing."""

    def __init__(self, config: TrainConfig, store: TokenStore) -> None:
        """`store`: the training rows."""
        self.lengths = choose_lengths(store) if config.compile else None
        self._compiled: set[str] = set()  # identities that PyTorch gives to compilations

    def compile(self, with_loss: nn.Module) -> None:
        """In place. The model in it stays as it is for evaluations, which have other shapes."""
        if self.lengths is not None:
            log.info("torch.compile: batches are padded to %s tokens", list(map(int, self.lengths)))
            with_loss.compile(backend=self._backend, dynamic=None)

    def counted(self) -> dict[str, int]:
        """For the log: how often it was compiled so far."""
        return {} if self.lengths is None else {"compilations": len(self._compiled)}

    def _backend(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        """Inductor, which is given a part of the step at a time (DDP's buckets part it)."""
        from torch._dynamo import lookup_backend  # seconds, for those who ask for it
        from torch._guards import CompileContext

        identity = str(CompileContext.current_compile_id())
        if identity not in self._compiled:
            self._compiled.add(identity)
            log.info("torch.compile: compiling, time %d", len(self._compiled))
            if self.lengths is not None and len(self._compiled) == len(self.lengths) + 1:
                log.warning("that is more often than there are lengths; TORCH_LOGS=recompiles,"
                            "graph_breaks tells why")  # fmt: skip
        return lookup_backend("inductor")(graph, inputs)
