"""Promise: rows are what the files say, in every format; what is wrong is named, never guessed."""

import bz2
import csv
import datetime
import gzip
import io
import json
import lzma
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from training.dataset.files import expand_files
from training.dataset.readers import FileRows
from training.dataset.rows import BadRow, ReadOptions, ReadReport, Row, good_rows
from training.settings.errors import UserError

Pairs = list[tuple[str, str]]
OPTIONS = ReadOptions()
TEXTS_ONLY = ReadOptions(label_column=None)
VERBATIM = ["NA", "null", "None", "nan", "N/A", "007", "07", "7", "1.0", "1", "True", "true", " a "]


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    def write_file(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
        return path

    return write_file


Write = Callable[[str, str | bytes], Path]


def read(
    path: Path, options: ReadOptions = OPTIONS, on_bad_rows: str = "error"
) -> tuple[list[Row], ReadReport]:
    report = ReadReport()
    return list(good_rows(FileRows([path], options), on_bad_rows, report)), report


def pairs(path: Path, options: ReadOptions = OPTIONS) -> list[tuple[str, Any]]:
    return [(str(row.text), row.label) for row in read(path, options)[0]]


def error(path: Path, options: ReadOptions = OPTIONS, on_bad_rows: str = "error") -> str:
    with pytest.raises(UserError) as caught:
        read(path, options, on_bad_rows)
    return str(caught.value)


def skipped(path: Path, **options: Any) -> list[tuple[int, str]]:
    return [(b.line, b.reason) for b in read(path, replace(OPTIONS, **options), "skip")[1].bad_rows]


def csv_text(rows: Iterable[Iterable[str]], **how: Any) -> str:
    out = io.StringIO()
    csv.writer(out, **how).writerows([("text", "label"), *rows])
    return out.getvalue()


def as_arrow(path: Path, columns: dict[str, Any]) -> Path:
    import pyarrow as pa
    from pyarrow import feather, parquet

    table = pa.table(columns)
    if path.suffix == ".parquet":
        parquet.write_table(table, path)
    elif path.suffix == ".feather":
        feather.write_feather(table, path)
    else:  # a stream, as `datasets` writes it
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table)
    return path


def save(folder: Path, suffix: str, rows: Pairs) -> Path:
    """The same rows in the format of the suffix."""
    path = folder / f"rows{suffix}"
    kind, _, packed = suffix[1:].partition(".")
    if kind in ("parquet", "arrow", "feather"):
        return as_arrow(path, {"text": [t for t, _ in rows], "label": [label for _, label in rows]})
    if kind in ("csv", "quoted"):
        text = csv_text(rows)
    elif kind in ("tsv", "tab"):
        text = "".join(f"{t}\t{label}\n" for t, label in [("text", "label"), *rows])
    else:
        text = "".join(json.dumps({"text": t, "label": label}) + "\n" for t, label in rows)
    pack: Any = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}.get(packed, bytes)
    path.write_bytes(pack(text.encode("utf-8")))
    return path


# -- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "suffix",
    ".csv .tsv .tab .jsonl .ndjson .json .parquet .arrow .feather .CSV .csv.gz .tsv.bz2 "
    ".jsonl.xz .csv.GZ".split(),
)
def test_strings_are_verbatim_in_every_format(tmp_path: Path, suffix: str) -> None:
    rows = [
        *zip(VERBATIM, reversed(VERBATIM), strict=True),
        ("正面 👍", "好\u2028\u0085\x0b"),
        ("'", "é"),
    ]
    path = (
        save(tmp_path, suffix, rows) if suffix.islower() else save(tmp_path, suffix.lower(), rows)
    )
    path = path.rename(path.with_name(f"rows{suffix}"))
    found, report = read(path)
    assert [(row.text, row.label) for row in found] == rows
    columnar = suffix in (".parquet", ".arrow", ".feather")
    first = 1 if columnar or "json" in suffix or "ndjson" in suffix else 2
    assert [row.line for row in found] == list(range(first, first + len(rows)))
    assert (report.rows, report.lines) == (len(rows), len(rows) + first - 1)
    assert {row.file for row in found} == {str(path)} and {row.pair for row in found} == {None}
    assert not report.notes and not report.bad_rows


def test_whole_numbers_become_digits_so_that_classes_agree(tmp_path: Path, write: Write) -> None:
    import pyarrow as pa

    big = 12345678901234567890
    names = ["1", "-2", str(big)]
    lines = "".join(f'{{"text": 5, "label": {name}}}\n' for name in names)
    assert pairs(write("a.jsonl", lines)) == [("5", name) for name in names]
    assert [
        label for _, label in pairs(write("a.csv", csv_text([("a", n) for n in names])))
    ] == names
    unsigned = as_arrow(
        tmp_path / "a.parquet", {"text": ["a"], "label": pa.array([big], pa.uint64())}
    )
    assert pairs(unsigned) == [("a", str(big))]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather"])
