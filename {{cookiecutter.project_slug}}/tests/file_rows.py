"""Rows from the files of the settings: the tests' own source, whatever data.py has become."""

from collections.abc import Iterable

from training.dataset.readers import read_files
from training.dataset.rows import Item
from training.settings.config import TrainConfig


def rows(split: str, config: TrainConfig) -> Iterable[Item]:
    files = {"train": config.train_file, "val": config.val_file, "test": config.test_file}
    return read_files(files[split], split, config)
