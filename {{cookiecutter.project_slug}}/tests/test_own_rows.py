"""The project's own data.py and config.toml: rows that can be used, and the same ones each time."""

from itertools import islice

import pytest

import data
from training.dataset.rows import ReadReport, Row
from training.dataset.source import Source
from training.settings.flags import load_config

MANY = 20_000  # rows of a split that are looked at


def first_rows(split: str) -> list[Row]:
    """The first rows of data.py, checked as in training; none if there is no such split."""
    source = Source(data, load_config([]))
    try:
        return list(islice(source.draw(split, ReadReport()), MANY)) if source.content(split) else []
    except FileNotFoundError as error:
        pytest.skip(f"the rows are not on this machine: {error}")


def test_rows_can_be_used_and_come_again() -> None:
    rows = first_rows("train")
    assert rows
    again = first_rows("train")
    assert [row[:3] for row in rows] == [row[:3] for row in again]


@pytest.mark.parametrize("split", ["val", "test"])
def test_labels_are_known(split: str) -> None:
    """Those of other splits are among those of the training rows."""
    config, train = load_config([]), first_rows("train")
    if len(train) == MANY:
        pytest.skip("there are too many training rows to look at all of them")

    def labels(rows: list[Row]) -> set[str | tuple[str, ...] | None]:
        if config.multi_label:
            return {name for row in rows for name in row.label or ()}
        return {row.label for row in rows}

    assert labels(first_rows(split)) <= labels(train)
