"""The token store and the encoder: what training reads is what the tokenizer says."""

import errno
import json
import os
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import file_rows
import numpy as np
import pytest
import torch
from conftest import make_rows, write_tsv
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from model import build_tokenizer
from training.dataset import token_store
from training.dataset import tokenizer as tokenizer_module
from training.dataset.build import StoreWriter, open_splits, sorted_labels
from training.dataset.rows import Row, text_hashes
from training.dataset.source import Source
from training.dataset.token_store import TokenStore, split_mask
from training.dataset.tokenizer import Encoder, chunks, prepare_tokenizer
from training.distributed.shared_folder import build_once
from training.settings.config import TrainConfig
from training.settings.errors import UserError
from training.step.batch_plan import MicroBatch

Settings = Callable[..., TrainConfig]
LONG = " ".join(["cat dog horse"] * 40)


def splits_of(config: TrainConfig, module: Any = file_rows) -> dict[str, TokenStore]:
    source = Source(module, config)
    return open_splits(source, prepare_tokenizer(source, build_tokenizer))


@pytest.fixture
def tokenizer(tiny_model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model)


@pytest.mark.parametrize("side", ["head", "tail"])
def test_encoder_is_the_tokenizer(tokenizer: Any, side: str) -> None:
    """Same ids as transformers' own call, cut or not, single or pair."""
    tokenizer.truncation_side = "right" if side == "head" else "left"
    texts, pairs = ["cat", "a very old dog 猫", LONG, "x"], ["bread", LONG, "soup", LONG]
    encode = Encoder(AutoTokenizer.from_pretrained(tokenizer.name_or_path), 20, side)
    expected = tokenizer(texts, truncation=True, max_length=20)["input_ids"]
    assert encode(texts).ids == expected
    both = encode(texts[:2], [pairs[0], "rice"])
    expected = tokenizer(texts[:2], [pairs[0], "rice"])
    assert both.ids == expected["input_ids"]
    for ids, first, types in zip(both.ids, both.first, expected["token_type_ids"], strict=True):
        assert [int(i >= first) for i in range(len(ids))] == types
    assert all(len(ids) <= 20 for ids in encode(texts, pairs).ids)
    assert encode([LONG]).full_length == [122]


def test_head_and_tail_keeps_both_ends(tokenizer: Any) -> None:
    text = "cat " + LONG + " bread"
    ids = Encoder(tokenizer, 9, "head+tail")([text]).ids[0]
    assert tokenizer.decode(ids) == "[CLS] cat cat dog horse dog horse bread [SEP]"


def test_special_tokens_in_a_text_are_text(tokenizer: Any) -> None:
    """The words of a text never become the model's own marks, in no place of it."""
    text = "old [SEP] new [CLS][PAD]"
    encode = Encoder(AutoTokenizer.from_pretrained(tokenizer.name_or_path), 40)
    [first], [pair] = encode([text]).ids, encode([text], [text]).ids
    assert first == tokenizer([text], split_special_tokens=True)["input_ids"][0]
    special = [tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.pad_token_id]
    assert [first.count(i) for i in special] == [1, 1, 0]
    assert [pair.count(i) for i in special] == [1, 2, 0]


def test_columns_are_joined_by_the_separator(tokenizer: Any) -> None:
    """Several text columns: the separator token's id, or a new line if the tokenizer has none."""
    texts: list[Any] = [("cat", "[SEP] dog"), ("", "rain"), ("\u200b", "")]
    encode = Encoder(AutoTokenizer.from_pretrained(tokenizer.name_or_path), 40)
    encoded, plain = encode(texts), encode([part for text in texts for part in text])
    inner = [ids[1:-1] for ids in plain.ids]
    cls, sep = tokenizer.cls_token_id, tokenizer.sep_token_id
    assert encoded.ids[0] == [cls, *inner[0], sep, *inner[1], sep]
    assert encoded.ids[1] == [cls, sep, *inner[3], sep]
    assert encoded.has_tokens == [True, True, False]
    assert encode(["\u200b", "cat"], ["cat", "\u200b"]).has_tokens == [False, False]
    without = AutoTokenizer.from_pretrained(tokenizer.name_or_path)
    without.sep_token = None
    encode = Encoder(without, 40)
    encode.separator = [7, 8]  # as if a new line were two tokens
    assert encode(texts[:1]).ids[0] == [cls, *inner[0], 7, 8, *inner[1], sep]
    assert Encoder(without, 40).separator == without("\n", add_special_tokens=False)["input_ids"]


def test_longer_of_a_pair_is_cut_first(tokenizer: Any) -> None:
    encoded = Encoder(tokenizer, 12)(["cat dog", LONG], [LONG, "soup rice"])
    assert [len(ids) for ids in encoded.ids] == [12, 12]
    assert encoded.first == [4, 9]


