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
    at_least: float = -math.inf
    below: float = math.inf
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
        rule = hint = ""
        if self.choices and value not in self.choices:
            rule, hint = f"one of {', '.join(self.choices)}", did_you_mean(value, self.choices)
        elif isinstance(value, float) and not math.isfinite(value):
            rule = "a finite number"
        elif isinstance(value, int | float) and not self.at_least <= value < self.below:
            limits = {"at least": self.at_least, "below": self.below}
            rule = " and ".join(f"{k} {v}" for k, v in limits.items() if math.isfinite(v))
        elif self.pattern and not re.fullmatch(self.pattern, value):
            rule = self.rule
        if rule:
            raise UserError(f"{name} must be {rule}, not {value!r}{hint}")


def setting(default: Any, help: str, *choices: str, **more: Any) -> Any:
    """Return a field of `TrainConfig`. `more`: other fields of `Facts`."""
    return field(default=default, metadata={"facts": Facts(help, choices, **more)})


def facts(setting_field: Field[Any]) -> Facts:
    """What `setting` was given for a field, or the defaults for a plain `gamma: float = 2.0`."""
    return setting_field.metadata.get("facts", Facts())
