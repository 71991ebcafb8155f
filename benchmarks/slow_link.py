"""Accumulation over a slow network: two hosts whose link is shaped to 200 Mbit/s and to 1 Gbit/s.

    python benchmarks/slow_link.py [--model FOLDER] [--write]          # needs root, and iproute2

The hosts are network namespaces of this machine, joined by a veth pair with a token bucket at each
end; each starts one rank as `launch_multinode.sh` does. A row of the table is a number of
accumulation steps, with the same rows in a micro-batch each time, so that a step of k micro-batches
has one exchange of gradients where k steps of one have k. "Possible" is what fewer exchanges can
save: the time of an exchange, measured against the same run without any, times the share that is
left out. "naive" exchanges after every micro-batch, as a loop without `no_sync` does. The variants
run in turn, and every round begins with another one; a value is the median of the rounds.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "{{cookiecutter.project_slug}}"
sys.path[:0] = [str(PROJECT), str(ROOT / "tests")]

from hosts import ADDRESSES, two_hosts  # noqa: E402
from peers import command, middle  # noqa: E402
from pretrained import installed  # noqa: E402

TABLE = Path(__file__).with_suffix(".md")
BATCH = 8  # rows in a micro-batch of a rank
TARGET = 0.8  # of what fewer exchanges can save


@dataclass
class Variant:
    """A variant to train, and its seconds for each micro-batch in every round."""

    title: str
    accumulation: int = 1
    rule: str = ""  # when gradients are exchanged: by train.py, "always", or "never"
    flags: tuple[str, ...] = ()
    seconds: list[float] = field(default_factory=list)


def variants() -> list[Variant]:
    return [
        Variant("without exchange", rule="never"),
        Variant("1"),
        Variant("5, naive", 5, rule="always"),
        *(Variant(str(k), k) for k in (2, 5, 10, 20)),
        *(Variant(f"1, `--gradient-compression {kind}`", flags=("--gradient-compression", kind))
          for kind in ("bf16", "rows")),
    ]  # fmt: skip


def measure(variant: Variant, names: tuple[str, str], folder: Path, model: str, steps: int) -> None:
    """Run it once: seconds of a micro-batch, in the median over steps, the first left out."""
    script = (
        ROOT / "benchmarks" / "systems" / "other_exchange.py"
        if variant.rule
        else PROJECT / "train.py"
    )
    processes = []
    for rank, host in enumerate(names):
        launch = f"--nnodes 2 --node-rank {rank} --master-addr {ADDRESSES[0]} --nproc-per-node 1"
        command = [sys.executable, "-P", "-m", "training.launch.launcher", *launch.split()]
        command += [
            str(script),
            "--model", model, "--train-file", str(PROJECT / "sample" / "train.tsv"),
            "--val-fraction", "0", "--max-length", "64", "--batch-size", str(BATCH),
            "--gradient-accumulation-steps", str(variant.accumulation), "--max-steps", str(steps),
            "--log-every", "1", "--runs-dir", str(folder / "runs"), "--run-name", "run",
            "--cache-dir", str(folder / "cache"), *variant.flags,
        ]  # fmt: skip
        processes.append(
            subprocess.Popen(
                ["ip", "netns", "exec", host, *command], stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True,
                env=os.environ | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1",
                                  "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1",
                                  "EXCHANGE": variant.rule},
            )
        )  # fmt: skip
    texts = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("\n".join(texts))
    lines = (folder / "runs" / "run" / "metrics.jsonl").read_text("utf-8").splitlines()
    rates = [json.loads(line)["samples_per_second"] for line in lines][1:]
    shutil.rmtree(folder / "runs")
    variant.seconds.append(statistics.median(2 * BATCH / rate for rate in rates))


def rows_of(rate: str, found: list[Variant]) -> list[str]:
    """Lines of the table."""
    without, one = found[0], found[1]
    exchange = [x - y for x, y in zip(one.seconds, without.seconds, strict=True)]
    lines = []
    for variant in found:
        saved = [x - y for x, y in zip(one.seconds, variant.seconds, strict=True)]
        seconds = middle(variant.seconds, ".3f")
        cells = [rate, variant.title, seconds, f"{statistics.median(saved):.3f}", "", "", ""]
        if variant.accumulation > 1:
            most = [e * (1 - 1 / variant.accumulation) for e in exchange]
            share = statistics.median(s / m for s, m in zip(saved, most, strict=True))
            cells[4:] = [f"{statistics.median(most):.3f}", f"{share:.2f}", ""]
            if not variant.rule:
                cells[6] = f">= {TARGET}: " + ("met" if share >= TARGET else "**not met**")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main() -> None:
    default = str(installed() or "from-scratch")
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default=default)
    parser.add_argument("--rates", nargs="+", default=["200mbit", "1gbit"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--micro-batches", type=int, default=12, help="of each run, about")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    table = [
        "| link | accumulation | s a micro-batch | saved | possible | share of it | target |",
        "|---|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as name:
        for rate in arguments.rates:
            found = variants()
            with two_hosts(rate) as names:
                for number in range(arguments.rounds):
                    turn = number % len(found)
                    for variant in found[turn:] + found[:turn]:
                        steps = max(3, min(6, arguments.micro_batches // variant.accumulation))
                        measure(variant, names, Path(name), arguments.model, steps)
                        seconds = f"{variant.seconds[-1]:.3f} s"
                        line = f"  {rate}, round {number + 1}, {variant.title}: {seconds}"
                        print(line, file=sys.stderr, flush=True)
            table += rows_of(rate, found)
    print("\n".join(table))
    if arguments.write:
        text = (
            f"# Accumulation over a slow network: as measured\n\n    {command()}\n\n"
            f"{os.cpu_count()} CPU cores; two ranks, {BATCH} rows in a micro-batch of each. The "
            f"median of {arguments.rounds} rounds, the lowest and the highest. A share above 1 "
            "is what fewer steps of the optimizer save besides.\n\n"
        )
        TABLE.write_text(text + "\n".join(table) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
