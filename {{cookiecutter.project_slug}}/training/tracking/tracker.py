"""Where a run's numbers go: log, progress bar, `metrics.jsonl`, TensorBoard.

Only the main process writes; on the other ranks the same calls do nothing.
"""

import json
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from tqdm import tqdm

from training.checkpoint.state import Progress
from training.dataset.token_store import TokenStore
from training.distributed.ranks import is_main
from training.settings.config import TrainConfig
from training.settings.errors import UserError, explain_disk_errors
from training.step import evaluation
from training.step.batch_plan import BatchPlan
from training.tracking.console import describe_data, describe_model, log_to_file, start_console
from training.tracking.figures import confusion, confusion_image
from training.tracking.throughput import start_profile

log = logging.getLogger("training")
Splits = dict[str, TokenStore]
PLOTTED_LABELS = 40  # more classes make figures that nobody can read


class Tracker:
    """Writes a run's records. To make one begins the run, and its clock."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.enabled, self.began = config, is_main(), time.perf_counter()
        self.writer: Any = None  # of TensorBoard
        self.profile: Any = None
        self.error: UserError | None = None  # of the disk; all ranks then stop together
        start_console(self.enabled)

    def describe(self, model: nn.Module, plan: BatchPlan, splits: Splits) -> None:
        """Say what will be trained, on what."""
        if self.enabled:
            describe_data(splits, self.config.max_length)
            describe_model(model, plan, self.config)

    def open(
        self, run: Path, progress: Progress, plan: BatchPlan, splits: Splits, total_steps: int
    ) -> None:
        """Begin to write to the folder `run`. Lines of steps after `progress` are dropped."""
        self.run, self.progress = run, progress
        self.total_steps, self.steps_per_epoch = total_steps, plan.steps_per_epoch
        hidden = None if self.enabled else True  # None: hidden if the output is not a terminal
        self.bar = tqdm(
            desc="training", total=total_steps, initial=progress.step, unit=" steps",
            disable=hidden, dynamic_ncols=True,
        )  # fmt: skip
        if not self.enabled:
            return
        log_to_file(run / "log.txt")
        (run / "config.toml").write_text(self.config.to_toml(), encoding="utf-8")
        bad_rows = dict.fromkeys(store.folder / "bad_rows.tsv" for store in splits.values())
        if lines := "".join(file.read_text(encoding="utf-8") for file in bad_rows):
            (run / "bad_rows.tsv").write_text(lines, encoding="utf-8")
        for name in ("metrics.jsonl", "bad_batches.jsonl"):
            _forget_after(run / name, progress)
        if self.config.profile:
            self.profile = start_profile(run, self.config.profile)
        self.lines = (run / "metrics.jsonl").open("a", encoding="utf-8")
        try:
            from torch.utils.tensorboard import SummaryWriter

            purge = progress.step + 1 if progress.step else 0  # written by a run that was killed
            self.writer = SummaryWriter(str(run / "tensorboard"), purge_step=purge)
        except ImportError as error:
            log.warning(f"no TensorBoard: {error}")

    def advance(self) -> None:
        """Call after each optimizer step."""
        self.bar.update()
        if self.profile is not None:
            self.profile.step()

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

    def train_step(self, values: dict[str, float]) -> None:
        """The line of the log every --log-every steps."""
        step = self.progress.step
        self.record(step, "train", values)
        loss, lr = f"loss {values['loss']:.4f}", f"lr {values['lr']:.2e}"
        rows = f"{values['samples_per_second']:,.0f} rows/s"
        self.bar.set_postfix_str(f"{loss}, {lr}, {rows}")
        log.info(
            f"step {step} of {self.total_steps}  epoch {step / self.steps_per_epoch:.2f}  {loss}  "
            f"{lr}  grad norm {values['grad_norm']:.3f}  {rows}  "
            f"{values['tokens_per_second']:,.0f} tokens/s  padding {100 * values['padding']:.1f} %"
        )

    def evaluated(self, split: str, result: evaluation.Evaluation) -> None:
        """Metrics of an evaluation, with its figures: of the best weights, or while training."""
        step, best_step, metrics = self.progress.step, self.progress.best_step, result.metrics
        when = "so far" if best_step == step else f"was at step {best_step}"
        note = f"best {self.config.metric} {when}" if split == "val" else "best weights"
        self.record(step, split, metrics)
        first = [name for name in metrics if name not in ("loss", "rows")][:2]
        names = dict.fromkeys(["loss", *first, self.config.metric])
        shown = "  ".join(f"{name.replace('_f1', ' F1')} {metrics[name]:.4f}" for name in names)
        log.info(f"{split} at step {step}: {shown}  ({metrics['rows']} rows)  {note}")
        if self.writer is not None and len(result.labels) <= PLOTTED_LABELS:
            with self.disk_errors():
                self._draw(step, split, result)

    def _draw(self, step: int, split: str, result: evaluation.Evaluation) -> None:
        """Confusion matrix and precision-recall curves."""
        truth, probabilities = result.truth, result.probabilities()
        if truth.ndim == 1:
            image = confusion_image(confusion(result), result.labels)
            self.writer.add_image(f"{split}/confusion", image, step, dataformats="HWC")
            truth = np.eye(len(result.labels), dtype=np.int64)[truth]
        for i, label in enumerate(result.labels):
            self.writer.add_pr_curve(f"{split}/{label}", truth[:, i], probabilities[:, i], step)
        self.writer.flush()

    def hyperparameters(self, metrics: dict[str, float]) -> None:
        """The hparams page, in the run's own folder and by the run's only writer."""
        if self.writer is None:
            return
        from torch.utils.tensorboard.summary import hparams

        for summary in hparams(self.config.hyperparameters(), metrics):
            self.writer.file_writer.add_summary(summary)
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, 0)
        self.writer.flush()

    def close(self) -> None:
        if self.profile is not None:
            self.profile.stop()
        if self.writer is not None:
            self.writer.close()
        if self.enabled:
            self.lines.close()


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