def test_categorical_columns_work(tmp_path: Path, suffix: str) -> None:
    import pyarrow as pa

    names = pa.array(["spam", "007", "spam"]).dictionary_encode()
    numbers = pa.array([7, 8, 7]).dictionary_encode()
    path = as_arrow(tmp_path / f"a{suffix}", {"text": names, "label": numbers})
    assert pairs(path) == [("spam", "7"), ("007", "8"), ("spam", "7")]


ADVICE = {
    "float64": ("float", 'write it as text, "1.5", or as a whole number'),
    "bool_": ("bool", 'write it as text, "true" or "false", or as 1 or 0'),
    "null": ("null", "fill it in, or leave the row out"),
    "binary": ("bytes", "write it as text"),
    "date32": ("date", "write it as text"),
    "timestamp": ("datetime", "write it as text"),
    "struct": ("dict", "it has fields 'a', 'b'; write one of them as a column"),
}


@pytest.mark.parametrize("kind", ADVICE)
def test_other_columns_of_parquet_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    import pyarrow as pa

    struct = pa.struct({"a": pa.string(), "b": pa.string()})
    kinds = {"struct": struct, "timestamp": pa.timestamp("us")}
    nothing = pa.array([None, None], kinds.get(kind) or getattr(pa, kind)())
    path = as_arrow(tmp_path / "a.parquet", {"text": ["a", "b"], "label": nothing})
    times = {"date32": datetime.date(2024, 1, 1), "timestamp": datetime.datetime(2024, 1, 1)}
    number = {"float64": 1.5, "bool_": True, "null": None, "binary": b"x"}
    value = {"struct": {"a": "x", "b": None}, **number, **times}[kind]
    values = pa.array([value, value], nothing.type)
    assert f"{path}:1 'label' is " in error(path)
    path = as_arrow(tmp_path / "b.parquet", {"text": ["a", "b"], "label": values})
    for on_bad_rows in ("error", "skip"):  # a column of them leaves no row
        message = error(path, OPTIONS, on_bad_rows)
        assert message.startswith("2 of 2 rows are bad; fix them:\n")
        name, advice = ADVICE[kind]
        assert f"{path}:1 'label' is {name}, not text or an integer; {advice}: " in message
        assert "--multi-label" not in message


def test_a_list_of_one_label_is_that_label(tmp_path: Path, write: Write) -> None:
    """As annotation tools write it; how many rows have several is said."""
    lines = "".join(json.dumps({"text": "t", "label": label}) + "\n" for label in (["x"], [7], "y"))
    assert pairs(write("a.jsonl", lines)) == [("t", "x"), ("t", "7"), ("t", "y")]
    several = as_arrow(
        tmp_path / "a.parquet", {"text": ["t"] * 4, "label": [["x"], ["x", "y"], [], ["y", "z"]]}
    )
    message = error(several).split("\n")
    assert message[0] == (
        "3 of 4 rows are bad; 2 have several labels, which need --multi-label; "
        "fix them or pass --on-bad-rows skip:"
    )
    assert message[1].startswith(f"{several}:2 'label' has several labels, which need --multi")
    assert message[2].startswith(f"{several}:3 'label' is list, not text or an integer; it is empt")


def test_what_pandas_and_excel_write(write: Write) -> None:
    """The line says how to write the file so that it can be read."""
    columns = {name: {"0": "a", "1": "b"} for name in ("text", "label")}
    message = error(write("a.json", json.dumps(columns)))
    assert "'text' is a whole column, not text or an integer; write one row a line" in message
    assert "to_json(path, orient='records', lines=True)" in message
    rows = [{"text": "a", "label": "x"}]
    assert "orient='records', lines=True" in error(write("b.json", json.dumps(rows)))
    for first, delimiter in (("sep=;", None), ("sep=;", ";"), ("SEP=,", None), ("sep=\t", ";")):
        path = write("a.csv", f"{first}\r\ntext;label\r\na;x\r\n")
        advice = f"is a line for Excel: remove it, and give --delimiter {first[-1]!r}"
        assert error(path, ReadOptions(delimiter=delimiter)) == f"{path}:1: {first!r} {advice}"


def test_lines_of_old_macs(write: Write) -> None:
    for name, delimiter in (("a.csv", ","), ("a.tsv", "\t")):
        path = write(name, f"text{delimiter}label\ra{delimiter}x\r")
        assert error(path).startswith(f"{path}: lines end in a lone carriage return, as on old Mac")
    assert [row.text for row in read(write("a.txt", "a\rb"), TEXTS_ONLY)[0]] == ["a\rb"]


