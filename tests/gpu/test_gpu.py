"""The Triton backend on the GPU itself: every main loop, held to the error budget with poisoned outputs.

python -m pytest tests/gpu

The library's epilogues, the primitives of tests/test_triton.py at shapes that the copy engine can address, and random
programs. All kernels that are known beforehand are compiled side by side first, by processes that run this file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import oracle
import pytest
import test_triton as primitives
import torch
from case import Case, Spec
from generate import FEATURES, cases
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from codetta.backends.triton import TritonBackend, tune_key
from codetta.bench.samples import Sizes, library_names, sample
from codetta.bench.tune import tune
from codetta.plan.tile import Tile
from codetta.plan.tune import find, forget
from codetta.program import Program
from codetta.runtime.bind import Binding
from codetta.stat import Stat

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")

CUDA = torch.device("cuda")
ROWS = 200  # enough for large tiles, and no multiple of one
Call = tuple[Program, Binding]


# ---- what is run -------------------------------------------------------------------------------------------------


def library_call(name: str, ragged: bool, dtype: torch.dtype) -> Callable[[], Call]:
    rows, samples = (333, 1) if ragged else (512, 4)
    sizes = Sizes(rows, width=512, hidden=768, vocabulary=1000, head=128, samples=samples)
    return lambda: sample(name, sizes, CUDA, dtype).bind()


def few_rows(name: str, rows: int) -> Callable[[], Call]:
    sizes = Sizes(rows, width=512, hidden=768, vocabulary=1000, head=128, samples=1)
    return lambda: sample(name, sizes, CUDA, torch.bfloat16).bind()


def wide(case: Case) -> Case:
    """The case at a shape that every loop takes: bf16, K and the pitch of rows in whole copies."""
    return replace(case, k=128, dtype=torch.bfloat16)


def primitive_calls() -> dict[str, Callable[[], Call]]:
    found: dict[str, Case] = {}
    elementwise = list(primitives.ELEMENTWISE.values())
    for first in range(0, len(elementwise), 3):  # three to a kernel: compiling is what takes the time
        stores = ", ".join(f"'y{i}': {text}" for i, text in enumerate(elementwise[first : first + 3]))
        found[f"elementwise {first}"] = primitives.one("{" + stores + "}", lead=(ROWS,))
    for name, (text, parameters, specs) in primitives.operands(128).items():
        found[f"operand {name}"] = primitives.one("{'y': " + text + "}", *specs, parameters=parameters, lead=(3, 128))
    for name, line in primitives.COLUMNS.items():
        source = f"def random_epilogue(acc0):\n    {line}\n    return r\n"
        found[f"columns {name}"] = Case(source, (ROWS,), 128, (1024 if "far" in name else 512,), torch.bfloat16)
    for name, text in primitives.SINKS.items():
        picks = "pick" in name
        specs = (Spec("target", (ROWS,), torch.int64, "index", primitives.N),) if picks else ()
        found[f"sinks {name}"] = primitives.one(
            text, *specs, parameters="target: ct.Col" if picks else "", lead=(ROWS,)
        )
    for name, (text, cols) in primitives.PRODUCTS.items():
        found[f"products {name}"] = primitives.one(text, cols=cols, lead=(ROWS,))
    return {name: (lambda case=case: moved(wide(case))) for name, case in found.items()}  # type: ignore[misc]


def moved(case: Case) -> Call:
    """The case's call with its tensors on the GPU."""

    def move(value: Any) -> Any:
        if isinstance(value, Stat):
            return replace(value, partials=value.partials.to(CUDA))
        if not isinstance(value, Tensor):
            return value
        # A plain copy would close the gaps between rows, which are part of the case.
        room = torch.zeros(value.untyped_storage().nbytes() // value.element_size(), dtype=value.dtype, device=CUDA)
        new = room.as_strided(value.shape, value.stride(), value.storage_offset())
        return new.copy_(value.to(CUDA))

    operands = {name: move(value) for name, value in case.operands.items()}
    out = {name: move(value) for name, value in case.out.items()}
    return case.epilogue.bind(move(case.a), [move(w) for w in case.w], out=out, **operands)


CALLS: dict[str, Callable[[], Call]] = {
    **{f"{name} {dtype}": library_call(name, False, dtype) for name in library_names() for dtype in (torch.bfloat16,)},
    **{f"{name} ragged": library_call(name, True, torch.bfloat16) for name in library_names()},
    **{f"{name} {dtype}": library_call(name, False, dtype)
       for name in ("residual_stats", "norm_rope", "weight_gradient") for dtype in (torch.float16, torch.float32)},
    **{f"{name} of {rows}": few_rows(name, rows) for name in library_names() for rows in (1, 3, 16)},
    **primitive_calls(),
}  # fmt: skip


def one_of_each_loop(program: Program, binding: Binding) -> list[Tile]:
    """The best guess of each main loop that takes the call."""
    tiles, _ = TritonBackend().candidates(program, binding)
    first: dict[str, Tile] = {}
    for tile in tiles:
        first.setdefault(tile.loop, tile)
    return list(first.values())


@cache
def compiled() -> dict[str, str]:
    """Compile everything into Triton's cache, in processes side by side; errors by "call, tile", for the tests to report."""
    count = max(1, min(8, (os.cpu_count() or 1) // 2))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    workers = [
        subprocess.Popen(
            [sys.executable, __file__, str(number), str(count)], env=environment, stdout=subprocess.PIPE, text=True
        )
        for number in range(count)
    ]
    found: dict[str, str] = {}
    for worker in workers:
        out, _ = worker.communicate()
        assert worker.returncode == 0, f"a compiling process ended with {worker.returncode}"
        found |= json.loads(out.splitlines()[-1])
    return found


def compile_share(number: int, count: int) -> dict[str, str]:
    """One process's part of the calls."""
    errors = {}
    for name in list(CALLS)[number::count]:
        program, binding = CALLS[name]()
        for tile in one_of_each_loop(program, binding):
            try:
                TritonBackend().compile(program, binding, tile)
            except Exception as error:
                errors[f"{name}, {tile}"] = f"{type(error).__name__}: {error}"
    return errors


# ---- tests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_call(name: str) -> None:
    program, binding = CALLS[name]()
    tiles = one_of_each_loop(program, binding)
    assert tiles
    for tile in tiles:
        failure = compiled().get(f"{name}, {tile}")
        assert not failure, failure
        backend = primitives.Forced(tile)
        oracle.check(program, binding, backend, separate=tile.loop == "detached")
        oracle.check_bits(program, binding, backend)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), database=None, print_blob=True)
