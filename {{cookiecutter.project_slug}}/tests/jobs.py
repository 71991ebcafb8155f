"""What tests run on ranks. Imported there and here; every function is called on each rank."""

import io
import os
import resource
import shutil
import signal
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import data
import train
from model import build_model, build_tokenizer, loss_per_row
from training.checkpoint import run_folder as runs
from training.checkpoint.rng import seed_everything
from training.dataset.build import open_splits
from training.dataset.tokenizer import prepare_tokenizer
from training.distributed import ranks as distributed
from training.distributed import watchdog
from training.distributed import wrap as wrap_module
from training.launch import signals as stopping
from training.settings.batch_sizes import batch_sizes
from training.settings.config import TrainConfig
from training.step.batch_plan import BatchPlan
from training.step.evaluation import compute_metrics, gather_logits
from training.step.weights import row_weight
from training.tracking.tracker import Tracker

TIMEOUT = 20.0  # of a collective: a hang becomes an exception


def run(config: TrainConfig) -> None:
    watchdog.report(watchdog.START)  # these processes have had other runs
    try:
        train.main(config, distributed.setup(TIMEOUT)[0])
    finally:
        runs.release()  # of a run that failed


class Patch:
    """Put something in the place of a module's attribute, for one `with`."""

    def __init__(self, module: Any, name: str, value: Any) -> None:
        self.module, self.name, self.value = module, name, value

    def __enter__(self) -> None:
        self.old = getattr(self.module, self.name)
        setattr(self.module, self.name, self.value)

    def __exit__(self, *_: object) -> None:
        setattr(self.module, self.name, self.old)


def many_runs(configs: list[TrainConfig]) -> None:
    """Several runs in one process group each, one after the other."""
    device, _ = distributed.setup(TIMEOUT)
    for config in configs:
        train.main(config, device)


def run_stopped_at(config: TrainConfig, step: int) -> None:
    """A run in which all ranks agree to stop after `step`."""

    def agreed(self: Any, error: Any = None) -> bool:
        return watchdog.position[:2] == ("training", step)

    with Patch(stopping.StopRequest, "agreed", agreed):
        run(config)


def agreements(asked_at: int, calls: int) -> list[bool]:
    """Answers to `agreed`, where two ranks are already many and rank 1 is asked to stop."""
    distributed.setup(TIMEOUT)
    stop, found = stopping.StopRequest(), []
    stop.ready()
    with Patch(stopping, "RANKS_AT_ONCE", 1):
        for call in range(1, calls + 1):
            stop.asked = torch.distributed.get_rank() == 1 and call >= asked_at
            found.append(stop.agreed())
    stop.close()
    return found


def all_reduces_per_step(config: TrainConfig) -> list[int]:
    """How often DDP reduced gradients, for each optimizer step."""
    calls: list[int] = [0]

    def hook(
        state: object, bucket: torch.distributed.GradBucket
    ) -> torch.futures.Future[torch.Tensor]:
        calls[-1] += bucket.is_last()
        work = torch.distributed.all_reduce(bucket.buffer(), async_op=True).get_future()
        return work.then(lambda f: f.value()[0] / torch.distributed.get_world_size())

    def wrap(*args: Any) -> Any:
        ddp: Any = wrapped(*args)
        ddp.register_comm_hook(None, hook)
        return ddp

    def clip(*args: Any) -> torch.Tensor:
        calls.append(0)
        return clipped(*args)

    wrapped, clipped = wrap_module.wrap, train.clip_grad_norm_
    with Patch(wrap_module, "wrap", wrap), Patch(train, "clip_grad_norm_", clip):
        run(config)
    return calls[:-1]


def share_reduced(config: TrainConfig) -> float:
    """Bytes of gradients that a hook reduced, as a share of all there were."""
    reduce, wrap = torch.distributed.all_reduce, wrap_module.wrap
    sent, whole = [0], [0]

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent[0] += tensor.nbytes
        return reduce(tensor, *args, **kwargs)

    def wrapping(model: Any, *args: Any) -> Any:
        whole[0] = sum(p.nbytes for p in model.parameters())
        return wrap(model, *args)

    with (
        Patch(torch.distributed, "all_reduce", counting),
        Patch(wrap_module, "wrap", wrapping),
    ):
        run(config)
    assert config.max_steps is not None
    return sent[0] / (whole[0] * config.max_steps)