def test_null_and_empty_in_parquet_are_bad_rows(tmp_path: Path) -> None:
    columns = {"text": ["a", None, " ", "d", "e"], "label": ["x", "x", "x", None, ""]}
    reasons = skipped(as_arrow(tmp_path / "a.parquet", columns))
    assert reasons == [
        (2, "'text' is null, not text or an integer; fill it in, or leave the row out"),
        (3, "empty text"),
        (4, "'label' is null, not text or an integer; fill it in, or leave the row out"),
        (5, "empty label"),
    ]


def test_parquet_is_read_in_batches_with_right_row_numbers(tmp_path: Path) -> None:
    texts = [str(i) for i in range(10_000)]
    for suffix in (".parquet", ".feather"):
        path = as_arrow(tmp_path / f"a{suffix}", {"text": texts, "label": texts})
        assert [(row.text, row.line) for row in read(path)[0]] == [(t, int(t) + 1) for t in texts]


def test_jsonl_rows_that_cannot_be_used_are_named(write: Write) -> None:
    lines = [
        '{"text": "a", "label": "x"}', "", '{"text": "b", "label": 1.0}', '{"text": "b", "label',
        "[]", '{"text": "c"}', '{"text": "c", "label": null}', '{"text": NaN, "label": "x"}',
        '{"text": "d", "text": "e", "label": "x"}', '{"text": "f", "label": true}',
        '{"text": "f", "label": ["x", "y"]}', '{"text": "\\ud83d", "label": "x"}', "[" * 100_000,
        '{"text": "g", "label": ' + "1" * 5000 + "}", '{"text": " ", "label": "x"}',
        '{"text": "g", "label": " "}', '{"text": "g", "label": "x"} {}', '"text"',
        ' {"text": "\\ud83d\\ude00\\r", "label": "x", "score": NaN} ', "", " ",
    ]  # fmt: skip
    path = write("a.jsonl", "\n".join(lines))
    rows, report = read(path, OPTIONS, "skip")
    assert [(row.text, row.line) for row in rows] == [("a", 1), ("\U0001f600\r", 19)]
    reasons = {bad.line: bad.reason for bad in report.bad_rows}
    assert list(reasons) == list(range(2, 19))
    assert (report.rows, report.bad_row_count, report.lines) == (2, 17, 21)
    for line, part in {
        2: "blank line", 3: "'label' is float", 4: "broken JSON: Unterminated string",
        5: "not a JSON object", 6: "no key 'label'", 7: "'label' is null", 8: "'text' is float",
        9: "key 'text' appears twice", 10: "'label' is bool", 12: "surrogate",
        13: "recursion", 14: "digits", 15: "empty text", 16: "empty label", 17: "Extra data",
        18: "not a JSON object",
    }.items():  # fmt: skip
        assert part in reasons[line], line
    message = error(path).split("\n")
    several = "1 have several labels, which need --multi-label"
    skip = "fix them or pass --on-bad-rows skip:"
    assert message[0] == f"17 of 19 rows are bad; {several}; {skip}"
    assert len(message) == 11
    assert message[1] == f"{path}:2 blank line: "
    assert message[3].startswith(f"{path}:4 broken JSON: Unterminated string")
    assert message[3].endswith(lines[3])


def test_separators_that_python_takes_for_line_ends_do_not_cut_rows(write: Write) -> None:
    odd = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\x1eh"
    assert pairs(write("a.jsonl", f'{{"text": "{odd[:7]}\\r", "label": "x"}}\r\n')) == [
        (odd[:7] + "\r", "x")
    ]
    assert pairs(write("a.tsv", f"text\tlabel\r\n{odd}\rz\tx\r\nb\ty")) == [
        (odd + "\rz", "x"),
        ("b", "y"),
    ]
    assert pairs(write("a.csv", f'text,label\n{odd},x\n"{odd}\r",y\n')) == [
        (odd, "x"),
        (odd + "\r", "y"),
    ]
    assert [r.text for r in read(write("a.txt", f"{odd}\r\nb\rc"), TEXTS_ONLY)[0]] == [odd, "b\rc"]


# -- quotes --------------------------------------------------------------------------------------


def test_csv_follows_rfc_4180(write: Write) -> None:
    path = write("a.csv", 'text,label\r\n5" screen,x\r\n"say ""hi"", a\nb\r\n",y\r\n"",z\r\n')
    rows, report = read(path, OPTIONS, "skip")
    assert [row[:5] for row in rows] == [
        ('5" screen', None, "x", str(path), 2),
        ('say "hi", a\nb\r\n', None, "y", str(path), 3),
    ]
    assert [tuple(bad)[1:3] for bad in report.bad_rows] == [(6, "empty text")]
    assert report.lines == 6
    assert report.notes == [f"{path}: 1 rows have several lines; lines 3 to 5 are one row"]


