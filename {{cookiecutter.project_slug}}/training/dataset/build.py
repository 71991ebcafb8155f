"""Rows to a token store: read, tokenized and written once, by one process, before anything waits.

The store's name is made from all that its content depends on: the rows, the code of `data.py`, the
tokenizer and the settings. Other content has another name, so nothing stale is ever read.
"""

import inspect
import itertools
import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from training.dataset.duplicates import text_numbers
from training.dataset.labels import LabelIds, SourceRow, sorted_labels
from training.dataset.token_store import ARRAYS, TokenStore
from training.dataset.tokenizer import Encoded, Encoder
from training.distributed import watchdog
from training.distributed.ranks import check_same_on_all_ranks
from training.distributed.shared_folder import build_once, content_key
from training.settings.config import FROM_SCRATCH, TrainConfig
from training.settings.errors import UserError

log = logging.getLogger("training")
VERSION = 2  # of the files' format
CHUNK, CHARACTERS = 1000, 1 << 20  # tokenized at a time: the most rows, and about the most text
PART = 4096  # rows whose labels get their final ids at a time


def prepare_tokenizer(
    config: TrainConfig,
    source: ModuleType,
    build: Callable[[TrainConfig, Iterator[str]], PreTrainedTokenizerBase],
) -> PreTrainedTokenizerBase:
    """The tokenizer of `model.py`; one that is trained on the rows is trained once and kept."""
    if config.model != FROM_SCRATCH:
        return build(config, iter(()))

    def train(folder: Path) -> None:
        log.info("training a tokenizer on the training rows")
        rows = source.rows("train", config, "\n", source.ReadReport())
        chunks = itertools.chain.from_iterable(_chunks(rows))
        texts = (text for row in chunks for text in (row.text, row.pair) if text)
        build(config, texts).save_pretrained(folder)

    key = content_key(VERSION, *_content("train", config, source), inspect.getsource(build))
    folder = Path(config.cache_dir) / f"tokenizer-{key}"
    return AutoTokenizer.from_pretrained(build_once(folder, train, "the tokenizer"))


def _content(split: str, config: TrainConfig, source: ModuleType) -> list[Any]:
    """What the rows of a split depend on, the code of `data.py` included."""
    code = inspect.getsource(source)
    return [split, source.fingerprint(split, config), code, config.row_settings()]


def open_dataset(
    config: TrainConfig,
    source: ModuleType,
    build: Callable[[TrainConfig, Iterator[str]], PreTrainedTokenizerBase],
) -> tuple[PreTrainedTokenizerBase, dict[str, TokenStore]]:
    """The tokenizer, and the rows of "train", and of "val" and "test" if there are any.

    Call on every rank: one of them builds what is not there yet. `source`: data.py; `build`: the
    `build_tokenizer` of model.py. Errors: UserError if ranks see different rows.
    """
    tokenizer = prepare_tokenizer(config, source, build)
    stores = zip(("train", "val", "test"), open_splits(config, source, tokenizer), strict=True)
    splits = {name: store for name, store in stores if store is not None}
    check_same_on_all_ranks([store.folder.name for store in splits.values()], "the data")
    return tokenizer, splits


def open_splits(
    config: TrainConfig, source: ModuleType, tokenizer: PreTrainedTokenizerBase
) -> tuple[TokenStore, TokenStore | None, TokenStore | None]:
    """The rows of train, val and test. Without a val file, val is a part of the training rows."""
    train, val, test = open_split("train", config, source, tokenizer), None, None
    if config.val_file:
        val = open_split("val", config, source, tokenizer, train.labels)
    elif config.val_fraction:
        train, val = train.split(config.val_fraction, config.seed)
    if config.test_file:
        test = open_split("test", config, source, tokenizer, train.labels)
    return train, val, test


def open_split(
    split: str,
    config: TrainConfig,
    source: ModuleType,
    tokenizer: PreTrainedTokenizerBase,
    labels: list[str] | None = None,
) -> TokenStore:
    """The token store of "train", "val" or "test"; built if there is none of this content yet.

    `source`: the user's `data.py`. `labels`: the names that the training rows have; None: this
    split defines them. Errors: UserError for rows that cannot be used.
    """
    encoder = Encoder(tokenizer, config.max_length, config.truncate)
    tokens = tokenizer.backend_tokenizer.to_str()
    key = content_key(VERSION, *_content(split, config, source), tokens, labels)

    def build(folder: Path) -> None:
        log.info("tokenizing %s rows", split)
        writer = StoreWriter(folder, config, len(tokenizer), labels)
        report = source.ReadReport(on_bad_row=writer.bad_row)
        rows = source.rows(split, config, separator_of(tokenizer), report)
        _tokenize(tqdm(rows, f"tokenizing {split}", unit=" rows", disable=None), encoder, writer)
        writer.finish(report)

    folder = build_once(Path(config.cache_dir) / f"{split}-{key}", build, f"the {split} rows")
    pairs = config.text_pair_column is not None
    token_types = pairs and "token_type_ids" in tokenizer.model_input_names
    return TokenStore(folder, tokenizer.pad_token_id, token_types)


def separator_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """What joins several text columns: the tokenizer's separator token, else a new line."""
    return f" {tokenizer.sep_token} " if tokenizer.sep_token else "\n"


