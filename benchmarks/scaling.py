"""How a run grows: ranks, threads, parameters, rows, accumulation; and by arithmetic to 1,024 GPUs.

    python benchmarks/scaling.py --write                    # measure all, keep table and picture
    python benchmarks/scaling.py --only rows --rounds 1     # one of the tables
    python benchmarks/scaling.py arithmetic --write         # docs/scaling.md, from scaling.json

Each case is a run of `train.py` through the launcher, as `benchmark.py` of the project does it. The
cases of a table run in turn, and every round begins with another one. --write keeps scaling.md,
what a step is made of in scaling.json, and docs/scaling.png.
"""

import argparse
import csv
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "{{cookiecutter.project_slug}}"
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests"), str(ROOT / "benchmarks")]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3])
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import benchmark  # noqa: E402
from benchmark import Variant  # noqa: E402
from peers import command  # noqa: E402
from tiny import save_tiny  # noqa: E402

TABLE = Path(__file__).with_suffix(".md")
PARTS = Path(__file__).with_suffix(".json")
PICTURE = ROOT / "docs" / "scaling.png"
PAGE = ROOT / "docs" / "scaling.md"
MILLION = 10**6
# Hidden size, layers: a BERT of about this many million parameters.
MODELS = {2: (256, 2), 8: (256, 10), 26: (512, 8), 100: (768, 14)}
# What docs/scaling.md counts with: multilingual BERT, base size, on H100s, eight in a machine.
GPUS = (8, 64, 1024)
PARAMETERS, COMPUTED = 178 * MILLION, 86 * MILLION  # all; those in the layers
ROWS, TOKENS = 16, 128  # in one forward
GPU_FLOPS = 989e12  # bf16, dense: NVIDIA's H100 SXM data sheet
UTILISATION = 0.35  # share of it that such a model reaches: assumed
NVLINK = 450e9  # bytes a second, each way: the same sheet
NETWORKS = {"8 x 400 Gbit/s": 400e9, "1 x 100 Gbit/s": 12.5e9}  # of a machine, bytes a second
HOP = 5e-6  # seconds from GPU to GPU, whatever the size: assumed
SAVE_EVERY = 1000  # steps
WORDS = [f"w{i:04}" for i in range(4000)]


@dataclass
class Case:
    """A run, and its rows and steps a second in each round."""

    name: str
    ranks: int
    flags: list[str]
    rows: int  # to learn from in one run
    threads: int = 1
    x: float = 0.0  # where the picture has it
    rates: list[float] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    def run(self, folder: Path) -> None:
        os.environ["OMP_NUM_THREADS"] = str(self.threads)
        name = f"{self.name}-{self.ranks}-{self.threads}-{len(self.rates)}"
        variant = Variant(name, self.ranks)
        benchmark.run(variant, folder, self.flags, self.rows)
        if variant.why_not:
            sys.exit(f"{self.name}: {variant.why_not}")
        self.rates.append(variant.result["rows_per_second"])
        self.steps.append(1.0 / variant.result["seconds_per_step"])
        print(f"  {self.name}, {self.ranks} x {self.threads}: {self.rates[-1]:.1f} rows/s",
              file=sys.stderr, flush=True)  # fmt: skip


# -- what is trained -----------------------------------------------------------------------------


def write_rows(path: Path, count: int) -> Path:
    """Texts of 4 to 40 words, with a label that depends on the first."""
    rng = random.Random(0)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for _ in range(count):
            words = rng.choices(WORDS, k=min(40, 4 + int(rng.expovariate(0.1))))
            writer.writerow([" ".join(words), f"l{int(words[0][1:]) % 4}"])
    return path


def save_model(folder: Path, hidden: int, layers: int) -> Path:
    """A BERT with a vocabulary of WORDS, which is small: its layers are nearly all of it."""
    return save_tiny(
        folder, WORDS, hidden_size=hidden, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, intermediate_size=4 * hidden, max_position_embeddings=128,
    )  # fmt: skip


