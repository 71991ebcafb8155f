"""What a system writes down while it trains, the same for all: times, rows, tokens, memory, losses.

Two hooks see it, whoever drives the training: one before the model's forward, one after the
optimizer's step. Each rank leaves a JSON file when it ends. What is asked for is in $PEERS.
"""

import atexit
import json
import os
import resource
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

# Of rows, tokens of their texts, and tokens computed with padding: what one step's forwards had.
NOTHING = (0, 0, 0)


class Probe:
    """`asked`: train, val, labels, model, max_length, ranks, accumulation, batch_size (rows in one
    forward of a rank), eval_batch_size, lr, weight_decay, clip, warmup_ratio, seed, dropout (None:
    the model's own), max_steps (0: one epoch), sampling, out (a folder), started (when)."""

    def __init__(self) -> None:
        self.asked = SimpleNamespace(**json.loads(os.environ["PEERS"]))
        self.rank = int(os.environ.get("RANK", "0"))
        self.began = 0.0
        self.counts = NOTHING
        self.steps: list[tuple[float, int, int, int]] = []  # end, then as NOTHING
        self.evaluations: list[float] = []
        self.trained_peak = 0
        self.numbers: list[tuple[float, float]] = []
        self.pid = os.getpid()
        register_optimizer_step_post_hook(self._after_step)
        atexit.register(self._write)

    def watch(self, model: torch.nn.Module) -> None:
        """Count what `model`, a Hugging Face one, is given in training."""
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def evaluated(self) -> None:
        self.evaluations.append(time.monotonic())

    def note(self, loss: float, grad_norm: float) -> None:
        """A step's loss and gradient norm, as the system reports them to its user."""
        self.numbers.append((float(loss), float(grad_norm)))

    def _before_forward(self, model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if not model.training:
            return
        self.began = self.began or time.monotonic()
        mask = kwargs["attention_mask"]
        rows, tokens, padded = self.counts
        self.counts = rows + len(mask), tokens + int(mask.sum()), padded + mask.numel()

    def _after_step(self, *_: Any) -> None:
        self.steps.append((time.monotonic(), *self.counts))
        self.counts = NOTHING
        self.trained_peak = peak()

    def _write(self) -> None:
        if os.getpid() != self.pid:
            return
        found = {
            "first": self.steps[0][0] - self.asked.started if self.steps else None,
            "began": self.began, "steps": self.steps, "evaluations": self.evaluations,
            "trained_peak": self.trained_peak, "peak": peak(), "numbers": self.numbers,
        }  # fmt: skip
        path = Path(self.asked.out) / f"rank{self.rank}.json"
        path.write_text(json.dumps(found), encoding="utf-8")


def peak() -> int:
    """The most memory that this process has held, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


# -- the same for all peers: model, tokenizer, rows ----------------------------------------------


def build_model(asked: SimpleNamespace) -> Any:
    from transformers import AutoModelForSequenceClassification, set_seed

    set_seed(asked.seed)  # the head's first weights
    names = ("hidden_dropout_prob", "attention_probs_dropout_prob")
    dropout = {} if asked.dropout is None else dict.fromkeys(names, asked.dropout)
    return AutoModelForSequenceClassification.from_pretrained(
        asked.model,
        id2label=dict(enumerate(asked.labels)),
        label2id={label: i for i, label in enumerate(asked.labels)},
        **dropout,
    )


def build_tokenizer(asked: SimpleNamespace) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(asked.model)


def build_rows(asked: SimpleNamespace, tokenizer: Any) -> Any:
    """Tokenized rows, not padded: a `datasets.DatasetDict` of train and val."""
    from datasets import load_dataset

    ids = {label: i for i, label in enumerate(asked.labels)}

    def encode(rows: dict[str, Any]) -> Any:
        encoded = tokenizer(rows["text"], truncation=True, max_length=asked.max_length)
        encoded["labels"] = [ids[label] for label in rows["label"]]
        return encoded

    found = load_dataset("json", data_files={"train": asked.train, "val": asked.val})
    return found.map(encode, batched=True, remove_columns=["text", "label"])
