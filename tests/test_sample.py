"""The sample data: made by its generator, clean, no text twice, neither trivial nor noise."""

import importlib.util
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[1]
GENERATOR = ROOT / "tools" / "make_sample.py"
SAMPLE = ROOT / "{{cookiecutter.project_slug}}" / "sample"
Rows = list[tuple[str, str]]


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_sample", GENERATOR)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_sample = load_generator()


def read(split: str) -> Rows:
    """The rows of the committed file, read as plainly as the format is."""
    header, *lines = (SAMPLE / f"{split}.tsv").read_bytes().decode().removesuffix("\n").split("\n")
    assert header == "text\tlabel"
    rows = [tuple(line.split("\t")) for line in lines]
    assert all(len(row) == 2 for row in rows)
    return [(row[0], row[1]) for row in rows]


@pytest.fixture(scope="module")
def splits() -> dict[str, Rows]:
    return {split: read(split) for split in make_sample.SIZES}


def generate(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(GENERATOR), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def test_the_files_are_what_the_generator_writes(tmp_path: Path) -> None:
    """The same bytes in every process, and `--check` tells when they are not."""
    assert generate("--out", str(tmp_path)).returncode == 0
    for split in make_sample.SIZES:
        made = (tmp_path / f"{split}.tsv").read_bytes()
        assert made == (SAMPLE / f"{split}.tsv").read_bytes(), f"run {GENERATOR.name} again"
    assert generate("--check").returncode == 0
    with (tmp_path / "val.tsv").open("ab") as file:
        file.write(b"one more\tother\n")
    spoilt = generate("--check", "--out", str(tmp_path))
    assert spoilt.returncode == 1 and "val.tsv" in spoilt.stderr


def test_only_the_random_method_that_python_keeps_stable_is_used() -> None:
    """`choice`, `shuffle` and the like may change between Python versions; `random()` may not."""
    source = GENERATOR.read_text(encoding="utf-8")
    assert re.findall(r"Random\(\w+\)\.(\w+)", source) == ["random"]
    assert not re.search(r"^import random\b|\bhash\(", source, re.MULTILINE)


@pytest.mark.parametrize("split", ["train", "val", "test"])
def test_format(split: str) -> None:
    """One row a line: no quotes, carriage returns, controls, blank edges or template braces."""
    body = (SAMPLE / f"{split}.tsv").read_bytes()
    text = body.decode()
    assert text.endswith("\n") and not text.endswith("\n\n") and not text.startswith("\ufeff")
    for bad in ['"', "\r", "{", "}", "[", "|", "\u2028", "\x0b", "\x85"]:
        assert bad not in text, repr(bad)
    assert all(row == row.strip() and row for pair in read(split) for row in pair)


def test_small_enough_to_ship() -> None:
    """All three files together stay below 700 kB."""
    assert sum((SAMPLE / f"{split}.tsv").stat().st_size for split in make_sample.SIZES) < 700_000


def test_sizes_and_shares(splits: dict[str, Rows]) -> None:
    """Every split has its size and, up to the wrong labels, the shares of the classes."""
    for split, rows in splits.items():
        assert len(rows) == make_sample.SIZES[split]
        counts = Counter(label for _, label in rows)
        assert counts.keys() == make_sample.SHARES.keys()
        for label, share in make_sample.SHARES.items():
            assert counts[label] / len(rows) == pytest.approx(share, abs=0.015), (split, label)


def test_the_readme_tells_the_shares() -> None:
    """The table in sample/README.md has each class with its share."""
    table = re.findall(r"^\| `(\w+)` \| (\d+) % ", (SAMPLE / "README.md").read_text(), re.MULTILINE)
    assert table == [(name, f"{share:.0%}"[:-1]) for name, share in make_sample.SHARES.items()]


def test_no_text_twice(splits: dict[str, Rows]) -> None:
    """No text leaks: not within or between splits, even without case, spaces and digits."""
    texts = [text for rows in splits.values() for text, _ in rows]
    plain = Counter("".join(text.casefold().split()) for text in texts)
    assert plain.most_common(1)[0][1] == 1
    letters = Counter(re.sub(r"[\W\d_]", "", text.casefold()) for text in texts)
    assert letters.most_common(1)[0][1] == 1


def test_variety(splits: dict[str, Rows]) -> None:
    """English, Chinese and both in one text; two words and eighty; every class in both tongues."""
    rows = [row for split in splits.values() for row in split]
    chinese = [bool(re.search(r"[\u4e00-\u9fff]", text)) for text, _ in rows]
    assert 0.15 < sum(chinese) / len(rows) < 0.22
    both = sum(
        bool(re.search(r"[\u4e00-\u9fff].*[a-z]{4}|[a-z]{4}.*[\u4e00-\u9fff]", t)) for t, _ in rows
    )
    assert 0.01 < both / len(rows) < 0.05
    assert {label for (_, label), zh in zip(rows, chinese, strict=True) if zh} == set(
        make_sample.SHARES
    )
    lengths = sorted(
        len(re.findall(r"[\u4e00-\u9fff]|[^\s\u4e00-\u9fff]+", text)) for text, _ in rows
    )
    assert lengths[0] <= 3 and 70 <= lengths[-1] <= 110
    assert lengths[len(rows) // 10] <= 10 and lengths[len(rows) * 9 // 10] >= 35


def words(text: str) -> set[str]:
    """Words, and pairs of Chinese characters."""
    text = text.casefold()
    runs = re.findall(r"[\u4e00-\u9fff]+", text)
    return set(re.findall(r"[a-z']+", text)) | {r[i : i + 2] for r in runs for i in range(len(r))}


def keyword_accuracy(train: Rows, val: Rows) -> float:
    """Validation accuracy of the best rules 'has this word: this class', one word per class.

    Fitted greedily: each time the rule that gets most of the rows not yet covered right, net of
    those that it gets wrong. What no rule covers goes to the most frequent class.
    """
    default = Counter(label for _, label in train).most_common(1)[0][0]
    rules: list[tuple[str, str]] = []
    rest = [(words(text), label) for text, label in train]
    for _ in make_sample.SHARES:
        having = Counter(word for found, _ in rest for word in found)
        right = Counter((word, label) for found, label in rest for word in found)
        taken = {label for _, label in rules}
        word, label = max(
            (pair for pair in right if pair[1] not in taken),
            key=lambda pair: 2 * right[pair] - having[pair[0]],
        )
        rules.append((word, label))
        rest = [row for row in rest if word not in row[0]]
    hits = 0
    for text, label in val:
        found = words(text)
        hits += label == next((answer for word, answer in rules if word in found), default)
    return hits / len(val)


def test_no_keyword_solves_it_and_a_model_does(splits: dict[str, Rows]) -> None:
    """One keyword a class stays far below TF-IDF with logistic regression, which is not perfect."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import confusion_matrix, f1_score
    from sklearn.pipeline import make_pipeline

    keyword = keyword_accuracy(splits["train"], splits["val"])
    assert keyword < 0.60
    model = make_pipeline(
        TfidfVectorizer(ngram_range=(1, 2), min_df=2, sublinear_tf=True),
        LogisticRegression(C=10, max_iter=1000),
    )
    model.fit(*zip(*splits["train"], strict=True))
    for split in ("val", "test"):
        texts, labels = zip(*splits[split], strict=True)
        predicted = model.predict(texts)
        right = sum(one == other for one, other in zip(predicted, labels, strict=True))
        assert 0.80 < right / len(labels) < 0.93, (split, right / len(labels))
        names = list(make_sample.SHARES)
        scores = dict(
            zip(names, f1_score(labels, predicted, labels=names, average=None), strict=True)
        )
        assert min(scores.values()) > 0.6, scores  # every class can be learned
        confused = confusion_matrix(labels, predicted, labels=names)
        complaint, delivery = names.index("complaint"), names.index("delivery")
        assert confused[complaint, delivery] + confused[delivery, complaint] >= 3
