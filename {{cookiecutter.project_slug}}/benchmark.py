"""Which way to train is fastest on this machine? Run it before a long training.

    python benchmark.py --model xlm-roberta-base --precision bf16    # any flags of train.py
    python benchmark.py --rows 5000 --only ddp        # more rows; only names with "ddp" in them

It trains in every variant that this machine can run, and writes to `runs/benchmark-TIME/`.
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
from statistics import fmean, linear_regression
from subprocess import PIPE, STDOUT
from typing import Any

from metrics import METRICS
from training.settings.batch_sizes import batch_sizes
from training.settings.config import PROJECT
from training.settings.errors import UserError
from training.settings.flags import load_config, parse_args

STEPS = 40  # of the usual global batch: how many rows each variant trains on, by default
# Variants that learn the same in as many steps. Others change the global batch, or round gradients.
SAME_RESULT = ("one device", "dp", "ddp", "fsdp", "compiled")


@dataclass
class Variant:
    """A way to train, and what was measured of it, or why it was not run."""

    name: str
    ranks: int
    flags: list[str] = field(default_factory=list)
    why_not: str = ""
    accumulation_steps: int = 0  # 0: not set by the variant
    result: dict[str, Any] = field(default_factory=dict)


def variants(devices: int, device_type: str) -> list[Variant]:
    """Every variant, with the reason if this machine cannot run it."""
    no_dp = "" if device_type == "cuda" and devices > 1 else "needs two GPUs or more"
    no_ddp = "" if devices > 1 else "there is one device: the first row is the only way"
    planned = [
        Variant("one device", 1),
        Variant("dp", 1, ["--strategy", "dp"], no_dp),
        Variant("ddp", devices, [], no_ddp),
        Variant("ddp, bf16 exchange", devices, ["--gradient-compression", "bf16"], no_ddp),
        Variant("compiled", devices, ["--compile"]),
        Variant("fsdp", devices, ["--strategy", "fsdp"], no_ddp),
    ]
    for steps in (1, 2, 5, 10, 20):
        flags = ["--gradient-accumulation-steps", str(steps)]
        planned.append(Variant(f"ddp, accumulation {steps}", devices, flags, no_ddp, steps))
    return planned


def run(variant: Variant, folder: Path, flags: list[str], rows: int) -> None:
    """Train on about `rows` rows; fill in the variant's `result`, or `why_not`."""
    flags = [*flags, *variant.flags]
    try:
        config = load_config(flags)
        global_batch_size = batch_sizes(config, variant.ranks).global_batch_size
    except UserError as error:
        variant.why_not = str(error)
        return
    name = variant.name.replace(", ", "-").replace(" ", "-")
    fixed = f"--run-name {name} --max-steps {max(2, rows // global_batch_size)} --log-every 1"
    fixed += " --evals-per-epoch 0 --save-every 0 --early-stopping-patience 0"
    launch = ["bash", str(PROJECT / "launch.sh"), "--nproc-per-node", str(variant.ranks)]
    command = [*launch, *flags, "--runs-dir", str(folder), *fixed.split()]
    env = os.environ | {"PYTHON": sys.executable}
    began = time.monotonic()
    done = subprocess.run(command, env=env, stdout=PIPE, stderr=STDOUT, text=True)
    seconds = time.monotonic() - began
    if done.returncode == 0:
        variant.result = read_run(folder / name, global_batch_size, config.metric)
        variant.result["seconds"] = seconds
    else:
        output = done.stdout.strip() or f"exit code {done.returncode}"
        variant.why_not = f"failed: {output.splitlines()[-1][:120]}"


def read_run(folder: Path, global_batch_size: int, metric: str) -> dict[str, Any]:
    """Rates and memory of a run, and its last metric; steps that compile do not count."""
    lines = list(map(json.loads, (folder / "metrics.jsonl").read_text("utf-8").splitlines()))
    train = [line for line in lines if line["split"] == "train"]
    scores = [line[metric] for line in lines if line["split"] == "val"]
    key = "compilations"  # until that step
    train = [now for last, now in pairwise(train) if now.get(key) == last.get(key)] or train[-1:]
    seconds = fmean(global_batch_size / line["samples_per_second"] for line in train)
    results = json.loads((folder / "results.json").read_text("utf-8"))
    return {
        "rows_per_second": global_batch_size / seconds,
        "seconds_per_step": seconds,
        "global_batch_size": global_batch_size,
        "peak_memory": max(results["peak_memory"]),  # bytes, of the rank with the most
        "padding": fmean(line["padding"] for line in train),
        "data_wait": fmean(line["data_wait"] for line in train),
        metric: scores[-1] if scores else None,
    }


