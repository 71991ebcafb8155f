"""What a run tells: console and `log.txt`, progress bar, `metrics.jsonl`, TensorBoard.

Only the main process tells anything; on the other ranks the same calls do nothing.
"""

import json
import logging
import logging.handlers
import math
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from tqdm import tqdm

from training.checkpoint.state import Progress
from training.distributed import watchdog
from training.settings.config import TrainConfig
from training.settings.errors import UserError, explain_disk_errors, needs_no_traceback
from training.step import evaluation
from training.tracking.figures import confusion_image
from training.tracking.speed import Profiler

log = logging.getLogger("training")
PLOTTED_LABELS = 40  # more classes make figures that nobody can read
HPARAMS = (
    "model max_length global_batch_size epochs lr weight_decay schedule warmup_ratio max_grad_norm "
    "dropout label_smoothing class_weights freeze_encoder precision seed"
).split()


class ConsoleHandler(logging.Handler):
    """Prints above a progress bar that is on the screen."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            tqdm.write(self.format(record), file=sys.stdout)
            sys.stdout.flush()
        except BrokenPipeError:  # `| tee` was ended by the same Ctrl-C: log.txt goes on
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        except OSError:  # `> file` on a full disk: what is trained matters more
            pass


def start_console(main_process: bool) -> None:
    """Log to the screen, and keep what is said for `log.txt` until the run has a folder."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.raiseExceptions = False  # a full disk is told once, by what fails on it
    threading.excepthook = _in_a_thread
    log.handlers.clear()
    log.propagate = False
    log.setLevel(logging.INFO if main_process else logging.CRITICAL)
    if not main_process:
        return
    console = ConsoleHandler()
    console.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.addHandler(console)
    log.addHandler(logging.handlers.MemoryHandler(10_000, flushLevel=logging.CRITICAL + 1))


def _in_a_thread(failure: Any) -> None:
    """TensorBoard writes in a thread; what fails there comes up again in its next call."""
    if not needs_no_traceback(failure.exc_value):
        sys.__excepthook__(failure.exc_type, failure.exc_value, failure.exc_traceback)


