"""What is in the rows, from the arrays of the token store only: seconds for millions of rows."""

import argparse
import io
import itertools
import logging
import math
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from training.dataset.rows import text_hashes
from training.settings.batch_sizes import batch_sizes
from training.settings.config import FROM_SCRATCH, TrainConfig
from training.settings.errors import UserError
from training.settings.flags import parse_args
from training.tracking.figures import MAX_CLASSES, Sections, Splits, draw_rows

FORWARD_TOKENS = 8192  # of the suggested batch_size: enough to keep a GPU busy
ROWS_COMPARED_AT_A_TIME = 1 << 20  # so that memory does not grow with the rows


def remarks(splits: Splits, tokenizer: Any = None) -> list[str]:
    """A sentence for each thing that is worth a look; with a tokenizer, examples too."""
    lines: list[str] = []
    for name, store in splits.items():
        lines += [f"{name}: {note}" for note in store.meta["notes"]]
        if store.meta["bad_rows"]:
            lines.append(f"{name}: {store.meta['bad_rows']:,} bad rows left out")
        if missing := [store.labels[i] for i in np.flatnonzero(store.label_counts() == 0)]:
            lines.append(f"{name}: {len(missing)} classes have no rows: {missing[:10]}")
    same_name: dict[int, list[str]] = {}
    for label in splits["train"].labels:
        same_name.setdefault(text_hashes(label)[1], []).append(label)
    alike = "labels that differ only in case, width or spaces"
    lines += [f"{alike}: {names}" for names in same_name.values() if len(names) > 1]
    counts, contradicting = compare_texts(splits)
    for other, name in itertools.combinations_with_replacement(splits, 2):
        exact, folded = counts[other, name, "exact"], counts[other, name, "folded"]
        what = "repeat a text of the same split" if name == other else f"are also in {other}"
        if folded:
            share = f"{folded:,} ({folded / len(splits[name]):.1%})"
            what += f"; {share} if case, width and spaces are ignored"
            lines.append(f"{name}: {exact:,} rows {what}")
    if texts := counts["texts"]:
        lines.append(f"{texts:,} texts, in {counts['rows']:,} rows, have different labels")
    return lines + [_example(splits, tokenizer, text) for text in contradicting if tokenizer]


def _example(splits: Splits, tokenizer: Any, text_hash: int) -> str:
    """A text with several labels, as its tokens have it, and how often it has which."""
    text, label_counts = "", Counter[str]()
    for name, store in splits.items():
        rows = np.flatnonzero(store.values("folded") == text_hash)
        if len(rows) and not text:
            row = rows[store.values("exact", rows).argmin()]  # in any order of rows the same
            tokens = store.inputs(np.array([row]))["input_ids"][0]
            text = " ".join(tokenizer.decode(tokens, skip_special_tokens=True).split())
        for label in store.label_ids(rows):  # an id, or 0 and 1 for each label
            ids = np.flatnonzero(label) if store.multi_label else [label]
            names = " + ".join(store.labels[i] for i in ids) or "no label"
            label_counts[f"{names!r} in {name}"] += 1
    shown = sorted(f"{count} x {label}" for label, count in label_counts.items())
    return f"  {text[:60]}{'...' if len(text) > 60 else ''}: {', '.join(shown)}"


def compare_texts(splits: Splits) -> tuple[Counter[Any], list[int]]:
    """What is repeated, as counts, and the hashes of a few texts with different labels.

    (a, a, kind): rows of split a beyond the first with their text; (a, b, kind): rows of b whose
    text is in a. Kind: exact or folded. "texts" with different labels, and their "rows".
    """
    counts, examples = Counter[Any](), list[int]()
    set_keys = np.random.default_rng(0).integers(2**63, size=len(splits["train"].labels))
    parts = math.ceil(sum(map(len, splits.values())) / ROWS_COMPARED_AT_A_TIME)
    bounds = [2**64 * i // parts for i in range(parts + 1)]
    folded = {name: store.values("folded") for name, store in splits.items()}
    for low, high in itertools.pairwise(bounds):  # all rows of a text are in the same part
        rows = {k: np.flatnonzero((n >= low) & (n <= high - 1)) for k, n in folded.items()}
        split = np.repeat(np.arange(len(splits)), list(map(len, rows.values())))
        for kind in ("exact", "folded"):
            hashes = np.concatenate([s.values(kind, rows[k]) for k, s in splits.items()])
            texts, first, text = np.unique(hashes, return_index=True, return_inverse=True)
            text_rows = np.zeros((len(texts), len(splits)), np.int64)  # of each text in each split
            np.add.at(text_rows, (text, split), 1)
            in_split = dict(zip(splits, text_rows.T, strict=True))
            for a, b in itertools.combinations_with_replacement(splits, 2):
                again = (in_split[a] - 1).clip(0) if a == b else in_split[b][in_split[a] > 0]
                counts[a, b, kind] += int(again.sum())
        labels = np.concatenate([s.label_ids(rows[k]) for k, s in splits.items()])
        if labels.ndim == 2:  # a number for each set of labels
            labels = np.einsum("ij,j->i", labels, set_keys)
        several = np.unique(text[labels != labels[first[text]]])  # texts with different labels
        counts.update(texts=len(several), rows=int(text_rows[several].sum()))
        examples += texts[several[:5]].tolist()
    return counts, examples[:5]


def parse() -> tuple[Path, TrainConfig]:
    """The folder of --report, and the settings."""
    usage = "python data.py --report [FOLDER] [flags of train.py]"
    parser = argparse.ArgumentParser(usage=usage, add_help=False, allow_abbrev=False)
    parser.add_argument("--report", nargs="?", const=".", type=Path, required=True)
    options, flags = parser.parse_known_args()
    return options.report, parse_args(flags)


def main(folder: Path, config: TrainConfig, source: ModuleType, model: ModuleType) -> None:
    """Print the report on the rows of `source` (data.py), and write it as text and picture."""
    from training.checkpoint.pretrained import load_hf_config, longest_input
    from training.dataset.build import open_splits
    from training.dataset.source import Source
    from training.dataset.tokenizer import prepare_tokenizer

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # it may lack characters of labels
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("training").setLevel(logging.INFO)
    try:
        rows = Source(source, config)
        tokenizer = prepare_tokenizer(rows, model.build_tokenizer)
        splits = open_splits(rows, tokenizer)
        longest = 512  # memory grows with the square: more is not suggested unless it is usual
        if config.model != FROM_SCRATCH:
            longest = min(longest_input(load_hf_config(config)), 8192)
        sections = describe(config, splits, tokenizer, longest)
        text = "\n".join("\n  ".join([title, *lines]) + "\n" for title, lines in sections.items())
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "data_report.txt").write_text(text, encoding="utf-8")
        draw_rows(splits, sections, folder / "data_report.png")
        print(f"\n{text}\nwritten: {folder / 'data_report.txt'}, and .png")
    except (UserError, OSError) as error:
        sys.exit(f"data.py: {error}")


