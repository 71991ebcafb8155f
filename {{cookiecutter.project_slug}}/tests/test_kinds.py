"""Pairs of texts, several text columns and several labels, from the file to predict.py."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
from conftest import WORDS, lines_of
from ranks import Ranks
from test_predict import predict

from training.config import TrainConfig

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
    ranks: Ranks, settings: Settings, tmp_path: Path, kind: str
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
    predict(run / "best", "--input", str(tmp_path / "val.jsonl"), "--output", str(output))
    labels = [json.loads(line)["label"] for line in output.read_text("utf-8").splitlines()]
    truth = [row["label"] for row in make(20, 2)]
    expected = [", ".join(t) if kind == "labels" else t for t in truth]
    right = sum(a == b for a, b in zip(labels, expected, strict=True))
    assert right / 20 == pytest.approx(found["accuracy"])


def test_second_text_is_told_apart(ranks: Ranks, settings: Settings, tmp_path: Path) -> None:
    """Swapping the texts of a pair is another input to the model."""
    rows = [{"text": "cat dog", "other": "rain", "label": "yes"}] * 32 + pair_rows(40, 1)
    swapped = [{"text": r["other"], "other": r["text"], "label": r["label"]} for r in rows]
    logits = []
    for name, some in (("a", rows), ("b", swapped)):
        path = write(tmp_path / f"{name}.jsonl", some)
        config = settings(train_file=(path,), val_file=(path,), text_pair_column="other")
        logits.append(ranks.run(1, jobs.evaluate_rows, config)[0][0])
    assert np.abs(logits[0][0] - logits[1][0]).max() > 1e-5