class Tracker:
    """Writes a run's records. `at`: how far a resumed run is."""

    def __init__(
        self, run: Path, config: TrainConfig, device: torch.device, main_process: bool, at: Progress
    ) -> None:
        watchdog.errors_folder = run / "errors"  # where a traceback goes from now on
        self.run = run
        self.profiler = Profiler(run, config.profile if main_process else 0, device)
        self.enabled = main_process
        self.writer: Any = None
        self.bar: Any = None
        self.error: UserError | None = None  # of the disk; for all ranks to stop by
        if not main_process:
            return
        memory = next(h for h in log.handlers if isinstance(h, logging.handlers.MemoryHandler))
        file = logging.FileHandler(run / "log.txt", encoding="utf-8")
        file.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        memory.setTarget(file)
        memory.close()  # hands over what was said before the folder was there
        log.removeHandler(memory)
        log.addHandler(file)
        (run / "config.toml").write_text(config.to_toml(), encoding="utf-8")
        for name in ("metrics.jsonl", "bad_batches.jsonl"):
            _forget_after(run / name, at)
        self.lines = (run / "metrics.jsonl").open("a", encoding="utf-8")
        try:
            from torch.utils.tensorboard import SummaryWriter

            purge = at.step + 1 if at.step else 0  # what a killed run had written after that
            self.writer = SummaryWriter(str(run / "tensorboard"), purge_step=purge)
        except ImportError as error:
            log.warning("no TensorBoard: %s", error)

    def start_bar(self, total_steps: int, step: int) -> None:
        hidden = None if self.enabled else True  # None: hidden when the output is no terminal
        self.bar = tqdm(total=total_steps, initial=step, desc="training", unit=" steps",
                        disable=hidden, dynamic_ncols=True)  # fmt: skip

    def advance(self) -> None:
        """Call after each optimizer step."""
        self.bar.update()
        self.profiler.step()

    def record(self, step: int, epoch: float, split: str, values: dict[str, Any]) -> None:
        """A line of `metrics.jsonl`, and a point on every curve. What is not finite is left out."""
        if not self.enabled:
            return
        known = {k: v if math.isfinite(v) else None for k, v in values.items()}
        line = {"step": step, "epoch": epoch, "split": split, **known}
        with self.disk_errors():
            self.lines.write(json.dumps(line) + "\n")
            self.lines.flush()
            if self.writer is not None:
                for name, value in known.items():
                    if name != "rows" and value is not None:
                        self.writer.add_scalar(f"{split}/{name}", value, step)
                self.writer.flush()

    @contextmanager
    def disk_errors(self) -> Iterator[None]:
        """Keeps a fault of the disk for all ranks to stop by."""
        try:
            with explain_disk_errors(self.run):
                yield
        except UserError as error:
            self.error = error

    def train_step(self, step: int, epoch: float, values: dict[str, Any]) -> None:
        """What the log says every --log-every steps."""
        self.record(step, epoch, "train", values)
        if self.enabled:
            self.bar.set_postfix_str(f"loss {values['loss']:.4f}, lr {values['lr']:.2e}, "
                                     f"{values['samples_per_second']:,.0f} rows/s")  # fmt: skip
            log.info(
                "step %d of %d  epoch %.2f  loss %.4f  lr %.2e  grad norm %.3f  %s rows/s  "
                "%s tokens/s  padding %.1f %%", step, self.bar.total, epoch, values["loss"],
                values["lr"], values["grad_norm"], f"{values['samples_per_second']:,.0f}",
                f"{values['tokens_per_second']:,.0f}", 100 * values["padding"],
            )  # fmt: skip

    def evaluated(
        self, step: int, epoch: float, split: str, result: evaluation.Evaluation, note: str = ""
    ) -> None:
        """Metrics of an evaluation, with its figures."""
        self.record(step, epoch, split, result.metrics)
        if not self.enabled:
            return
        m = result.metrics
        log.info("%s at step %d: loss %.4f  accuracy %.4f  macro F1 %.4f  (%d rows)%s", split, step,
                 m["loss"], m["accuracy"], m["macro_f1"], m["rows"], note)  # fmt: skip
        if self.writer is not None and len(result.labels) <= PLOTTED_LABELS:
            with self.disk_errors():
                self._draw(step, split, result)

    def _draw(self, step: int, split: str, result: evaluation.Evaluation) -> None:
        """Confusion matrix and precision-recall curves."""
        assert result.truth is not None
        probabilities = result.probabilities()
        if result.truth.ndim == 1:
            image = confusion_image(evaluation.confusion(result), result.labels)
            self.writer.add_image(f"{split}/confusion", image, step, dataformats="HWC")
            truth = np.eye(len(result.labels), dtype=np.int64)[result.truth]
        else:
            truth = result.truth
        for i, label in enumerate(result.labels):
            self.writer.add_pr_curve(f"{split}/{label}", truth[:, i], probabilities[:, i], step)
        self.writer.flush()

    def hyperparameters(self, config: TrainConfig, metrics: dict[str, float]) -> None:
        """The hparams page, in the run's own folder and by the run's only writer."""
        if self.writer is None:
            return
        from torch.utils.tensorboard.summary import hparams

        settings = {k: v for k, v in asdict(config).items() if k in HPARAMS and v is not None}
        for summary in hparams(settings, metrics):
            self.writer.file_writer.add_summary(summary)
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, 0)
        self.writer.flush()

    def close_bar(self) -> None:
        if self.bar is not None:
            self.bar.close()

    def close(self) -> None:
        self.profiler.close()
        if self.writer is not None:
            self.writer.close()
        if self.enabled:
            self.lines.close()


def _forget_after(path: Path, at: Progress) -> None:
    """Drop the lines of what a resumed run is about to do again, and a torn last line."""
    if not path.exists():
        return
    kept = []
    for text in path.read_text(encoding="utf-8").split("\n"):
        try:
            line = json.loads(text) if text else {"step": math.inf}
        except json.JSONDecodeError:
            continue
        # An evaluation that is due; and a step is known to be bad one step after it.
        again = (line.get("split") == "val" and at.evaluation_due) or "in_a_row" in line
        if line["step"] < at.step + (not again):
            kept.append(text + "\n")
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)
