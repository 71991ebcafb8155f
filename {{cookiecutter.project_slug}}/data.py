"""Where rows come from. EDIT ME to read something other than files with a text and a label column.

`rows` yields the rows of a split. One process reads and tokenizes them, once, for all ranks.

    python data.py --report [FOLDER] [train.py flags]    # what is in the rows: text and a picture
"""

import hashlib
import sys
from collections.abc import Iterator
from typing import Any

from training.dataset.arrow import HubSplit, hub_split
from training.dataset.files import expand_files
from training.dataset.readers import read_rows
from training.dataset.rows import ReadOptions, ReadReport, Row
from training.settings.config import HUB, TrainConfig


def rows(split: str, config: TrainConfig, separator: str, report: ReadReport) -> Iterator[Row]:
    """Yield the rows of "train", "val" or "test". `separator` joins several text columns.

    A row is `Row(text, pair, label, file, line)`: the text, the second text of a pair or None, the
    label (with --multi-label a tuple of labels), and where it stands, for error messages.
    """
    options = ReadOptions.of(config, separator)
    yield from read_rows(sources(split, config), options, report)


def sources(split: str, config: TrainConfig) -> list[Any]:
    """The files of a split, and its Hugging Face data sets (hf://org/name)."""
    names = {"train": config.train_file, "val": config.val_file, "test": config.test_file}[split]
    files = expand_files([name for name in names if not name.startswith(HUB)])
    return [*files, *(hub_split(name, split) for name in names if name.startswith(HUB))]


def fingerprint(split: str, config: TrainConfig) -> str:
    """A text that changes when the rows of the split change: here, the content of its files."""
    digest = hashlib.sha256()
    for source in sources(split, config):
        if isinstance(source, HubSplit):
            digest.update(f"{source} {source.data._fingerprint}".encode())
            continue
        with source.open("rb") as file:
            digest.update(source.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


if __name__ == "__main__":
    from training.tracking import data_report

    folder, config = data_report.parse()  # before PyTorch is imported: a mistyped flag answers fast
    import model

    data_report.main(folder, config, sys.modules[__name__], model)
