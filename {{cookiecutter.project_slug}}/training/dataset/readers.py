"""Files to rows, strictly: strings stay as written, and what is wrong is named by file and line.

CSV follows RFC 4180; TSV is raw, a quote is a character (`tsv_quoting` for the other kind). Whole
numbers of JSON, Parquet and Arrow become their digits; anything else there (null, true, 1.5, a
list) makes a bad row, and so does an empty text or label, or a blank line before the last row.
"""

import csv
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from training.dataset.arrow import HubSplit, Values, arrow_values, hub_split
from training.dataset.files import (
    ARROW_SUFFIXES,
    JSON_SUFFIXES,
    check_first_line,
    expand_files,
    file_hash,
    format_of,
    open_lines,
)
from training.dataset.rows import (
    BLANK,
    ORIENT,
    BadRow,
    FileNote,
    Item,
    ReadOptions,
    Rejected,
    Row,
    label_of,
    labels_of,
    text_of,
    texts_of,
)
from training.settings.config import HUB, TrainConfig
from training.settings.errors import UserError

FIELD_LIMIT = 1 << 26  # characters; a larger field is a stray quote, and memory is limited
# Words of the csv module, whose errors have no codes; ours; whether the next line can be read.
CSV_ERRORS = {
    "new-line": ("a carriage return outside quotes", True),
    "expected after": ("text after a closing quote; a quote inside quotes is written twice", True),
    "field limit": ("a field has more than 67 million characters: look for a stray quote", False),
    "": ("a quote opens in this row and is never closed", False),
}
ONE_OBJECT = "a row is one object on one line"
Lines = Iterator[str]


class FileRows:
    """What is in files, in order: Row, BadRow for what cannot be used, FileNote after each file."""

    def __init__(self, paths: Sequence[Any], options: ReadOptions, cache: Path | None = None):
        self.paths, self.options, self.cache = paths, options, cache

    def __iter__(self) -> Iterator[Item]:
        for path in self.paths:
            yield from _items(path, self.options)

    def fingerprint(self) -> str:
        """A text that changes when the rows change: a hash of the files' content."""
        digest = hashlib.sha256()
        for path in self.paths:
            if isinstance(path, HubSplit):
                digest.update(f"{path} {path.data._fingerprint}".encode())
            else:
                digest.update(f"{path.name} {file_hash(path, self.cache)}".encode())
        return digest.hexdigest()


def read_files(names: Sequence[str], split: str, config: TrainConfig) -> FileRows:
    """The rows of files, globs and hf:// names, read as the settings say. Errors: UserError."""
    if split == "train" and not names:
        raise UserError("no train_file: give --train-file, or set it in config.toml")
    files = expand_files([name for name in names if not name.startswith(HUB)])
    hub = [hub_split(name, split) for name in names if name.startswith(HUB)]
    return FileRows([*files, *hub], ReadOptions.of(config), Path(config.cache_dir))


def _items(path: Path, options: ReadOptions) -> Iterator[Item]:
    """The rows of a file, checked and converted the same way for every format."""
    names, texts = options.columns, len(options.text_columns)
    has_pair, has_label = options.text_pair_column is not None, options.label_column is not None
    multi_label = has_label and options.multi_label
    file, new_row = str(path), tuple.__new__  # less than half the time of Row(...)
    text: str | tuple[str, ...]
    pair: str | None = None
    label: str | tuple[str, ...] | None = None
    blank_lines = 0  # before this one
    for line, values in _raw_values(path, options):
        is_row = type(values) is tuple
        if not is_row and values is BLANK:
            blank_lines += 1
            continue
        if not is_row and type(values) is FileNote:
            yield values
            return
        if blank_lines:
            for blank in range(line - blank_lines, line):
                yield BadRow(file, blank, *BLANK)
            blank_lines = 0
        if not is_row:
            yield BadRow(file, line, *values)
            continue
        try:
            text = values[0]  # checked here too: a call for each row is slow
            if texts > 1:
                text = texts_of(values[:texts], options.text_columns)
            elif type(text) is not str or not text or text.isspace():
                text = text_of(text, names[0])
            if has_pair:
                pair = text_of(values[texts], names[texts])
            if multi_label:
                label = labels_of(values[-1], names[-1], options.label_separator)
            elif has_label:
                label = values[-1]
                if type(label) is not str or not label or label.isspace():
                    label = label_of(label, names[-1])
        except (ValueError, RecursionError) as error:  # the latter from a JSON list of labels
            yield BadRow(file, line, error.args[0], " | ".join(map(str, values)))
        else:
            yield new_row(Row, (text, pair, label, file, line, None))


def _raw_values(path: Path, options: ReadOptions) -> Values:
    """The values of a file's rows as its format has them."""
    suffix = format_of(path)
    if suffix in ARROW_SUFFIXES:
        yield from arrow_values(path, options)
    else:
        read = _json_values if suffix in JSON_SUFFIXES else _table_values
        with open_lines(path, options.encoding) as lines:
            yield from read(path, lines, options)


