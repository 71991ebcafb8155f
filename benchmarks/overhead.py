"""What it costs to survive: the ranks' agreement in every step, and a save in the background.

    python benchmarks/overhead.py [--rounds 7] [--model FOLDER]

Agreement: steps a second of `train.py` on two ranks, with and without the all-reduce by which the
ranks agree to stop; in turn, the median of the ratios. The tiny model is the worst case: its steps
take milliseconds. Saving: how long a step waits for a checkpoint, against a plain `torch.save` of
the same weights and optimizer state to the same disk, in turn.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "{{cookiecutter.project_slug}}"
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests"), str(ROOT / "benchmarks")]
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3])
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import transformers  # noqa: E402
from pretrained import installed  # noqa: E402
from ranks import Ranks  # noqa: E402
from tiny import save_tiny  # noqa: E402
from training.settings.config import TrainConfig  # noqa: E402


def step_times(config: TrainConfig, agree: bool) -> float:
    """Seconds of a step, on average, after the first twenty. On every rank."""
    from jobs import Patch, before_each_update, run
    from training.launch.signals import StopRequest

    times: list[float] = []
    agreed = StopRequest.agreed if agree else lambda self, error=None: False
    with (
        before_each_update(lambda optimizer: times.append(time.perf_counter())),
        Patch(StopRequest, "agreed", agreed),
    ):
        run(config)
    return (times[-1] - times[20]) / (len(times) - 21)


def save_times(config: TrainConfig, rounds: int) -> list[tuple[float, float, float]]:
    """For each round, seconds of: the wait for a save in the background, that save to its end, and
    a plain `torch.save` of the weights and the optimizer's state."""
    import torch
    from training.checkpoint.model_folder import ModelFolder
    from training.checkpoint.saver import Saver
    from training.checkpoint.state import TrainState
    from training.step.optimizer import build_optimizer
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model = AutoModelForSequenceClassification.from_pretrained(config.model)
    optimizer = build_optimizer(model, config)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    run = Path(config.runs_dir)
    (run / "checkpoints").mkdir(parents=True)
    tokenizer, labels = AutoTokenizer.from_pretrained(config.model), ["a", "b"]
    folder = ModelFolder(model, tokenizer, labels, replace(config, keep_checkpoints=1))
    state = TrainState(folder)
    state.checked = set(state.parts)  # a check needs a process group
    saver = Saver(run, state)
    found = []
    for step in range(1, rounds + 2):
        began = time.perf_counter()
        content = {"optimizer": optimizer.state_dict()}
        saver._save(step, model.state_dict(), content, is_best=False, is_last=False)
        waited = time.perf_counter() - began
        saver._wait()
        whole = time.perf_counter() - began
        began = time.perf_counter()
        content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(content, run / "plain.pt")
        found.append((waited, whole, time.perf_counter() - began))
    return found[1:]  # the first makes the buffers


def main() -> None:
    import overhead  # as the rank processes import it

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    transformers.utils.logging.disable_progress_bar()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", default=installed(), help="folder of a pretrained model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = (PROJECT / "sample" / "val.tsv").read_text("utf-8").splitlines()[1:]
        texts = [line.split("\t")[0] for line in lines]
        config = TrainConfig(
            model=str(save_tiny(folder / "tiny", texts)),
            train_file=(str(PROJECT / "sample" / "train.tsv"),),
            max_length=48, val_fraction=0.0, max_steps=400, log_every=1000, lr=1e-3,
            cache_dir=str(folder / "cache"), runs_dir=str(folder / "runs"),
        )  # fmt: skip
        pool = Ranks(folder)
        models = {"tiny": config}
        if arguments.model:
            models["pretrained"] = replace(config, model=arguments.model, max_steps=60)
        for what, settings in models.items():
            ratios, steps = [], []
            for number in range(arguments.rounds):
                seconds = {}
                for agree in (True, False) if number % 2 else (False, True):
                    named = replace(settings, run_name=f"{what}-{number}-{agree}")
                    seconds[agree] = max(pool.run(2, overhead.step_times, named, agree))
                ratios.append(seconds[False] / seconds[True])
                steps.append(seconds[True])
            milliseconds = 1000 * statistics.median(steps)
            print(
                f"agreement, {what} model, {milliseconds:.1f} ms a step: steps/s "
                f"with it are {statistics.median(ratios):.3f} of those without "
                f"({min(ratios):.3f} to {max(ratios):.3f}, {arguments.rounds} rounds)",
                flush=True,
            )
        if arguments.model:
            saving = replace(config, model=arguments.model, runs_dir=str(folder / "saving"))
            (found,) = pool.run(1, overhead.save_times, saving, arguments.rounds)
            waited, whole, plain = (
                1000 * statistics.median(column) for column in zip(*found, strict=True)
            )
            print(
                f"a save: the step waits {waited:.0f} ms, torch.save takes {plain:.0f} ms "
                f"(ratio {waited / plain:.2f}); written, flushed and hashed after {whole:.0f} ms"
            )
        pool.close()


if __name__ == "__main__":
    main()
