"""Promise: a model of any family trains, resumes and predicts as the others do."""

import json
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jobs
import numpy as np
import pytest
import torch
from conftest import lines_of, make_rows
from families import FAMILIES, save_family
from ranks import PROJECT, Ranks

from training.settings.config import TrainConfig

Settings = Callable[..., TrainConfig]
QUICK = ("bert", "gpt2", "t5")
TEXTS = ["cat dog horse", "rain [SEP] wind </s> again <pad>", "a very old fox " * 60, "猫", "zzz a"]


def family_marks(name: str) -> list[pytest.MarkDecorator]:
    return [] if name in QUICK else [pytest.mark.long]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=family_marks(name)) for name in FAMILIES]
)
def test_family(
    name: str, ranks: Ranks, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_family(name, tmp_path / "model", [text for text, _ in make_rows(300, seed=3)])
    whole = settings(
        run_name="whole", model=str(folder), global_batch_size=16, batch_size=8, max_steps=6,
        evals_per_epoch=0, dropout=0.0, lr=1e-3, max_length=40,
    )  # fmt: skip
    ranks.run(2, jobs.run, whole)

    stopped = replace(whole, run_name="stopped")
    ranks.run(2, jobs.run_stopped_at, stopped, 3)
    ranks.run(2, jobs.run, stopped)
    expected, found = last_weights(whole), last_weights(stopped)
    different = [key for key in expected if not torch.equal(expected[key], found[key])]
    assert not different, "resumed is not bit-identical"

    one_rank = replace(whole, run_name="one rank", batch_size=16)
    ranks.run(1, jobs.run, one_rank)
    fsdp = replace(whole, run_name="fsdp", strategy="fsdp")
    ranks.run(2, jobs.run, fsdp)
    for other in (one_rank, fsdp):
        losses = [[line["loss"] for line in lines_of(c)] for c in (whole, other)]
        np.testing.assert_allclose(*losses, rtol=1e-5, err_msg=other.run_name or "")

    best = Path(whole.runs_dir) / "whole" / "best"
    predicted = predict(best, TEXTS, tmp_path, monkeypatch)
    for batch_size in (1, 8):
        np.testing.assert_allclose(predicted, pipeline(best, TEXTS, batch_size), atol=6e-5)


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
