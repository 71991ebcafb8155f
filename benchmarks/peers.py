"""How fast and how lean the project trains, beside other ways of doing the same.

    python benchmarks/peers.py --data FOLDER --write      # the whole comparison
    python benchmarks/peers.py --rows 200 --rounds 1      # a quick try, on the sample's rows
    python benchmarks/peers.py --only trainer ours        # some of the systems

FOLDER may hold trec_train.tsv, articles_zh_train.jsonl, and _val files beside them. The systems are
in systems/, each used as its own documentation describes. They train the same pretrained model on
the same rows in two CPU processes with one thread each, in turn, with nothing cached before.
--write keeps the tables in peers.md and a picture in the project's docs/.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pretrained

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "{{cookiecutter.project_slug}}"
SYSTEMS = Path(__file__).resolve().parent / "systems"
TABLE = Path(__file__).with_suffix(".md")
PICTURE = ROOT / "docs" / "peers.png"
MIB = 1 << 20
RANKS = 2
GLOBAL_BATCH = 32
SEEDS, EPOCHS, LR = (1, 2, 3), 2, 2e-4  # of the runs that compare what (f) and (g) learn
NUMBERS = 3  # steps whose loss and gradient norm are shown
WAYS = [(1, 1), (1, 4), (2, 1), (2, 4)]  # ranks and accumulation, of the same global batch


@dataclass
class System:
    title: str
    script: str  # in systems/; empty: the project's launch.sh
    asked: dict[str, Any] = field(default_factory=dict)


TRAINER = "hf_trainer.py"
NAMES = {
    "trainer": System("(a) HF Trainer, dynamic padding", TRAINER, {"sampling": "random"}),
    "grouped": System("(b) HF Trainer, grouped by length", TRAINER,
                      {"sampling": "group_by_length"}),
    "accelerate": System("(c) Accelerate loop", "accelerate_loop.py"),
    "lightning": System("(d) Lightning, ddp", "lightning_ddp.py"),
    "bare": System("(e) the limit: bare DDP, tensors ready", "bare_ddp.py"),
    "ours": System("(f) ours, launch.sh", ""),
    "frozen": System("(g) ours, --freeze-embeddings", "", {"flags": ["--freeze-embeddings"]}),
}  # fmt: skip


@dataclass
class Rows:
    """A data set: two JSONL files of text and label."""

    name: str
    train: Path
    val: Path
    labels: list[str]
    count: int
    val_count: int
    max_length: int
    targets: dict[str, float]  # ours is to have this many times the samples/s of a system


@dataclass
class Measured:
    """One run over an epoch. Memory is that of the rank that has most."""

    samples: float  # of both ranks, a second
    tokens: float  # of texts, without padding, a second
    padding: float  # share of what was computed
    trained_peak: float  # bytes, when the last step was over
    peak: float  # bytes, at the end
    first: float  # seconds from the command to the end of the first step
    epoch: float | None  # seconds from the first forward to the end of the epoch's evaluation
    whole: float  # seconds from the command to its end


# -- rows ----------------------------------------------------------------------------------------


def data_sets(options: argparse.Namespace) -> list[Rows]:
    if options.data is None:
        sample = PROJECT / "sample"
        return [prepare("sample", sample / "train.tsv", sample / "val.tsv", 2000, 128, {}, options)]
    folder = options.data
    # TREC's texts are short and differ in length; the articles are cut to one length.
    trec = {"trainer": 1.45, "grouped": 1.08, "accelerate": 1.9, "lightning": 1.8, "bare": 0.97,
            "frozen": 1.12}  # fmt: skip
    articles = dict.fromkeys(("trainer", "grouped", "accelerate", "lightning"), 1.0)
    known = [
        ("TREC", "trec_train.tsv", "trec_val.tsv", 2000, 128, trec),
        ("articles", "articles_zh_train.jsonl", "articles_zh_val.jsonl", 200, 256,
         {**articles, "bare": 0.97}),
    ]  # fmt: skip
    found = [
        prepare(name, folder / train, folder / val, rows, length, targets, options)
        for name, train, val, rows, length, targets in known
        if (folder / train).exists() and name in options.sets
    ]
    return found or sys.exit(f"neither trec_train.tsv nor articles_zh_train.jsonl is in {folder}")


def prepare(
    name: str, train: Path, val: Path, count: int, max_length: int, targets: dict[str, float],
    options: argparse.Namespace,
) -> Rows:  # fmt: skip
    """Draw rows and write them as all systems read them. A fourth as many are for validation."""
    rng = random.Random(0)
    rows = read(train)
    rng.shuffle(rows)
    chosen = rows[: options.rows or count]
    labels = sorted({label for _, label in chosen})
    others = read(val) if val.exists() else rows[len(chosen) :]
    rng.shuffle(others)
    checked = [row for row in others if row[1] in labels][: len(chosen) // 4]
    folder = options.work / name
    folder.mkdir()
    for part, content in (("train", chosen), ("val", checked)):
        with (folder / f"{part}.jsonl").open("w", encoding="utf-8") as file:
            for text, label in content:
                file.write(json.dumps({"text": text, "label": label}, ensure_ascii=False) + "\n")
    return Rows(name, folder / "train.jsonl", folder / "val.jsonl", labels, len(chosen),
                len(checked), max_length, targets)  # fmt: skip


def read(path: Path) -> list[tuple[str, str]]:
    """(text, label) of a TSV file without quotes, or of a JSONL file."""
    lines = path.read_text(encoding="utf-8").split("\n")
    if path.suffix == ".jsonl":
        found = [json.loads(line) for line in lines if line]
        return [(row["text"], str(row["label"])) for row in found]
    cells = [line.split("\t") for line in lines[1:] if line]
    return [(text, label) for text, label in cells]


# -- runs ----------------------------------------------------------------------------------------


def run(
    name: str, rows: Rows, work: Path, ranks: int, accumulation: int, steps: int = 0, **more: Any
) -> tuple[list[Any], float]:
    """Train once; what each rank wrote down, and seconds. With `steps`, without dropout.

    `more`: of what is asked of a system.
    """
    system = NAMES[name]
    with tempfile.TemporaryDirectory(dir=work) as out:  # caches and all
        asked = {
            "train": str(rows.train), "val": str(rows.val), "labels": rows.labels, "out": out,
            "model": str(pretrained.needed()), "max_length": rows.max_length, "ranks": ranks,
            "accumulation": accumulation, "batch_size": GLOBAL_BATCH // (ranks * accumulation),
            "eval_batch_size": 32, "lr": 5e-5, "weight_decay": 0.01, "clip": 1.0,
            "warmup_ratio": 0.1, "seed": 42, "dropout": 0.0 if steps else None,
            "max_steps": steps, "epochs": 1, "flags": [], **system.asked, **more,
        }  # fmt: skip
        command = peer(system, ranks) if system.script else ours(asked)
        loopback = {"GLOO_SOCKET_IFNAME": "lo"} if Path("/sys/class/net/lo").exists() else {}
        environment = os.environ | loopback | {
            "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
            "HF_HOME": f"{out}/hf", "PYTHON": sys.executable,
        }  # fmt: skip
        if not system.script:
            environment["PYTHONPATH"] = str(SYSTEMS)  # for sitecustomize.py
        began = time.monotonic()
        environment["PEERS"] = json.dumps(asked | {"started": began})
        done = subprocess.run(command, env=environment, cwd=out, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, text=True)  # fmt: skip
        seconds = time.monotonic() - began
        files = sorted(Path(out).glob("rank*.json"))
        if done.returncode or len(files) != ranks:
            sys.exit(f"{done.stdout}\n{name} failed: exit code {done.returncode}")
        found = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        if not system.script:  # what the run's own files say
            lines = (Path(out) / "runs" / "ours" / "metrics.jsonl").read_text("utf-8").splitlines()
            logged = list(map(json.loads, lines))
            found[0]["numbers"] = [(line["loss"], line["grad_norm"]) for line in logged
                                   if "grad_norm" in line]  # fmt: skip
            scores = [line["accuracy"] for line in logged if line["split"] == "val"]
            found[0]["accuracy"] = scores[-1] if scores else None
        return found, seconds


def peer(system: System, ranks: int) -> list[str]:
    script = str(SYSTEMS / system.script)
    if ranks == 1:
        return [sys.executable, script]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*torchrun, f"--nproc-per-node={ranks}", script]


def ours(asked: dict[str, Any]) -> list[str]:
    flags = {
        "train-file": asked["train"], "val-file": asked["val"], "model": asked["model"],
        "max-length": asked["max_length"], "batch-size": asked["batch_size"],
        "eval-batch-size": asked["eval_batch_size"], "lr": asked["lr"],
        "weight-decay": asked["weight_decay"], "max-grad-norm": asked["clip"],
        "warmup-ratio": asked["warmup_ratio"], "seed": asked["seed"], "epochs": asked["epochs"],
        "gradient-accumulation-steps": asked["accumulation"], "nproc-per-node": asked["ranks"],
        "cache-dir": f"{asked['out']}/cache", "runs-dir": f"{asked['out']}/runs",
        "run-name": "ours",
    }  # fmt: skip
    if asked["max_steps"]:
        flags |= {"max-steps": asked["max_steps"], "log-every": 1, "dropout": asked["dropout"]}
    pairs = [(f"--{name}", str(value)) for name, value in flags.items()]
    return ["bash", str(PROJECT / "launch.sh"), *(word for pair in pairs for word in pair),
            *asked["flags"]]  # fmt: skip


def measure(name: str, rows: Rows, work: Path) -> Measured:
    ranks, whole = run(name, rows, work, RANKS, 1)
    main = ranks[0]
    ends = [step[0] for step in main["steps"]]
    counted = [step[1:] for rank in ranks for step in rank["steps"]]
    samples, tokens, padded = (sum(column) for column in zip(*counted, strict=True))
    seconds = ends[-1] - main["began"]
    after = [t for t in main["evaluations"] if t > ends[-1]]
    return Measured(
        samples / seconds, tokens / seconds, 1 - tokens / padded,
        max(rank["trained_peak"] for rank in ranks), max(rank["peak"] for rank in ranks),
        main["first"], after[0] - main["began"] if after else None, whole,
    )  # fmt: skip


def compare(rows: Rows, options: argparse.Namespace) -> dict[str, list[Measured]]:
    """Each system once a round, every round beginning with another one."""
    # Where word embeddings are a small part of the work, freezing them gains little.
    names = [name for name in options.only if name != "frozen" or "frozen" in rows.targets]
    found: dict[str, list[Measured]] = {name: [] for name in names}
    for number in range(options.rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            found[name].append(measure(name, rows, options.work))
            line = f"  {rows.name}, round {number + 1}, {name}: {found[name][-1]}"
            print(line, file=sys.stderr, flush=True)
    return found


# -- tables --------------------------------------------------------------------------------------


def middle(values: list[float], form: str) -> str:
    """The median, and between which values it stands."""
    low, high = min(values), max(values)
    return f"{statistics.median(values):{form}} ({low:{form}} to {high:{form}})"


def speed_table(rows: Rows, found: dict[str, list[Measured]]) -> str:
    lines = [
        f"## {rows.name}: {rows.count:,} rows of at most {rows.max_length} tokens\n",
        f"One epoch, then an evaluation of {rows.val_count} rows.\n",
        "| system | samples/s | text tokens/s | padding | peak memory, MiB: training / whole | "
        "first step, s | epoch and evaluation, s | whole command, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in found.items():
        trained, whole = ([v / MIB for v in column] for column in zip(
            *((run.trained_peak, run.peak) for run in runs), strict=True
        ))  # fmt: skip
        epochs = [run.epoch for run in runs if run.epoch is not None]
        cells = [
            NAMES[name].title,
            middle([run.samples for run in runs], ".1f"),
            middle([run.tokens for run in runs], ",.0f"),
            f"{statistics.median(run.padding for run in runs):.1%}",
            f"{middle(trained, ',.0f')} / {middle(whole, ',.0f')}",
            middle([run.first for run in runs], ".1f"),
            middle(epochs, ".1f") if epochs else "none",
            middle([run.whole for run in runs], ".1f"),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", ""])


def target_table(rows: Rows, found: dict[str, list[Measured]]) -> str:
    """Ours against each: the median of the rounds' ratios."""
    if "ours" not in found:
        return ""
    lines = ["| ours against | what | ratio | target | met |", "|---|---|---|---|---|"]
    for name in found:
        if name == "ours":
            continue
        checks: list[tuple[str, str, str, float | None]] = [
            ("samples/s", "samples", ">=", rows.targets.get(name)),
            ("text tokens/s", "tokens", ">=", None),
            # The limit has no evaluation and saves nothing.
            ("peak memory, training", "trained_peak", "<=", 1.0 if name == "bare" else None),
            ("peak memory, whole", "peak", "<=", None if name == "bare" else 1.0),
            ("first step, s", "first", "<=", 0.8 if name == "trainer" else None),
        ]
        if name == "frozen":
            continue
        for what, key, sign, target in checks:
            both = zip(found["ours"], found[name], strict=True)
            ratios = [getattr(mine, key) / getattr(other, key) for mine, other in both]
            ratio, met = statistics.median(ratios), ""
            if target is not None:
                met = "yes" if (ratio >= target if sign == ">=" else ratio <= target) else "**no**"
            aim = "" if target is None else f"{sign} {target}"
            title = NAMES[name].title
            lines.append(f"| {title} | {what} | {middle(ratios, '.2f')} | {aim} | {met} |")
    if {"frozen", "bare"} <= {*found} and "frozen" in rows.targets:
        both = zip(found["frozen"], found["bare"], strict=True)
        ratios = [mine.samples / other.samples for mine, other in both]
        least, title = rows.targets["frozen"], NAMES["bare"].title
        met = "yes" if statistics.median(ratios) >= least else "**no**"
        lines.append(f"| {title}, by {NAMES['frozen'].title} | samples/s | {middle(ratios, '.2f')} "
                     f"| >= {least} | {met} |")  # fmt: skip
    return "\n".join([*lines, "", ""])


