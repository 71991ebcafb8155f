"""What a run leaves behind after its last step: the final evaluation, the report, the results."""

import json
import logging
import platform
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers

from training.checkpoint.state import Progress
from training.dataset.token_store import TokenStore
from training.distributed.ranks import gather, is_main
from training.settings.config import TrainConfig
from training.settings.errors import explain_disk_errors
from training.step.evaluation import Evaluator, report
from training.tracking.throughput import peak_memory
from training.tracking.tracker import Tracker

log = logging.getLogger("training")


def finish(
    run: Path,
    config: TrainConfig,
    tracker: Tracker,
    evaluator: Evaluator,
    splits: dict[str, TokenStore],
    progress: Progress,
    stopped: bool,
    began: float,
) -> None:
    """Evaluate the best weights, write `report.txt` and `results.json`. Call on every rank.

    `began`: when the run began, by time.perf_counter(). A run that was stopped is not evaluated.
    """
    tracker.bar.close()
    early = progress.should_stop_early(config.early_stopping_patience)
    results: dict[str, Any] = {
        "stopped": stopped,
        "step": progress.step,
        "epoch": progress.step / tracker.steps_per_epoch,
        "best_step": progress.best_step or progress.step,
        "early": early,
        "metric": config.metric,
        "labels": splits["train"].labels,
        "peak_memory": gather(peak_memory(evaluator.device)),
        "timings": {"seconds": time.perf_counter() - began},
        "run": run.name,
        "world_size": dist.get_world_size(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    if early:
        log.info("stopped early at step %d: %s did not improve", progress.step, config.metric)
    text = "" if stopped else _evaluate(results, splits, evaluator, tracker)
    if is_main():
        with explain_disk_errors(run):
            _write(run, config, tracker, results, text)


def _evaluate(
    results: dict[str, Any], splits: dict[str, TokenStore], evaluator: Evaluator, tracker: Tracker
) -> str:
    """Add the metrics of val and test to `results`. Returns the report, on the main process.

    Asked to stop meanwhile: the run is complete, and its report is made when it is started again.
    """
    text = ""
    for name in [name for name in splits if name != "train"]:
        began = time.perf_counter()
        result = evaluator.evaluate(splits[name], description=f"final {name}")
        if result is None:
            results["stopped"] = True
            return ""
        results[name] = result.metrics
        results["timings"][f"{name}_seconds"] = time.perf_counter() - began
        if name == "test":
            tracker.evaluated(results["step"], name, result, "best weights")
        if is_main():
            text += f"{name}: {len(splits[name]):,} rows, weights of step {results['best_step']}\n"
            text += f"{report(result)}\n"
    return text


def _write(
    run: Path, config: TrainConfig, tracker: Tracker, results: dict[str, Any], text: str
) -> None:
    final = {
        f"final/{split}_{name}": value
        for split in ("val", "test")
        for name, value in results.get(split, {}).items()
        if name != "rows"
    }
    if final:
        tracker.hyperparameters(config, final)
    if text:
        (run / "report.txt").write_text(text, encoding="utf-8")
        log.info("final report\n%s", text)
    (run / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if tracker.error is not None:
        raise tracker.error
    if results["stopped"]:
        where = f"and saved after step {results['step']}" if results["step"] else "before any step"
        log.info("stopped %s; --run-name %s resumes it", where, run.name)
    else:
        log.info("done: %s", run)