def syncs_per_step(config: TrainConfig) -> list[dict[str, int]]:
    """For each step: how often a value was read back to the host, something was printed, and how
    many collectives there were."""
    from torch.utils._python_dispatch import TorchDispatchMode

    counts: list[dict[str, int]] = [{}]

    def count(what: str) -> None:
        counts[-1][what] = counts[-1].get(what, 0) + 1

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = str(func)
            if "_local_scalar_dense" in name or "nonzero" in name:
                count("reads")
            elif name.startswith("c10d."):
                count(name.split(".")[1])
            return func(*args, **(kwargs or {}))

    def advance(self: Any) -> None:
        counts.append({})

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            count("prints")
            return len(text)

    with Patch(Tracker, "advance", advance), Patch(sys, "stdout", Screen()), Counting():
        run(config)
    return counts[:-1]


def first_gradients(config: TrainConfig) -> dict[str, Any]:
    """Gradients of the first step: DDP's, summed by hand over ranks, and of the full batch."""
    kept: dict[str, Any] = {}

    def clip(parameters: list[torch.Tensor], norm: float) -> torch.Tensor:
        kept["ddp"] = [p.grad.clone() for p in parameters if p.grad is not None]
        return clipped(parameters, norm)

    clipped = train.clip_grad_norm_
    with Patch(train, "clip_grad_norm_", clip):
        run(replace(config, max_steps=1))
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    tokenizer = prepare_tokenizer(config, data, build_tokenizer)
    store, _, _ = open_splits(config, data, tokenizer)
    plan = BatchPlan(store, batch_sizes(config, world_size), seed=config.seed,
                     row_weight=row_weight(config, store))  # fmt: skip
    rows = plan.global_batch(0)
    weight = torch.from_numpy(plan.row_weight(rows))

    def gradient(part: np.ndarray) -> list[torch.Tensor]:
        """Of the summed, weighted loss of some of the batch's rows, on a fresh model."""
        seed_everything(config.seed)
        model = build_model(config, tokenizer, store.labels).double()
        labels = torch.from_numpy(store.label_ids(rows[part]).astype(np.int64))
        losses = loss_per_row(model(**store.inputs(rows[part])).logits, labels)
        (losses * weight[part]).sum().backward()
        return [p.grad for p in model.parameters() if p.grad is not None]

    everything = np.arange(len(rows))
    kept["full"] = [g / weight.sum() for g in gradient(everything)]
    mine = gradient(everything[rank::world_size])
    kept["by hand"] = [distributed.reduce_tensor(g) / weight.sum() for g in mine]
    return kept


def run_edited(config: TrainConfig, edit: str) -> None:
    """A run with a model.py that a user has edited wrongly."""

    def with_unused_layer(*args: Any) -> Any:
        model = build_model(*args)
        model.head_of_old = torch.nn.Linear(3, 3)
        return model

    def skipping_on_one_rank(*args: Any) -> Any:
        model = build_model(*args)
        if torch.distributed.get_rank() == 1:  # the encoder's weights have no share in the loss
            model.classifier.register_forward_pre_hook(lambda _, args: (args[0].detach(),))
        return model

    patches = {
        "mean loss": ("loss_per_row", lambda *args: loss_per_row(*args).mean()),
        "two logits": ("build_model", lambda c, t, labels: build_model(c, t, labels[:2])),
        "unused layer": ("build_model", with_unused_layer),
        "skipped on a rank": ("build_model", skipping_on_one_rank),
    }
    with Patch(train, *patches[edit]):
        run(config)


def run_with_bad_loss(config: TrainConfig, kind: str, steps: list[int], stop: int = 0) -> None:
    """A run in which one rank's loss, or its gradient alone, is not finite in some steps."""

    def loss(logits: Any, *args: Any) -> torch.Tensor:
        losses = loss_per_row(logits, *args)
        if torch.distributed.get_rank() != 1 or watchdog.position.step not in steps:
            return losses
        if kind == "loss":
            return losses + torch.inf  # its gradient alone is finite
        return losses + (logits.sum(1) * 0).sqrt()  # its value is

    with Patch(train, "loss_per_row", loss):
        run_stopped_at(config, stop)