def _picker(keys: Sequence[Any]) -> Callable[[Any], Sequence[Any]]:
    return itemgetter(*keys) if len(keys) > 1 else lambda row: (row[keys[0]],)


def _split(lines: Lines, delimiter: str) -> Iterator[list[str]]:
    """Rows of a file without quotes: a line is a row; without fields if it is blank."""
    for line in lines:
        line = line.removesuffix("\r\n").removesuffix("\n")
        yield line.split(delimiter) if line else []


def _table_values(path: Path, lines: Lines, options: ReadOptions) -> Values:
    """Values of CSV, TSV and plain text; the delimiter of the latter is the line end."""
    suffix, header, names = format_of(path), options.header, []
    delimiter = (options.delimiter or ("," if suffix == ".csv" else "\t")).replace("\\t", "\t")
    if len(delimiter) != 1 or delimiter in '"\r\n\0':
        rule = "must be one character, and not a quote or a line end"
        raise UserError(f"--delimiter {delimiter!r} {rule}")
    if suffix == ".txt" and not options.delimiter:
        delimiter, header, names = "\n", False, [options.text_columns[0]]
    csv.field_size_limit(FIELD_LIMIT)
    quoted = suffix == ".csv" or (options.tsv_quoting and delimiter != "\n")
    reader: Any = csv.reader(lines, delimiter=delimiter, strict=True) if quoted else None
    rows = reader or _split(lines, delimiter)
    width, last, pick, long_rows, suspect = -1, 0, _picker([0]), 0, (False, 0, 0)
    while True:
        try:
            for fields in rows:
                line = last + 1
                last = reader.line_num if quoted else line
                if len(fields) == width:
                    if line < last:
                        long_rows += 1
                        suspect = max(suspect, _suspicion(fields, delimiter, line, last))
                    yield line, pick(fields)
                elif fields and width < 0:  # the first row; blank lines before it do not count
                    width = len(fields)
                    check_first_line(path, line, delimiter.join(fields))
                    names = names or (fields if header else [str(i + 1) for i in range(width)])
                    pick = _picker(options.column_indices(path, names))
                    if not header:
                        yield line, pick(fields)
                elif fields:
                    yield line, Rejected(f"{len(fields)} fields, not {width}", " | ".join(fields))
                elif width > 0:
                    yield line, BLANK
            break
        except csv.Error as error:
            line, last = last + 1, reader.line_num
            reason, readable = next(v for words, v in CSV_ERRORS.items() if words in str(error))
            if not readable or width < 0:
                raise UserError(f"{path}:{line}: {reason}") from None
            if line < last:
                reason += f"; lines {line} to {last} are not rows"
            yield line, Rejected(reason, "")
    note = ""
    if long_rows:
        seem_rows, height, line = suspect
        hint = ", and seem to be rows: is a quote missing?" if seem_rows else ""
        where = f"lines {line:,} to {line + height - 1:,} are one row{hint}"
        note = f"{long_rows:,} rows have several lines; {where}"
    yield last, FileNote(str(path), last, note)


def _suspicion(fields: list[str], delimiter: str, line: int, last: int) -> tuple[bool, int, int]:
    """Of a row of several lines: whether they seem to be rows, how many they are, the first."""
    inside = delimiter.join(fields).split("\n")
    seem_rows = all(each.count(delimiter) == len(fields) - 1 for each in inside)
    return seem_rows, last - line + 1, line


def _json_values(path: Path, lines: Lines, options: ReadOptions) -> Values:
    """Values of JSON Lines."""
    pick, number = _picker(options.columns), 0
    scan = json.JSONDecoder(object_pairs_hook=_unique).raw_decode  # half the time of decode()
    for number, line in enumerate(lines, 1):
        text = line.strip(" \t\r\n")
        try:
            row, end = scan(text)
            values = pick(row)
            if end < len(text):
                raise ValueError("Extra data")
            if "\\ud" in text or "\\uD" in text:  # half of a surrogate pair is not a character
                json.dumps(values, ensure_ascii=False).encode("utf-8")
            yield number, values
        except KeyError as error:
            yield number, Rejected(f"no key {error}", text)
        except TypeError:
            yield (
                number,
                Rejected(f"not a JSON object; a row is one object on one line; {ORIENT}", text),
            )
        except (ValueError, RecursionError) as error:
            why = f"broken JSON: {getattr(error, 'msg', error)}; {ONE_OBJECT}"
            yield number, Rejected(why, text) if text else BLANK
    yield number, FileNote(str(path), number)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Errors: ValueError for a key that appears twice."""
    values = dict(pairs)
    if len(values) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {max(keys, key=keys.count)!r} appears twice")
    return values
