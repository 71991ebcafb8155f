"""What data.py gives: any rows train, stores follow what rows depend on, mistakes are named."""

import importlib.util
import json
import os
import sqlite3
import threading
from collections.abc import Callable, Iterator
from dataclasses import make_dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import file_rows
import jobs
import machines
import numpy as np
import pytest
import torch
from conftest import make_rows, write_tsv
from ranks import RankError, Ranks

from model import build_tokenizer
from training.dataset import files as files_module
from training.dataset.build import open_splits
from training.dataset.readers import FileRows
from training.dataset.rows import ReadReport, Row
from training.dataset.source import Source, code_of
from training.dataset.token_store import TokenStore
from training.dataset.tokenizer import prepare_tokenizer
from training.settings.config import TrainConfig
from training.settings.errors import UserError
from training.settings.setting import setting

Settings = Callable[..., TrainConfig]
Splits = dict[str, TokenStore]
ROWS = [Row(text, label=label) for text, label in make_rows(64, seed=6)]


@pytest.fixture
def module(tmp_path: Path) -> Callable[..., ModuleType]:
    """Make a data.py whose rows are what a function returns, or that has this code."""

    def make(rows: Callable[..., Any] | str, name: str = "data.py") -> ModuleType:
        path = tmp_path / name
        path.write_text(rows if isinstance(rows, str) else "# rows of a test\n", "utf-8")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec and spec.loader
        made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
        if not isinstance(rows, str):
            vars(made)["rows"] = rows
        return made

    return make


Module = Callable[..., ModuleType]


def splits_of(config: TrainConfig, made: ModuleType) -> Splits:
    source = Source(made, config)
    return open_splits(source, prepare_tokenizer(source, build_tokenizer))


def train_rows(*rows: Any) -> Callable[..., Any]:
    return lambda split, config: rows if split == "train" else None


# -- any source ----------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["tiny", "from-scratch"])
def test_a_database(settings: Settings, module: Module, tmp_path: Path, model: str) -> None:
    """No file is named, and a connection is used in the thread that opened it."""
    path = tmp_path / "rows.db"
    with sqlite3.connect(path) as connection:
        connection.execute("create table rows (split, text, label)")
        for split, seed in (("train", 1), ("val", 2)):
            values = [(split, *row) for row in make_rows(40, seed)]
            connection.executemany("insert into rows values (?, ?, ?)", values)
    opened = sqlite3.connect(path)
    threads = set()

    def rows(split: str, config: TrainConfig) -> Iterator[Row]:
        query = "select text, label from rows where split = ? order by rowid"
        for text, label in opened.execute(query, [split]):
            threads.add(threading.get_ident())
            yield Row(text, label=label)

    changes = {"model": "from-scratch"} if model == "from-scratch" else {}
    config = settings(train_file=(), val_file=(), cache_dir=str(tmp_path / "cache"), **changes)
    splits = splits_of(config, module(rows))
    assert {name: len(store) for name, store in splits.items()} == {"train": 40, "val": 40}
    assert threads == {threading.get_ident()}
    with opened:
        opened.execute("delete from rows where rowid = 1")
    changed = splits_of(config, module(rows))
    assert {name: len(store) for name, store in changed.items()} == {"train": 39, "val": 40}
    assert changed["train"].folder != splits["train"].folder
    assert changed["val"].folder.name.split("-")[0] == "val"


def test_rows_that_differ_each_time_are_refused(settings: Settings, module: Module) -> None:
    numbers = iter(range(10**6))
    made = module(lambda split, config: (Row(f"cat {next(numbers)}", label="a") for _ in range(9)))
    message = r"rows\('train', config\) gives other rows when it is called again; sort what a query"
    with pytest.raises(UserError, match=message):
        splits_of(settings(), made)
    once = iter(ROWS)
    with pytest.raises(UserError, match=message):
        splits_of(settings(), module(lambda split, config: once))


