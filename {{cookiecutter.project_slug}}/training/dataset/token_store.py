"""The token store: tokenized rows in memory-mapped files, shared by all ranks and workers.

A micro-batch is cut straight from these files, which `build.py` writes: no row is a Python object.
"""

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from training.distributed.shared_folder import build_once

# One value per row: where its tokens begin, tokens of its first segment, its length uncut, and
# hashes of its text as written and after folding (see `text_hashes`).
ARRAYS = {"offsets": "<i8", "first": "<i4", "full_length": "<i4", "exact": "<u8", "folded": "<u8"}
Splits = dict[str, "TokenStore"]
ROWS_AT_A_TIME = 1 << 16  # where all rows are looked at, so that memory does not grow with them
ROWS_SORTED_AT_A_TIME = 1 << 20  # larger: every part of a sorted order takes a pass over all rows


class Batch(NamedTuple):  # a micro-batch as tensors
    inputs: dict[str, torch.Tensor]  # input_ids, attention_mask: (batch, length)
    labels: torch.Tensor  # (batch,) label ids, or (batch, labels) of 0 and 1
    weight: torch.Tensor  # (batch,) weight of each row's loss
    plan: Any  # the MicroBatch of the batch plan

    def to(self, device: torch.device) -> "Batch":
        inputs = {name: t.to(device, non_blocking=True) for name, t in self.inputs.items()}
        labels, weight = (t.to(device, non_blocking=True) for t in (self.labels, self.weight))
        return Batch(inputs, labels, weight, self.plan)


class TokenStore(Dataset[Batch]):
    """Tokenized rows: those of the folder, or the `subset` in a file of row numbers.

    `store[micro_batch]` is that micro-batch, collated; with `token_types` for pairs of texts.
    """

    def __init__(self, folder: Path, pad_id: int, token_types: bool, subset: Path | None = None):
        self._arguments = folder, pad_id, token_types, subset
        self.folder, self.pad_id, self.token_types = folder, pad_id, token_types
        self.subset = None if subset is None else np.load(subset, mmap_mode="r").view(np.ndarray)
        self.meta: dict[str, Any] = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        self.labels: list[str] = self.meta["labels"]
        self.multi_label: bool = self.meta["multi_label"]
        self._arrays = {name: self._open_array(name, kind) for name, kind in ARRAYS.items()}
        self._ids = self._open_array("ids", self.meta["ids"])
        self._labels = self._open_array("labels", "<u1" if self.multi_label else "<i4")
        if self.multi_label:
            self._labels = self._labels.reshape(-1, len(self.labels))

    def _open_array(self, name: str, kind: str) -> np.ndarray:
        # A plain view of the mapped file: indexing a memmap takes several times as long.
        return np.asarray(np.memmap(self.folder / f"{name}.bin", dtype=kind, mode="r"))

    def __reduce__(self) -> tuple[Any, ...]:
        # A loader worker that is not forked opens the files itself: their content is not sent.
        return TokenStore, self._arguments

    def __len__(self) -> int:
        return self.meta["rows"] if self.subset is None else len(self.subset)

    def stored(self, rows: Any) -> Any:
        """The numbers of `rows` in the files that were read, bad rows not counted."""
        return rows if self.subset is None else self.subset[rows]

    def values(self, name: str, rows: Any = slice(None)) -> np.ndarray:
        """One of ARRAYS, for `rows`: (n,)."""
        return np.asarray(self._arrays[name][self.stored(rows)])

    def lengths(self, rows: Any = slice(None)) -> np.ndarray:
        """Tokens of each row, special tokens included: (n,) int64."""
        stored, offsets = self.stored(rows), self._arrays["offsets"]
        return np.asarray(offsets[1:][stored] - offsets[:-1][stored])

    def by_length(self) -> np.ndarray:
        """All rows, from short to long: (n,)."""
        return np.argsort(self.lengths(), kind="stable")

    def label_ids(self, rows: Any = slice(None)) -> np.ndarray:
        """Label ids: (n,), or (n, labels) of 0 and 1."""
        return np.asarray(self._labels[self.stored(rows)])

    def label_counts(self) -> np.ndarray:
        """Rows of each label: (labels,)."""
        counts = np.zeros(len(self.labels), np.int64)
        for begin in range(0, len(self), ROWS_AT_A_TIME):
            ids = self.label_ids(slice(begin, begin + ROWS_AT_A_TIME))
            if self.multi_label:
                ids = ids.nonzero()[1]
            counts += np.bincount(ids, minlength=len(counts))
        return counts

    def inputs(self, rows: np.ndarray, length: int = 0) -> dict[str, torch.Tensor]:
        """The model's inputs for `rows`: (batch, length), or to the longest row if that is more."""
        stored, offsets = self.stored(rows), self._arrays["offsets"]
        begins, ends = offsets[stored], offsets[stored + 1]
        positions = np.arange(max(length, (ends - begins).max()))
        mask = positions < (ends - begins)[:, None]
        input_ids = np.full(mask.shape, self.pad_id, np.int64)
        spans = zip(begins.tolist(), ends.tolist(), strict=True)
        input_ids[mask] = np.concatenate([self._ids[begin:end] for begin, end in spans])
        arrays = {"input_ids": input_ids, "attention_mask": mask}
        if self.token_types:
            arrays["token_type_ids"] = mask & (positions >= self._arrays["first"][stored][:, None])
        return {k: torch.from_numpy(a.astype(np.int64, copy=False)) for k, a in arrays.items()}

    def __getitem__(self, micro_batch: Any) -> Batch:
        rows, weight = micro_batch.rows, torch.from_numpy(micro_batch.weight)
        labels = torch.from_numpy(self.label_ids(rows).astype(np.int64))
        return Batch(self.inputs(rows, micro_batch.length), labels, weight, micro_batch)

    def split(self, fraction: float, seed: int) -> tuple["TokenStore", "TokenStore"]:
        """Two parts, the second with `fraction` of each label's rows; equal texts stay together."""
        folder = self.folder / f"split-{fraction}-{seed}"

        def build(folder: Path) -> None:
            labels = self.label_ids()
            if self.multi_label:  # a number for each set of labels
                labels = np.unique(labels, axis=0, return_inverse=True)[1].reshape(-1)
            second = split_mask(self.values("folded"), labels, fraction, seed)
            np.save(folder / "first.npy", np.flatnonzero(~second))
            np.save(folder / "second.npy", np.flatnonzero(second))

        build_once(folder, build, "the validation split")
        store = partial(TokenStore, self.folder, self.pad_id, self.token_types)
        return store(folder / "first.npy"), store(folder / "second.npy")


