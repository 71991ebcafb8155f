"""Files to rows, strictly: strings stay as written, and what is wrong is named by file and line.

    report = ReadReport()
    for row in read_rows(expand_files(["train-*.csv.gz"]), ReadOptions(), report): ...

What each format means is in formats.py. Texts and labels are strings, and whole numbers of JSON,
Parquet and Arrow become their digits; anything else there (null, true, 1.5, a list) makes a bad
row, and so does an empty text, an empty label, or a blank line before the last row.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from training.columnar import arrow_values, open_arrow
from training.config import UserError, near
from training.files import ARROW_SUFFIXES, JSON_SUFFIXES, expand_files, format_of, open_lines
from training.formats import Raw, Values, first_row, json_row, json_values, open_table, table_values

__all__ = ["BadRow", "ReadOptions", "ReadReport", "Row", "columns_of", "expand_files", "read_rows"]
KEPT_BAD_ROWS = 1000


@dataclass(frozen=True)
class ReadOptions:
    text_columns: tuple[str, ...] = ("text",)  # several are joined by text_separator
    text_pair_column: str | None = None  # the second text of a pair
    label_column: str | None = "label"  # None: no labels, for prediction
    text_separator: str = " "
    delimiter: str | None = None  # None: comma in .csv, tab in .tsv, .tab and .txt
    encoding: str = "utf-8"  # of text files; a byte order mark is accepted
    tsv_quoting: bool = False  # TSV has quotes as CSV does
    header: bool = True  # False: columns are numbered from 1, as "1", "2", ...
    on_bad_rows: Literal["error", "skip"] = "error"
    multi_label: bool = False  # labels are a JSON list, or split at label_separator
    label_separator: str = ","

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns to read: texts, the pair's second text, the label."""
        others = (self.text_pair_column, self.label_column)
        return (*self.text_columns, *(name for name in others if name is not None))

    def places(self, path: Path, found: Sequence[str]) -> list[int]:
        """Where the columns are among those found. Errors: UserError for a missing one."""
        for name in self.columns:
            if name not in found:
                raise self.no_column(path, name, found)
            if found.count(name) > 1:
                raise UserError(
                    f"{path} has {found.count(name)} columns named {name!r}; rename them"
                )
        return [found.index(name) for name in self.columns]

    def no_column(self, path: Path, name: str, found: Sequence[str]) -> UserError:
        flags = {self.label_column: "--label-column", self.text_pair_column: "--text-pair-column"}
        way_out = f"set {flags.get(name, '--text-column')}"
        if format_of(path) not in (*ARROW_SUFFIXES, *JSON_SUFFIXES):
            others = [c for c in ";|\t," if len(found) == 1 and c in found[0]]
            if not self.header:
                way_out += "; without a header, columns are numbered from 1"
            elif "\r" in "".join(found):
                way_out += "; do its lines end in carriage returns alone? Convert them"
            elif others:
                way_out += f", or --delimiter {others[0]!r}"
            else:
                way_out += ", or --no-header if line 1 is a row"
        listed = ", ".join(repr(other[:50]) for other in found[:20]) + ", ..." * (len(found) > 20)
        return UserError(
            f"{path} has no column {name!r}{near(name, found)}; it has {listed}; {way_out}"
        )


class Row(NamedTuple):
    text: str
    pair: str | None
    label: str | tuple[str, ...] | None
    file: str
    line: int  # its first line, from 1; in Parquet and Arrow the number of the row


class BadRow(NamedTuple):
    file: str
    line: int
    reason: str
    content: str  # shortened, and without tabs or line ends


@dataclass
class ReadReport:
    """What was read, filled while reading; `rows` and `lines` when a file is done."""

    rows: int = 0  # good ones
    lines: int = 0  # physical ones, the header included; in Parquet and Arrow rows
    bad_row_count: int = 0
    bad_rows: list[BadRow] = field(default_factory=list)  # the first KEPT_BAD_ROWS
    notes: list[str] = field(default_factory=list)  # each worth a line in the log
    on_bad_row: Callable[[BadRow], None] | None = None  # called for every one, to write it down

    def add(self, file: Path | str, line: int, reason: object, content: str) -> None:
        shown = "".join(c if c.isprintable() else " " for c in content[:200]).strip()
        bad = BadRow(str(file), line, str(reason), shown)
        self.bad_row_count += 1
        if len(self.bad_rows) < KEPT_BAD_ROWS:
            self.bad_rows.append(bad)
        if self.on_bad_row:
            self.on_bad_row(bad)


class _Bad(Exception):
    """Why a row cannot be used."""


