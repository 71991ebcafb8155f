"""Which way to train is fastest on this machine? Run it before a long training.

    python benchmark.py                               # with the settings of config.toml
    python benchmark.py --train-file mine.tsv --model xlm-roberta-base --precision bf16
    python benchmark.py --rows 5000 --only ddp        # more rows; only names with "ddp" in them

It runs train.py on some of the rows in every variant that this machine can run, and writes a table,
`benchmark.json` and `benchmark.png` to `runs/benchmark-TIME/`. Any flag of train.py may be given.
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
from statistics import linear_regression
from typing import Any

from training.settings.batch_sizes import batch_sizes
from training.settings.config import PROJECT
from training.settings.errors import UserError
from training.settings.flags import load_config, parse_args

ACCUMULATION_STEPS = (1, 2, 5, 10, 20)
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
    half = ["--gradient-compression", "bf16"]
    accumulated = [
        Variant(f"ddp, accumulation {n}", devices, ["--gradient-accumulation-steps", str(n)],
                no_ddp, accumulation_steps=n)
        for n in ACCUMULATION_STEPS
    ]  # fmt: skip
    return [
        Variant("one device", 1),
        Variant("dp", 1, ["--strategy", "dp"], no_dp),
        Variant("ddp", devices, [], no_ddp),
        Variant("ddp, bf16 exchange", devices, half, no_ddp),
        Variant("compiled", devices, ["--compile"]),
        *accumulated,
        Variant("fsdp", devices, ["--strategy", "fsdp"], no_ddp),
    ]


def run(variant: Variant, folder: Path, flags: list[str], rows: int) -> None:
    """Train on about `rows` rows; fill in the variant's `result`, or `why_not`."""
    name = variant.name.replace(", ", "-").replace(" ", "-")
    try:
        config = load_config([*flags, *variant.flags])
        global_batch_size = batch_sizes(config, variant.ranks).global_batch_size
    except UserError as error:
        variant.why_not = str(error)
        return
    steps = max(2, rows // global_batch_size)
    command = [
        sys.executable, "-P", "-m", "training.launch.launcher",
        "--nproc-per-node", str(variant.ranks), str(PROJECT / "train.py"), *flags, *variant.flags,
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
        lines = [line for line in done.stdout.splitlines() if line.strip()]
        variant.why_not = f"failed: {lines[-1][:120] if lines else f'exit code {done.returncode}'}"
        return
    seconds = time.monotonic() - began
    variant.result = {"seconds": seconds} | read_run(folder / name, global_batch_size)
    variant.result[config.metric] = final_score(folder / name, config.metric)


def read_run(run_folder: Path, global_batch_size: int) -> dict[str, Any]:
    """Rates and memory of a run, from its records. Steps that compile or warm up do not count."""
    train = records(run_folder, "train")
    train = [line for before, line in pairwise(train)
             if line.get("compilations") == before.get("compilations")] or train[-1:]  # fmt: skip
    seconds = sum(global_batch_size / line["samples_per_second"] for line in train)
    results = json.loads((run_folder / "results.json").read_text("utf-8"))
    return {
        "rows_per_second": global_batch_size * len(train) / seconds,
        "seconds_per_step": seconds / len(train),
        "global_batch_size": global_batch_size,
        "peak_memory": max(results["peak_memory"]),  # bytes, of the rank with the most
        "padding": sum(line["padding"] for line in train) / len(train),
        "data_wait": sum(line["data_wait"] for line in train) / len(train),
    }


def final_score(run_folder: Path, metric: str) -> float | None:
    """The metric on the validation rows at the end of a run; None if there are none."""
    evaluations = records(run_folder, "val")
    return evaluations[-1][metric] if evaluations else None


def records(run_folder: Path, split: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run_folder / "metrics.jsonl").read_text("utf-8").splitlines())
    return [line for line in lines if line["split"] == split]


def add_exchange_and_optimizer(measured: list[Variant]) -> None:
    """Add the share of the time that goes to what is done once in a step, where it can be derived:
    the exchange of gradients, as far as it does not overlap with backward, and the optimizer.

    With c seconds for the computation of a micro-batch and x seconds once in a step, a micro-batch
    takes c + x / n seconds with n accumulation steps: a line over 1 / n, whose slope is x.
    """
    accumulated = [v for v in measured if v.accumulation_steps and v.result]
    if len(accumulated) < 2:
        return
    steps = [v.accumulation_steps for v in accumulated]
    seconds = [v.result["seconds_per_step"] / n for v, n in zip(accumulated, steps, strict=True)]
    once = max(0.0, linear_regression([1 / n for n in steps], seconds).slope)
    for variant in accumulated:
        variant.result["exchange_and_optimizer"] = once / variant.result["seconds_per_step"]


def table(measured: list[Variant], metric: str) -> str:
    """The Markdown table of all variants."""
    head = ["variant", "ranks", "global batch", "rows/s", "speed-up", "memory, MiB a rank",
            "padding", "waits for data", "exchange and optimizer", f"{metric} then"]  # fmt: skip
    lines = [head, ["---"] * len(head)]
    base = next((v.result["rows_per_second"] for v in measured if v.result), 1.0)
    for variant in measured:
        result = variant.result
        if not result:
            empty = [""] * (len(head) - 3)
            lines.append([variant.name, str(variant.ranks), variant.why_not, *empty])
            continue
        share, score = result.get("exchange_and_optimizer"), result[metric]
        rate = result["rows_per_second"]
        lines.append([
            variant.name, str(variant.ranks), str(result["global_batch_size"]), f"{rate:,.0f}",
            f"{rate / base:.2f}", f"{result['peak_memory'] / 2**20:,.0f}",
            f"{100 * result['padding']:.1f} %", f"{100 * result['data_wait']:.1f} %",
            "" if share is None else f"{100 * share:.1f} %",
            "" if score is None else f"{score:.3f}",
        ])  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def advice(measured: list[Variant]) -> str:
    """What to use on this machine, and the flags."""
    candidates = [v for v in measured if v.result and v.name in SAME_RESULT]
    if not candidates:
        return "Nothing ran: see the reasons in the table."
    best = max(candidates, key=lambda v: v.result["rows_per_second"])
    flags = " ".join(["./launch.sh", f"--nproc-per-node {best.ranks}", *best.flags])
    sentences = [f"Use {best.name}: {flags}"]
    unaccumulated = next((v.result for v in measured if v.accumulation_steps == 1), {})
    share = unaccumulated.get("exchange_and_optimizer", 0.0)
    if best.ranks > 1 and share > 0.15:
        sentences.append(
            f"With ddp and one micro-batch in a step, exchange and optimizer take {100 * share:.0f}"
            " % of the time: a larger --global-batch-size needs fewer steps, and "
            "--gradient-compression bf16 halves what is exchanged"
        )
    if best.result["data_wait"] > 0.1:
        sentences.append("It waits for data: try --num-workers 2")
    return ". ".join(sentences) + "."


def draw(measured: list[Variant], path: Path) -> None:
    from matplotlib.figure import Figure

    done = [(v.name, v.result["rows_per_second"]) for v in measured if v.result][::-1]
    figure = Figure(figsize=(8, 1 + 0.45 * len(done)), layout="constrained")
    axes = figure.add_subplot()
    axes.barh([name for name, _ in done], [rate for _, rate in done])
    for i, (_, rate) in enumerate(done):
        axes.text(rate, i, f" {rate:,.0f}", va="center")
    axes.set_xlabel("rows a second")
    axes.margins(x=0.12)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--only", default="")
    parser.add_argument("-h", "--help", action="store_true")
    own, flags = parser.parse_known_args()
    if own.help:
        print(__doc__)
        return
    config = parse_args(flags)
    import torch

    from training.launch.launcher import default_ranks

    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices, device_type = default_ranks(), device.type if device else "cpu"
    rows = own.rows or STEPS * (config.global_batch_size or 32)
    folder = Path(config.runs_dir) / time.strftime("benchmark-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True)
    chosen = [v for v in variants(devices, device_type) if own.only in v.name]
    print(f"{rows:,} rows in each of {len(chosen)} variants, on {devices} x {device_type}")
    for variant in chosen:
        if not variant.why_not:
            print(f"  {variant.name} ...", flush=True)
            run(variant, folder, flags, rows)
    add_exchange_and_optimizer(chosen)
    text = f"{table(chosen, config.metric)}\n\n{advice(chosen)}\n"
    (folder / "benchmark.md").write_text(text, encoding="utf-8")
    content = [{"variant": v.name, "ranks": v.ranks, "why_not": v.why_not, **v.result}
               for v in chosen]  # fmt: skip
    (folder / "benchmark.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    draw(chosen, folder / "benchmark.png")
    print(f"\n{text}\n{folder}/benchmark.md, .json, .png")


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        sys.exit(f"benchmark.py: {error}")
