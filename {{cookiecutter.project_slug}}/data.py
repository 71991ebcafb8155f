"""Where rows come from. EDIT ME to read something other than files with a text and a label column.

`rows` yields the rows of a split. They are tokenised once and kept, so it may be slow. Nothing here
knows of ranks: the rows are read by one process, and every rank sees the same.
"""

import hashlib
from collections.abc import Iterator

from training.config import TrainConfig
from training.readers import ReadOptions, ReadReport, Row, expand_files, read_rows


def rows(split: str, config: TrainConfig, separator: str, report: ReadReport) -> Iterator[Row]:
    """Yield the rows of "train", "val" or "test".

    A row is `Row(text, pair, label, file, line)`: the text, the second text of a pair or None, the
    label (with --multi-label a tuple of labels), and where it stands, for error messages.
    `separator` joins several text columns.
    """
    options = ReadOptions(
        text_columns=config.text_column,
        text_pair_column=config.text_pair_column,
        label_column=config.label_column,
        text_separator=separator,
        delimiter=config.delimiter,
        encoding=config.encoding,
        tsv_quoting=config.tsv_quoting,
        header=config.header,
        on_bad_rows=config.on_bad_rows,  # type: ignore[arg-type]  # checked by TrainConfig
        multi_label=config.multi_label,
        label_separator=config.label_separator,
    )
    yield from read_rows(expand_files(files(split, config)), options, report)


def files(split: str, config: TrainConfig) -> tuple[str, ...]:
    return {"train": config.train_file, "val": config.val_file, "test": config.test_file}[split]


def fingerprint(split: str, config: TrainConfig) -> str:
    """A text that changes when the rows of the split change: here, the content of its files."""
    digest = hashlib.sha256()
    for path in expand_files(files(split, config)):
        with path.open("rb") as file:
            digest.update(path.name.encode() + hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
