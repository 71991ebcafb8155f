"""Parquet and Arrow files, and Hugging Face data sets, which are Arrow tables, to raw values.

`datasets` reads the CSV files of a data set in its own way: it makes 7 of 007, and null of NA.
"""

import functools
import re
from collections.abc import Iterable, Iterator
from typing import Any

from training.dataset.rows import FileNote, ReadOptions
from training.settings.config import HUB
from training.settings.errors import UserError

ROWS_PER_BATCH = 4096  # held as Python objects at a time
# Line or row number from 1, and the values in the order of ReadOptions.columns, as a tuple; or in
# their place a Rejected, and at the end a FileNote.
Values = Iterator[tuple[int, Any]]
HUB_NAME = re.compile(HUB + r"([^/:@]+/[^/:@]+)(@[^/:@]+)?(:[^/:@]+)?(/[^/:@]+)?")


class HubSplit(str):
    """The name of a split, with its rows. Stands where readers expect the path of a file."""

    data: Any  # datasets.Dataset
    suffix = ".arrow"

    def batches(self, columns: list[str]) -> Iterator[Any]:
        """Record batches of these columns, with the names of classes for their numbers."""
        table = self.data.select_columns(columns).with_format("arrow")
        features = self.data.features
        for part in table.iter(ROWS_PER_BATCH):
            arrays = [_class_names(part[c].combine_chunks(), features[c]) for c in columns]
            yield from type(part).from_arrays(arrays, columns).to_batches()


def _class_names(column: Any, feature: Any) -> Any:
    """A column of class numbers, or of lists of them, as one of names; any other as it is."""
    from pyarrow import array, compute

    if hasattr(feature, "names"):  # -1 says "no label": null, so a bad row
        numbers = compute.if_else(compute.greater_equal(column, 0), column, None)
        return array(feature.names).take(numbers)
    if hasattr(getattr(feature, "feature", None), "names"):  # several labels
        names = _class_names(column.values, feature.feature)
        lists = type(column).from_arrays(column.offsets, names)
        return compute.if_else(column.is_valid(), lists, None)
    return column


@functools.cache
def hub_split(name: str, split: str) -> HubSplit:
    """The rows of a data set for "train", "val" or "test". Errors: UserError."""
    if not (match := HUB_NAME.fullmatch(name)):
        raise UserError(f"{name!r} is not written as {HUB}org/name[@revision][:config][/split]")
    revision, config, named_split = (group and group[1:] for group in match.groups()[1:])
    hub_name = named_split or {"val": "validation"}.get(split, split)
    rows = HubSplit(name if named_split else f"{name}/{hub_name}")
    try:
        from datasets import load_dataset

        rows.data = load_dataset(match[1], config, split=hub_name, revision=revision)
    except ModuleNotFoundError as error:
        raise UserError(f"{name} needs pip install -e '.[hub]' ({error})") from None
    except Exception as error:  # of the network, the hub, the builder: each has its own kinds
        raise UserError(f"{name}, split {hub_name}: {' '.join(str(error).split()):.400}") from None
    return rows


def arrow_values(path: Any, options: ReadOptions) -> Values:
    """The values of a file or a HubSplit."""
    names, number = list(dict.fromkeys(options.columns)), 0
    try:
        column_names, batches = _open_table(path, names)
        options.column_indices(path, column_names)
        for batch in batches:
            batch = batch.select(names)
            batch.validate(full=True)  # a damaged file must end in an error, not in a crash
            for start in range(0, batch.num_rows, ROWS_PER_BATCH):
                part = batch.slice(start, ROWS_PER_BATCH)
                columns = [part.column(name).to_pylist() for name in options.columns]
                yield from enumerate(zip(*columns, strict=True), number + 1)
                number += len(part)
    except UserError:
        raise
    except Exception as error:  # pyarrow has many kinds
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path}: unreadable {path.suffix} file: {reason}") from None
    yield number, FileNote(str(path), number)


def _open_table(path: Any, columns: list[str]) -> tuple[list[str], Iterable[Any]]:
    """The names of all columns, and record batches that hold at least `columns`."""
    from pyarrow import ipc, memory_map, parquet  # here: most runs need none of it

    if isinstance(path, HubSplit):
        return path.data.features.arrow_schema.names, path.batches(columns)
    if path.suffix.lower() == ".parquet":
        file = parquet.ParquetFile(path, pre_buffer=False)
        batches = file.iter_batches(ROWS_PER_BATCH, columns=columns, use_threads=False)
        return file.schema_arrow.names, batches
    if memory_map(str(path)).read(6) == b"ARROW1":
        reader = ipc.open_file(memory_map(str(path)))
        return reader.schema.names, map(reader.get_batch, range(reader.num_record_batches))
    stream = ipc.open_stream(memory_map(str(path)))  # as the cache of `datasets` has it
    return stream.schema.names, stream
