"""Promise: a model of any family trains, resumes and predicts as the others do.

The table in the template's docs/models.md is written by

    MODELS_TABLE=../docs/models.md python -m pytest -m '' tests/test_architectures.py
"""

import json
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
import torch
from conftest import lines_of, make_rows
from families import FAMILIES, save_family
from ranks import PROJECT, RankError, Ranks

from training.settings.config import TrainConfig

Settings = Callable[..., TrainConfig]
Checks = dict[str, Callable[[], Any]]
QUICK = ("bert", "gpt2", "t5")
TEXTS = ["cat dog horse", "rain [SEP] wind </s> again <pad>", "a very old fox " * 60, "猫", "zzz a"]
COLUMNS = ("trains", "1×16 = 2×8", "resumes", "FSDP = DDP", "pipeline = predict.py")
# What fails for a family, and why: the last words of its row in the table.
PADDING = "its logits depend on the padding, as the log says"
DEPENDS = ("1×16 = 2×8", "pipeline = predict.py")
KNOWN: dict[str, tuple[tuple[str, ...], str]] = {
    "convbert": (DEPENDS, PADDING),
    "nystromformer": (DEPENDS, PADDING),
    "fnet": (COLUMNS, "refused: it has no attention mask"),
    "xlnet": (COLUMNS, "refused: it classifies by the last position, which may be padding"),
}


@pytest.fixture(scope="module")
def table() -> Iterator[dict[str, set[str]]]:
    """What failed for each family; a Markdown table of it where MODELS_TABLE says."""
    failed: dict[str, set[str]] = {}
    yield failed
    if path := os.environ.get("MODELS_TABLE"):
        lines = [f"| family | {' | '.join(COLUMNS)} | remarks |", "|---" * (len(COLUMNS) + 2) + "|"]
        for name, columns in failed.items():
            cells = ["no" if column in columns else "yes" for column in COLUMNS]
            lines.append(f"| {name} | {' | '.join(cells)} | {KNOWN.get(name, ('', ''))[1]} |")
        Path(path).write_text(TABLE_HEAD + "\n".join(lines) + "\n", encoding="utf-8")


TABLE_HEAD = """# Which models work
Tiny models with random weights, of each family in the form in which the hub has it, on two CPU
ranks; written by the command in `tests/test_architectures.py` of the generated project.

- *1×16 = 2×8*: one rank and two have the same losses, to 1e-5.
- *FSDP = DDP*: losses and gradient norms are the same to 6e-7, in fp32 on two ranks; and in fp64
  (where many types compute some values in fp32) in a run that begins with DDP, resumes with FSDP on
  three ranks, and ends with DDP. Mixtral has no fp64: 1e-5. Where padding matters: two ranks.
- *resumes*: stopped and resumed is bit-identical to never stopped.
- *pipeline = predict.py*: `transformers.pipeline("text-classification", "runs/NAME/best")(texts,
  truncation=True)` gives the same probabilities, one by one and with `batch_size=8`.

"""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in FAMILIES],
)
def test_family(
    name: str,
    ranks: Ranks,
    settings: Settings,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    table: dict[str, set[str]],
) -> None:
    folder = save_family(name, tmp_path / "model", [text for text, _ in make_rows(300, seed=3)])
    whole = settings(
        run_name="whole", model=str(folder), global_batch_size=16, batch_size=8, max_steps=6,
        evals_per_epoch=0, dropout=0.0, lr=1e-3, max_length=40,
    )  # fmt: skip

    def resumes() -> None:
        stopped = replace(whole, run_name="stopped")
        ranks.run(2, jobs.run_stopped_at, stopped, 3)
        ranks.run(2, jobs.run, stopped)
        expected, found = last_weights(whole), last_weights(stopped)
        assert not [key for key in expected if not torch.equal(expected[key], found[key])]

    def one_rank_equals_two() -> None:
        other = replace(whole, run_name="one", batch_size=16)
        ranks.run(1, jobs.run, other)
        assert_same_lines(whole, other, ("loss",), rtol=1e-5)

    def fsdp_equals_ddp() -> None:
        sharded = replace(whole, run_name="sharded", strategy="fsdp")
        ranks.run(2, jobs.run, sharded)
        assert_same_lines(whole, sharded, ("loss", "grad_norm"), rtol=6e-7)
        precision, rtol = ("fp32", 1e-5) if name == "mixtral" else ("fp64", 6e-7)
        exact = replace(whole, run_name="exact", precision=precision)
        ranks.run(2, jobs.run, exact)
        moved = replace(exact, run_name="moved")
        ranks.run(2, jobs.run_stopped_at, moved, 2)
        world_size = 2 if name in KNOWN else 3
        ranks.run(world_size, jobs.run_stopped_at, replace(moved, strategy="fsdp"), 4)
        ranks.run(2, jobs.run, moved)
        assert_same_lines(exact, moved, ("loss", "grad_norm"), rtol)

    def same_predictions() -> None:
        best = Path(whole.runs_dir) / "whole" / "best"
        predicted = predict(best, TEXTS, tmp_path, monkeypatch)
        for batch_size in (1, 8):
            np.testing.assert_allclose(predicted, pipeline(best, TEXTS, batch_size), atol=6e-5)

    checks: Checks = {
        "trains": lambda: ranks.run(2, jobs.run, whole),
        "1×16 = 2×8": one_rank_equals_two,
        "resumes": resumes,
        "FSDP = DDP": fsdp_equals_ddp,
        "pipeline = predict.py": same_predictions,
    }
    table[name] = set()
    for column, check in checks.items():
        try:
            check()
        except (AssertionError, RankError) as error:
            table[name].add(column)
            if column not in KNOWN.get(name, ((), ""))[0]:
                raise
            if isinstance(error, RankError):
                assert set(error.kinds) == {"UserError"}
            if column == "trains":
                table[name].update(checks)
                break
    assert table[name] == set(KNOWN.get(name, ((), ""))[0])


def assert_same_lines(
    first: TrainConfig, second: TrainConfig, values: tuple[str, ...], rtol: float
) -> None:
    """What two runs logged of their steps is the same."""
    for value in values:
        expected, found = ([line[value] for line in lines_of(c)] for c in (first, second))
        np.testing.assert_allclose(found, expected, rtol=rtol)


def last_weights(config: TrainConfig) -> dict[str, torch.Tensor]:
    folder = Path(config.runs_dir) / str(config.run_name) / "checkpoints"
    return jobs.weights_of(max(folder.glob("step-*")))


def pipeline(best: Path, texts: list[str], batch_size: int) -> list[float]:
    """The highest probability of each text."""
    import transformers

    classify = transformers.pipeline("text-classification", str(best), device="cpu")
    return [row["score"] for row in classify(texts, truncation=True, batch_size=batch_size)]


def predict(
    best: Path, texts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> list[float]:
    """The highest probability of each text, by predict.py in this process."""
    rows, output = tmp_path / "rows.jsonl", tmp_path / "labels.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), "utf-8")
    command = ["predict.py", "--model", best, "--input", rows, "--output", output]
    monkeypatch.setattr(sys, "argv", list(map(str, command)))
    runpy.run_path(str(PROJECT / "predict.py"), run_name="__main__")
    return [json.loads(line)["probability"] for line in output.read_text("utf-8").splitlines()]
