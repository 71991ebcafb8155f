"""Rows to a token store: read, tokenized and written once, by one process, before anything waits.

The store's name is made from all that its content depends on: the rows, the code of `data.py`, the
tokenizer and the settings. Other content has another name, so nothing stale is ever read.
"""

import itertools
import json
import logging
import re
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from training.dataset.rows import ReadReport, Row, text_hashes
from training.dataset.token_store import ARRAYS, TokenStore
from training.dataset.tokenizer import (
    Encoded,
    Encoder,
    chunks,
    prepare_tokenizer,
    separator_of,
    what_rows_depend_on,
)
from training.distributed.ranks import check_same_on_all_ranks
from training.distributed.shared_folder import build_once, content_key
from training.settings.config import TrainConfig
from training.settings.errors import UserError, did_you_mean

log = logging.getLogger("training")
STORE_VERSION = 2  # of the files' format
LABELS_AT_A_TIME = 4096  # rows whose labels get their final ids together


def open_dataset(
    config: TrainConfig, source: ModuleType, build_tokenizer: Callable[..., Any]
) -> tuple[PreTrainedTokenizerBase, dict[str, TokenStore]]:
    """The tokenizer, and the rows of "train", and of "val" and "test" if there are any.

    Call on every rank: one of them builds what is not there yet. `source`: data.py;
    `build_tokenizer`: that of model.py. Errors: UserError if the rows differ between ranks.
    """
    tokenizer = prepare_tokenizer(config, source, build_tokenizer)
    splits = open_splits(config, source, tokenizer)
    check_same_on_all_ranks([split.folder.name for split in splits.values()], "the data")
    return tokenizer, splits


def open_splits(
    config: TrainConfig, source: ModuleType, tokenizer: PreTrainedTokenizerBase
) -> dict[str, TokenStore]:
    """The rows by split. Without a val file, "val" is a part of the training rows."""
    splits = {"train": open_split("train", config, source, tokenizer)}
    labels = splits["train"].labels
    if config.val_file:
        splits["val"] = open_split("val", config, source, tokenizer, labels)
    elif config.val_fraction:
        train, val = splits["train"].split(config.val_fraction, config.seed)
        splits = {"train": train, "val": val}
    if config.test_file:
        splits["test"] = open_split("test", config, source, tokenizer, labels)
    return splits


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
    rows_key = what_rows_depend_on(split, config, source)
    key = content_key(STORE_VERSION, *rows_key, tokens, labels)

    def build(folder: Path) -> None:
        log.info("tokenizing %s rows", split)
        writer = StoreWriter(folder, config, len(tokenizer), labels)
        report = ReadReport(on_bad_row=writer.bad_row)
        rows = source.rows(split, config, separator_of(tokenizer), report)
        _tokenize(tqdm(rows, f"tokenizing {split}", unit=" rows", disable=None), encoder, writer)
        writer.finish(report)

    folder = build_once(Path(config.cache_dir) / f"{split}-{key}", build, f"the {split} rows")
    pairs = config.text_pair_column is not None
    token_types = pairs and "token_type_ids" in tokenizer.model_input_names
    return TokenStore(folder, tokenizer.pad_token_id, token_types)


