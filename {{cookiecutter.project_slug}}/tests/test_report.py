"""The data report: every count against a count by hand, and the files that the command writes."""

import io
import logging
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import file_rows
import matplotlib
import numpy as np
import pytest
from conftest import make_rows, write_tsv
from ranks import PROJECT
from transformers import AutoTokenizer

import model
from model import build_tokenizer
from training.dataset.build import open_splits
from training.dataset.source import Source
from training.dataset.token_store import TokenStore
from training.dataset.tokenizer import prepare_tokenizer
from training.settings.batch_sizes import batch_sizes
from training.settings.config import TrainConfig
from training.step.batch_plan import BatchPlan
from training.tracking import console, figures
from training.tracking import data_report as report

Settings = Callable[..., TrainConfig]
Rows = list[tuple[str, str]]
FOLDED = "if case, width and spaces are ignored"
TRAIN: Rows = [
    ("cat sat", "Pet"), ("Cat  sat", "food"), ("cat sat", "Pet"), ("dog", "Pet"), ("dog", "Pet"),
    ("rice", "food"), ("ｒice", "food"), ("snow", "pet "), ("rain", "odd"),
]  # fmt: skip
VAL: Rows = [("DOG", "Pet"), ("rice", "food"), ("fox", "food"), ("fox", "pet ")]
TEST: Rows = [("fox", "Pet"), ("bear", "odd"), ("soup", "food"), ("wolf", "pet ")]


def stores(
    settings: Settings, folder: Path, *, seed: int | None = None, **changes: Any
) -> tuple[TrainConfig, dict[str, TokenStore], Any]:
    """The three splits above, with rows in another order for another `seed`."""
    names = {}
    for name, rows in {"train": TRAIN, "val": VAL, "test": TEST}.items():
        rows = list(rows)
        if seed is not None:
            random.Random(seed).shuffle(rows)
        names[f"{name}_file"] = (str(write_tsv(folder / f"{name}-{seed}.tsv", rows)),)
    config = settings(**(names | {"global_batch_size": 4} | changes))
    tokenizer = prepare_tokenizer(Source(file_rows, config), build_tokenizer)
    return config, open_splits(Source(file_rows, config), tokenizer), tokenizer


def test_remarks(settings: Settings, tmp_path: Path) -> None:
    """Repeats, leaks, contradictions, missing classes and names alike, each with its number."""
    _, splits, tokenizer = stores(settings, tmp_path)
    expected = [
        "val: 1 classes have no rows: ['odd']",
        "labels that differ only in case, width or spaces: ['Pet', 'pet ']",
        f"train: 2 rows repeat a text of the same split; 4 (44.4%) {FOLDED}",
        f"val: 1 rows are also in train; 2 (50.0%) {FOLDED}",
        f"val: 1 rows repeat a text of the same split; 1 (25.0%) {FOLDED}",
        f"test: 1 rows are also in val; 1 (25.0%) {FOLDED}",
        "2 texts, in 6 rows, have different labels",
    ]
    assert report.remarks(splits) == expected
    with_examples = report.remarks(splits, tokenizer)
    assert with_examples[: len(expected)] == expected
    assert sorted(with_examples[len(expected) :]) == [
        "  cat sat: 1 x 'food' in train, 2 x 'Pet' in train",
        "  fox: 1 x 'Pet' in test, 1 x 'food' in val, 1 x 'pet ' in val",
    ]
    clean = {"train": splits["test"]}
    assert report.remarks(clean, tokenizer) == [expected[1]]


def test_several_labels_contradict_as_sets(settings: Settings, tmp_path: Path) -> None:
    rows = [("cat", "a,b"), ("cat", "b,a"), ("dog", "a"), ("dog", "a,b"), ("cow " * 20, "b"),
            ("cow " * 20, "c"), ("fox", "[]"), ("fox", "c")]  # fmt: skip
    path = write_tsv(tmp_path / "t.tsv", rows)
    config = settings(train_file=(str(path),), val_file=(), val_fraction=0.0, multi_label=True)
    tokenizer = prepare_tokenizer(Source(file_rows, config), build_tokenizer)
    train = open_splits(Source(file_rows, config), tokenizer)["train"]
    lines = report.remarks({"train": train}, tokenizer)
    assert lines[1] == "3 texts, in 6 rows, have different labels"
    assert sorted(lines[2:]) == [
        f"  {'cow ' * 15}...: 1 x 'b' in train, 1 x 'c' in train",
        "  dog: 1 x 'a + b' in train, 1 x 'a' in train",
        "  fox: 1 x 'c' in train, 1 x 'no label' in train",
    ]