def _tokenize(rows: Iterable[SourceRow], encoder: Encoder, writer: "StoreWriter") -> None:
    """Read, tokenize and write in chunks; the tokenizer works on the next ones meanwhile."""
    waiting: deque[tuple[list[SourceRow], Future[Encoded]]] = deque()
    with ThreadPoolExecutor(2) as pool:  # two, so that it has work while Python looks at a result
        for chunk in _chunks(rows):
            pairs = [row.pair or "" for row in chunk] if writer.pairs else None
            waiting.append((chunk, pool.submit(encoder, [row.text for row in chunk], pairs)))
            if len(waiting) > 2:
                chunk, future = waiting.popleft()
                writer.write(chunk, future.result())
    for chunk, future in waiting:
        writer.write(chunk, future.result())


def _chunks(rows: Iterable[SourceRow]) -> Iterator[list[SourceRow]]:
    """Rows in lists of bounded size: the tokenizer needs a hundred bytes for a token.

    Errors: UserError, which tells a user who has edited `data.py` what it must yield.
    """
    chunk: list[SourceRow] = []
    characters = 0
    for row in rows:
        text = getattr(row, "text", None)
        label = getattr(row, "label", None)
        if type(text) is not str or type(label) not in (str, tuple):
            raise UserError(
                "data.py must yield Row(text, pair, label, file, line), the text a str, the label "
                f"a str (with --multi-label a tuple of them), not {row!r:.200}"
            )
        chunk.append(row)
        characters += len(text) + len(row.pair or "")
        if len(chunk) == CHUNK or characters >= CHARACTERS:
            watchdog.heartbeat()
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


class StoreWriter:
    """Writes the files of a TokenStore, chunk by chunk."""

    def __init__(
        self, folder: Path, config: TrainConfig, vocabulary: int, labels: list[str] | None
    ) -> None:
        self.folder = folder
        self.multi_label = config.multi_label
        self.pairs = config.text_pair_column is not None
        self.ids_type = "<u2" if vocabulary <= 2**16 else "<i4"
        self.label_ids = LabelIds(labels)
        self.rows = self.tokens = 0
        with ExitStack() as stack:
            names = [f"{name}.bin" for name in (*ARRAYS, "ids", "label_flat", "label_count")]
            self.files: dict[str, BinaryIO] = {
                name: stack.enter_context((folder / name).open("wb"))
                for name in [*names, "bad_rows.tsv"]
            }
            self.stack = stack.pop_all()
        self._append("offsets", [0])

    def _append(self, name: str, values: Any, kind: str | None = None) -> None:
        self.files[f"{name}.bin"].write(np.asarray(values, kind or ARRAYS[name]).tobytes())

    def bad_row(self, bad: Iterable[Any]) -> None:
        """Note a row that was left out: file, line, reason, content."""
        self.files["bad_rows.tsv"].write(("\t".join(map(str, bad)) + "\n").encode())

    def write(self, rows: list[SourceRow], encoded: Encoded) -> None:
        lengths = np.fromiter(map(len, encoded.ids), np.int64, len(rows))
        flat = np.fromiter(itertools.chain.from_iterable(encoded.ids), self.ids_type, lengths.sum())
        self._append("ids", flat, self.ids_type)
        self._append("offsets", self.tokens + np.cumsum(lengths))
        self._append("first", encoded.first)
        self._append("full_length", encoded.full_length)
        texts = (row.text if row.pair is None else f"{row.text}\0{row.pair}" for row in rows)
        numbers = np.fromiter(itertools.chain.from_iterable(map(text_numbers, texts)), np.uint64)
        self._append("exact", numbers[::2])
        self._append("folded", numbers[1::2])
        names = [row.label if self.multi_label else (row.label,) for row in rows]
        ids = [self.label_ids[name, row] for row, several in zip(rows, names, strict=True)
               for name in dict.fromkeys(several)]  # fmt: skip
        self._append("label_flat", ids, "<i4")
        self._append("label_count", [len(set(several)) for several in names], "<i4")
        self.rows += len(rows)
        self.tokens += int(lengths.sum())

    def finish(self, report: Any) -> None:
        """Write the labels under their final ids, and the description of the store."""
        self.stack.close()
        if not self.rows:
            raise UserError("there are no rows")
        self.label_ids.check()
        names = list(self.label_ids.ids)
        final = names if self.label_ids.fixed else sorted_labels(names)
        if len(final) < 2:
            raise UserError(f"all {self.rows} rows have the label {final[0]!r}; two are needed")
        place = np.array([final.index(name) for name in names], "<i4")
        paths = [self.folder / f"{name}.bin" for name in ("label_flat", "label_count", "labels")]
        with paths[0].open("rb") as flat, paths[1].open("rb") as count, paths[2].open("wb") as out:
            for _ in range(0, self.rows, PART):
                counts = np.fromfile(count, "<i4", PART)
                ids = place[np.fromfile(flat, "<i4", counts.sum())]
                if self.multi_label:
                    matrix = np.zeros((len(counts), len(final)), np.uint8)
                    matrix[np.repeat(np.arange(len(counts)), counts), ids] = 1
                    ids = matrix
                out.write(ids.tobytes())
        paths[0].unlink()
        paths[1].unlink()
        meta = {
            "rows": self.rows, "lines": report.lines,
            "labels": final, "multi_label": self.multi_label, "pairs": self.pairs,
            "ids": self.ids_type, "bad_rows": report.bad_row_count, "notes": list(report.notes),
        }  # fmt: skip
        text = json.dumps(meta, ensure_ascii=False, indent=1)
        (self.folder / "meta.json").write_text(text, encoding="utf-8")
