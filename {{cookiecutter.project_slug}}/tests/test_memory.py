"""Memory that is too small: a micro-batch that fits is found, or a smaller one taken in mid-run."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jobs
import numpy as np
import pytest
from conftest import lines_of
from ranks import RankError, Ranks

from training.settings.config import AUTO, TrainConfig

Settings = Callable[..., TrainConfig]


def log_of(config: TrainConfig) -> str:
    return (Path(config.runs_dir) / str(config.run_name) / "log.txt").read_text("utf-8")


def test_shrink_in_mid_run(ranks: Ranks, settings: Settings) -> None:
    """One rank runs out of memory above 6 rows: all take 8, then 4 at a time, the step is repeated,
    and losses, norms and learning rates are those of a run with memory enough."""
    whole = settings(run_name="whole", precision="fp64", dropout=0.0)
    ranks.run(2, jobs.run, whole)
    config = replace(whole, run_name="shrunk", oom="shrink")
    for rank in (0, 1):
        config = replace(config, run_name=f"shrunk-{rank}")
        ranks.run(2, jobs.run_with_little_memory, config, rank, 6, 3)
        assert "repeated with at most 8 rows" in log_of(config)
        assert "repeated with at most 4 rows" in log_of(config)
        for name in ("step", "loss", "grad_norm", "lr", "epoch"):
            expected = [line[name] for line in lines_of(whole)]
            np.testing.assert_allclose([x[name] for x in lines_of(config)], expected, rtol=1e-9)


def test_stop_is_the_default(ranks: Ranks, settings: Settings) -> None:
    with pytest.raises(RankError) as error:
        ranks.run(2, jobs.run_with_little_memory, settings(), 1, 6, 3)
    assert error.value.kinds[1] == "OutOfMemoryError"


def test_not_even_one_row(ranks: Ranks, settings: Settings) -> None:
    config = settings(oom="shrink")
    with pytest.raises(RankError, match="memory is too small for a single row") as error:
        ranks.run(2, jobs.run_with_little_memory, config, 0, 0, 2)
    assert error.value.kinds == ["UserError", "UserError"]


def test_auto_finds_what_fits(ranks: Ranks, settings: Settings) -> None:
    """16 rows a rank are tried first; 6 fit on one of two ranks: 4 are taken on both, and the run
    is that of --batch-size 4, to the bit."""
    plain = settings(run_name="plain", batch_size=4)
    ranks.run(2, jobs.run, plain)
    config = replace(plain, run_name="auto", batch_size=AUTO)
    ranks.run(2, jobs.run_with_little_memory, config, 1, 6, 0)
    assert "batch_size auto: 4 rows at a time fit, x 4 accumulated" in log_of(config)
    for name in ("step", "loss", "grad_norm"):
        assert [x[name] for x in lines_of(config)] == [x[name] for x in lines_of(plain)]