def test_tsv_is_raw_and_quoting_is_a_choice(write: Write) -> None:
    path = write("a.tsv", 'text\tlabel\n5" screen\tx\n"alone\ty\n"both ""sides"""\tz\n')
    rows, report = read(path)
    assert [row.text for row in rows] == ['5" screen', '"alone', '"both ""sides"""']
    assert report.lines == 4 and not report.notes
    quoted = replace(ReadOptions(), tsv_quoting=True)
    assert pairs(write("b.tsv", 'text\tlabel\n"a ""b""\tc\nd"\tx\n'), quoted) == [
        ('a "b"\tc\nd', "x")
    ]


def test_a_quote_that_swallows_rows_is_called_out(write: Write) -> None:
    rows = [("a", "0"), ('"b', "1"), ("c", "0"), ("d", "1"), ('e"', "1"), ("f", "0")]
    path = write("a.csv", "text,label\n" + "".join(f"{text},{label}\n" for text, label in rows))
    found, report = read(path, OPTIONS, "skip")
    assert [row.text for row in found] == ["a", "b,1\nc,0\nd,1\ne", "f"]
    rows_inside = "are one row, and seem to be rows: is a quote missing?"
    assert report.notes == [f"{path}: 1 rows have several lines; lines 3 to 6 {rows_inside}"]
    none_seen = read(write("b.csv", 'text,label\n"a,1\nb,2\nc",3\n'))[1]
    assert none_seen.notes[0].endswith(f"; lines 2 to 4 {rows_inside}")
    poem = csv_text([("Rose, rose\nred\n" * 3, "0"), ("line\n" * 150, "1"), ("a\nb", "1")])
    path = write("poem.csv", poem)
    found, report = read(path)
    assert len(found) == 3
    assert report.notes == [f"{path}: 3 rows have several lines; lines 9 to 159 are one row"]
    # Rows inside a row say more than its length.
    report = read(write("both.csv", poem + '"b,1\nc,0\nd",1\n'))[1]
    assert report.notes[0].endswith(f"4 rows have several lines; lines 162 to 164 {rows_inside}")


def test_quotes_that_break_csv(write: Write) -> None:
    bad = write("a.csv", 'text,label\n"a" b,x\nb,y\n"c\n"d,x\ne,y\nf\rg,y\n\nh,z\n')
    assert [row.text for row in read(bad, OPTIONS, "skip")[0]] == ["b", "e", "h"]
    reasons = skipped(bad)
    assert [line for line, _ in reasons] == [2, 4, 7, 8]
    assert reasons[0][1].startswith("text after a closing quote;")
    assert reasons[1][1] == reasons[0][1] + "; lines 4 to 5 are not rows"
    assert reasons[2][1] == "a carriage return outside quotes"
    assert reasons[3][1] == "blank line"
    for on_bad_rows in ("error", "skip"):  # the rows behind it cannot be told apart
        path = write("b.csv", 'text,label\na,x\n"b,y\nc,z\n')
        assert (
            error(path, OPTIONS, on_bad_rows)
            == f"{path}:3: a quote opens in this row and is never closed"
        )


