"""What a run leaves behind after its last step: the final evaluation, the report, the results."""

import json
import logging
import math
import platform
import time
from typing import Any

import torch
import torch.distributed as dist
import transformers

from training.distributed.ranks import gather, is_main
from training.settings.errors import explain_disk_errors
from training.step.evaluation import Evaluation, Evaluator
from training.tracking.figures import confusion
from training.tracking.throughput import peak_memory
from training.tracking.tracker import Splits, Tracker

log = logging.getLogger("training")
Results = dict[str, Any]  # the content of results.json


def finish(tracker: Tracker, evaluator: Evaluator, splits: Splits, stopped: bool) -> None:
    """Evaluate the best weights, unless the run was `stopped`; write `report.txt` and
    `results.json`. Call on every rank."""
    tracker.bar.close()
    config, progress = tracker.config, tracker.progress
    early = progress.should_stop_early(config.early_stopping_patience)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    results: Results = {
        "stopped": stopped,
        "step": progress.step,
        "epoch": progress.step / tracker.steps_per_epoch,
        "best_step": progress.best_step or progress.step,
        "early": early,
        "metric": config.metric,
        "labels": splits["train"].labels,
        "peak_memory": gather(peak_memory(evaluator.device)),
        "timings": {"seconds": time.perf_counter() - tracker.began},
        "run": tracker.run.name,
        "world_size": dist.get_world_size(),
        "versions": {"python": platform.python_version(), **versions},
    }
    if early:
        log.info(f"stopped early at step {progress.step}: {config.metric} did not improve")
    evaluated = {} if stopped else {name: s for name, s in splits.items() if name != "train"}
    text = _evaluate(tracker, evaluator, evaluated, results)
    if is_main():
        with explain_disk_errors(tracker.run):
            _write(tracker, results, text)


def _evaluate(tracker: Tracker, evaluator: Evaluator, splits: Splits, results: Results) -> str:
    """Add the metrics of `splits` to `results`. Returns the report, on the main process.

    Asked to stop meanwhile: the run is complete, and its report is made when it is started again.
    """
    text = ""
    for name, store in splits.items():
        began = time.perf_counter()
        result = evaluator.evaluate(store, description=f"final {name}")
        if result is None:
            results["stopped"] = True
            return ""
        finite = {k: v if math.isfinite(v) else None for k, v in result.metrics.items()}
        results[name] = finite  # JSON has no NaN
        results["timings"][f"{name}_seconds"] = time.perf_counter() - began
        if name == "test":
            tracker.evaluated(name, result)
        if is_main():
            text += f"{name}: {len(store):,} rows, weights of step {results['best_step']}\n"
            text += f"{report(result)}\n"
    return text


def report(result: Evaluation) -> str:
    """Precision, recall, F1 and support of every class, averages over the classes that have rows,
    every metric, and the confusion matrix, as text."""
    from sklearn import metrics as sk

    truth, predicted, names = result.truth, result.predicted(), result.labels
    options: dict[str, Any] = {"labels": range(len(names)), "zero_division": 0}
    *scores, support = sk.precision_recall_fscore_support(truth, predicted, **options)
    total, width = int(support.sum()), max(*map(len, names), len("weighted avg"))
    lines = [f"{'':>{width}}  {'precision':>9} {'recall':>9} {'f1-score':>9} {'support':>9}", ""]

    def add(name: str, values: Any, rows: int) -> None:
        cells = " ".join(f"{value:>9.3f}" for value in values)
        lines.append(f"{name:>{width}}  {cells:>29} {rows:>9}")

    for name, *values, rows in zip(names, *scores, support, strict=True):
        add(name, values, rows)
    lines.append("")
    if truth.ndim == 2:
        *micro, _ = sk.precision_recall_fscore_support(truth, predicted, average="micro", **options)
        add("micro avg", micro, total)
    else:
        add("accuracy", [(truth == predicted).mean()], total)
    has_rows = support > 0
    add("macro avg", [(values @ has_rows) / max(1, has_rows.sum()) for values in scores], total)
    add("weighted avg", [(values @ support) / max(1, total) for values in scores], total)
    shown = [f"{name} {value:.4f}" for name, value in result.metrics.items() if name != "rows"]
    text = "\n".join([*lines, "", "  ".join(shown)]) + "\n"
    if truth.ndim == 2:
        return text
    matrix, name_width = confusion(result), max(map(len, names))
    width = max(5, len(str(matrix.max())) + 1)
    title = "confusion matrix: a row per true label, a column per predicted label, in this order"
    text += f"\n{title}\n"
    for name, counts in zip(names, matrix, strict=True):
        cells = "".join(f"{count or '.':>{width}}" for count in counts)
        text += f"{name:>{name_width}} {cells}\n"
    return text


def _write(tracker: Tracker, results: Results, text: str) -> None:
    run, final = tracker.run, dict[str, float]()
    for split in ("val", "test"):
        metrics = results.get(split, {})
        shown = {name: v for name, v in metrics.items() if name != "rows" and v is not None}
        final |= {f"final/{split}_{name}": value for name, value in shown.items()}
    if final:
        tracker.hyperparameters(final)
    if text:
        (run / "report.txt").write_text(text, encoding="utf-8")
        log.info(f"final report\n{text}")
    (run / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if tracker.error is not None:
        raise tracker.error
    if results["stopped"]:
        where = f"and saved after step {results['step']}" if results["step"] else "before any step"
        log.info(f"stopped {where}; --run-name {run.name} resumes it")
    else:
        log.info(f"done: {run}")