def cases(work: Path, scale: float, chosen: list[str]) -> dict[str, list[Case]]:
    models = {size: save_model(work / f"model-{size}", *shape) for size, shape in MODELS.items()}

    def flags(model: int, rows: Path, *more: str) -> list[str]:
        return ["--model", str(models[model]), "--train-file", str(rows), "--val-fraction", "0",
                "--max-length", "64", "--cache-dir", str(work / "cache"), *more]  # fmt: skip

    small = write_rows(work / "rows.csv", 5000)
    at_once = ["--global-batch-size", "32"]
    counts = [int(n * scale) for n in (5_000, 50_000, 500_000, 5_000_000) if "rows" in chosen]
    files = {count: write_rows(work / f"rows-{count}.csv", count) for count in counts}
    return {
        "ranks": [
            Case("ranks and threads", ranks, flags(8, small, *at_once), 32 * 40, threads)
            for ranks, threads in ((1, 1), (1, 2), (2, 1), (2, 2))
        ],
        "parameters": [
            Case(f"{size} M parameters", ranks, flags(size, small, *at_once),
                 32 * (12 if size > 20 else 40), x=size)
            for size in models for ranks in (1, 2)
        ],
        "rows": [
            Case(f"{count} rows", 2, flags(2, file, *at_once), 32 * 120, x=count)
            for count, file in files.items()
        ],
        "accumulation": [
            Case(f"accumulation {k}", 2,
                 flags(8, small, "--batch-size", "8", "--gradient-accumulation-steps", str(k)),
                 16 * max(4 * k, 40), x=k)
            for k in (1, 4, 16, 64)
        ],
    }  # fmt: skip


def measure(found: list[Case], rounds: int, work: Path) -> None:
    for number in range(rounds):
        turn = number % len(found)
        with tempfile.TemporaryDirectory(dir=work) as folder:
            for case in found[turn:] + found[:turn]:
                case.run(Path(folder))


# -- what a step is made of, measured -------------------------------------------------------------


def agreement(times: int) -> float:
    """Seconds of one all-reduce of two numbers over gloo. On every rank."""
    import torch
    import torch.distributed as dist
    from training.distributed import ranks

    ranks.setup(60.0)
    flags, found = torch.zeros(2, dtype=torch.int32), []
    for _ in range(times):
        began = time.perf_counter()
        dist.all_reduce(flags)
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def batch_seconds(config: Any, times: int) -> float:
    """Seconds until a micro-batch is ready in memory."""
    import data
    from model import build_tokenizer
    from training.dataset.build import open_dataset
    from training.distributed import ranks
    from training.settings.batch_sizes import batch_sizes
    from training.step.batch_plan import BatchPlan

    ranks.setup(60.0)
    train = open_dataset(config, data, build_tokenizer)[1]["train"]
    plan = BatchPlan(train, batch_sizes(config, 1, 1), seed=0)
    micro = list(itertools.islice(plan, times))
    began = time.perf_counter()
    for one in micro:
        train[one]
    return (time.perf_counter() - began) / times


def measure_parts(work: Path) -> dict[str, Any]:
    """Seconds, and bytes a second, of what a step needs besides the GPU and the network."""
    import overhead
    import scaling  # as the rank processes import it
    from ranks import Ranks
    from training.settings.config import TrainConfig
    from transformers import AutoModelForSequenceClassification

    found: dict[str, Any] = {"plan": {}}
    for ranks in GPUS:
        sizes = str(10**9), str(ROWS * ranks), str(ranks)
        cost = of_data_benchmark("plan_cost", *sizes, "0")
        spread = of_data_benchmark("imbalance", *sizes)
        found["plan"][str(ranks)] = {
            "seconds": cost["step"], "bytes": cost["peak"], "busiest": spread["median"],
            "busiest_shuffled": spread["random_median"],
        }  # fmt: skip
    folder = save_model(work / "parts", *MODELS[26])
    config = TrainConfig(
        model=str(folder), train_file=(str(write_rows(work / "parts.csv", 5000)),), max_length=128,
        val_fraction=0.0, cache_dir=str(work / "cache"), runs_dir=str(work / "saving"),
    )  # fmt: skip
    pool = Ranks(work)
    try:
        found["agreement_hop"] = statistics.median(pool.run(2, scaling.agreement, 2000)) / 2
        found["batch"] = pool.run(1, scaling.batch_seconds, config, 200)[0]
        waits = pool.run(1, overhead.save_times, config, 5)[0]
    finally:
        pool.close()
    waited, whole, _ = (statistics.median(column) for column in zip(*waits, strict=True))
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    content = 12 * sum(p.numel() for p in model.parameters())  # weights, two averages of AdamW
    found |= {"copied": content / waited, "written": content / (whole - waited)}
    return found


