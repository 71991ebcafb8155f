"""How a setting is declared: all that is true of it stands at its field of `TrainConfig`."""

import math
import re
from dataclasses import Field, dataclass, field
from typing import Any

from training.settings.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Facts:
    """What is true of a setting. The defaults are the safe choice for a new one."""

    help: str = ""  # what it is, and when to change it
    choices: tuple[str, ...] = ()  # the only texts that it may be
    at_least: float | None = None
    below: float | None = None
    pattern: str = ""  # of all its text, as a regular expression; "" is any text
    rule: str = ""  # the pattern in words
    auto: bool = False  # a number from 1, or "auto", which is kept as 0
    path: bool = False  # in a settings file it is relative to that file
    may_be_name: bool = False  # a path if such a file or folder exists; else a name or a keyword
    replaced_by: str | None = None  # if this flag is given, the file's value is ignored
    resumable: bool = False  # a resumed run may change it
    affects_rows: bool = True  # tokenized rows may depend on it: other values, other token stores
    hyperparameter: bool = True  # TensorBoard shows it among the hyperparameters
    aliases: tuple[str, ...] = ()  # names in other scripts, for the hint after an unknown name
    group: str | None = None  # the title of the group of flags that begins here

    def check_value(self, name: str, value: Any) -> None:
        """Refuse a value that cannot work. Errors: UserError with the value and the rule."""
        if value is None:  # left open
            return
        if self.choices and value not in self.choices:
            hint = did_you_mean(value, self.choices)
            raise UserError(f"{name} must be one of {', '.join(self.choices)}, not {value!r}{hint}")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name} must be a finite number, not {value}")
        too_low = self.at_least is not None and value < self.at_least
        if too_low or (self.below is not None and value >= self.below):
            limits = {"at least": self.at_least, "below": self.below}
            rule = " and ".join(f"{k} {v}" for k, v in limits.items() if v is not None)
            raise UserError(f"{name} must be {rule}, not {value}")
        if self.pattern and not re.fullmatch(self.pattern, value):
            raise UserError(f"{name} must be {self.rule}, not {value!r}")


def setting(default: Any, help: str, *choices: str, **more: Any) -> Any:
    """Return a field of `TrainConfig`. `more`: other fields of `Facts`."""
    return field(default=default, metadata={"facts": Facts(help, choices, **more)})


def facts(setting_field: Field[Any]) -> Facts:
    """What `setting` was given for a field, or the defaults for a plain `gamma: float = 2.0`."""
    return setting_field.metadata.get("facts", Facts())