def micro(rows: list[int]) -> MicroBatch:
    return MicroBatch(np.array(rows), np.ones(len(rows)), True, 0, 1.0, 1, 1, 1)


def test_store_gives_back_every_row(settings: Settings, files: dict[str, Path]) -> None:
    """Ids, padding, mask, labels and lengths of any rows in any order."""
    config = settings()
    tokenizer = prepare_tokenizer(Source(file_rows, config), build_tokenizer)
    splits = open_splits(Source(file_rows, config), tokenizer)
    assert {name: len(rows) for name, rows in splits.items()} == {"train": 203, "val": 45}
    train = splits["train"]
    rows = make_rows(203, seed=1)
    wanted = [200, 0, 7]
    batch = train[micro(wanted)]
    for i, number in enumerate(wanted):
        ids = tokenizer(rows[number][0])["input_ids"]
        length = int(batch.inputs["attention_mask"][i].sum())
        assert batch.inputs["input_ids"][i, :length].tolist() == ids
        assert (batch.inputs["input_ids"][i, length:] == tokenizer.pad_token_id).all()
        assert train.labels[batch.labels[i]] == rows[number][1]
        assert train.lengths(np.array([number]))[0] == length
    assert batch.inputs["input_ids"].shape[1] == train.lengths(np.array(wanted)).max()
    assert train.label_counts().sum() == 203
    assert train.labels == ["animal", "food", "weather"]


@pytest.mark.parametrize("several", [False, True])
def test_worker_sends_the_same_batch(settings: Settings, tmp_path: Path, several: bool) -> None:
    """What a loader's worker delivers is what the store makes, to the type of every tensor."""
    labels: list[Any] = [["a", "b"], [], ["b"]] if several else ["a", "b", "b"]
    rows = [
        {"text": text, "other": "猫 dog", "label": label}
        for text, label in zip([LONG, "cat", "a new dog"], labels, strict=True)
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    config = settings(
        train_file=(str(path),), val_file=(), val_fraction=0.0, text_pair_column="other",
        multi_label=several,
    )  # fmt: skip
    store = open_splits(
        Source(file_rows, config), prepare_tokenizer(Source(file_rows, config), build_tokenizer)
    )["train"]
    planned = [replace(micro([2, 0]), weight=np.array([0.5, 0.0])), micro([1])]
    loader = DataLoader(store, sampler=planned, batch_size=None, num_workers=1)
    for plan, got in zip(planned, loader, strict=True):
        made = store[plan]
        tensors = {"labels": (made.labels, got.labels), "weight": (made.weight, got.weight)}
        tensors |= {name: (made.inputs[name], got.inputs[name]) for name in made.inputs}
        assert len(tensors) == 5
        assert list(made.inputs) == list(got.inputs)
        for expected, found in tensors.values():
            torch.testing.assert_close(found, expected, rtol=0, atol=0)  # types and shapes too
        assert str(got.plan) == str(plan)


def test_store_is_sent_without_its_rows(settings: Settings) -> None:
    """A worker that is not forked opens the files itself, those of a part too."""
    config = settings(val_file=(), val_fraction=0.2)
    tokenizer = prepare_tokenizer(Source(file_rows, config), build_tokenizer)
    for store in open_splits(Source(file_rows, config), tokenizer).values():
        assert store is not None
        sent = pickle.dumps(store)
        assert len(sent) < 1000
        received = pickle.loads(sent)
        assert (received.label_ids() == store.label_ids()).all()
        assert (received.lengths() == store.lengths()).all()


def test_chunks_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory does not follow the length of the texts: few long ones are tokenized at a time."""
    monkeypatch.setattr(tokenizer_module, "MAX_CHARACTERS", 100)
    rows = [Row("x" * (60 if i < 6 else 1), None, "a", "f", i) for i in range(3000)]
    lists = list(chunks(rows))
    assert [row for chunk in lists for row in chunk] == rows
    assert [len(chunk) for chunk in lists[:3]] == [2, 2, 2]
    assert all(sum(len(row.text) for row in chunk) < 160 for chunk in lists)


def test_second_run_does_not_tokenize(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is found again by content; other rows or settings make another."""
    path = write_tsv(tmp_path / "t.tsv", make_rows(20, seed=4))
    config = settings(train_file=(str(path),), cache_dir=str(tmp_path / "cache"))
    tokenizer = prepare_tokenizer(Source(file_rows, config), build_tokenizer)
    built: list[str] = []
    write = StoreWriter.finish

    def finish(self: StoreWriter) -> None:
        built.append("x")
        write(self)

    monkeypatch.setattr(StoreWriter, "finish", finish)
    for expected in (2, 2):  # train and val
        open_splits(Source(file_rows, config), tokenizer)
        assert len(built) == expected
    write_tsv(path, make_rows(21, seed=4))
    open_splits(Source(file_rows, config), tokenizer)
    assert len(built) == 3  # the same labels, so the validation rows still fit
    config = settings(train_file=(str(path),), cache_dir=str(tmp_path / "cache"), max_length=9)
    open_splits(Source(file_rows, config), tokenizer)
    assert len(built) == 5


def test_interrupted_build_leaves_nothing(tmp_path: Path) -> None:
    """Only a whole folder gets its name; the next process builds it."""

    def fail(folder: Path) -> None:
        (folder / "half").write_text("x", "utf-8")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        build_once(tmp_path / "store", fail, "it")
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".lock"] == []
    build_once(tmp_path / "store", lambda folder: (folder / "a").touch(), "it")
    assert (tmp_path / "store" / "a").exists()


