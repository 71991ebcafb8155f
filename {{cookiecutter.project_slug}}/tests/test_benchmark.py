"""benchmark.py: every way that there is, with a reason where this machine cannot; the advice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import benchmark
from benchmark import Way

PROJECT = Path(benchmark.__file__).parent


def done(name: str, rate: float, **more: float) -> Way:
    found = {"rows_per_second": rate, "peak_memory": 2**30, "padding": 0.1, "data_wait": 0.0,
             "global_batch_size": 32, "accuracy": 0.5}  # fmt: skip
    return Way(name, 2 if name.startswith(("ddp", "fsdp")) else 1, found=found | more)


def test_every_way_or_a_reason() -> None:
    for devices, kind in ((1, "cpu"), (2, "cpu"), (8, "cuda")):
        found = {way.name: way for way in benchmark.ways(devices, kind)}
        assert set(found) >= {"one device", "dp", "ddp", "fsdp", "ddp, accumulation 20"}
        assert not found["one device"].why_not
        assert bool(found["dp"].why_not) == (kind == "cpu")
        assert bool(found["ddp"].why_not) == (devices == 1)
        assert found["ddp"].ranks == devices


def test_table_and_advice() -> None:
    """The best plain way is named with its flags; waiting for the network is told, with a way."""
    ways = [
        done("one device", 100), Way("dp", 1, why_not="needs two GPUs or more"), done("ddp", 150),
        done("ddp, no exchange", 200), done("ddp, accumulation 20", 195), done("fsdp", 140),
    ]  # fmt: skip
    benchmark.add_exchange(ways)
    lines = benchmark.table(ways, "accuracy").splitlines()
    assert len(lines) == 2 + len(ways)
    assert "needs two GPUs or more" in lines[3]
    assert "1.50" in lines[4]
    assert "25.0 %" in lines[4]
    text = benchmark.advice(ways)
    assert text.startswith("Use ddp: ./launch.sh --nproc-per-node 2.")
    assert "wait for gradients 25 %" in text
    assert "--gradient-compression bf16" in text
    assert benchmark.advice([Way("ddp", 2, why_not="failed")]).startswith("Nothing ran")


def test_settings_that_a_way_cannot_have(tmp_path: Path) -> None:
    """The user's flags may not go with one of the ways: its row says so, the others are run."""
    way = Way("dp", 1, ["--strategy", "dp"])
    benchmark.run(way, tmp_path, ["--train-file", "a", "--gradient-compression", "bf16"], 100)
    assert "bf16 goes with strategy ddp or fsdp, not with dp" in way.why_not
    way = Way("ddp, accumulation 5", 2, ["--gradient-accumulation-steps", "5"])
    benchmark.run(way, tmp_path, ["--train-file", "a", "--global-batch-size", "64"], 100)
    assert "global_batch_size 64 is not batch_size" in way.why_not


@pytest.mark.slow
def test_gradients_are_exchanged_as_a_way_says(
    tmp_path: Path, tiny_model: Path, files: dict[str, Path]
) -> None:
    """Without exchange each rank has the gradient of its own rows: another norm, the same loss."""
    flags = ["--model", str(tiny_model), "--train-file", str(files["train"]), "--val-fraction", "0",
             "--max-length", "48", "--cache-dir", str(tmp_path / "cache")]  # fmt: skip
    first = {}
    for alone in (False, True):
        way = Way(f"alone {alone}", 2, alone=alone)
        benchmark.run(way, tmp_path, flags, 64)
        assert not way.why_not
        lines = (tmp_path / f"alone-{alone}" / "metrics.jsonl").read_text("utf-8").splitlines()
        first[alone] = json.loads(lines[0])
    assert first[True]["loss"] == first[False]["loss"]
    assert abs(first[True]["grad_norm"] / first[False]["grad_norm"] - 1) > 0.01


@pytest.mark.slow
def test_it_runs(tmp_path: Path, tiny_model: Path, files: dict[str, Path]) -> None:
    """The real thing in one way: rates, memory, the metric after the rows; files; exit code 0."""
    command = [
        sys.executable, "-P", str(PROJECT / "benchmark.py"), "--only", "one", "--rows", "128",
        "--model", str(tiny_model), "--max-length", "48", "--train-file", str(files["train"]),
        "--val-file", str(files["val"]), "--runs-dir", str(tmp_path / "runs"),
        "--cache-dir", str(tmp_path / "cache"),
    ]  # fmt: skip
    finished = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(PROJECT)}, capture_output=True, text=True,
        timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr + finished.stdout
    (folder,) = (tmp_path / "runs").glob("benchmark-*")
    (way,) = json.loads((folder / "benchmark.json").read_text("utf-8"))
    assert way["why_not"] == "", finished.stdout
    assert way["rows_per_second"] > 0
    assert way["peak_memory"] > 2**20
    assert 0 <= way["accuracy"] <= 1
    assert (folder / "benchmark.png").stat().st_size > 1000
    assert "Use one device" in finished.stdout
