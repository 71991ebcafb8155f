"""What a run says before the first step and leaves behind after the last."""

import json
import logging
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

from training.dataset.token_store import TokenStore
from training.distributed.ranks import is_main
from training.launch.signals import Interrupted
from training.settings.batch_sizes import BatchSizes
from training.settings.config import TrainConfig
from training.settings.errors import explain_disk_errors
from training.step.evaluation import Evaluation, report
from training.tracking.data_report import remarks
from training.tracking.tracker import Tracker

log = logging.getLogger("training")


def describe_data(splits: dict[str, TokenStore | None], max_length: int) -> None:
    """Rows, labels and lengths of each split, and what is worth a look, in the log."""
    if not is_main():
        return
    stores = {name: store for name, store in splits.items() if store is not None}
    for name, store in stores.items():
        full = store.values("full_length")
        counts = store.label_counts()
        shown = ", ".join(
            f"{label} {n:,}" for label, n in list(zip(store.labels, counts, strict=True))[:12]
        )
        more = f", and {len(counts) - 12} more" if len(counts) > 12 else ""
        read = f"{store.meta['rows']:,} rows from {store.meta['lines']:,} lines"
        if store.subset is not None:
            read = f"{len(store):,} of {read}"
        log.info("%s: %s, %d labels (%s%s)", name, read, len(counts), shown, more)
        log.info(
            "%s: %.0f tokens a row on average, %.1f %% longer than max_length %d and cut",
            name, full.mean(), 100 * (full > max_length).mean(), max_length,
        )  # fmt: skip
    for line in remarks(stores):
        log.warning(line)


def describe_step(sizes: BatchSizes, device: torch.device) -> None:
    log.info("a step is %d rows: %d ranks on %s x %d accumulated x at most %d rows at a time",
             sizes.global_batch_size, dist.get_world_size(), device.type,
             sizes.gradient_accumulation_steps, sizes.batch_size)  # fmt: skip


def describe_model(model: nn.Module) -> None:
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    log.info("model: %s parameters, %s trained", f"{parameters:,}", f"{trained:,}")


def keep_bad_rows(run: Path, splits: dict[str, TokenStore | None]) -> None:
    """Copy the list of rows that were left out into the run's folder: `bad_rows.tsv`."""
    found = [s.folder / "bad_rows.tsv" for s in splits.values() if s is not None]
    lines = "".join(p.read_text(encoding="utf-8") for p in dict.fromkeys(found))
    if lines:
        (run / "bad_rows.tsv").write_text(lines, encoding="utf-8")


def finish(
    run: Path,
    config: TrainConfig,
    tracker: Tracker,
    measure: Callable[..., Evaluation],
    splits: dict[str, TokenStore],
    facts: dict[str, Any],
) -> None:
    """Evaluate the best weights, write `report.txt` and `results.json`. Call on every rank."""
    results = {
        **facts,
        "run": run.name,
        "world_size": dist.get_world_size(),
        "versions": {
            "python": platform.python_version(), "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }  # fmt: skip
    tracker.close_bar()
    if facts["early"]:
        log.info("stopped early at step %d: %s got no better", facts["step"], config.metric)
    text = ""
    for name, store in splits.items():
        began = time.perf_counter()
        try:
            result = measure(store=store, description=f"final {name}")
        except Interrupted:  # asked to stop: the run is there, the report comes with the next start
            results["stopped"] = True
            break
        results[name] = result.metrics
        results["timings"][f"{name}_seconds"] = time.perf_counter() - began
        if name == "test":
            tracker.evaluated(facts["step"], facts["epoch"], name, result, "  best weights")
        if is_main():
            text += f"{name}: {len(store):,} rows, weights of step {facts['best_step']}\n"
            text += f"{report(result)}\n"
    if is_main():
        with explain_disk_errors(run):
            _write(run, config, tracker, results, text, list(splits))


def _write(
    run: Path, config: TrainConfig, tracker: Tracker, results: dict[str, Any], text: str,
    splits: list[str],
) -> None:  # fmt: skip
    measured = {s: results[s] for s in splits if s in results}
    final = {f"final/{s}_{k}": v for s in measured for k, v in measured[s].items() if k != "rows"}
    if final:
        tracker.hyperparameters(config, final)
    if text and not results["stopped"]:
        (run / "report.txt").write_text(text, encoding="utf-8")
        log.info("final report\n%s", text)
    (run / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if tracker.error is not None:
        raise tracker.error
    if results["stopped"]:
        how = f"and saved after step {results['step']}" if results["step"] else "before any step"
        log.info("stopped %s; --run-name %s goes on", how, run.name)
    else:
        log.info("done: %s", run)
