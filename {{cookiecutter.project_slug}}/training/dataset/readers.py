"""Files to rows, strictly: strings stay as written, and what is wrong is named by file and line.

    report = ReadReport()
    for row in read_rows(expand_files(["train-*.csv.gz"]), ReadOptions(), report): ...

Whole numbers of JSON, Parquet and Arrow become their digits; anything else there (null, true, 1.5,
a list) makes a bad row, and so does an empty text or label, or a blank line before the last row.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from training.dataset.files import expand_files
from training.dataset.formats import BLANK, Bad, raw_values
from training.settings.errors import UserError, did_you_mean

__all__ = ["BadRow", "ReadOptions", "ReadReport", "Row", "expand_files", "read_rows"]


@dataclass(frozen=True)
class ReadOptions:
    text_columns: tuple[str, ...] = ("text",)  # several are joined by text_separator
    text_pair_column: str | None = None  # the second text of a pair
    label_column: str | None = "label"  # None: no labels, for prediction
    text_separator: str = " "
    delimiter: str | None = None  # None: comma in .csv, tab in .tsv and .tab
    encoding: str = "utf-8"  # of text files; a byte order mark is accepted
    tsv_quoting: bool = False  # TSV has quotes as CSV does
    header: bool = True  # False: columns are numbered from 1, as "1", "2", ...
    on_bad_rows: Literal["error", "skip"] = "error"
    multi_label: bool = False  # labels are a JSON list, or split at label_separator
    label_separator: str = ","

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns to read: texts, the pair's second text, the label."""
        names = (*self.text_columns, self.text_pair_column, self.label_column)
        return tuple(name for name in names if name is not None)

    def places(self, path: Path, found: Sequence[str]) -> list[int]:
        """Where the columns are among those found. Errors: UserError for one that is not there."""
        flags = {self.label_column: "--label-column", self.text_pair_column: "--text-pair-column"}
        for name in self.columns:
            if (count := found.count(name)) != 1:
                hint = "" if count else did_you_mean(name, found)
                has = ", ".join(repr(other[:50]) for other in found[:20])
                raise UserError(
                    f"{path} has {f'{count} columns' if count else 'no column'} {name!r}{hint}; it "
                    f"has {has}; set {flags.get(name, '--text-column')}; in CSV and TSV also "
                    "--delimiter, or --no-header, with which columns are numbered from 1"
                )
        return [found.index(name) for name in self.columns]


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
    bad_rows: list[BadRow] = field(default_factory=list)  # the first 1000
    notes: list[str] = field(default_factory=list)  # each worth a line in the log
    on_bad_row: Callable[[BadRow], None] | None = None  # called for every one, to write it down

    def add(self, file: str, line: int, reason: str, content: str) -> None:
        shown = "".join(c if c.isprintable() else " " for c in content[:200]).strip()
        bad = BadRow(file, line, reason, shown)
        self.bad_row_count += 1
        if len(self.bad_rows) < 1000:
            self.bad_rows.append(bad)
        if self.on_bad_row:
            self.on_bad_row(bad)


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


def _good_rows(path: Path, options: ReadOptions, report: ReadReport) -> Iterator[Row]:
    """Checked and converted, the same way for every format."""
    names, texts, separator = options.columns, len(options.text_columns), options.text_separator
    has_pair, has_label = options.text_pair_column is not None, options.label_column is not None
    multi_label = has_label and options.multi_label
    file, new_row = str(path), tuple.__new__  # less than half the time of Row(...)
    pair: str | None = None
    label: str | tuple[str, ...] | None = None
    blanks = 0
    for line, values in raw_values(path, options, report):
        try:
            if values is BLANK:  # a bad row if another row follows
                blanks += 1
                continue
            if blanks:
                for blank in range(line - blanks, line):
                    report.add(file, blank, *BLANK.args)
                blanks = 0
            if type(values) is Bad:
                raise values
            text = values[0]  # checked here too: a call for each row is slow
            if texts > 1 or type(text) is not str or not text or text.isspace():
                text = _text(values[:texts], names, separator)
            if has_pair:
                pair = _text(values[texts : texts + 1], names[texts:], separator)
            if multi_label:
                label = _labels(values[-1], names[-1], options.label_separator)
            elif has_label:
                label = values[-1]
                if type(label) is not str or not label or label.isspace():
                    label = _text([label], names[-1:], separator)
        except (Bad, ValueError, RecursionError) as bad:  # the latter from a JSON list of labels
            reason, *content = bad.args
            report.add(file, line, reason, content[0] if content else " | ".join(map(str, values)))
        else:
            report.rows += 1
            yield new_row(Row, (text, pair, label, file, line))


def _text(values: Sequence[Any], names: Sequence[str], separator: str) -> str:
    """The values joined, if any is more than spaces."""
    parts = list(map(_string, values, names))
    if not any(map(str.strip, parts)):
        raise Bad("empty " + ", ".join(names[: len(parts)]))
    return separator.join(parts)


def _string(value: Any, name: str) -> str:
    if type(value) not in (str, int):
        kind = "null" if value is None else type(value).__name__
        raise Bad(f"{name!r} is {kind}, not text or an integer; several labels need --multi-label")
    return str(value)


def _labels(value: Any, name: str, separator: str) -> tuple[str, ...]:
    """Several labels, each once. Those split at the separator lose the spaces around them."""
    if type(value) is str:
        is_json = value.lstrip().startswith("[")
        value = json.loads(value) if is_json else list(map(str.strip, value.split(separator)))
    labels = [_string(label, name) for label in (value if type(value) is list else [value])]
    if not all(map(str.strip, labels)):
        raise Bad("empty label; a row without labels is written []")
    return tuple(dict.fromkeys(labels))
