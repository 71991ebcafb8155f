"""Rows to a token store: read, tokenized and written once, by one process, before anything waits.

Its name is a hash of all that its content depends on, so nothing stale is ever read.
"""

import json
import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase as Tokenizer

from training.dataset.rows import ReadReport, Row, text_hashes, what_rows_depend_on
from training.dataset.token_store import ARRAYS, Splits, TokenStore
from training.dataset.tokenizer import Encoded, Encoder, chunks, prepare_tokenizer, separator_of
from training.distributed.ranks import check_same_on_all_ranks
from training.distributed.shared_folder import build_once, content_key
from training.settings.config import TrainConfig
from training.settings.errors import UserError, did_you_mean

log = logging.getLogger("training")
STORE_VERSION = 2  # of the files' format
LABELS_AT_A_TIME = 4096  # rows whose labels get their final ids together


def open_dataset(
    config: TrainConfig, source: ModuleType, build_tokenizer: Callable[..., Tokenizer]
) -> tuple[Tokenizer, Splits]:
    """The tokenizer of model.py, and the rows of `source` (data.py) by split, on every rank."""
    tokenizer = prepare_tokenizer(config, source, build_tokenizer)
    splits = open_splits(config, source, tokenizer)
    check_same_on_all_ranks([split.folder.name for split in splits.values()], "the data")
    return tokenizer, splits


def open_splits(config: TrainConfig, source: ModuleType, tokenizer: Tokenizer) -> Splits:
    """The rows by split. Without a val file, "val" is a part of the training rows."""
    open_split = partial(_open_split, config, source, tokenizer)
    splits = {"train": open_split("train", [])}
    labels = splits["train"].labels
    if config.val_file:
        splits["val"] = open_split("val", labels)
    elif config.val_fraction:
        splits["train"], splits["val"] = splits["train"].split(config.val_fraction, config.seed)
        if not len(splits["val"]):
            raise UserError(f"val_fraction {config.val_fraction} leaves no row for validation")
    if config.test_file:
        splits["test"] = open_split("test", labels)
    return splits


def _open_split(
    config: TrainConfig, source: ModuleType, tokenizer: Tokenizer, split: str, labels: list[str]
) -> TokenStore:
    """A split's store, built if there is none yet; without `labels` its rows define them."""
    encoder = Encoder(tokenizer, config.max_length, config.truncate)
    tokens = tokenizer.backend_tokenizer.to_str()
    key = content_key(STORE_VERSION, *what_rows_depend_on(split, config, source), tokens, labels)

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

    def __init__(self, folder: Path, config: TrainConfig, vocabulary: int, labels: list[str]):
        self.folder, self.known_labels = folder, labels
        self.multi_label, self.pairs = config.multi_label, config.text_pair_column is not None
        self.label_ids = {name: i for i, name in enumerate(labels)}  # new names get the next ones
        self.first_seen: dict[str, str] = {}  # file and line of each new name
        self.label_rows: Counter[str] = Counter()
        self.rows = self.tokens = 0
        self.types = ARRAYS | {"label_ids": "<i4", "label_counts": "<i4"}
        self.types["ids"] = "<u2" if vocabulary <= 2**16 else "<i4"
        self.files = {name: (folder / f"{name}.bin").open("w+b") for name in self.types}
        self.bad_rows = (folder / "bad_rows.tsv").open("w", encoding="utf-8", newline="\n")
        self._append("offsets", [0])

    def _append(self, name: str, values: Any) -> None:
        self.files[name].write(np.asarray(values, self.types[name]).tobytes())

    def bad_row(self, bad: Iterable[Any]) -> None:
        """Note a row that was left out: file, line, reason, content."""
        print(*bad, sep="\t", file=self.bad_rows)

    def write(self, rows: list[Row], encoded: Encoded) -> None:
        lengths = np.fromiter(map(len, encoded.ids), np.int64, len(rows))
        ids = chain.from_iterable(encoded.ids)
        self._append("ids", np.fromiter(ids, self.types["ids"], lengths.sum()))
        self._append("offsets", self.tokens + np.cumsum(lengths))
        self._append("first", encoded.first)
        self._append("full_length", encoded.full_length)
        texts = (row.text if row.pair is None else f"{row.text}\0{row.pair}" for row in rows)
        hashes = np.fromiter(chain.from_iterable(map(text_hashes, texts)), np.uint64)
        self._append("exact", hashes[::2])
        self._append("folded", hashes[1::2])
        self.rows += len(rows)
        self.tokens += int(lengths.sum())
        labels: list[Any] = [row.label for row in rows]
        labels = [dict.fromkeys(label if self.multi_label else (label,)) for label in labels]
        for row, names in zip(rows, labels, strict=True):
            for name in names:
                if name not in self.label_ids:
                    self.label_ids[name] = len(self.label_ids)
                    self.first_seen[name] = f"{row.file}:{row.line}"
        flat = list(chain.from_iterable(labels))
        self.label_rows.update(flat)
        self._append("label_ids", [self.label_ids[name] for name in flat])
        self._append("label_counts", list(map(len, labels)))

    def finish(self, report: ReadReport) -> None:
        """Write the labels under their final ids, and the description of the store."""
        if not self.rows:
            raise UserError("there are no rows")
        known, new, rows = self.known_labels, self.first_seen, self.label_rows
        if known and new:
            examples = "; ".join(
                f"{name!r} ({rows[name]} rows, first at {new[name]}{did_you_mean(name, known)})"
                for name in list(new)[:5]
            )
            problem = f"{len(new)} labels are not among those of the training rows: {examples}"
            raise UserError(f"{problem}; correct them, or add training rows for them")
        labels = known or sorted_labels(new)
        if len(labels) < 2:
            raise UserError(f"all {self.rows} rows have the label {labels[0]!r}; two are needed")
        self._write_labels(labels)
        for file in (*self.files.values(), self.bad_rows):
            file.close()
        (self.folder / "label_ids.bin").unlink()
        (self.folder / "label_counts.bin").unlink()
        meta = {
            "rows": self.rows, "lines": report.lines,
            "labels": labels, "multi_label": self.multi_label, "pairs": self.pairs,
            "ids": self.types["ids"], "bad_rows": report.bad_row_count, "notes": report.notes,
        }  # fmt: skip
        text = json.dumps(meta, ensure_ascii=False, indent=1)
        (self.folder / "meta.json").write_text(text, encoding="utf-8")

    def _write_labels(self, labels: list[str]) -> None:
        """Write the final ids of each row's labels, known only when all rows are."""
        final_ids = np.argsort([self.label_ids[name] for name in labels]).astype("<i4")
        id_file, count_file = self.files["label_ids"], self.files["label_counts"]
        id_file.seek(0)
        count_file.seek(0)
        with (self.folder / "labels.bin").open("wb") as file:
            while len(counts := np.fromfile(count_file, "<i4", LABELS_AT_A_TIME)):
                ids = final_ids[np.fromfile(id_file, "<i4", counts.sum())]
                if self.multi_label:
                    matrix = np.zeros((len(counts), len(labels)), np.uint8)
                    matrix[np.repeat(np.arange(len(counts)), counts), ids] = 1
                    ids = matrix
                file.write(ids.tobytes())


def sorted_labels(names: Collection[str]) -> list[str]:
    """Label names in the order of their ids: as numbers if all are whole numbers, else as text."""
    are_numbers = all(re.fullmatch(r"-?(0|[1-9][0-9]*)", name) for name in names)
    return sorted(names, key=int) if are_numbers else sorted(names)
