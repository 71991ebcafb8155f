"""Rows for the model of model.py: those of file_rows.py, and as many numbers beside the text as the
project's own rows have."""

import random
from collections.abc import Iterable, Iterator

import file_rows
import numpy as np

import data
from training.dataset.rows import Item, Row
from training.settings.config import TrainConfig
from training.settings.errors import UserError
from training.settings.flags import load_config


def rows(split: str, config: TrainConfig) -> Iterable[Item]:
    sizes, items = sizes_of_inputs(), file_rows.rows(split, config)
    return with_inputs(items, sizes) if sizes else items


def sizes_of_inputs() -> dict[str, int | None]:
    """Of each of the inputs of data.py's rows, how many numbers; None if it is not a list."""
    try:
        config = load_config([])
        first = next((row for row in data.rows("train", config) or () if type(row) is Row), None)
    except (OSError, UserError):  # the project's rows are not on this machine
        return {}
    inputs = first.inputs if first is not None and first.inputs else {}
    return {name: np.size(value) if np.ndim(value) else None for name, value in inputs.items()}


def with_inputs(items: Iterable[Item], sizes: dict[str, int | None]) -> Iterator[Item]:
    for item in items:
        if type(item) is Row:
            rng = random.Random(item.text if isinstance(item.text, str) else item.text[0])
            inputs = {
                name: rng.random() if n is None else [rng.random() for _ in range(n)]
                for name, n in sizes.items()
            }
            item = item._replace(inputs=inputs)
        yield item
