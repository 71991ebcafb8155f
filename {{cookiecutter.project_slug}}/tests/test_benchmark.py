"""benchmark.py: every variant, with a reason where this machine cannot run it; the advice."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import benchmark
from benchmark import Variant

PROJECT = Path(benchmark.__file__).parent


def done(name: str, rate: float, **more: Any) -> Variant:
    result = {"rows_per_second": rate, "peak_memory": 2**30, "padding": 0.1, "data_wait": 0.0,
              "global_batch_size": 32, "accuracy": 0.5}  # fmt: skip
    return Variant(name, 2 if name.startswith(("ddp", "fsdp")) else 1, result=result | more)


def accumulated(steps: int, computation: float, once: float) -> Variant:
    """A variant with known seconds: of a micro-batch, and of what is done once in a step."""
    variant = done(f"ddp, accumulation {steps}", 195, seconds_per_step=steps * computation + once)
    variant.accumulation_steps = steps
    return variant


def test_every_variant_or_a_reason() -> None:
    for devices, kind in ((1, "cpu"), (2, "cpu"), (8, "cuda")):
        found = {variant.name: variant for variant in benchmark.variants(devices, kind)}
        assert set(found) >= {*benchmark.SAME_RESULT, "ddp, accumulation 1", "ddp, accumulation 20"}
        assert not found["one device"].why_not
        assert bool(found["dp"].why_not) == (kind == "cpu")
        for name in ("ddp", "ddp, bf16 exchange", "ddp, accumulation 5", "fsdp"):
            assert bool(found[name].why_not) == (devices == 1)
        assert found["ddp"].ranks == devices


def test_exchange_and_optimizer() -> None:
    """Their share of a step is recovered from times made of known parts; too few: none."""
    variants = [accumulated(steps, computation=0.3, once=0.1) for steps in (1, 2, 20)]
    variants.insert(2, Variant("ddp, accumulation 5", 2, accumulation_steps=5, why_not="failed"))
    benchmark.add_exchange_and_optimizer(variants)
    for variant in (variants[0], variants[1], variants[3]):
        share = 0.1 / variant.result["seconds_per_step"]
        assert variant.result["exchange_and_optimizer"] == pytest.approx(share)
    for few in ([], [accumulated(1, 0.3, 0.1), done("ddp", 150)]):
        benchmark.add_exchange_and_optimizer(few)
        assert not any("exchange_and_optimizer" in variant.result for variant in few)
    faster = [accumulated(1, 0.3, -0.1), accumulated(2, 0.3, -0.1)]  # noise
    benchmark.add_exchange_and_optimizer(faster)
    assert faster[0].result["exchange_and_optimizer"] == 0.0


def test_table_and_advice() -> None:
    """The best variant of the same result is named with its flags; a slow exchange is reported."""
    variants = [
        done("one device", 100), Variant("dp", 1, why_not="needs two GPUs or more"),
        done("ddp", 150), accumulated(1, 0.3, 0.1), accumulated(20, 0.3, 0.1), done("fsdp", 140),
    ]  # fmt: skip
    benchmark.add_exchange_and_optimizer(variants)
    lines = benchmark.table(variants, "accuracy").splitlines()
    assert len(lines) == 2 + len(variants)
    assert "needs two GPUs or more" in lines[3]
    assert "1.50" in lines[4]
    assert "25.0 %" in lines[5]
    assert "1.6 %" in lines[6]
    text = benchmark.advice(variants)
    assert text.startswith("Use ddp: ./launch.sh --nproc-per-node 2.")
    assert "exchange and optimizer take 25 % of the time" in text
    assert "--gradient-compression bf16" in text
    assert benchmark.advice([Variant("ddp", 2, why_not="failed")]).startswith("Nothing ran")


def test_settings_that_a_variant_cannot_have(tmp_path: Path) -> None:
    """The user's flags may not go with a variant: its row gives the reason, the others are run."""
    variant = Variant("dp", 1, ["--strategy", "dp"])
    benchmark.run(variant, tmp_path, ["--train-file", "a", "--gradient-compression", "bf16"], 100)
    assert "bf16 goes with strategy ddp or fsdp, not with dp" in variant.why_not
    variant = Variant("ddp, accumulation 5", 2, ["--gradient-accumulation-steps", "5"])
    benchmark.run(variant, tmp_path, ["--train-file", "a", "--global-batch-size", "64"], 100)
    assert "global_batch_size 64 is not batch_size" in variant.why_not


@pytest.mark.slow
def test_it_runs(tmp_path: Path, tiny_model: Path, files: dict[str, Path]) -> None:
    """A real run of one variant: rates, memory, the metric after the rows; files; exit code 0."""
    command = [
        sys.executable, "-P", str(PROJECT / "benchmark.py"), "--only", "one", "--rows", "128",
        "--model", str(tiny_model), "--max-length", "48", "--train-file", str(files["train"]),
        "--val-file", str(files["val"]), "--runs-dir", str(tmp_path / "runs"),
        "--cache-dir", str(tmp_path / "cache"), "--metric", "loss",
    ]  # fmt: skip
    finished = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(PROJECT)}, capture_output=True, text=True,
        timeout=300, cwd=tmp_path,
    )  # fmt: skip
    assert finished.returncode == 0, finished.stderr + finished.stdout
    (folder,) = (tmp_path / "runs").glob("benchmark-*")
    (variant,) = json.loads((folder / "benchmark.json").read_text("utf-8"))
    assert variant["why_not"] == "", finished.stdout
    assert variant["rows_per_second"] > 0
    assert variant["peak_memory"] > 2**20
    assert variant["loss"] > 0
    assert (folder / "benchmark.png").stat().st_size > 1000
    assert "Use one device" in finished.stdout