def _tokenize(rows: Iterable[Row], encoder: Encoder, writer: "StoreWriter") -> None:
    """Read, tokenize and write in chunks; the tokenizer works on the next ones meanwhile."""
    waiting: deque[tuple[list[Row], Future[Encoded]]] = deque()
    with ThreadPoolExecutor(2) as pool:  # two, so that it has work while Python looks at a result
        for chunk in chunks(rows):
            pairs = [row.pair or "" for row in chunk] if writer.pairs else None
            waiting.append((chunk, pool.submit(encoder, [row.text for row in chunk], pairs)))
            if len(waiting) > 2:
                chunk, future = waiting.popleft()
                writer.write(chunk, future.result())
    for chunk, future in waiting:
        writer.write(chunk, future.result())


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

    def write(self, rows: list[Row], encoded: Encoded) -> None:
        lengths = np.fromiter(map(len, encoded.ids), np.int64, len(rows))
        flat = np.fromiter(itertools.chain.from_iterable(encoded.ids), self.ids_type, lengths.sum())
        self._append("ids", flat, self.ids_type)
        self._append("offsets", self.tokens + np.cumsum(lengths))
        self._append("first", encoded.first)
        self._append("full_length", encoded.full_length)
        texts = (row.text if row.pair is None else f"{row.text}\0{row.pair}" for row in rows)
        hashes = np.fromiter(itertools.chain.from_iterable(map(text_hashes, texts)), np.uint64)
        self._append("exact", hashes[::2])
        self._append("folded", hashes[1::2])
        labels: list[Any] = [row.label for row in rows]
        names = [dict.fromkeys(label if self.multi_label else (label,)) for label in labels]
        ids = [self.label_ids.id_of(n, row) for row, s in zip(rows, names, strict=True) for n in s]
        self._append("label_flat", ids, "<i4")
        self._append("label_count", list(map(len, names)), "<i4")
        self.rows += len(rows)
        self.tokens += int(lengths.sum())

    def finish(self, report: ReadReport) -> None:
        """Write the labels under their final ids, and the description of the store."""
        self.stack.close()
        if not self.rows:
            raise UserError("there are no rows")
        self.label_ids.check()
        names = list(self.label_ids.ids)
        labels = names if self.label_ids.fixed else sorted_labels(names)
        if len(labels) < 2:
            raise UserError(f"all {self.rows} rows have the label {labels[0]!r}; two are needed")
        self._write_labels(np.array([labels.index(name) for name in names], "<i4"))
        meta = {
            "rows": self.rows, "lines": report.lines,
            "labels": labels, "multi_label": self.multi_label, "pairs": self.pairs,
            "ids": self.ids_type, "bad_rows": report.bad_row_count, "notes": list(report.notes),
        }  # fmt: skip
        text = json.dumps(meta, ensure_ascii=False, indent=1)
        (self.folder / "meta.json").write_text(text, encoding="utf-8")

    def _write_labels(self, final_id: np.ndarray) -> None:
        """`final_id`: of each id that was given while reading. (labels,)"""
        paths = [self.folder / f"{name}.bin" for name in ("label_flat", "label_count", "labels")]
        with paths[0].open("rb") as flat, paths[1].open("rb") as count, paths[2].open("wb") as out:
            for _ in range(0, self.rows, LABELS_AT_A_TIME):
                counts = np.fromfile(count, "<i4", LABELS_AT_A_TIME)
                ids = final_id[np.fromfile(flat, "<i4", counts.sum())]
                if self.multi_label:
                    matrix = np.zeros((len(counts), len(final_id)), np.uint8)
                    matrix[np.repeat(np.arange(len(counts)), counts), ids] = 1
                    ids = matrix
                out.write(ids.tobytes())
        paths[0].unlink()
        paths[1].unlink()


class LabelIds:
    """Ids of label names, in the order in which they come, and where unknown names were seen."""

    def __init__(self, known: list[str] | None) -> None:
        self.fixed = known is not None
        self.ids = {name: i for i, name in enumerate(known or [])}
        self.unknown: dict[str, tuple[int, str]] = {}  # how many rows, and where the first is

    def id_of(self, name: str, row: Row) -> int:
        label_id = self.ids.get(name)
        if label_id is not None:
            return label_id
        if self.fixed:
            count, where = self.unknown.get(name, (0, f"{row.file}:{row.line}"))
            self.unknown[name] = count + 1, where
            return -1
        return self.ids.setdefault(name, len(self.ids))

    def check(self) -> None:
        """Errors: UserError for labels that are not among the known ones."""
        if self.unknown:
            shown = "; ".join(
                f"{name!r} ({count} rows, first at {where}{did_you_mean(name, self.ids)})"
                for name, (count, where) in itertools.islice(self.unknown.items(), 5)
            )
            raise UserError(
                f"{len(self.unknown)} labels are not among those of the training rows: {shown}; "
                "correct them, or add training rows for them"
            )


def sorted_labels(names: Iterable[str]) -> list[str]:
    """Label names in the order of their ids: as numbers if all are whole numbers, else as text."""
    names = list(names)
    if all(re.fullmatch(r"-?(0|[1-9][0-9]*)", name) for name in names):
        return sorted(names, key=int)
    return sorted(names)
