"""Every epilogue of the library compiles for every target, on a machine that has none of them.

The compiler's own report is held to: asynchronous matrix instructions and bulk copies on Hopper, no spilled registers with a
default tile anywhere. Workers are processes of their own, because Triton's interpreter is on in this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from codetta.bench.samples import library_names
from codetta.plan.target import TARGETS

SCRIPT = Path(__file__).parent / "cross_compile.py"
JOBS = [f"{name}:{target}:bf16" for target in TARGETS for name in library_names()]
# Types change copies, instructions and tiles, hardly the epilogues: a few stand for the rest.
JOBS += [
    f"{name}:{target}:{dtype}"
    for target in TARGETS
    for dtype, names in {
        "fp16": ["residual_stats", "norm_rope"],
        "fp32": ["residual_stats", "norm_swiglu", "weight_gradient"],
    }.items()
    for name in names
]
JOBS += [
    f"{name}:{target}:{dtype}"
    for name in (
        "two_widths",
        "stage",
        "rows",
        "attention",
        "attention_whole",
        "few_norm_rope",
        "few_norm_swiglu",
        "few_residual_stats",
        "sixteen_norm_rope",
        "sixteen_norm_swiglu",
        "sixteen_residual_stats",
    )
    for target in TARGETS
    for dtype in ("bf16", "fp32")
    if (name, dtype) != ("attention_whole", "fp32")  # its parts are always joined
]
# Where loops are specialised, 65 to 1,024 rows have tiles of their own.
JOBS += [
    f"short_{name}:{target.name}:bf16"
    for name in (
        "norm_rope",
        "norm_qk_rope",
        "norm_swiglu",
        "residual_stats",
        "lse_target",
        "swiglu_backward",
        "gelu_backward",
    )
    for target in TARGETS.values()
    if target.warpgroups
]


def reports(jobs: list[str]) -> dict[str, dict[str, Any]]:
    """One report per job; dealt out to two processes, unless tests run side by side already."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = str(SCRIPT.parent.parent)
    workers = []
    count = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
    for share in (jobs[first::count] for first in range(count)):
        worker = subprocess.Popen(
            [sys.executable, str(SCRIPT), *share], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )  # fmt: skip
        workers.append(worker)
    found = {}
    for worker in workers:
        out, err = worker.communicate(timeout=600)
        assert worker.returncode == 0, err[-4000:]
        found |= {report["job"]: report for report in map(json.loads, out.splitlines())}
    assert set(found) == set(jobs)
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_defaults_compile_and_do_not_spill(target: str) -> None:
    found = reports([job for job in JOBS if job.split(":")[1] == target])
    failed = {job: report["error"] for job, report in found.items() if "error" in report}
    assert not failed, "\n\n".join(f"{job}: {error}" for job, error in failed.items())
    spilling = {job: (report["spills"], report["tile"]) for job, report in found.items() if report["spills"]}
    assert not spilling, "\n".join(f"{job}: {spills} bytes on {tile}" for job, (spills, tile) in spilling.items())
    for job, report in found.items():
        assert report["registers"] > 0, job
        assert report["shared"] <= TARGETS[target].shared, job
        if job.startswith(("stage", "rows", "attention", "few", "sixteen")):
            continue  # multiplies nothing, or a few rows, and every tile is read once
        if TARGETS[target].bulk_copy:
            assert report["bulk_copy"], f"{job} has no bulk-tensor copies"
        if TARGETS[target].warpgroups and not job.endswith("fp32"):
            assert report["warpgroup"], f"{job} has no warpgroup matrix instructions"
