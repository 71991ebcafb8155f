"""Pairs of texts, several text columns and several labels, from the file to predict.py."""

import json
import random
import runpy
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import file_rows
import jobs
import numpy as np
import pytest
from conftest import WORDS, lines_of
from ranks import PROJECT, Ranks
from transformers import AutoTokenizer

from training.dataset.build import open_splits
from training.dataset.source import Source
from training.settings.config import TrainConfig

Settings = Callable[..., TrainConfig]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


def pair_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Does the second word name the same kind of thing as the first?"""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        one, two = rng.choice(list(WORDS)), rng.choice(list(WORDS))
        a, b = rng.choice(WORDS[one]), " ".join(rng.choices(WORDS[two], k=rng.randint(1, 9)))
        rows.append({"text": a, "other": b, "label": "yes" if one == two else "no"})
    return rows


def label_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """A text has the label of every kind of word in it, or none."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        labels = [label for label in WORDS if rng.random() < 0.5]
        words = [rng.choice(WORDS[label]) for label in labels for _ in range(2)]
        rows.append({"text": " ".join([*words, "the"]), "label": labels})
    return rows


@pytest.mark.parametrize("kind", ["pairs", "columns", "labels"])
def test_same_numbers_and_predictions(
    ranks: Ranks, settings: Settings, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank and three agree; what predict.py says is what evaluation found."""
    make = label_rows if kind == "labels" else pair_rows
    flags: dict[str, dict[str, Any]] = {
        "pairs": {"text_pair_column": "other"},
        "columns": {"text_column": ("text", "other")},
        "labels": {"multi_label": True, "metric": "micro_f1"},
    }
    one = settings(
        train_file=(write(tmp_path / "train.jsonl", make(203, 1)),), run_name="1", dropout=0.0,
        val_file=(write(tmp_path / "val.jsonl", make(20, 2)),), precision="fp64", **flags[kind],
    )  # fmt: skip
    three = replace(one, run_name="3", batch_size=4)
    ranks.run(1, jobs.run, one)
    ranks.run(3, jobs.run, three)
    losses = [[line["loss"] for line in lines_of(c)] for c in (one, three)]
    assert len(losses[0]) == 14
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-9)
    run = Path(one.runs_dir) / "1"
    found = json.loads((run / "results.json").read_text("utf-8"))["val"]
    output = tmp_path / "out.jsonl"
    command = ["predict.py", "--model", str(run / "best"), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", [*command, "--input", str(tmp_path / "val.jsonl")])
    runpy.run_path(
        str(PROJECT / "predict.py"), run_name="__main__"
    )  # imports cost most of its time
    labels = [json.loads(line)["label"] for line in output.read_text("utf-8").splitlines()]
    truth = [row["label"] for row in make(20, 2)]
    expected = [", ".join(t) if kind == "labels" else t for t in truth]
    right = sum(a == b for a, b in zip(labels, expected, strict=True))
    assert right / 20 == pytest.approx(found["accuracy"])


def test_token_types_of_a_pair(settings: Settings, tmp_path: Path, tiny_model: Path) -> None:
    """The inputs say which text of a pair a token belongs to."""
    rows = [{"text": "cat dog", "other": "rain", "label": "yes"}, *pair_rows(40, 1)]
    config = settings(
        train_file=(write(tmp_path / "a.jsonl", rows),), val_fraction=0.0, val_file=(),
        text_pair_column="other",
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    train = open_splits(Source(file_rows, config), tokenizer)["train"]
    inputs = train.inputs(np.array([0]))
    texts = tokenizer("cat dog", "rain")
    assert inputs["input_ids"][0].tolist() == texts["input_ids"]
    assert inputs["token_type_ids"][0].tolist() == texts["token_type_ids"]
    assert set(texts["token_type_ids"]) == {0, 1}
