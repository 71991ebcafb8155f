"""Check on a real GPU what the tests can only check on a CPU. It takes less than ten minutes.

    python tools/gpu_check.py                     # all checks, the most important ones first
    python tools/gpu_check.py --only numbers fp16
    python tools/gpu_check.py --write FILE        # keep the table, with the machine's name

Install the project's dependencies first (`make env`, with a torch for your GPU). Nothing is
downloaded: the model has random weights and the shape of BERT base, and the rows are made of the
words of the sample. Each check has a process of its own, so that one that fails ends only itself.
Without a GPU the checks that need none are run on a small model, and the others are listed as not
run. The exit code is 1 if a figure is not as expected.
"""

import argparse
import gc
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PROJECT = ROOT / "{{cookiecutter.project_slug}}"
sys.path[:0] = [str(PROJECT), str(PROJECT / "tests")]
MINUTES = 10
MIB = 1 << 20
NO_GPU = "not run: it needs a GPU"
BERT_BASE = {
    "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
    "intermediate_size": 3072, "max_position_embeddings": 512,
}  # fmt: skip


@dataclass
class Row:
    """A line of the table. `met`: None if there is nothing to compare the figure with."""

    what: str
    figure: str
    expected: str = ""
    met: bool | None = None


@dataclass
class Check:
    """`needs`: GPUs, 0 if it also runs without one. `seconds`: about how long it takes on one."""

    run: Callable[[Path], Iterator[Row]]
    needs: int
    seconds: int
    what: str
    sees_all: bool = False  # every GPU; most see the first one only


# -- what the checks share -----------------------------------------------------------------------


def on_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def write_inputs(folder: Path, is_large: bool) -> None:
    """A model's folder, and rows of 4 to 120 tokens, as many of each label."""
    from tiny import save_tiny

    lines = (PROJECT / "sample" / "train.tsv").read_text(encoding="utf-8").splitlines()[1:]
    texts, labels = zip(*(line.split("\t") for line in lines), strict=True)
    words = sorted(set(" ".join(texts).split()))
    names, rng = sorted(set(labels)), random.Random(0)
    save_tiny(folder / "model", texts, **(BERT_BASE if is_large else {}))
    for split, count in (("train", 8192 if is_large else 512), ("val", 256)):
        with (folder / f"{split}.jsonl").open("w", encoding="utf-8") as file:
            for i in range(count):
                text = " ".join(rng.choices(words, k=rng.randint(2, 100)))
                print(json.dumps({"text": text, "label": names[i % len(names)]}), file=file)


def settings(work: Path, name: str, **changes: Any) -> Any:
    """The settings of a short run, with every step in its log, and one evaluation at its end."""
    from training.settings.config import TrainConfig

    basic: dict[str, Any] = {
        "model": str(work / "model"), "train_file": (str(work / "train.jsonl"),),
        "val_file": (str(work / "val.jsonl"),), "runs_dir": str(work / "runs"),
        "cache_dir": str(work / "cache"), "run_name": name, "max_length": 128 if on_gpu() else 48,
        "max_steps": 10, "log_every": 1, "evals_per_epoch": 0, "lr": 1e-4,
    }  # fmt: skip
    return TrainConfig(**basic | changes)


def train(config: Any, stop_after: int = 0) -> list[dict[str, Any]]:
    """Run train.py's `main` in this process; the lines of its log."""
    import jobs
    import torch
    import torch.distributed as dist
    from training.launch.worker import choose_kernels

    choose_kernels(config)
    try:
        if stop_after:
            jobs.run_stopped_at(config, stop_after)
        else:
            jobs.run(config)
    finally:
        torch.use_deterministic_algorithms(False)
        if dist.is_initialized():
            dist.destroy_process_group()
        gc.collect()
        if on_gpu():
            torch.cuda.empty_cache()
    return train_lines(config)


