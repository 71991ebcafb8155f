"""What each format means: CSV, TSV, plain text, JSON Lines, Parquet and Arrow to raw values.

CSV follows RFC 4180; TSV is raw, a quote is a character (`tsv_quoting` for the other kind). All
yield (line or row, values in the order of ReadOptions.columns) in bounded memory; instead of values
BLANK for a blank line, and Bad for what is not a row.
"""

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.dataset.files import ARROW_SUFFIXES, JSON_SUFFIXES, format_of, open_lines
from training.dataset.hub import HubSplit
from training.settings.errors import UserError

if TYPE_CHECKING:
    from training.dataset.readers import ReadOptions, ReadReport

FIELD_LIMIT = 1 << 26  # characters; a larger field is a stray quote, and memory has an end
BATCH_ROWS = 4096  # of Parquet and Arrow
Lines = Iterator[str]
Values = Iterator[tuple[int, Any]]


class Bad(Exception):
    """Why a row cannot be used, and what it holds, where that is not in its values."""


BLANK = Bad("blank line", "")


def raw_values(path: Path, options: "ReadOptions", report: "ReadReport") -> Values:
    """The values of a file's rows as its format has them."""
    suffix = format_of(path)
    if suffix in ARROW_SUFFIXES:
        yield from _arrow_values(path, options, report)
    else:
        read = _json_values if suffix in JSON_SUFFIXES else _table_values
        with open_lines(path, options.encoding) as lines:
            yield from read(path, lines, options, report)


def _picker(keys: Sequence[Any]) -> Callable[[Any], Sequence[Any]]:
    return itemgetter(*keys) if len(keys) > 1 else lambda row: (row[keys[0]],)


# -- CSV, TSV, plain text ------------------------------------------------------------------------


def _split(lines: Lines, delimiter: str) -> Iterator[list[str]]:
    """Rows of a file without quotes: a line is a row, and one of no length a blank line."""
    for line in lines:
        line = line.removesuffix("\r\n").removesuffix("\n")
        yield line.split(delimiter) if line else []


def _table_values(path: Path, lines: Lines, options: "ReadOptions", report: "ReadReport") -> Values:
    suffix, header, names = format_of(path), options.header, []
    delimiter = (options.delimiter or ("," if suffix == ".csv" else "\t")).replace("\\t", "\t")
    if len(delimiter) != 1 or delimiter in '"\r\n\0':
        raise UserError(f"--delimiter {delimiter!r} must be one character, no quote or line end")
    if suffix == ".txt" and not options.delimiter:  # one text a line
        delimiter, header, names = "\n", False, [options.text_columns[0]]
    csv.field_size_limit(FIELD_LIMIT)
    quoted = suffix == ".csv" or (options.tsv_quoting and delimiter != "\n")
    reader: Any = csv.reader(lines, delimiter=delimiter, strict=True) if quoted else None
    rows = reader or _split(lines, delimiter)
    width, end, pick, several, odd = -1, 0, _picker([0]), 0, (False, 0, 0)
    while True:
        try:
            for fields in rows:
                line = end + 1
                end = reader.line_num if quoted else line
                if len(fields) == width:
                    if line < end:  # a document, or rows that a stray quote made into one
                        inside = delimiter.join(fields).split("\n")
                        as_rows = all(each.count(delimiter) == width - 1 for each in inside)
                        several, odd = several + 1, max(odd, (as_rows, end - line + 1, line))
                    yield line, pick(fields)
                elif fields and width < 0:  # the first row; blank lines before it are nothing
                    width = len(fields)
                    names = names or (fields if header else [str(i + 1) for i in range(width)])
                    pick = _picker(options.places(path, names))
                    if not header:
                        yield line, pick(fields)
                elif fields:
                    yield line, Bad(f"{len(fields)} fields, not {width}", " | ".join(fields))
                elif width > 0:
                    yield line, BLANK
            break
        except csv.Error as error:
            line, end = end + 1, reader.line_num
            reason, goes_on = next(v for k, v in CSV_ERRORS.items() if k in str(error))
            if not goes_on or width < 0:
                raise UserError(f"{path}:{line}: {reason}") from None
            yield line, Bad(reason + f"; lines {line} to {end} are no rows" * (line < end), "")
    report.lines += end
    if several:
        as_rows, most, line = odd
        hint = ", and seem to be rows: is a quote missing?" * as_rows
        where = f"lines {line:,} to {line + most - 1:,} are one row{hint}"
        report.notes.append(f"{path}: {several:,} rows have several lines; {where}")


CSV_ERRORS = {  # words of the csv module; ours; whether it can go on with the next line
    "new-line": ("a carriage return outside quotes", True),
    "expected after": ("text after a closing quote; a quote inside quotes is written twice", True),
    "field limit": ("a field of this row is endless: look for a quote too much", False),
    "": ("a quote opens in this row and is never closed", False),
}


# -- JSON Lines ----------------------------------------------------------------------------------


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(found := dict(pairs)) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {max(keys, key=keys.count)!r} is there twice")
    return found


def _json_values(path: Path, lines: Lines, options: "ReadOptions", report: "ReadReport") -> Values:
    pick, number = _picker(options.columns), 0
    scan = json.JSONDecoder(object_pairs_hook=_unique).raw_decode  # half the time of decode()
    for number, line in enumerate(lines, 1):
        text = line.strip(" \t\r\n")
        try:
            row, end = scan(text)
            values = pick(row)
            if end < len(text):
                raise ValueError("Extra data")
            if "\\ud" in text or "\\uD" in text:  # half of a surrogate pair is no character
                json.dumps(values, ensure_ascii=False).encode("utf-8")
            yield number, values
        except KeyError as error:
            yield number, Bad(f"no key {error}", text)
        except TypeError:
            yield number, Bad("not a JSON object; a row is one object on one line", text)
        except (ValueError, RecursionError) as error:
            why = f"broken JSON: {getattr(error, 'msg', error)}; a row is one object on one line"
            yield number, Bad(why, text) if text else BLANK
    report.lines += number


# -- Parquet, Arrow, data sets of the hub --------------------------------------------------------


def _arrow_values(path: Any, options: "ReadOptions", report: "ReadReport") -> Values:
    from pyarrow import ipc, memory_map, parquet  # here: most runs need none of it

    names, number = list(dict.fromkeys(options.columns)), 0
    try:
        if isinstance(path, HubSplit):
            found, batches = path.data.features.arrow_schema.names, path.batches(names)
        elif path.suffix.lower() == ".parquet":
            file = parquet.ParquetFile(path, pre_buffer=False)
            found = file.schema_arrow.names
            batches = file.iter_batches(BATCH_ROWS, columns=names, use_threads=False)
        elif memory_map(str(path)).read(6) == b"ARROW1":
            reader = ipc.open_file(memory_map(str(path)))
            found = reader.schema.names
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:  # a stream, as the cache of `datasets` has it
            batches = ipc.open_stream(memory_map(str(path)))
            found = batches.schema.names
        options.places(path, found)
        for batch in batches:
            batch = batch.select(names)
            batch.validate(full=True)  # a damaged file must end in an error, not in a crash
            for start in range(0, batch.num_rows, BATCH_ROWS):
                part = batch.slice(start, BATCH_ROWS)
                columns = [part.column(name).to_pylist() for name in options.columns]
                yield from enumerate(zip(*columns, strict=True), number + 1)
                number += len(part)
    except UserError:
        raise
    except Exception as error:  # pyarrow has many kinds
        reason = str(error).partition("\n")[0]
        raise UserError(f"{path}: unreadable {path.suffix} file: {reason}") from None
    report.lines += number
