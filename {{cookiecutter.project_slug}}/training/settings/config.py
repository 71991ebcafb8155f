"""The settings of a run: every field is a key of `config.toml` and a flag of `train.py`."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]
FROM_SCRATCH = "from-scratch"  # the model that needs no download
AUTO = 0  # what --batch-size auto becomes
HUB = "hf://"  # begins the name of a Hugging Face data set, where a file could stand


def opt(default: Any, help: str, *choices: str) -> Any:
    """A setting: its default, a line that says when to change it, the values it may have."""
    return field(default=default, metadata={"help": help, "choices": choices})


@dataclass(frozen=True)
class TrainConfig:
    # -- model
    model: str = opt(FROM_SCRATCH, "Hugging Face name or folder; from-scratch needs no download")
    max_length: int = opt(128, "tokens kept of a text; raise it when the log says many are cut")
    truncate: str = opt("head", "which part of a long text is kept", "head", "tail", "head+tail")
    dropout: float | None = opt(None, "of the whole model, if not its own; raise it on overfitting")
    freeze_encoder: bool = opt(False, "train the head alone: quick, enough for a first look")
    freeze_embeddings: bool = opt(False, "word embeddings stay: less memory, less to communicate")
    trust_remote_code: bool = opt(False, "run Python that comes with the model; if you trust it")
    # -- data
    train_file: tuple[str, ...] = opt((), "CSV, TSV, JSONL, Parquet, Arrow; files and globs")
    val_file: tuple[str, ...] = opt((), "validation rows, if not --val-fraction of train rows")
    test_file: tuple[str, ...] = opt((), "rows for the final report; they never choose anything")
    val_fraction: float = opt(0.1, "share of training rows to validate on, without --val-file")
    text_column: tuple[str, ...] = opt(("text",), "several are joined by the separator token")
    text_pair_column: str | None = opt(None, "column with the second text of a pair")
    label_column: str = opt("label", "column with the label")
    multi_label: bool = opt(False, "a row may have several labels")
    label_separator: str = opt(",", "between several labels, where they are not a JSON list")
    delimiter: str | None = opt(None, "between columns; else by suffix, comma or tab")
    encoding: str = opt("utf-8", "of text files: gb18030, big5, utf-16, latin-1, ...")
    tsv_quoting: bool = opt(False, "TSV files quote fields as CSV files do")
    header: bool = opt(True, "the first line names the columns; else they are numbers")
    on_bad_rows: str = opt("error", "rows that cannot be used: stop, or list them", "error", "skip")
    cache_dir: str = opt("cache", "for tokenized rows; name a local disk if the network's is slow")
    # -- batch
    global_batch_size: int | None = opt(None, "rows per step over all ranks: what is learned [32]")
    batch_size: int = opt(16, "most rows in one forward of a rank; auto: as many as memory holds")
    oom: str = opt(
        "stop", "when memory runs out: stop, or go on with half the batch_size", "stop", "shrink"
    )
    gradient_accumulation_steps: int | None = opt(
        None, "if given: global batch size = batch size x this x world size"
    )
    group_by_length: bool = opt(True, "put texts of like length together: less padding, faster")
    eval_batch_size: int = opt(32, "rows in one forward of an evaluation")
    num_workers: int = opt(0, "loader processes per rank; the token store rarely needs one")
    # -- training
    epochs: int = opt(3, "times through the training rows")
    max_steps: int | None = opt(None, "stop after so many steps, whatever --epochs says")
    lr: float = opt(5e-5, "peak learning rate: 5e-5 for a pretrained model, 1e-3 from scratch")
    weight_decay: float = opt(0.01, "on weight matrices; not on biases and norms")
    schedule: str = opt(
        "linear", "after warm-up; plateau waits for val", "linear", "cosine", "constant", "plateau"
    )
    warmup_ratio: float = opt(0.1, "share of the steps in which the learning rate rises")
    max_grad_norm: float = opt(1.0, "clip the gradient to this norm; 0: no clipping")
    label_smoothing: float = opt(0.0, "0.1 helps when some labels are wrong")
    class_weights: str = opt("none", "none, balanced (rare classes count more), or a JSON file")
    seed: int = opt(42, "of first weights, row order and dropout")
    # -- compute
    precision: str = opt(
        "fp32", "bf16 (or tf32) on recent GPUs, fp16 on older; fp64 to check",
        "fp32", "tf32", "bf16", "fp16", "fp64",
    )  # fmt: skip
    strategy: str = opt(
        "ddp", "fsdp shards what does not fit a GPU; dp is for comparison", "ddp", "fsdp", "dp"
    )
    gradient_compression: str = opt(
        "none", "for a slow network: rows (exact: of the words in use alone) or bf16",
        "none", "rows", "bf16", "fp16",
    )  # fmt: skip
    gradient_checkpointing: bool = opt(False, "less memory, about a third slower")
    compile: bool = opt(False, "torch.compile: slower start, then faster on GPUs")
    deterministic: bool = opt(False, "deterministic kernels alone: bit-for-bit runs on GPUs")
    profile: int = opt(0, "steps to trace, for TensorBoard or ui.perfetto.dev")
    timeout: float = opt(1800.0, "seconds without progress, while starting, that end the run")
    step_timeout: float = opt(600.0, "the same from the first step on; 0: wait --timeout there too")
    # -- evaluation
    evals_per_epoch: int = opt(1, "raise it when an epoch takes hours; 0: only at the end")
    metric: str = opt(
        "accuracy", "chooses the best checkpoint; macro_f1 when classes are uneven",
        "accuracy", "macro_f1", "weighted_f1", "micro_f1", "loss",
    )  # fmt: skip
    early_stopping_patience: int = opt(0, "evaluations without a better metric; 0: never stop")
    max_bad_steps: int = opt(20, "skipped steps in a row (loss or gradient not finite) that end it")
    check_replicas_every: int = opt(0, "steps between checks of the ranks' weights; [evaluations]")
    # -- run
    run_name: str | None = opt(None, "folder in --runs-dir; a used name continues it [the time]")
    runs_dir: str = opt("runs", "where runs are kept")
    resume: str = opt("auto", "continue a run of this name; never; or a run or checkpoint folder")
    resume_anyway: bool = opt(
        False, "continue although settings differ that change what is learned"
    )
    max_time: str | None = opt(None, "HH:MM from the launch on; then save and stop")
    log_every: int = opt(10, "steps between two lines of the log")
    save_every: int = opt(0, "steps between checkpoints, besides those at evaluations")
    keep_checkpoints: int = opt(2, "newest checkpoints kept; the best weights are in best/")

    def resume_settings(self) -> dict[str, Any]:
        """The settings that a resumed run must share with the run that it continues."""
        return {k: v for k, v in asdict(self).items() if k not in NEUTRAL}

    def row_settings(self) -> dict[str, Any]:
        """The settings that decide what a row is. (Temporary: another branch has its own.)"""
        names = (
            "max_length truncate text_column text_pair_column label_column multi_label "
            "label_separator delimiter encoding tsv_quoting header on_bad_rows"
        )
        return {name: getattr(self, name) for name in names.split()}

    def to_toml(self) -> str:
        """The settings as a `config.toml`. JSON's strings, numbers and lists are TOML's too."""
        given = {k: v for k, v in asdict(self).items() if v is not None}
        for name in PATHS:
            given[name] = _absolute(name, given[name])
        if self.batch_size == AUTO:
            given["batch_size"] = "auto"
        return "".join(f"{k} = {json.dumps(v, ensure_ascii=False)}\n" for k, v in given.items())


def _absolute(name: str, value: Any) -> Any:
    """The whole path; a Hugging Face name or a keyword stays."""
    if isinstance(value, tuple):
        return [_absolute(name, v) for v in value]
    is_name = name in ("model", "class_weights") and not Path(value).exists()
    return value if is_name or value.startswith(HUB) else str(Path(value).absolute())


# A group of flags starts at each of these fields.
GROUPS = {
    "model": "model", "train_file": "data", "global_batch_size": "batch", "epochs": "training",
    "precision": "compute", "evals_per_epoch": "evaluation", "run_name": "run",
}  # fmt: skip
# In a settings file these are relative to that file, wherever the command is run from.
PATHS = "model train_file val_file test_file cache_dir class_weights runs_dir".split()
# These do not change what is learned: a resumed run may change them.
NEUTRAL = (
    "cache_dir batch_size oom gradient_accumulation_steps num_workers compile timeout run_name "
    "runs_dir resume resume_anyway log_every save_every keep_checkpoints epochs max_steps "
    "max_time step_timeout max_bad_steps check_replicas_every eval_batch_size "
    "early_stopping_patience strategy gradient_checkpointing deterministic profile train_file "
    "val_file test_file"
).split()
