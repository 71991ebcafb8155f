"""Hugging Face data sets, where a file could stand: hf://org/name[@revision][:config][/split]

What is a CSV there, `datasets` reads in its own way: it makes 7 of 007, and of NA a missing value.
"""

import functools
import re
from collections.abc import Iterator
from typing import Any

from training.settings.config import HUB
from training.settings.errors import UserError

NAME = re.compile(HUB + r"([^/:@]+/[^/:@]+)(@[^/:@]+)?(:[^/:@]+)?(/[^/:@]+)?")


class HubSplit(str):
    """The name of a split, with its rows. Stands where readers expect the path of a file."""

    data: Any  # datasets.Dataset
    suffix = ".arrow"

    def batches(self, columns: list[str]) -> Iterator[Any]:
        """Record batches of these columns, with the names of classes for their numbers."""
        kinds = [self.data.features[name] for name in columns]
        for table in self.data.select_columns(columns).with_format("arrow").iter(4096):
            found = [column.combine_chunks() for column in table.select(columns)]
            named = [_named(column, kind) for column, kind in zip(found, kinds, strict=True)]
            yield from type(table).from_arrays(named, columns).to_batches()


def _named(column: Any, kind: Any) -> Any:
    from pyarrow import array, compute

    if hasattr(kind, "names"):  # -1 says "no label": null, so a bad row
        numbers = compute.if_else(compute.greater_equal(column, 0), column, None)
        return array(kind.names).take(numbers)
    if hasattr(getattr(kind, "feature", None), "names"):  # several labels
        lists = type(column).from_arrays(column.offsets, _named(column.values, kind.feature))
        return compute.if_else(column.is_valid(), lists, None)
    return column


@functools.cache
def hub_split(name: str, split: str) -> HubSplit:
    """The rows of a data set for "train", "val" or "test". Errors: UserError."""
    match = NAME.fullmatch(name)
    if not match:
        raise UserError(f"{name!r} is not written as {HUB}org/name[@revision][:config][/split]")
    revision, config, wanted = (part and part[1:] for part in match.groups()[1:])
    wanted = wanted or {"val": "validation"}.get(split, split)
    found = HubSplit(name if match[4] else f"{name}/{wanted}")
    try:
        from datasets import load_dataset

        found.data = load_dataset(match[1], config, split=wanted, revision=revision)
    except ModuleNotFoundError as error:
        raise UserError(f"{name} needs pip install -e '.[hub]' ({error})") from None
    except Exception as error:  # of the network, the hub, the builder: each has its own kinds
        raise UserError(f"{name}, split {wanted}: {' '.join(str(error).split()):.400}") from None
    return found
