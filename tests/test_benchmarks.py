"""What is claimed about speed comes from a record, and the record is whole."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_table_is_that_of_the_last_record() -> None:
    table = runpy.run_path(str(ROOT / "benchmarks/table.py"))
    assert (ROOT / "docs/kernels.md").read_text() == table["render"](table["last_record"]())


def test_records_say_where_they_come_from() -> None:
    for path in (ROOT / "benchmarks/results").glob("*.jsonl"):
        for line in path.read_text().splitlines():
            record = json.loads(line)
            for key in ("bench", "device", "versions", "date", "commit", "command", "ceilings", "rows"):
                assert record[key], f"{path.name}: {key} is missing"
