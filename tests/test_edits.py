"""It stays right when it is edited: each edit of edits.py, made in a new project.

For each: it trains on two ranks; stopped and resumed it is bit-identical; its losses are those of
one rank with 32 rows at a time; report and results are written; predict.py gives the probabilities
of the evaluation, from a `best/` that was moved away from all else; and, with -m '' (for a few
always), the project's quick tests pass as they are.
"""

import json
import math
import random
import re
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Run
from edits import EDITS, PACKAGES, Edit, apply
from workbench import PREDICT, TRAIN, Done, Workbench

pytestmark = pytest.mark.slow
QUICK = ("two_layer_head", "number", "layer_wise_lr")  # their projects' tests are always run
STEPS = 14  # two epochs of 203 rows
SETTINGS = {
    "model": "encoder", "max_length": 48, "epochs": 2, "lr": 3e-3, "log_every": 1,
    "dropout": 0.0, "batch_size": 8, "timeout": 60.0,
}  # fmt: skip
STOP = """
from training.distributed import watchdog
from training.launch import signals
signals.StopRequest.agreed = lambda self, error=None: watchdog.position[:2] == ("training", 5)
"""
ENCODER = """
from conftest import make_rows
from tiny import save_tiny
save_tiny(sys.argv[1], [text for text, _ in make_rows(300, seed=3)])
"""
# All that is in two checkpoints, but for clock times.
COMPARE = """
import torch
from safetensors.torch import load_file

def compare(first, second, name):
    if isinstance(first, torch.Tensor):
        assert torch.equal(first, second), name
    elif isinstance(first, dict):
        assert first.keys() == second.keys(), (name, first.keys() ^ second.keys())
        for key in first:
            compare(first[key], second[key], f"{name}.{key}")
    elif isinstance(first, list | tuple):
        assert len(first) == len(second), name
        for i, pair in enumerate(zip(first, second)):
            compare(*pair, f"{name}[{i}]")
    else:
        assert first == second, (name, first, second)

for read, name in ((load_file, "model.safetensors"), (torch.load, "state.pt")):
    compare(*(read(f"{folder}/{name}") for folder in sys.argv[1:]), name)
"""
PROBABILITIES = """
import json, data, predict
from pathlib import Path
from training.dataset.rows import Row
classifier = predict.Classifier(Path(sys.argv[1]))
rows = [row for row in data.rows("val", classifier.config) if isinstance(row, Row)]
truth = [classifier.labels.index(row.label) for row in rows]
Path(sys.argv[2]).write_text(json.dumps([classifier.probabilities(rows).tolist(), truth]))
"""


class Project:
    """A project with an edit, and its runs."""

    def __init__(self, edit: Edit, folder: Path, bench: Workbench) -> None:
        self.edit, self.folder, self.bench = edit, folder, bench
        apply(edit, folder)
        for name, text in PACKAGES.items():
            if f"from {name} import" in str(edit.patch):
                (folder / f"{name}.py").write_text(text, encoding="utf-8")
        self.configure(SETTINGS | dict(edit.settings) | write_rows(folder, edit.rows))

    def configure(self, settings: dict[str, Any]) -> None:
        """Set keys of config.toml."""
        file = self.folder / "config.toml"
        text = file.read_text("utf-8")
        for key, value in settings.items():
            text = re.sub(rf"^{key} = .*\n", "", text, flags=re.MULTILINE)
            text += f"{key} = {json.dumps(value)}\n"
        file.write_text(text, encoding="utf-8")

    def train(
        self, name: str, *flags: str, world_size: int = 2, stop: bool = False, code: int = 0
    ) -> str:
        """A run; returns what it printed."""
        script = STOP + TRAIN if stop else TRAIN
        done = self.bench.call(self.folder, script, ["--run-name", name, *flags], world_size)
        assert done.codes == [code] * world_size, done.output
        return done.output

    def call(self, code: str, *words: str | Path) -> str:
        done = self.bench.call(self.folder, code, list(map(str, words)))
        assert done.codes == [0], done.output
        return done.output

    def run(self, name: str) -> Path:
        return self.folder / "runs" / name

    def results(self, name: str) -> dict[str, Any]:
        return json.loads((self.run(name) / "results.json").read_text("utf-8"))

    def lines(self, name: str, split: str) -> list[dict[str, Any]]:
        text = (self.run(name) / "metrics.jsonl").read_text("utf-8")
        return [line for line in map(json.loads, text.splitlines()) if line["split"] == split]

    def values(self, name: str, split: str, value: str) -> list[float]:
        return [line[value] for line in self.lines(name, split) if value in line]


