"""Compiles library epilogues for targets that are not here; a process of its own, since the interpreter must be off.

python cross_compile.py [NAME:TARGET:DTYPE ...]  or jobs on stdin; one JSON object per line on stdout.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from functools import partial
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)

import torch
import triton
from triton.compiler import ASTSource

import codetta
from codetta.backends import triton_attention, triton_rows
from codetta.backends.triton import TritonBackend
from codetta.backends.triton_compile import Report, cross_compile, report
from codetta.bench.samples import Sizes, sample
from codetta.dsl import Value
from codetta.plan.target import TARGETS, Target
from codetta.program import Operand, Piece, Program, Store, assemble, load_node
from codetta.runtime.bind import Binding
from codetta.stat import Stat


@codetta.epilogue
def two_widths(acc0, acc1):  # type: ignore[no-untyped-def]
    """Two segments whose tiles differ in width: the first has two strips, the second one."""
    left, right = codetta.halves(acc0)
    return {"y": codetta.silu(left) * right, "raw": acc0, "z": acc1, "total": codetta.row_sum(acc1)}


# Met element by element; at once; by narrow tiles of the specialised loops.
FEW_ROWS = {"few": 3, "sixteen": 16, "short": 128}


def bound(name: str, dtype: torch.dtype) -> tuple[Program, Binding]:
    if name == "two_widths":
        return two_widths.bind(torch.randn(64, 64).to(dtype), tuple(torch.randn(n, 64).to(dtype) for n in (24, 96)))
    if name == "stage":
        return stage(dtype)
    for count, rows in FEW_ROWS.items():
        if name.startswith(f"{count}_"):
            return sample(name.removeprefix(f"{count}_"), Sizes(rows=rows, samples=1), dtype=dtype).bind()
    return sample(name, Sizes(), dtype=dtype).bind()


def stage(dtype: torch.dtype, rows: int = 64, cols: int = 2048) -> tuple[Program, Binding]:
    """A program without a product: a norm of what the last one left, added to the stream, and what the next norm needs."""
    operands = [
        Operand("x", dtype, "each", cols), Operand("u", dtype, "each", cols), Operand("r", torch.float32, stat="sum"),
        Operand("g", dtype, "none", cols),
    ]  # fmt: skip
    x, u, r, g = (Value(load_node(each, each.cols)) for each in operands)
    y = x + u * codetta.rsqrt(r * (1.0 / cols) + 1e-6) * g
    stores = [Store("y", (Piece(y.node),), dtype, cols)]
    program = assemble(
        "stage", k=0, a_dtype=dtype, products=(), operands=operands, stores=stores, sinks={"s": codetta.row_sum(y * y).node},
        outputs=("y", "s"),
    )  # fmt: skip
    x_, u_, g_ = (torch.empty(*shape, dtype=dtype, device="meta") for shape in ((rows, cols), (rows, cols), (cols,)))
    partials = torch.empty(1, 8, rows, device="meta")
    bound = {"x": x_, "u": u_, "r": Stat(partials, "sum", 256, cols), "g": g_}
    outputs = {"y": torch.empty(rows, cols, dtype=dtype, device="meta")}
    return program, Binding(rows, 1, 1, (rows,), x_, (), bound, outputs)


DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def rows(dtype: str, target: Target) -> Report:
    """The kernel that adds rows to those of a table."""
    types = {
        "table": f"*{dtype}", "rows": f"*{dtype}", "named": "*i32", "order": "*i64", "base": "*fp32", "scale": "*fp32", "count": "i32",
        "width": "i32", "padding": "i32",
    }  # fmt: skip
    numbers = {"HAS_BASE": True, "HAS_SCALE": True, "ROWS": triton_rows.ROWS, "COLS": triton_rows.COLS}
    source = ASTSource(triton_rows.rows_kernel, types | dict.fromkeys(numbers, "constexpr"), numbers)
    return report(triton.compile(source, target=target.triton, options={"num_warps": triton_rows.WARPS}), target)


def attention(dtype: str, target: Target, whole: bool = False) -> Report:
    """The kernel that reads a part of a cache, or all of it: four queries to a head of keys, a mask of bool."""
    names = triton_attention.split_kernel.arg_names
    numbers = {"KIND": 1, "ROWS": 16, "D": 128, "COLUMNS": 128, "E": 128, "WIDE": 128} | dict.fromkeys(
        ("qd", "kd", "vd", "mc", "oe"), 1
    )
    numbers |= dict.fromkeys(("parts", "tops"), None) if whole else {}
    numbers |= {"STEP": triton_attention.STEP, "LOOK": triton_attention.LOOK, "EARLY": target.starts_early}
    types = dict.fromkeys(names, "i32") | dict.fromkeys(("query", "key", "value", "out"), f"*{dtype}")
    types |= {"mask": "*i1", "parts": "*fp32", "tops": "*fp32", "scale": "fp32"} | dict.fromkeys(numbers, "constexpr")
    aligned = {
        (at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if types[name].startswith("*") or (name[0] in "qkvo" and types[name] == "i32")
    }  # fmt: skip
    source = ASTSource(triton_attention.split_kernel, types, numbers, aligned)
    options = {
        "num_warps": triton_attention.WARPS,
        "num_stages": triton_attention.stages(16, 128, 128, DTYPES[dtype], target),
    }
    return report(triton.compile(source, target=target.triton, options=options), target)


ALONE = {
    "rows": rows,
    "attention": attention,
    "attention_whole": partial(attention, whole=True),
}  # kernels that are no programs


def compile_default(job: str) -> dict[str, Any]:
    """The first candidate's report, or the error."""
    name, target_name, dtype = job.split(":")
    start = time.perf_counter()
    try:
        target = TARGETS[target_name]
        if name in ALONE:
            return {"job": job, "tile": None, **dataclasses.asdict(ALONE[name](dtype, target)), "assembly": None}
        program, binding = bound(name, DTYPES[dtype])
        tiles, refused = TritonBackend().candidates(program, binding, target)
        if not tiles:
            return {"job": job, "error": "no legal tile: " + "; ".join(map(str, refused))}
        tile = tiles[int(os.environ.get("CANDIDATE", "0"))]
        found = dataclasses.asdict(cross_compile(program, tile, target))
        del found["assembly"]
    except Exception as error:  # a test reports it, with the job's name
        return {"job": job, "error": f"{type(error).__name__}: {str(error)[-2000:]}"}
    return {"job": job, "tile": dataclasses.asdict(tile), "seconds": round(time.perf_counter() - start, 2), **found}


if __name__ == "__main__":
    for each in sys.argv[1:] or sys.stdin.read().split():
        print(json.dumps(compile_default(each)), flush=True)