@given(cases(FEATURES))
def test_random_epilogues(case: Case) -> None:
    program, binding = moved(case)
    if TritonBackend().why_not(program, binding):
        return
    for tile in one_of_each_loop(program, binding)[:2]:
        oracle.check(program, binding, primitives.Forced(tile), separate=tile.loop == "detached")


def test_default_call_uses_the_kernel() -> None:
    call = sample("residual_stats", Sizes(512, 512, 768, head=128), CUDA)
    y, sumsq = call.epilogue(call.a, call.w, **call.operands)
    truth = call.a.double() @ call.w.double().T + call.operands["x"].double()  # type: ignore[union-attr]
    assert ((y.double() - truth).norm() / truth.norm()).item() < 5e-3
    assert ((sumsq.double() - truth.square().sum(1)).norm() / truth.square().sum(1).norm()).item() < 5e-3


def test_tune(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODETTA_CACHE", str(tmp_path))
    forget()
    program, binding = library_call("residual_stats", False, torch.bfloat16)()
    found = tune(program, binding, limit=6)
    assert found.tuned.ms <= found.tuned.default_ms
    forget()
    assert find(tune_key(program, binding)) == found.tuned
    assert TritonBackend().tile(program, binding) == found.tuned.tile
    oracle.check(program, binding, TritonBackend(), separate=True)


if __name__ == "__main__":
    print(json.dumps(compile_share(int(sys.argv[1]), int(sys.argv[2]))))
