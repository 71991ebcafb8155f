"""Which settings are refused: values that cannot work, and those that do not go together."""

import math
import re
from dataclasses import fields
from pathlib import Path

from training.settings.config import AUTO, TrainConfig
from training.settings.errors import UserError, did_you_mean

AT_LEAST = {
    8: "max_length",
    1: "global_batch_size gradient_accumulation_steps eval_batch_size "
    "epochs max_steps log_every keep_checkpoints max_bad_steps",
    0: "batch_size num_workers lr weight_decay max_grad_norm early_stopping_patience "
    "evals_per_epoch save_every seed timeout step_timeout check_replicas_every profile",
}
SHARES = ("val_fraction", "warmup_ratio", "label_smoothing", "dropout")


def check(config: TrainConfig) -> None:
    """Refuse values that cannot work. Errors: UserError with the value, the rule, the way out."""
    for f in fields(config):
        value, choices = getattr(config, f.name), f.metadata["choices"]
        if choices and value not in choices:
            raise UserError(
                f"{f.name} must be one of {', '.join(choices)}, not {value!r}"
                f"{did_you_mean(value, choices)}"
            )
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{f.name} must be a finite number, not {value}")
    for low, names in AT_LEAST.items():
        for name in names.split():
            if (value := getattr(config, name)) is not None and value < low:
                raise UserError(f"{name} must be at least {low}, not {value}")
    for name in SHARES:
        if (value := getattr(config, name)) is not None and not 0 <= value < 1:
            raise UserError(f"{name} must be at least 0 and below 1, not {value}")
    if not config.train_file:
        raise UserError("no train_file: give --train-file, or set it in config.toml")
    run = config.run_name
    if run is not None and (Path(run).name != run or run == ".." or "\0" in run):
        raise UserError(f"run_name {run!r} must be a plain folder name")
    if config.batch_size == AUTO and config.gradient_accumulation_steps:
        raise UserError("batch_size auto goes with global_batch_size, not with accumulation steps")
    _check_strategy(config)
    if config.max_time is not None:
        seconds_of(config.max_time)
    no_val = not config.val_file and not config.val_fraction
    if no_val and (config.early_stopping_patience or config.schedule == "plateau"):
        raise UserError("early stopping and the plateau schedule need val_file or val_fraction")
    if config.multi_label and (config.class_weights != "none" or config.label_smoothing):
        raise UserError("class_weights and label_smoothing do not go with multi_label")


def _check_strategy(config: TrainConfig) -> None:
    strategy, packed = config.strategy, config.gradient_compression
    for asked, what, others in (
        (config.oom == "shrink", "oom shrink", ("ddp",)),
        (config.batch_size == AUTO, "batch_size auto", ("ddp",)),
        (packed == "rows", "gradient_compression rows", ("ddp",)),
        (packed != "none", f"gradient_compression {packed}", ("ddp", "fsdp")),
        (config.compile, "compile", ("ddp", "fsdp")),
    ):
        if asked and strategy not in others:
            raise UserError(f"{what} goes with strategy {' or '.join(others)}, not with {strategy}")
    if packed != "none" and config.oom == "shrink":
        raise UserError("gradient_compression does not go with oom shrink")


def seconds_of(max_time: str) -> int:
    """Seconds in "HH:MM". Errors: UserError."""
    match = re.fullmatch(r"(\d+):([0-5]\d)", max_time)
    if match is None:
        raise UserError(f"max_time must be hours and minutes, as 11:30, not {max_time!r}")
    return int(match[1]) * 3600 + int(match[2]) * 60