def learned_table(rows: Rows, options: argparse.Namespace) -> str:
    """Whether a faster setting learns as much."""
    if not {"ours", "frozen"} <= {*options.only}:
        return ""
    lines = [
        f"## What is learned without training the word embeddings, {rows.name}\n",
        f"Accuracy on {rows.val_count} validation rows after {EPOCHS} epochs at a learning rate of "
        f"{LR:g}, with {len(SEEDS)} seeds.\n",
        "| setting | accuracy, each seed | mean |", "|---|---|---|",
    ]  # fmt: skip
    for name in ("ours", "frozen"):
        scores = [
            run(name, rows, options.work, RANKS, 1, epochs=EPOCHS, lr=LR, seed=seed)[0][0]
            for seed in SEEDS
        ]
        values = [score["accuracy"] for score in scores]
        each = " ".join(f"{value:.3f}" for value in values)
        lines.append(f"| {NAMES[name].title} | {each} | {statistics.mean(values):.3f} |")
        print(f"  learned by {name}: {values}", file=sys.stderr, flush=True)
    return "\n".join([*lines, "", ""])


def numbers_table(rows: Rows, options: argparse.Namespace) -> str:
    """Loss and gradient norm of the first steps, for each way to compute the same batch."""
    heads = [f"{r} rank{'s' * (r > 1)}, accumulation {a}" for r, a in WAYS]
    lines = [
        f"## Loss and gradient norm of the first {NUMBERS} steps, {rows.name}\n",
        f"As each system reports them, for a global batch of {GLOBAL_BATCH} rows, without dropout. "
        "`growth`: the largest value of the first step over the smallest.\n",
        f"| system | what | {' | '.join(heads)} | growth |",
        "|---|---|" + "---|" * (len(WAYS) + 1),
    ]
    for name in options.only:
        if name == "frozen":
            continue  # as ours
        ways = [run(name, rows, options.work, r, a, NUMBERS)[0][0]["numbers"] for r, a in WAYS]
        for at, what in enumerate(("loss", "gradient norm")):
            cells = [" ".join(f"{step[at]:.3f}" for step in way) for way in ways]
            first = [way[0][at] for way in ways]
            most = max(first) / min(first)
            growth = f"{most:.2f}"
            if name == "ours":
                growth += ", target <= 1.01: " + ("met" if most <= 1.01 else "**not met**")
            lines.append(f"| {NAMES[name].title} | {what} | {' | '.join(cells)} | {growth} |")
        print(f"  numbers of {name}: {ways}", file=sys.stderr, flush=True)
    return "\n".join([*lines, "", ""])


