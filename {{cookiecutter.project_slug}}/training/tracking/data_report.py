"""What is in the rows, from the token store's arrays alone: seconds for millions of rows."""

import argparse
import itertools
import math
import re
import sys
import textwrap
import warnings
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from training.settings.config import FROM_SCRATCH, TrainConfig
from training.settings.errors import UserError
from training.settings.batch_sizes import batch_sizes
from training.settings.flags import parse_args
from training.dataset.duplicates import compare_texts, text_numbers

if TYPE_CHECKING:  # it brings torch, and a mistyped flag is answered without
    from training.dataset.token_store import TokenStore

MOST_CLASSES = 30
FORWARD_TOKENS = 8192  # of the suggested batch_size: enough to keep a GPU busy
FOLDED = "after folding case, width and spaces"
Splits = dict[str, "TokenStore"]
Sections = dict[str, list[str]]


def remarks(splits: Splits, tokenizer: Any = None) -> list[str]:
    """A sentence for each thing that is worth a look; with a tokenizer, examples too."""
    lines: list[str] = []
    for name, store in splits.items():
        lines += [f"{name}: {note}" for note in store.meta["notes"]]
        if store.meta["bad_rows"]:
            lines.append(f"{name}: {store.meta['bad_rows']:,} bad rows left out")
        if missing := [store.labels[i] for i in np.flatnonzero(store.label_counts() == 0)]:
            lines.append(f"{name}: no rows of {len(missing)} classes: {missing[:10]}")
    alike: dict[int, list[str]] = {}
    for label in splits["train"].labels:
        alike.setdefault(text_numbers(label)[1], []).append(label)
    lines += [f"one class {FOLDED}: {n}" for n in alike.values() if len(n) > 1]
    counts, contradicting = compare_texts(splits)
    for other, name in itertools.combinations_with_replacement(splits, 2):
        exact, folded = counts[other, name, "exact"], counts[other, name, "folded"]
        what = "repeat a text of the same split" if name == other else f"are also in {other}"
        if folded:
            share = f"{folded / len(splits[name]):.1%}"
            lines.append(f"{name}: {exact:,} rows {what}, {folded:,} ({share}) {FOLDED}")
    if texts := counts["texts"]:
        lines.append(f"{texts:,} texts, of {counts['rows']:,} rows, have different labels")
    return lines + [_example(splits, tokenizer, n) for n in contradicting if tokenizer]


def _example(splits: Splits, tokenizer: Any, number: int) -> str:
    """A text with several labels, as its tokens have it, and how often it has which."""
    text, found = "", []
    for name, store in splits.items():
        rows = np.flatnonzero(store.values("folded") == number)
        if len(rows) and not text:
            one = rows[store.values("exact", rows).argmin()]  # in any order of rows the same
            ids = store.inputs(np.array([one]))["input_ids"][0]
            text = " ".join(tokenizer.decode(ids, skip_special_tokens=True).split())
        for label, n in Counter(map(tuple, np.atleast_2d(store.label_ids(rows).T).T)).items():
            of = np.flatnonzero(label) if store.multi_label else label
            names = " + ".join(store.labels[i] for i in of) or "no label"
            found.append(f"{n} x {names!r} in {name}")
    return f"  {text[:60]}{'...' * (len(text) > 60)}: {', '.join(sorted(found))}"


# -- python data.py --report ---------------------------------------------------------------------


def main() -> None:
    """Print the report, and write `data_report.txt` and `data_report.png`."""
    usage = "python data.py --report [FOLDER] [flags of train.py]"
    parser = argparse.ArgumentParser(usage=usage, add_help=False, allow_abbrev=False)
    parser.add_argument("--report", nargs="?", const=".", type=Path, required=True)
    given, flags = parser.parse_known_args()
    config = parse_args(flags)

    import data  # only now the slow imports
    import model
    from training.dataset.build import open_splits, prepare_tokenizer
    from training.tracking.tracker import start_console

    start_console(True)
    try:
        tokenizer = prepare_tokenizer(config, data, model.build_tokenizer)
        stores = open_splits(config, data, tokenizer)
        splits = {n: s for n, s in zip(("train", "val", "test"), stores, strict=True) if s}
        longest = 512  # what grows with the square is not suggested unasked
        if config.model != FROM_SCRATCH:
            longest = min(model.longest_input(model.load_hf_config(config)), 8192)
        sections = describe(config, splits, tokenizer, longest)
        text = "\n".join("\n  ".join([title, *lines]) + "\n" for title, lines in sections.items())
        given.report.mkdir(parents=True, exist_ok=True)
        (given.report / "data_report.txt").write_text(text, encoding="utf-8")
        draw(splits, sections, given.report / "data_report.png")
        print(f"\n{text}\nwritten: {given.report / 'data_report.txt'}, and .png")
    except (UserError, OSError) as error:
        sys.exit(f"data.py: {error}")