def split_mask(hashes: np.ndarray, labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Rows of the smaller part, (n,) bool, from the hashes of their texts and their label ids.

    Texts are shuffled with the seed; of every label, the first are taken until their rows reach the
    fraction, rounded to whole rows. A text has the lowest of its rows' labels.
    """
    bits = (len(hashes) // ROWS_SORTED_AT_A_TIME).bit_length()  # of the number of parts
    second = np.zeros(len(hashes), np.bool_)
    totals, before = np.zeros((2, int(labels.max()) + 1), np.int64)  # rows of each label
    for part in range(1 << bits):
        _, label, counts = _shuffled_texts(hashes, labels, seed, bits, part)
        np.add.at(totals, label, counts)
    wanted = np.round(totals * fraction)
    for part in range(1 << bits):
        rows, label, counts = _shuffled_texts(hashes, labels, seed, bits, part)
        order = np.argsort(label, kind="stable")
        ends = np.cumsum(counts[order])
        begins = np.r_[0, ends][np.searchsorted(label[order], np.arange(len(totals)))]
        taken = np.zeros(len(label), np.bool_)
        taken[order] = ends + (before - begins)[label[order]] <= wanted[label[order]]
        second[rows] = np.repeat(taken, counts)
        np.add.at(before, label, counts)
    return second


def _shuffled_texts(
    hashes: np.ndarray, labels: np.ndarray, seed: int, bits: int, part: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A part of the shuffled texts: their rows, and each text's lowest label and number of rows."""
    chosen = []
    for begin in range(0, len(hashes), ROWS_SORTED_AT_A_TIME):
        keys = hashes[begin : begin + ROWS_SORTED_AT_A_TIME] ^ np.uint64(seed % 2**63)
        keys *= np.uint64(0x9E3779B97F4A7C15)
        keys = (keys ^ (keys >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        keys ^= keys >> np.uint64(32)
        rows = np.flatnonzero(keys >> np.uint64(63 - bits) >> np.uint64(1) == part)
        chosen.append((begin + rows, keys[rows]))
    row, key = (np.concatenate(arrays) for arrays in zip(*chosen, strict=True))
    order = np.lexsort((labels[row], key))
    _, first, counts = np.unique(key[order], return_index=True, return_counts=True)
    return row[order], labels[row[order][first]], counts
