"""launch_multinode.sh on two hosts, and the same numbers as on one.

The hosts are network namespaces of this machine with nothing but a cable between them: their own
addresses, loopbacks and ports. A wrong interface, or an address that only one of them can reach,
fails here as it does between real machines.
"""

import json
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from conftest import Bake, clean_environment
from hosts import ADDRESSES, two_hosts

TIMEOUT_S = 300  # a bound for what hangs, not a promise
FLAGS = "--model from-scratch --log-every 1 --global-batch-size 16 --max-length 32 --dropout 0.1"


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """The names of two namespaces, joined by a veth pair."""
    with ExitStack() as stack:
        try:
            names = stack.enter_context(two_hosts())
        except (OSError, subprocess.CalledProcessError) as error:
            reason = getattr(error, "stderr", "") or error
            pytest.skip(f"no network namespaces here: {str(reason).strip()}")
        yield names


@pytest.fixture(scope="module")
def project(bake: Bake, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A baked project with a few rows of its own."""
    folder = bake(output_dir=tmp_path_factory.mktemp("two-hosts"))
    words = {"cat": "fur purr milk mouse paw", "bird": "wing nest sing egg feather"}
    draw = random.Random(7)
    for name, rows in (("train", 150), ("val", 20)):
        lines = ["text\tlabel"]
        for _ in range(rows):
            label = draw.choice(sorted(words))
            text = " ".join(draw.choices(words[label].split(), k=draw.randint(3, 12)))
            lines.append(f"{text}\t{label}")
        (folder / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "test.toml").write_text("epochs = 1\nlr = 1e-3\n", encoding="utf-8")
    return folder


def flags(project: Path, name: str, *more: str) -> list[str]:
    data = ["--train-file", str(project / "train.tsv"), "--val-file", str(project / "val.tsv")]
    data += ["--config", str(project / "test.toml"), "--cache-dir", str(project / "cache")]
    return [*FLAGS.split(), *data, "--runs-dir", str(project / "runs"), "--run-name", name, *more]


def start(project: Path, *command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=project,
        # The same number of threads everywhere: sums in another order differ in the last bit.
        env=clean_environment(OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES=""),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
    )


def start_on(host: str, node_rank: int, project: Path, *more: str) -> subprocess.Popen[str]:
    multinode = f"--nnodes 2 --node-rank {node_rank} --master-addr {ADDRESSES[0]}".split()
    script = str(project / "launch_multinode.sh")
    return start(
        project, "ip", "netns", "exec", host, script, *multinode, "--nproc-per-node", "1", *more
    )


def finish(*processes: subprocess.Popen[str]) -> None:
    """Wait for all of them; none may have failed."""
    try:
        texts = [process.communicate(timeout=TIMEOUT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    codes = [process.returncode for process in processes]
    assert codes == [0] * len(codes), "\n----\n".join(texts)


def log_lines(project: Path, name: str) -> list[dict[str, Any]]:
    file = project / "runs" / name / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def logged_numbers(project: Path, name: str) -> list[dict[str, float]]:
    keys = ("step", "split", "loss", "lr", "grad_norm", "accuracy")
    return [{k: line[k] for k in keys if k in line} for line in log_lines(project, name)]


@pytest.mark.slow
def test_two_hosts_learn_what_one_does(hosts: tuple[str, str], project: Path) -> None:
    """Two hosts of one rank log bit-identical losses to one host of two ranks; and when one of
    them is asked to stop, both save and end with exit code 0."""
    steps = ["--max-steps", "12"]
    finish(
        start_on(hosts[1], 1, project, *flags(project, "two-hosts", *steps)),
        start_on(hosts[0], 0, project, *flags(project, "two-hosts", *steps)),
    )
    local = [str(project / "launch.sh"), "--nproc-per-node", "2"]
    finish(start(project, *local, *flags(project, "one-host", *steps)))
    assert logged_numbers(project, "two-hosts") == logged_numbers(project, "one-host")
    losses = [line["loss"] for line in log_lines(project, "one-host") if line["split"] == "train"]
    assert len(losses) == 12
    results = json.loads((project / "runs" / "two-hosts" / "results.json").read_text("utf-8"))
    assert (results["world_size"], results["stopped"]) == (2, False)

    steps = ["--max-steps", "100000"]
    both = [
        start_on(host, rank, project, *flags(project, "stopped", *steps))
        for rank, host in enumerate(hosts)
    ]
    end = time.monotonic() + TIMEOUT_S
    while len(log_lines(project, "stopped")) < 5:
        assert time.monotonic() < end and all(process.poll() is None for process in both)
        time.sleep(0.1)
    both[1].send_signal(signal.SIGTERM)  # `ip netns exec` and the scripts have become Python
    finish(*both)
    results = json.loads((project / "runs" / "stopped" / "results.json").read_text("utf-8"))
    assert results["stopped"] is True
