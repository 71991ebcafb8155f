"""Does a finished run exit 0 every time? Launches many short runs and counts their exit codes.

    python benchmarks/clean_exit.py --runs 100

A process that keeps a DDP model alive while it destroys its process group aborts at its exit now
and then ("terminate called without an active exception", code -6), after all work is done. In the
project, `worker.run` destroys the group only when everything that `main` made is gone.
"""

import argparse
import collections
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "{{cookiecutter.project_slug}}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    codes: collections.Counter[int] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "bash", str(PROJECT / "launch.sh"), "--nproc-per-node", str(arguments.ranks),
            "--max-steps", "2", "--max-length", "32", "--runs-dir", f"{folder}/runs",
            "--cache-dir", f"{folder}/cache", "--val-fraction", "0.1",
            "--train-file", str(PROJECT / "sample" / "val.tsv"),
        ]  # fmt: skip
        environment = os.environ | {"PYTHON": sys.executable}
        for number in range(1, arguments.runs + 1):
            done = subprocess.run(
                [*command, "--run-name", str(number)], capture_output=True, text=True,
                env=environment,
            )  # fmt: skip
            codes[done.returncode] += 1
            if done.returncode:
                print(f"run {number}: exit code {done.returncode}\n{done.stderr[-1000:]}")
            if number % 10 == 0:
                print(f"{number} runs: exit codes {dict(codes)}", flush=True)
    print(f"{arguments.runs} runs on {arguments.ranks} ranks: {codes[0]} exited 0, "
          f"{arguments.runs - codes[0]} did not")  # fmt: skip


if __name__ == "__main__":
    main()