def run_with_little_memory(config: TrainConfig, rank: int, rows: int, step: int) -> None:
    """A run in which, from `step` on, one rank's memory holds no more than so many rows."""

    def loss(logits: Any, *args: Any) -> torch.Tensor:
        due = torch.distributed.get_rank() == rank and watchdog.position.step >= step
        if due and len(logits) > rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return loss_per_row(logits, *args)

    with Patch(train, "loss_per_row", loss):
        run(config)


def run_with_broken_evaluation(config: TrainConfig) -> None:
    """A run whose weights give no finite loss any more, which only an evaluation sees."""

    def evaluate(*args: Any, **options: Any) -> Any:
        result = evaluated(*args, **options)
        if watchdog.position.phase != "training" and result.metrics:
            result.metrics["loss"] = float("nan")
        return result

    evaluated = train.evaluate
    with Patch(train, "evaluate", evaluate):
        run(config)


def run_stopped_in(config: TrainConfig, phase: str, batch: int = 1) -> None:
    """A run in which all ranks agree to stop when an evaluation has come to `batch`."""

    def agreed(self: Any, error: Any = None) -> bool:
        return watchdog.position.phase == phase and watchdog.position.step >= batch

    with Patch(stopping.StopRequest, "agreed", agreed):
        run(config)


def run_with_short_disk(config: TrainConfig, limit: int) -> None:
    """A run that cannot write a file of more than `limit` bytes."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        run(config)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def run_and_lose_folder(config: TrainConfig, step: int) -> None:
    """A run whose folder is removed while it trains."""

    def advance(self: Any) -> None:
        if torch.distributed.get_rank() == 0 and watchdog.position.step == step:
            shutil.rmtree(Path(config.runs_dir) / str(config.run_name))

    with Patch(Tracker, "advance", advance):
        run(config)


def run_until_time_is_up(config: TrainConfig, seconds: float) -> None:
    """A run with --max-time 00:01 that was launched so long ago that only `seconds` are left."""
    os.environ["LAUNCHED_AT"] = str(time.time() - 60 + seconds)
    try:
        run(replace(config, max_time="00:01"))
    finally:
        del os.environ["LAUNCHED_AT"]


def evaluate_rows(config: TrainConfig) -> tuple[Any, Any, Any]:
    """Per-row logits, truth and metrics of the validation rows, with fresh weights."""
    device, _ = distributed.setup(TIMEOUT)
    tokenizer = prepare_tokenizer(config, data, build_tokenizer)
    _, val, _ = open_splits(config, data, tokenizer)
    assert val is not None
    seed_everything(config.seed)
    model = build_model(config, tokenizer, val.labels)
    logits = gather_logits(model, val, device, nullcontext, config.eval_batch_size, "")
    if logits is None:
        return None, None, None
    truth = val.label_ids()
    return logits, truth, compute_metrics(logits, truth)


def dropout_and_weights(config: TrainConfig) -> tuple[list[float], Any, list[str]]:
    """What each rank draws, the first weights that it had, and its label names."""
    kept: dict[str, Any] = {}

    def wrap(model: Any, *args: Any) -> Any:
        kept["first"] = [p.detach().clone() for p in model.parameters()]
        kept["labels"] = list(model.config.id2label.values())
        return wrapped(model, *args)

    def saver(*args: Any) -> Any:  # right before the first step
        kept["mask"] = torch.nn.functional.dropout(torch.ones(64)).tolist()
        return made(*args)

    wrapped, made = wrap_module.wrap, train.Saver
    with Patch(wrap_module, "wrap", wrap), Patch(train, "Saver", saver):
        run(config)
    return kept["mask"], kept["first"], kept["labels"]


def drift(config: TrainConfig) -> None:
    """One rank's weights go astray in the first step."""

    def clip(parameters: list[torch.Tensor], norm: float) -> torch.Tensor:
        result = clipped(parameters, norm)
        if torch.distributed.get_rank() == 1:
            parameters[0].data[0] += 1e-3
        return result

    clipped = train.clip_grad_norm_
    with Patch(train, "clip_grad_norm_", clip):
        run(config)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")
