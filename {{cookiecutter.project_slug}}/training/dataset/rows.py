"""What a row is: its columns, how raw values become texts and labels, and what makes a row bad."""

import inspect
import json
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

from training.settings.config import TrainConfig
from training.settings.errors import UserError, did_you_mean


class Row(NamedTuple):
    text: str
    pair: str | None  # the second text of a pair
    label: str | tuple[str, ...] | None
    file: str
    line: int  # its first line, from 1; in Parquet and Arrow the number of the row


class Rejected(NamedTuple):  # what a format yields in place of values that cannot be used
    reason: str
    content: str


BLANK = Rejected("blank line", "")  # a bad row only if another row follows


class BadRow(NamedTuple):
    file: str
    line: int
    reason: str
    content: str  # shortened, and without tabs or line ends


@dataclass(frozen=True)
class ReadOptions:
    text_columns: tuple[str, ...] = ("text",)  # several are joined by text_separator
    text_pair_column: str | None = None
    label_column: str | None = "label"  # None: no labels, for prediction
    text_separator: str = " "
    delimiter: str | None = None  # None: comma in .csv, tab in .tsv and .tab
    encoding: str = "utf-8"  # of text files; a byte order mark is accepted
    tsv_quoting: bool = False  # TSV has quotes as CSV does
    header: bool = True  # False: columns are numbered from 1, as "1", "2", ...
    on_bad_rows: Literal["error", "skip"] = "error"
    multi_label: bool = False  # labels are a JSON list, or split at label_separator
    label_separator: str = ","

    @classmethod
    def of(cls, config: TrainConfig, text_separator: str) -> "ReadOptions":
        """The settings of the same names."""
        same = {f.name: getattr(config, f.name) for f in fields(cls) if hasattr(config, f.name)}
        return cls(text_columns=config.text_column, text_separator=text_separator, **same)

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
    lines: int = 0  # physical ones, the header included; in Parquet and Arrow rows
    bad_row_count: int = 0
    bad_rows: list[BadRow] = field(default_factory=list)  # the first 1000
    notes: list[str] = field(default_factory=list)  # each worth a line in the log
    on_bad_row: Callable[[BadRow], None] | None = None  # called for every one, to write it down

    def add(self, file: str, line: int, reason: str, content: str) -> None:
        shown = "".join(c if c.isprintable() else " " for c in content[:200]).strip()
        bad_row = BadRow(file, line, reason, shown)
        self.bad_row_count += 1
        if len(self.bad_rows) < 1000:
            self.bad_rows.append(bad_row)
        if self.on_bad_row:
            self.on_bad_row(bad_row)


def text_of(values: Sequence[Any], names: Sequence[str], separator: str) -> str:
    """The values joined. Errors: ValueError if none of them is more than spaces."""
    texts = list(map(_string, values, names))
    if not any(map(str.strip, texts)):
        raise ValueError("empty " + ", ".join(names[: len(texts)]))
    return separator.join(texts)


def _string(value: Any, name: str) -> str:
    if type(value) not in (str, int):
        kind = "null" if value is None else type(value).__name__
        rule = "not text or an integer; several labels need --multi-label"
        raise ValueError(f"{name!r} is {kind}, {rule}")
    return str(value)


def labels_of(value: Any, name: str, separator: str) -> tuple[str, ...]:
    """Several labels, each once. Those split at the separator lose the spaces around them."""
    if type(value) is str:
        is_json = value.lstrip().startswith("[")
        value = json.loads(value) if is_json else list(map(str.strip, value.split(separator)))
    labels = [_string(label, name) for label in (value if type(value) is list else [value])]
    if not all(map(str.strip, labels)):
        raise ValueError("empty label; a row without labels is written []")
    return tuple(dict.fromkeys(labels))


def text_hashes(text: str) -> tuple[int, int]:
    """64-bit hashes of the text as written, and with case, width and spaces folded."""
    folded = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return _hash(text), _hash(folded)


def _hash(text: str) -> int:
    digest = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def what_rows_depend_on(split: str, config: TrainConfig, source: ModuleType) -> list[Any]:
    """The files, the code that reads them, and the settings: for the name of a store."""
    content, code = source.fingerprint(split, config), [inspect.getsource(source)]
    code += [file.read_text("utf-8") for file in sorted(Path(__file__).parent.glob("*.py"))]
    return [split, content, code, config.row_settings()]
