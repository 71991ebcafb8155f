"""Promise: any table comes back exactly, and any bytes end in rows or in one clear error."""

import bz2
import csv
import gzip
import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from training.dataset.readers import FileRows
from training.dataset.rows import ReadOptions, ReadReport, Row, good_rows
from training.settings.errors import UserError

# A database is left out: tests leave nothing behind. The folder is shared between examples.
exact = settings(
    deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
characters = st.characters(exclude_categories=["Cs"])
texts = st.text(characters, min_size=1).filter(lambda text: not text.isspace())
tables = st.lists(st.tuples(texts, texts, st.text(characters)), min_size=1)
Table = list[tuple[str, str, str]]
NAMES = ("text", "label", "more")


def read(
    path: Path, options: ReadOptions, on_bad_rows: str = "error"
) -> tuple[list[Row], ReadReport]:
    report = ReadReport()
    return list(good_rows(FileRows([path], options), on_bad_rows, report)), report


def check(path: Path, table: Table, options: ReadOptions) -> None:
    rows, report = read(path, options)
    assert [(row.text, row.label) for row in rows] == [row[:2] for row in table]
    assert (report.rows, report.bad_row_count) == (len(table), 0)


@exact
@given(tables, st.sampled_from([*",;|\t:é"]), st.booleans(), st.booleans())
def test_what_csv_writes_comes_back(
    tmp_path: Path, table: Table, delimiter: str, every: bool, header: bool
) -> None:
    out = io.StringIO(newline="")
    quoting = csv.QUOTE_ALL if every else csv.QUOTE_MINIMAL
    writer = csv.writer(out, delimiter=delimiter, quoting=quoting)  # type: ignore[arg-type]
    writer.writerows([*([NAMES] if header else []), *table])
    text = out.getvalue()
    columns = ("text", "label") if header else ("1", "2")
    for name, tsv_quoting in (("a.csv", False), ("a.tsv", True)):
        path = tmp_path / name
        # With a mark at its start, so that one that is content is not taken for it.
        path.write_bytes(("\ufeff" + text).encode("utf-8"))
        options = ReadOptions((columns[0],), None, columns[1], delimiter=delimiter, header=header)
        check(path, table, ReadOptions(**{**vars(options), "tsv_quoting": tsv_quoting}))


@exact
@given(tables)
def test_what_is_written_as_tsv_comes_back(tmp_path: Path, table: Table) -> None:
    clean = [tuple("".join(c for c in t if c not in "\t\n\r") for t in row) for row in table]
    table = [(a, b, c) for a, b, c in clean if a.strip() and b.strip()] or [("a", "b", "c")]
    for end in ("\n", "\r\n"):
        lines = ["\t".join(row) + end for row in [NAMES, *table]]
        (tmp_path / "a.tsv").write_bytes("".join(lines).encode("utf-8"))
        check(tmp_path / "a.tsv", table, ReadOptions())


@exact
@given(tables, st.booleans(), st.sampled_from(["\n", "\r\n"]))
def test_what_json_writes_comes_back(
    tmp_path: Path, table: Table, ascii_only: bool, end: str
) -> None:
    objects = [dict(zip(NAMES, row, strict=True)) for row in table]
    lines = [json.dumps(each, ensure_ascii=ascii_only) + end for each in objects]
    (tmp_path / "a.jsonl").write_bytes("".join(lines).encode("utf-8"))
    check(tmp_path / "a.jsonl", table, ReadOptions())


@exact
@given(tables)
def test_what_pyarrow_writes_comes_back(tmp_path: Path, table: Table) -> None:
    for name, data in columnar(table).items():
        (tmp_path / name).write_bytes(data)
        check(tmp_path / name, table, ReadOptions())


def columnar(table: Table) -> dict[str, bytes]:
    import pyarrow as pa
    from pyarrow import parquet

    arrow = pa.table({name: [row[i] for row in table] for i, name in enumerate(NAMES)})
    files, plain = {}, pa.BufferOutputStream()
    parquet.write_table(arrow, plain)
    files["a.parquet"] = plain.getvalue().to_pybytes()
    for name, new in (("a.feather", pa.ipc.new_file), ("a.arrow", pa.ipc.new_stream)):
        out = pa.BufferOutputStream()
        with new(out, arrow.schema) as writer:
            writer.write_table(arrow)
        files[name] = out.getvalue().to_pybytes()
    return files


TABLE = [("a, b", "x", "1"), ('say "hi"\nthere', "y", "2"), ("好的", "正面", "3")] * 3
JSON = "".join(json.dumps(dict(zip(NAMES, row, strict=True))) + "\n" for row in TABLE).encode()
CSV = b'text,label,more\n"a, b",x,1\n"say ""hi""\nthere",y,2\n' + "好的,正面,3\n".encode() * 5
PACK: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
}
GOOD = {
    **{f"a.csv{suffix}": pack(CSV) for suffix, pack in PACK.items()},
    "a.csv": CSV,
    "a.tsv": CSV.replace(b",", b"\t"),
    "a.txt": CSV.replace(b",", b"\t"),
    "a.jsonl": JSON,
    "a.json": JSON,
    "a.parquet": b"",
    "a.arrow": b"",
    "a.feather": b"",
}


@settings(exact, max_examples=50)
@pytest.mark.parametrize("name", GOOD)
@given(st.data())
def test_any_bytes_end_in_rows_or_in_an_error(
    tmp_path: Path, name: str, data: st.DataObject
) -> None:
    good = GOOD[name] or columnar(TABLE)[name]
    piece = st.binary(max_size=20) | st.sampled_from([*map(bytes, zip(range(256)))])
    if data.draw(st.booleans()):
        content = data.draw(st.binary(max_size=200))
    else:  # a good file with one place changed
        start = data.draw(st.integers(0, len(good)))
        end = data.draw(st.integers(start, min(len(good), start + 20)) | st.just(len(good)))
        content = good[:start] + data.draw(piece) + good[end:]
    path = tmp_path / name
    path.write_bytes(content)
    options = ReadOptions(
        label_column=data.draw(st.sampled_from(["label", None])),
        encoding=data.draw(st.sampled_from(["utf-8", "gb18030", "utf-16", "latin-1", "cp932"])),
        tsv_quoting=data.draw(st.booleans()),
        header=data.draw(st.booleans()),
        multi_label=data.draw(st.booleans()),
    )
    if not options.header:
        label = options.label_column and "2"
        options = ReadOptions(**{**vars(options), "text_columns": ("1",), "label_column": label})
    on_bad_rows = data.draw(st.sampled_from(["error", "skip"]))
    try:
        rows, report = read(path, options, on_bad_rows)
    except UserError as error:
        assert str(error).startswith((str(path), *"123456789"))
    else:
        assert rows and len(rows) == report.rows
        assert report.bad_row_count == 0 or on_bad_rows == "skip"
