"""Data sets of the Hugging Face hub are read as strictly as files. The hub itself is not reached:
its loader is replaced, and where `datasets` is installed it reads a folder of the same name."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import machines
import pyarrow as pa
import pytest
from ranks import Ranks

from training.dataset import arrow
from training.dataset.readers import FileRows, read_files
from training.dataset.rows import ReadReport, Row, good_rows
from training.settings.config import TrainConfig
from training.settings.errors import UserError
from training.settings.flags import load_config

Load = Callable[..., list[Any]]
CLASSES = SimpleNamespace(names=["neg", "pos"])
SEVERAL = SimpleNamespace(feature=CLASSES)


class Features(dict[str, Any]):
    arrow_schema: pa.Schema


class Stub:
    """As much of datasets.Dataset as is used, in batches of two rows."""

    def __init__(self, columns: dict[str, Any], kind: Any) -> None:
        self.table = pa.table(columns)
        self._fingerprint = "f1"
        self.features = Features(dict.fromkeys(columns) | {"label": kind})
        self.features.arrow_schema = self.table.schema

    def select_columns(self, columns: list[str]) -> "Stub":
        return self

    def with_format(self, kind: str) -> "Stub":
        assert kind == "arrow"
        return self

    def iter(self, size: int) -> Iterator[pa.Table]:
        yield from (self.table.slice(i, 2) for i in range(0, self.table.num_rows, 2))


def files(config: TrainConfig) -> FileRows:
    return read_files(config.train_file, "train", config)


def read(name: str, **changes: Any) -> list[Row]:
    config = TrainConfig(train_file=(name,), **changes)
    return list(good_rows(files(config), "error", ReadReport()))


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Iterator[Load]:
    """Make load_dataset give a data set with these columns; what it is called with is kept."""
    arrow.hub_split.cache_clear()

    def make(columns: dict[str, Any], kind: Any = None) -> list[Any]:
        calls = []

        def load_dataset(path: str, name: str | None, **options: Any) -> Stub:
            calls.append((path, name, options["revision"], options["split"]))
            return Stub(columns, kind)

        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
        return calls

    yield make
    arrow.hub_split.cache_clear()


@pytest.mark.parametrize(
    ("name", "split", "called", "shown"),
    [
        ("hf://o/n", "train", ("o/n", None, None, "train"), "hf://o/n/train"),
        ("hf://o/n", "val", ("o/n", None, None, "validation"), "hf://o/n/validation"),
        ("hf://o/n", "test", ("o/n", None, None, "test"), "hf://o/n/test"),
        ("hf://o/n/dev", "val", ("o/n", None, None, "dev"), "hf://o/n/dev"),
        ("hf://o/n:zh", "train", ("o/n", "zh", None, "train"), "hf://o/n:zh/train"),
        ("hf://o/n@v1:zh/a", "test", ("o/n", "zh", "v1", "a"), "hf://o/n@v1:zh/a"),
    ],
)
def test_names(name: str, split: str, called: tuple, shown: str, load: Load) -> None:
    calls = load({"text": ["x"], "label": ["y"]})
    assert str(arrow.hub_split(name, split)) == shown
    assert calls == [called]


def test_rows(load: Load) -> None:
    """Strings as written, whole numbers as digits, class numbers as their names; each its row."""
    load({"text": ["NA", " 007 ", "c"], "label": [1, 0, 7]})
    expected = [("NA", "1"), (" 007 ", "0"), ("c", "7")]
    file = "hf://o/n/train"
    assert read("hf://o/n") == [Row(t, None, n, file, i) for i, (t, n) in enumerate(expected, 1)]
    arrow.hub_split.cache_clear()
    load({"label": [1, 0, 0], "text": ["a", "b", "c"], "other": [1.5, None, 2]}, CLASSES)
    assert [(row.text, row.label) for row in read("hf://o/n")] == [
        ("a", "pos"), ("b", "neg"), ("c", "neg"),
    ]  # fmt: skip
    arrow.hub_split.cache_clear()
    load({"text": ["a", "b", "c"], "label": [[0, 1], [], [1]]}, SEVERAL)
    rows = read("hf://o/n", multi_label=True)
    assert [row.label for row in rows] == [("neg", "pos"), (), ("pos",)]
    arrow.hub_split.cache_clear()
    load({"text": ["a", "b"], "label": [[0], None]}, SEVERAL)
    with pytest.raises(UserError, match="hf://o/n/train:2 'label' is null"):
        read("hf://o/n", multi_label=True)


@pytest.mark.parametrize(
    ("columns", "kind", "message"),
    [
        ({"text": ["a", "b"], "label": [0, -1]}, CLASSES, "hf://o/n/train:2 'label' is null"),
        ({"text": ["a", None], "label": [0, 1]}, CLASSES, "hf://o/n/train:2 'text' is null"),
        ({"text": ["a"], "label": [1.0]}, None, "'label' .*(double|float)"),
        ({"text": ["a"], "label": [[0, 1]]}, SEVERAL, "several labels, which need --multi-label"),
        ({"text": ["a"], "lable": [0]}, None, "has no column 'label', did you mean lable"),
        ({"text": [], "label": []}, None, "has no rows|holds null"),
    ],
)
def test_rows_that_cannot_be_used(columns: dict, kind: Any, message: str, load: Load) -> None:
    load(columns, kind)
    with pytest.raises(UserError, match=message):
        read("hf://o/n")


def test_fingerprint(load: Load, tmp_path: Path) -> None:
    """It changes with the data set's own, and files may stand beside it."""
    load({"text": ["a"], "label": ["x"]})
    path = tmp_path / "rows.tsv"
    path.write_text("text\tlabel\nb\ty\n", "utf-8")
    config = TrainConfig(train_file=("hf://o/n", str(path)))
    rows = good_rows(files(config), "error", ReadReport())
    assert [row.text for row in rows] == ["b", "a"]
    first = files(config).fingerprint()
    assert files(config).fingerprint() == first
    arrow.hub_split("hf://o/n", "train").data._fingerprint = "f2"
    assert files(config).fingerprint() != first