def describe(config: TrainConfig, splits: Splits, tokenizer: Any, longest: int) -> Sections:
    """The lines of the report by title. `longest`: the most tokens that may be suggested."""
    labels, cuts = splits["train"].labels, sorted({64, 128, 256, 512, config.max_length})
    counts = {name: store.label_counts() for name, store in splits.items()}
    row = "{:>22}" * len(splits)
    classes = [row.format(*(f"{name} {len(store):,}" for name, store in splits.items()))]
    for i in np.argsort(-counts["train"], kind="stable")[:MOST_CLASSES]:
        cells = [f"{n[i]:,}{n[i] / len(splits[name]):>9.1%}" for name, n in counts.items()]
        classes.append(f"{row.format(*cells)}   {labels[i]}")
    classes += [f"and {len(labels) - MOST_CLASSES} smaller ones"] * (len(labels) > MOST_CLASSES)
    titles = ["", "mean", "50 %", "90 %", "99 %", "max", *(f"> {cut}" for cut in cuts)]
    row = "{:>8}" * len(titles)
    lengths = [row.format(*titles)]
    for name, store in splits.items():
        full = store.values("full_length")
        points = np.percentile(full, (50, 90, 99, 100), method="inverted_cdf")
        cells = [*(f"{n:,}" for n in points), *(f"{(full > cut).mean():.1%}" for cut in cuts)]
        lengths.append(row.format(name, f"{full.mean():,.1f}", *cells))
    lengths.append("train rows with up to so many tokens, and more than half as many")
    full = splits["train"].values("full_length")
    bars = np.bincount(np.ceil(np.log2(np.maximum(full, 1))).astype(int)) / len(full)
    lengths += [f"{2**i:>8,}{s:>8.1%} {'#' * round(60 * s)}" for i, s in enumerate(bars) if s]
    return {
        f"{Path(config.train_file[0]).name}: {len(labels)} classes": classes,
        "Tokens of a row, special ones included": lengths,
        "Worth a look": remarks(splits, tokenizer) or ["nothing found"],
        "Suggestions": suggestions(config, splits["train"], longest),
    }


def suggestions(config: TrainConfig, train: "TokenStore", longest: int) -> list[str]:
    """Settings that fit the rows, with the reason; padding and steps under the present ones."""
    import torch

    from training.step.batch_plan import BatchPlan

    full, ranks = train.values("full_length"), max(1, torch.accelerator.device_count())
    needed = -(-max(8, int(np.percentile(full, 99, method="inverted_cdf"))) // 8) * 8
    length, sizes = min(needed, longest), batch_sizes(config, ranks)
    share = math.ceil(sizes.global_batch_size / ranks)
    rows = max(1, min(FORWARD_TOKENS // length, share))
    lines = [
        f"--max-length {length}: {(full <= length).mean():.1%} of the train rows stay whole"
        + f"; 99 % would need {needed:,}" * (length < needed),
        f"--batch-size {1 << rows.bit_length() - 1}: a rank has {share} rows a step, and a forward "
        f"should have up to {FORWARD_TOKENS:,} tokens; out of memory? Lower it, the result stays",
    ]
    for flag in ("--group-by-length", "--no-group-by-length"):
        plan = BatchPlan(train, sizes, seed=config.seed, group_by_length=flag[2] == "g",
                         num_replicas=ranks, rank=0)  # fmt: skip
        steps = itertools.islice((m for m in plan if m.ends_step), 200)
        used, all_ = np.sum([(m.step_tokens, m.step_padded_tokens) for m in steps], axis=0)
        lines.append(f"{flag}: {1 - used / all_:.1%} of what is computed is padding")
    total = config.max_steps or config.epochs * plan.steps_per_epoch
    return [*lines, f"steps: {total:,}, {plan.steps_per_epoch:,} an epoch; rows in each: "
                    f"{sizes.global_batch_size}; ranks: {ranks}"]  # fmt: skip


def draw(splits: Splits, sections: Sections, path: Path) -> None:
    """The classes, the lengths, and what the report says of them, in one picture."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.font_manager import fontManager

    cjk = re.compile(".*Sans.*CJK|SimHei|.*YaHei|PingFang|Heiti|WenQuanYi|Hiragino Sans|Malgun")
    fonts = sorted(filter(cjk.match, {font.name for font in fontManager.ttflist}))
    style: Any = {"font.family": ["DejaVu Sans", *fonts], "text.parse_math": False}
    classes, lengths, *titles = sections
    said = [line for title in titles for line in ("", title, *sections[title])]
    text = "\n".join(textwrap.fill(line, 140, subsequent_indent="      ") for line in said)
    heights = [5, 0.18 * text.count("\n")]  # inches
    train, full = splits["train"], splits["train"].values("full_length")
    order = np.argsort(train.label_counts(), kind="stable")[-MOST_CLASSES:]
    thick, edges = 0.8 / len(splits), 2 ** np.arange(2, 12.5, 0.5)
    with matplotlib.rc_context(style), warnings.catch_warnings(action="ignore"):  # missing glyphs
        figure = Figure(figsize=(12, sum(heights)), layout="constrained")
        left, right, below = figure.subplot_mosaic("AB;CC", height_ratios=heights).values()
        for i, (name, store) in enumerate(splits.items()):
            share = 100 * store.label_counts()[order] / len(store)
            left.barh(np.arange(len(order)) - i * thick, share, thick, label=name)
            tokens = np.clip(store.values("full_length"), edges[0], edges[-1])
            share = 100 * np.histogram(tokens, edges)[0] / len(store)
            right.stairs(share, edges, label=f"{name}, {len(store):,} rows", lw=2)
        left.set_yticks(
            np.arange(len(order)) - 0.4 + thick / 2, [train.labels[i][:30] for i in order]
        )
        left.set(title=classes, xlabel="% of the rows")
        right.set_xscale("log", base=2)
        right.set_xticks(edges[2::2], [f"{n:.0f}\n{(full > n).mean():.1%}" for n in edges[2::2]])
        xlabel = "tokens, and how many of the train rows have more"
        right.set(title=lengths, xlabel=xlabel, ylabel="% of the rows")
        left.legend()
        right.legend()
        below.axis("off")
        below.text(0, 1, text, va="top", fontsize=9)
        figure.savefig(path, dpi=110)
