"""Where a run's numbers go: log, progress bar, `metrics.jsonl`, TensorBoard.

Only the main process writes; on the other ranks the same calls do nothing.
"""

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from training.checkpoint.state import Progress
from training.dataset.token_store import TokenStore
from training.distributed.ranks import is_main
from training.settings.config import TrainConfig
from training.settings.errors import UserError, explain_disk_errors
from training.step import evaluation
from training.step.batch_plan import BatchPlan
from training.tracking.console import (
    describe_data,
    describe_model,
    describe_step,
    log_to_file,
    start_console,
)
from training.tracking.figures import confusion_image
from training.tracking.throughput import Profiler

log = logging.getLogger("training")
PLOTTED_LABELS = 40  # more classes make figures that nobody can read


class Tracker:
    """Writes a run's records."""

    def __init__(self) -> None:
        self.enabled = is_main()
        self.writer: Any = None
        self.error: UserError | None = None  # of the disk; all ranks then stop together
        start_console(self.enabled)

    def describe(
        self,
        config: TrainConfig,
        plan: BatchPlan,
        splits: dict[str, TokenStore],
        model: nn.Module,
        device: torch.device,
    ) -> None:
        """Say what will be trained, on what."""
        if self.enabled:
            describe_data(splits, config.max_length)
            describe_model(model)
            describe_step(plan, device)

    def open(
        self,
        run: Path,
        config: TrainConfig,
        progress: Progress,
        splits: dict[str, TokenStore],
        steps_per_epoch: int,
        total_steps: int,
    ) -> None:
        """Begin to write to the folder `run`. Lines of steps after `progress` are dropped."""
        self.run, self.metric = run, config.metric
        self.total_steps, self.steps_per_epoch = total_steps, steps_per_epoch
        self.profiler = Profiler(run, config.profile if self.enabled else 0)
        # disable=None: hidden if the output is no terminal
        self.bar = tqdm(
            total=total_steps, initial=progress.step, desc="training", unit=" steps",
            disable=None if self.enabled else True, dynamic_ncols=True,
        )  # fmt: skip
        if not self.enabled:
            return
        log_to_file(run / "log.txt")
        (run / "config.toml").write_text(config.to_toml(), encoding="utf-8")
        _copy_bad_rows(run, splits)
        for name in ("metrics.jsonl", "bad_batches.jsonl"):
            _forget_after(run / name, progress)
        self.lines = (run / "metrics.jsonl").open("a", encoding="utf-8")
        try:
            from torch.utils.tensorboard import SummaryWriter

            purge = progress.step + 1 if progress.step else 0  # written by a run that was killed
            self.writer = SummaryWriter(str(run / "tensorboard"), purge_step=purge)
        except ImportError as error:
            log.warning("no TensorBoard: %s", error)

    def advance(self) -> None:
        """Call after each optimizer step."""
        self.bar.update()
        self.profiler.step()

    def record(self, step: int, split: str, values: dict[str, Any]) -> None:
        """A line of `metrics.jsonl`, and a point on every curve. What is not finite is left out."""
        if not self.enabled:
            return
        known = {k: v if math.isfinite(v) else None for k, v in values.items()}
        line = {"step": step, "epoch": step / self.steps_per_epoch, "split": split, **known}
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
        """A failure of the disk is kept in `error`, so that all ranks stop together."""
        try:
            with explain_disk_errors(self.run):
                yield
        except UserError as error:
            self.error = error

    def train_step(self, step: int, values: dict[str, Any]) -> None:
        """The line of the log every --log-every steps."""
        self.record(step, "train", values)
        if self.enabled:
            rows = f"{values['samples_per_second']:,.0f} rows/s"
            self.bar.set_postfix_str(f"loss {values['loss']:.4f}, lr {values['lr']:.2e}, {rows}")
            log.info(
                f"step {step} of {self.bar.total}  epoch {step / self.steps_per_epoch:.2f}  "
                f"loss {values['loss']:.4f}  lr {values['lr']:.2e}  "
                f"grad norm {values['grad_norm']:.3f}  {rows}  "
                f"{values['tokens_per_second']:,.0f} tokens/s  "
                f"padding {100 * values['padding']:.1f} %"
            )

    def evaluated(
        self, step: int, split: str, result: evaluation.Evaluation, note: str = ""
    ) -> None:
        """Metrics of an evaluation, with its figures."""
        self.record(step, split, result.metrics)
        if not self.enabled:
            return
        m = result.metrics
        log.info(
            f"{split} at step {step}: loss {m['loss']:.4f}  accuracy {m['accuracy']:.4f}  "
            f"macro F1 {m['macro_f1']:.4f}  ({m['rows']} rows)  {note}"
        )
        if self.writer is not None and len(result.labels) <= PLOTTED_LABELS:
            with self.disk_errors():
                self._draw(step, split, result)

    def validated(self, result: evaluation.Evaluation, progress: Progress) -> None:
        """An evaluation in the course of training, and how it compares."""
        is_best = progress.best_step == progress.step
        when = "so far" if is_best else f"was at step {progress.best_step}"
        self.evaluated(progress.step, "val", result, f"best {self.metric} {when}")

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

        for summary in hparams(config.hyperparameters(), metrics):
            self.writer.file_writer.add_summary(summary)
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, 0)
        self.writer.flush()

    def close(self) -> None:
        self.profiler.close()
        if self.writer is not None:
            self.writer.close()
        if self.enabled:
            self.lines.close()


def _copy_bad_rows(run: Path, splits: dict[str, TokenStore]) -> None:
    """List the rows that were left out in `bad_rows.tsv`, if there are any."""
    files = dict.fromkeys(store.folder / "bad_rows.tsv" for store in splits.values())
    lines = "".join(file.read_text(encoding="utf-8") for file in files)
    if lines:
        (run / "bad_rows.tsv").write_text(lines, encoding="utf-8")


def _forget_after(path: Path, progress: Progress) -> None:
    """Drop the lines of steps that a resumed run repeats, and an incomplete last line."""
    if not path.exists():
        return
    kept = []
    for text in path.read_text(encoding="utf-8").split("\n"):
        try:
            line = json.loads(text) if text else {"step": math.inf}
        except json.JSONDecodeError:
            continue
        # An evaluation that is due; and a step is known to be bad one step after it.
        again = (line.get("split") == "val" and progress.evaluation_due) or "in_a_row" in line
        if line["step"] < progress.step + (not again):
            kept.append(text + "\n")
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)
