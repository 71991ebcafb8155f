"""--compile: few shapes, chosen by the rows; compiled seldom; the numbers of an eager run."""

import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jobs
import numpy as np
import pytest
from conftest import lines_of
from ranks import Ranks
from test_sampler import Rows, make_plan

from training.settings.config import TrainConfig
from training.step.batch_plan import choose_lengths

Settings = Callable[..., TrainConfig]


def padded(lengths: np.ndarray, chosen: Any) -> int:
    chosen = np.array(chosen)
    return int(chosen[np.searchsorted(chosen, lengths)].sum())


@pytest.mark.parametrize("seed", range(5))
def test_lengths_are_the_best_choice(seed: int) -> None:
    """No other three lengths need fewer tokens."""
    lengths = np.random.default_rng(seed).geometric(0.2, 60).clip(1, 14)
    chosen = choose_lengths(Rows(lengths), 3)  # type: ignore[arg-type]
    assert list(chosen) == sorted(set(chosen))
    assert len(chosen) <= 3
    others = itertools.combinations(np.unique(lengths), 3)
    least = min(padded(lengths, o) for o in others if o[-1] == lengths.max())
    assert padded(lengths, chosen) == least


def test_lengths_of_long_texts_and_of_equal_ones() -> None:
    """Thousands of different lengths are distinguished coarsely; the longest row always fits."""
    lengths = np.random.default_rng(0).integers(5, 8192, 20_000)
    chosen = choose_lengths(Rows(lengths))  # type: ignore[arg-type]
    assert len(chosen) == 8
    assert chosen[-1] == lengths.max()
    assert padded(lengths, chosen) < 1.15 * lengths.sum()
    assert list(choose_lengths(Rows(np.full(50, 12)))) == [12]  # type: ignore[arg-type]


def test_few_shapes_and_the_same_rows() -> None:
    """Every micro-batch has all its rows and one of the lengths; rows of weight 0 are fillers, and
    the others are those of the plan without lengths. 203 rows: the last step is short."""
    usual, fixed = (make_plan(203, 32, world=3, micro=8, lengths=chosen)
                    for chosen in (None, np.array([10, 30, 59])))  # fmt: skip
    for ours, theirs in zip(fixed, usual, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert (len(one.rows), len(one.weight)) == (8, 8)
            assert one.length in (10, 30, 59)
            assert ours.store.lengths(one.rows).max() <= one.length
            real = one.weight > 0
            assert list(one.rows[real]) == list(other.rows[other.weight > 0])
            assert one.weight_sum == other.weight_sum
    steps = zip(*(list(plan) for plan in fixed), strict=True)
    for micro_batches in itertools.islice(steps, 1):
        computed = sum(len(m.rows) * m.length for m in micro_batches)
        assert micro_batches[0].step_padded_tokens >= computed


NEEDS_COMPILER = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("g++") is None, reason="PyTorch compiles with g++ on a CPU"),
]


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=NEEDS_COMPILER)])
def test_compiled_run(ranks: Ranks, settings: Settings, backend: str) -> None:
    """Two ranks, two epochs: the losses of an eager run, compiled at most once a length, and the
    evaluation, which is not compiled, gives the same metrics."""
    eager = settings(run_name="eager", dropout=0.0, epochs=2, eval_batch_size=7)
    compiled = replace(eager, run_name="compiled", compile=True)
    ranks.run(2, jobs.run, eager)
    ranks.run(2, jobs.run_compiled, compiled, backend)
    ours, theirs = lines_of(compiled), lines_of(eager)
    assert len(ours) == 14
    np.testing.assert_allclose(
        [x["loss"] for x in ours], [x["loss"] for x in theirs], rtol=1e-4, atol=1e-5
    )
    counts = [line["compilations"] for line in ours]
    assert counts == sorted(counts)
    assert 1 <= counts[-1] <= 8
    assert counts[-1] == counts[len(counts) // 2]  # the second epoch compiles nothing
    assert all("compilations" not in line for line in theirs)
