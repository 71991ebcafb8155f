"""Promise 9: best/ loads anywhere and gives predict.py's labels and probabilities."""

import csv
import io
import json
import runpy
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import file_rows
import jobs
import pytest
from conftest import make_rows, write_tsv
from ranks import PROJECT, RankError, Ranks

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
            capsys.readouterr()  # rows before the error
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


def test_any_text_on_any_screen(
    predict: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are UTF-8, whatever the terminal's encoding is: another program may read them."""
    screen = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(screen, "gbk", write_through=True))
    predict("dog 🐶")
    assert screen.getvalue().decode("utf-8").startswith("dog 🐶\t")


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


OWN_CONFIG = """
from transformers import PreTrainedConfig

class BagConfig(PreTrainedConfig):
    model_type = "bag"

    def __init__(self, vocab_size=400, **options):
        super().__init__(**options)
        self.vocab_size = vocab_size
"""
OWN_MODEL = """
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from .configuration_bag import BagConfig

class Bag(PreTrainedModel):
    config_class = BagConfig

    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, 8)
        self.head = nn.Linear(8, config.num_labels)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, **other):
        mask = attention_mask[:, :, None].to(self.head.weight)
        pooled = (self.words(input_ids) * mask).sum(1) / mask.sum(1)
        return SequenceClassifierOutput(logits=self.head(pooled))
"""


def test_code_that_comes_with_a_model(
    ranks: Ranks, files: dict[str, Path], tiny_model: Path, tmp_path: Path,
    predict: Callable[..., str],
) -> None:  # fmt: skip
    """It is run only with --trust-remote-code, in training and prediction; nothing is asked on
    standard input, where the texts are."""
    folder, ran = tmp_path / "bag", tmp_path / "ran-code"
    folder.mkdir()
    for path in tiny_model.glob("tokenizer*"):
        (folder / path.name).write_bytes(path.read_bytes())
    classes = {"AutoConfig": "configuration_bag.BagConfig",
               "AutoModelForSequenceClassification": "modeling_bag.Bag"}  # fmt: skip
    config = {"model_type": "bag", "auto_map": classes, "vocab_size": 400}
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    (folder / "configuration_bag.py").write_text(OWN_CONFIG, "utf-8")
    (folder / "modeling_bag.py").write_text(OWN_MODEL, "utf-8")
    run = TrainConfig(
        model=str(folder), train_file=(str(files["train"]),), val_file=(str(files["val"]),),
        max_length=16, lr=1e-2, epochs=1, runs_dir=str(tmp_path / "runs"), run_name="run",
        cache_dir=str(tmp_path / "cache"), pretrained=False,
    )  # fmt: skip
    with pytest.raises(RankError, match="give --trust-remote-code if you trust it"):
        ranks.run(2, jobs.run, run)
    ranks.run(2, jobs.run, replace(run, trust_remote_code=True))
    best = tmp_path / "runs" / "run" / "best"
    with (best / "modeling_bag.py").open("a") as code:
        code.write(f"\nopen({str(ran)!r}, 'a').write('x')\n")
    message = predict(text="cat\nyes\n1\n", model=best, error=True)
    assert "--trust-remote-code" in message
    assert not ran.exists()
    shown = predict("--trust-remote-code", text="cat\nyes\n1\n", model=best)
    assert [line.split("\t")[0] for line in shown.splitlines()] == ["cat", "yes", "1"]
    assert ran.exists()


def test_no_row_is_lost(predict: Callable[..., str], tmp_path: Path) -> None:
    """A text that cannot be read is an error, or has an empty label: there are as many lines."""
    text = "cat\n\n \u200b\u200d \nrain\n"
    assert "row 2 is blank" in predict(text=text, error=True)
    lines = predict("--on-bad-rows", "skip", text=text).splitlines()
    assert [bool(line.split("\t")[1]) for line in lines] == [True, False, False, True]
    path = tmp_path / "rows.jsonl"
    rows = ['{"text": "cat"}', '{"text": null}', '{"text": "rain"}', '{"txt": 1}', '{"text": "a"}']
    path.write_text("\n".join(rows) + "\n", "utf-8")
    assert "rows.jsonl:2" in predict("--input", str(path), error=True)
    lines = predict("--input", str(path), "--on-bad-rows", "skip").splitlines()
    assert [bool(line.split("\t")[1]) for line in lines] == [True, False, True, False, True]


def test_rows_of_data_py(
    predict: Callable[..., str], best: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--split labels the rows of data.py, with what training knows of them."""
    import data

    monkeypatch.setattr(data, "rows", file_rows.rows)
    lines = predict("--split", "val").splitlines()
    assert [line.split("\t")[0] for line in lines] == [text for text, _ in make_rows(45, seed=2)]