class Numbers:
    """As much of a TokenStore as compare_texts reads. Texts differ in `exact` only by case."""

    multi_label = False
    labels = ("a", "b", "c")

    def __init__(self, rng: np.random.Generator, rows: int) -> None:
        text = rng.integers(2**64, size=40, dtype=np.uint64)
        text[:8] = [0, 1, *([2**64 - 1] * 6)]
        folded = rng.choice(text[rng.random(40) < 0.9], rows)
        exact = folded ^ rng.integers(2, size=rows).astype(np.uint64)
        self.arrays = {"exact": exact, "folded": folded}
        self.of_rows = rng.integers(3, size=rows).astype(np.int32)

    def __len__(self) -> int:
        return len(self.of_rows)

    def values(self, name: str, rows: Any = slice(None)) -> np.ndarray:
        return self.arrays[name][rows]

    def label_ids(self, rows: Any = slice(None)) -> np.ndarray:
        return self.of_rows[rows]


@pytest.mark.parametrize("part", [7, 1 << 20])
def test_counts_by_hand(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted part by part or at once, the counts are those of plain Python."""
    monkeypatch.setattr(report, "ROWS_COMPARED_AT_A_TIME", part)
    for seed in range(20):
        sizes = {"train": 50, "val": 17, "test": 1}
        splits: Any = {k: Numbers(np.random.default_rng(seed), n) for k, n in sizes.items()}
        counts, examples = report.compare_texts(splits)
        for kind in ("exact", "folded"):
            lists = {name: s.values(kind).tolist() for name, s in splits.items()}
            for a, b in [("train", "val"), ("train", "test"), ("val", "test")]:
                assert counts[a, b, kind] == sum(n in lists[a] for n in lists[b])
            for a, numbers in lists.items():
                assert counts[a, a, kind] == len(numbers) - len(set(numbers))
        pairs = [
            p for s in splits.values() for p in zip(s.values("folded"), s.of_rows, strict=True)
        ]
        several = {n for n, _ in pairs if len({label for m, label in pairs if m == n}) > 1}
        assert counts["texts"] == len(several)
        assert counts["rows"] == sum(n in several for n, _ in pairs)
        assert len(examples) == min(5, len(several)) and set(examples) <= several


def test_padding_and_steps_are_those_of_the_loop(settings: Settings) -> None:
    """The share of padding is what the collated batches of an epoch hold."""
    config = settings(global_batch_size=24, batch_size=8)
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    train = open_splits(Source(file_rows, config), tokenizer)["train"]
    lines = report.suggestions(config, train, 512)
    for line, grouped in zip(lines[2:4], (True, False), strict=True):
        plan = BatchPlan(train, batch_sizes(config, 1), seed=config.seed, group_by_length=grouped,
                         num_replicas=1, rank=0)  # fmt: skip
        masks = [train[micro].inputs["attention_mask"] for micro in plan]
        padding = 1 - sum(m.sum().item() for m in masks) / sum(m.numel() for m in masks)
        assert line.endswith(f"{padding:.1%} of the computed tokens are padding")
    assert lines[4] == "18 steps, 9 in an epoch, of 24 rows each, on 1 ranks"


class Lengths(Numbers):
    """As much of a TokenStore as the suggestions read."""

    def __init__(self, lengths: list[int]) -> None:
        self.arrays = {"full_length": np.array(lengths)}

    def __len__(self) -> int:
        return len(self.arrays["full_length"])

    def lengths(self, rows: np.ndarray) -> np.ndarray:
        return np.minimum(self.arrays["full_length"][rows], 128)


@pytest.mark.parametrize(
    ("lengths", "longest", "max_length", "batch_size"),
    [
        ([20] * 99 + [5000], 512, "24: 99.0% of the train rows stay whole", 32),
        ([20] * 98 + [5000] * 2, 512, "512: 98.0% .* whole; 99 % would need 5,000", 16),
        ([300] * 100, 512, "304: 100.0%", 16),
        ([300] * 100, 256, "256: 0.0% .* whole; 99 % would need 304", 32),
        ([3000] * 100, 4096, "3000: 100.0%", 2),
        ([0, 1] * 50, 512, "8: 100.0%", 32),
    ],
)
def test_suggested_sizes(
    settings: Settings, lengths: list[int], longest: int, max_length: str, batch_size: int
) -> None:
    """99 % of the rows, rounded up to eights, within the limit; 8,192 tokens or 32 rows."""
    store: Any = Lengths(lengths)
    first, second, *_ = report.suggestions(settings(), store, longest)
    assert re.match(f"--max-length {max_length}", first)
    assert second.startswith(f"--batch-size {batch_size}:")


def test_tables(settings: Settings, tmp_path: Path) -> None:
    """Rows and share of each class, the largest first; how many rows are longer than a limit."""
    config, splits, tokenizer = stores(settings, tmp_path, max_length=8)
    classes, lengths, *_ = report.describe(config, splits, tokenizer, 64).values()
    assert [line.split() for line in classes] == [
        ["train", "9", "val", "4", "test", "4"],
        ["4", "44.4%", "1", "25.0%", "1", "25.0%", "Pet"],
        ["3", "33.3%", "2", "50.0%", "1", "25.0%", "food"],
        ["1", "11.1%", "0", "0.0%", "1", "25.0%", "odd"],
        ["1", "11.1%", "1", "25.0%", "1", "25.0%", "pet"],
    ]
    full = splits["train"].values("full_length")
    train = [f"{full.mean():.1f}", str(int(np.median(full))), str(full.max())]
    cells = lengths[1].split()
    assert [cells[1], cells[2], cells[5]] == train
    assert cells[6:] == [f"{(full > cut).mean():.1%}" for cut in (8, 64, 128, 256, 512)]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """The report of `python data.py` with these arguments; its log is put back."""
    log = logging.getLogger("training")
    monkeypatch.setattr(log, "handlers", [])
    before = log.propagate, log.level

    def call(*arguments: str) -> None:
        whatever_the_project_uses = ("--model", "from-scratch")
        monkeypatch.setattr(sys, "argv", ["data.py", *arguments, *whatever_the_project_uses])
        folder, config = report.parse()
        report.main(folder, config, file_rows, model)

    yield call
    log.propagate, log.level = before


def test_command(
    command: Callable[..., None],
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    recwarn: pytest.WarningsRecorder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Text and picture of rows in any order are the same; labels in any script are drawn, and shown
    on a screen that lacks some of them."""
    screen = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(screen, "gbk", write_through=True))
    names = {"animal": "动物", "food": "$food^$", "weather": "🌧 ^_{x"}
    rows = [(text, names[label]) for text, label in make_rows(200, seed=5)]
    wide = {i: chr(i + 0xFEE0) for i in range(ord("a"), ord("z") + 1)}
    rows += [(text.translate(wide), "动物") for text, _ in rows[:40]]
    cache = str(tmp_path_factory.mktemp("cache"))
    written = []
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        path = write_tsv(folder / "rows.tsv", rows)
        command("--report", str(folder / "out"), "--train-file", str(path), "--cache-dir", cache)
        text = (folder / "out" / "data_report.txt").read_text("utf-8")
        written.append([line for line in text.split("\n") if "are padding" not in line])
        picture = (folder / "out" / "data_report.png").read_bytes()
        assert picture.startswith(b"\x89PNG") and len(picture) > 20_000
        random.Random(1).shuffle(rows)
    assert written[0] == written[1]
    assert "动物" in text and "different labels" in text
    shown = screen.getvalue().decode("gbk")
    assert "动物" in shown and "\\U0001f327" in shown
    assert [w for w in recwarn if w.category is UserWarning] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--report", "--train-file", "nope.tsv"], "data.py: no file 'nope.tsv'"),
        (["--report", "--epoch", "3"], "did you mean --epochs?"),
        (["--epochs", "3"], "required: --report"),
    ],
)
def test_mistakes_in_one_line(
    command: Callable[..., None], arguments: list[str], message: str, capsys: Any
) -> None:
    with pytest.raises(SystemExit) as stopped:
        command(*arguments)
    assert message in f"{stopped.value} {capsys.readouterr().err}"


