"""The batch plan: which rows make up each optimizer step, and which rank computes which of them.

The order of an epoch depends only on (seed, epoch): the plan first cuts global batches, then deals
them to ranks. Memory does not grow with the number of rows: the order is computed window by window,
from a permutation that gives any position directly.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from training.dataset.token_store import TokenStore
from training.distributed.wrap import num_replicas
from training.settings.batch_sizes import BatchSizes, batch_sizes
from training.settings.config import TrainConfig
from training.settings.errors import UserError
from training.step.loss import row_weight

WINDOW = 64  # global batches in which rows are sorted by length
TOO_LITTLE_MEMORY = (
    "memory is too small for a single row; try --gradient-checkpointing, a shorter --max-length, "
    "--strategy fsdp, or a smaller model"
)
NUM_LENGTHS = 8  # as many as torch.compile keeps versions of the same code, by default
FINEST = 512  # lengths are told apart this finely; a finer search takes long and saves nothing
ROUNDS = 6  # of the permutation's mixing, an even number


@dataclass(frozen=True)
class MicroBatch:
    """What one rank computes in one forward, and what it needs to know about the whole step."""

    rows: np.ndarray  # (batch,) row numbers, int64
    weight: np.ndarray  # (batch,) weight of each row's loss, float64; 0 for a filler row
    ends_step: bool  # the last micro-batch of its optimizer step
    length: int  # tokens that rows are padded to
    # Of the whole global batch, the same on all ranks:
    weight_sum: float
    step_rows: int
    step_tokens: int
    step_padded_tokens: int  # tokens computed, padding included


def shuffled(positions: np.ndarray, n: int, key: tuple[int, ...]) -> np.ndarray:
    """The numbers at `positions` of a random order of range(n), without making that order.

    A Feistel network permutes the smallest power of two that holds n; numbers that fall outside n
    are permuted again until they are inside (cycle walking). See Black and Rogaway, "Ciphers with
    Arbitrary Finite Domains", 2002. A list of a billion rows would take 8 GB on each rank.
    """
    bits = max(6, (n - 1).bit_length())
    low = bits // 2
    # With an odd number of bits the halves differ by one, and they change places in every round.
    masks = np.uint64((1 << (bits - low)) - 1), np.uint64((1 << low) - 1)
    round_keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)
    numbers = positions.astype(np.uint64)
    walking = np.arange(len(numbers))
    while len(walking):
        left, right = numbers[walking] >> np.uint64(low), numbers[walking] & masks[1]
        for i, round_key in enumerate(round_keys):
            left, right = right, left ^ (_mix(right + round_key) & masks[i % 2])
        numbers[walking] = left << np.uint64(low) | right
        walking = walking[numbers[walking] >= n]
    return numbers.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """Spread every bit over all 64: the finalizer of SplitMix64 (Steele and others, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class BatchPlan(DistributedSampler[MicroBatch]):
    """Deals global batches to ranks, one micro-batch at a time.

    Call `set_epoch` before each epoch. `row_weight` gives the loss weights of rows: (n,) -> (n,).
    `lengths`, ascending: pad each micro-batch to one of these, and fill it up to its full number of
    rows. Without it a micro-batch is padded to its longest row.
    """

    def __init__(
        self,
        store: TokenStore,
        sizes: BatchSizes,
        *,
        seed: int,
        group_by_length: bool = True,
        row_weight: Callable[[np.ndarray], np.ndarray] | None = None,
        lengths: np.ndarray | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        if len(store) < sizes.global_batch_size:
            raise UserError(
                f"{len(store)} rows do not fill one step of global_batch_size "
                f"{sizes.global_batch_size}; lower it or add data"
            )
        super().__init__(store, num_replicas, rank, seed=seed)
        self.store, self.sizes, self.lengths = store, sizes, lengths
        self.group_by_length = group_by_length
        self.row_weight = row_weight or (lambda rows: np.ones(len(rows)))
        self.steps_per_epoch = math.ceil(len(store) / sizes.global_batch_size)
        self.first_step = 0
        self._window: tuple[tuple[int, int], list[np.ndarray]] | None = None

    def set_epoch(self, epoch: int, first_step: int = 0) -> None:
        """Choose the epoch, and the step of it to begin with (for a resumed run)."""
        super().set_epoch(epoch)
        self.first_step = first_step

    def evaluation_steps(self, per_epoch: int) -> set[int]:
        """Where in an epoch to evaluate, evenly spaced; its end is step 0 of the next epoch."""
        steps = self.steps_per_epoch
        return {-(-steps * i // per_epoch) % steps for i in range(1, per_epoch + 1)}

    def halve(self) -> None:
        """Halve the batch size, from the next `__iter__` on. Errors: UserError if it is 1."""
        rows = self.sizes.batch_size
        if rows == 1:
            raise UserError(TOO_LITTLE_MEMORY)
        total, half = self.sizes.global_batch_size, math.ceil(rows / 2)
        self.sizes = BatchSizes(total, half, math.ceil(total / (half * self.num_replicas)))

    def __len__(self) -> int:
        """Micro-batches left for this rank in this epoch. The last, short step may need fewer."""
        whole, rest = divmod(len(self.store), self.sizes.global_batch_size)
        left = max(0, whole - self.first_step) * self._accumulation(self.sizes.global_batch_size)
        return left + (self._accumulation(rest) if self.first_step <= whole else 0)

    def __iter__(self) -> Iterator[MicroBatch]:
        for step in range(self.first_step, self.steps_per_epoch):
            yield from self._deal(self.global_batch(step))

    def _accumulation(self, rows: int) -> int:
        """Micro-batches of a rank in a step of `rows` rows."""
        return math.ceil(rows / (self.num_replicas * self.sizes.batch_size))

    def global_batch(self, step: int, epoch: int | None = None) -> np.ndarray:
        """Row numbers of one step (by default of this epoch), from short to long: (rows,)."""
        window, place = divmod(step, WINDOW)
        key = (self.epoch if epoch is None else epoch, window)
        if self._window is None or self._window[0] != key:
            self._window = key, self._batches_of(*key)
        return self._window[1][place]

    def _batches_of(self, epoch: int, window: int) -> list[np.ndarray]:
        """The global batches of one window of an epoch."""
        n, size = len(self.store), self.sizes.global_batch_size
        first, last = window * WINDOW * size, min(n, (window + 1) * WINDOW * size)
        rows = shuffled(np.arange(first, last), n, (self.seed, epoch))
        count = len(rows) // size
        rows, short = rows[: count * size], rows[count * size :]  # the short batch: random, last
        if self.group_by_length:
            order = shuffled(np.arange(count), count, (self.seed, epoch, window + 1))
            batches = list(self._by_length(rows).reshape(count, size)[order])
        else:
            batches = [self._by_length(batch) for batch in rows.reshape(count, size)]
        return [*batches, self._by_length(short)] if len(short) else batches

    def _by_length(self, rows: np.ndarray) -> np.ndarray:
        lengths = self.store.lengths(rows)
        small = np.min_scalar_type(lengths.max(initial=0))  # 16 bits are sorted by their digits
        return rows[np.argsort(lengths.astype(small), kind="stable")]

    def _deal(self, rows: np.ndarray) -> Iterator[MicroBatch]:
        """Cut a global batch into shares of similar length; ranks take neighboring ones at a time.

        A share without rows becomes one filler row of weight 0: every rank runs every collective.
        """
        lengths, weight = self.store.lengths(rows), self.row_weight(rows)
        ranks = self.num_replicas
        count = ranks * self._accumulation(len(rows))
        bounds = np.arange(count + 1) * len(rows) // count
        sizes = np.diff(bounds)
        padded = np.where(sizes == 0, lengths[0], lengths[bounds[1:] - 1])
        fill = np.maximum(sizes, 1)
        if self.lengths is not None:
            padded = self.lengths[np.searchsorted(self.lengths, padded)]
            fill[:] = self.sizes.batch_size
        of_step = float(weight.sum()), len(rows), int(lengths.sum()), int((fill * padded).sum())
        for share in range(self.rank, count, ranks):
            own, fillers = slice(bounds[share], bounds[share + 1]), fill[share] - sizes[share]
            own_rows = np.append(rows[own], rows[:1].repeat(fillers))
            own_weight = np.append(weight[own], np.zeros(fillers))
            ends_step = share + ranks >= count
            yield MicroBatch(own_rows, own_weight, ends_step, int(padded[share]), *of_step)


def choose_lengths(store: TokenStore, most: int = NUM_LENGTHS) -> np.ndarray:
    """At most `most` lengths to pad rows to, with the least padding: ascending, (lengths,).

    torch.compile needs few shapes: for each it compiles again, for seconds. Dynamic programming:
    quantiles pad two to five times as much on rows of uneven length.
    """
    lengths = store.lengths(slice(None))
    unit = -(-lengths.max() // FINEST)
    rounded = np.minimum(-(-lengths // unit) * unit, lengths.max())
    sizes, counts = np.unique(rounded, return_counts=True)
    rows = np.cumsum(counts)
    # tokens[j]: the fewest to compute for all rows of at most sizes[j]; with one length, then more.
    tokens = rows * sizes
    between = (rows[None, :] - rows[:, None]) * sizes[None, :]  # rows above sizes[i], at sizes[j]
    between = np.where(np.tri(len(sizes)), np.inf, between)
    cuts = []
    for _ in range(min(most, len(sizes)) - 1):
        total = tokens[:, None] + between
        cuts.append(total.argmin(axis=0))
        tokens = np.minimum(total.min(axis=0), rows * sizes)
    chosen = [len(sizes) - 1]
    for cut in reversed(cuts):
        chosen.append(int(cut[chosen[-1]]))
    return sizes[sorted(set(chosen))]


def build_plan(config: TrainConfig, train: TokenStore) -> BatchPlan:
    """The plan of a run on all ranks. Errors: UserError if the batch sizes do not agree."""
    sizes = batch_sizes(config, dist.get_world_size(), num_replicas(config.strategy))
    grouped, weight = config.group_by_length, row_weight(config, train)
    lengths = choose_lengths(train) if config.compile else None
    return BatchPlan(
        train, sizes, seed=config.seed, group_by_length=grouped, row_weight=weight, lengths=lengths
    )
