"""What the tests run on ranks: each function is called on every rank."""

import copy
import gc
import io
import itertools
import os
import resource
import shutil
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import edited
import model_rows
import numpy as np
import torch
from sklearn import metrics as sk
from tensor_memory import TensorMemory
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

import metrics
import train
from model import build_model, build_tokenizer, loss_per_row
from training.checkpoint import run_folder
from training.checkpoint import state as state_module
from training.checkpoint.rng import seed_everything
from training.checkpoint.saver import Saver
from training.dataset.build import open_dataset
from training.dataset.rows import Row
from training.distributed import ranks, watchdog, wrap
from training.distributed.full_state import NamedOptimizerState, full_tensor
from training.launch import signals
from training.settings.batch_sizes import batch_sizes
from training.settings.config import TrainConfig
from training.step.batch_plan import BatchPlan
from training.step.evaluation import Evaluator
from training.step.loss import ModelWithLoss, logits_of, row_weight
from training.step.optimizer import build_optimizer
from training.tracking.tracker import Tracker

TIMEOUT = 20.0  # of a collective: a hang becomes an exception
train.data = model_rows  # the tests' own rows, whatever data.py has become


def _predicted(probabilities: np.ndarray, truth: np.ndarray) -> np.ndarray:
    return probabilities >= 0.5 if truth.ndim == 2 else probabilities.argmax(axis=1)


def _accuracy(probabilities: np.ndarray, truth: np.ndarray) -> float:
    right = _predicted(probabilities, truth) == truth
    return (right.all(axis=1) if truth.ndim == 2 else right).mean()


def _f1(average: str, probabilities: np.ndarray, truth: np.ndarray) -> float:
    return sk.f1_score(truth, _predicted(probabilities, truth), average=average, zero_division=0)


# What runs measure in these tests, whatever a user has made of metrics.py, which has tests of its
# own in test_metrics.py.
METRICS: dict[str, Any] = {
    "accuracy": (_accuracy, True),
    "macro_f1": (partial(_f1, "macro"), True),
    "micro_f1": (partial(_f1, "micro"), True),
}
train.METRICS = METRICS


def run(config: TrainConfig) -> None:
    watchdog.report(watchdog.START)  # these processes have had other runs
    try:
        train.main(config, ranks.setup(config.timeout)[0])
    finally:
        run_folder.release()  # of a run that failed


class Patch:
    """Replace an attribute of a module or a class inside a `with`."""

    def __init__(self, module: Any, name: str, value: Any) -> None:
        self.module, self.name, self.value = module, name, value

    def __enter__(self) -> None:
        self.old = getattr(self.module, self.name)
        setattr(self.module, self.name, self.value)

    def __exit__(self, *_: object) -> None:
        setattr(self.module, self.name, self.old)


def many_runs(configs: list[TrainConfig]) -> None:
    """Several runs in one process group each, one after the other."""
    device, _ = ranks.setup(TIMEOUT)
    for config in configs:
        train.main(config, device)


def run_stopped_at(config: TrainConfig, step: int) -> None:
    """A run in which all ranks agree to stop after `step`."""

    def agreed(self: Any, error: Any = None) -> bool:
        return watchdog.position[:2] == ("training", step)

    with Patch(signals.StopRequest, "agreed", agreed):
        run(config)


def run_compiled(config: TrainConfig, backend: str) -> None:
    """A run with --compile whose graphs go to this backend in place of "inductor": "aot_eager" gets
    the same graphs, and compiles in a second what takes a C++ compiler half a minute."""
    import torch._dynamo

    lookup = torch._dynamo.lookup_backend

    def other(name: str) -> Any:
        return lookup(backend if name == "inductor" else name)

    with Patch(torch._dynamo, "lookup_backend", other):
        run(config)