@pytest.mark.parametrize("number", [errno.ENOTEMPTY, errno.EEXIST, errno.EACCES])
def test_another_machine_was_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A folder that the file system does not show yet: what is there is taken, and stays as it is.
    Any other error is one."""

    def build(folder: Path) -> None:
        (folder / "own").touch()
        (tmp_path / "store").mkdir()
        (tmp_path / "store" / "theirs").touch()

    def refuse(self: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number))

    if number != errno.ENOTEMPTY:  # which is what happens here
        monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError) if number == errno.EACCES else nullcontext():
        assert build_once(tmp_path / "store", build, "it") == tmp_path / "store"
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["theirs"]
    assert not list(tmp_path.glob(".building-*"))


def test_a_folder_that_is_not_seen_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a network, a folder that another machine has made can be missing for a while, but not in
    the listing of the folder around it: nothing is built again, and no half of another machine's
    build is touched."""
    (tmp_path / "store").mkdir()
    (tmp_path / ".building-store-other").mkdir()
    monkeypatch.setattr(Path, "exists", lambda path: False)
    assert build_once(tmp_path / "store", lambda folder: pytest.fail("built"), "it")
    build_once(tmp_path / "store2", lambda folder: None, "it")
    assert os.path.isdir(tmp_path / ".building-store-other")