def add_exchange_and_optimizer(measured: list[Variant]) -> None:
    """Add the share of the time that is spent once in a step: in the exchange of gradients, as far
    as it does not overlap with backward, and in the optimizer.

    With c seconds for each micro-batch and x once in a step, n accumulation steps take c + x / n
    seconds for a micro-batch: a line over 1 / n, whose slope is x."""
    accumulated = [v for v in measured if v.accumulation_steps and v.result]
    if len(accumulated) < 2:
        return
    seconds = [v.result["seconds_per_step"] / v.accumulation_steps for v in accumulated]
    once = linear_regression([1 / v.accumulation_steps for v in accumulated], seconds).slope
    for result in (variant.result for variant in accumulated):
        result["exchange_and_optimizer"] = max(0.0, once) / result["seconds_per_step"]


def table(measured: list[Variant], metric: str) -> str:
    """The Markdown table of all variants."""
    lines = [
        "| variant | ranks | global batch | rows/s | speed-up | memory, MiB a rank | padding "
        f"| waits for data | exchange and optimizer | {metric} then |",
        "|" + " --- |" * 10,
    ]
    base = next((v.result["rows_per_second"] for v in measured if v.result), 1.0)
    for variant in measured:
        result = variant.result
        line = f"| {variant.name} | {variant.ranks} | "
        if not result:
            lines.append(f"{line}{variant.why_not} |" + "  |" * 7)
            continue
        rate, score = result["rows_per_second"], result[metric]
        share = result.get("exchange_and_optimizer")
        lines.append(
            f"{line}{result['global_batch_size']} | {rate:,.0f} | {rate / base:.2f} "
            f"| {result['peak_memory'] / 2**20:,.0f} | {100 * result['padding']:.1f} % "
            f"| {100 * result['data_wait']:.1f} % "
            f"| {'' if share is None else f'{100 * share:.1f} %'} "
            f"| {'' if score is None else f'{score:.3f}'} |"
        )
    return "\n".join(lines)


def advice(measured: list[Variant]) -> str:
    """What to use on this machine, and the flags."""
    candidates = [v for v in measured if v.result and v.name in SAME_RESULT]
    if not candidates:
        return "Nothing ran: see the reasons in the table."
    best = max(candidates, key=lambda v: v.result["rows_per_second"])
    flags = " ".join([f"--nproc-per-node {best.ranks}", *best.flags])
    text = f"Use {best.name}: ./launch.sh {flags}."
    unaccumulated = next((v.result for v in measured if v.accumulation_steps == 1), {})
    percent = 100 * unaccumulated.get("exchange_and_optimizer", 0.0)
    if best.ranks > 1 and percent > 15:
        text += (
            f" With ddp and one micro-batch in a step, exchange and optimizer take {percent:.0f} % "
            "of the time: try a larger --global-batch-size, or --gradient-compression bf16."
        )
    if best.result["data_wait"] > 0.1:
        text += " It waits for data: try --num-workers 2."
    return text


def draw(measured: list[Variant], path: Path) -> None:
    from matplotlib.figure import Figure

    done = [v for v in reversed(measured) if v.result]
    figure = Figure(figsize=(8, 1 + 0.45 * len(done)), layout="constrained")
    axes = figure.add_subplot(xlabel="rows a second")
    bars = axes.barh([v.name for v in done], [v.result["rows_per_second"] for v in done])
    axes.bar_label(bars, fmt=" {:,.0f}")
    axes.margins(x=0.12)
    figure.savefig(path, dpi=120)


def main() -> None:
    show = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=show, allow_abbrev=False)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--only", default="")
    own, flags = parser.parse_known_args()
    config = parse_args(flags, METRICS)
    import torch

    from training.distributed.ranks import find_accelerator
    from training.launch.launcher import default_ranks

    device = find_accelerator() or torch.device("cpu")
    rows = own.rows or STEPS * (config.global_batch_size or 32)
    folder = Path(config.runs_dir) / time.strftime("benchmark-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    devices = default_ranks()
    chosen = [v for v in variants(devices, device.type) if own.only in v.name]
    print(f"{rows:,} rows in each of {len(chosen)} variants, on {devices} x {device.type}")
    for variant in chosen:
        if not variant.why_not:
            print(f"  {variant.name} ...", flush=True)
            run(variant, folder, flags, rows)
    add_exchange_and_optimizer(chosen)
    text = f"{table(chosen, config.metric)}\n\n{advice(chosen)}\n"
    (folder / "benchmark.md").write_text(text, encoding="utf-8")
    data = [{"variant": v.name, "ranks": v.ranks, "why_not": v.why_not} | v.result for v in chosen]
    (folder / "benchmark.json").write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    draw(chosen, folder / "benchmark.png")
    print(f"\n{text}\n{folder}/benchmark.md, .json, .png")


if __name__ == "__main__":
    main()