def describe(config: TrainConfig, splits: Splits, tokenizer: Any, longest: int) -> Sections:
    """The lines of the report by title. `longest`: the most tokens that may be suggested."""
    name = Path(config.train_file[0]).name if config.train_file else "data.py"
    title = f"{name}: {len(splits['train'].labels)} classes"
    return {
        title: _class_table(splits),
        "Tokens of a row, special ones included": _length_table(splits, config.max_length),
        "Worth a look": remarks(splits, tokenizer) or ["nothing found"],
        "Suggestions": suggestions(config, splits["train"], longest),
    }


def _class_table(splits: Splits) -> list[str]:
    """Rows and share of each class in each split, the largest classes first."""
    labels, row = splits["train"].labels, "{:>22}" * len(splits)
    counts = {name: store.label_counts() for name, store in splits.items()}
    lines = [row.format(*(f"{name} {len(store):,}" for name, store in splits.items()))]
    for i in np.argsort(-counts["train"], kind="stable")[:MAX_CLASSES]:
        cells = [f"{n[i]:,}{n[i] / len(splits[name]):>9.1%}" for name, n in counts.items()]
        lines.append(f"{row.format(*cells)}   {labels[i]}")
    if len(labels) > MAX_CLASSES:
        lines.append(f"and {len(labels) - MAX_CLASSES} smaller classes")
    return lines


def _length_table(splits: Splits, max_length: int) -> list[str]:
    """How long the rows of each split are before they are cut, and how train's are distributed."""
    cuts = sorted({64, 128, 256, 512, max_length})
    titles = ["", "mean", "50 %", "90 %", "99 %", "max", *(f"> {cut}" for cut in cuts)]
    row = "{:>8}" * len(titles)
    lines = [row.format(*titles)]
    for name, store in splits.items():
        full = store.values("full_length")
        points = np.percentile(full, (50, 90, 99, 100), method="inverted_cdf")
        cells = [*(f"{n:,}" for n in points), *(f"{(full > cut).mean():.1%}" for cut in cuts)]
        lines.append(row.format(name, f"{full.mean():,.1f}", *cells))
    full = splits["train"].values("full_length")
    shares = np.bincount(np.ceil(np.log2(np.maximum(full, 1))).astype(int)) / len(full)
    bars = [f"{2**i:>8,}{s:>8.1%} {'#' * round(60 * s)}" for i, s in enumerate(shares) if s]
    return [*lines, "train rows of up to N tokens, and of more than N / 2, for each N", *bars]


def suggestions(config: TrainConfig, train: Any, longest: int) -> list[str]:
    """Settings that fit the rows, with the reason; padding and steps under the present ones."""
    import torch

    from training.step.batch_plan import BatchPlan

    full, ranks = train.values("full_length"), max(1, torch.accelerator.device_count())
    needed = math.ceil(max(8, int(np.percentile(full, 99, method="inverted_cdf"))) / 8) * 8
    length, sizes = min(needed, longest), batch_sizes(config, ranks)
    rank_rows = math.ceil(sizes.global_batch_size / ranks)
    batch_size = 1 << max(1, min(FORWARD_TOKENS // length, rank_rows)).bit_length() - 1
    kept = f"--max-length {length}: {(full <= length).mean():.1%} of the train rows stay whole"
    needs = f"; 99 % would need {needed:,}" if length < needed else ""
    fill = f"a rank has {rank_rows} rows in a step, and a forward should have up to"
    lower = "if memory runs out, lower it: the result stays the same"
    lines = [kept + needs, f"--batch-size {batch_size}: {fill} {FORWARD_TOKENS:,} tokens; {lower}"]
    for flag, grouped in (("--group-by-length", True), ("--no-group-by-length", False)):
        plan = BatchPlan(
            train, sizes, seed=config.seed, group_by_length=grouped, num_replicas=ranks, rank=0
        )
        steps = itertools.islice((m for m in plan if m.ends_step), 200)
        tokens, computed = np.sum([(m.step_tokens, m.step_padded_tokens) for m in steps], axis=0)
        lines.append(f"{flag}: {1 - tokens / computed:.1%} of the computed tokens are padding")
    per_epoch = plan.steps_per_epoch
    total = f"{config.max_steps or config.epochs * per_epoch:,} steps, {per_epoch:,} in an epoch"
    return [*lines, f"{total}, of {sizes.global_batch_size} rows each, on {ranks} ranks"]
