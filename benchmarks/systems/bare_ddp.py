"""The limit: PyTorch's DDP over batches that are tensors already. No logging, no evaluation.

Rows are sorted by length in windows of 64 global batches; the ranks take neighbouring shares of a
batch, and batches come in random order, the short one last. DDP and AdamW have their fast options,
and the learning rate is constant.
"""

import json
import math
import random
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from probe import Probe, build_model, build_tokenizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

WINDOW = 64  # global batches
probe = Probe()
asked = probe.asked


def global_batches(tokenizer: Any) -> list[list[dict[str, Any]]]:
    """Tokenized rows, a list for each step, from short to long."""
    lines = Path(asked.train).read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    encoded = tokenizer([r["text"] for r in found], truncation=True, max_length=asked.max_length)
    labels = [asked.labels.index(r["label"]) for r in found]
    rows = [
        {"labels": label} | {name: values[i] for name, values in encoded.items()}
        for i, label in enumerate(labels)
    ]
    rng = random.Random(asked.seed)
    rng.shuffle(rows)
    size = asked.ranks * asked.accumulation * asked.batch_size
    whole = len(rows) // size * size
    batches = []
    for first in range(0, whole, WINDOW * size):
        window = by_length(rows[first : min(whole, first + WINDOW * size)])
        part = [window[i : i + size] for i in range(0, len(window), size)]
        rng.shuffle(part)
        batches += part
    return [*batches, by_length(rows[whole:])] if whole < len(rows) else batches


def by_length(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: len(row["input_ids"]))


def shares(tokenizer: Any, rows: list[dict[str, Any]]) -> list[tuple[Any, float]]:
    """This rank's inputs in one step, each with what its mean loss counts in the step's mean."""
    count = asked.ranks * math.ceil(len(rows) / (asked.ranks * asked.batch_size))
    bounds = [i * len(rows) // count for i in range(count + 1)]
    mine = [rows[bounds[i] : bounds[i + 1]] for i in range(probe.rank, count, asked.ranks)]
    return [
        (dict(tokenizer.pad(part, return_tensors="pt")), asked.ranks * len(part) / len(rows))
        for part in mine
    ]


def main() -> None:
    if asked.ranks > 1:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tokenizer = build_tokenizer(asked)
    steps = [shares(tokenizer, rows) for rows in global_batches(tokenizer)]
    model = build_model(asked)
    probe.watch(model)
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, forward_sync_buffers=False)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=asked.lr, weight_decay=asked.weight_decay, fused=True
    )
    model.train()
    for step in steps[: asked.max_steps or None]:
        total = torch.zeros(())
        for number, (inputs, share) in enumerate(step):
            ddp.require_backward_grad_sync = number == len(step) - 1
            loss = ddp(**inputs).loss * share
            loss.backward()
            total += loss.detach() / asked.ranks
        grad_norm = clip_grad_norm_(model.parameters(), asked.clip)
        optimizer.step()
        optimizer.zero_grad()
        if asked.max_steps:
            dist.all_reduce(total)
            probe.note(total.item(), grad_norm.item())
    del ddp
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
