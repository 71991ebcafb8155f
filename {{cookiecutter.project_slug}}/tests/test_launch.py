"""./launch.sh on two ranks: stopped by a signal, resumed, finished."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.slow


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


def test_a_mistake_is_reported_once(tmp_path: Path) -> None:
    """A missing column on two ranks: one line, exit code 2, no stack, no run folder."""
    process = launch(tmp_path, "--text-column", "txet")
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 2, output
    assert output.count("txet") == 1
    assert "Traceback" not in output
    assert not (tmp_path / "runs").exists()