def train_lines(config: Any) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl that are about training."""
    path = Path(config.runs_dir) / config.run_name / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if line["split"] == "train"]


def difference(lines: list[dict[str, Any]], others: list[dict[str, Any]]) -> float:
    """The largest relative difference of the losses."""
    pairs = [(a["loss"], b["loss"]) for a, b in zip(lines, others, strict=True)]
    return max(abs(a - b) / abs(b) for a, b in pairs)


def at_most(what: str, value: float, limit: float) -> Row:
    return Row(what, f"{value:.2g}", f"at most {limit:g}", value <= limit)


def rows_per_second(lines: list[dict[str, Any]]) -> float:
    """The median over all lines but the first fifth, in which kernels are chosen or compiled."""
    return statistics.median(x["samples_per_second"] for x in lines[len(lines) // 5 :])


@contextmanager
def patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    old = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old)


# -- checks --------------------------------------------------------------------------------------


def numbers(work: Path) -> Iterator[Row]:
    """The two promises: the same losses however a batch is computed, and a resumed run."""
    import jobs
    import torch

    exact = {"dropout": 0.0, "global_batch_size": 32}
    one = train(settings(work, "one", batch_size=32, **exact))
    four = train(settings(work, "four", batch_size=8, **exact))
    yield at_most("loss, 4 micro-batches against 1 (fp32)", difference(four, one), 1e-5)
    if on_gpu():
        with patched(torch.accelerator, "current_accelerator", lambda *a, **k: None):
            cpu = train(settings(work, "cpu", batch_size=32, max_steps=3, **exact))
        yield at_most("loss, GPU against CPU (fp32, 3 steps)", difference(one[:3], cpu), 1e-4)
    for deterministic in (True, False):
        name = "deterministic" if deterministic else "usual"
        whole = settings(work, name, deterministic=deterministic)
        train(whole)
        stopped = replace(whole, run_name=f"{name}-stopped")
        train(stopped, stop_after=5)
        train(stopped)
        folders = [Path(c.runs_dir) / c.run_name / "checkpoints" for c in (whole, stopped)]
        a, b = (jobs.weights_of(folder / "step-00000010") for folder in folders)
        different = sum(not torch.equal(a[key], b[key]) for key in a)
        kernels = "deterministic kernels" if deterministic else "usual kernels"
        must = deterministic or not on_gpu()
        yield Row(f"weights that differ after a resume, {kernels}", f"{different} of {len(a)}",
                  "0" if must else "", different == 0 if must else None)  # fmt: skip


def waits(work: Path) -> Iterator[Row]:
    """Where the host waits for the GPU between two lines of the log, in bf16."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    steps, accumulation = 8, 2
    found: Counter[str] = Counter()
    taken = 0

    def before_update(*_: Any) -> None:
        nonlocal taken
        taken += 1
        is_between = 2 <= taken < 2 + steps  # the first steps allocate and choose kernels
        torch.cuda.set_sync_debug_mode("warn" if is_between else "default")

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing" in str(message):
            files = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(None)]
            in_mask = any(file.endswith("masking_utils.py") for file in files)
            ours = [Path(f).name for f in files if f.startswith(str(PROJECT / "train"))]
            found["the mask" if in_mask else next(iter(ours), "elsewhere")] += 1

    config = settings(work, "waits", precision="bf16", max_steps=20, log_every=20,
                      gradient_accumulation_steps=accumulation)  # fmt: skip
    hook = register_optimizer_step_pre_hook(before_update)
    with warnings.catch_warnings(), patched(warnings, "showwarning", note):
        warnings.simplefilter("always")
        train(config)
    hook.remove()
    torch.cuda.set_sync_debug_mode("default")
    ours = {place: count for place, count in found.items() if place != "the mask"}
    yield Row("waits a step, in our code", f"{sum(ours.values()) / steps:g} {ours or ''}".strip(),
              "0", not ours)  # fmt: skip
    yield Row("waits a step, for transformers' look at the mask", f"{found['the mask'] / steps:g}",
              f"at most {accumulation}", found["the mask"] <= accumulation * steps)  # fmt: skip
    yield from cost_of_the_look(work)


