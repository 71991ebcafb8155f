"""The token store: tokenized rows in memory-mapped files, shared by all ranks and workers.

A micro-batch is cut straight from these files, which `build.py` writes: no row is a Python object.
"""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from training.distributed.shared_folder import build_once
from training.settings.errors import UserError

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

    `store[micro_batch]` is that micro-batch, collated; pairs of texts with `token_types`.
    """

    def __init__(self, folder: Path, pad_id: int, token_types: bool, subset: Path | None = None):
        self._arguments = folder, pad_id, token_types, subset
        self.folder, self.pad_id = folder, pad_id
        self.subset = None if subset is None else np.load(subset, mmap_mode="r").view(np.ndarray)
        self.meta: dict[str, Any] = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        self.token_types: bool = token_types and self.meta["pairs"]
        self.labels: list[str] = self.meta["labels"]
        self.multi_label: bool = self.meta["multi_label"]
        self._arrays = {name: self._open_array(name, kind) for name, kind in ARRAYS.items()}
        self._ids = self._open_array("ids", self.meta["ids"])
        self._labels = self._open_array("labels", "<u1" if self.multi_label else "<i4")
        if self.multi_label:
            self._labels = self._labels.reshape(-1, len(self.labels))
        self._inputs: dict[str, np.ndarray] = {}  # numbers of data.py, by name
        for name, size in self.meta["inputs"].items():
            numbers = self._open_array(f"input-{name}", "<f4")
            self._inputs[name] = numbers.reshape(-1, size) if size else numbers

    def _open_array(self, name: str, kind: str) -> np.ndarray:
        # A plain view of the mapped file: indexing a memmap takes several times as long.
        return np.asarray(np.memmap(self.folder / f"{name}.bin", dtype=kind, mode="r"))

    def __reduce__(self) -> tuple[Any, ...]:
        # A loader worker that is not forked opens the files itself: their content is not sent.
        return TokenStore, self._arguments

    def __len__(self) -> int:
        return self.meta["rows"] if self.subset is None else len(self.subset)

    def identity(self) -> dict[str, str]:
        """What the rows are, whichever code and files they came from: for a run that resumes."""
        name = f"{len(self):,} rows, {len(self.labels)} labels"
        return {"name": name, "content": self.meta["digest"]}

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

    def label_counts(self, chosen: np.ndarray | None = None) -> np.ndarray:
        """Rows of each label, all or those that are `chosen`, (n,) bool: (labels,)."""
        counts = np.zeros(len(self.labels), np.int64)
        for begin in range(0, len(self), ROWS_AT_A_TIME):
            part = slice(begin, begin + ROWS_AT_A_TIME)
            ids = self.label_ids(part)
            if chosen is not None:
                ids = ids[chosen[part]]
            if self.multi_label:
                ids = ids.nonzero()[1]
            counts += np.bincount(ids, minlength=len(counts))
        return counts

    def inputs(self, rows: np.ndarray, length: int = 0) -> dict[str, torch.Tensor]:
        """The model's inputs for `rows`: (batch, length), or to the longest row if that is more;
        inputs of data.py are (batch,) or (batch, k) float32."""
        stored, offsets = self.stored(rows), self._arrays["offsets"]
        spans = zip(offsets[stored].tolist(), offsets[stored + 1].tolist(), strict=True)
        ids, first = [self._ids[begin:end] for begin, end in spans], self._arrays["first"][stored]
        inputs = collate(ids, first, self.pad_id, self.token_types, length)
        extra = {name: torch.from_numpy(array[stored]) for name, array in self._inputs.items()}
        return inputs | extra

    def batch(
        self, rows: np.ndarray, weight: np.ndarray | None = None, length: int = 0, plan: Any = None
    ) -> Batch:
        """Any rows as tensors, each with weight 1 if none is given."""
        labels = torch.from_numpy(self.label_ids(rows).astype(np.int64))
        weights = torch.from_numpy(np.ones(len(rows)) if weight is None else weight)
        return Batch(self.inputs(rows, length), labels, weights, plan)

    def __getitem__(self, micro_batch: Any) -> Batch:
        return self.batch(micro_batch.rows, micro_batch.weight, micro_batch.length, micro_batch)

    def split(self, fraction: float, seed: int) -> tuple["TokenStore", "TokenStore"]:
        """Two parts, the second with `fraction` of the rows, of each label as many as that makes;
        equal texts stay together. Errors: UserError if the second part would be empty."""
        folder = self.folder / f"split-{fraction}-{seed}"

        def build(folder: Path) -> None:
            second = split_mask(self.values("folded"), self._strata(), fraction, seed)
            self._give_back(second)
            if not second.any():
                raise UserError(
                    f"val_fraction {fraction} of {len(self)} rows leaves no row for validation; "
                    "raise it, or give --val-file"
                )
            np.save(folder / "first.npy", np.flatnonzero(~second))
            np.save(folder / "second.npy", np.flatnonzero(second))

        build_once(folder, build, "the validation split")
        store = partial(TokenStore, self.folder, *self._arguments[1:3])
        return store(folder / "first.npy"), store(folder / "second.npy")

    def _strata(self) -> np.ndarray:
        """Of each row the rank of its rarest label, the rarest of all is 0: (n,) int32. Rows
        without labels come last."""
        counts = self.label_counts()
        rank = np.argsort(np.argsort(counts, kind="stable")).astype(np.int32)
        if not self.multi_label:
            return rank[self.label_ids()]
        strata = np.empty(len(self), np.int32)
        for begin in range(0, len(self), ROWS_AT_A_TIME):
            part = slice(begin, begin + ROWS_AT_A_TIME)
            strata[part] = np.where(self.label_ids(part), rank, np.int32(len(rank))).min(1)
        return strata

    def _give_back(self, second: np.ndarray) -> None:
        """Take a text out of `second`, (n,) bool, for each label that has no row outside of it."""
        lacking = np.flatnonzero((self.label_counts(~second) == 0) & (self.label_counts() > 0))
        if not len(lacking):
            return
        ids, hashes = self.label_ids(), self.values("folded")
        for label in lacking:
            row = np.argmax(ids[:, label] if self.multi_label else ids == label)
            second[hashes == hashes[row]] = False


def collate(
    ids: Sequence[Any], first: Any, pad_id: int, token_types: bool, length: int = 0
) -> dict[str, torch.Tensor]:
    """Rows of token ids as a model's inputs: (batch, length), or to the longest row if that is
    more. `first`: tokens of each row's first segment, which tell the token types of a pair."""
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    positions = np.arange(max(length, lengths.max()))
    mask = positions < lengths[:, None]
    input_ids = np.full(mask.shape, pad_id, np.int64)
    input_ids[mask] = np.concatenate(ids)
    arrays = {"input_ids": input_ids, "attention_mask": mask}
    if token_types:
        arrays["token_type_ids"] = mask & (positions >= np.asarray(first)[:, None])
    return {k: torch.from_numpy(a.astype(np.int64, copy=False)) for k, a in arrays.items()}


