"""./launch.sh on two ranks: stopped by a signal, resumed, finished; what its ranks are given."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch.torch_version import TorchVersion

from training.distributed.watchdog import DUMP_VARIABLES
from training.launch import agent, cpus, worker
from training.settings.config import TrainConfig

PROJECT = Path(__file__).resolve().parent.parent


def launch(folder: Path, *flags: str) -> subprocess.Popen[str]:
    command = [
        str(PROJECT / "launch.sh"), "--nproc-per-node", "2", "--runs-dir", str(folder / "runs"),
        "--cache-dir", str(folder / "cache"), "--run-name", "run", "--model", "from-scratch",
        "--train-file", str(PROJECT / "sample" / "val.tsv"), "--max-length", "32", *flags,
    ]  # fmt: skip
    environment = os.environ | {"PYTHON": sys.executable}
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT)  # fmt: skip


def results(folder: Path) -> dict:
    return json.loads((folder / "runs" / "run" / "results.json").read_text("utf-8"))


@pytest.mark.slow
def test_stop_resume_finish(tmp_path: Path) -> None:
    """SIGTERM to the launcher: all ranks save the same step, exit code 0; the run then resumes."""
    process = launch(tmp_path, "--epochs", "1000")
    log = tmp_path / "runs" / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (log.exists() and '"train"' in log.read_text("utf-8")):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    stopped = results(tmp_path)
    assert stopped["stopped"] is True
    last = stopped["step"] + 5
    process = launch(tmp_path, "--epochs", "1000", "--max-steps", str(last))
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert f"resuming after step {stopped['step']} " in output
    assert results(tmp_path)["stopped"] is False
    assert results(tmp_path)["step"] == last
    assert results(tmp_path)["world_size"] == 2


@pytest.mark.slow
def test_a_mistake_is_reported_once(tmp_path: Path) -> None:
    """A missing column on two ranks: one line, exit code 2, no stack, no run folder."""
    process = launch(tmp_path, "--text-column", "txet")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2, output
    assert output.count("txet") == 1
    assert "Traceback" not in output
    assert not (tmp_path / "runs").exists()


def test_a_folder_with_a_colon(tmp_path: Path) -> None:
    """PYTHONPATH cannot hold it: one line says so."""
    folder = tmp_path / "10:00"
    folder.mkdir()
    script = folder / "launch.sh"
    script.write_bytes((PROJECT / "launch.sh").read_bytes())
    done = subprocess.run(["bash", str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert f"must not have a colon: {folder}; rename the folder" in done.stderr


# -- what ranks are given ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("0::/", {"cpu.max": "200000 100000"}, 2),
        ("0::/", {"cpu.max": "max 100000"}, 8),
        ("0::/a/b", {"a/cpu.max": "350000 100000", "a/b/cpu.max": "max 100000"}, 3),
        ("0::/a/b", {"cpu.max": "600000 100000", "a/b/cpu.max": "50000 100000"}, 1),
        ("0::/docker/id", {"cpu.max": "400000 100000"}, 4),  # a container sees its group as "/"
        ("0::/", {}, 8),
        ("5:cpuset:/b\n4:cpuacct,cpu:/a", {"cpu/b/cpu.cfs_quota_us": "100000",
                                           "cpu/b/cpu.cfs_period_us": "100000",
                                           "cpu/a/cpu.cfs_quota_us": "300000",
                                         "cpu/a/cpu.cfs_period_us": "100000"}, 3),
        ("4:cpu:/docker/id\n0::/", {"cpu/cpu.cfs_quota_us": "100000",
                                    "cpu/cpu.cfs_period_us": "50000"}, 2),
        ("4:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 8),
        (None, {}, 8),
    ],
)  # fmt: skip
def test_cpu_quotas(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: str | None,
    files: dict[str, str],
    expected: int,
) -> None:
    """Of control groups, both versions, of this process's group and of those around it."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for path, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n", "utf-8")
    if group is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/cgroup").write_text(group + "\n", "utf-8")
    assert cpus.usable_cpus(tmp_path) == expected


def test_threads_follow_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank gets its share for PyTorch, and all of them to tokenize; what is set stays."""
    monkeypatch.setattr(cpus, "usable_cpus", lambda: 6)
    for threads, expected in ((None, "3"), ("5", "5")):
        for name in ("OMP_NUM_THREADS", "RAYON_NUM_THREADS"):
            monkeypatch.delenv(name, raising=False)
        if threads:
            monkeypatch.setenv("OMP_NUM_THREADS", threads)
        cpus.share_cpus(2)
        assert os.environ["OMP_NUM_THREADS"] == expected
        assert os.environ["RAYON_NUM_THREADS"] == "6"


def test_threads_without_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain `python train.py` takes no more threads than it has CPUs, by their quota."""
    before = torch.get_num_threads()
    monkeypatch.setattr(cpus, "usable_cpus", lambda: 2)
    try:
        for start, expected in ((3, 2), (1, 1)):
            monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
            monkeypatch.delenv("RAYON_NUM_THREADS", raising=False)
            torch.set_num_threads(start)
            worker.choose_kernels(TrainConfig())
            assert torch.get_num_threads() == expected
            assert os.environ["RAYON_NUM_THREADS"] == "2"
        torch.set_num_threads(3)  # now OMP_NUM_THREADS is set
        worker.choose_kernels(TrainConfig())
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("version", ["2.8.0", "2.10.1", "2.11.0", "2.13.0+cpu"])
def test_variables_for_gpus(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Set in the launcher, under the name that this PyTorch reads, unless the user has set them
    under any of their names."""
    allocator = ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"]
    if version < "2.11" or version == "2.8.0":
        allocator.reverse()
    recorder = ["TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"]
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    for has_gpu, given in (
        (True, []),
        (True, [allocator[1], recorder[1], DUMP_VARIABLES[1]]),
        (False, []),
    ):
        monkeypatch.setattr(os, "environ", dict.fromkeys(given, "mine"))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)  # noqa: B023
        agent.set_device_defaults("/logs")
        assert [os.environ[name] for name in given] == ["mine"] * len(given)
        names = [recorder[0], DUMP_VARIABLES[0], *([allocator[0]] if has_gpu else [])]
        assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
        if given:
            assert set(os.environ) == {"TORCH_NCCL_DUMP_ON_TIMEOUT", *given}
        else:
            assert set(os.environ) == {"TORCH_NCCL_DUMP_ON_TIMEOUT", *names}
            assert os.environ[DUMP_VARIABLES[0]] == "/logs/collectives_rank_"
            assert os.environ.get(allocator[0]) == ("expandable_segments:True" if has_gpu else None)