def test_one_rank_of_a_machine_asks_for_a_data_set(ranks: Ranks, tmp_path: Path) -> None:
    name = ("hf://o/n",)
    config = TrainConfig(train_file=name, val_file=name, cache_dir=str(tmp_path))
    contents, requests = zip(*ranks.run(4, machines.data_set_requests, config), strict=True)
    assert requests == (2, 0, 2, 0)
    assert all(content == contents[0] for content in contents)
    assert len(set(contents[0])) == 2


def test_one_rank_of_a_machine_asks_for_a_model(
    ranks: Ranks, tiny_model: Path, tmp_path: Path
) -> None:
    """Local rank 0 asks for configuration, tokenizer and weights; the other ranks wait for each,
    and read it from the cache, also after it has failed."""
    config = TrainConfig(model="o/m", max_length=32)
    job = machines.model_requests, config, str(tiny_model), tmp_path
    for rank, (requests, error) in enumerate(ranks.run(4, *job, False)):
        assert ("hub", False, True) in requests or rank % 2 == 1
        assert all(only_cache for what, only_cache, _ in requests if rank % 2 == 1)
        assert "reached from here; check the name and the network (no" in error
    for rank, (requests, error) in enumerate(ranks.run(4, *job, True)):
        assert not error
        online = [what for what, only_cache, _ in requests if not only_cache]
        assert [what for what, *_ in requests if what in ("tokenizer", "weights")] == [
            "tokenizer", "weights"
        ]  # fmt: skip
        if rank % 2 == 0:
            assert {"hub", "content", "config", "tokenizer", "weights"} == set(online)
        else:
            assert online == []
            assert all(was_there for *_, was_there in requests)


@pytest.mark.parametrize("name", ["hf://n", "hf://o/n/a/b", "hf://o/n:", "hf:///o/n"])
def test_names_written_wrong(name: str) -> None:
    with pytest.raises(UserError, match=r"is not written as hf://org/name\[@revision\]"):
        read(name)


def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    arrow.hub_split.cache_clear()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"hf://o/n needs pip install -e '.\[hub\]'"):
        read("hf://o/n")


def test_failure_of_the_hub_is_one_line(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    load({})

    def fail(*arguments: Any, **options: Any) -> None:
        raise ConnectionError("cannot reach\nthe hub")

    monkeypatch.setattr(sys.modules["datasets"], "load_dataset", fail)
    with pytest.raises(UserError) as caught:
        read("hf://o/n")
    assert str(caught.value) == "hf://o/n, split train: cannot reach the hub"


def test_settings_keep_the_name(tmp_path: Path) -> None:
    """A name is no path: neither a settings file elsewhere nor a run's record changes it."""
    path = tmp_path / "config.toml"
    path.write_text('train_file = "hf://o/n"\nval_file = "val.tsv"\n', "utf-8")
    config = load_config(["--config", str(path)])
    assert (config.train_file, config.val_file) == (("hf://o/n",), (str(tmp_path / "val.tsv"),))
    assert 'train_file = ["hf://o/n"]' in config.to_toml()


def test_real_loader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the package itself, on a folder that is named like a data set."""
    pytest.importorskip("datasets")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    for split, text in {"train": "a,x\nb,y", "validation": "c,x"}.items():
        (folder / f"{split}.csv").write_text(f"text,label\n{text}\n", "utf-8")
    monkeypatch.chdir(tmp_path)
    arrow.hub_split.cache_clear()
    assert [(row.text, row.label) for row in read("hf://org/name")] == [("a", "x"), ("b", "y")]
    assert [row.text for row in read("hf://org/name/validation")] == ["c"]
    with pytest.raises(UserError, match='Unknown split "test"'):
        read("hf://org/name/test")
