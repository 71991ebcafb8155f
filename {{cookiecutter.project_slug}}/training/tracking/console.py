"""The screen: a log that goes well with a progress bar, and what it says before the first step."""

import io
import logging
import logging.handlers
import math
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from tqdm import tqdm

from training.dataset.token_store import TokenStore
from training.settings.batch_sizes import BatchSizes
from training.settings.config import TrainConfig
from training.settings.errors import needs_no_traceback
from training.step.batch_plan import BatchPlan
from training.tracking.data_report import remarks

log = logging.getLogger("training")
SHOWN_LABELS = 12
FEW_ROWS = 4  # a rank has few rows if it could compute this many times as many at once


class ConsoleHandler(logging.Handler):
    """Prints above a progress bar that is on the screen."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stdout)
            sys.stdout.flush()
        except BrokenPipeError:  # `| tee` was ended by the same Ctrl-C: log.txt still gets the line
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        except OSError:  # `> file` on a full disk: the training matters more
            pass


def start_console(main_process: bool) -> None:
    """Log to the screen, and keep the lines for `log.txt` until the run has a folder."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # the screen may lack characters of labels
        sys.stdout.reconfigure(errors="backslashreplace")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.raiseExceptions = False  # a full disk is reported once, by what fails on it
    threading.excepthook = _report_thread_failure
    log.handlers.clear()
    log.propagate = False
    log.setLevel(logging.INFO if main_process else logging.CRITICAL)
    if not main_process:
        return
    console = ConsoleHandler()
    console.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.addHandler(console)
    log.addHandler(logging.handlers.MemoryHandler(10_000, flushLevel=logging.CRITICAL + 1))


def log_to_file(path: Path) -> None:
    """Log to `path` too, from the first line of this run on."""
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    memory = next(h for h in log.handlers if isinstance(h, logging.handlers.MemoryHandler))
    memory.setTarget(file)
    memory.close()  # hands over the lines from before
    log.removeHandler(memory)
    log.addHandler(file)


def _report_thread_failure(failure: Any) -> None:
    """TensorBoard writes in a thread; a failure of the disk there is raised by its next call."""
    if not needs_no_traceback(failure.exc_value):
        sys.__excepthook__(failure.exc_type, failure.exc_value, failure.exc_traceback)


# -- before the first step -----------------------------------------------------------------------


def describe_data(splits: dict[str, TokenStore], max_length: int) -> None:
    """Rows, labels and lengths of each split, and what is worth a look."""
    for name, store in splits.items():
        full_length = store.values("full_length")
        counts = list(zip(store.labels, store.label_counts(), strict=True))
        shown = ", ".join(f"{label} {n:,}" for label, n in counts[:SHOWN_LABELS])
        if len(counts) > SHOWN_LABELS:
            shown += f", and {len(counts) - SHOWN_LABELS} more"
        rows = f"{store.meta['rows']:,} rows from {store.meta['lines']:,} lines"
        if store.subset is not None:
            rows = f"{len(store):,} of {rows}"
        log.info(f"{name}: {rows}, {len(counts)} labels ({shown})")
        cut = f"{100 * (full_length > max_length).mean():.1f} %"
        average = f"{full_length.mean():.0f} tokens a row on average"
        log.info(f"{name}: {average}, {cut} longer than max_length {max_length} and cut")
    for line in remarks(splits):
        log.warning(line)


def describe_model(model: nn.Module, plan: BatchPlan, config: TrainConfig) -> None:
    """How large the model is, how a global batch is computed, and what would be faster."""
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    log.info(f"model: {parameters:,} parameters, {trained:,} trained")
    sizes, ranks, device = plan.sizes, dist.get_world_size(), next(model.parameters()).device
    steps = sizes.gradient_accumulation_steps
    log.info(
        f"global batch {sizes.global_batch_size} = {counted(ranks, 'rank')} ({device.type}) × "
        f"{counted(steps, 'accumulation step')} × at most {sizes.batch_size} rows"
    )
    if plan.lengths is not None:
        log.info(f"torch.compile: batches are padded to {plan.lengths.tolist()} tokens")
    for line in suggestions(config, sizes, ranks, device):
        log.info(line)


def suggestions(
    config: TrainConfig, sizes: BatchSizes, ranks: int, device: torch.device
) -> Iterator[str]:
    """What would use this hardware better."""
    could_change = config.precision == "fp32" and device.type == "cuda"
    if could_change and torch.cuda.is_bf16_supported(including_emulation=False):
        yield "fp32 is slow on this GPU: --precision bf16 is much faster; tf32 too, closer to fp32"
    if sizes.batch_size * FEW_ROWS <= config.batch_size:
        few, fewer = sizes.batch_size, math.ceil(sizes.global_batch_size / config.batch_size)
        yield (
            f"each rank has only {counted(few, 'row')} a step: {counted(fewer, 'rank')} would give "
            f"the same result, and --global-batch-size {ranks * config.batch_size} would use all "
            f"{ranks} (another batch size needs another --lr)"
        )


def counted(number: int, what: str) -> str:
    """`number` and the singular or plural of `what`."""
    return f"{number} {what}{'' if number == 1 else 's'}"
