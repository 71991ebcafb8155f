"""Rows to a token store: read, tokenized and written once, by one process, before anything waits.

Its name is a hash of all that its content depends on, so nothing stale is ever read.
"""

import hashlib
import json
import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, compress
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase as Tokenizer

from training.dataset.rows import BadRow, ReadReport, Row, text_hashes
from training.dataset.source import Source, describe_kind
from training.dataset.token_store import ARRAYS, Splits, TokenStore
from training.dataset.tokenizer import Encoded, Encoder, chunks, parts_of, prepare_tokenizer
from training.distributed.ranks import check_same_on_all_ranks
from training.distributed.shared_folder import build_once, content_key
from training.settings.config import TrainConfig
from training.settings.errors import UserError, did_you_mean

log = logging.getLogger("training")
STORE_VERSION = 3  # of the files' format
LABELS_AT_A_TIME = 4096  # rows whose labels get their final ids together


def open_dataset(
    config: TrainConfig, module: ModuleType, build_tokenizer: Callable[..., Tokenizer]
) -> tuple[Tokenizer, Splits]:
    """The tokenizer of model.py, and the rows of `module` (data.py) by split, on every rank."""
    source = Source(module, config)
    tokenizer = prepare_tokenizer(source, build_tokenizer)
    splits = open_splits(source, tokenizer)
    check_same_on_all_ranks([split.folder.name for split in splits.values()], "the data")
    return tokenizer, splits


def open_splits(source: Source, tokenizer: Tokenizer) -> Splits:
    """The rows by split. If the source has none for "val", it is a part of the training rows."""
    config = source.config
    train = _open_split(source, tokenizer, "train", [])
    splits = {"train": train}
    if source.content("val"):
        splits["val"] = _open_split(source, tokenizer, "val", train.labels)
    elif config.val_fraction:
        splits["train"], splits["val"] = train.split(config.val_fraction, config.seed)
    elif config.early_stopping_patience or config.schedule == "plateau":
        raise UserError("early stopping and the plateau schedule need val_file or val_fraction")
    if source.content("test"):
        splits["test"] = _open_split(source, tokenizer, "test", train.labels)
    kinds = {k: [s.meta[x] for x in ("texts", "pairs", "inputs")] for k, s in splits.items()}
    for name, kind in kinds.items():
        if kind != kinds["train"]:
            train_kind = describe_kind(kinds["train"])
            raise UserError(
                f"data.py: {name} rows have {describe_kind(kind)}; train rows have {train_kind}"
            )
    return splits


def _open_split(source: Source, tokenizer: Tokenizer, split: str, labels: list[str]) -> TokenStore:
    """A split's store, built if there is none yet; without `labels` its rows define them."""
    config = source.config
    encoder = Encoder(tokenizer, config.max_length, config.truncate)
    tokens = tokenizer.backend_tokenizer.to_str()
    key = content_key(STORE_VERSION, *source.key(split), tokens, labels)

    def build(folder: Path) -> None:
        log.info("tokenizing %s rows", split)
        writer = StoreWriter(folder, config.multi_label, len(tokenizer), labels)
        rows = source.draw(split, writer.report)
        _tokenize(tqdm(rows, f"tokenizing {split}", unit=" rows", disable=None), encoder, writer)
        writer.report.check(config.on_bad_rows)
        writer.finish()

    folder = build_once(Path(config.cache_dir) / f"{split}-{key}", build, f"the {split} rows")
    has_types = "token_type_ids" in tokenizer.model_input_names
    return TokenStore(folder, tokenizer.pad_token_id, has_types)


def _tokenize(rows: Iterable[Row], encoder: Encoder, writer: "StoreWriter") -> None:
    """Read, tokenize and write in chunks; the tokenizer works on the next ones meanwhile."""
    waiting: deque[tuple[list[Row], Future[Encoded]]] = deque()
    with ThreadPoolExecutor(2) as pool:  # two, so that it has work while Python looks at a result
        for chunk in chunks(rows):
            pairs = None if chunk[0].pair is None else [row.pair or "" for row in chunk]
            waiting.append((chunk, pool.submit(encoder, [row.text for row in chunk], pairs)))
            if len(waiting) > 2:
                chunk, future = waiting.popleft()
                writer.write(chunk, future.result())
    for chunk, future in waiting:
        writer.write(chunk, future.result())


