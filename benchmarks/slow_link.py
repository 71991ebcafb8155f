"""Accumulation over a slow network: two hosts whose link is shaped to 200 Mbit/s and to 1 Gbit/s.

    python benchmarks/slow_link.py [--model FOLDER] [--write]          # needs root, and iproute2

The hosts are network namespaces of this machine, joined by a veth pair with a token bucket at each
end; each runs `launch_multinode.sh` with one rank. A row of the table is a number of accumulation
steps, with the same rows in a micro-batch each time, so that a step of k micro-batches has one
exchange of gradients where k steps of one have k. "Possible" is what fewer exchanges can save: the
time of an exchange, measured against the same run without any, times the share that is left out.
"naive" exchanges after every micro-batch, as a loop without `no_sync` does.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "{{cookiecutter.project_slug}}"
sys.path[:0] = [str(PROJECT), str(ROOT / "tests")]

from benchmark import RUNNER  # noqa: E402
from hosts import ADDRESSES, two_hosts  # noqa: E402
from pretrained import installed  # noqa: E402

BATCH = 8  # rows in a micro-batch of a rank


def seconds_of(
    names: tuple[str, str], folder: Path, model: str, name: str, accumulation: int, steps: int,
    rule: str = "", flags: tuple[str, ...] = (),
) -> float:  # fmt: skip
    """Seconds of a micro-batch, in the median over steps, the first left out."""
    script = folder / "runner.py"
    script.write_text(RUNNER.format(when=rule == "always"), encoding="utf-8")
    processes = []
    for rank, host in enumerate(names):
        launch = f"--nnodes 2 --node-rank {rank} --master-addr {ADDRESSES[0]} --nproc-per-node 1"
        command = [sys.executable, "-P", "-m", "training.launch", *launch.split()]
        command += [str(script)] if rule else [str(PROJECT / "train.py")]
        command += [
            "--model", model, "--train-file", str(PROJECT / "sample" / "train.tsv"),
            "--val-fraction", "0", "--max-length", "64", "--batch-size", str(BATCH),
            "--gradient-accumulation-steps", str(accumulation), "--max-steps", str(steps),
            "--log-every", "1", "--runs-dir", str(folder / "runs"), "--run-name", name,
            "--cache-dir", str(folder / "cache"), *flags,
        ]  # fmt: skip
        processes.append(
            subprocess.Popen(
                ["ip", "netns", "exec", host, *command], stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True,
                env=os.environ | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1",
                                  "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
            )
        )  # fmt: skip
    texts = [process.communicate()[0] for process in processes]
    if any(process.returncode for process in processes):
        raise SystemExit("\n".join(texts))
    lines = (folder / "runs" / name / "metrics.jsonl").read_text("utf-8").splitlines()
    rates = [json.loads(line)["samples_per_second"] for line in lines][1:]
    return statistics.median(2 * BATCH / rate for rate in rates)


def main() -> None:
    default = str(installed() or "from-scratch")
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default=default)
    parser.add_argument("--rates", nargs="+", default=["200mbit", "1gbit"])
    parser.add_argument("--micro-batches", type=int, default=24, help="of each row, about")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    table = [
        "| link | way | s a micro-batch | saved | possible | share of the possible |",
        "|---|---|---|---|---|---|",
    ]
    print(*table, sep="\n", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for rate in arguments.rates:
            with two_hosts(rate) as names:

                def measure(way: str, k: int, **more: Any) -> float:
                    steps = max(4, min(12, arguments.micro_batches // k))
                    label = f"{rate}-{way}".replace(" ", "-")  # noqa: B023
                    return seconds_of(names, folder, arguments.model, label, k, steps, **more)

                alone = measure("without exchange", 1, rule="never")
                one = measure("1", 1)
                exchange = one - alone
                rows: list[tuple[str, int, float]] = [("without exchange", 0, alone), ("1", 1, one)]
                naive = measure("naive 5", 5, rule="always")
                rows.append(("5, naive", 0, naive))
                rows += [(str(k), k, measure(str(k), k)) for k in (2, 5, 10, 20)]
                packed = measure("1 bf16", 1, flags=("--gradient-compression", "bf16"))
                rows.append(("1, --gradient-compression bf16", 0, packed))
                part = measure("1 rows", 1, flags=("--gradient-compression", "rows"))
                rows.append(("1, --gradient-compression rows", 0, part))
                for way, k, seconds in rows:
                    saved, possible, share = one - seconds, "", ""
                    if k > 1:
                        most = exchange * (1 - 1 / k)
                        possible, share = f"{most:.3f}", f"{saved / most:.2f}"
                    table.append(
                        f"| {rate} | {way} | {seconds:.3f} | {saved:.3f} | {possible} | {share} |"
                    )
                    print(table[-1], flush=True)
    if arguments.write:
        text = f"# Slow link\n\nWritten by `{' '.join(['python', *sys.argv])}`.\n\n"
        text += "\n".join(table) + "\n"
        (ROOT / "benchmarks" / "slow_link.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