def read_rows(paths: Sequence[Path], options: ReadOptions, report: ReadReport) -> Iterator[Row]:
    """The good rows of all files, in order.

    Raises UserError: at once for a file that cannot be read as asked; after the last file for bad
    rows, so that all of them are counted.
    """
    for path in paths:
        before = report.rows + report.bad_row_count
        yield from _good_rows(path, options, report)
        if report.rows + report.bad_row_count == before:
            raise UserError(f"{path} has no rows")
    bad, total = report.bad_row_count, report.rows + report.bad_row_count
    if bad and (options.on_bad_rows == "error" or bad == total):
        first = [f"{file}:{line} {reason}: {row}" for file, line, reason, row in report.bad_rows]
        way_out = "mend them" if bad == total else "mend them or pass --on-bad-rows skip"
        raise UserError("\n".join([f"{bad:,} of {total:,} rows are bad; {way_out}:", *first[:10]]))


def columns_of(path: Path, options: ReadOptions) -> list[str]:
    """The names of a file's columns, for messages; in JSON those of the first row."""
    suffix = format_of(path)
    if suffix in ARROW_SUFFIXES:
        with open_arrow(path) as (schema, _):
            return list(schema.names)
    with open_lines(path, options.encoding) as lines:
        if suffix not in JSON_SUFFIXES:
            return first_row(path, open_table(suffix, lines, options), options.header)[1]
        try:
            return list(json_row(next(lines, "{}")))
        except ValueError as error:
            raise UserError(f"{path}:1: {error}") from None


def _values(path: Path, options: ReadOptions, report: ReadReport) -> Values:
    """The values of a file's rows as its format has them."""
    suffix = format_of(path)
    if suffix in ARROW_SUFFIXES:
        yield from arrow_values(path, options, report)
        return
    with open_lines(path, options.encoding) as lines:
        if suffix in JSON_SUFFIXES:
            yield from json_values(path, lines, options, report)
            return
        table = open_table(suffix, lines, options)
        told = not options.header or options.tsv_quoting or options.delimiter
        if suffix == ".txt" and not told and not options.label_column and len(options.columns) == 1:
            first = next(lines, "")
            if options.text_columns[0] in first.rstrip("\r\n").split("\t"):
                raise UserError(f"{path} begins with a header; end its name in .tsv")
            table = Raw(itertools.chain([first] if first else [], lines), "\n")
            options = replace(options, header=False, text_columns=("1",))
        yield from table_values(path, table, options, report)


def _good_rows(path: Path, options: ReadOptions, report: ReadReport) -> Iterator[Row]:
    """Checked and converted, the same way for every format."""
    names, texts = options.columns, len(options.text_columns)
    has_pair, has_label = options.text_pair_column is not None, options.label_column is not None
    multi_label = has_label and options.multi_label
    file, new_row = str(path), tuple.__new__  # less than half the time of Row(...)
    pair: str | None = None
    label: str | tuple[str, ...] | None = None
    rows = 0
    try:
        for line, values in _values(path, options, report):
            try:
                text = values[0]
                if texts > 1:
                    parts = list(map(_string, values[:texts], names))
                    text = options.text_separator.join(parts) if any(map(str.strip, parts)) else ""
                elif type(text) is not str:  # checked here too: a call for each row is slow
                    text = _string(text, names[0])
                if not text or text.isspace():
                    raise _Bad("empty text")
                if has_pair:
                    pair = _string(values[texts], names[texts])
                    if not pair or pair.isspace():
                        raise _Bad(f"empty {names[texts]!r}")
                if multi_label:
                    label = _labels(values[-1], names[-1], options.label_separator)
                elif has_label:
                    label = values[-1]
                    if type(label) is not str:
                        label = _string(label, names[-1])
                    if not label or label.isspace():
                        raise _Bad("empty label")
            except _Bad as reason:
                report.add(file, line, reason, " | ".join(map(str, values)))
            else:
                rows += 1
                yield new_row(Row, (text, pair, label, file, line))
    finally:
        report.rows += rows


def _string(value: Any, column: str) -> str:
    if type(value) is str:
        return value
    if type(value) is int:
        return str(value)
    if value is None:
        raise _Bad(f"{column!r} is null")
    if type(value) is list:
        raise _Bad(f"{column!r} is a list; several labels need --multi-label")
    kind = {bool: "true or false", float: "not a whole number"}.get(type(value), "not text")
    raise _Bad(f"{column!r} is {kind}; write it as a string")


def _labels(value: Any, column: str, separator: str) -> tuple[str, ...]:
    """Several labels, each once. Those split at the separator lose the spaces around them."""
    if isinstance(value, str):
        if not value.strip():
            raise _Bad("empty label; a row without labels is written []")
        if value.lstrip()[0] == "[":
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                raise _Bad(f"{column!r} starts as a JSON list and is none") from None
        else:
            value = [part.strip() for part in value.split(separator)]
    labels = [_string(label, column) for label in (value if type(value) is list else [value])]
    if not all(map(str.strip, labels)):
        raise _Bad("one of the labels is empty")
    return tuple(dict.fromkeys(labels))
