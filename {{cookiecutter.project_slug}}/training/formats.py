"""Text formats to raw values: CSV, TSV, plain text and JSON Lines.

CSV follows RFC 4180. TSV is raw: one row a line, a quote is a character (`tsv_quoting` for the
other kind). JSON holds one object a line. Blank lines at the end of a file are nothing; any other
is a bad row, so that no row is lost unseen. All yield (line, values in the order of
ReadOptions.columns); what has not the shape of a row goes to the report.
"""

import csv
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.config import UserError

if TYPE_CHECKING:
    from training.readers import ReadOptions, ReadReport

FIELD_LIMIT = 1 << 26  # characters; a larger field is a stray quote, and memory has an end
LONG_SPAN = 100  # lines of one row that are worth a word
Values = Iterator[tuple[int, Sequence[Any]]]


def picker(keys: Sequence[Any]) -> Callable[[Any], Sequence[Any]]:
    return itemgetter(*keys) if len(keys) > 1 else lambda row: (row[keys[0]],)


def report_blanks(path: Path, line: int, count: int, report: "ReadReport") -> int:
    """Blank lines before `line`, so not at the end of the file. Returns the new count, 0."""
    for blank in range(line - count, line):
        report.add(path, blank, "blank line", "")
    return 0


# -- CSV, TSV, plain text ------------------------------------------------------------------------


class Raw:
    """Rows of a file without quotes, as csv.reader would give them: a line is a row."""

    def __init__(self, lines: Iterator[str], delimiter: str) -> None:
        self.lines, self.delimiter, self.line_num, self.wrapped = lines, delimiter, 0, 0

    def __iter__(self) -> Iterator[list[str]]:
        for line in self.lines:
            self.line_num += 1
            line = line[:-2] if line.endswith("\r\n") else line.removesuffix("\n")
            fields = line.split(self.delimiter) if line else []
            if '"' in line and any(len(f) > 1 and f[0] == '"' == f[-1] for f in fields):
                self.wrapped += 1
            yield fields


def open_table(suffix: str, lines: Iterator[str], options: "ReadOptions") -> Any:
    """A csv.reader or its like: rows as lists of strings, `line_num` lines so far."""
    delimiter = options.delimiter or ("," if suffix == ".csv" else "\t")
    delimiter = delimiter.replace("\\t", "\t")  # what a shell passes
    if len(delimiter) != 1 or delimiter in '"\r\n\0':
        raise UserError(f"--delimiter {delimiter!r} must be one character, no quote or line end")
    if suffix != ".csv" and not options.tsv_quoting:
        return Raw(lines, delimiter)
    csv.field_size_limit(FIELD_LIMIT)
    return csv.reader(lines, delimiter=delimiter, strict=True)


def first_row(path: Path, table: Any, header: bool) -> tuple[Iterator[Any], list[str]]:
    """The rows after the header, and the names of the columns; none in an empty file."""
    rows = iter(table)
    try:
        first: list[str] = next(rows, [])
        if not first and any(rows):
            raise UserError(f"{path}:1: the first line is blank")
    except csv.Error as error:
        raise UserError(f"{path}:1: {_csv_reason(path, 1, table.line_num, error)}") from None
    if header:
        return rows, first
    return chain([first], rows), [str(i + 1) for i in range(len(first))]


def table_values(path: Path, table: Any, options: "ReadOptions", report: "ReadReport") -> Values:
    rows, names = first_row(path, table, options.header)
    if not names:
        return
    at, width = options.places(path, names), len(names)
    pick, blanks, end = picker(at), 0, table.line_num if options.header else 0
    spans = _Spans(path, at[-1])
    seen = spans.labels
    while True:
        try:
            for fields in rows:
                line, end = end + 1, table.line_num
                if not fields:
                    blanks += 1
                    continue
                if blanks:
                    blanks = report_blanks(path, line, blanks, report)
                if line < end:
                    spans.add(line, end, fields, table.dialect.delimiter)
                if len(fields) == width:
                    values = pick(fields)
                    if len(seen) < 1000:
                        seen.add(values[-1])
                    yield line, values
                else:
                    reason = f"{len(fields)} fields, not {width}"
                    report.add(path, line, reason, " | ".join(fields))
            break
        except csv.Error as error:  # the reader goes on with the next line
            line, end = end + 1, table.line_num
            blanks = report_blanks(path, line, blanks, report)
            report.add(path, line, _csv_reason(path, line, end, error), "")
    report.lines += table.line_num
    report.notes += islice(spans.notes(), 11)
    if isinstance(table, Raw) and table.wrapped:
        report.notes.append(
            f"{path}: {table.wrapped:,} rows have fields in double quotes, which are kept; "
            "pass --tsv-quoting if they are not part of the text"
        )


