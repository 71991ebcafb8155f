"""What a row is: its columns, how raw values become texts and labels, and what makes a row bad."""

import json
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

from training.settings.config import TrainConfig
from training.settings.errors import UserError, did_you_mean


class Row(NamedTuple):
    text: str | tuple[str, ...]  # a tuple for several text columns
    pair: str | None = None  # the second text of a pair
    label: str | tuple[str, ...] | None = None  # with multi_label a tuple of labels
    file: str = ""  # where it stands, for error messages
    line: int = 0  # its first line, from 1; in Parquet and Arrow the number of the row
    # Numbers for the model's forward by name: the same names, with as many numbers, in every row.
    inputs: Mapping[str, Any] | None = None


class Rejected(NamedTuple):  # what a format yields in place of values that cannot be used
    reason: str
    content: str


BLANK = Rejected("blank line", "")  # a bad row only if another row follows


class BadRow(NamedTuple):
    file: str
    line: int
    reason: str
    content: str


class FileNote(NamedTuple):  # what readers yield at the end of a file
    file: str
    lines: int  # physical ones, the header included; in Parquet and Arrow rows
    note: str = ""  # worth a line in the log


Item = Row | BadRow | FileNote
ROW = "Row(text, pair, label, file, line, inputs) of training.dataset.rows"


