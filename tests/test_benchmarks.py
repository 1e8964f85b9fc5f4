"""What is claimed about speed comes from a record, and the record is whole."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch

from codetta.bench.layer import measure_layer
from codetta.bench.loss import measure_loss
from codetta.bench.train import measure_train
from codetta.cli_bench import known
from codetta.errors import ArgumentError

ROOT = Path(__file__).resolve().parent.parent


def test_the_table_is_that_of_the_last_record() -> None:
    table = runpy.run_path(str(ROOT / "benchmarks/table.py"))
    assert (ROOT / "docs/kernels.md").read_text() == table["render"](table["last_record"]())


def test_the_grid_is_that_of_its_records() -> None:
    """Of what is recorded, or of a record made here; docs show what is recorded."""
    table = runpy.run_path(str(ROOT / "benchmarks/table.py"))
    rows = [
        {
            "model": "m",
            "layers": 1,
            "batch": 1,
            "length": 8,
            "pass": "prefill",
            "impl": impl,
            "ms": ms,
            "device_ms": None,
            "gib": None,
        }
        for impl, ms in (("eager", 2.0), ("codetta", 4.0))
    ]
    made = {"device": "x", "date": "2026-11-18", "versions": {"torch": "2", "triton": "3"}, "rows": rows}
    assert "| prefill | 1 | **0.50** | - |" in table["render_grid"](made)
    path = ROOT / "benchmarks/results/grid.jsonl"
    if path.exists():
        assert (ROOT / "docs/grid.md").read_text() == table["render_grid"](table["recorded"](path))


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
    with pytest.raises(ArgumentError, match="no loss"):
        measure_train("bert-base", torch.device("cpu"), ("eager",))


def test_layer() -> None:
    """Each contender forward, backward and both, and gradients that are close to eager's."""
    rows = measure_layer(128, 256, torch.device("cpu"), ("eager", "codetta"), tokens=64, rounds=1)
    assert [(row["impl"], row["pass"]) for row in rows] == [
        (name, which) for name in ("eager", "codetta") for which in ("forward", "backward", "both")
    ]
    assert rows[-1]["distance"] < 0.02


def test_loss() -> None:
    rows = {row["impl"]: row for row in measure_loss(torch.device("cpu"), 40, 32, 70, ("eager", "codetta"), rounds=1)}
    for key in ("dx_error", "dw_error"):
        assert 0 < rows["codetta"][key] <= 2 * rows["eager"][key]
    assert all(row["ms"] > 0 for row in rows.values())


def test_contenders() -> None:
    assert known(None, ("eager", "codetta")) == ("eager", "codetta")
    assert known(["codetta"], ("eager", "codetta")) == ("codetta",)
    with pytest.raises(ArgumentError, match="no contender"):
        known(["nobody"], ("eager", "codetta"))
