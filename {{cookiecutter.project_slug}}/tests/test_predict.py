"""Promise 9: best/ loads anywhere and gives predict.py's labels and probabilities."""

import csv
import io
import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jobs
import pytest
from conftest import make_rows, write_tsv
from ranks import PROJECT, Ranks

from training.settings.config import TrainConfig

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


@pytest.fixture
def predict(
    best: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """What predict.py prints, or its error. It runs in this process: importing takes seconds."""

    def run(*arguments: str, model: Path = best, text: str = "", error: bool = False) -> str:
        monkeypatch.setattr(sys, "argv", ["predict.py", "--model", str(model), *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        try:
            runpy.run_path(str(PROJECT / "predict.py"), run_name="__main__")
        except SystemExit as stopped:
            assert error and isinstance(stopped.code, str), stopped.code
            return stopped.code
        assert not error
        return capsys.readouterr().out

    return run


def test_pipeline_and_predict_agree(
    best: Path, tmp_path: Path, predict: Callable[..., str]
) -> None:
    """In new processes, offline: same labels, same probabilities, also of 10,000 words."""
    done = subprocess.run([sys.executable, "-c", PIPELINE, str(best)], input=json.dumps(TEXTS),
                          capture_output=True, text=True, timeout=300, check=True)  # fmt: skip
    expected = json.loads(done.stdout)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS), "utf-8")
    for suffix in (".jsonl", ".csv"):
        output = tmp_path / f"out{suffix}"
        arguments = ["--input", str(rows), "--output", str(output)]
        if suffix == ".csv":
            predict(*arguments)
        else:
            command = [sys.executable, str(PROJECT / "predict.py"), "--model", str(best)]
            subprocess.run([*command, *arguments], timeout=300, check=True)
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


def test_command_line_and_standard_input(predict: Callable[..., str]) -> None:
    """One row a text: text, label, probability."""
    shown = predict("cat", "a b")
    assert predict(text="cat\na b\n") == shown
    assert [line.split("\t")[0] for line in shown.splitlines()] == ["cat", "a b"]


def test_mistakes(best: Path, tmp_path: Path, predict: Callable[..., str]) -> None:
    """One line each, and no output file is left."""
    table = write_tsv(tmp_path / "t.tsv", make_rows(3, 1))
    rows = ["--input", str(table), "--output"]
    assert "is not a model folder" in predict("x", model=best.parent, error=True)
    assert "must end in" in predict(*rows, "o.xlsx", error=True)
    message = predict(*rows, str(tmp_path / "o.csv"), "--text-column", "txt", error=True)
    assert "txt" in message
    assert "\n" not in message
    assert not list(tmp_path.glob("*o.csv*"))