@pytest.mark.parametrize("seed", [0, 1])
def test_split_keeps_equal_texts_together(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stratified, independent of the rows' order, and no text on both sides."""
    rng = np.random.default_rng(5)
    labels = rng.choice(4, 1000, p=[0.6, 0.25, 0.12, 0.03])
    texts = np.array([text_hashes(f"text {i % 700}")[1] for i in range(1000)], np.uint64)
    labels[700:] = labels[:300]
    mask = split_mask(texts, labels, 0.2, seed)
    assert not set(texts[mask]) & set(texts[~mask])
    for label in range(4):
        share = mask[labels == label].mean()
        assert abs(share - 0.2) < 0.03 or (labels == label).sum() < 40
    order = rng.permutation(1000)
    assert (split_mask(texts[order], labels[order], 0.2, seed) == mask[order]).all()
    assert (split_mask(texts, labels, 0.2, seed + 1) != mask).any()
    monkeypatch.setattr(
        token_store, "ROWS_SORTED_AT_A_TIME", 100
    )  # in parts, so that memory is bounded
    assert (split_mask(texts, labels, 0.2, seed) == mask).all()


def test_every_class_gives_its_share(settings: Settings, tmp_path: Path) -> None:
    """A tenth of 200 classes of 3 rows is 60 rows, not of the first classes; no class is lost."""
    rows = [(f"thing {i} of kind {i % 200}", f"c{i % 200:03d}") for i in range(600)]
    path = write_tsv(tmp_path / "rare.tsv", rows)
    chosen = []
    for seed in (1, 2):
        splits = splits_of(settings(train_file=(str(path),), val_file=(), seed=seed))
        train, val = splits["train"].label_counts(), splits["val"].label_counts()
        assert val.sum() == 60 and val.max() == 1 and train.min() == 2
        assert 15 < val[:100].sum() < 45
        chosen.append(val)
    assert (chosen[0] != chosen[1]).any()


def test_a_split_of_rare_label_sets(settings: Settings, tmp_path: Path) -> None:
    """Several labels a row: the share holds for all rows, for each label, and for no label."""
    rng = np.random.default_rng(3)
    path = tmp_path / "rows.jsonl"
    present = np.r_[0.1, np.full(11, 0.3)]  # label 0 is the rarest
    chances = [present] * 1800 + [0 * present] * 200
    labels = [np.flatnonzero(rng.random(12) < p).tolist() for p in chances]
    lines = [json.dumps({"text": f"text {i}", "label": each}) for i, each in enumerate(labels)]
    path.write_text("\n".join(lines), "utf-8")
    config = settings(train_file=(str(path),), val_file=(), multi_label=True)
    splits = splits_of(config)
    assert len(splits["val"]) == 200
    counts = np.bincount(np.concatenate(labels).astype(int))
    shares = splits["val"].label_counts() / counts
    assert abs(splits["val"].label_counts()[0] - 0.1 * counts[0]) <= 1
    assert shares.min() > 0.06 and shares.max() < 0.14
    without = [(s.label_ids().sum(1) == 0).sum() for s in splits.values()]
    assert without[1] / sum(without) == pytest.approx(0.1, abs=0.01)
    assert splits["val"].label_ids().sum(1).mean() == pytest.approx(3.1, abs=0.3)


def test_no_class_is_lost_to_validation(settings: Settings, tmp_path: Path) -> None:
    """Where all rows of a label share one text, or it has a single row, it stays in train."""
    rows = [("same", "a")] * 5 + [("same", "b"), ("other", "b"), ("alone", "c")]
    rows += [(f"text {i}", "d") for i in range(20)]
    path = write_tsv(tmp_path / "t.tsv", rows)
    for seed in range(6):
        config = settings(train_file=(str(path),), val_file=(), val_fraction=0.9, seed=seed)
        train, val = splits_of(config).values()
        assert (train.label_counts() > 0).all() and train.label_counts().sum() < 12
        texts = set(train.values("folded")), set(val.values("folded"))
        assert not texts[0] & texts[1]


def test_repeated_texts_fill_the_share() -> None:
    """A text of several rows is taken whole where its class lacks most, never beyond the share."""
    hashes = np.repeat(np.arange(1, 101, dtype=np.uint64) * np.uint64(2**57 + 3), 4)
    strata = np.repeat(np.arange(50), 8)  # two texts of four rows each
    mask = split_mask(hashes, strata, 0.1, 0)
    assert mask.sum() == 40 and np.bincount(strata[mask]).max() == 4
    uneven = np.r_[np.repeat(hashes[:1], 397), hashes[4:7]]
    assert split_mask(uneven, np.zeros(400, int), 0.1, 0).sum() in (0, 3)


def test_folding() -> None:
    """Case, width and spaces do not tell texts apart; letters do."""
    exact, folded = zip(*map(text_hashes, ["A  b", "ａ B", "a c"]), strict=True)
    assert len(set(exact)) == 3
    assert folded[0] == folded[1] != folded[2]


def test_labels_in_order() -> None:
    assert sorted_labels({"10", "2", "1"}) == ["1", "2", "10"]
    assert sorted_labels({"10", "2", "007"}) == ["007", "10", "2"]


@pytest.mark.parametrize(
    ("val", "message"),
    [
        ([("x", "Animal"), ("y", "zzz")], r"2 labels .*'Animal' \(1 rows.*val.tsv:2.*did you mean"),
        ([], "no rows"),
    ],
)
def test_bad_validation_rows(settings: Settings, tmp_path: Path, val: list, message: str) -> None:
    config = settings(val_file=(str(write_tsv(tmp_path / "val.tsv", val)),))
    tokenizer = prepare_tokenizer(Source(file_rows, config), build_tokenizer)
    with pytest.raises(UserError, match=message):
        open_splits(Source(file_rows, config), tokenizer)


def test_no_validation_row_is_left(settings: Settings) -> None:
    config = settings(val_file=(), val_fraction=0.001)
    tokenizer = prepare_tokenizer(Source(file_rows, config), build_tokenizer)
    with pytest.raises(UserError, match=r"val_fraction 0\.001 of 203 rows leaves no row"):
        open_splits(Source(file_rows, config), tokenizer)


def test_one_class_only(settings: Settings, tmp_path: Path) -> None:
    path = write_tsv(tmp_path / "t.tsv", [("a", "x"), ("b", "x")])
    config = settings(train_file=(str(path),))
    with pytest.raises(UserError, match="all 2 rows have the label 'x'"):
        open_splits(
            Source(file_rows, config), prepare_tokenizer(Source(file_rows, config), build_tokenizer)
        )


def test_trained_tokenizer_is_the_same_each_time(settings: Settings, tmp_path: Path) -> None:
    """From scratch: the same rows give the same tokenizer, without a common cache."""
    texts = []
    for name in "ab":
        config = settings(model="from-scratch", cache_dir=str(tmp_path / name))
        tokenizer = prepare_tokenizer(Source(file_rows, config), build_tokenizer)
        texts.append(tokenizer.backend_tokenizer.to_str())
    assert texts[0] == texts[1]
    assert tokenizer.tokenize("A cat, 猫狗!") == ["a", "cat", "[UNK]", "猫", "狗", "[UNK]"]
