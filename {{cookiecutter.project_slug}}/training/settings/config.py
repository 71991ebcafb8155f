"""The settings of a run: every field is a key of `config.toml` and a flag of `train.py`.

To add one, add a line to `TrainConfig` and read it where it is needed, as `config.focal_gamma`:

    focal_gamma: float = learning(2.0, "focal loss: higher looks more at hard rows", at_least=0)
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from training.settings.errors import UserError
from training.settings.setting import Facts, facts, setting

PROJECT = Path(__file__).resolve().parents[2]
FROM_SCRATCH = "from-scratch"  # the model that needs no download
AUTO = 0  # what --batch-size auto becomes
OTHER_VALUES = ("loss", "rows", "step", "epoch", "split")  # of a line of metrics.jsonl
HUB = "hf://"  # begins the name of a Hugging Face data set, where a file could stand


# `setting` with what many have in common. `Facts` in setting.py lists what can be given. A plain
# `setting` is the safe choice: for another value of it, rows are tokenized again.
reading = partial(setting, hyperparameter=False)  # how files become rows
learning = partial(setting, affects_rows=False)  # what is learned from the rows
unshown = partial(learning, hyperparameter=False)  # the same, but rarely compared between runs
running = partial(unshown, resumable=True)  # how that is computed


@dataclass(frozen=True)
class TrainConfig:
    # fmt: off
    # -- model
    model: str = learning(FROM_SCRATCH, "Hugging Face name or folder; from-scratch: no download",
        path=True, may_be_name=True, aliases=("model_name_or_path",), group="model")
    pretrained: bool = learning(True, "begin with its weights; --no-pretrained: with random ones")
    max_length: int = setting(128, "most tokens of a text; raise it when many are cut", at_least=8)
    truncate: str = reading("head", "which part of a text is kept", "head", "tail", "head+tail")
    dropout: float | None = learning(None, "probability; raise it on overfitting [the model's own]",
        at_least=0, below=1)
    freeze_encoder: bool = learning(False, "train only the head: quick, enough for a first look")
    freeze_embeddings: bool = unshown(False, "word embeddings stay: less memory and communication")
    trust_remote_code: bool = unshown(False, "run Python code of the model, if you trust it")
    # -- data: rows depend on what is in the files, not on their names
    train_file: tuple[str, ...] = running((), "CSV, TSV, JSONL, Parquet, Arrow; files and globs",
        path=True, aliases=("train_data",), group="data")
    val_file: tuple[str, ...] = running((), "validation rows, if not --val-fraction of train rows",
        path=True, replaced_by="train_file")
    test_file: tuple[str, ...] = running((), "for the final report; never used to choose anything",
        path=True, replaced_by="train_file")
    val_fraction: float = unshown(0.1, "share to validate on if no --val-file", at_least=0, below=1)
    text_column: tuple[str, ...] = reading(("text",), "text columns, joined by the separator token")
    text_pair_column: str | None = reading(None, "column with the second text of a pair")
    label_column: str = reading("label", "column with the label")
    multi_label: bool = reading(False, "a row may have several labels")
    label_separator: str = reading(",", "between several labels, where they are not a JSON list")
    delimiter: str | None = reading(None, "between columns [by suffix: comma or tab]")
    encoding: str = reading("utf-8", "of text files: gb18030, big5, utf-16, latin-1, ...")
    tsv_quoting: bool = reading(False, "TSV files quote fields as CSV files do")
    header: bool = reading(True, "the first line names the columns; otherwise they are numbers")
    on_bad_rows: str = reading("error", "unusable rows: stop, or list and skip", "error", "skip")
    cache_dir: str = running("cache", "for tokenized rows; best on a local disk", path=True)
    # -- batch
    global_batch_size: int | None = learning(None, "rows per step, all ranks; decides results [32]",
        at_least=1, replaced_by="gradient_accumulation_steps", group="batch")
    batch_size: int = running(16, "most rows in a rank's forward; auto: as many as fit in memory",
        at_least=0, auto=True, aliases=("per_device_train_batch_size",))
    gradient_accumulation_steps: int | None = running(None, "if set, it sets the global batch size",
        at_least=1, replaced_by="global_batch_size")
    group_by_length: bool = unshown(True, "batch texts of similar length: less padding, faster")
    eval_batch_size: int = running(32, "rows in one forward of an evaluation", at_least=1)
    num_workers: int = running(0, "loader processes per rank; rarely needed", at_least=0)
    # -- training
    epochs: int = running(3, "passes over the training rows",
        at_least=1, hyperparameter=True, aliases=("num_train_epochs",), group="training")
    max_steps: int | None = running(None, "steps to stop after, whatever --epochs says", at_least=1)
    lr: float = learning(5e-5, "peak learning rate: 5e-5 for a pretrained model, 1e-3 from scratch",
        at_least=0, aliases=("learning_rate",))
    weight_decay: float = learning(0.01, "of weight matrices; not of biases and norms", at_least=0)
    schedule: str = learning("linear", "of lr after warm-up; plateau: lower when the metric stalls",
        "linear", "cosine", "constant", "plateau", aliases=("lr_scheduler_type",))
    warmup_ratio: float = learning(0.1, "share of the steps in which lr rises", at_least=0, below=1)
    max_grad_norm: float = learning(1.0, "clip gradients to this norm; 0: no clipping", at_least=0)
    label_smoothing: float = learning(0.0, "0.1 helps if labels may be wrong", at_least=0, below=1)
    class_weights: str = learning("none", "none, balanced (rare classes count more) or a JSON file",
        path=True, may_be_name=True)
    seed: int = learning(42, "of initial weights, row order and dropout", at_least=0)
    # -- compute
    precision: str = learning("fp32", "bf16 or tf32 on recent GPUs, fp16 on older; fp64 for checks",
        "fp32", "tf32", "bf16", "fp16", "fp64", aliases=("bf16", "fp16"), group="compute")
    strategy: str = running("ddp", "fsdp shards large models; dp: to compare", "ddp", "fsdp", "dp")
    gradient_compression: str = unshown("none", "for a slow network; rows is exact, bf16 is not",
        "none", "rows", "bf16", "fp16")
    gradient_checkpointing: bool = running(False, "less memory, about a third slower")
    compile: bool = running(False, "torch.compile: slower start, then faster on GPUs")
    deterministic: bool = running(False, "only deterministic kernels: bit-identical runs on GPUs")
    profile: int = running(0, "steps to trace, for TensorBoard or ui.perfetto.dev", at_least=0)
    timeout: float = running(1800.0, "most seconds without progress, before step 1", at_least=0)
    step_timeout: float = running(600.0, "the same from step 1 on; 0: as --timeout", at_least=0)
    # -- evaluation
    evals_per_epoch: int = unshown(1, "raise it when an epoch takes hours; 0: only at the end",
        at_least=0, group="evaluation")
    metric: str = unshown("accuracy", "chooses the best checkpoint: loss, or one of metrics.py; "
        "macro_f1 for uneven classes")
    early_stopping_patience: int = running(0, "stop after N evaluations without gain; 0: never",
        at_least=0, aliases=("patience",))
    max_bad_steps: int = running(20, "skipped steps (not finite) in a row to end after", at_least=1)
    check_replicas_every: int = running(0, "steps between replica checks [evaluations]", at_least=0)
    on_replica_drift: str = running("stop", "where weights of ranks differ", "stop", "warn", "off")
    # -- run
    run_name: str | None = running(None, "folder in --runs-dir; an old name resumes it [the time]",
        pattern=r"(?!\.\.?\Z)[^/\0]*", rule="a plain folder name", group="run")
    runs_dir: str = running("runs", "where runs are kept", path=True, aliases=("output_dir",))
    resume: str = running("auto", "auto: a run of this name; never; or a run or checkpoint folder")
    resume_anyway: bool = running(False, "resume although settings differ that change the result")
    max_time: str | None = running(None, "HH:MM from the launch on; then save and stop",
        pattern=r"\d+:[0-5]\d", rule="hours and minutes, as 11:30")
    log_every: int = running(10, "steps between two lines of the log", at_least=1)
    save_every: int = running(0, "steps between checkpoints, besides at evaluations", at_least=0)
    keep_checkpoints: int = running(2, "newest checkpoints to keep; best/ is kept too", at_least=1)
    # fmt: on

    def resume_settings(self) -> dict[str, Any]:
        """The settings that a resumed run must share with the run that it continues.

        A path is `{"name": ..., "content": ...}`: where there is a content, it counts.
        """
        return {
            name: {"name": value, "content": content_of(value)} if about.path else value
            for name, about, value in self._items()
            if not about.resumable
        }

    def from_folder(self, folder: Path | None) -> "TrainConfig":
        """The settings that build the model whose weights are in `folder`, a checkpoint or best/.

        Pretrained weights are not read. None leaves the settings as they are.
        """
        if folder is None or self.model == FROM_SCRATCH:
            return self
        is_there = (folder / "config.json").exists()  # other machines may not have the run's folder
        return replace(self, model=str(folder) if is_there else self.model, pretrained=False)

    def row_settings(self) -> dict[str, Any]:
        """The settings that tokenized rows depend on; of a path its content, if there is any."""
        rows = [item for item in self._items() if item[1].affects_rows]
        return {name: (f.path and content_of(value)) or value for name, f, value in rows}

    def hyperparameters(self) -> dict[str, bool | int | float | str]:
        """What TensorBoard shows of the settings: those that are set, several texts as one."""
        items = self._items()
        shown = {name: v for name, about, v in items if about.hyperparameter and v is not None}
        return {name: " ".join(v) if isinstance(v, tuple) else v for name, v in shown.items()}

    def to_toml(self) -> str:
        """The settings as a `config.toml`. JSON's strings, numbers and lists are TOML's too."""
        text = ""
        for name, about, value in self._items():
            if about.path and value is not None:
                value = resolve_path(value, about, Path.cwd())
            if about.auto and value == AUTO:
                value = "auto"
            if value is not None:
                text += f"{name} = {json.dumps(value, ensure_ascii=False)}\n"
        return text

    def _items(self) -> list[tuple[str, Facts, Any]]:
        """Of each setting its name, what is true of it, and its value."""
        return [(f.name, facts(f), getattr(self, f.name)) for f in fields(self)]

    def check(self) -> None:
        """Refuse what cannot work. Errors: UserError with the value, the rule and the way out."""
        for name, about, value in self._items():
            if value is not None:  # None: left open
                about.check_value(name, value)
        auto, compression = self.batch_size == AUTO, self.gradient_compression
        if auto and self.gradient_accumulation_steps:
            raise UserError("batch_size auto goes with global_batch_size, not accumulation steps")
        for is_set, what, strategies in (
            (auto, "batch_size auto", ("ddp",)),
            (compression == "rows", "gradient_compression rows", ("ddp",)),
            (compression != "none", f"gradient_compression {compression}", ("ddp", "fsdp")),
            (self.compile, "compile", ("ddp", "fsdp")),
        ):
            if is_set and self.strategy not in strategies:
                allowed = " or ".join(strategies)
                raise UserError(f"{what} goes with strategy {allowed}, not with {self.strategy}")
        is_random = self.model == FROM_SCRATCH or not self.pretrained
        if is_random and (self.freeze_encoder or self.freeze_embeddings):
            raise UserError("freeze_encoder and freeze_embeddings are for a pretrained model")
        if self.multi_label and (self.class_weights != "none" or self.label_smoothing):
            raise UserError("class_weights and label_smoothing do not go with multi_label")

    def check_metric(self, metrics: Mapping[str, Any]) -> None:
        """Refuse METRICS of metrics.py, or a `metric`, that cannot work. Errors: UserError."""
        for name, entry in metrics.items():
            if name in OTHER_VALUES or not isinstance(name, str):
                raise UserError(f"metrics.py: no metric can have the name {name!r}; rename it")
            match entry:
                case (function, bool()) if callable(function):
                    continue
            raise UserError(
                f"metrics.py: {name} must be (function, True or False: whether higher is better), "
                f"not of type {type(entry).__name__}"
            )
        known = Facts(choices=(*metrics, "loss"))
        known.check_value("metric (metrics.py has them, besides loss)", self.metric)


def content_of(path: Any) -> Any:
    """A hash of what is in a file or folder, of a model's folder only of `config.json`; None if
    there is nothing. Of several paths a list."""
    if isinstance(path, tuple):
        return [content_of(one) for one in path]
    if path is None or not (folder := Path(path).expanduser()).exists():
        return None
    model = folder / "config.json"
    files = [model] if model.exists() else sorted(f for f in folder.rglob("*") if f.is_file())
    digest = hashlib.sha256()
    for file in files if folder.is_dir() else [folder]:
        content = file.read_bytes()
        if file.suffix == ".json":
            with suppress(ValueError):  # other spaces or another order are no other content
                content = json.dumps(json.loads(content), sort_keys=True).encode()
        name = str(file.relative_to(folder))  # of a file "."
        digest.update(name.encode() + hashlib.sha256(content).digest())
    return digest.hexdigest()


def resolve_path(path: Any, about: Facts, folder: Path) -> Any:
    """The path or paths, where relative ones are in `folder`. Hugging Face names and keywords
    stay."""
    if isinstance(path, tuple):
        return tuple(resolve_path(one, about, folder) for one in path)
    resolved = folder / Path(path).expanduser()
    is_name = path.startswith(HUB) or (about.may_be_name and not resolved.exists())
    return path if is_name else str(resolved)