class StoreWriter:
    """Writes the files of a TokenStore, chunk by chunk."""

    def __init__(self, folder: Path, multi_label: bool, vocabulary: int, labels: list[str]):
        self.folder, self.multi_label, self.known_labels = folder, multi_label, labels
        self.report = ReadReport(on_bad_row=self._bad_row)
        self.texts, self.pairs = 0, False  # text columns, 0 if a text is not a tuple; two texts
        self.label_ids = {name: i for i, name in enumerate(labels)}  # new names get the next ones
        self.first_seen: dict[str, str] = {}  # file and line of each new name
        self.label_rows: Counter[str] = Counter()
        self.rows = self.tokens = self.largest_id = 0
        self.input_sizes: dict[str, int] = {}  # numbers of a row; 0 if it is not a list
        self.types = ARRAYS | {"label_ids": "<i4", "label_counts": "<i4"}
        self.types["ids"] = "<u2" if vocabulary <= 2**16 else "<i4"
        self.files: dict[str, Any] = {}
        self.hashes = {name: hashlib.sha256() for name in ("ids", "offsets", "first", "labels")}
        self.bad_rows = (folder / "bad_rows.tsv").open("w", encoding="utf-8", newline="\n")
        for name in self.types:
            self._append(name, [0] if name == "offsets" else [])

    def _append(self, name: str, values: Any) -> None:
        if name not in self.files:
            self.files[name] = (self.folder / f"{name}.bin").open("w+b")
        data = np.asarray(values, self.types[name]).tobytes()
        self.files[name].write(data)
        if name in self.hashes:
            self.hashes[name].update(data)

    def _bad_row(self, bad: BadRow) -> None:
        """Note a row that was left out: file, line, reason, content."""
        print(*bad, sep="\t", file=self.bad_rows)

    def write(self, rows: list[Row], encoded: Encoded) -> None:
        if not all(encoded.has_tokens):
            rows, encoded = self._with_tokens(rows, encoded)
        if not rows:
            return
        self.texts = len(rows[0].text) if isinstance(rows[0].text, tuple) else 0
        self.pairs = rows[0].pair is not None
        lengths = np.fromiter(map(len, encoded.ids), np.int64, len(rows))
        ids = np.fromiter(chain.from_iterable(encoded.ids), self.types["ids"], lengths.sum())
        self.largest_id = max(self.largest_id, int(ids.max()))
        self._append("ids", ids)
        self._append("offsets", self.tokens + np.cumsum(lengths))
        self._append("first", encoded.first)
        self._append("full_length", encoded.full_length)
        texts = ("\0".join([*parts_of(row.text), *filter(None, [row.pair])]) for row in rows)
        hashes = np.fromiter(chain.from_iterable(map(text_hashes, texts)), np.uint64)
        self._append("exact", hashes[::2])
        self._append("folded", hashes[1::2])
        self.rows += len(rows)
        self.tokens += int(lengths.sum())
        labels: list[Any] = [row.label for row in rows]
        labels = [dict.fromkeys(label if self.multi_label else (label,)) for label in labels]
        first = self.rows - len(rows) + 1
        for number, (row, names) in enumerate(zip(rows, labels, strict=True), first):
            for name in names:
                if name not in self.label_ids:
                    self.label_ids[name] = len(self.label_ids)
                    place = f"{row.file}:{row.line}" if row.file else f"row {number} of data.py"
                    self.first_seen[name] = place
        flat = list(chain.from_iterable(labels))
        self.label_rows.update(flat)
        self._append("label_ids", [self.label_ids[name] for name in flat])
        self._append("label_counts", list(map(len, labels)))
        for name in rows[0].inputs or ():
            values = np.stack([row.inputs[name] for row in rows if row.inputs])
            self.input_sizes[name] = values.shape[1] if values.ndim > 1 else 0
            self.types[f"input-{name}"] = "<f4"
            self.hashes.setdefault(f"input-{name}", hashlib.sha256())
            self._append(f"input-{name}", values)

    def _with_tokens(self, rows: list[Row], encoded: Encoded) -> tuple[list[Row], Encoded]:
        """The rows of which the tokenizer left something; the others are bad rows."""
        for row, has_tokens in zip(rows, encoded.has_tokens, strict=True):
            if not has_tokens:
                content = " | ".join([*parts_of(row.text), *filter(None, [row.pair])])
                self.report.rows -= 1
                self.report.add(BadRow(row.file, row.line, "no tokens in the text", content))
        kept = encoded.has_tokens
        columns: list[Any] = [list(compress(column, kept)) for column in encoded]
        return list(compress(rows, kept)), Encoded(*columns)

    def finish(self) -> None:
        """Write the labels under their final ids, and the description of the store."""
        report = self.report
        known, new, rows = self.known_labels, self.first_seen, self.label_rows
        if known and new:
            examples = "; ".join(
                f"{name!r} ({rows[name]} rows, first at {new[name]}{did_you_mean(name, known)})"
                for name in list(new)[:5]
            )
            count = "1 label is" if len(new) == 1 else f"{len(new)} labels are"
            problem = f"{count} not among those of the training rows: {examples}"
            raise UserError(f"{problem}; correct them, or add training rows for them")
        labels = known or sorted_labels(new)
        if not labels:
            raise UserError(f"none of the {self.rows} rows has a label")
        if len(labels) < 2:
            raise UserError(f"all {self.rows} rows have the label {labels[0]!r}; two are needed")
        self._write_labels(labels)
        for file in (*self.files.values(), self.bad_rows):
            file.close()
        (self.folder / "label_ids.bin").unlink()
        (self.folder / "label_counts.bin").unlink()
        meta = {
            "rows": self.rows, "lines": report.lines or self.rows, "inputs": self.input_sizes,
            "largest_id": self.largest_id, "digest": self._digest(labels),
            "labels": labels, "multi_label": self.multi_label,
            "texts": self.texts, "pairs": self.pairs,
            "ids": self.types["ids"], "bad_rows": report.bad_row_count, "notes": report.notes,
        }  # fmt: skip
        text = json.dumps(meta, ensure_ascii=False, indent=1)
        (self.folder / "meta.json").write_text(text, encoding="utf-8")

    def _digest(self, labels: list[str]) -> str:
        """A hash of all that a model sees: tokens, labels and inputs."""
        hashes = {name: self.hashes[name].hexdigest() for name in sorted(self.hashes)}
        return content_key(hashes, labels)

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
                self.hashes["labels"].update(ids.tobytes())


def sorted_labels(names: Collection[str]) -> list[str]:
    """Label names in the order of their ids: as numbers if all are whole numbers, else as text."""
    are_numbers = all(re.fullmatch(r"-?(0|[1-9][0-9]*)", name) for name in names)
    return sorted(names, key=int) if are_numbers else sorted(names)