def cost_of_the_look(work: Path) -> Iterator[Row]:
    """What it costs to look, and what it gains where a batch has no padding: two runs each."""
    from transformers import masking_utils

    name = "_ignore_bidirectional_mask_sdpa"
    for what, file in (("texts of all lengths", "train.jsonl"), ("texts of one length", "same")):
        if file == "same":
            lines = (work / "train.jsonl").read_text(encoding="utf-8").splitlines()
            rows = [json.loads(line) for line in lines]
            rows = [row | {"text": " ".join((row["text"] + " ").split() * 60)} for row in rows]
            same = [json.dumps(row) for row in rows]  # all are cut to max_length
            (work / "same.jsonl").write_text("\n".join(same), encoding="utf-8")
            file = "same.jsonl"
        options: dict[str, Any] = {
            "precision": "bf16", "batch_size": 32, "max_steps": 40, "log_every": 5,
            "train_file": (str(work / file),),
        }  # fmt: skip
        looking = rows_per_second(train(settings(work, f"look-{file}", **options)))
        with patched(masking_utils, name, lambda *args, **kwargs: False):
            blind = rows_per_second(train(settings(work, f"blind-{file}", **options)))
        yield Row(f"rows/s with the look / always with a mask, {what}", f"{looking / blind:.3f}",
                  "at least 0.97", looking >= 0.97 * blind)  # fmt: skip


def fsdp(work: Path) -> Iterator[Row]:
    """Memory of the device when FSDP saves and resumes, beside that of training."""
    import torch
    from ranks import Ranks

    count = min(2, torch.cuda.device_count())
    config = settings(work, "fsdp", strategy="fsdp", precision="bf16", save_every=5)
    pool = Ranks(work)
    try:
        for resumed in (False, True):
            changes = replace(config, max_steps=15) if resumed else config
            for rank, found in enumerate(pool.run(count, device_memory, changes)):
                where = f"{'resumed' if resumed else 'begun'}, rank {rank} of {count}"
                limit = found["training"] + found["layer"]
                for what in ("save", *(["restore"] if resumed else [])):
                    yield Row(f"FSDP, peak of a {what}, {where}", f"{found[what] / MIB:,.0f} MiB",
                              f"at most {limit / MIB:,.0f} MiB (training and a layer)",
                              found[what] <= limit)  # fmt: skip
    finally:
        pool.close()