def command() -> str:
    """What was asked for, as anybody can repeat it: the names of folders are the user's own."""
    flags = ["FOLDER" if Path(flag).is_dir() else flag for flag in sys.argv[1:]]
    return " ".join([f"python benchmarks/{Path(sys.argv[0]).name}", *flags])


def heading() -> str:
    packages = ("torch", "transformers", "accelerate", "lightning")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    return (f"# Beside other ways to train: as measured\n\n    {command()}\n\n"
            f"{os.cpu_count()} CPU cores, Python {platform.python_version()}, {versions}. "
            f"{RANKS} processes with one thread each, {GLOBAL_BATCH} rows a step, fp32. A value is "
            "the median of the rounds, and in brackets the lowest and the highest; a ratio is the "
            "median of the rounds' ratios.\n\n")  # fmt: skip


def draw(results: list[tuple[Rows, dict[str, list[Measured]]]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 2.6 * len(results)), layout="constrained")
    grid = figure.subplots(len(results), 3, squeeze=False, sharey="row")
    columns = [("samples/s", "samples", 1), ("peak memory, MiB", "peak", MIB),
               ("first step, s", "first", 1)]  # fmt: skip
    for line, (rows, found) in zip(grid, results, strict=True):
        titles = [NAMES[name].title.replace(", ", "\n") for name in found]
        for axes, (title, key, unit) in zip(line, columns, strict=True):
            values = [[getattr(run, key) / unit for run in runs] for runs in found.values()]
            middles = [statistics.median(v) for v in values]
            spread = [[m - min(v) for m, v in zip(middles, values, strict=True)],
                      [max(v) - m for m, v in zip(middles, values, strict=True)]]  # fmt: skip
            colours = ["tab:blue" if name in ("ours", "frozen") else "silver" for name in found]
            bars = axes.barh(titles, middles, xerr=spread, color=colours, ecolor="dimgrey")
            axes.bar_label(bars, [f"{m:,.0f}" if m >= 100 else f"{m:.1f}" for m in middles],
                           label_type="center", fontsize=8)  # fmt: skip
            axes.set_title(f"{rows.name}: {title}", fontsize=9)
            axes.tick_params(labelsize=8)
            axes.spines[["top", "right"]].set_visible(False)
        line[0].invert_yaxis()  # shared by the row
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--data", type=Path, help="folder with trec_train.tsv and the articles")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, help="of each data set, for a try")
    parser.add_argument("--sets", nargs="+", default=["TREC", "articles"], help="some of FOLDER's")
    parser.add_argument("--only", nargs="+", choices=[*NAMES], metavar="NAME", default=[*NAMES],
                        help=f"some of the systems: {', '.join(NAMES)}")  # fmt: skip
    parser.add_argument("--write", action="store_true", help="keep the tables and the picture")
    options = parser.parse_args()
    for name in ("accelerate", "lightning", "datasets"):
        if importlib.util.find_spec(name) is None:
            sys.exit(f"install {name}: pip install accelerate lightning datasets")
    options.data = options.data and options.data.resolve()
    with tempfile.TemporaryDirectory() as work:
        options.work = Path(work)
        sets = data_sets(options)
        results = [(rows, compare(rows, options)) for rows in sets]
        text = heading()
        text += "\n".join(speed_table(*each) + target_table(*each) for each in results)
        text += "\n" + learned_table(sets[0], options) + numbers_table(sets[0], options)
        print(text)
        if options.write:
            TABLE.write_text(text.rstrip() + "\n", encoding="utf-8")
            draw(results)


if __name__ == "__main__":
    main()
