"""What a run tells: console and `log.txt`, progress bar, `metrics.jsonl`, TensorBoard.

Only the main process tells anything; on the other ranks the same calls do nothing.
"""

import json
import logging
import logging.handlers
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import transformers
from tqdm import tqdm

from training import evaluation
from training.config import TrainConfig
from training.sampler import MicroBatch

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


def start_console(main_process: bool) -> None:
    """Log to the screen, and keep what is said for `log.txt` until the run has a folder."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    log.handlers.clear()
    log.propagate = False
    log.setLevel(logging.INFO if main_process else logging.CRITICAL)
    if not main_process:
        return
    console = ConsoleHandler()
    console.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    log.addHandler(console)
    log.addHandler(logging.handlers.MemoryHandler(10_000, flushLevel=logging.CRITICAL + 1))


class Meter:
    """Rows, tokens and time since the last line of the log. Pauses do not count as time."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.started = time.perf_counter()
        self.rows = self.tokens = self.padded_tokens = 0
        self.waited = 0.0

    def add(self, micro_batch: MicroBatch) -> None:
        self.rows += micro_batch.step_rows
        self.tokens += micro_batch.step_tokens
        self.padded_tokens += micro_batch.step_padded_tokens

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Not training time: an evaluation, a checkpoint."""
        before = time.perf_counter()
        yield
        self.started += time.perf_counter() - before

    def timed(self, batches: Iterable[Any]) -> Iterator[Any]:
        """`batches`, with the time that is spent waiting for them."""
        iterator = iter(batches)
        while True:
            before = time.perf_counter()
            batch = next(iterator, None)
            self.waited += time.perf_counter() - before
            if batch is None:
                return
            yield batch

    def rates(self) -> dict[str, float]:
        """Of all ranks together; `padding` and `data_wait` are shares."""
        seconds = max(time.perf_counter() - self.started, 1e-9)
        return {
            "samples_per_second": self.rows / seconds,
            "tokens_per_second": self.tokens / seconds,
            "padding": 1.0 - self.tokens / max(self.padded_tokens, 1),
            "data_wait": self.waited / seconds,
        }


class Tracker:
    """Writes a run's records. `step`: the last one that a resumed run has behind it."""

    def __init__(self, run: Path, config: TrainConfig, main_process: bool, step: int) -> None:
        self.run = run
        self.enabled = main_process
        self.writer: Any = None
        self.bar: Any = None
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
        _forget_after(run / "metrics.jsonl", step)
        self.lines = (run / "metrics.jsonl").open("a", encoding="utf-8")
        try:
            from torch.utils.tensorboard import SummaryWriter

            purge = step + 1 if step else None
            self.writer = SummaryWriter(str(run / "tensorboard"), purge_step=purge)
        except ImportError as error:
            log.warning("no TensorBoard: %s", error)

    def start_bar(self, total_steps: int, step: int) -> None:
        hidden = None if self.enabled else True  # None: hidden when the output is no terminal
        self.bar = tqdm(total=total_steps, initial=step, desc="training", unit=" steps",
                        disable=hidden, dynamic_ncols=True)  # fmt: skip

    def advance(self) -> None:
        self.bar.update()

    def record(self, step: int, epoch: float, split: str, values: dict[str, Any]) -> None:
        """A line of `metrics.jsonl`, and a point on every curve."""
        if not self.enabled:
            return
        line = {"step": step, "epoch": epoch, "split": split, **values}
        self.lines.write(json.dumps(line) + "\n")
        self.lines.flush()
        if self.writer is not None:
            for name, value in values.items():
                if name != "rows":
                    self.writer.add_scalar(f"{split}/{name}", value, step)
            self.writer.flush()

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
        if self.writer is None or len(result.labels) > PLOTTED_LABELS:
            return
        assert result.truth is not None
        probabilities = result.probabilities()
        if result.truth.ndim == 1:
            figure = _confusion_figure(result)
            self.writer.add_figure(f"{split}/confusion", figure, step)
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
        if self.writer is not None:
            self.writer.close()
        if self.enabled:
            self.lines.close()


def _forget_after(path: Path, step: int) -> None:
    """Drop the lines of steps that a resumed run is about to do again, and a torn last line."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").split("\n"):
        try:
            if line and json.loads(line)["step"] <= step:
                kept.append(line + "\n")
        except json.JSONDecodeError:
            continue
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(path)


def _confusion_figure(result: evaluation.Evaluation) -> Any:
    from matplotlib.figure import Figure

    matrix = evaluation.confusion(result)
    share = matrix / np.maximum(matrix.sum(axis=1, keepdims=True), 1)
    size = 3 + 0.45 * len(result.labels)
    figure = Figure(figsize=(size, size), layout="constrained")
    axes = figure.add_subplot()
    axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    ticks = range(len(result.labels))
    axes.set_xticks(ticks, result.labels, rotation=90)
    axes.set_yticks(ticks, result.labels)
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    for i in ticks:
        for j in ticks:
            if matrix[i, j]:
                color = "white" if share[i, j] > 0.5 else "black"
                axes.text(j, i, matrix[i, j], ha="center", va="center", color=color, fontsize=8)
    return figure
