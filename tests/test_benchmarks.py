"""What is claimed about speed comes from a record, and the record is whole."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch

from codetta.bench.train import measure_train
from codetta.errors import ArgumentError

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


def test_train() -> None:
    """Every contender that is installed makes the same loss."""
    rows = measure_train("tiny", torch.device("cpu"), ("eager", "liger", "codetta"), layers=1, rounds=1)
    assert {"eager", "codetta"} <= {row["impl"] for row in rows} <= {"eager", "liger", "codetta"}
    assert all(row["ms"] > 0 and row["tokens"] == 128 and row["layers"] == 1 for row in rows)
    assert max(row["loss"] for row in rows) - min(row["loss"] for row in rows) < 0.01
    with pytest.raises(ArgumentError, match="no contender"):
        measure_train("tiny", torch.device("cpu"), ("nobody",))
    with pytest.raises(ArgumentError, match="no loss"):
        measure_train("bert-base", torch.device("cpu"), ("eager",))