def _csv_reason(path: Path, line: int, end: int, error: csv.Error) -> str:
    """Plain words for a bad row. Errors: UserError where what follows cannot be told apart."""
    message = str(error)
    if "unexpected end" in message:
        raise UserError(f"{path}:{line}: a quote opens in this row and is never closed") from None
    if "field limit" in message:
        raise UserError(
            f"{path}:{line}: a field of this row exceeds {FIELD_LIMIT:,} characters; "
            "look for a quote too much or too little"
        ) from None
    if "new-line" in message:
        return "a carriage return outside quotes"
    lost = f", so lines {line} to {end} are no rows" if line < end else ""
    return f"text after a closing quote{lost}; a quote inside quotes is written twice"


class _Spans:
    """Rows of several lines: documents, or rows that a stray quote made into one."""

    def __init__(self, path: Path, label_at: int) -> None:
        self.path, self.label_at, self.rows, self.most = path, label_at, 0, 0
        self.labels: set[str] = set()  # some that were seen
        self.suspects: list[tuple[int, int, bool, set[str]]] = []

    def add(self, line: int, end: int, fields: list[str], delimiter: str) -> None:
        self.rows, self.most = self.rows + 1, max(self.most, end - line + 1)
        if len(self.suspects) < 100:
            cut = [part.rstrip("\r").split(delimiter) for f in fields for part in f.split("\n")]
            whole = [row for row in cut if len(row) == len(fields)]  # as rows would be
            mostly = len(whole) >= max(2, end - line)
            if whole or end - line >= LONG_SPAN:
                labels = {row[self.label_at] for row in whole}
                self.suspects.append((line, end, mostly, labels))

    def notes(self) -> Iterator[str]:
        if self.rows:
            yield f"{self.path}: {self.rows:,} rows have several lines, up to {self.most:,}"
        for line, end, mostly, labels in self.suspects:
            rows_inside = mostly or not self.labels.isdisjoint(labels)
            if rows_inside or end - line >= LONG_SPAN:
                inside = "; there seem to be rows inside: is a quote missing?" * rows_inside
                yield f"{self.path}: lines {line:,} to {end:,} are one row{inside}"


# -- JSON Lines ----------------------------------------------------------------------------------


class _NotRow(ValueError):
    """Why a line of JSON is not a row."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(key for key, n in Counter(key for key, _ in pairs).items() if n > 1)
        raise _NotRow(f"key {twice!r} is there twice")
    return found


_decoder = json.JSONDecoder(object_pairs_hook=_unique)


def json_row(line: str) -> dict[str, Any]:
    """A line that is one JSON object. Errors: ValueError with the reason."""
    try:
        row = _decoder.decode(line.rstrip("\r\n"))
    except json.JSONDecodeError as error:
        raise _NotRow(f"broken JSON: {error.msg} (character {error.pos + 1})") from None
    except RecursionError:
        raise _NotRow("broken JSON: too deep") from None
    if not isinstance(row, dict):
        raise _NotRow("not a JSON object")
    return row


def json_values(
    path: Path, lines: Iterator[str], options: "ReadOptions", report: "ReadReport"
) -> Values:
    columns, pick, scan = options.columns, picker(options.columns), _decoder.raw_decode
    blanks, number, good = 0, 0, False
    lacking: Counter[str] = Counter()
    keys: list[str] = []
    for number, line in enumerate(lines, 1):
        try:
            row, end = scan(line)  # twice as fast as decode(), which gets all that is unusual
            values = pick(row)
            usual = line[end:] in ("\n", "\r\n", "") and "\\ud" not in line and "\\uD" not in line
        except (ValueError, LookupError, TypeError, RecursionError):
            usual = False
        if not usual or blanks:
            if not line.strip(" \t\r\n"):
                blanks += 1
                continue
            blanks = report_blanks(path, number, blanks, report)
            try:
                row = json_row(line)
                absent = [name for name in columns if name not in row]
                if absent:
                    lacking[absent[0]], keys = lacking[absent[0]] + 1, list(row)
                    raise _NotRow(f"no key {absent[0]!r}")
                values = pick(row)
                json.dumps(values, ensure_ascii=False).encode("utf-8")
            except UnicodeEncodeError:
                report.add(path, number, "half of a surrogate pair, which is no character", line)
                continue
            except ValueError as error:  # _NotRow, or a number of thousands of digits
                if number == 1 and line.lstrip().startswith("["):
                    raise UserError(
                        f"{path}: JSON is read one object a line; jq -c '.[]' makes that of a list"
                    ) from None
                report.add(path, number, error, line)
                if lacking.total() == 100 and not good:
                    break
                continue
        good = True
        yield number, values
    report.lines += number
    if lacking and not good:
        raise options.no_column(path, lacking.most_common(1)[0][0], keys)
