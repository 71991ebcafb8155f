"""It stays right when it is edited: each edit of edits.py, made in a new project.

For each: it trains on two ranks; stopped and resumed it is bit-identical; its losses are those of
one rank with 32 rows at a time; report and results are written; predict.py gives the probabilities
of the evaluation, from a `best/` that was moved away from all else. test_edited_tests.py runs the
tests of edited projects.
"""

import json
import math
import random
import re
import shutil
import sqlite3
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from patches import EDITS, PAGE, Edit, apply, page, read_all, rows_of_readme
from workbench import PREDICT, TRAIN, Workbench

ALL = {edit.name: edit for edit in read_all()}
ROWS = {"sqlite": "rows.db", "tags": "rows.jsonl", "number": "rows.jsonl"}
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
# Weights of a size that tells rows apart from the beginning.
texts = [text for text, _ in make_rows(300, seed=3)]
save_tiny(sys.argv[1], texts, initializer_range=0.3)
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
# The weights of a checkpoint are not those that training continues with, which are in its state.
AVERAGED = """
import torch
from safetensors.torch import load_file
saved = load_file(sys.argv[1] + "/model.safetensors")
others = torch.load(sys.argv[1] + "/state.pt")["ema"]
assert others.keys() == saved.keys()
assert all(not torch.equal(saved[name], others[name]) for name in others)
"""
PROBABILITIES = """
import json, data, predict
from pathlib import Path
from training.dataset.rows import Row
classifier = predict.Classifier(Path(sys.argv[1]))
rows = [row for row in data.rows("val", classifier.config) if isinstance(row, Row)]
truth = [classifier.labels.index(row.label) for row in rows]
answer = classifier.probabilities(rows).tolist(), truth, classifier.labels
Path(sys.argv[2]).write_text(json.dumps(answer))
"""


class Project:
    """A project with an edit, and its runs."""

    def __init__(self, edit: Edit, folder: Path, bench: Workbench) -> None:
        self.edit, self.folder, self.bench = edit, folder, bench
        self.before = {
            name: (folder / name).read_text("utf-8")
            for name in edit.files
            if name not in edit.new_files
        }
        make_edits(folder, [edit])

    @contextmanager
    def unedited(self, name: str) -> Iterator[None]:
        """Inside, this file is as it was baked."""
        file = self.folder / name
        after = file.read_text("utf-8")
        file.write_text(self.before[name], encoding="utf-8")
        yield
        file.write_text(after, encoding="utf-8")

    def first_loss(self, name: str, *flags: str) -> float:
        self.train(name, "--max-steps", "1", "--warmup-ratio", "0", *flags)
        return self.values(name, "train", "loss")[0]

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


def make_edits(folder: Path, edits: Sequence[Edit]) -> None:
    """Make them in a project, and write its rows and its config.toml as its user would."""
    settings, name = dict(SETTINGS), "rows.tsv"
    for edit in edits:
        apply(edit, folder)
        settings |= tomllib.loads("\n".join(edit.settings))
        name = ROWS.get(edit.name, name)
    settings |= write_rows(folder, name)
    shutil.copy(EDITS / "lion.py", folder)  # as if it were a package
    file = folder / "config.toml"
    text = file.read_text("utf-8")
    for key, value in settings.items():
        text = re.sub(rf"^{key} = .*\n", "", text, flags=re.MULTILINE)
        text += f"{key} = {json.dumps(value)}\n"
    file.write_text(text, encoding="utf-8")


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
        rows.append({"text": " ".join([*text, str(number)]), "label": label, "price": price,
                     "tags": tags, "split": split, "source": "web"})  # fmt: skip
    return rows


def write_rows(folder: Path, name: str) -> dict[str, Any]:
    """Write train and val rows as a file of this suffix, and return the settings that name them."""
    splits = {"train": make_rows(203, 1, "train"), "val": make_rows(45, 2, "val")}
    if name == "rows.db":
        for split in splits:
            splits[split] += [row | {"source": "mail"} for row in make_rows(40, 3, split)]
        write_database(folder / name, [row for rows in splits.values() for row in rows])
        return {"database": name}
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
        database.execute(
            "CREATE TABLE messages (id INTEGER PRIMARY KEY, split, source, text, label)"
        )
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


def test_the_page_is_that_of_the_patches() -> None:
    """If this fails: python tools/edits.py"""
    assert PAGE.read_text("utf-8") == page(list(ALL.values()))