@dataclass(frozen=True)
class ReadOptions:
    text_columns: tuple[str, ...] = ("text",)  # several make a tuple of texts
    text_pair_column: str | None = None
    label_column: str | None = "label"  # None: no labels, for prediction
    delimiter: str | None = None  # None: comma in .csv, tab in .tsv and .tab
    encoding: str = "utf-8"  # of text files; a byte order mark is accepted
    tsv_quoting: bool = False  # TSV has quotes as CSV does
    header: bool = True  # False: columns are numbered from 1, as "1", "2", ...
    multi_label: bool = False  # labels are a JSON list, or split at label_separator
    label_separator: str = ","

    @classmethod
    def of(cls, config: TrainConfig) -> "ReadOptions":
        """The settings of the same names."""
        same = {f.name: getattr(config, f.name) for f in fields(cls) if hasattr(config, f.name)}
        return cls(text_columns=config.text_column, **same)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns to read: texts, the second text of a pair, the label."""
        optional = (self.text_pair_column, self.label_column)
        return (*self.text_columns, *(name for name in optional if name is not None))

    def column_indices(self, path: Path | str, names: Sequence[str]) -> list[int]:
        """Where `columns` are among `names`. Errors: UserError if one is missing or there twice."""
        flags = {self.label_column: "--label-column", self.text_pair_column: "--text-pair-column"}
        for name in self.columns:
            if (count := names.count(name)) != 1:
                hint = did_you_mean(name, names)
                found = f"{count} columns {name!r}" if count else f"no column {name!r}{hint}"
                shown = ", ".join(repr(other[:50]) for other in names[:20])
                flag = flags.get(name, "--text-column")
                no_header = "or --no-header, with which columns are numbered from 1"
                way_out = f"set {flag}; in CSV and TSV also --delimiter, {no_header}"
                raise UserError(f"{path} has {found}; it has {shown}; {way_out}")
        return [names.index(name) for name in self.columns]


@dataclass
class ReadReport:
    """What was read, filled while reading; `rows` and `lines` are right when a file is done."""

    rows: int = 0  # good ones
    lines: int = 0  # of all files
    bad_row_count: int = 0
    several_labels: int = 0  # how many of the bad rows have several labels, without --multi-label
    bad_rows: list[BadRow] = field(default_factory=list)  # the first 1000
    notes: list[str] = field(default_factory=list)  # each worth a line in the log
    on_bad_row: Callable[[BadRow], None] | None = None  # called for every one, to write it down

    def add(self, bad_row: BadRow) -> None:
        """Count a bad row; its content is kept short, and without tabs or line ends."""
        shown = "".join(c if c.isprintable() else " " for c in bad_row.content[:200]).strip()
        bad_row = bad_row._replace(content=shown)
        self.bad_row_count += 1
        self.several_labels += bad_row.reason.endswith(SEVERAL)
        if len(self.bad_rows) < 1000:
            self.bad_rows.append(bad_row)
        if self.on_bad_row:
            self.on_bad_row(bad_row)

    def check(self, on_bad_rows: str) -> None:
        """Errors: UserError if there are bad rows that may not be skipped, or only bad rows."""
        bad, total = self.bad_row_count, self.rows + self.bad_row_count
        if not bad or (on_bad_rows == "skip" and bad < total):
            return
        skip = " or pass --on-bad-rows skip" if bad < total else ""
        several = f"; {self.several_labels:,} have {SEVERAL}" if self.several_labels else ""
        lines = [f"{bad:,} of {total:,} rows are bad{several}; fix them{skip}:"]
        lines += [f"{file}:{line} {reason}: {row}" for file, line, reason, row in self.bad_rows]
        raise UserError("\n".join(lines[:11]))


def good_rows(items: Iterable[Any], on_bad_rows: str, report: ReadReport) -> Iterator[Row]:
    """Yield the rows among `items`, and count everything in `report`.

    Errors: UserError for a file without rows, for what is not a row, and at the end for bad rows.
    """
    before = 0
    for item in items:
        if type(item) is Row:
            report.rows += 1
            yield item
        elif type(item) is BadRow:
            report.add(item)
        elif type(item) is FileNote:
            report.lines += item.lines
            report.notes += [f"{item.file}: {item.note}"] if item.note else []
            if report.rows + report.bad_row_count == before:
                raise UserError(f"{item.file} has no rows")
            before = report.rows + report.bad_row_count
        else:
            size = f" of {len(item)}" if isinstance(item, tuple | list | dict) else ""
            given = f"a {type(item).__name__}{size}, {item!r:.100}"
            number = report.rows + report.bad_row_count + 1
            raise UserError(f"data.py: rows gives {given}, for row {number}; it must yield {ROW}")
    report.check(on_bad_rows)


SEVERAL = "several labels, which need --multi-label"
ORIENT = "with pandas: to_json(path, orient='records', lines=True)"


def text_of(value: Any, name: str) -> str:
    """A value as text. Errors: ValueError if it is none, or no more than spaces."""
    if not (text := _string(value, name)).strip():
        raise ValueError(f"empty {name}")
    return text


def texts_of(values: Sequence[Any], names: Sequence[str]) -> tuple[str, ...]:
    """Several values as texts. Errors: ValueError if none of them is more than spaces."""
    texts = tuple(map(_string, values, names))
    if not any(map(str.strip, texts)):
        raise ValueError("empty " + ", ".join(names))
    return texts


def label_of(value: Any, name: str) -> str:
    """A label; a list of one is that label."""
    if type(value) is list and len(value) > 1:
        raise ValueError(f"{name!r} has {SEVERAL}")
    return text_of(value[0] if type(value) is list and value else value, name)


def labels_of(value: Any, name: str, separator: str) -> tuple[str, ...]:
    """Several labels, each once. Those split at the separator lose the spaces around them."""
    if type(value) is str:
        is_json = value.lstrip().startswith("[")
        value = json.loads(value) if is_json else list(map(str.strip, value.split(separator)))
    labels = [_string(label, name) for label in (value if type(value) is list else [value])]
    if not all(map(str.strip, labels)):
        raise ValueError("empty label; a row without labels is written []")
    return tuple(dict.fromkeys(labels))


def _string(value: Any, name: str) -> str:
    if type(value) in (str, int):
        return str(value)
    kind, advice = type(value).__name__, "write it as text"
    if value is None:
        kind, advice = "null", "fill it in, or leave the row out"
    elif type(value) is bool:
        advice = 'write it as text, "true" or "false", or as 1 or 0'
    elif type(value) is float:
        advice = f'write it as text, "{value}", or as a whole number'
    elif type(value) is list:
        advice = "write one value" if value else "it is empty"
    elif type(value) is dict and all(map(str.isdigit, value)):
        kind, advice = "a whole column", f"write one row a line; {ORIENT}"
    elif type(value) is dict:
        advice = f"it has fields {', '.join(map(repr, value))}; write one of them as a column"
    raise ValueError(f"{name!r} is {kind}, not text or an integer; {advice}")


def text_hashes(text: str) -> tuple[int, int]:
    """64-bit hashes of the text as written, and with case, width and spaces folded."""
    folded = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return _hash(text), _hash(folded)


def _hash(text: str) -> int:
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
