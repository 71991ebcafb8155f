"""What is in the rows: classes, repeats, contradictions, leaks, lengths, and what they suggest.

All of it is counted on the arrays of the token store: seconds for millions of rows. The remarks
also stand at the beginning of every run's log.
"""

import argparse
import itertools
import math
import re
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from training.config import FROM_SCRATCH, TrainConfig, UserError, batch_sizes
from training.flags import parse_args
from training.texts import text_numbers

if TYPE_CHECKING:  # it brings torch, and a mistyped flag is answered without
    from training.tokens import TokenStore

PART = 1 << 20  # rows compared at a time, so that memory does not grow with the rows
CUTS = (64, 128, 256, 512)
MOST_CLASSES, MOST_EXAMPLES = 40, 5
COVERED = 99  # percent of the rows that the suggested max_length leaves whole
FORWARD_TOKENS = 8192  # of the suggested batch_size: a forward that keeps a GPU busy
FOLDED = "after folding case, width and spaces"
Splits = dict[str, "TokenStore"]


# -- what is worth a look ------------------------------------------------------------------------


def remarks(splits: Splits, tokenizer: Any = None) -> list[str]:
    """A sentence for each thing that is worth a look; with a tokenizer, examples too."""
    lines = []
    for name, store in splits.items():
        lines += [f"{name}: {note}" for note in store.meta["notes"]]
        if store.meta["bad_rows"]:
            lines.append(f"{name}: {store.meta['bad_rows']:,} bad rows left out")
        missing = [store.labels[i] for i in np.flatnonzero(store.label_counts() == 0)]
        if missing:
            lines.append(f"{name}: no rows of {_some(missing)}")
    by_number: dict[int, list[str]] = {}
    for label in splits["train"].labels:
        by_number.setdefault(text_numbers(label)[1], []).append(label)
    lines += [f"classes {_some(names)} are the same {FOLDED}"
              for names in by_number.values() if len(names) > 1]  # fmt: skip
    counts, contradicting = compare_texts(splits)
    for other, name in itertools.combinations_with_replacement(splits, 2):
        exact, folded = counts[other, name, 0], counts[other, name, 1]
        if folded:
            what = "repeat a text of the same split" if name == other else f"are also in {other}"
            lines.append(f"{name}: {exact:,} rows {what}, {folded:,} {FOLDED} "
                         f"({100 * folded / len(splits[name]):.1f} %)")  # fmt: skip
    if counts["texts"]:
        lines.append(f"{counts['texts']:,} texts stand under different labels, "
                     f"in {counts['rows']:,} rows")  # fmt: skip
    if tokenizer is not None:
        lines += [_example(splits, tokenizer, number) for number in contradicting]
    return lines


def compare_texts(splits: Splits) -> tuple[Counter[Any], list[int]]:
    """What is repeated, as counts, and the numbers of a few texts with different labels.

    (a, a, kind): rows of split a beyond the first with that text; (a, b, kind): rows of b whose
    text is in a too; kind 0 as written, 1 folded. "texts" with different labels, and their "rows".
    """
    counts: Counter[Any] = Counter()
    contradicting: list[int] = []
    for rows in _parts(splits):
        seen: dict[str, list[np.ndarray]] = {}
        for name, store in splits.items():
            seen[name] = [np.sort(store.values(k, rows[name])) for k in ("exact", "folded")]
            for kind, (other, known) in itertools.product((0, 1), seen.items()):
                mine, known = seen[name][kind], known[kind]
                same = mine[1:] == mine[:-1] if other == name else _rows_with(known, mine) > 0
                counts[other, name, kind] += int(same.sum())
        folded = np.concatenate([s.values("folded", rows[name]) for name, s in splits.items()])
        labels = np.concatenate([_label_numbers(s, rows[name]) for name, s in splits.items()])
        order = np.argsort(folded)
        folded, labels = folded[order], labels[order]
        differ = (folded[1:] == folded[:-1]) & (labels[1:] != labels[:-1])
        texts = np.unique(folded[1:][differ])
        counts["texts"] += len(texts)
        counts["rows"] += int(_rows_with(folded, texts).sum())
        contradicting += texts[:MOST_EXAMPLES].tolist()
    return counts, contradicting[:MOST_EXAMPLES]