def make_rows(count: int, seed: int, split: str) -> list[dict[str, Any]]:
    """Texts of 2 to 24 words; the words, the tags and the price say something of the label."""
    words = {"animal": "cat dog horse cow", "food": "rice soup pear egg", "weather": "rain fog ice"}
    rng, rows = random.Random(seed), []
    for number in range(count):
        label = rng.choices(list(words), [6, 3, 1])[0] if number >= 3 else list(words)[number]
        own, shared = words[label].split(), "the a very some old new big small today 猫".split()
        text = [rng.choice(own if rng.random() < 0.4 else shared)
                for _ in range(rng.choice([2, 3, 5, 8, 13, 24]))]  # fmt: skip
        price = list(words).index(label) + rng.random()
        tags = [f"tag{rng.randrange(5)}" for _ in range(rng.randrange(3))]
        source = "web" if number < count - 40 or split == "val" else "mail"
        rows.append({"text": " ".join([*text, str(number)]), "label": label, "price": price,
                     "tags": tags, "split": split, "source": source})  # fmt: skip
    return rows


def write_rows(folder: Path, name: str) -> dict[str, Any]:
    """Write train and val rows as a file of this suffix, and return the settings that name them."""
    splits = {"train": make_rows(203, 1, "train"), "val": make_rows(45, 2, "val")}
    if name == "rows.db":
        splits["train"] += [row | {"source": "mail"} for row in make_rows(40, 3, "train")]
        write_database(folder / name, [row for rows in splits.values() for row in rows])
        return {"database": name, "source": "web"}
    for split, rows in splits.items():
        lines = [json.dumps(row) for row in rows]
        if name.endswith("tsv"):
            lines = ["text\tlabel", *(f"{row['text']}\t{row['label']}" for row in rows)]
        (folder / f"{split}-{name}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    files = {"train_file": f"train-{name}", "val_file": f"val-{name}", "test_file": []}
    return files


def write_database(file: Path, rows: list[dict[str, Any]]) -> None:
    file.unlink(missing_ok=True)
    with sqlite3.connect(file) as database:
        database.execute("CREATE TABLE messages (id INTEGER PRIMARY KEY, split, source, text, label)")
        database.executemany(
            "INSERT INTO messages (split, source, text, label) "
            "VALUES (:split, :source, :text, :label)",
            rows,
        )
    database.close()


@pytest.fixture(scope="module")
def bench(baked: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workbench]:
    bench = Workbench(baked, tmp_path_factory.mktemp("calls"))
    yield bench
    bench.close()


@pytest.fixture(scope="module")
def encoder(bench: Workbench, baked: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of some ten thousand parameters, as it would come from the hub."""
    folder = tmp_path_factory.mktemp("encoder") / "encoder"
    done = bench.call(baked, ENCODER, [str(folder)])
    assert done.codes == [0], done.output
    return folder


@pytest.fixture
def make_project(
    bench: Workbench, encoder: Path, baked: Path, tmp_path: Path
) -> Callable[[Edit], Project]:
    def make(edit: Edit) -> Project:
        folder = tmp_path / "project"
        shutil.copytree(baked, folder, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(encoder, folder / "encoder")
        return Project(edit, folder, bench)

    return make


@pytest.mark.parametrize("name", EDITS)
def test_edit(name: str, make_project: Callable[[Edit], Project], tmp_path: Path) -> None:
    project = make_project(EDITS[name])
    project.train("whole")
    assert len(project.values("whole", "train", "loss")) == STEPS
    results = project.results("whole")
    assert results["step"] == STEPS and not results["stopped"]
    assert f"weights of step {results['best_step']}" in (project.run("whole") / "report.txt").read_text()

    project.train("resumed", stop=True)
    assert project.results("resumed")["step"] == 5
    project.train("resumed")
    last = [project.run(run) / f"checkpoints/step-{STEPS:08d}" for run in ("whole", "resumed")]
    project.call(COMPARE, *last)

    project.train("one", "--batch-size", "32", world_size=1)
    for split in ("train", "val"):
        expected = project.values("one", split, "loss")
        assert project.values("whole", split, "loss") == pytest.approx(expected, rel=1e-5)

    if name in CHECKS:
        CHECKS[name](project)
    check_predictions(project, tmp_path / "moved" / "best")


def check_predictions(project: Project, moved: Path) -> None:
    """predict.py gives the probabilities of the evaluation, from a folder that was moved."""
    val = project.results("whole")["val"]
    moved.parent.mkdir()
    shutil.move(project.run("whole") / "best", moved)
    for name in ("encoder", "cache", "runs"):
        (project.folder / name).rename(project.folder / f"{name}-away")
    answer, labels = moved.parent / "answer.json", moved.parent / "labels.jsonl"
    project.call(PROBABILITIES, moved, answer)
    probabilities, truth = json.loads(answer.read_text("utf-8"))
    log_loss = -sum(math.log(p[i]) for p, i in zip(probabilities, truth, strict=True)) / len(truth)
    assert log_loss == pytest.approx(val["log_loss"], rel=1e-5)
    project.call(PREDICT, "--model", moved, "--split", "val", "--output", labels)
    predicted = [json.loads(line) for line in labels.read_text("utf-8").splitlines()]
    assert [line["probability"] for line in predicted] == [
        pytest.approx(max(p), abs=5e-5) for p in probabilities
    ]


CHECKS: dict[str, Callable[[Project], None]] = {}
