"""Write docs/versions.md: the generated project on older and newer torch and transformers.

    python tools/versions.py                        # the rows below, in build/versions
    python tools/versions.py --folder FOLDER        # environments are kept there and used again
    python tools/versions.py --only 2.8.0           # only rows with this torch; the page stays

An environment takes 6 to 8 GB: torch comes with CUDA, and runs on CPUs without it. So this is not a
part of `make test`, which runs everything on the versions of constraints.txt.
"""

import argparse
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "{{cookiecutter.project_slug}}"
PAGE = ROOT / "docs" / "versions.md"
NEWEST = ""  # whatever pip finds
ROWS = [("2.8.0", "5.0.0"), ("2.8.0", NEWEST), (NEWEST, "5.0.0"), (NEWEST, NEWEST)]
OTHERS = "tensorboard numpy pyarrow scikit-learn matplotlib pytest".split()
STEPS = 400  # enough for two stops on a fast machine
FLAGS = f"--train-file sample/train.tsv --max-length 32 --log-every 1 --max-steps {STEPS}".split()
COMPARED = 20
TIMEOUT_S = 1800
HEAD = """# Versions

torch 2.8 and later and transformers 5.0 and later are supported. Older ones are refused in one line
before PyTorch is imported, also by `train.py` and `predict.py`. `make test` runs everything on the
versions in `constraints.txt`; the oldest and the newest were tried as follows, on CPUs with Python
{python}. This page is written by `python tools/versions.py`.

- **trains**: `./launch.sh` on two ranks, {steps} steps.
- **stops and resumes**: the same run is stopped by SIGTERM to the launcher, resumed, stopped by
  Ctrl-C, and resumed. Each stop saves, exits 0 and writes `"stopped": true`; the weights at the end
  and the loss of every step are bit-identical to those of the run that was not stopped.
- **FSDP as DDP**: with `--strategy fsdp` the loss and the gradient norm of the first {compared}
  steps are those of the first run, to 1e-4.
- **predicts**: `predict.py` labels a text with the first run's `best/`.
- **quick tests**: `pytest -m 'not slow'` in the project.

| torch | transformers | trains | stops and resumes | FSDP as DDP | predicts | quick tests |
|---|---|---|---|---|---|---|
"""
TAIL = """
What differs is in `training/settings/versions.py`, or avoided by a call that all versions have:

| needed | new in | what is done |
|---|---|---|
| `activation_checkpointing_enable`; the older name warns and goes with 6 | transformers 5.23 | taken where it is |
| DDP leaves buffers alone in forwards: `forward_sync_buffers`; the older argument warns | torch 2.13 | DDP's attribute, which has one name in all |
| no handlers of torchrun's own: `TORCHELASTIC_SIGNALS_TO_HANDLE` | torch 2.10 | set; before, the launcher takes the handlers back once the ranks are created: a signal in these milliseconds ends the run at once instead of stopping it |
| failures of ranks that were on their way out when another rank's was noticed | torch 2.10 | the launcher adds them |
| Python's garbage collector leaves sharded gradients alone (pytorch/pytorch#136358) | torch 2.10 | before, with FSDP, it runs between steps only, every `--log-every` steps |
| TF32: `fp32_precision` | torch 2.9 | `torch.set_float32_matmul_precision` |
| `torch.accelerator.memory` | torch 2.9 | `torch.get_device_module` |
| gloo's average in `reduce_scatter`, for FSDP on CPUs: 2.8 gives the sum | after torch 2.8 | FSDP asks for the sum and divides |
"""  # noqa: E501


def install(folder: Path, torch: str, transformers: str) -> Path:
    """The Python of an environment with these versions. There is one for each torch."""
    python = folder / f"torch-{torch or 'newest'}" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", python.parent.parent], check=True)
    pairs = {"torch": torch, "transformers": transformers}
    wanted = [f"{name}=={version}" if version else name for name, version in pairs.items()]
    pip = [str(python), "-m", "pip", "install", "--quiet", "--upgrade", *wanted, *OTHERS]
    subprocess.run(pip, check=True)
    return python


