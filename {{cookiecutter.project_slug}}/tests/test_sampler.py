"""The batch plan: global batches depend only on seed and epoch, and are dealt out evenly."""

import itertools

import numpy as np
import pytest

from training.settings.batch_sizes import BatchSizes
from training.step.batch_plan import WINDOW, BatchPlan, shuffled


class Rows:
    """Rows whose lengths are given."""

    def __init__(self, lengths: np.ndarray) -> None:
        self._lengths = lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        return self._lengths[rows]


def make_plan(rows: int, size: int, world: int = 1, micro: int = 32, **options: object) -> list:
    lengths = np.random.default_rng(0).integers(3, 60, rows)
    return [
        BatchPlan(Rows(lengths), BatchSizes(size, micro, 0), seed=1,  # type: ignore[arg-type]
                  num_replicas=world, rank=rank, **options)  # type: ignore[arg-type]
        for rank in range(world)
    ]  # fmt: skip


@pytest.mark.parametrize("n", [1, 2, 3, 7, 16, 17, 1000, 4097])
def test_shuffled_is_a_permutation(n: int) -> None:
    """Every number once; another key, another order."""
    order = shuffled(np.arange(n), n, (1, 2))
    assert sorted(order) == list(range(n))
    assert n < 7 or list(order) != list(shuffled(np.arange(n), n, (1, 3)))


def test_shuffled_gives_any_position_by_itself() -> None:
    """A billion rows: three positions cost three."""
    n = 10**9
    positions = np.array([5, 123_456_789, n - 1])
    together = shuffled(positions, n, (7,))
    assert [shuffled(np.array([p]), n, (7,))[0] for p in positions] == list(together)
    assert len(set(together)) == 3
    assert (together < n).all()


def test_shuffled_is_fair() -> None:
    """Each number is as likely in each place: chi-squared of 6 x 6 counts over 3,000 keys."""
    n, keys = 6, 3000
    counts = np.zeros((n, n))
    for key in range(keys):
        counts[np.arange(n), shuffled(np.arange(n), n, (key, 0))] += 1
    expected = keys / n
    assert ((counts - expected) ** 2 / expected).sum() < 60  # 25 degrees of freedom: p < 0.0001


@pytest.mark.parametrize("grouped", [True, False])
@pytest.mark.parametrize("rows", [32, 33, 203, 32 * WINDOW + 40])
def test_every_row_once(rows: int, grouped: bool) -> None:
    """An epoch has every row once, the short batch last; ranks share each batch."""
    for world, micro in [(1, 32), (2, 16), (3, 7), (4, 2), (5, 3)]:
        plans = make_plan(rows, 32, world, micro, group_by_length=grouped)
        seen: list[int] = []
        for steps in itertools.zip_longest(*plans):
            assert None not in steps  # the same number of micro-batches on every rank
            assert len({m.ends_step for m in steps}) == 1
            assert all(len(m.rows) <= micro for m in steps)
            seen += [r for m in steps for r, w in zip(m.rows, m.weight, strict=True) if w > 0]
        assert sorted(seen) == list(range(rows))
        assert len(plans[0]) == len(list(plans[0]))


def test_global_batches_do_not_depend_on_ranks() -> None:
    """Whatever the ranks and micro-batches, step by step the same rows and the same weight."""
    reference = [sorted(make_plan(203, 32)[0].global_batch(step)) for step in range(7)]
    for world, micro in [(2, 16), (3, 5), (4, 2)]:
        step, rows, weights = 0, [], 0.0
        for micros in zip(*make_plan(203, 32, world, micro), strict=True):
            rows += [r for m in micros for r, w in zip(m.rows, m.weight, strict=True) if w > 0]
            weights += sum(m.weight.sum() for m in micros)
            if micros[0].ends_step:
                assert sorted(rows) == reference[step]
                assert weights == micros[0].weight_sum == micros[0].step_rows
                step, rows, weights = step + 1, [], 0.0
        assert step == 7


def test_epochs_differ_and_repeat() -> None:
    """set_epoch gives another order, the same one again for the same epoch."""
    plan = make_plan(203, 32)[0]
    orders = []
    for epoch in (0, 1, 0):
        plan.set_epoch(epoch)
        orders.append([list(m.rows) for m in plan])
    assert orders[0] == orders[2] != orders[1]


@pytest.mark.parametrize("first", [0, 1, 6, 7])
def test_resumes_at_any_step(first: int) -> None:
    """A resumed epoch is the rest of the whole one."""
    plan = make_plan(203, 32, micro=8)[0]
    whole = [m for m in plan if m is not None]
    plan.set_epoch(0, first)
    rest = list(plan)
    assert len(plan) == len(rest)
    assert [list(m.rows) for m in rest] == [list(m.rows) for m in whole[first * 4 :]]


def test_grouping_saves_padding_and_ranks_are_balanced() -> None:
    """Like lengths share a batch, and ranks that work at the same time have about equal work."""
    shares = {}
    for grouped in (True, False):
        plans = make_plan(5000, 32, 4, 4, group_by_length=grouped)
        micros = [m for m in plans[0] if m.ends_step]
        shares[grouped] = 1 - sum(m.step_tokens for m in micros) / sum(
            m.step_padded_tokens for m in micros
        )
    assert shares[True] < 0.05
    assert shares[True] < shares[False]
    lengths = plans[0].store.lengths
    plans = make_plan(5000, 32, 4, 8)
    work = np.array([[len(m.rows) * lengths(m.rows).max() for m in ms] for ms in zip(*plans)])  # noqa: B905
    assert (work.max(1) / work.mean(1)).mean() < 1.15


def test_padded_tokens_are_those_computed() -> None:
    """What the log calls padding is what the ranks really compute, fillers included."""
    for rows in (203, 33):
        plans = make_plan(rows, 32, 4, 3)
        lengths = plans[0].store.lengths
        computed = said = 0
        for micros in zip(*plans, strict=True):
            computed += sum(len(m.rows) * int(lengths(m.rows).max()) for m in micros)
            said += micros[0].step_padded_tokens if micros[0].ends_step else 0
        assert computed == said
