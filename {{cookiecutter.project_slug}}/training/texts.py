"""Telling texts apart: numbers for equal texts, and a split that keeps equal texts together."""

import hashlib
import unicodedata

import numpy as np


def text_numbers(text: str) -> tuple[int, int]:
    """Numbers that tell texts apart: as written, and after folding case, width and spaces."""
    folded = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return _number(text), _number(folded)


def _number(text: str) -> int:
    data = text.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def split_mask(texts: np.ndarray, labels: np.ndarray, fraction: float, seed: int) -> np.ndarray:
    """Rows of the smaller part: (n,) bool. `texts`: a number for each text; `labels`: label ids."""
    # One entry per text, with the lowest of its labels; then in an order made by the seed.
    order = np.lexsort((labels, texts))
    unique, first, counts = np.unique(texts[order], return_index=True, return_counts=True)
    label = labels[order][first]
    mixed = (unique ^ np.uint64(seed % 2**63)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    order = np.lexsort((unique, mixed ^ (mixed >> np.uint64(32)), label))
    # Within each label, take texts until their rows reach the fraction, rounded to whole rows.
    rows = np.cumsum(counts[order])
    begins = np.flatnonzero(np.r_[True, np.diff(label[order]) != 0])
    before = np.r_[0, rows[begins[1:] - 1]]
    sizes = np.diff(np.r_[begins, len(order)])
    totals = np.r_[before[1:], rows[-1]] - before
    within = rows - np.repeat(before, sizes)
    taken = within <= np.repeat(np.round(totals * fraction), sizes)
    return np.isin(texts, unique[order][taken])