def split_mask(hashes: np.ndarray, strata: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Rows of the smaller part, (n,) bool, from the hashes of their texts and their strata.

    Texts are shuffled with the seed; of every stratum, the first are taken while their rows do not
    exceed the fraction. The rows still missing come from the strata that lack most, one text from
    each (the method of the largest remainder). A text has the lowest of its rows' strata.
    """
    bits = (len(hashes) // ROWS_SORTED_AT_A_TIME).bit_length()  # of the number of parts
    second = np.zeros(len(hashes), np.bool_)
    # Rows of each stratum: all, those of the parts before, those taken; then of the next text that
    # could be taken: its rows (0: none) and hash.
    totals, before, taken, next_rows = np.zeros((4, int(strata.max()) + 1), np.int64)
    next_hash = np.zeros(len(totals), np.uint64)
    for part in range(1 << bits):
        _, stratum, counts = _shuffled_texts(hashes, strata, seed, bits, part)
        np.add.at(totals, stratum, counts)
    wanted = totals * fraction
    for part in range(1 << bits):
        rows, stratum, counts = _shuffled_texts(hashes, strata, seed, bits, part)
        order = np.argsort(stratum, kind="stable")
        ends = np.cumsum(counts[order])
        begins = np.r_[0, ends][np.searchsorted(stratum[order], np.arange(len(totals)))]
        fits = np.zeros(len(stratum), np.bool_)
        fits[order] = ends + (before - begins)[stratum[order]] <= np.floor(wanted)[stratum[order]]
        second[rows] = np.repeat(fits, counts)
        np.add.at(before, stratum, counts)
        np.add.at(taken, stratum, counts * fits)
        others = np.flatnonzero(~fits & (next_rows[stratum] == 0))
        new, texts = np.unique(stratum[others], return_index=True)
        next_rows[new] = counts[others[texts]]
        next_hash[new] = hashes[rows[(np.cumsum(counts) - counts)[others[texts]]]]
    missing = round(float(wanted.sum())) - int(taken.sum())
    ties = np.random.default_rng(seed).random(len(totals))
    chosen = []
    for i in np.lexsort((ties, taken - wanted)):
        if 0 < next_rows[i] <= missing and taken[i] + next_rows[i] < totals[i]:
            chosen.append(next_hash[i])
            missing -= next_rows[i]
    return second | np.isin(hashes, np.array(chosen, np.uint64))


def _shuffled_texts(
    hashes: np.ndarray, strata: np.ndarray, seed: int, bits: int, part: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A part of the shuffled texts: their rows; each text's lowest stratum and number of rows."""
    chosen = []
    for begin in range(0, len(hashes), ROWS_SORTED_AT_A_TIME):
        keys = hashes[begin : begin + ROWS_SORTED_AT_A_TIME] ^ np.uint64(seed % 2**63)
        keys *= np.uint64(0x9E3779B97F4A7C15)
        keys = (keys ^ (keys >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        keys ^= keys >> np.uint64(32)
        rows = np.flatnonzero(keys >> np.uint64(63 - bits) >> np.uint64(1) == part)
        chosen.append((begin + rows, keys[rows]))
    row, key = (np.concatenate(arrays) for arrays in zip(*chosen, strict=True))
    order = np.lexsort((strata[row], key))
    _, first, counts = np.unique(key[order], return_index=True, return_counts=True)
    return row[order], strata[row[order][first]], counts