def test_a_mistyped_flag_answers_before_pytorch_is_imported() -> None:
    code = (
        "import runpy, sys; sys.argv = ['data.py', '--report', '--epoch', '3']\n"
        "try: runpy.run_path('data.py', run_name='__main__')\n"
        "finally: print(sorted({'torch', 'transformers', 'pyarrow'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True,
                          timeout=100)  # fmt: skip
    assert "did you mean --epochs?" in done.stderr
    assert (done.returncode, done.stdout) == (2, "[]\n")


@pytest.mark.parametrize("label", ["$", "$$", "$^$", "动物", "🌧 ^_{x"])
def test_confusion_matrix_of_any_label(label: str, recwarn: pytest.WarningsRecorder) -> None:
    """A label that is a wrong formula, or that no font has, is drawn and gives no warning."""
    matrix = np.array([[3, 1], [0, 2]])
    image = figures.confusion_image(matrix, [label, "x"])
    assert image.dtype == np.uint8 and image.shape[2] == 4
    assert (image != figures.confusion_image(matrix, ["", "x"])).any()
    assert not recwarn.list


def test_fonts_for_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed CJK font follows the default one."""
    fonts = [SimpleNamespace(name=name) for name in ("Arial", "SimHei", "Noto Sans CJK SC")]
    monkeypatch.setattr("matplotlib.font_manager.fontManager.ttflist", fonts)
    with figures.any_text():
        assert matplotlib.rcParams["font.family"] == ["DejaVu Sans", "Noto Sans CJK SC", "SimHei"]
    assert "SimHei" not in matplotlib.rcParams["font.family"]


def test_short_form_in_the_log(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """A run says the same remarks, and nothing more where there is nothing to say."""
    monkeypatch.setattr(logging.getLogger("training"), "propagate", True)
    config, splits, _ = stores(settings, tmp_path)
    console.describe_data(dict(splits), config.max_length)
    said = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert said == report.remarks(splits)
    caplog.clear()
    path = write_tsv(tmp_path / "clean.tsv", [("cat", "a"), ("dog", "b")])
    clean = settings(train_file=(str(path),), val_file=(), val_fraction=0.0)
    tokenizer = prepare_tokenizer(Source(file_rows, clean), build_tokenizer)
    console.describe_data(open_splits(Source(file_rows, clean), tokenizer), 48)
    assert [r for r in caplog.records if r.levelname == "WARNING"] == []