def device_memory(config: Any) -> dict[str, int]:
    """Peaks of a run in bytes: of its steps, of the largest save, and of a restore; and the size of
    the largest parameter or layer."""
    import jobs
    import torch
    import train as script
    from training.checkpoint.saver import Saver
    from training.checkpoint.state import TrainState

    peaks = dict.fromkeys(("training", "save", "restore", "layer"), 0)
    save, restore, wrap = Saver.save, TrainState.restore, script.wrap

    def measured(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            peaks["training"] = max(peaks["training"], torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
            result = function(*args)
            peaks[name] = max(peaks[name], torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
            return result

        return call

    def wrapped(model: Any, *args: Any) -> Any:
        sizes = {id(m): sum(p.nbytes for p in m.parameters()) for m in model.bert.encoder.layer}
        peaks["layer"] = max(*sizes.values(), *(p.nbytes for p in model.parameters()))
        result = wrap(model, *args)
        torch.cuda.reset_peak_memory_stats()
        return result

    with (
        patched(Saver, "save", measured("save", save)),
        patched(TrainState, "restore", measured("restore", restore)),
        patched(script, "wrap", wrapped),
    ):
        jobs.run(config)
    return peaks


def memory(work: Path) -> Iterator[Row]:
    """`--batch-size auto` where memory really runs out, and the hint where it does in training."""
    import jobs
    import torch
    from training.launch.worker import advice_for

    tried = 512 if on_gpu() else 32
    options: dict[str, Any] = {"global_batch_size": tried, "max_steps": 3}
    if not on_gpu():
        config = settings(work, "auto", batch_size=0, **options)
        kept = jobs.run_with_little_memory(config, 0, 6, 0, "backward")
        yield Row("graphs kept after an injected error", str(kept), "0", kept == 0)
    else:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, 5e9 / total))  # for 110 M parameters
        train(settings(work, "auto", batch_size=0, **options))
        text = (work / "runs" / "auto" / "log.txt").read_text(encoding="utf-8")
        size = int(text.partition("batch_size auto: ")[2].partition(" ")[0])
        yield Row("rows that fit in 5 GB, by --batch-size auto", str(size), f"1 to {tried // 2}",
                  1 <= size <= tried // 2)  # fmt: skip
        try:
            train(settings(work, "too-large", batch_size=tried, **options))
            hint = "no error"
        except torch.OutOfMemoryError as error:
            hint = advice_for(error)
        yield Row("the hint when memory runs out in training", hint[:60], "names --batch-size",
                  "--batch-size" in hint)  # fmt: skip


def fp16(work: Path) -> Iterator[Row]:
    """fp16 finds its loss scale without a list of bad rows, and learns what fp32 does."""
    options: dict[str, Any] = {"dropout": 0.0, "max_steps": 20}
    whole = train(settings(work, "fp32", **options))
    half = train(settings(work, "fp16", precision="fp16", **options))
    listed = (work / "runs" / "fp16" / "bad_batches.jsonl").exists()
    yield Row("fp16, rows listed as bad", "yes" if listed else "none", "none", not listed)
    pairs = [(a, b) for a, b in zip(half, whole, strict=True) if a["loss"] is not None]
    yield at_most("loss, fp16 against fp32", difference(*map(list, zip(*pairs, strict=True))), 0.05)
    yield Row("fp16, steps skipped for the scale", str(len(half) - len(pairs)))


def speed(work: Path) -> Iterator[Row]:
    """rows/s beside Hugging Face's Trainer and a bare loop, in turn, twice; and MFU."""
    systems = {"ours": ours_rate, "HF Trainer": trainer_rate, "bare loop": bare_rate}
    least = {"HF Trainer": 1.0, "bare loop": 0.97}
    if importlib.util.find_spec("accelerate") is None:
        del systems["HF Trainer"]
        yield Row("rows/s / HF Trainer", "not run: pip install accelerate")
    rates: dict[str, list[float]] = {name: [] for name in systems}
    mfu: list[float] = []
    for turn in range(2):
        config = settings(work, f"ours{turn}", precision="bf16", global_batch_size=64,
                          batch_size=64, max_steps=100, log_every=10)  # fmt: skip
        for name, rate in systems.items():
            rates[name].append(rate(work, config))
        mfu += [line["mfu"] for line in train_lines(config)[2:] if "mfu" in line]
    medians = {name: statistics.median(found) for name, found in rates.items()}
    ours = medians.pop("ours")
    yield Row("rows/s, bf16, 64 rows of up to 128 tokens", f"{ours:,.0f}")
    for name, other in medians.items():
        yield Row(f"rows/s / {name}, grouped by length", f"{ours / other:.2f}",
                  f"at least {least[name]}", ours >= least[name] * other)  # fmt: skip
    measured, peak = measured_peak(), peak_of_the_table()
    what = "bf16 TFLOP/s of a product of 8192 x 8192"
    expected, is_near = "throughput.py does not know this GPU", None
    if peak:
        expected, is_near = f"0.5 to 1.05 of {peak / 1e12:,.0f}", 0.5 <= measured / peak <= 1.05
    yield Row(what, f"{measured / 1e12:,.0f}", expected, is_near)
    if mfu:
        share = statistics.median(mfu)
        yield Row("MFU", f"{share:.2f}", "0.05 to 0.8", 0.05 <= share <= 0.8)


def ours_rate(work: Path, config: Any) -> float:
    """rows/s of a run of the project."""
    return rows_per_second(train(config))


def trainer_rate(work: Path, config: Any) -> float:
    """rows/s of Hugging Face's Trainer on the same rows."""
    import torch
    from transformers import (
        AutoTokenizer,
        DataCollatorWithPadding,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    times: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            if state.global_step in (20, config.max_steps):
                torch.cuda.synchronize()
                times.append(time.perf_counter())

    arguments = TrainingArguments(
        str(work / "trainer"), per_device_train_batch_size=config.batch_size, bf16=True,
        max_steps=config.max_steps, train_sampling_strategy="group_by_length", report_to="none",
        save_strategy="no", logging_steps=10, disable_tqdm=True, optim="adamw_torch_fused",
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(config.model)
    rows, labels = encoded_rows(config, tokenizer)
    model = new_model(config, labels)
    collator = DataCollatorWithPadding(tokenizer)
    Trainer(model, arguments, collator, rows, callbacks=[Clock()]).train()
    return (config.max_steps - 20) * config.batch_size / (times[1] - times[0])


def bare_rate(work: Path, config: Any) -> float:
    """rows/s of a loop with nothing but forward, backward, clip and step, over ready batches that
    are sorted by length in windows of 64."""
    import torch
    from transformers import AutoTokenizer

    tokenizer, size = AutoTokenizer.from_pretrained(config.model), config.batch_size
    rows, labels = encoded_rows(config, tokenizer)
    windows = [rows[i : i + 64 * size] for i in range(0, len(rows), 64 * size)]
    ordered = [r for window in windows for r in sorted(window, key=lambda r: len(r["input_ids"]))]
    batches = [ordered[i : i + size] for i in range(0, len(ordered) - size + 1, size)]
    random.Random(0).shuffle(batches)
    model = new_model(config, labels)
    model.cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, fused=True)
    ready = [tokenizer.pad(batch, return_tensors="pt") for batch in batches]
    began = 0.0
    for step in range(config.max_steps):
        if step == 20:
            torch.cuda.synchronize()
            began = time.perf_counter()
        batch = {k: v.cuda(non_blocking=True) for k, v in ready[step % len(ready)].items()}
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return (config.max_steps - 20) * size / (time.perf_counter() - began)


def new_model(config: Any, labels: int) -> Any:
    """The model of the run, with a new head for so many labels."""
    from transformers import AutoModelForSequenceClassification

    return AutoModelForSequenceClassification.from_pretrained(
        config.model, num_labels=labels, ignore_mismatched_sizes=True
    )


def encoded_rows(config: Any, tokenizer: Any) -> tuple[list[dict[str, Any]], int]:
    """The training rows as token ids and a label's number, and how many labels there are."""
    lines = Path(config.train_file[0]).read_text(encoding="utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    names = sorted({row["label"] for row in found})
    texts = [row["text"] for row in found]
    encoded = tokenizer(texts, truncation=True, max_length=config.max_length)
    rows = [
        {"labels": names.index(row["label"])}
        | {name: values[i] for name, values in encoded.items()}
        for i, row in enumerate(found)
    ]
    return rows, len(names)


def measured_peak(size: int = 8192, times: int = 30) -> float:
    """FLOP/s of a large product of matrices in bf16."""
    import torch

    a, b = torch.randn(2, size, size, device="cuda", dtype=torch.bfloat16)
    for repeat in range(times + 5):
        if repeat == 5:
            torch.cuda.synchronize()
            began = time.perf_counter()
        a @ b
    torch.cuda.synchronize()
    return 2 * size**3 * times / (time.perf_counter() - began)


def peak_of_the_table() -> float | None:
    import torch
    import torch.distributed as dist
    from training.tracking.throughput import peak_flops

    with patched(dist, "get_world_size", lambda: 1):
        return peak_flops(torch.device("cuda", 0), "bf16", 1)


def compiled(work: Path) -> Iterator[Row]:
    """--compile: few compilations, the same losses, and what it gains."""
    options: dict[str, Any] = {"precision": "bf16", "dropout": 0.0, "batch_size": 32}
    steps = 60
    plain = train(settings(work, "plain", max_steps=steps, **options))
    fast = train(settings(work, "compiled", max_steps=steps, compile=True, **options))
    graphs = fast[-1]["compilations"]
    yield Row("--compile, graphs", str(graphs), "at most 8", graphs <= 8)
    yield at_most("loss, compiled against eager (bf16)", difference(fast, plain), 0.05)
    rates = [rows_per_second([x for x in lines if x["step"] > steps // 2])
             for lines in (fast, plain)]  # fmt: skip
    yield Row("rows/s, compiled / eager, without the steps that compile",
              f"{rates[0] / rates[1]:.2f}")  # fmt: skip


def profile(work: Path) -> Iterator[Row]:
    """--profile writes a trace with the GPU's kernels."""
    train(settings(work, "profile", profile=2, precision="bf16"))
    (file,) = (work / "runs" / "profile" / "profile").iterdir()
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    kernels = sum(event.get("cat") == "kernel" for event in events)
    if on_gpu():
        yield Row("--profile, kernels of the GPU in the trace", str(kernels), "some", kernels > 0)
    else:
        yield Row("--profile, events in the trace", str(len(events)), "some", len(events) > 0)


def two_gpus(work: Path) -> Iterator[Row]:
    """NCCL: DDP and FSDP on two GPUs give the losses of one."""
    import jobs
    from ranks import Ranks

    exact = {"dropout": 0.0, "global_batch_size": 32}
    one = train(settings(work, "one-gpu", batch_size=32, **exact))
    pool = Ranks(work)
    try:
        for strategy in ("ddp", "fsdp"):
            config = settings(work, strategy, strategy=strategy, **exact)
            pool.run(2, jobs.run, config)
            change = difference(train_lines(config), one)
            yield at_most(f"loss, {strategy} on 2 GPUs against 1 (fp32)", change, 1e-5)
    finally:
        pool.close()


CHECKS = {
    "numbers": Check(numbers, 0, 60, "losses and a resumed run"),
    "waits": Check(waits, 1, 70, "waits for the GPU in bf16, and transformers' mask"),
    "fsdp": Check(fsdp, 1, 50, "memory when FSDP saves and resumes", True),
    "memory": Check(memory, 0, 40, "memory that runs out, --batch-size auto"),
    "fp16": Check(fp16, 0, 40, "fp16 and its loss scale"),
    "speed": Check(speed, 1, 90, "rows/s beside HF Trainer and a bare loop, MFU"),
    "compiled": Check(compiled, 1, 120, "--compile"),
    "profile": Check(profile, 0, 30, "--profile"),
    "two_gpus": Check(two_gpus, 2, 60, "DDP and FSDP over NCCL", True),
}


# -- the table -----------------------------------------------------------------------------------


def measure(name: str, work: Path, seconds: float) -> list[Row]:
    """Run a check in a process of its own; its rows, or the line that says why there are none."""
    out = work / f"{name}.json"
    command = [sys.executable, __file__, "--inside", name, str(work)]
    environment = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "HF_HUB_OFFLINE": "1"}
    if not CHECKS[name].sees_all:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
        environment["CUDA_VISIBLE_DEVICES"] = visible.partition(",")[0]
    log = work / f"{name}.log"
    try:
        with log.open("w", encoding="utf-8") as file:
            done = subprocess.run(command, env=environment, stdout=file, stderr=subprocess.STDOUT,
                                  timeout=max(30.0, seconds))  # fmt: skip
        reason = f"exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        reason = f"not finished in {seconds:.0f} s"
    rows = [Row(**row) for row in json.loads(out.read_text("utf-8"))] if out.exists() else []
    if reason != "exit code 0":
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
        rows.append(Row(CHECKS[name].what, f"FAILED: {' '.join([reason, *last])[:150]}", "", False))
    return rows


def inside(name: str, work: Path) -> None:
    """The process of one check. What it has found so far is kept, should it fail."""
    found: list[dict[str, Any]] = []
    for row in CHECKS[name].run(work):
        found.append(asdict(row))
        (work / f"{name}.json").write_text(json.dumps(found), encoding="utf-8")


def table(rows: list[Row]) -> str:
    verdicts = {True: "yes", False: "**no**", None: ""}
    lines = ["| what | found | expected | as expected |", "|---|---|---|---|"]
    lines += [f"| {r.what} | {r.figure} | {r.expected} | {verdicts[r.met]} |" for r in rows]
    return "\n".join(lines)


def machine() -> str:
    import torch
    import transformers

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    devices = ", ".join(names) or "no GPU"
    return f"{devices}; torch {torch.__version__}, transformers {transformers.__version__}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), metavar="CHECK",
                        help=f"of {', '.join(CHECKS)}")  # fmt: skip
    parser.add_argument("--write", type=Path, metavar="FILE", help="keep the table as Markdown")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="in all")
    options = parser.parse_args()
    import torch

    began, count = time.monotonic(), torch.cuda.device_count()
    title, rows = machine(), list[Row]()
    print(title, flush=True)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_inputs(work, is_large=count > 0)
        for name in options.only:
            check, left = CHECKS[name], options.minutes * 60 - (time.monotonic() - began)
            if check.needs > count:
                reason = NO_GPU if count == 0 else f"not run: it needs {check.needs} GPUs"
                found = [Row(check.what, reason)]
            elif left < check.seconds:
                found = [Row(check.what, "not run: no time left")]
            else:
                print(f"{name}: {check.what} ...", flush=True)
                found = measure(name, work, left)
            for row in found:
                print(f"  {row.what}: {row.figure}  {row.expected}", flush=True)
            rows += found
    minutes = (time.monotonic() - began) / 60
    text = f"{title}; {minutes:.1f} minutes\n\n{table(rows)}\n"
    print(f"\n{text}")
    if options.write:
        options.write.write_text(f"# On a GPU\n\n{text}", encoding="utf-8")
    return int(any(row.met is False for row in rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        inside(sys.argv[2], Path(sys.argv[3]))
    else:
        sys.exit(main())
