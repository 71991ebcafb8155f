"""The token store: tokenised rows in memory-mapped files, shared by all ranks and workers.

A row is never a Python object: a micro-batch is cut straight from the mapped files, so memory does
not grow with rows, ranks or loader workers. `tokenise.py` writes these files.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.utils.data import Dataset

from training.cache import cached
from training.texts import split_mask

# One value per row: where its tokens begin, tokens of its first segment, its length uncut, and
# numbers of its text as written and after folding.
ARRAYS = {"offsets": "<i8", "first": "<i4", "full_length": "<i4", "exact": "<u8", "folded": "<u8"}


class Batch(NamedTuple):
    """A micro-batch as tensors."""

    inputs: dict[str, torch.Tensor]  # input_ids, attention_mask: (batch, length)
    labels: torch.Tensor  # (batch,) label ids, or (batch, labels) of 0 and 1
    weight: torch.Tensor  # (batch,) weight of each row's loss
    plan: Any  # the MicroBatch


class Planned(Protocol):
    @property
    def rows(self) -> np.ndarray: ...
    @property
    def weight(self) -> np.ndarray: ...


class TokenStore(Dataset[Batch]):
    """Tokenised rows. `store[micro_batch]` is that micro-batch, collated.

    `token_types`: tell the model which text of a pair a token belongs to.
    `subset`: row numbers of this store's files that it is made of; all of them if None.
    """

    def __init__(
        self, folder: Path, pad_id: int, token_types: bool, subset: np.ndarray | None = None
    ) -> None:
        self.folder, self.pad_id, self.subset = folder, pad_id, subset
        self.token_types = token_types
        self.meta: dict[str, Any] = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        self.labels: list[str] = self.meta["labels"]
        self.multi_label: bool = self.meta["multi_label"]
        self._maps = {name: self._map(name, kind) for name, kind in ARRAYS.items()}
        self._ids = self._map("ids", self.meta["ids"])
        kind = "<u1" if self.multi_label else "<i4"
        self._labels = self._map("labels", kind)
        if self.multi_label:
            self._labels = self._labels.reshape(-1, len(self.labels))

    def _map(self, name: str, kind: str) -> np.ndarray:
        return np.memmap(self.folder / f"{name}.bin", dtype=kind, mode="r")

    def __len__(self) -> int:
        return self.meta["rows"] if self.subset is None else len(self.subset)

    def _stored(self, rows: Any) -> Any:
        return rows if self.subset is None else self.subset[rows]

    def values(self, name: str, rows: Any = slice(None)) -> np.ndarray:
        """One of ARRAYS, for `rows`: (n,)."""
        return np.asarray(self._maps[name][self._stored(rows)])

    def lengths(self, rows: Any = slice(None)) -> np.ndarray:
        """Tokens of each row, special tokens included: (n,) int64."""
        if isinstance(rows, slice):
            rows = np.arange(len(self))[rows]
        stored, offsets = self._stored(rows), self._maps["offsets"]
        return np.asarray(offsets[stored + 1] - offsets[stored])

    def label_ids(self, rows: Any = slice(None)) -> np.ndarray:
        """Label ids: (n,), or (n, labels) of 0 and 1."""
        return np.asarray(self._labels[self._stored(rows)])

    def label_counts(self) -> np.ndarray:
        """Rows of each label: (labels,)."""
        if self.multi_label:
            return self.label_ids().sum(axis=0, dtype=np.int64)
        return np.bincount(self.label_ids(), minlength=len(self.labels))

    def inputs(self, rows: np.ndarray) -> dict[str, torch.Tensor]:
        """The model's inputs for `rows`: tensors of (batch, length), padded at the end."""
        stored = self._stored(rows)
        begins, ends = self._maps["offsets"][stored], self._maps["offsets"][stored + 1]
        length = int((ends - begins).max())
        input_ids = np.full((len(rows), length), self.pad_id, np.int64)
        mask = np.zeros((len(rows), length), np.int64)
        for i, (begin, end) in enumerate(zip(begins, ends, strict=True)):
            input_ids[i, : end - begin] = self._ids[begin:end]
            mask[i, : end - begin] = 1
        inputs = {
            "input_ids": torch.from_numpy(input_ids),
            "attention_mask": torch.from_numpy(mask),
        }
        if self.token_types:
            second = np.arange(length) >= np.asarray(self._maps["first"][stored])[:, None]
            inputs["token_type_ids"] = torch.from_numpy((second & (mask == 1)).astype(np.int64))
        return inputs

    def __getitem__(self, planned: Planned) -> Batch:
        labels = torch.from_numpy(self.label_ids(planned.rows).astype(np.int64))
        weight = torch.from_numpy(planned.weight)
        return Batch(self.inputs(planned.rows), labels, weight, planned)

    def split(self, fraction: float, seed: int) -> tuple["TokenStore", "TokenStore"]:
        """Two parts, the second with about `fraction` of every label's rows.

        Rows with the same text (after folding case, width and spaces) stay together. What goes
        where depends on the texts and the seed, not on the order of the rows.
        """
        folder = self.folder / f"split-{fraction}-{seed}"

        def build(folder: Path) -> None:
            second = split_mask(self.values("folded"), self._label_groups(), fraction, seed)
            np.save(folder / "first.npy", np.flatnonzero(~second))
            np.save(folder / "second.npy", np.flatnonzero(second))

        cached(folder, build, "the validation split")
        first, second = (
            TokenStore(self.folder, self.pad_id, self.token_types, np.load(path, mmap_mode="r"))
            for path in (folder / "first.npy", folder / "second.npy")
        )
        return first, second

    def _label_groups(self) -> np.ndarray:
        """What the split is stratified by: the label, or the set of labels. (n,)"""
        if not self.multi_label:
            return self.label_ids()
        return np.unique(self.label_ids(), axis=0, return_inverse=True)[1].reshape(-1)
