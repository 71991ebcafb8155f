"""Memory that is too small: `--batch-size auto` finds a micro-batch that fits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jobs
import pytest
from conftest import lines_of
from ranks import RankError, Ranks

from training.settings.config import AUTO, TrainConfig

Settings = Callable[..., TrainConfig]


def log_of(config: TrainConfig) -> str:
    return (Path(config.runs_dir) / str(config.run_name) / "log.txt").read_text("utf-8")


def test_out_of_memory_ends_the_run(ranks: Ranks, settings: Settings) -> None:
    """In the middle of a run it is an error, with PyTorch's own type."""
    with pytest.raises(RankError) as error:
        ranks.run(2, jobs.run_with_little_memory, settings(timeout=5.0), 1, 6, 3)
    assert error.value.kinds[1] == "OutOfMemoryError"


def test_not_even_one_row(ranks: Ranks, settings: Settings) -> None:
    """--batch-size auto on one rank without memory for a row: all ranks say what could help."""
    config = settings(batch_size=AUTO)
    with pytest.raises(RankError, match="memory is too small for a single row") as error:
        ranks.run(2, jobs.run_with_little_memory, config, 0, 0, 0)
    assert error.value.kinds == ["UserError", "UserError"]


@pytest.mark.parametrize("where", ["forward", "backward", "first update", "update"])
def test_auto_finds_what_fits(ranks: Ranks, settings: Settings, where: str) -> None:
    """16 rows a rank are tried first; 6 fit on one of two ranks: 4 are taken on both, and the run
    is bit-identical to that of --batch-size 4. Wherever in a step memory ran out, also in one with
    the optimizer's moments in place, nothing of that step is kept."""
    plain = settings(run_name="plain", batch_size=4)
    ranks.run(2, jobs.run, plain)
    config = replace(plain, run_name="auto", batch_size=AUTO)
    assert ranks.run(2, jobs.run_with_little_memory, config, 1, 6, 0, where) == [0, 0]
    assert "batch_size auto: 4 rows at a time fit, with 4 accumulation steps" in log_of(config)
    for name in ("step", "loss", "grad_norm"):
        assert [x[name] for x in lines_of(config)] == [x[name] for x in lines_of(plain)]
