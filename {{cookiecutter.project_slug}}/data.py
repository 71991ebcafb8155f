"""Where rows come from. EDIT ME to read something other than files with a text and a label column.

What is in the rows, as text and as a picture:

    python data.py --report [FOLDER] [train.py flags]
"""

import sys
from collections.abc import Iterable

from training.dataset.readers import read_files
from training.dataset.rows import Item
from training.settings.config import TrainConfig


def rows(split: str, config: TrainConfig) -> Iterable[Item]:
    """The rows of "train", "val" or "test"; none, if there is no such split.

    Here they are read from files. A generator of `Row(text, pair, label, file, line, inputs)`, from
    training.dataset.rows, will do as well: only text and label are needed (with --multi-label a
    tuple of labels). `inputs` are numbers for the model's forward, by name. Rows are read and
    tokenized once, by one process, in its main thread; later runs notice if they have changed.
    """
    files = {"train": config.train_file, "val": config.val_file, "test": config.test_file}
    return read_files(files[split], split, config)


if __name__ == "__main__":
    from training.tracking import data_report

    folder, config = data_report.parse()  # before PyTorch is imported: a mistyped flag answers fast
    import model

    data_report.main(folder, config, sys.modules[__name__], model)