def agreements(asked_at: int, calls: int) -> list[bool]:
    """Answers to `agreed`, where two ranks count as many and rank 1 is asked to stop."""
    ranks.setup(TIMEOUT)
    stop, answers = signals.StopRequest(), []
    stop.ready()
    with Patch(signals, "RANKS_AT_ONCE", 1):
        for call in range(1, calls + 1):
            stop.asked = torch.distributed.get_rank() == 1 and call >= asked_at
            answers.append(stop.agreed())
    stop.close()
    return answers


class WatchingOperations(TorchDispatchMode):
    """Calls `see(name, tensors)` for each operation that reads a value or runs a collective."""

    def __init__(self, see: Callable[[str, Any], None]) -> None:
        super().__init__()
        self.see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "_local_scalar_dense" in name or "nonzero" in name:
            callers = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(None)]
            in_mask = any(file.endswith("masking_utils.py") for file in callers)
            self.see("reads of the mask" if in_mask else "reads", [])
        elif name.startswith("c10d."):
            self.see(name.split(".")[1], args[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def before_each_update(function: Callable[[torch.optim.Optimizer], None]) -> Iterator[None]:
    """Call `function` right before an optimizer changes the weights: PyTorch's own seam."""
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: function(optimizer))
    try:
        yield
    finally:
        hook.remove()


def all_reduces_per_step(config: TrainConfig) -> list[int]:
    """How often gradients were reduced over ranks, for each optimizer step."""
    calls: list[int] = [0]

    def see(name: str, tensors: Any) -> None:
        if name == "allreduce_" and tensors[0].is_floating_point() and tensors[0].numel() > 1:
            calls[-1] += 1

    with before_each_update(lambda _: calls.append(0)), WatchingOperations(see):
        run(config)
    return calls[:-1]


def memory_of_checkpoints(config: TrainConfig, stop: int = 0) -> dict[str, Any]:
    """Of a run with FSDP, in bytes: the checkpoint, this rank's shards of the weights, the largest
    layer that is gathered at once; and what TensorMemory says of the saves, at most, and of the
    resume: (peak_bytes, peak_full, growth)."""
    found: dict[str, Any] = {}

    def measuring(cls: Any, name: str) -> Patch:
        function = getattr(cls, name)

        def measure(self: Any, *args: Any) -> None:
            model = self.model if name == "restore" else self.state.model
            weights = model.state_dict()  # sharded; after a forward some parameters are not
            sizes = [tensor.nbytes for tensor in weights.values()]  # of whole tensors
            shards = sum(tensor.to_local().nbytes for tensor in weights.values())
            parts: list[Any] = [m for m in model.modules() if isinstance(m, FSDPModule)][1:]
            layers = [sum(p.nbytes for p in part.parameters()) for part in parts]
            largest = max(*layers, sum(sizes) - sum(layers))
            found.update(checkpoint=3 * sum(sizes), shards=shards, layer=largest)
            with TensorMemory(tuple(tensor.shape) for tensor in weights.values()) as memory:
                function(self, *args)
                if name == "save":
                    self.wait()
            measured = memory.peak_bytes, memory.peak_full, memory.growth
            found[name] = tuple(map(max, found.get(name, measured), measured))

        return Patch(cls, name, measure)

    with measuring(Saver, "save"), measuring(state_module.TrainState, "restore"):
        run_stopped_at(config, stop) if stop else run(config)
    return found


def gradients_when_collecting(config: TrainConfig) -> list[int]:
    """How many gradients there are whenever a run without a garbage collector collects."""
    found: list[int] = []

    def collect() -> None:
        found.append(sum(p.grad is not None for p in optimizers[0].param_groups[0]["params"]))

    optimizers: list[torch.optim.Optimizer] = []
    with before_each_update(optimizers.append), Patch(gc, "collect", collect):
        gc.disable()
        try:
            run(config)
        finally:
            gc.enable()
    return found


class CountingAdam(torch.optim.Adam):
    """Keeps a number besides its tensors."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for values in self.state.values():
            values["count"] = values.get("count", 0) + 1
        return loss


def optimizer_moved(first: str, second: str) -> bool:
    """Whether the state of one optimizer, given to another one that is new, comes back the same."""
    ranks.setup(TIMEOUT)
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 4)
    states: list[dict[str, Any]] = []
    for kind in (first, second):
        optimizer = {"adam": CountingAdam, "rmsprop": torch.optim.RMSprop}[kind](
            model.parameters(), lr=0.1
        )
        part = NamedOptimizerState(model, optimizer)
        if states:
            part.load_state_dict(states[0])
        else:
            for _ in range(3):
                model(torch.ones(2, 5)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        states.append(copy.deepcopy(part.state_dict()))
    return repr(states[0]) == repr(states[1])


def kinds_gathered(config: TrainConfig) -> set[str]:
    """The types of the numbers that FSDP gathers, and of those that it reduces, in a run."""
    kinds: set[str] = set()

    def see(name: str, tensors: Any) -> None:
        if name.startswith(("_allgather_base", "_reduce_scatter_base")):
            kinds.add(f"{name.strip('_').split('_base')[0]} {tensors.dtype}")

    with WatchingOperations(see):
        run(config)
    return kinds


def share_reduced(config: TrainConfig) -> float:
    """Bytes of gradients that a hook reduced, as a share of all there were."""
    reduce = torch.distributed.all_reduce
    sent, total = [0], [0]

    def counting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent[0] += tensor.nbytes
        return reduce(tensor, *args, **kwargs)

    def count(optimizer: torch.optim.Optimizer) -> None:
        total[0] += sum(p.nbytes for group in optimizer.param_groups for p in group["params"])

    with Patch(torch.distributed, "all_reduce", counting), before_each_update(count):
        run(config)
    return sent[0] / total[0]


def syncs_per_step(config: TrainConfig) -> list[dict[str, int]]:
    """For each step: how often a value was read back to the host, something was printed, and how
    many collectives there were."""
    counts: list[dict[str, int]] = [{}]

    def see(what: str, _: Any = None) -> None:
        counts[-1][what] = counts[-1].get(what, 0) + 1

    def advance(self: Any) -> None:
        counts.append({})

    class Screen(io.StringIO):
        def write(self, text: str) -> int:
            see("prints")
            return len(text)

    screen = Patch(sys, "stdout", Screen())
    with Patch(Tracker, "advance", advance), screen, WatchingOperations(see):
        run(config)
    return counts[:-1]


def first_gradients(config: TrainConfig) -> dict[str, Any]:
    """Gradients of the first step: DDP's, summed by hand over ranks, and of the full batch."""
    kept: dict[str, Any] = {}

    def keep(optimizer: torch.optim.Optimizer) -> None:
        kept["ddp"] = [p.grad.clone() for group in optimizer.param_groups for p in group["params"]]

    with before_each_update(keep):
        run(replace(config, max_steps=1))
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    tokenizer, splits = open_dataset(config, model_rows, build_tokenizer)
    store = splits["train"]
    plan = BatchPlan(store, batch_sizes(config, world_size), seed=config.seed,
                     row_weight=row_weight(config, store))  # fmt: skip
    rows = plan.global_batch(0)
    weight = torch.from_numpy(plan.row_weight(rows))

    def gradient(part: np.ndarray) -> list[torch.Tensor]:
        """Of the sum of some rows' weighted losses, each row alone, on a fresh model."""
        seed_everything(config.seed)
        model = build_model(config, tokenizer, store.labels).double()
        with_loss = ModelWithLoss(model, loss_per_row, len(store.labels), config)
        for row, w in zip(rows[part, None], weight[part], strict=True):
            labels = torch.from_numpy(store.label_ids(row).astype(np.int64))
            (with_loss(store.inputs(row), labels, torch.ones(1)) * w).backward()
        for parameter in model.parameters():  # what the loss does not depend on, a run has frozen
            parameter.requires_grad_(parameter.grad is not None)
        groups = build_optimizer(model, config).param_groups
        return [p.grad for group in groups for p in group["params"]]

    everything = np.arange(len(rows))
    kept["full"] = [g / weight.sum() for g in gradient(everything)]
    own = gradient(everything[rank::world_size])
    kept["by hand"] = [ranks.reduce_tensor(g) / weight.sum() for g in own]
    return kept


def run_built_by(config: TrainConfig, name: str, stop: int = 0) -> None:
    """A run with a `build_*` of edited.py; with `stop`, all ranks agree to stop after that step."""
    with Patch(train, "build_model", getattr(edited, name)):
        run_stopped_at(config, stop) if stop else run(config)


def run_edited(config: TrainConfig, edit: str) -> None:
    """A run with a model.py or metrics.py that a user has edited; "" is as it is."""

    def skipping_on_one_rank(*args: Any) -> Any:
        model = build_model(*args)
        if torch.distributed.get_rank() == 1:  # the encoder's weights have no share in the loss
            model.classifier.register_forward_pre_hook(lambda _, args: (args[0].detach(),))
        return model

    def focal(*args: Any) -> torch.Tensor:
        losses = loss_per_row(*args)
        return (1 - torch.exp(-losses)) ** 2 * losses

    def mean_in_evaluation(*args: Any) -> torch.Tensor:
        losses = loss_per_row(*args)
        return losses if torch.is_grad_enabled() else losses.mean()

    def change(probabilities: Any, _: Any) -> float:
        probabilities[0] = 0.5
        return 1.0

    def fail_on_few_rows(_: Any, truth: Any) -> float:
        assert len(truth) == 45  # the val rows, not some of them, nor the test rows
        return 1.0

    def broken(function: Callable[..., Any]) -> tuple[str, Any]:
        return "METRICS", METRICS | {"broken": (function, True)}

    def nan_for_a_class(logits: Any, labels: Any, config: TrainConfig) -> torch.Tensor:
        return loss_per_row(logits, labels, config) + torch.where(labels == 2, torch.nan, 0.0)

    patches: dict[str, tuple[str, Any]] = {
        "loss of before": ("loss_per_row", lambda logits, labels: logits.sum(1)),
        "NaN for a class": ("loss_per_row", nan_for_a_class),
        "": ("METRICS", METRICS),
        "metric raises": broken(lambda *_: 1 / 0),
        "metric gives None": broken(lambda *_: None),
        "metric gives an array": broken(lambda probabilities, _: probabilities),
        "metric changes its input": broken(change),
        "metric fails on test rows": broken(fail_on_few_rows),
        "metric without direction": ("METRICS", {"broken": len}),
        "metric gives NaN": ("METRICS", {"nothing": (lambda *_: np.nan, True)}),
        "no metrics": ("METRICS", {}),
        "focal loss": ("loss_per_row", focal),
        "mean loss in evaluation": ("loss_per_row", mean_in_evaluation),
        "mean loss": ("loss_per_row", lambda *args: loss_per_row(*args).mean()),
        "two logits": ("build_model", lambda c, t, labels: build_model(c, t, labels[:2])),
        "skipped on a rank": ("build_model", skipping_on_one_rank),
    }
    with Patch(train, *patches[edit]):
        run(config)


def run_always_the_first_label(config: TrainConfig) -> None:
    """A run with macro F1 of metrics.py, and a model that gives every row the first label."""

    def build(*args: Any) -> Any:
        model = build_model(*args)
        model.classifier.bias.data[0] += 1e3
        return model

    own = {"macro_f1": metrics.METRICS["macro_f1"]}
    with Patch(train, "METRICS", own), Patch(train, "build_model", build):
        run(config)


def run_with_rising_metric(config: TrainConfig, higher_is_better: bool) -> None:
    """A run with the metric `rising`, which is higher in each evaluation."""
    calls = itertools.count(1.0)
    rising = {"rising": (lambda *_: next(calls), higher_is_better)}
    with Patch(train, "METRICS", rising):
        run(config)


class Part:
    """A part of the state that holds `content`; it is added to the state when a run opens."""

    def __init__(self, content: Any) -> None:
        self.content = content

    def state_dict(self) -> Any:
        return {"content": self.content}

    def load_state_dict(self, state: Any) -> None:
        self.content = state["content"]


def run_with_part(config: TrainConfig, kind: str) -> None:
    """A run whose state gets a part of the user's own, in the right place or too late."""
    kinds = {"array": Part(np.ones(2)), "list": [1], "late": Part(1), "good": Part([1, {"a": 2}])}
    early, late = state_module.TrainState.__init__, Tracker.open

    def init(self: Any, folder: Any) -> None:
        early(self, folder)
        jobs_state.append(self)
        if kind != "late":
            self.parts["own"] = kinds[kind]

    def opened(self: Any, *arguments: Any) -> None:
        late(self, *arguments)
        if kind == "late":
            jobs_state[-1].parts["own"] = kinds[kind]

    jobs_state: list[Any] = []
    with Patch(state_module.TrainState, "__init__", init), Patch(Tracker, "open", opened):
        run(config)


def run_with_bad_loss(config: TrainConfig, kind: str, steps: list[int], stop: int = 0) -> None:
    """A run in which one rank's loss, or only its gradient, is not finite in some steps."""

    def loss(logits: Any, *args: Any) -> torch.Tensor:
        losses = loss_per_row(logits, *args)
        if torch.distributed.get_rank() != 1 or watchdog.position.step not in steps:
            return losses
        if kind == "loss":
            return losses + torch.inf  # only its gradient is finite
        return losses + (logits.sum(1) * 0).sqrt()  # its value is

    with Patch(train, "loss_per_row", loss):
        run_stopped_at(config, stop)


def run_in_fp16(config: TrainConfig, bad_steps: list[int], growth_interval: int) -> None:
    """A run whose loss scale grows after so many good steps, and overflows in the bad ones."""
    scaler = partial(torch.amp.GradScaler, growth_interval=growth_interval)
    with Patch(torch.amp, "GradScaler", scaler):
        run_with_bad_loss(replace(config, precision="fp16"), "gradient", bad_steps)


class GraphProbe:
    """A hook that lives as long as the graph of a forward does."""

    def __init__(self, in_backward: Callable[[], None]) -> None:
        self.in_backward = in_backward

    def __call__(self, gradient: torch.Tensor) -> None:
        self.in_backward()


def run_with_little_memory(
    config: TrainConfig, rank: int, rows: int, step: int, where: str = "forward"
) -> int:
    """A run in which, from `step` on, one rank's memory holds at most `rows` rows. Returns how
    often a forward began while the graph of one that had run out of memory still existed."""
    last_rows, failed, still_there = 0, False, 0
    last_graph: Any = lambda: None  # noqa: E731, a weak reference

    def check(place: str) -> None:
        nonlocal failed
        is_due = torch.distributed.get_rank() == rank and watchdog.position.step >= step
        if is_due and place == where and last_rows > rows:
            failed = True
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def loss(logits: Any, *args: Any) -> torch.Tensor:
        nonlocal last_rows, failed, last_graph, still_there
        still_there += failed and last_graph() is not None
        last_rows, failed = len(logits), False
        if logits.requires_grad:
            probe = GraphProbe(partial(check, "backward"))
            logits.register_hook(probe)
            last_graph = weakref.ref(probe)
        check("forward")
        return loss_per_row(logits, *args)

    def update(optimizer: torch.optim.Optimizer) -> None:
        check("update" if optimizer.state else "first update")

    with Patch(train, "loss_per_row", loss), before_each_update(update):
        run(config)
    return still_there


def run_with_broken_evaluation(config: TrainConfig) -> None:
    """A run whose weights give no finite loss any more, which only an evaluation sees."""

    def loss(*args: Any) -> torch.Tensor:
        losses = loss_per_row(*args)
        return losses * torch.nan if watchdog.position.phase.startswith("the end") else losses

    with Patch(train, "loss_per_row", loss):
        run(config)


def run_stopped_in(config: TrainConfig, phase: str, batch: int = 1) -> None:
    """A run in which all ranks agree to stop when an evaluation has come to `batch`."""

    def agreed(self: Any, error: Any = None) -> bool:
        return watchdog.position.phase == phase and watchdog.position.step >= batch

    with Patch(signals.StopRequest, "agreed", agreed):
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


class StackedLists(torch.nn.Module):
    """Layers in lists of lists, one of them twice, with a `kind` of what else a model may have."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        lists = [[torch.nn.Linear(8, 8) for _ in range(2)] for _ in range(2)]
        if kind == "shared weight":
            lists[1][1].weight = lists[0][1].weight
        # A list of what has no forward: lists of parameters.
        factors = [torch.nn.Parameter(torch.full((8,), 0.5 + i)) for i in range(2)]
        self.scales = torch.nn.ModuleList(torch.nn.ParameterList([f]) for f in factors)
        self.embedding = torch.nn.Embedding(100, 8)
        self.lists = torch.nn.ModuleList(map(torch.nn.ModuleList, lists))
        self.again = torch.nn.ModuleList([lists[0][0]])
        self.order = [*lists[0], *lists[1], lists[0][0]]
        # It keeps its weights flat.
        self.lstm = torch.nn.LSTM(8, 8, 2, batch_first=True) if kind == "lstm" else None
        self.scalar = torch.nn.Parameter(torch.tensor(1.0)) if kind == "scalar" else 1.0

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(input_ids) * self.scalar
        for layer in self.order:
            hidden = (layer.forward if self.kind == "forward" else layer)(hidden).tanh()
        for scale in self.scales.parameters():
            hidden = hidden * scale
        return hidden if self.lstm is None else self.lstm(hidden)[0]


def sharded_difference(kind: str) -> tuple[float, bool]:
    """The largest difference of logits and gradients from those of the unsharded model, and whether
    all parameters are sharded. `kind` is a family of families.py, or one of StackedLists."""
    from families import FAMILIES, tiny_config, train_tokenizer
    from torch.distributed.tensor import DTensor
    from transformers import AutoModelForSequenceClassification

    device, _ = ranks.setup(TIMEOUT)
    ids = torch.arange(5, 45).reshape(4, 10)
    torch.manual_seed(1)
    if kind in FAMILIES:
        family = FAMILIES[kind]
        config = tiny_config(kind, family.changes, train_tokenizer(family, ["a cat"] * 9))
        config.update({"vocab_size": 100})
        ids[:, -1] = getattr(config, "eos_token_id", None) or 2  # of an encoder-decoder
        model = AutoModelForSequenceClassification.from_config(config)
    else:
        model = StackedLists(kind)
    model.double().eval()
    values: list[list[torch.Tensor]] = []
    for _ in range(2):
        logits = logits_of(model(input_ids=ids, attention_mask=torch.ones_like(ids)))
        logits.square().sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        values.append([logits.detach(), *(full_tensor(gradient) for gradient in gradients)])
        if len(values) == 1:
            model.zero_grad()
            wrap.shard(model, device, MixedPrecisionPolicy())
    largest = max(float((a - b).abs().max()) for a, b in zip(*values, strict=True))
    return largest, all(isinstance(p, DTensor) for p in model.parameters())


def buffers_in_ddp(config: TrainConfig) -> list[float]:
    """A buffer after `wrap`, and after a forward. Before each it is this rank's number."""
    device, _ = ranks.setup(TIMEOUT)
    number = torch.full((1,), float(torch.distributed.get_rank()))
    model, own_number = torch.nn.Linear(1, 1), number.clone()
    model.register_buffer("number", number)
    wrapped = wrap.wrap(model, model, device, config)
    at_start = number.item()
    number.copy_(own_number)
    wrapped(torch.zeros(2, 1))
    return [at_start, number.item()]


def whole_at_once(kind: str) -> list[tuple[int, int]]:
    """What `shard` makes whole on the device before each layer is sharded, the model last: bytes,
    and the bytes of that layer's own parameters."""
    device, _ = ranks.setup(TIMEOUT)
    model, steps = StackedLists(kind), []
    before = [weakref.ref(parameter) for parameter in model.parameters()]
    held: list[torch.Tensor] = []  # whole on the device
    broadcast, fully_shard = torch.distributed.broadcast, wrap.fully_shard

    def count(tensor: torch.Tensor, src: int) -> None:
        held.append(tensor)
        broadcast(tensor, src)

    def shard(module: torch.nn.Module, **options: Any) -> Any:
        own = [p for p in module.parameters() if type(p) is torch.nn.Parameter]
        steps.append((sum(t.nbytes for t in held), sum(p.nbytes for p in own)))
        held.clear()
        return fully_shard(module, **options)

    with Patch(torch.distributed, "broadcast", count), Patch(wrap, "fully_shard", shard):
        wrap.shard(model, device, MixedPrecisionPolicy())
    gc.collect()
    assert not [name for name in before if name() is not None]  # nobody holds the whole ones
    return steps


def evaluate_rows(config: TrainConfig) -> tuple[Any, Any, Any]:
    """Logits, truth and metrics of the validation rows, with fresh weights, on the main process."""
    device, _ = ranks.setup(TIMEOUT)
    tokenizer, splits = open_dataset(config, model_rows, build_tokenizer)
    seed_everything(config.seed)
    model = build_model(config, tokenizer, splits["val"].labels).train()  # as in a run
    if config.strategy == "fsdp":
        wrap.wrap(model, model, device, config)
    evaluator = Evaluator(model, config, loss_per_row, METRICS, splits)
    result = evaluator.evaluate(splits["val"])
    assert result is not None
    return result.logits, result.truth, result.metrics


def dropout_and_weights(config: TrainConfig) -> tuple[list[float], Any, list[str]]:
    """What each rank draws, the first weights that it had, and its label names."""
    kept: dict[str, Any] = {}

    def building(*args: Any) -> Any:
        model = build_model(*args)
        # Later calls build the model again, for weights that were saved.
        kept.setdefault("first", [p.detach().clone() for p in model.parameters()])
        kept["labels"] = list(model.config.id2label.values())
        return model

    def ready(self: Any) -> None:  # right before the first step
        kept["mask"] = torch.nn.functional.dropout(torch.ones(64)).tolist()

    with Patch(train, "build_model", building), Patch(signals.StopRequest, "ready", ready):
        run(config)
    return kept["mask"], kept["first"], kept["labels"]


def drift(config: TrainConfig) -> None:
    """One rank's weights go astray in the first step."""

    def disturb(optimizer: torch.optim.Optimizer) -> None:
        if torch.distributed.get_rank() == 1:
            optimizer.param_groups[0]["params"][0].data[0] += 1e-3

    with before_each_update(disturb):
        run(config)


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def draws(config: TrainConfig, given: tuple[Any, ...] = ()) -> tuple[list[str], list[str]]:
    """The splits whose rows this rank drew from a source without files, and the stores' names."""
    ranks.setup(TIMEOUT)
    drawn = []

    def rows(split: str, config: TrainConfig) -> Iterator[Any]:
        drawn.append(split)
        texts = {"train": [f"cat {i}" for i in range(40)]}.get(split, [])
        yield from given or (Row(text, label="ab"[i % 2]) for i, text in enumerate(texts))

    module: Any = SimpleNamespace(rows=rows, __file__=__file__)
    _, splits = open_dataset(config, module, build_tokenizer)
    return drawn, [split.folder.name for split in splits.values()]
