"""Label names and their ids: the same on every rank and in every run."""

import itertools
import re
from collections.abc import Iterable
from typing import Any, Protocol

from training.settings.errors import UserError, did_you_mean


class SourceRow(Protocol):
    """A row as `data.py` yields it."""

    @property
    def text(self) -> str: ...
    @property
    def pair(self) -> str | None: ...
    @property
    def label(self) -> Any: ...
    @property
    def file(self) -> str: ...
    @property
    def line(self) -> int: ...


class LabelIds:
    """Label names to ids in the order in which they come, and where unknown ones were seen."""

    def __init__(self, known: list[str] | None) -> None:
        self.fixed = known is not None
        self.ids = {name: i for i, name in enumerate(known or [])}
        self.unknown: dict[str, tuple[int, str]] = {}

    def __getitem__(self, item: tuple[str, SourceRow]) -> int:
        name, row = item
        found = self.ids.get(name)
        if found is not None:
            return found
        if self.fixed:
            count, where = self.unknown.get(name, (0, f"{row.file}:{row.line}"))
            self.unknown[name] = count + 1, where
            return -1
        return self.ids.setdefault(name, len(self.ids))

    def check(self) -> None:
        if self.unknown:
            shown = "; ".join(
                f"{name!r} ({count} rows, first at {where}{did_you_mean(name, self.ids)})"
                for name, (count, where) in itertools.islice(self.unknown.items(), 5)
            )
            raise UserError(
                f"{len(self.unknown)} labels are not among those of the training rows: {shown}; "
                "correct them, or add training rows for them"
            )


def sorted_labels(names: Iterable[str]) -> list[str]:
    """Label names in the order of their ids: as numbers if all are whole numbers, else as text."""
    names = list(names)
    if all(re.fullmatch(r"-?(0|[1-9][0-9]*)", name) for name in names):
        return sorted(names, key=int)
    return sorted(names)