@pytest.mark.parametrize("name", ALL)
def test_the_readme_names_the_files(name: str, baked: Path) -> None:
    """Whoever looks in "Edit this to change that" opens one file or two, and these are the ones."""
    edit, rows = ALL[name], rows_of_readme((baked / "README.md").read_text("utf-8"))
    found = [key for start in edit.readme for key in rows if key.startswith(start)]
    assert len(found) == len(edit.readme) > 0
    named = set().union(*(rows[key] for key in found))
    assert named == edit.files.keys() - edit.new_files
    assert 1 <= len(edit.files) <= 2


def test_a_patch_that_does_not_apply_is_an_error(baked: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    shutil.copytree(baked, project)
    apply(ALL["ema"], project)
    with pytest.raises(AssertionError, match=r"ema.patch does not apply: .*ema.py"):
        apply(ALL["ema"], project)


@pytest.mark.slow
@pytest.mark.parametrize("name", ALL)
def test_edit(name: str, make_project: Callable[[Edit], Project], tmp_path: Path) -> None:
    project = make_project(ALL[name])
    project.train("whole")
    assert len(project.values("whole", "train", "loss")) == STEPS
    results, report = project.results("whole"), project.run("whole") / "report.txt"
    assert results["step"] == STEPS and not results["stopped"]
    assert f"weights of step {results['best_step']}\n" in report.read_text("utf-8")

    project.train("resumed", stop=True)
    assert project.results("resumed")["step"] == 5
    project.train("resumed")
    last = [project.run(run) / f"checkpoints/step-{STEPS:08d}" for run in ("whole", "resumed")]
    project.call(COMPARE, *last)

    project.train("one", "--batch-size", "32", world_size=1)
    for split in ("train", "val"):
        expected = project.values("one", split, "loss")
        assert project.values("whole", split, "loss") == pytest.approx(expected, rel=1e-5)

    of_truth = check_predictions(project, tmp_path / "moved" / "best")
    if name in CHECKS:
        CHECKS[name](project, of_truth)


def check_predictions(project: Project, moved: Path) -> list[float]:
    """predict.py gives the probabilities of the evaluation, from a folder that was moved.

    Returns the probability of the true label, of each val row.
    """
    val = project.results("whole")["val"]
    moved.parent.mkdir()
    shutil.move(project.run("whole") / "best", moved)
    for name in ("encoder", "cache", "runs"):
        (project.folder / name).rename(project.folder / f"{name}-away")
    answer, labels = moved.parent / "answer.json", moved.parent / "labels.jsonl"
    project.call(PROBABILITIES, moved, answer)
    probabilities, truth, names = json.loads(answer.read_text("utf-8"))
    of_truth = [row[i] for row, i in zip(probabilities, truth, strict=True)]
    assert max(of_truth) - min(of_truth) > 0.1  # else they would say nothing
    assert mean(-math.log(p) for p in of_truth) == pytest.approx(val["log_loss"], rel=1e-5)
    project.call(PREDICT, "--model", moved, "--split", "val", "--output", labels)
    predicted = [json.loads(line) for line in labels.read_text("utf-8").splitlines()]
    assert [line["probability"] for line in predicted] == [
        pytest.approx(max(row), abs=5.1e-5) for row in probabilities
    ]
    assert [names.index(line["label"]) for line in predicted] == [
        max(range(len(row)), key=row.__getitem__) for row in probabilities
    ]
    for name in ("encoder", "cache", "runs"):
        shutil.rmtree(project.folder / name, ignore_errors=True)
        (project.folder / f"{name}-away").rename(project.folder / name)
    return of_truth


# -- of some edits -------------------------------------------------------------------------------


def check_focal_loss(project: Project, of_truth: list[float]) -> None:
    """Training and evaluation have one loss; the setting belongs to the run."""
    expected = mean(-((1 - p) ** 2) * math.log(p) for p in of_truth)
    assert project.results("whole")["val"]["loss"] == pytest.approx(expected, rel=1e-5)
    output = project.train("whole", "--focal-gamma", "1", "--epochs", "3", code=2)
    assert "focal_gamma was 2.0, now 1.0" in output


def check_sqlite(project: Project, of_truth: list[float]) -> None:
    """Nothing stale is read: neither with another setting, nor with another content."""
    web = project.first_loss("web")
    mail = project.first_loss("mail", "--source", "mail")
    rows = [make_rows(203, 4, "train"), make_rows(45, 2, "val")]
    write_database(project.folder / "rows.db", [row for split in rows for row in split])
    changed = project.first_loss("changed")
    assert len({web, mail, changed}) == 3
    output = project.train("web", "--max-steps", "2", code=2)
    assert "train_rows is '203 rows, 3 labels' as before, with another content" in output


def check_layer_wise_lr(project: Project, of_truth: list[float]) -> None:
    line = project.lines("whole", "train")[4]
    layers = [line[f"lr_bert.encoder.layer.{i}.output.dense.weight"] for i in (0, 1)]
    assert layers == pytest.approx([line["lr_classifier.weight"] * 0.8**i for i in (2, 1)])


def check_metric(project: Project, of_truth: list[float]) -> None:
    """The best checkpoint is that with the best value."""
    metric, best = project.edit.name, {"mcc": max, "ece": min}[project.edit.name]
    project.train("often", "--evals-per-epoch", "2", "--epochs", "4")
    lines = project.lines("often", "val")
    values = [line[metric] for line in lines]
    assert len(set(values)) > 2
    results = project.results("often")
    assert results["best_step"] == lines[values.index(best(values))]["step"]
    assert results["val"][metric] == best(values)
    assert f"{metric} {best(values):.4f}" in (project.run("often") / "report.txt").read_text(
        "utf-8"
    )


def check_ema(project: Project, of_truth: list[float]) -> None:
    """Evaluated and saved is the average; older checkpoints have none."""
    project.call(AVERAGED, project.run("whole") / f"checkpoints/step-{STEPS:08d}")
    with project.unedited("train.py"):
        project.train("older", "--max-steps", "2")
    output = project.train("older", "--max-steps", "3", code=2)
    assert "was written without ema; " in output and "--resume-anyway" in output
    project.train("older", "--max-steps", "3", "--resume-anyway")


def check_rows(project: Project, of_truth: list[float]) -> None:
    """The other column reaches the model, and its changes do."""
    before = project.first_loss("before")
    for file in project.folder.glob("*-rows.jsonl"):
        rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
        lines = [json.dumps(row | {"price": 5.0, "tags": []}) for row in rows]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert project.first_loss("after") != before


def check_step_hook(project: Project, of_truth: list[float]) -> None:
    """A line for each step, once, also after resuming."""
    for run in ("whole", "resumed"):
        assert [line["step"] for line in project.lines(run, "weights")] == list(range(1, STEPS + 1))
    whole, resumed = (project.values(run, "weights", "head_norm") for run in ("whole", "resumed"))
    assert whole == resumed and len(set(whole)) > 1


def check_two_forwards(project: Project, of_truth: list[float]) -> None:
    """The loss of training has the second forward, that of evaluation has not."""
    with project.unedited("training/step/loss.py"):
        project.train("one-forward")
    both, one = (project.values(run, "train", "loss") for run in ("whole", "one-forward"))
    assert both[0] > one[0] * 1.001 and both[0] < one[0] * 2
    val = project.results("whole")["val"]
    assert val["loss"] == pytest.approx(val["log_loss"], rel=1e-5)


CHECKS: dict[str, Callable[[Project, list[float]], None]] = {
    "focal_loss": check_focal_loss, "sqlite": check_sqlite, "layer_wise_lr": check_layer_wise_lr,
    "mcc": check_metric, "ece": check_metric, "ema": check_ema, "tags": check_rows,
    "number": check_rows, "step_hook": check_step_hook, "two_forwards": check_two_forwards,
}  # fmt: skip


@pytest.mark.slow
def test_mean_without_the_mask(make_project: Callable[[Edit], Project]) -> None:
    """What gives other results for other padding is refused before the first step, in one line."""
    project = make_project(ALL["mean_pooling"])
    file = project.folder / "model.py"
    text, masked = file.read_text("utf-8"), "(hidden * mask).sum(1) / mask.sum(1)"
    assert text.count(masked) == 1
    file.write_text(text.replace(masked, "hidden.mean(1)"), encoding="utf-8")
    output = project.train("refused", code=2)
    errors = [line for line in output.splitlines() if line.startswith("train.py: ")]
    assert len(errors) == 1 and "Traceback" not in output, output
    assert "change by up to" in errors[0] and "a mean must leave padding out" in errors[0]
    assert not project.run("refused").exists()