def _parts(splits: Splits) -> Iterator[dict[str, np.ndarray]]:
    """Row numbers of each split, part by part; all rows of a text are in the same part."""
    folded = {name: store.values("folded") for name, store in splits.items()}
    count = math.ceil(sum(map(len, folded.values())) / PART)
    bounds = [2**64 * i // count for i in range(count + 1)]
    for low, high in itertools.pairwise(bounds):
        yield {name: np.flatnonzero((f >= low) & (f <= high - 1)) for name, f in folded.items()}


def _rows_with(sorted_numbers: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """How often each of `wanted` is among `sorted_numbers`: (n,)."""
    ends = np.searchsorted(sorted_numbers, wanted, "right")
    return ends - np.searchsorted(sorted_numbers, wanted, "left")


def _label_numbers(store: "TokenStore", rows: np.ndarray) -> np.ndarray:
    """A number for the label of each row, or for its set of labels: (n,)."""
    labels = store.label_ids(rows)
    if not store.multi_label:
        return labels
    numbers = np.zeros(len(rows), np.uint64)
    for column, label in zip(labels.T, store.labels, strict=True):
        numbers += column * np.uint64(text_numbers(label)[0])
    return numbers


def _example(splits: Splits, tokenizer: Any, number: int) -> str:
    """A text that has several labels, as its tokens have it, and how often it has which."""
    text, found = "", []
    for name, store in splits.items():
        rows = np.flatnonzero(store.values("folded") == number)
        if len(rows) and not text:
            one = rows[store.values("exact", rows).argmin()]  # the same in any order of rows
            ids = store.inputs(np.array([one]))["input_ids"][0]
            text = tokenizer.decode(ids, skip_special_tokens=True)
        flags = store.label_ids(rows)
        if not store.multi_label:
            flags = flags[:, None] == np.arange(len(store.labels))
        names = [" + ".join(store.labels[i] for i in np.flatnonzero(row)) for row in flags]
        found += [f"{name} {label or 'no label'} {n}" for label, n in sorted(Counter(names).items())]
    return f"  {text[:60]}{'...' * (len(text) > 60)}: {', '.join(found)}"


def _some(names: list[str]) -> str:
    return ", ".join(map(repr, names[:10])) + f" and {len(names) - 10} more" * (len(names) > 10)


# -- the report ----------------------------------------------------------------------------------


def main() -> None:
    """The command `python data.py --report [FOLDER] [flags of train.py]`."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--report", nargs="?", const=".", type=Path)
    given, flags = parser.parse_known_args()
    if given.report is None:
        sys.exit("usage: python data.py --report [FOLDER] [flags of train.py]")
    config = parse_args(flags)

    import data  # only now the slow imports
    import model
    from training.tokenise import open_splits, prepare_tokenizer
    from training.tracking import start_console

    start_console(True)
    try:
        tokenizer = prepare_tokenizer(config, data, model.build_tokenizer)
        stores = open_splits(config, data, tokenizer)
        splits = {n: s for n, s in zip(("train", "val", "test"), stores, strict=True) if s}
        longest = 512  # a cost that grows with the square is not suggested unasked
        if config.model != FROM_SCRATCH:
            longest = min(model.longest_input(model.load_hf_config(config)), 8192)
        sections = describe(config, splits, tokenizer, longest)
        text = "\n".join(f"{title}\n" + "".join(f"  {line}\n" for line in lines)
                         for title, lines in sections.items())  # fmt: skip
        print(f"\n{text}")
        given.report.mkdir(parents=True, exist_ok=True)
        (given.report / "data_report.txt").write_text(text, encoding="utf-8")
        draw(splits, sections, given.report / "data_report.png")
        print(f"written to {given.report / 'data_report.txt'} and .png")
    except (UserError, OSError) as error:
        sys.exit(f"data.py: {error}")


def describe(
    config: TrainConfig, splits: Splits, tokenizer: Any, longest: int
) -> dict[str, list[str]]:
    """The sections of the report. `longest`: the most tokens that may be suggested."""
    train = splits["train"]
    counts = {name: store.label_counts() for name, store in splits.items()}
    order = np.argsort(-counts["train"], kind="stable")
    classes = ["".join(f"{name:>20}" for name in splits)]
    classes += ["".join(f"{n[i]:>12,}{100 * n[i] / len(splits[s]):6.1f} %"
                        for s, n in counts.items()) + f"   {train.labels[i]}"
                for i in order[:MOST_CLASSES]]  # fmt: skip
    if len(order) > MOST_CLASSES:
        classes.append(f"and {len(order) - MOST_CLASSES} smaller ones")

    full = {name: store.values("full_length") for name, store in splits.items()}
    cuts = sorted({*CUTS, config.max_length})
    lengths = [f"{'mean':>14}{'median':>8}{'90 %':>8}{'99 %':>8}{'max':>8}   rows longer than"
               + "".join(f"{cut:>8}" for cut in cuts)]  # fmt: skip
    for name, f in full.items():
        quantiles = [*np.percentile(f, [50, 90, 99], method="higher"), f.max()]
        lengths.append(f"{name:<6}{f.mean():8.1f}" + "".join(f"{q:>8,}" for q in quantiles)
                       + " " * 19 + "".join(f"{100 * (f > c).mean():6.1f} %" for c in cuts))  # fmt: skip
    powers = np.bincount(np.ceil(np.log2(np.maximum(full["train"], 8))).astype(int))
    lengths += ["", "train rows by their length"]
    lengths += [f"{2 ** (k - 1) + 1 if k > 3 else 1:>7,} to {2**k:<7,}{100 * n / len(train):6.1f} % "
                + "#" * round(50 * n / len(train)) for k, n in enumerate(powers) if k > 2]  # fmt: skip
    return {
        f"rows and their share: {len(train.labels)} classes": [
            ", ".join(f"{name} {len(store):,} rows" for name, store in splits.items()), *classes
        ],
        "worth a look": remarks(splits, tokenizer) or ["nothing found"],
        "tokens of a row, special ones included": lengths,
        "suggestions": suggestions(config, train, longest),
    }  # fmt: skip


def suggestions(config: TrainConfig, train: "TokenStore", longest: int) -> list[str]:
    """Settings that fit the rows, each with its reason, and what an epoch costs."""
    import torch

    full = train.values("full_length")
    needed = -(-int(np.percentile(full, COVERED, method="higher")) // 8) * 8
    length = min(needed, longest)
    whole = 100 * (full <= length).mean()
    lines = [f"--max-length {length}: leaves {whole:.1f} % of the train rows whole"]
    if length < needed:
        lines[0] += f"; {COVERED} % would need {needed:,}. --truncate head+tail keeps both ends"
    ranks = max(1, torch.accelerator.device_count())
    try:
        sizes = batch_sizes(config, ranks)
        padding = {grouped: _padding(config, train, ranks, grouped) for grouped in (True, False)}
    except UserError as error:
        return [*lines, str(error)]
    rows = max(1, min(FORWARD_TOKENS // length, math.ceil(sizes.global_batch_size / ranks)))
    steps = math.ceil(len(train) / sizes.global_batch_size)
    total = config.max_steps or steps * config.epochs
    lines += [
        f"--batch-size {1 << (rows.bit_length() - 1)}: at most {FORWARD_TOKENS:,} tokens in a "
        f"forward, and {math.ceil(sizes.global_batch_size / ranks)} rows, the share of a rank; "
        "halve it when memory runs out: what is learned stays the same",
    ]
    counts = train.label_counts()
    if not train.multi_label and counts.max() >= 5 * max(1, counts.min()):
        lines.append(f"--class-weights balanced --metric macro_f1: the largest class has "
                     f"{counts.max() / max(1, counts.min()):.0f} times the rows of the smallest")
    return [
        *lines,
        f"padding: {padding[True]:.1f} % of what is computed, {padding[False]:.1f} % with "
        "--no-group-by-length",
        f"steps: {total:,}, with {steps:,} in an epoch and {sizes.global_batch_size} rows in each, "
        f"on {ranks} rank{'s' * (ranks > 1)}",
    ]  # fmt: skip


def _padding(config: TrainConfig, train: "TokenStore", ranks: int, grouped: bool) -> float:
    """Percent of the computed tokens that are padding, in the first 200 steps."""
    from training.sampler import BatchPlan

    plan = BatchPlan(train, batch_sizes(config, ranks), seed=config.seed, group_by_length=grouped,
                     num_replicas=ranks, rank=0)  # fmt: skip
    ends = itertools.islice((micro for micro in plan if micro.ends_step), 200)
    tokens, padded = np.sum([(m.step_tokens, m.step_padded_tokens) for m in ends], axis=0)
    return 100 * (1 - tokens / padded)


# -- the picture ---------------------------------------------------------------------------------


def draw(splits: Splits, sections: dict[str, list[str]], path: Path) -> None:
    """Class balance, lengths and the text of the report, in one picture."""
    import matplotlib
    from matplotlib import font_manager
    from matplotlib.figure import Figure

    installed = {font.name for font in font_manager.fontManager.ttflist}
    cjk = re.compile("Sans.*(CJK|GB)|SimHei|YaHei|PingFang|Heiti|WenQuanYi|Hiragino|Malgun")
    fonts = ["DejaVu Sans", *sorted(filter(cjk.search, installed))]
    with matplotlib.rc_context({"font.family": fonts, "text.parse_math": False}), \
            warnings.catch_warnings(action="ignore"):  # of characters in none of the fonts
        ...
