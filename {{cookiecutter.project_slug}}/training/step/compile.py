"""`--compile`: batches of few shapes, and a count of what is compiled.

PyTorch compiles again, for seconds, when a shape is not as it assumed. So with `--compile` all
batches have the full number of rows (some may be fillers), and are padded to one of at most
NUM_LENGTHS lengths, which the training rows choose.
"""

import logging
from typing import Any

import numpy as np
import torch

from training.dataset.token_store import ROWS_AT_A_TIME, TokenStore

log = logging.getLogger("training")
NUM_LENGTHS = 8  # as many as torch.compile keeps versions of the same code, by default
FINEST = 512  # lengths are told apart this finely; a finer search takes long and saves nothing


def choose_lengths(store: TokenStore, most: int = NUM_LENGTHS) -> np.ndarray:
    """At most `most` lengths to pad rows to, with the least padding: ascending, (lengths,).

    By dynamic programming: quantiles pad two to five times as much on rows of uneven length.
    """
    parts = [slice(i, i + ROWS_AT_A_TIME) for i in range(0, len(store), ROWS_AT_A_TIME)]
    longest = max(int(store.lengths(part).max()) for part in parts)
    histogram = np.zeros(longest + 1)  # rows of each length
    for part in parts:
        histogram += np.bincount(store.lengths(part), minlength=longest + 1)
    unit = -(-longest // FINEST)
    rounded = np.minimum(-(-np.arange(longest + 1) // unit) * unit, longest)
    counts = np.bincount(rounded, weights=histogram)
    sizes = np.flatnonzero(counts)
    rows = np.cumsum(counts[sizes])
    # tokens[j]: the fewest to compute for all rows of at most sizes[j]; with one length, then more.
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


class CompileCounter:
    """torch.compile's default backend, which also counts graphs: one a step, or with DDP one for
    each bucket of gradients."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        from torch._dynamo import lookup_backend  # takes seconds to import

        self.graphs += 1
        log.info(f"torch.compile: compiling graph {self.graphs}")
        return lookup_backend("inductor")(graph, inputs)