def test_a_huge_field_is_read_and_an_endless_one_refused(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = "x" * 300_000
    assert pairs(write("a.csv", csv_text([(long, "1")]))) == [(long, "1")]
    limit = csv.field_size_limit()  # of the whole process, other tests too
    monkeypatch.setattr("training.dataset.readers.FIELD_LIMIT", 1000)
    assert "67 million characters" in error(write("b.csv", csv_text([("a", "1"), (long, "1")])))
    csv.field_size_limit(limit)


# -- shape ---------------------------------------------------------------------------------------


def test_wrong_number_of_fields(write: Write) -> None:
    path = write("a.tsv", "text\tlabel\na\tx\nb\nc\t\tx\nd\ty\n\t\n\n\n")
    assert [row.text for row in read(path, OPTIONS, "skip")[0]] == ["a", "d"]
    assert skipped(path) == [(3, "1 fields, not 2"), (4, "3 fields, not 2"), (6, "empty text")]
    assert read(path, OPTIONS, "skip")[1].bad_rows[1] == BadRow(
        str(path), 4, "3 fields, not 2", "c |  | x"
    )


@pytest.mark.parametrize("name", ["a.csv", "a.tsv", "a.jsonl"])
def test_blank_lines_count_only_between_rows(write: Write, name: str) -> None:
    head, row = {
        "a.csv": ("text,label\n", "a,x"),
        "a.tsv": ("text\tlabel\n", "a\tx"),
        "a.jsonl": ("", '{"text": "a", "label": "x"}'),
    }[name]
    assert len(read(write(name, f"{head}{row}\n{row}\n\n\r\n\n"))[0]) == 2
    path = write(name, f"{head}{row}\n\n\r\n{row}\n\n")
    first = head.count("\n") + 2
    assert skipped(path) == [(first, "blank line"), (first + 1, "blank line")]


@pytest.mark.parametrize(
    "name, content",
    [("a.csv", ""), ("a.csv", "text,label\n"), ("a.tsv", "text\tlabel"), ("a.jsonl", ""),
     ("a.jsonl", "\n\n"), ("a.csv", "\n\n"), ("a.txt", ""), ("a.csv", b"\xef\xbb\xbf"),
     ("a.csv.gz", gzip.compress(b"", mtime=0))],
)  # fmt: skip
def test_no_rows_is_an_error(write: Write, name: str, content: str | bytes) -> None:
    path = write(name, content)
    assert error(path) == f"{path} has no rows"


def test_no_rows_in_parquet(tmp_path: Path) -> None:
    import pyarrow as pa

    nothing = pa.array([], pa.string())
    for suffix in (".parquet", ".feather", ".arrow"):
        path = as_arrow(tmp_path / f"a{suffix}", {"text": nothing, "label": nothing})
        assert error(path) == f"{path} has no rows"


def test_all_rows_bad_is_an_error_even_when_they_may_be_skipped(write: Write) -> None:
    message = error(write("a.csv", "text,label\n,x\n,y\n"), OPTIONS, "skip")
    assert message.startswith("2 of 2 rows are bad; fix them:\n")


def test_missing_columns_name_what_is_there(write: Write, tmp_path: Path) -> None:
    path = write("a.csv", "Unnamed: 0,text,Label \n0,a,x\n")
    message = error(path)
    assert message.startswith(f"{path} has no column 'label', did you mean Label ?")
    assert "it has 'Unnamed: 0', 'text', 'Label '; set --label-column" in message
    assert pairs(path, ReadOptions(label_column="Label ")) == [("a", "x")]
    assert "set --text-column" in error(path, ReadOptions(text_columns=("question",)))
    assert "set --text-pair-column" in error(path, ReadOptions(text_pair_column="other"))
    assert "it has 'text;label'; set --text-column; in CSV and TSV also --delimiter" in error(
        write("b.csv", "text;label\na;x\n")
    )
    assert "--no-header" in error(write("c.csv", "a,x\nb,y\n"))
    assert "2 columns 'text'" in error(write("e.csv", "text,text,label\na,b,x\n"))
    assert pairs(write("f.csv", "\ntext,label\na,x\n")) == [("a", "x")]
    parquet = as_arrow(tmp_path / "a.parquet", {"text": ["a"], "Label": ["x"]})
    assert "no column 'label', did you mean Label?" in error(parquet)
    jsonl = write("a.jsonl", '{"text": "a", "labels": "x"}\n' * 500)
    lines = error(jsonl, OPTIONS, "skip").split("\n")
    assert lines[0] == "500 of 500 rows are bad; fix them:" and len(lines) == 11
    assert lines[1].startswith(f"{jsonl}:1 no key 'label': ") and "labels" in lines[1]


def test_files_without_a_header_number_columns_from_1(write: Write) -> None:
    options = ReadOptions(header=False, text_columns=("2",), label_column="1")
    for name, content in {"a.csv": 'x,"a\nb"\ny,c\n', "a.tsv": "x\ta\ny\tc\n"}.items():
        rows, report = read(write(name, content), options)
        assert [(row.label, row.line) for row in rows] == [
            ("x", 1),
            ("y", 1 + content.count("\n", 0, -4)),
        ]
        assert report.lines == content.count("\n")
    assert "numbered from 1" in error(
        write("a.csv", "x,a\n"), replace(options, text_columns=("text",))
    )


def test_delimiters(write: Write) -> None:
    semicolon = ReadOptions(delimiter=";")
    assert pairs(write("a.csv", 'text;label\n"a;b";x\n'), semicolon) == [("a;b", "x")]
    assert pairs(write("a.txt", 'text;label\n"a;x\n'), semicolon) == [('"a', "x")]
    assert pairs(write("a.csv", "text\tlabel\na,b\tx\n"), ReadOptions(delimiter="\\t")) == [
        ("a,b", "x")
    ]
    for wrong in ("||", '"', "\n", "\r"):
        assert "--delimiter" in error(
            write("a.csv", "text,label\na,x\n"), ReadOptions(delimiter=wrong)
        )


def test_plain_text_for_prediction(write: Write) -> None:
    rows, report = read(write("a.txt", '\ufeff"one\ttab\r\n\r\ntwo  \n\n'), TEXTS_ONLY, "skip")
    assert [tuple(row)[:3] + row[4:5] for row in rows] == [
        ('"one\ttab', None, None, 1),
        ("two  ", None, None, 3),
    ]
    assert [(bad.line, bad.reason) for bad in report.bad_rows] == [(2, "blank line")]
    assert "no column 'label'; it has 'text'" in error(write("a.txt", "a\tx\n"))
    tabs = replace(TEXTS_ONLY, delimiter="\t")  # makes a table of it
    assert [row.text for row in read(write("a.txt", "text\tlabel\na\tx\n"), tabs)[0]] == ["a"]
    assert pairs(write("a.csv", "label,text\nx,a\n"), TEXTS_ONLY) == [("a", None)]
    assert pairs(write("a.jsonl", '{"text": "a"}\n'), TEXTS_ONLY) == [("a", None)]


# -- several columns, pairs, several labels ------------------------------------------------------


def test_several_text_columns_and_pairs(tmp_path: Path) -> None:
    options = ReadOptions(("title", "text"), "other")
    rows = [("T", "a", "p", "x"), ("", "b", "p", "y"), ("", " ", "p", "y"), ("T", "c", "", "y")]
    names = ("title", "text", "other", "label")
    path = tmp_path / "a.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([names, *rows])
    by_name = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    lines = [json.dumps(dict(zip(names, row, strict=True))) for row in rows]
    (tmp_path / "a.jsonl").write_text("\n".join(lines), encoding="utf-8")
    for other in (path, tmp_path / "a.jsonl", as_arrow(tmp_path / "a.parquet", by_name)):
        found, report = read(other, options, "skip")
        assert [row[:3] for row in found] == [(("T", "a"), "p", "x"), (("", "b"), "p", "y")]
        assert [bad.reason for bad in report.bad_rows] == ["empty title, text", "empty other"]


def test_several_labels(write: Write, tmp_path: Path) -> None:
    options = ReadOptions(multi_label=True)
    cells = ["a, b ,a", "c", '["b", "d, e", 1]', "[]", "", "a,,b", '["a"', "['a']", "[1.5]"]
    path = write("a.csv", csv_text([("t", cell) for cell in cells]))
    rows, report = read(path, options, "skip")
    wanted = [("a", "b"), ("c",), ("b", "d, e", "1"), ()]
    assert [row.label for row in rows] == wanted
    assert [bad.line for bad in report.bad_rows] == list(range(6, 11))
    assert "written []" in report.bad_rows[0].reason
    semicolon = replace(options, label_separator=";")
    assert pairs(write("b.csv", csv_text([("t", "a, b;c")])), semicolon) == [("t", ("a, b", "c"))]
    values = ["a,b", ["c"], ["b", "d, e", 1], [], 7, None, [None], [["a"]], True]
    lines = "".join(json.dumps({"text": "t", "label": value}) + "\n" for value in values)
    rows, report = read(write("a.jsonl", lines), options, "skip")
    assert [row.label for row in rows] == [*wanted, ("7",)]
    assert [bad.line for bad in report.bad_rows] == [6, 7, 8, 9]
    for label in ([["a", "b"], [], None], [[1], [2, 3], []]):
        parquet = as_arrow(tmp_path / "a.parquet", {"text": ["t"] * 3, "label": label})
        found = read(parquet, options, "skip")[0]
        assert [row.label for row in found] == [
            tuple(map(str, each)) for each in label if each is not None
        ]
    floats = as_arrow(tmp_path / "a.parquet", {"text": ["t"], "label": [[1.5]]})
    assert f"{floats}:1 'label' is float" in error(floats, options)


# -- encodings -----------------------------------------------------------------------------------

SAMPLES = {
    "gb18030": ("今天的新闻很有意思，股票上涨", "经济"),
    "big5": ("今天的新聞很有意思，股票上漲", "經濟"),
    "cp932": ("今日のニュースはとても面白いです。", "経済"),
    "euc_jp": ("今日のニュースはとても面白いです。", "経済"),
    "cp949": ("오늘 뉴스는 매우 흥미롭습니다.", "경제"),
    "cp1251": ("Сегодня новости очень интересные", "экономика"),
    "koi8-r": ("Сегодня новости очень интересные", "экономика"),
    "cp1252": ("Les élèves déçus préfèrent le café – où ça ? “Là-bas”", "économie"),
}


@pytest.mark.parametrize("encoding", [*SAMPLES, "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl"])
def test_another_encoding_is_an_error_that_suggests_it(
    tmp_path: Path, encoding: str, suffix: str
) -> None:
    rows = [("plain", "x"), SAMPLES.get(encoding, SAMPLES["gb18030"])] * 3
    utf8 = save(tmp_path, suffix, rows)
    if suffix == ".jsonl":
        lines = (
            json.dumps({"text": t, "label": label}, ensure_ascii=False) + "\n" for t, label in rows
        )
        utf8.write_text("".join(lines), encoding="utf-8")
    data = utf8.read_bytes().decode("utf-8").encode(encoding)
    path = tmp_path / f"other{suffix}"
    path.write_bytes(data)
    message = error(path)
    suggested = "utf-16-le" if encoding == "utf-16" else encoding
    assert message.endswith(f"pass --encoding {suggested}"), message
    assert pairs(path, ReadOptions(encoding=suggested)) == rows
    if encoding in SAMPLES:
        offset = next(i for i in range(len(data)) if data[i] > 127)
        line = data[:offset].count(b"\n") + 1
        assert message.startswith(
            f"{path}:{line}: byte {offset} (0x{data[offset]:02X}) is not utf-8"
        )
    assert pairs(path, ReadOptions(encoding=encoding)) == rows
    # What one decoder accepts is still refused when it is visibly something else.
    assert "pass --encoding" in error(
        utf8, ReadOptions(encoding="utf-16-le" if "16" in encoding else "utf-16")
    )
    if encoding in ("gb18030", "cp1251"):
        assert error(utf8, ReadOptions(encoding="latin-1")).endswith("pass --encoding utf-8")


@pytest.mark.parametrize(
    "encoding", ["utf-8-sig", "utf-8", "UTF8", "gb18030", "utf-16", "utf-16-le", "utf-32-be"]
)
def test_a_byte_order_mark_is_accepted(write: Write, encoding: str) -> None:
    mark = "" if encoding in ("utf-8-sig", "utf-16") else "\ufeff"
    path = write("a.csv", (mark + '"text",label\n正,x\n').encode(encoding))
    options = ReadOptions(encoding="utf-8" if encoding == "utf-8-sig" else encoding)
    assert pairs(path, options) == [("正", "x")]


def test_the_offset_is_right_far_into_a_compressed_file(write: Write) -> None:
    good = "text,label\n" + "好的,x\n" * 50_000
    for tail in (b"\xff,x\n", b"\xe5"):
        data = good.encode() + tail
        path = write("a.csv.gz", gzip.compress(data, 1))
        assert f"{path}:50002: byte {len(good.encode())} (0x{tail[0]:02X}) is not utf-8" in error(
            path
        )
        assert "is the file damaged" in error(path)
    ascii_only = b"text,label\n" + b"ok,x\n" * 50_000 + "中文的新闻,x\n".encode("gb18030")
    message = error(write("b.csv", ascii_only))
    assert f":50002: byte {11 + 5 * 50_000} (0xD6)" in message and "--encoding gb18030" in message


def test_the_suggestion_looks_beyond_the_block_that_holds_the_wrong_byte(write: Write) -> None:
    start = b"text,label\n" + b"x" * (65536 - 11 - 5) + b",y\n"
    path = write("a.csv", start + "今天的新闻很有意思,经济\n".encode("gb18030"))
    assert error(path).endswith("pass --encoding gb18030")


def test_ascii_is_not_taken_for_utf_16(write: Write) -> None:
    for encoding in ("utf-16", "utf-16-le", "utf-16-be"):
        message = error(write("a.csv", "text,label\na,x\n"), ReadOptions(encoding=encoding))
        assert message.endswith(f"this is not {encoding}: pass --encoding utf-8")


def test_a_mark_read_as_something_else_is_seen(write: Write) -> None:
    for mark, name in (("utf-8-sig", "utf-8"), ("utf-16", "utf-16-le")):
        path = write("a.csv", "text,label\na,x\n".encode(mark))
        assert error(path, ReadOptions(encoding="latin-1")).endswith(f"pass --encoding {name}")


def test_unknown_encodings(write: Write) -> None:
    path = write("a.csv", "text,label\na,x\n")
    for wrong in ("gbk2", "base64", "", "\0", "utf-9"):
        assert f"--encoding {wrong!r} is not known" in error(path, ReadOptions(encoding=wrong))
    assert "did you mean" in error(path, ReadOptions(encoding="gb18300"))
    other = write("b.csv", b"text,label\n\xd6,x\n")
    for odd in ("punycode", "idna", "utf-7", "utf-32"):
        assert str(other) in error(other, ReadOptions(encoding=odd))


def test_nul_characters_are_kept(write: Write) -> None:
    assert pairs(write("a.csv", "text,label\na\0b,\0\n")) == [("a\0b", "\0")]
    assert pairs(write("a.tsv", "text\tlabel\na\0b\tx\n")) == [("a\0b", "x")]
    assert pairs(write("a.jsonl", '{"text": "a\\u0000", "label": "x"}\n')) == [("a\0", "x")]


# -- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "suffix", [".csv.gz", ".csv.bz2", ".csv.xz", ".parquet", ".arrow", ".feather"]
)
def test_broken_archives_and_tables_are_clear_errors(tmp_path: Path, suffix: str) -> None:
    rows = [(str(random.Random(i).random()), "x") for i in range(2000)]
    path = save(tmp_path, suffix, rows)
    data = path.read_bytes()
    middle = len(data) // 2
    for broken in (
        data[:middle] + b"\xff" * 200 + data[middle + 200 :],
        data[: len(data) // 2],
        b"no such thing",
        data[:-20] if suffix != ".arrow" else b"x",
    ):
        path.write_bytes(broken)
        assert error(path).startswith(f"{path}: ") and "\n" not in error(path)


def test_offsets_beyond_the_data_of_an_arrow_file_are_no_crash(tmp_path: Path) -> None:
    path = as_arrow(tmp_path / "a.arrow", {"text": ["abc", "defgh"], "label": ["x", "y"]})
    good, bad = (struct.pack("<3i", 0, 3, end) for end in (8, 1 << 30))
    assert path.read_bytes().count(good) == 1
    path.write_bytes(path.read_bytes().replace(good, bad))
    assert error(path).startswith(f"{path}: unreadable .arrow file: ")


def test_unsupported_suffixes(write: Write) -> None:
    for name in ("a.xlsx", "a", "a.gz", "a.csv.zip", "a.parquet.gz"):
        message = error(write(name, "x"))
        assert ".csv .tsv" in message and ".parquet" in message and "\n" not in message
    assert "one object on one line" in error(write("a.json", '[\n{"text": "a", "label": "x"}\n]'))


def test_expand_files(tmp_path: Path) -> None:
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    for name in ("b.csv", "a.csv", "c[1].csv", "sub/d.csv", "sub/deep/e.csv"):
        (tmp_path / name).write_text("text,label\na,x\n", encoding="utf-8")

    def names(*patterns: str) -> list[str]:
        found = expand_files([tmp_path / pattern for pattern in patterns])
        return [str(path.relative_to(tmp_path)) for path in found]

    assert names("b.csv", "[ac].csv") == ["b.csv", "a.csv"]
    assert names("*.csv") == ["a.csv", "b.csv", "c[1].csv"]
    assert names("c[1].csv") == ["c[1].csv"]
    assert names("sub/**/*.csv") == ["sub/d.csv", "sub/deep/e.csv"]
    assert names("sub/*") == ["sub/d.csv"]
    with pytest.raises(FileNotFoundError, match=r"no file '.*bb.csv'.*.*b\.csv"):
        names("bb.csv")
    with pytest.raises(FileNotFoundError, match=r"no file '.*x\*.csv'"):
        names("x*.csv")
    with pytest.raises(FileNotFoundError, match=r"no file '.*nowhere"):
        names("nowhere/a.csv")
    with pytest.raises(UserError, match="is a folder"):
        names("sub")


def test_several_files_are_counted_together(write: Write) -> None:
    files = [write(f"{i}.csv", "text,label\na,x\n,x\n" + "b\n" * 10) for i in range(2)]
    seen: list[BadRow] = []
    report = ReadReport(on_bad_row=seen.append)
    with pytest.raises(UserError) as caught:
        list(good_rows(FileRows(files, ReadOptions()), "error", report))
    lines = str(caught.value).split("\n")
    assert lines[0].startswith("22 of 24 rows are bad") and len(lines) == 11
    assert lines[1] == f"{files[0]}:3 empty text: | x"
    assert (len(seen), report.bad_row_count, report.rows) == (22, 22, 2)
    many = write("many.csv", "text,label\na,x\n" + "b\n" * 5000)
    report = read(many, OPTIONS, "skip")[1]
    assert (report.bad_row_count, len(report.bad_rows)) == (5000, 1000)


def test_content_of_bad_rows_is_short_and_on_one_line(write: Write) -> None:
    bad = read(
        write("a.csv", csv_text([("a", "x"), ("", "y\n\t\x1b[31m" + "z" * 1000)])), OPTIONS, "skip"
    )[1]
    content = bad.bad_rows[0].content
    assert len(content) <= 200 and content.startswith("| y") and content.isprintable()


def test_every_open_names_its_encoding(write: Write) -> None:
    path = write("a.csv", "text,label\na,x\n")
    code = (
        "import sys; from pathlib import Path; from training.dataset.readers import *; "
        "print(list(FileRows([Path(sys.argv[1])], ReadOptions())))"
    )
    command = [sys.executable, "-X", "warn_default_encoding", "-W", "error::EncodingWarning"]
    root = Path(__file__).parents[1]
    done = subprocess.run(
        [*command, "-c", code, str(path)],
        cwd=root,
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
