"""Promise 9: best/ loads anywhere and gives predict.py's labels and probabilities."""

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jobs
import pytest
from conftest import make_rows, write_tsv
from ranks import Ranks

from training.settings.config import TrainConfig

PROJECT = Path(__file__).resolve().parent.parent
Settings = Callable[..., TrainConfig]
PIPELINE = """
import json, sys
from transformers import pipeline
classify = pipeline("text-classification", model=sys.argv[1])
texts = json.load(sys.stdin)
print(json.dumps(classify(texts, truncation=True, batch_size=1)))
"""
TEXTS = ["cat dog horse", "rain 猫 snow wind again", "bread " * 10_000, "zzz"]


@pytest.fixture(scope="module")
def best(ranks: Ranks, files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The best weights of a from-scratch run of two ranks."""
    folder = tmp_path_factory.mktemp("predict")
    config = TrainConfig(
        train_file=(str(files["train"]),), val_file=(str(files["val"]),), max_length=16, lr=1e-3,
        epochs=2, runs_dir=str(folder / "runs"), run_name="run", cache_dir=str(folder / "cache"),
    )  # fmt: skip
    ranks.run(2, jobs.run, config)
    return folder / "runs" / "run" / "best"


def predict(best: Path, *arguments: str, text: str = "", code: int = 0) -> str:
    command = [sys.executable, str(PROJECT / "predict.py"), "--model", str(best), *arguments]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


def test_pipeline_and_predict_agree(best: Path, tmp_path: Path) -> None:
    """In fresh processes, offline: same labels, same probabilities, also of 10,000 words."""
    done = subprocess.run([sys.executable, "-c", PIPELINE, str(best)], input=json.dumps(TEXTS),
                          capture_output=True, text=True, timeout=300, check=True)  # fmt: skip
    expected = json.loads(done.stdout)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS), "utf-8")
    for suffix in (".jsonl", ".csv"):
        output = tmp_path / f"out{suffix}"
        predict(best, "--input", str(rows), "--output", str(output))
        with output.open(encoding="utf-8", newline="") as file:
            found = (
                list(map(json.loads, file)) if suffix == ".jsonl" else list(csv.DictReader(file))
            )
        assert [row["text"] for row in found] == TEXTS
        for row, other in zip(found, expected, strict=True):
            assert row["label"] == other["label"]
            assert float(row["probability"]) == pytest.approx(other["score"], abs=6e-5)
    assert {row["label"] for row in expected} <= {"animal", "food", "weather"}
    config = json.loads((best / "config.json").read_text("utf-8"))
    assert config["label2id"] == {"animal": 0, "food": 1, "weather": 2}
    assert json.loads((best / "tokenizer_config.json").read_text("utf-8"))["model_max_length"] == 16


def test_command_line_and_standard_input(best: Path) -> None:
    """One row a text: text, label, probability."""
    shown = predict(best, "cat", "a b")
    assert predict(best, text="cat\na b\n") == shown
    assert [line.split("\t")[0] for line in shown.splitlines()] == ["cat", "a b"]


def test_mistakes(best: Path, tmp_path: Path) -> None:
    """One line each, before anything slow, and no output file is left."""
    table = write_tsv(tmp_path / "t.tsv", make_rows(3, 1))
    output = str(tmp_path / "o.csv")
    assert "is not a model folder" in predict(best.parent, "x", code=1)
    assert "must end in" in predict(best, "--input", str(table), "--output", "o.xlsx", code=1)
    message = predict(
        best, "--input", str(table), "--output", output, "--text-column", "txt", code=1
    )
    assert "txt" in message
    assert message.count("\n") == 1
    assert not list(tmp_path.glob("*o.csv*"))
