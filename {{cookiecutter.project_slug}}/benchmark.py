"""Which way to train is fastest on this machine? Ask before a long run.

    python benchmark.py                               # with the settings of config.toml
    python benchmark.py --train-file mine.tsv --model xlm-roberta-base --precision bf16
    python benchmark.py --rows 5000 --only ddp        # more rows; ways with "ddp" in their name

It runs train.py itself for some rows in every way that this machine offers, and leaves a table,
`benchmark.json` and `benchmark.png` in `runs/benchmark-TIME/`. Any flag of train.py may be given.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from training.settings.batch_sizes import batch_sizes
from training.settings.config import PROJECT
from training.settings.errors import UserError
from training.settings.flags import load_config, parse_args

ACCUMULATIONS = (2, 5, 10, 20)
STEPS = 40  # of the usual global batch: how many rows each way learns from, by default
# Runs train.py with another rule for when gradients are exchanged, by {when}.
RUNNER = """
import sys
from training.flags import parse_args
config = parse_args(sys.argv[1:])
import train
from training import memory, process, replicas
real = memory.gradient_sync
memory.gradient_sync = lambda wrapped, model, ends_step: real(wrapped, model, {when})
replicas.check_replicas = lambda model: None
process.run(train.main, config)
"""


@dataclass
class Way:
    """A way to train, and what came of it."""

    name: str
    ranks: int
    flags: list[str] = field(default_factory=list)
    why_not: str = ""
    alone: bool = False  # without the exchange of gradients
    found: dict[str, Any] = field(default_factory=dict)


def ways(devices: int, kind: str) -> list[Way]:
    """All that there are, with the reason where this machine cannot."""
    dp = "" if kind == "cuda" and devices > 1 else "needs two GPUs or more"
    one = "" if devices > 1 else "there is one device: the first row is all there is"
    found = [
        Way("one device", 1),
        Way("dp", 1, ["--strategy", "dp"], dp),
        Way("ddp", devices, [], one),
        Way("ddp, no exchange", devices, [], one, alone=True),
        Way("ddp, bf16 exchange", devices, ["--gradient-compression", "bf16"], one),
    ]
    found.append(Way("compiled", devices, ["--compile"]))
    for steps in ACCUMULATIONS:
        flags = ["--gradient-accumulation-steps", str(steps)]
        found.append(Way(f"ddp, accumulation {steps}", devices, flags, one))
    return [*found, Way("fsdp", devices, ["--strategy", "fsdp"], one)]


def run(way: Way, folder: Path, flags: list[str], rows: int) -> None:
    """Train on so many rows in this way; fill in `found`, or `why_not`."""
    name = way.name.replace(", ", "-").replace(" ", "-")
    try:
        config = load_config([*flags, *way.flags])
        sizes = batch_sizes(config, way.ranks)
    except UserError as error:
        way.why_not = str(error)
        return
    steps = max(2, rows // sizes.global_batch_size)
    script = folder / "alone.py"
    # Without any exchange: what that saves is what the exchange costs.
    script.write_text(RUNNER.format(when=False), encoding="utf-8")
    command = [
        sys.executable, "-P", "-m", "training.launch.launcher", "--nproc-per-node", str(way.ranks),
        str(script if way.alone else PROJECT / "train.py"), *flags, *way.flags,
        "--runs-dir", str(folder), "--run-name", name, "--max-steps", str(steps), "--log-every",
        "1", "--evals-per-epoch", "0", "--save-every", "0", "--early-stopping-patience", "0",
    ]  # fmt: skip
    search = os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH", "")]))
    began = time.monotonic()
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": search}, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    if done.returncode:
        last = [line for line in done.stdout.splitlines() if line.strip()][-1:]
        way.why_not = f"failed: {''.join(last)[:120]}"
        return
    text = (folder / name / "metrics.jsonl").read_text("utf-8").splitlines()
    lines = list(map(json.loads, text))
    train = [line for line in lines if line["split"] == "train"]
    train = [line for before, line in pairwise(train)  # the first warms up; others may compile
             if line.get("compilations") == before.get("compilations")] or train[-1:]  # fmt: skip
    val = [line for line in lines if line["split"] == "val"][-1:]
    each = sizes.global_batch_size
    seconds = sum(each / line["samples_per_second"] for line in train)
    results = json.loads((folder / name / "results.json").read_text("utf-8"))
    way.found = {
        "seconds": time.monotonic() - began,
        "rows_per_second": each * len(train) / seconds,
        "seconds_per_step": seconds / len(train),
        "global_batch_size": each,
        "peak_memory": max(results["peak_memory"]),
        "padding": sum(line["padding"] for line in train) / len(train),
        "data_wait": sum(line["data_wait"] for line in train) / len(train),
        config.metric: val[0][config.metric] if val else None,
    }


def add_exchange(found: list[Way]) -> None:
    """The share of time in which a step waits for gradients: against DDP without any exchange."""
    done = {way.name: way.found for way in found if way.found}
    if "ddp" not in done or "ddp, no exchange" not in done:
        return
    alone = done["ddp, no exchange"]["rows_per_second"]
    for name, values in done.items():
        if name.startswith(("ddp", "fsdp")):
            values["exchange_wait"] = max(0.0, 1.0 - values["rows_per_second"] / alone)


def table(found: list[Way], metric: str) -> str:
    """Markdown."""
    head = ["way", "ranks", "global batch", "rows/s", "speed-up", "memory, MiB a rank", "padding",
            "waits for data", "waits for exchange", f"{metric} then"]  # fmt: skip
    lines = [head, ["---"] * len(head)]
    base = next((way.found["rows_per_second"] for way in found if way.found), 1.0)
    for way in found:
        if not way.found:
            lines.append([way.name, str(way.ranks), way.why_not, *[""] * (len(head) - 3)])
            continue
        v = way.found
        exchange, score = v.get("exchange_wait"), v[metric]
        lines.append([
            way.name, str(way.ranks), str(v["global_batch_size"]), f"{v['rows_per_second']:,.0f}",
            f"{v['rows_per_second'] / base:.2f}", f"{v['peak_memory'] / 2**20:,.0f}",
            f"{100 * v['padding']:.1f} %", f"{100 * v['data_wait']:.1f} %",
            "" if exchange is None else f"{100 * exchange:.1f} %",
            "" if way.alone or score is None else f"{score:.3f}",
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def advice(found: list[Way]) -> str:
    """What to use here, and the flags."""
    names = ("one device", "dp", "ddp", "fsdp", "compiled")
    plain = [way for way in found if way.found and way.name in names]
    if not plain:
        return "Nothing ran: see the reasons in the table."
    best = max(plain, key=lambda way: way.found["rows_per_second"])
    flags = " ".join(["./launch.sh", f"--nproc-per-node {best.ranks}", *best.flags])
    said = f"Use {best.name}: {flags}"
    wait = best.found.get("exchange_wait", 0.0)
    if best.ranks > 1 and wait > 0.15:
        said += (
            f". Its steps wait for gradients {100 * wait:.0f} % of the time: a larger "
            "--global-batch-size needs fewer exchanges, --gradient-compression bf16 smaller ones"
        )
    if best.found["data_wait"] > 0.1:
        said += ". It waits for data: try --num-workers 2"
    return said + "."


def draw(found: list[Way], path: Path) -> None:
    from matplotlib.figure import Figure

    done = [way for way in found if way.found][::-1]
    figure = Figure(figsize=(8, 1 + 0.45 * len(done)), layout="constrained")
    axes = figure.add_subplot()
    axes.barh([way.name for way in done], [way.found["rows_per_second"] for way in done])
    for i, way in enumerate(done):
        axes.text(way.found["rows_per_second"], i, f" {way.found['rows_per_second']:,.0f}",
                  va="center")  # fmt: skip
    axes.set_xlabel("rows a second")
    axes.margins(x=0.12)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--only", default="")
    parser.add_argument("-h", "--help", action="store_true")
    mine, flags = parser.parse_known_args()
    if mine.help:
        print(__doc__)
        return
    config = parse_args(flags)
    import torch

    from training.launch.launcher import default_ranks

    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    devices, kind = default_ranks(), getattr(kind, "type", "cpu")
    rows = mine.rows or STEPS * (config.global_batch_size or 32)
    folder = Path(config.runs_dir) / time.strftime("benchmark-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    found = [way for way in ways(devices, kind) if mine.only in way.name]
    print(f"{rows:,} rows in each of {len(found)} ways, on {devices} x {kind}", flush=True)
    for way in found:
        if not way.why_not:
            print(f"  {way.name} ...", flush=True)
            run(way, folder, flags, rows)
    add_exchange(found)
    text = f"{table(found, config.metric)}\n\n{advice(found)}\n"
    (folder / "benchmark.md").write_text(text, encoding="utf-8")
    content = [{"way": w.name, "ranks": w.ranks, "why_not": w.why_not, **w.found} for w in found]
    (folder / "benchmark.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    draw(found, folder / "benchmark.png")
    print(f"\n{text}\n{folder}/benchmark.md, .json, .png")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"benchmark.py: {error}")