def of_data_benchmark(name: str, *arguments: str) -> Any:
    """What a function of data.py finds, in a process of its own."""
    command = [sys.executable, str(Path(__file__).with_name("data.py")), "--child", name]
    done = subprocess.run([*command, *arguments], stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


# -- by arithmetic ---------------------------------------------------------------------------------


@dataclass
class Step:
    """Seconds of the parts of one optimizer step on `gpus` GPUs."""

    gpus: int
    forward: float
    backward: float
    reduce: float  # gradients, by ring
    data: float  # the plan and the batches, on the CPU
    agreement: float
    copy: float  # for a checkpoint, spread over the steps between two of them

    @property
    def seconds(self) -> float:
        """Backward and the exchange overlap; what the CPU does runs beside the GPU."""
        return max(self.forward + max(self.backward, self.reduce), self.data, self.agreement) + (
            self.copy
        )

    @property
    def efficiency(self) -> float:
        return (self.forward + self.backward) / self.seconds


def step(
    parts: dict[str, Any], gpus: int, network: float, accumulation: int = 1, sent: int = 4
) -> Step:
    """`network`: bytes a second of a machine; `sent`: bytes for each gradient."""
    from training.launch.signals import RANKS_AT_ONCE

    compute = accumulation * ROWS * TOKENS * 6 * COMPUTED / (GPU_FLOPS * UTILISATION)
    slowest = NVLINK if gpus <= 8 else network
    reduced = 2 * (gpus - 1) / gpus * sent * PARAMETERS / slowest
    return Step(
        gpus, compute / 3, compute * 2 / 3, reduced + 2 * (gpus - 1) * HOP,
        accumulation * (parts["plan"][str(gpus)]["seconds"] + parts["batch"]),
        2 * (gpus - 1) * parts["agreement_hop"] / math.ceil(gpus / RANKS_AT_ONCE),
        12 * PARAMETERS / parts["copied"] / SAVE_EVERY,
    )  # fmt: skip


WAYS: list[tuple[str, dict[str, int]]] = [
    ("as it is", {}),
    ("`--gradient-compression bf16`", {"sent": 2}),
    ("8 x `--gradient-accumulation-steps`", {"accumulation": 8}),
    ("both", {"sent": 2, "accumulation": 8}),
]


def arithmetic(parts: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| GPUs | network of a machine | way | compute | all-reduce | plan and batches | agreement "
        "| checkpoint | step, ms | GPUs at work |", "|---|---|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for gpus in GPUS:
        for network, speed in NETWORKS.items():
            if gpus == 8 and network != next(iter(NETWORKS)):
                continue  # one machine
            for way, how in WAYS:
                s = step(parts, gpus, speed, **how)
                times = [s.forward + s.backward, s.reduce, s.data, s.agreement, s.copy, s.seconds]
                cells = [f"{gpus:,}", "none" if gpus == 8 else network, way]
                cells += [f"{1000 * t:.2f}" for t in times]
                lines.append(f"| {' | '.join(cells)} | {s.efficiency:.0%} |")
    lines += ["", "| ranks | rows a step | plan, ms a step | its memory | busiest rank | busiest, "
              "only shuffled |", "|---|---|---|---|---|---|"]  # fmt: skip
    for gpus in GPUS:
        p = parts["plan"][str(gpus)]
        lines.append(f"| {gpus:,} | {ROWS * gpus:,} | {1000 * p['seconds']:.2f} | "
                     f"{p['bytes'] / 2**20:.1f} MiB | {p['busiest']:.3f} | "
                     f"{p['busiest_shuffled']:.3f} |")  # fmt: skip
    return "\n".join(lines)


def measured_parts(parts: dict[str, Any]) -> str:
    save = 12 * PARAMETERS
    lines = [
        "| part | measured here |", "|---|---|",
        f"| a micro-batch of {ROWS} rows, ready in memory | {1000 * parts['batch']:.2f} ms |",
        "| agreement over gloo, two ranks of one machine | "
        f"{2e6 * parts['agreement_hop']:.0f} us |",
        f"| copy of a checkpoint, for which a step waits | {parts['copied'] / 1e9:.1f} GB/s: "
        f"{save / parts['copied']:.2f} s for {save / 1e9:.1f} GB |",
        f"| writing and hashing it in the background | {parts['written'] / 1e9:.2f} GB/s: "
        f"{save / parts['written']:.1f} s |",
    ]  # fmt: skip
    return "\n".join(lines)


def write_page(parts: dict[str, Any]) -> None:
    """Put the tables between the marks of docs/scaling.md."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in (("parts", measured_parts(parts)), ("arithmetic", arithmetic(parts))):
        begin, end = f"<!-- {name} -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n\n{table}\n\n{end}{rest.partition(end)[2]}"
    PAGE.write_text(text, encoding="utf-8")


# -- tables and picture --------------------------------------------------------------------------


def table(found: list[Case]) -> str:
    """Rates are medians of the rounds, a ratio is the median of the rounds' ratios."""
    lines = ["| case | ranks | threads of each | steps/s | rows/s | lowest to highest | "
             "rows/s against the first |", "|---|---|---|---|---|---|---|"]  # fmt: skip
    for case in found:
        alike = [other for other in found if other.name == case.name]
        first = alike[0] if len(alike) > 1 else found[0]  # one rank with as many parameters
        ratios = [one / other for one, other in zip(case.rates, first.rates, strict=True)]
        cells = [
            case.name, str(case.ranks), str(case.threads), f"{statistics.median(case.steps):.2f}",
            f"{statistics.median(case.rates):.1f}",
            f"{min(case.rates):.1f} to {max(case.rates):.1f}", f"{statistics.median(ratios):.2f}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(found: dict[str, list[Case]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 2.8), layout="constrained")
    titles = {"ranks": "ranks x threads", "parameters": "million parameters", "rows": "rows",
              "accumulation": "accumulation steps"}  # fmt: skip
    for axes, (name, group) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
        if name == "ranks":
            axes.bar([f"{c.ranks} x {c.threads}" for c in group],
                     [statistics.median(c.rates) for c in group])  # fmt: skip
        for ranks in sorted({case.ranks for case in group} if name != "ranks" else ()):
            cases = [case for case in group if case.ranks == ranks]
            values = [statistics.median(c.steps if name == "rows" else c.rates) for c in cases]
            axes.plot([c.x for c in cases], values, "o-", label=f"{ranks} rank{'s' * (ranks > 1)}")
            axes.set_xscale("log")
            axes.legend(fontsize=7)
        if name == "parameters":
            axes.set_yscale("log")
        axes.set_ylim(bottom=None if name == "parameters" else 0)
        axes.set_title("steps/s" if name == "rows" else "rows/s", fontsize=9)
        axes.set_xlabel(titles[name], fontsize=8)
        axes.tick_params(labelsize=7)
    figure.savefig(PICTURE, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", nargs="?", default="measure", choices=["measure", "arithmetic"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of rows")
    parser.add_argument("--only", nargs="+", help="ranks, parameters, rows, accumulation, parts")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.what == "arithmetic":
        parts = json.loads(PARTS.read_text(encoding="utf-8"))
        print(measured_parts(parts), arithmetic(parts), sep="\n\n")
        if options.write:
            write_page(parts)
        return
    text = f"# How a run grows: as measured\n\n    {command()}\n\n"
    text += f"{os.cpu_count()} CPU cores. 32 rows a step; with accumulation, 16 times its steps.\n"
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        chosen = options.only or ["ranks", "parameters", "rows", "accumulation", "parts"]
        found = cases(work, options.scale, chosen) if chosen != ["parts"] else {}
        found = {name: group for name, group in found.items() if name in chosen}
        for name, group in found.items():
            measure(group, options.rounds, work)
            text += f"\n## {name.capitalize()}\n\n{table(group)}\n"
        if "parts" in chosen:
            parts = measure_parts(work)
            print(json.dumps(parts, indent=1))
            if options.write:
                PARTS.write_text(json.dumps(parts, indent=1) + "\n", encoding="utf-8")
                write_page(parts)
    print(text)
    if options.write and found:
        TABLE.write_text(text, encoding="utf-8")
        draw(found)


if __name__ == "__main__":
    main()
