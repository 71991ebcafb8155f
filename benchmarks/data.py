"""How fast and how lean the path from files to batches is, beside the bare libraries.

    python benchmarks/data.py all --data FOLDER          # every table, on the rows of FOLDER
    python benchmarks/data.py loading start --rounds 5   # some of them, on the sample rows
    python benchmarks/data.py memory --scale 0.01        # a quick try, with fewer rows

FOLDER may hold trec_train.tsv and articles_zh_train.jsonl; without it, the sample's texts are used.
What is compared does the same work in the same run, in turn: a ratio is the median of the rounds'
ratios. --write keeps the tables in data.md, and the plot of memory in the project's docs/.
"""

import argparse
import csv
import importlib
import importlib.util
import itertools
import json
import os
import platform
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pretrained
from peers import command

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "{{cookiecutter.project_slug}}"
TABLE = Path(__file__).with_suffix(".md")
PLOT = ROOT / "docs" / "data_memory.png"
MIB = 1 << 20
LABELS = ("ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM")
sys.path.insert(0, str(PROJECT))  # before this folder, whose data.py is not the project's

Line = tuple[str, str, str, bool | None]  # what, measured, target, whether it is met


# -- what all of them need -----------------------------------------------------------------------


def tokenizer_of(folder: Path | str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def settings(work: Path, *files: Path, **values: Any) -> Any:
    from training.settings.config import TrainConfig

    return TrainConfig(
        train_file=tuple(map(str, files)), cache_dir=str(work / "cache"),
        **{"model": str(pretrained.needed()), "val_fraction": 0.0} | values,
    )  # fmt: skip


def rows_of(path: Path) -> list[tuple[str, str]]:
    """(text, label) of a file, as the project reads it."""
    from training.dataset.readers import read_files
    from training.dataset.rows import ReadReport, good_rows
    from training.settings.config import TrainConfig

    items = read_files([str(path)], "train", TrainConfig())
    rows = good_rows(items, "error", ReadReport())
    return [(str(row.text), str(row.label)) for row in rows]


def short_texts(data: Path | None) -> Path:
    return (data / "trec_train.tsv") if data else PROJECT / "sample" / "train.tsv"


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def child(name: str, *arguments: Any) -> Any:
    """What one of CHILDREN returns when it runs in a process of its own."""
    command = [sys.executable, __file__, "--child", name, *map(str, arguments)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def middle(values: list[float], form: str = ".2f") -> str:
    """The median, and between which values it stands."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):{form}} ({low:{form}} to {high:{form}})"


# -- tokenize ------------------------------------------------------------------------------------


def tokenize(options: argparse.Namespace) -> list[Line]:
    """From file to token store, against encode_batch on the same texts and threads."""
    import data
    from training.dataset.build import open_splits
    from training.dataset.source import Source

    rng = random.Random(0)
    found = [text.split() for text, _ in rows_of(short_texts(options.data))]
    words = [word for text in found for word in text]
    count = int(200_000 * options.scale)
    texts = [" ".join(rng.choices(words, k=len(rng.choice(found)))) for _ in range(count)]
    rows = [(text, LABELS[i % len(LABELS)]) for i, text in enumerate(texts)]
    table, lines = options.work / "rows.csv", options.work / "rows.jsonl"
    with table.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([("text", "label"), *rows])
    with lines.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"text": t, "label": n}) + "\n" for t, n in rows)

    bare = tokenizer_of(pretrained.needed()).backend_tokenizer
    bare.no_padding()
    bare.enable_truncation(128)
    ours = tokenizer_of(pretrained.needed())

    def encode(name: str) -> None:
        for i in range(0, count, 1000):  # as `datasets.map(batched=True)` does
            getattr(bare, name)(texts[i : i + 1000])

    def build(path: Path) -> None:
        shutil.rmtree(options.work / "cache", ignore_errors=True)
        open_splits(Source(data, settings(options.work, path)), ours)

    work: dict[str, Callable[[], None]] = {
        "encode_batch": lambda: encode("encode_batch"),
        "CSV": lambda: build(table),
        "JSONL": lambda: build(lines),
        "encode_batch_fast": lambda: encode("encode_batch_fast"),
    }
    encode("encode_batch_fast")  # warm
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(options.rounds):
        for name, function in work.items():
            seconds[name].append(timed(function))
    bare_names = ("encode_batch", "encode_batch_fast")
    out: list[Line] = [
        (f"bare `{name}`, {count:,} texts of {len(words) / len(found):.0f} words on average",
         f"{count / statistics.median(seconds[name]):,.0f} rows/s", "", None)
        for name in bare_names
    ]  # fmt: skip
    for name, (other, target) in itertools.product(
        ("CSV", "JSONL"), zip(bare_names, (0.8, None), strict=True)
    ):
        taken = seconds[name]
        ratios = [b / a for a, b in zip(taken, seconds[other], strict=True)]
        met = None if target is None else statistics.median(ratios) >= target
        out.append((f"{name} file to store: {count / statistics.median(taken):,.0f} rows/s; "
                    f"against `{other}`", middle(ratios), f">= {target}" if target else "",
                    met))  # fmt: skip
    return out


# -- memory --------------------------------------------------------------------------------------


def memory(options: argparse.Namespace) -> list[Line]:
    """The builder's peak, and what ranks and loader workers hold while they train."""
    sizes = [int(n * options.scale) for n in (50_000, 500_000, 5_000_000)]
    tiny = options.work / "tiny"
    child("tiny_model", tiny)
    built, epoch, trained = {}, {}, {}
    for n in sizes:
        path = options.work / f"{n}.tsv"
        write_rows(path, n)
        built[n] = child("build", options.work, path, tiny)
        print(f"  {n:,} rows: built {built[n]}", flush=True)
        epoch[n] = watch("--child", "epoch", options.work, path, tiny)
        print(f"  {n:,} rows: an epoch's batches, RssAnon {epoch[n]}", flush=True)
        flags = [
            "--train-file", path, "--val-fraction", 0.01, "--cache-dir", options.work / "cache",
            "--runs-dir", options.work / "runs", "--run-name", n, "--model", tiny,
            "--max-length", 64, "--global-batch-size", 1024, "--batch-size", 256,
            "--eval-batch-size", 256, "--num-workers", 2, "--max-steps", 20,
        ]  # fmt: skip
        trained[n] = watch(PROJECT / "train.py", *flags)
        print(f"  {n:,} rows: train.py, RssAnon {trained[n]}", flush=True)
    first, last = sizes[0], sizes[-1]
    peak = built[last]["peak"]
    out: list[Line] = [
        (f"building the store of {last:,} rows, split included: peak RSS "
         f"({built[last]['imports'] / MIB:.0f} MiB of it after imports)",
         f"{peak / MIB:,.0f} MiB", "< 1,024 MiB", peak < 1024 * MIB),
    ]  # fmt: skip
    for what, found in (("an epoch's batches", epoch), ("train.py, 20 steps", trained)):
        for who in ("rank", "worker"):
            grown = found[last][who] - found[first][who]
            steps = " to ".join(f"{found[n][who] / MIB:.0f}" for n in sizes)
            out.append((f"{what}, 2 workers: RssAnon of the {who}, {steps} MiB; growth",
                        f"{grown / MIB:.1f} MiB", "< 100 MiB", grown < 100 * MIB))  # fmt: skip
    if options.write:
        draw(sizes, built, epoch, trained)
    return out


def write_rows(path: Path, count: int) -> None:
    """Short rows: three to nine words. Every row is another."""
    rng = random.Random(0)
    words = [word for text, _ in rows_of(short_texts(None)) for word in text.split()]
    with path.open("w", encoding="utf-8") as file:
        file.write("text\tlabel\n")
        for i in range(count):
            at = rng.randrange(len(words) - 8)
            file.write(f"{' '.join(words[at : at + 2 + i % 7])} {i}\t{LABELS[i % len(LABELS)]}\n")


def tiny_model(folder: str) -> None:
    """A model of a few thousand weights beside the embeddings, with the pretrained tokenizer."""
    from transformers import BertConfig, BertForSequenceClassification

    tokenizer = tokenizer_of(pretrained.needed())
    config = BertConfig(vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=1,
                        num_attention_heads=1, intermediate_size=16)  # fmt: skip
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def open_rows(work: str, path: str, model: str) -> Any:
    """The training rows of a file whose validation rows are split off."""
    import data
    from model import build_tokenizer
    from training.dataset.build import open_splits
    from training.dataset.source import Source

    config = settings(Path(work), Path(path), model=model, val_fraction=0.01, max_length=64)
    return open_splits(Source(data, config), build_tokenizer(config, iter(())))["train"]


def build(work: str, path: str, model: str) -> dict[str, float]:
    for name in ("model", "training.dataset.build"):  # what a run imports
        importlib.import_module(name)
    imports = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    seconds = timed(lambda: open_rows(work, path, model))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"imports": imports, "peak": peak, "seconds": seconds}


def epoch(work: str, path: str, model: str) -> int:
    """All batches of an epoch, as train.py takes them."""
    from torch.utils.data import DataLoader
    from training.settings.batch_sizes import BatchSizes
    from training.step.batch_plan import BatchPlan

    store = open_rows(work, path, model)
    plan = BatchPlan(store, BatchSizes(1024, 256, 4), seed=0, num_replicas=1, rank=0)
    loader = DataLoader(store, sampler=plan, batch_size=None, num_workers=2)
    rows = sum(len(batch.labels) for batch in loader)
    assert rows == len(store)
    return rows


def watch(*command: Any) -> dict[str, int]:
    """The most anonymous memory (RssAnon) of a Python process and of any of its children."""
    if command[0] == "--child":
        command = (__file__, *command)
    with (Path(tempfile.gettempdir()) / f"watched-{os.getpid()}.txt").open("w+") as output:
        process = subprocess.Popen([sys.executable, *map(str, command)], stdout=output,
                                   stderr=subprocess.STDOUT, cwd=PROJECT)  # fmt: skip
        most = {"rank": 0, "worker": 0}
        while process.poll() is None:
            most["rank"] = max(most["rank"], anonymous(process.pid))
            workers = map(anonymous, children(process.pid))
            most["worker"] = max(most["worker"], *workers, 0)
            time.sleep(0.02)
        output.seek(0)
        if process.returncode:
            sys.exit(output.read())
    Path(output.name).unlink()
    return most


def anonymous(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:  # it has just ended
        return 0
    return next((int(s.split()[1]) * 1024 for s in status.splitlines() if "RssAnon" in s), 0)


def children(pid: int) -> list[int]:
    try:
        lists = [p.read_text() for p in Path(f"/proc/{pid}/task").glob("*/children")]
    except OSError:
        return []
    return [int(number) for text in lists for number in text.split()]


def draw(sizes: list[int], built: Any, epoch: Any, trained: Any) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    lines = {
        "builder of the store: peak RSS": [built[n]["peak"] for n in sizes],
        "train.py: RssAnon of the rank": [trained[n]["rank"] for n in sizes],
        "train.py: RssAnon of a worker": [trained[n]["worker"] for n in sizes],
        "an epoch's batches: RssAnon of the rank": [epoch[n]["rank"] for n in sizes],
        "an epoch's batches: RssAnon of a worker": [epoch[n]["worker"] for n in sizes],
    }
    for label, values in lines.items():
        axes.plot(sizes, [v / MIB for v in values], marker="o", label=label)
    axes.axhline(1024, color="grey", linestyle=":", label="limit of the builder")
    axes.set_xscale("log")
    axes.set_xticks(sizes, [f"{n:,}" for n in sizes])
    axes.minorticks_off()
    axes.set_ylim(0, 1100)
    axes.set_xlabel("rows")
    axes.set_ylabel("MiB")
    axes.set_title("Memory against rows", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc=(0.02, 0.55))
    PLOT.parent.mkdir(exist_ok=True)
    figure.savefig(PLOT, dpi=120)


# -- plan ----------------------------------------------------------------------------------------


class FakeRows:
    """Rows whose lengths are computed: as many as wanted, and no memory.

    Lengths are like those of texts: most are short, a few very long (log-normal, cut at 512).
    """

    def __init__(self, count: int) -> None:
        import numpy as np

        self.count = count
        normal = statistics.NormalDist(3.2, 0.8)
        at = [normal.inv_cdf((i + 0.5) / 4096) for i in range(4096)]
        self.kinds = np.clip(np.exp(at), 3, 512).astype(np.int64)

    def __len__(self) -> int:
        return self.count

    def lengths(self, rows: Any) -> Any:
        import numpy as np

        mixed = rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        return self.kinds[(mixed >> np.uint64(52)).astype(np.int64)]


def plan_of(rows: int, global_batch: int, ranks: int) -> Any:
    from training.settings.batch_sizes import BatchSizes
    from training.step.batch_plan import BatchPlan

    micro = min(16, -(-global_batch // ranks))
    sizes = BatchSizes(global_batch, micro, -(-global_batch // (micro * ranks)))
    store: Any = FakeRows(rows)
    return BatchPlan(store, sizes, seed=0, num_replicas=ranks, rank=0)


def plan(options: argparse.Namespace) -> list[Line]:
    """The order of an epoch: time and memory, at five million rows and at a billion."""
    small = child("plan_cost", int(5e6 * options.scale), 32, 2, 1.0)
    large = child("plan_cost", 10**9, 16_384, 1024, 0.0)
    spread = child("imbalance", 10**9, 16_384, 1024)
    rows = int(5e6 * options.scale)
    return [
        (f"{rows:,} rows, global batch 32: first batch of an epoch", ms(small["first"]), "", None),
        ("the same, resumed in the middle of the epoch", ms(small["middle"]),
         "as the first", small["middle"] < 3 * small["first"] + 0.005),
        ("the same, resumed at its end", ms(small["last"]), "as the first",
         small["last"] < 3 * small["first"] + 0.005),
        (f"the whole order of the epoch ({small['steps']:,} global batches)",
         f"{small['order']:.2f} s ({small['order_cpu']:.2f} s of a core)", "< 3 s",
         small["order"] < 3),
        ("peak memory of making it", f"{small['peak'] / MIB:.1f} MiB", "< 100 MiB",
         small["peak"] < 100 * MIB),
        ("walking the epoch as a rank does, all micro-batches dealt: per step",
         ms(small["step"]), "", None),
        ("1,000,000,000 rows, 1,024 ranks, global batch 16,384: first batch, also in the middle",
         f"{ms(large['first'])}, {ms(large['middle'])}", "", None),
        ("the same: a window of 64 steps; per step, dealing included",
         f"{ms(large['window'])}; {ms(large['step'])}", "", None),
        ("the same: peak memory", f"{large['peak'] / MIB:.1f} MiB", "< 100 MiB",
         large["peak"] < 100 * MIB),
        ("the same: padded tokens of the busiest rank over the mean, per step: median, worst",
         f"{spread['median']:.3f}, {spread['worst']:.3f}", "", None),
        ("rows only shuffled, as DistributedSampler deals them: median, worst",
         f"{spread['random_median']:.3f}, {spread['random_worst']:.3f}", "", None),
        ("padding of the plan, and of rows only shuffled",
         f"{100 * spread['padding']:.1f} %, {100 * spread['random_padding']:.1f} %", "", None),
    ]  # fmt: skip


def ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"


def plan_cost(rows: str, global_batch: str, ranks: str, whole: str) -> dict[str, float]:
    """Seconds and bytes of the plan's parts; the whole order only where it is wanted."""
    args = int(rows), int(global_batch), int(ranks)
    plan = plan_of(*args)
    next(iter(plan))  # warm
    cost: dict[str, float] = {"steps": plan.steps_per_epoch}
    for name, at in (("first", 0), ("middle", plan.steps_per_epoch // 2),
                     ("last", plan.steps_per_epoch - 1)):  # fmt: skip

        def begin(at: int = at) -> None:
            plan = plan_of(*args)
            plan.set_epoch(1, at)
            next(iter(plan))

        cost[name] = statistics.median(timed(begin) for _ in range(5))
    windows = range(plan.steps_per_epoch // 64 + 1 if float(whole) else 5)
    cost["order_cpu"] = -time.process_time()
    cost["order"] = timed(lambda: sum(len(plan._batches_of(0, w)) for w in windows))
    cost["order_cpu"] += time.process_time()
    cost["window"] = cost["order"] / len(windows)
    plan.set_epoch(1, plan.steps_per_epoch // 3)
    steps = 640 if float(whole) else 128
    micro = steps * plan.sizes.gradient_accumulation_steps
    cost["step"] = timed(lambda: sum(1 for _ in itertools.islice(plan, micro))) / steps
    tracemalloc.start()
    for at in range(0, plan.steps_per_epoch, max(1, plan.steps_per_epoch // 50)):
        plan.set_epoch(2, at)
        next(iter(plan))
    cost["peak"] = tracemalloc.get_traced_memory()[1]
    return cost


def imbalance(rows: str, global_batch: str, ranks: str) -> dict[str, float]:
    """How far apart the padded tokens of ranks are that work at the same time."""
    import numpy as np
    from training.step.batch_plan import shuffled

    plan = plan_of(int(rows), int(global_batch), int(ranks))
    size = int(global_batch)
    found: dict[str, list[float]] = {"": [], "random_": []}  # the busiest over the mean
    padded = {"": 0, "random_": 0}
    tokens = dict(padded)
    for step in range(0, 64, 4):
        batch = plan.global_batch(step)
        shares = []
        for rank in range(plan.num_replicas):
            plan.rank = rank
            shares.append([len(m.rows) * plan.store.lengths(m.rows).max()
                           for m in plan._deal(batch)])  # fmt: skip
        other = shuffled(np.arange(step * size, (step + 1) * size), int(rows), (1,))
        dealt = plan.store.lengths(other).reshape(plan.num_replicas, -1)
        computed = {"": np.array(shares), "random_": dealt.max(1, keepdims=True) * dealt.shape[1]}
        for kind, of_ranks in computed.items():  # (ranks, micro-batches)
            found[kind].append(float((of_ranks.max(axis=0) / of_ranks.mean(axis=0)).max()))
            padded[kind] += int(of_ranks.sum())
            tokens[kind] += int(plan.store.lengths(other if kind else batch).sum())
    return {
        f"{kind}{name}": value
        for kind, ratios in found.items()
        for name, value in (
            ("median", statistics.median(ratios)),
            ("worst", max(ratios)),
            ("padding", 1 - tokens[kind] / padded[kind]),
        )
    }


# -- loading -------------------------------------------------------------------------------------


def loading(options: argparse.Namespace) -> list[Line]:
    """Rows a second of a loader without workers, against a list of encoded rows and a collator."""
    import data
    import torch
    from torch.utils.data import DataLoader
    from training.dataset.build import open_splits
    from training.dataset.source import Source
    from training.settings.batch_sizes import BatchSizes
    from training.step.batch_plan import BatchPlan
    from transformers import DataCollatorWithPadding

    torch.set_num_threads(1)
    files = [(short_texts(options.data), 128)]
    if options.data:
        files.append((options.data / "articles_zh_train.jsonl", 512))
    out: list[Line] = []
    for path, max_length in files:
        tokenizer = tokenizer_of(pretrained.needed())
        rows = rows_of(path)
        names = sorted({label for _, label in rows})
        encoded = tokenizer([text for text, _ in rows], truncation=True, max_length=max_length)
        listed = [{"input_ids": ids, "attention_mask": [1] * len(ids), "labels": names.index(label)}
                  for ids, (_, label) in zip(encoded["input_ids"], rows, strict=True)]  # fmt: skip
        config = settings(options.work, path, max_length=max_length)
        store = open_splits(Source(data, config), tokenizer)["train"]
        loaders: dict[str, Any] = {
            "a list and DataCollatorWithPadding": DataLoader(
                listed, 16, shuffle=True,  # type: ignore
                collate_fn=DataCollatorWithPadding(tokenizer_of(pretrained.needed())),
            )
        }  # fmt: skip
        for grouped in (True, False):
            plan = BatchPlan(store, BatchSizes(32, 16, 2), seed=0, group_by_length=grouped,
                             num_replicas=1, rank=0)  # fmt: skip
            name = "ours" if grouped else "ours, --no-group-by-length"
            loaders[name] = DataLoader(store, sampler=plan, batch_size=None)  # as in train.py
        rates: dict[str, list[float]] = {name: [] for name in loaders}
        for _ in range(options.rounds):
            for name, loader in loaders.items():
                rates[name].append(rate(loader, max(1, round(options.scale * 30_000 / len(rows)))))
        bare = rates.pop("a list and DataCollatorWithPadding")
        out.append((f"{path.name}, {len(rows):,} rows, 16 rows a batch: a list and "
                    "`DataCollatorWithPadding`", f"{statistics.median(bare):,.0f} rows/s", "",
                    None))  # fmt: skip
        for name, found in rates.items():
            ratios = [a / b for a, b in zip(found, bare, strict=True)]
            met = statistics.median(ratios) >= 5 if name == "ours" else None
            out.append((f"{name}: {statistics.median(found):,.0f} rows/s; against the list",
                        middle(ratios), ">= 5" if name == "ours" else "", met))  # fmt: skip
    return out


def rate(loader: Any, epochs: int) -> float:
    """Rows a second, without the first batch."""
    rows, began = 0, 0.0
    for _ in range(epochs):
        batches: Iterator[Any] = iter(loader)
        if not began:
            next(batches)
            began = time.perf_counter()
        for batch in batches:
            rows += len(batch["labels"] if hasattr(batch, "keys") else batch.labels)
    return rows / (time.perf_counter() - began)


# -- start ---------------------------------------------------------------------------------------


def start(options: argparse.Namespace) -> list[Line]:
    """From the command to the first step, on rows that are tokenized already."""
    path, model = short_texts(options.data), pretrained.needed()
    bare = [
        sys.executable, "-c",
        "import sys, torch, transformers\n"
        "from transformers import AutoModelForSequenceClassification as Model\n"
        "Model.from_pretrained(sys.argv[1], num_labels=6)\n"
        "print('loaded', flush=True)", str(model),
    ]  # fmt: skip
    ours = [
        sys.executable, str(PROJECT / "train.py"), "--train-file", str(path), "--model", str(model),
        "--val-fraction", "0", "--max-steps", "1", "--log-every", "1", "--cache-dir",
        str(options.work / "cache"), "--runs-dir", str(options.work / "runs"),
    ]  # fmt: skip
    list(reached(ours, ["training to step"]))  # tokenizes
    found: dict[str, list[float]] = {"bare": [], "ready": [], "step": []}
    for _ in range(options.rounds):
        found["bare"] += reached(bare, ["loaded"])
        ready, step = reached(ours, ["training to step", "step 1 of 1 "])
        found["ready"].append(ready)
        found["step"].append(step)
    out: list[Line] = [("bare: import torch and transformers, load the model",
                        f"{statistics.median(found['bare']):.2f} s", "", None)]  # fmt: skip
    for name, what in (("ready", "ready for the first step"), ("step", "first step done")):
        ratios = [a / b for a, b in zip(found[name], found["bare"], strict=True)]
        met = statistics.median(ratios) <= 1.3 if name == "ready" else None
        out.append((f"train.py, second run, {what}: {statistics.median(found[name]):.2f} s; "
                    "against bare", middle(ratios), "<= 1.3" if name == "ready" else "",
                    met))  # fmt: skip
    return out


def reached(command: list[str], marks: list[str]) -> list[float]:
    """Seconds until each of these is printed."""
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                               text=True, cwd=PROJECT)  # fmt: skip
    seconds: list[float] = []
    assert process.stdout is not None
    for line in process.stdout:
        if len(seconds) < len(marks) and marks[len(seconds)] in line:
            seconds.append(time.perf_counter() - began)
    if process.wait() or len(seconds) < len(marks):
        sys.exit(f"{command} did not get as far as {marks[len(seconds) :]}")
    return seconds


# -- the command ---------------------------------------------------------------------------------

BENCHMARKS = {"tokenize": tokenize, "memory": memory, "plan": plan, "loading": loading,
              "start": start}  # fmt: skip
CHILDREN: dict[str, Callable[..., Any]] = {
    "tiny_model": tiny_model, "build": build, "epoch": epoch, "plan_cost": plan_cost,
    "imbalance": imbalance,
}  # fmt: skip


def as_markdown(name: str, lines: list[Line]) -> str:
    import torch
    import transformers

    words = {None: "", True: "yes", False: "**no**"}
    doc = BENCHMARKS[name].__doc__ or ""
    machine = (f"{os.cpu_count()} CPU cores, Python {platform.python_version()}, torch "
               f"{torch.__version__}, transformers {transformers.__version__}")  # fmt: skip
    rows = "".join(f"| {what} | {value} | {target} | {words[met]} |\n"
                   for what, value, target, met in lines)  # fmt: skip
    return (f"## {name}\n{doc}\n\n    {command()}\n\n{machine}.\n\n"
            f"| what | measured | target | met |\n|---|---|---|---|\n{rows}")  # fmt: skip


def keep(name: str, text: str) -> None:
    """Put a table in the place of the one that was there."""
    title = "# From files to batches: as measured\n"
    parts = (TABLE.read_text(encoding="utf-8") if TABLE.exists() else title).split("\n## ")
    kept = {part.split("\n")[0]: f"## {part.strip()}\n" for part in parts[1:]}
    kept[name] = text
    ordered = [kept[n] for n in BENCHMARKS if n in kept]
    TABLE.write_text("\n".join([title, *ordered]), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", nargs="+", choices=[*BENCHMARKS, "all"])
    parser.add_argument("--data", type=Path, help="folder with trec_train.tsv and the articles")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the rows, for a try")
    parser.add_argument("--work", type=Path, help="folder for rows and stores (a temporary one)")
    parser.add_argument("--write", action="store_true", help="keep the tables and the plot")
    options = parser.parse_args()
    options.data = options.data and options.data.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        base = options.work or Path(temporary)
        for name in BENCHMARKS if "all" in options.what else options.what:
            options.work = base / name
            options.work.mkdir(parents=True, exist_ok=True)
            text = as_markdown(name, BENCHMARKS[name](options))
            print(text, flush=True)
            if options.write:
                keep(name, text)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(CHILDREN[sys.argv[2]](*sys.argv[3:])))
    else:
        main()