def test_drawn_by_the_main_process_once(ranks: Ranks, settings: Settings, tmp_path: Path) -> None:
    """To hash them, and once more by the process that writes the store."""
    config = settings(train_file=(), val_file=(), cache_dir=str(tmp_path / "cache"))
    first, second = ranks.run(2, jobs.draws, config)
    assert first == (["train", "train", "val", "test"], second[1])
    assert second[0] == []
    assert ranks.run(2, jobs.draws, config)[0] == (["train", "val", "test"], first[1])
    with pytest.raises(RankError, match="'x', for row 1; it must yield Row") as error:
        ranks.run(2, jobs.draws, config, ("x",))
    assert error.value.kinds == ["UserError", "UserError"]


def test_files_are_hashed_once(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    fingerprint = FileRows.fingerprint

    def counting(self: FileRows) -> str:
        hashed.append(self.paths[0].name)
        return fingerprint(self)

    monkeypatch.setattr(FileRows, "fingerprint", counting)
    splits_of(settings(model="from-scratch"), file_rows)
    assert sorted(hashed) == ["train.tsv", "val.tsv"]


def test_files_are_hashed_once_a_machine(ranks: Ranks, settings: Settings, tmp_path: Path) -> None:
    """By local rank 0, also where they are new. Older ones only when they have changed."""
    path = write_tsv(tmp_path / "t.tsv", make_rows(20, seed=4))
    config = settings(train_file=(str(path),), cache_dir=str(tmp_path / "cache"))

    def run(recent_ns: int) -> tuple[list[str], list[list[str]]]:
        contents, read = zip(*ranks.run(4, machines.hashed_files, config, recent_ns), strict=True)
        assert contents[0] == contents[1] == contents[2] == contents[3]
        return contents[0], list(read)

    both = ["t.tsv", "val.tsv"]
    fresh, read = run(10**18)
    assert read == [both, [], both, []]
    content, read = run(0)
    assert content == fresh
    assert sorted(read[0] + read[2]) == both and not read[1] and not read[3]
    assert run(0) == (content, [[], [], [], []])
    times = path.stat()
    path.write_text(path.read_text("utf-8").replace("0", "1"), "utf-8")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as if it had not changed
    changed, read = run(0)
    assert read[0] + read[2] == ["t.tsv"]
    assert changed[0] != content[0] and changed[1:] == content[1:]


def test_a_cache_that_cannot_be_written(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then files are hashed each time."""
    monkeypatch.setattr(files_module, "RECENT_NS", 0)
    (tmp_path / "file").touch()
    first, *others = (
        Source(file_rows, settings(cache_dir=str(tmp_path / name))).content("train")
        for name in ("cache", "cache", "file")
    )
    assert others == [first, first]


def test_where_validation_rows_come_from(settings: Settings, module: Module) -> None:
    """The source is asked first; then they are split off, or there are none."""

    def without_val(split: str, config: TrainConfig) -> Iterator[Row]:
        if split == "train":
            yield from ROWS

    config = settings(train_file=(), val_file=())
    splits = splits_of(config, module(without_val))
    assert {name: len(store) for name, store in splits.items()} == {"train": 58, "val": 6}
    none = replace(config, val_fraction=0.0)
    assert list(splits_of(none, module(without_val))) == ["train"]
    for changes in ({"early_stopping_patience": 2}, {"schedule": "plateau"}):
        stopping: Any = replace(none, **changes)
        with pytest.raises(UserError, match="early stopping and the plateau schedule need val_fil"):
            splits_of(stopping, module(without_val))
        assert "val" in splits_of(stopping, module(lambda split, config: ROWS))
    with pytest.raises(UserError, match=r"data.py: rows\('train', config\) gives no rows"):
        splits_of(config, module(lambda split, config: []))
    with pytest.raises(UserError, match="no train_file: give --train-file"):
        splits_of(config, file_rows)


def test_a_wrapped_reader(settings: Settings, module: Module, tmp_path: Path) -> None:
    """A generator may change the rows of files and pass on the rest: bad rows count as ever."""
    path = write_tsv(tmp_path / "t.tsv", [*make_rows(20, 1), ("", "food")])

    def rows(split: str, config: TrainConfig) -> Iterator[Any]:
        for item in file_rows.rows(split, config):
            yield item._replace(text=f"{item.text} dog") if isinstance(item, Row) else item

    config = settings(train_file=(str(path),), val_file=(), on_bad_rows="skip", val_fraction=0.0)
    meta = splits_of(config, module(rows))["train"].meta
    assert (meta["rows"], meta["bad_rows"], meta["lines"]) == (20, 1, 22)
    with pytest.raises(UserError, match="1 of 21 rows are bad"):
        splits_of(replace(config, on_bad_rows="error"), module(rows))


# -- what rows depend on -------------------------------------------------------------------------


def test_code_that_is_imported_counts(tmp_path: Path) -> None:
    """In functions, by detours, of packages and folders; not what a script or training/ imports."""
    counted = {
        "data.py": "import json, a\nfrom pack import b, name\ndef f():\n    from folder import c",
        "a.py": "import d.e as x",
        "d/__init__.py": "",
        "d/e.py": "from .. import z\nfrom . import f\nfrom .g import name",
        "d/f.py": "",
        "d/g.py": "import data, a  # round about",
        "pack/__init__.py": "",
        "pack/b.py": "",
        "folder/c.py": "from ..a import x",
    }
    others = {
        "z.py": "", "json.py.txt": "", "unused.py": "", "script.py": "", "training/x.py": "",
        "venv/pyvenv.cfg": "", "venv/lib.py": "",
    }  # fmt: skip
    main = "\nimport training.x, venv.lib\nif __name__ == '__main__':\n    import script"
    for name, text in (counted | others).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text + (main if name == "data.py" else ""), "utf-8")
    assert sorted(code_of(tmp_path / "data.py")) == sorted([*counted, "z.py"])


def test_key(settings: Settings, module: Module, tmp_path: Path) -> None:
    """Code, settings and the content of the files that settings name make other stores."""
    tags, helper = tmp_path / "tags.txt", tmp_path / "helper.py"
    tags.write_text("x", "utf-8")
    helper.write_text("SIZE = 1", "utf-8")
    about = [("tags", str, setting(str(tags), "a file", path=True)), ("level", int, 3)]
    new: Any = make_dataclass("New", about, bases=(TrainConfig,), frozen=True)
    config = new(**vars(settings()))
    made = module("def rows(split, config):\n    return ()\ndef other():\n    import helper")

    def key(config: TrainConfig) -> str:
        return json.dumps(Source(made, config).key("train"))

    before = key(config)
    assert key(replace(config, lr=1.0)) == before
    assert key(replace(config, level=4)) != before
    copy = tmp_path / "copy.txt"
    copy.write_text("x", "utf-8")
    assert key(replace(config, tags=str(copy))) == before
    copy.write_text("y", "utf-8")
    assert key(replace(config, tags=str(copy))) != before
    assert key(replace(config, tags="no such file")) != before
    helper.write_text("SIZE = 2", "utf-8")
    assert key(config) != before


# -- rows that cannot be used --------------------------------------------------------------------

GOOD: Any = Row("cat dog", label="x")
AT: Any = GOOD._replace(file="a.db", line=7)
TEXT = "must be a str"
BAD: dict[str, tuple[Any, str]] = {
    "tuple": (
        ("cat", "x"),
        r"gives a tuple of 2, \('cat', 'x'\), for row 2; it must yield Row",
    ),
    "str": ("cat", "gives a str, 'cat', for row 2"),
    "dict": ({"text": "cat"}, "gives a dict of 1, .*for row 2"),
    "none": (None, "gives a NoneType, None, for row 2"),
    "text": (AT._replace(text=3), rf"row 2 \(a.db:7\) Row\(text=3, .* the text {TEXT}"),
    "texts": (GOOD._replace(text=("a", None)), "the text must be a str, or a tuple of them"),
    "pair": (GOOD._replace(pair=b"x"), "the pair, a second text, must be a str or None"),
    "label": (GOOD._replace(label=1), f"the label {TEXT} that is not empty"),
    "no label": (GOOD._replace(label=None), f"the label {TEXT} that is not empty"),
    "labels": (GOOD._replace(label=("x",)), "a tuple of labels needs --multi-label"),
    "another kind": (
        GOOD._replace(pair="x"),
        "it has a text, a pair, .* first row has a text",
    ),
    "columns": (GOOD._replace(text=("a", "b")), "it has a tuple of 2 texts, .* row has a text"),
    "inputs": (GOOD._replace(inputs={"a": 1}), "inputs: a; the first row has .* inputs: none"),
}


@pytest.mark.parametrize("case", BAD)
def test_rows_of_wrong_types(settings: Settings, module: Module, case: str) -> None:
    row, message = BAD[case]
    with pytest.raises(UserError, match=message) as error:
        splits_of(settings(), module(train_rows(GOOD, row)))
    assert str(error.value).startswith("data.py: rows") and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"price": 1.0}, "inputs: price; the first row has .*inputs: price, sizes of length 2"),
        ({"price": 1.0, "sizes": [1]}, "sizes of length 1; .* sizes of length 2"),
        ({"price": float("nan"), "sizes": [1, 2]}, r"inputs\['price'\] is not finite"),
        ({"price": 1e300, "sizes": [1, 2]}, r"inputs\['price'\] is not finite"),
        ({"price": 1.0, "sizes": [1, float("inf")]}, r"inputs\['sizes'\] is not finite"),
        ({"price": "1", "sizes": [1, 2]}, r"inputs\['price'\] must be a number or a list"),
        ({"price": 1, "sizes": [[1], [2, 3]]}, r"inputs\['sizes'\] must be a number or a list"),
        ({"price": None, "sizes": [1, 2]}, r"inputs\['price'\] must be a number or a list"),
        ({"input_ids": 1}, "named as a parameter of forward, not 'input_ids'"),
        ({"a price": 1}, "named as a parameter of forward, not 'a price'"),
        ([1.0], "inputs must be a dict of numbers"),
    ],
)
def test_inputs_of_wrong_kinds(
    settings: Settings, module: Module, inputs: Any, message: str
) -> None:
    first = GOOD._replace(inputs={"price": 1, "sizes": [1.0, 2]})
    with pytest.raises(UserError, match=message) as error:
        splits_of(settings(), module(train_rows(first, GOOD._replace(inputs=inputs))))
    assert "for row 2" in str(error.value) and "\n" not in str(error.value)


def test_a_label_that_is_no_tuple(settings: Settings, module: Module) -> None:
    """Of several labels; as a str it would be split into its letters."""
    for label in ("ab", ["a"], ("a", 1), None):
        row: Any = GOOD._replace(label=label)
        with pytest.raises(UserError, match="the label must be a tuple of str"):
            splits_of(settings(multi_label=True), module(train_rows(row)))
    rows = [GOOD._replace(label=()), GOOD._replace(label=())]
    with pytest.raises(UserError, match="none of the 2 rows has a label"):
        splits_of(settings(multi_label=True), module(train_rows(*rows)))


def test_splits_of_another_kind(settings: Settings, module: Module) -> None:
    pairs = [row._replace(pair="rain") for row in ROWS]
    made = module(lambda split, config: ROWS if split == "train" else pairs)
    message = "data.py: val rows have a text, a pair, .*; train rows have a text, no pair"
    with pytest.raises(UserError, match=message):
        splits_of(settings(), made)


def test_functions_that_cannot_be_used(settings: Settings, module: Module) -> None:
    for code, message in (
        ("x = 1", r"data.py has no function rows\(split, config\)"),
        ("def rows(split): ...", r"rows\('train', config\) cannot be called: too many positional"),
        ("def rows(split, config): return 3", "returns 3; it must yield Row"),
    ):
        with pytest.raises(UserError, match=message):
            splits_of(settings(), module(code))
    broken = "def rows(split, config):\n    yield {}['x']"
    with pytest.raises(KeyError):  # theirs: with its traceback
        splits_of(settings(), module(broken))


# -- what is stored ------------------------------------------------------------------------------


def test_numbers_beside_the_text(settings: Settings, module: Module, tmp_path: Path) -> None:
    """Float32 tensors in each batch, in the order of its rows; other numbers, another digest."""
    rows = [
        row._replace(inputs={"price": i / 3, "sizes": np.array([i, -i])})
        for i, row in enumerate(ROWS)
    ]
    config = settings(val_file=(), val_fraction=0.0)
    store = splits_of(config, module(train_rows(*rows)))["train"]
    assert store.meta["inputs"] == {"price": 0, "sizes": 2}
    inputs = store.inputs(np.array([5, 0, 63]))
    torch.testing.assert_close(inputs["price"], torch.tensor([5 / 3, 0, 21.0]), rtol=0, atol=0)
    torch.testing.assert_close(
        inputs["sizes"], torch.tensor([[5.0, -5], [0, 0], [63, -63]]), rtol=0, atol=0
    )
    part = store.split(0.25, seed=1)[1]
    assert part.inputs(np.array([2]))["sizes"][0, 0] == part.stored(np.array([2]))[0]
    other = [row._replace(inputs={"price": 0.0, "sizes": [i, -i]}) for i, row in enumerate(ROWS)]
    changed = splits_of(config, module(train_rows(*other)))["train"]
    assert changed.meta["digest"] != store.meta["digest"]


def test_digest_is_that_of_the_content(settings: Settings, module: Module, tmp_path: Path) -> None:
    """The same for other code and other files; another for other texts, labels or their order."""
    config = settings(train_file=(), val_file=(), val_fraction=0.0)

    def digest(rows: list[Row]) -> str:
        return splits_of(config, module(train_rows(*rows)))["train"].meta["digest"]

    same = splits_of(config, module(train_rows(*ROWS), "other.py"))["train"]
    assert digest(ROWS) == same.meta["digest"]
    path = write_tsv(tmp_path / "t.tsv", [(str(row.text), str(row.label)) for row in ROWS])
    files = splits_of(replace(config, train_file=(str(path),)), file_rows)["train"]
    assert files.meta["digest"] == same.meta["digest"] and files.folder != same.folder
    assert digest(ROWS[::-1]) != digest(ROWS)
    assert digest(
        [*ROWS[:-1], ROWS[-1]._replace(label="food" if ROWS[-1].label != "food" else "animal")]
    ) != digest(ROWS)
    assert digest([*ROWS[:-1], ROWS[-1]._replace(text="cat")]) != digest(ROWS)
    names = {"animal": "animals"}
    renamed = [row._replace(label=names.get(str(row.label), row.label)) for row in ROWS]
    assert digest(renamed) != digest(ROWS)
    ids = [same.inputs(np.array([i]))["input_ids"].max().item() for i in range(len(ROWS))]
    assert same.meta["largest_id"] == max(ids)


def test_texts_without_tokens_are_bad_rows(settings: Settings, tmp_path: Path) -> None:
    """What the tokenizer strips is named by file and line; a pair needs both of its texts."""
    rows = [*make_rows(20, 1), ("\u200b", "food"), ("\x07\u200d\u200b", "food"), ("cat", "food")]
    path = write_tsv(tmp_path / "t.tsv", rows)
    config = settings(train_file=(str(path),), val_file=(), val_fraction=0.0)
    message = f"2 of 23 rows are bad; fix them or .*\n{path}:22 no tokens in the text: \n{path}:23 "
    with pytest.raises(UserError, match=message):
        splits_of(config, file_rows)
    store = splits_of(replace(config, on_bad_rows="skip"), file_rows)["train"]
    assert (len(store), store.meta["bad_rows"]) == (21, 2)
    listed = (store.folder / "bad_rows.tsv").read_text("utf-8").splitlines()
    assert [line.split("\t")[1:3] for line in listed] == [
        ["22", "no tokens in the text"], ["23", "no tokens in the text"],
    ]  # fmt: skip
    assert store.label_counts().sum() == 21
    lines = [
        {"text": "cat", "label": x, "other": o}
        for x, o in zip("abc", ["a", "\u200b", "b"], strict=True)
    ]
    path.with_suffix(".jsonl").write_text("\n".join(map(json.dumps, lines)), "utf-8")
    names: Any = {"train_file": (str(path.with_suffix(".jsonl")),)}
    pairs = replace(config, **names, text_pair_column="other")
    with pytest.raises(UserError, match=r"1 of 3 rows are bad(.|\n)*t.jsonl:2 no tokens"):
        splits_of(pairs, file_rows)
    columns = replace(config, **names, text_column=("text", "other"))
    assert len(splits_of(columns, file_rows)["train"]) == 3  # one of several columns may be empty


def test_chunks_are_drawn_lazily(settings: Settings, module: Module) -> None:
    """A source is not held in memory: rows are counted as they are drawn."""
    report = ReadReport()
    drawn = Source(module(train_rows(*ROWS)), settings()).draw("train", report)
    assert next(drawn) == ROWS[0] and report.rows == 1
