"""Parquet and Arrow files, and data sets of the hub, to raw values, in batches of bounded size."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.config import UserError
from training.hub import HubSplit

if TYPE_CHECKING:
    from training.readers import ReadOptions, ReadReport

BATCH_ROWS = 4096


@contextmanager
def open_arrow(
    path: Path | HubSplit,
) -> Iterator[tuple[Any, Callable[[list[str]], Iterator[Any]]]]:
    """The schema, and a function from names of columns to record batches."""
    import pyarrow as pa  # here: most runs need none of it
    from pyarrow import ipc, parquet

    try:
        if isinstance(path, HubSplit):
            yield path.data.features.arrow_schema, path.batches
        elif path.suffix.lower() == ".parquet":
            with parquet.ParquetFile(path, pre_buffer=False) as file:
                yield (
                    file.schema_arrow,
                    lambda names: file.iter_batches(BATCH_ROWS, columns=names, use_threads=False),
                )
        else:
            with pa.memory_map(str(path)) as source:
                if source.read(6) == b"ARROW1":
                    reader = ipc.open_file(source)
                    batches = map(reader.get_batch, range(reader.num_record_batches))
                else:  # a stream, as the cache of `datasets` has it
                    source.seek(0)
                    batches = reader = ipc.open_stream(source)
                yield reader.schema, lambda names: (batch.select(names) for batch in batches)
    except UserError:
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path}: unreadable {path.suffix} file: {reason}") from None


def arrow_values(
    path: Path, options: "ReadOptions", report: "ReadReport"
) -> Iterator[tuple[int, Sequence[Any]]]:
    """The number of each row, and its values in the order of ReadOptions.columns."""
    number = 0
    with open_arrow(path) as (schema, batches):
        options.places(path, schema.names)
        for name in options.columns:
            lists = options.multi_label and name == options.label_column
            _check_type(path, name, schema.field(name).type, lists)
        for batch in batches(list(dict.fromkeys(options.columns))):
            batch.validate(full=True)  # a damaged file must end in an error, not in a crash
            for start in range(0, batch.num_rows, BATCH_ROWS):
                part = batch.slice(start, BATCH_ROWS)
                columns = [part.column(name).to_pylist() for name in options.columns]
                for values in zip(*columns, strict=True):
                    number += 1
                    yield number, values
    report.lines += number


def _check_type(path: Path, name: str, kind: Any, lists: bool) -> None:
    """Refuse what is neither text nor whole numbers, before any row is read."""
    from pyarrow import types

    inner, is_list = kind, types.is_list(kind) or types.is_large_list(kind)
    if is_list and lists:
        inner = kind.value_type
    if types.is_dictionary(inner):  # pandas calls it categorical
        inner = inner.value_type
    if types.is_string(inner) or types.is_large_string(inner) or types.is_integer(inner):
        return
    way_out = "write it as text"
    if types.is_floating(inner):
        way_out += "; whole numbers with gaps become floats in pandas unless they are Int64"
    if is_list:
        way_out = "several labels need --multi-label, and each is text or a whole number"
    raise UserError(f"{path}:1: column {name!r} holds {kind}, not text or whole numbers; {way_out}")
