"""How a setting is declared: all that is true of it stands at its field of `TrainConfig`."""

import math
from collections.abc import Callable, Mapping
from dataclasses import Field, field
from typing import Any

from training.settings.errors import UserError, did_you_mean


def setting(
    default: Any,
    help: str,
    *choices: str,
    at_least: float | None = None,
    below: float | None = None,
    check: Callable[[Any], object] | None = None,
    auto: bool = False,
    path: bool = False,
    path_or_name: bool = False,
    replaced_by: str | None = None,
    resumable: bool = False,
    affects_rows: bool = True,
    hyperparameter: bool = True,
    aliases: tuple[str, ...] = (),
    group: str | None = None,
) -> Any:
    """Return a field of `TrainConfig`. What is not given is the safe choice for a new setting.

    `help`: a line that says what it is, and when to change it.
    `choices`: the only texts that it may be.
    `at_least`, `below`: the limits of a number. `check`: raises UserError for other wrong values.
    `auto`: it is a number from 1, or "auto", which is kept as 0.
    `path`: in a settings file it is relative to that file, wherever the command is run from.
    `path_or_name`: the same if such a file or folder exists; otherwise it is a name or a keyword.
    `replaced_by`: a setting; when that is given as a flag, the settings file's value of this one
    is ignored.
    `resumable`: a resumed run may change it. Otherwise it must be the same.
    `affects_rows`: tokenized rows may depend on it: other values are other token stores.
    `hyperparameter`: TensorBoard shows it among the hyperparameters.
    `aliases`: names that other scripts have for it, for the hint after an unknown name.
    `group`: the title of the group of flags that begins here.
    """
    metadata = {
        "help": help, "choices": choices, "at_least": at_least, "below": below, "check": check,
        "auto": auto, "path": path or path_or_name, "path_or_name": path_or_name,
        "replaced_by": replaced_by, "resumable": resumable, "affects_rows": affects_rows,
        "hyperparameter": hyperparameter, "aliases": aliases, "group": group,
    }  # fmt: skip
    return field(default=default, metadata=metadata)


def facts(setting_field: Field[Any]) -> Mapping[str, Any]:
    """What `setting` was given for a field, or its defaults for a plain `gamma: float = 2.0`."""
    return setting_field.metadata or setting(setting_field.default, "").metadata


def check_value(name: str, about: Mapping[str, Any], value: Any) -> None:
    """Refuse a value that cannot work. Errors: UserError with the value, the rule, the way out."""
    if value is None:  # left open
        return
    choices, low, high = about["choices"], about["at_least"], about["below"]
    if choices and value not in choices:
        hint = did_you_mean(value, choices)
        raise UserError(f"{name} must be one of {', '.join(choices)}, not {value!r}{hint}")
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{name} must be a finite number, not {value}")
    if (low is not None and value < low) or (high is not None and value >= high):
        limits = {"at least": low, "below": high}
        rule = " and ".join(f"{k} {v}" for k, v in limits.items() if v is not None)
        raise UserError(f"{name} must be {rule}, not {value}")
    if about["check"] is not None:
        about["check"](value)
