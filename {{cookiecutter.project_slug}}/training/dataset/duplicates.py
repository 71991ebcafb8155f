"""Telling texts apart: numbers for equal texts, a split that keeps them together, repeats."""

import hashlib
import itertools
import math
import unicodedata
from collections import Counter
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from training.dataset.token_store import TokenStore

PART = 1 << 20  # rows compared at a time, so that memory does not grow with the rows


def text_numbers(text: str) -> tuple[int, int]:
    """Numbers that tell texts apart: as written, and after folding case, width and spaces."""
    folded = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return _number(text), _number(folded)


def _number(text: str) -> int:
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def split_mask(texts: np.ndarray, labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Rows of the smaller part: (n,) bool. `texts`: a number for each text; `labels`: label ids.

    Texts stand in an order made by the seed; of every label, the first are taken until their rows
    reach the fraction, rounded to whole rows. A text has the lowest of its rows' labels.
    """
    bits = (len(texts) // PART).bit_length()  # work on one of 2**bits parts of that order at a time
    second = np.zeros(len(texts), np.bool_)
    totals = np.zeros(int(labels.max()) + 1, np.int64)  # rows of each label
    for part in range(1 << bits):
        _, label, counts = _in_order(texts, labels, seed, bits, part)
        totals += np.bincount(label, counts, len(totals)).astype(np.int64)
    wanted, before = np.round(totals * fraction), np.zeros_like(totals)
    for part in range(1 << bits):
        if (before >= wanted).all():
            break
        rows, label, counts = _in_order(texts, labels, seed, bits, part)
        order = np.argsort(label, kind="stable")
        ends = np.cumsum(counts[order])
        begins = np.r_[0, ends][np.searchsorted(label[order], np.arange(len(totals)))]
        taken = np.zeros(len(label), np.bool_)
        taken[order] = ends + (before - begins)[label[order]] <= wanted[label[order]]
        second[rows] = np.repeat(taken, counts)
        before += np.bincount(label, counts, len(totals)).astype(np.int64)
    return second


def _in_order(
    texts: np.ndarray, labels: np.ndarray, seed: int, bits: int, part: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A part of the texts in an order made by the seed: their rows, and of each text the lowest
    label and the number of rows."""
    rows, places = [], []
    for begin in range(0, len(texts), PART):
        mixed = texts[begin : begin + PART] ^ np.uint64(seed % 2**63)
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(32)
        mine = np.flatnonzero(mixed >> np.uint64(63 - bits) >> np.uint64(1) == part)
        rows.append(begin + mine)
        places.append(mixed[mine])
    row, place = np.concatenate(rows), np.concatenate(places)
    order = np.lexsort((labels[row], place))
    row, place = row[order], place[order]
    first = np.flatnonzero(np.r_[True, place[1:] != place[:-1]][: len(place)])
    return row, labels[row[first]], np.diff(np.r_[first, len(row)])


def compare_texts(splits: dict[str, "TokenStore"]) -> tuple[Counter[Any], list[int]]:
    """What is repeated, as counts, and the numbers of a few texts with different labels.

    (a, a, kind): rows of split a beyond the first with their text; (a, b, kind): rows of b whose
    text is in a. Kind: exact or folded. "texts" with different labels, and their "rows".
    """
    counts: Counter[Any] = Counter()
    examples: list[int] = []
    numbers = {name: store.values("folded") for name, store in splits.items()}
    keys = np.random.default_rng(0).integers(2**63, size=len(splits["train"].labels))
    parts = math.ceil(sum(map(len, splits.values())) / PART)
    bounds = [2**64 * i // parts for i in range(parts + 1)]
    for low, high in itertools.pairwise(bounds):  # all rows of a text are in the same part
        rows = {k: np.flatnonzero((n >= low) & (n <= high - 1)) for k, n in numbers.items()}
        for kind in ("exact", "folded"):
            mine = {k: np.sort(s.values(kind, rows[k])) for k, s in splits.items()}
            for a, b in itertools.combinations_with_replacement(splits, 2):
                same = mine[a][1:] == mine[a][:-1] if a == b else _times(mine[b], mine[a]) > 0
                counts[a, b, kind] += int(same.sum())
        folded = np.concatenate([numbers[k][rows[k]] for k in splits])
        labels = np.concatenate([s.label_ids(rows[k]) for k, s in splits.items()])
        if labels.ndim == 2:  # a number for each set of labels
            labels = np.einsum("ij,j->i", labels, keys)
        order = np.argsort(folded)
        folded, labels = folded[order], labels[order]
        differ = (folded[1:] == folded[:-1]) & (labels[1:] != labels[:-1])
        texts = np.unique(folded[1:][differ])
        counts["texts"] += len(texts)
        counts["rows"] += int(_times(texts, folded).sum())
        examples += texts[:5].tolist()
    return counts, examples[:5]


def _times(wanted: np.ndarray, ordered: np.ndarray) -> np.ndarray:
    """How often each of `wanted` is in the sorted `ordered`. np.isin takes 50 times as long."""
    ends = np.searchsorted(ordered, wanted, "right")
    return ends - np.searchsorted(ordered, wanted, "left")
