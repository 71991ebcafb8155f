"""Mistakes end every rank, in one line with the value and the way out, and leave nothing."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jobs
import pytest
from conftest import make_rows, write_tsv
from ranks import RankError, Ranks

from training.settings.config import TrainConfig

Settings = Callable[..., TrainConfig]

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "missing file": ({"train_file": ("tran.tsv",)}, "tran.tsv"),
    "missing column": ({"text_column": ("txt",)}, r"txt.*text"),
    "empty file": ({"train_file": ("{empty}",)}, "no rows"),
    "one class": ({"train_file": ("{one_class}",)}, "all 3 rows have the label 'x'"),
    "unseen label": ({"val_file": ("{unseen}",)}, "'zebra'.*not among|not among.*'zebra'"),
    "batch too large": ({"global_batch_size": 4096}, "203 rows do not fill .* 4096; lower it"),
    "no such model": ({"model": "no-such/model"}, "'no-such/model' is neither a model folder nor"),
    "positions": ({"max_length": 65}, "max_length 65 is more than .* give --max-length 64"),
    "runs_dir is a file": ({"runs_dir": "{empty}"}, "is not a folder"),
    "three batch sizes": (
        {"gradient_accumulation_steps": 3, "global_batch_size": 32},
        "32 is not batch_size 16 x gradient_accumulation_steps 3 x world size 2 = 96",
    ),
    "no tokenizer": ({"model": "{no_tokenizer}"}, "no tokenizer of its own"),
    "no weights file": ({"class_weights": "weights.json"}, "'weights.json' is not none, balanced"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line_on_every_rank(
    ranks: Ranks, settings: Settings, tmp_path: Path, tiny_model: Path, case: str
) -> None:
    """All ranks raise UserError or FileNotFoundError; no run folder is left."""
    written = {
        "{empty}": write_tsv(tmp_path / "empty.tsv", []),
        "{one_class}": write_tsv(tmp_path / "one.tsv", [("a", "x"), ("b", "x"), ("c", "x")]),
        "{unseen}": write_tsv(tmp_path / "val.tsv", [*make_rows(5, 1), ("stripes", "zebra")]),
    }
    written["{no_tokenizer}"] = tmp_path / "model"
    shutil.copytree(tiny_model, tmp_path / "model", ignore=shutil.ignore_patterns("tokenizer*"))
    changes, message = CASES[case]
    for name, value in changes.items():
        if isinstance(value, tuple):
            changes = changes | {name: tuple(str(written.get(v, v)) for v in value)}
        elif value in written:
            changes = changes | {name: str(written[value])}
    config = settings(**changes)
    with pytest.raises(RankError, match=message) as error:
        ranks.run(2, jobs.run, config)
    assert len(error.value.kinds) == 2
    assert set(error.value.kinds) <= {"UserError", "FileNotFoundError"}
    assert not (Path(config.runs_dir) / "run").exists()


def test_wrong_edits_of_model_py(ranks: Ranks, settings: Settings) -> None:
    """A loss that is a mean, logits for other labels, a part that is not used on one rank: a
    sentence that names model.py, not a stack of collectives."""
    for edit, message in (
        ("mean loss", r"loss_per_row must return one loss per row, of shape \(4,\), not \(\)"),
        ("loss of before", r"loss_per_row must take \(logits, labels, config\)"),
        ("NaN for a class", "loss_per_row gives a loss that is not finite"),
        ("two logits", r"gives logits of shape \(4, 2\) for 4 rows; it must be \(4, 3\)"),
    ):
        with pytest.raises(RankError, match=message) as error:
            ranks.run(2, jobs.run_edited, settings(run_name=edit), edit)
        assert error.value.kinds == ["UserError", "UserError"]
    config = settings(run_name="skipped", timeout=5.0)  # of rank 0's wait for rank 1
    message = r"did not contribute to the loss on rank 1; use them"
    with pytest.raises(RankError, match=message) as error:
        ranks.run(2, jobs.run_edited, config, "skipped on a rank")
    assert error.value.kinds[1] == "UserError"


def test_bad_rows_are_listed(ranks: Ranks, settings: Settings, tmp_path: Path) -> None:
    """--on-bad-rows skip leaves them out, says how many, and lists them in bad_rows.tsv."""
    path = write_tsv(tmp_path / "t.tsv", [*make_rows(64, 1), ("", "food"), ("cat", "")])
    config = settings(train_file=(str(path),), max_steps=1)
    with pytest.raises(RankError, match=r"2 of 66 rows are bad(.|\n)*t.tsv:66"):
        ranks.run(2, jobs.run, config)
    skipping = settings(train_file=(str(path),), max_steps=1, on_bad_rows="skip")
    ranks.run(2, jobs.run, skipping)
    run = Path(config.runs_dir) / "run"
    listed = (run / "bad_rows.tsv").read_text("utf-8").splitlines()
    assert [line.split("\t")[1] for line in listed] == ["66", "67"]
    assert "2 bad rows left out" in (run / "log.txt").read_text("utf-8")