def train(python: Path, runs: Path, name: str, *flags: str, stop: int = 0) -> dict[str, Any]:
    """The results of a run on two ranks. `stop`: the signal that stops it once it trains."""
    command = ["./launch.sh", "--nproc-per-node", "2", "--runs-dir", str(runs), "--run-name", name,
               "--cache-dir", str(runs / "cache"), *FLAGS, *flags]  # fmt: skip
    log, results = runs / name / "metrics.jsonl", runs / name / "results.json"
    before = log.stat().st_size if log.exists() else 0
    results.unlink(missing_ok=True)
    environment = os.environ | {"PYTHON": str(python)}
    with (runs / f"{name}.log").open("ab") as output:
        process = subprocess.Popen(command, cwd=PROJECT, env=environment, stdout=output,
                                   stderr=output, start_new_session=True)  # fmt: skip
        while stop and process.poll() is None:
            if log.exists() and log.stat().st_size > before:
                # A terminal's Ctrl-C reaches the ranks as well.
                target = os.killpg if stop == signal.SIGINT else os.kill
                target(process.pid, stop)
                break
            time.sleep(0.05)
        code = process.wait(TIMEOUT_S)
    assert code == 0, f"exit code {code}, see {output.name}"
    result: dict[str, Any] = json.loads(results.read_text("utf-8"))
    assert result["stopped"] is bool(stop), f"stopped: {result['stopped']}"
    return result


def steps_of(run: Path) -> list[tuple[int, float, float]]:
    """Of every step its number, loss and gradient norm."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text("utf-8").splitlines())
    return [(x["step"], x["loss"], x["grad_norm"]) for x in lines if x["split"] == "train"]


def stop_and_resume(python: Path, runs: Path) -> None:
    signals = signal.SIGTERM, signal.SIGINT
    stops = [train(python, runs, "stopped", stop=number)["step"] for number in signals]
    train(python, runs, "stopped")
    assert 0 < stops[0] < stops[1] < STEPS, stops
    last = f"checkpoints/step-{STEPS:08}/model.safetensors"
    weights = [(runs / name / last).read_bytes() for name in ("whole", "stopped")]
    assert weights[0] == weights[1], "other weights"
    assert steps_of(runs / "whole") == steps_of(runs / "stopped"), "other losses"


def fsdp(python: Path, runs: Path) -> None:
    train(python, runs, "fsdp", "--strategy", "fsdp")
    ddp_steps, fsdp_steps = (steps_of(runs / name)[:COMPARED] for name in ("whole", "fsdp"))
    for ddp_step, fsdp_step in zip(ddp_steps, fsdp_steps, strict=True):
        pairs = zip(ddp_step, fsdp_step, strict=True)
        assert all(math.isclose(a, b, rel_tol=1e-4) for a, b in pairs), (ddp_step, fsdp_step)


def predict(python: Path, runs: Path) -> None:
    model = str(runs / "whole" / "best")
    command = [str(python), "predict.py", "--model", model, "where is my parcel?"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0 and done.stdout.count("\t") == 2, done.stderr


def quick_tests(python: Path) -> str:
    """What pytest counts, such as "431 passed, 2 skipped"."""
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    done = subprocess.run(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True)
    last = done.stdout.splitlines()[-1] if done.stdout else "nothing"
    return ", ".join(re.findall(r"\d+ (?:passed|failed|skipped|errors?)", last)) or last


def outcome(check: Callable[[], Any]) -> str:
    try:
        check()
    except (AssertionError, OSError, ValueError, subprocess.SubprocessError) as error:
        return f"**no**: {error}"
    return "yes"


def row(folder: Path, torch: str, transformers: str) -> str:
    python = install(folder, torch, transformers)
    code = "import importlib.metadata as m; print(m.version('torch'), m.version('transformers'))"
    versions = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    runs = folder / "runs" / "-".join(versions.stdout.split())
    subprocess.run(["rm", "-rf", runs], check=True)
    runs.mkdir(parents=True)
    cells = [
        *versions.stdout.split(),
        outcome(lambda: train(python, runs, "whole")),
        outcome(lambda: stop_and_resume(python, runs)),
        outcome(lambda: fsdp(python, runs)),
        outcome(lambda: predict(python, runs)),
        quick_tests(python),
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "versions")
    parser.add_argument("--only", help="rows with this torch, printed; the page is not written")
    arguments = parser.parse_args()
    folder, lines = arguments.folder.absolute(), []
    for torch, transformers in ROWS:
        if arguments.only in (None, torch):
            lines.append(row(folder, torch, transformers))
            print(lines[-1], flush=True)
    if arguments.only is None:
        head = HEAD.format(
            python=".".join(map(str, sys.version_info[:2])), steps=STEPS, compared=COMPARED
        )
        PAGE.write_text(head + "\n".join(lines) + "\n" + TAIL, encoding="utf-8")


if __name__ == "__main__":
    main()
