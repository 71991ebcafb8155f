"""Real files, where there are some beside the repository, are read whole: every row and no more."""

import json
import sys
from pathlib import Path

import pytest
from conftest import ROOT, Run

DATA = ROOT.parent / "shared" / "data"
READ = """
import collections, json, sys
from training.dataset.files import expand_files
from training.dataset.readers import FileRows, ReadOptions
from training.dataset.rows import ReadReport, good_rows
found = {}
for pattern in ("*.tsv", "*.jsonl"):
    for path in expand_files([f"{sys.argv[1]}/{pattern}"]):
        report = ReadReport()
        rows = good_rows(FileRows([path], ReadOptions()), "error", report)
        labels = {row.label for row in rows}
        found[path.name] = [report.rows, report.bad_row_count, len(report.notes), sorted(labels)]
print(json.dumps(found))
"""
ROWS = {
    "trec_train.tsv": 4952, "trec_val.tsv": 500,
    "headlines_zh_train.tsv": 10000, "headlines_zh_val.tsv": 2000,
    "articles_zh_train.jsonl": 2000, "articles_zh_val.jsonl": 400,
}  # fmt: skip


@pytest.mark.skipif(not DATA.is_dir(), reason="there is no shared/data beside the repository")
def test_every_row_is_read(baked: Path, run: Run) -> None:
    """English and Chinese, TSV and JSONL, up to 33,000 characters: no row lost, none flagged."""
    found = json.loads(run(baked, sys.executable, "-c", READ, str(DATA)).stdout)
    assert {name: rows for name, (rows, *_) in found.items()} == ROWS
    assert all(bad == notes == 0 for _, bad, notes, _ in found.values())
    assert found["trec_train.tsv"][3] == ["ABBR", "DESC", "ENTY", "HUM", "LOC", "NUM"]
    assert found["articles_zh_val.jsonl"][3] == ["0", "1", "2"]
