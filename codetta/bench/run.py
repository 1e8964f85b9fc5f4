"""`codetta bench kernels`: the library's programs against the bare product, eager PyTorch and torch.compile.

The protocol: tensors of one case at a time; the error of ours and of eager against float64; then all contenders in one
interleaved run (`timing.medians`), ours with program, tensors and tile bound once. A run also measures what the device
can do at most, reading memory and multiplying, and ends as one record that says where and with what it was made.
"""

from __future__ import annotations

import datetime
import gc
import json
import math
import platform
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import codetta
from codetta import dispatch
from codetta.backends.base import Backend
from codetta.bench.kernels import NAMES, Case, cases, errors
from codetta.bench.timing import medians
from codetta.errors import ArgumentError
from codetta.verify import EPS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GPU_SIZES = ((2048, 8192), (4096, 14336), (8192, 28672))
CPU_SIZES = ((1024, 2816),)
VOCABULARY = {"cuda": 32768, "cpu": 4096}  # columns of the programs that end in logits

Row = dict[str, Any]


@dataclass(frozen=True)
class KernelBench:
    """What to measure. Fields left empty follow the device."""

    device: torch.device
    rows: int = 0
    sizes: tuple[tuple[int, int], ...] = ()
    dtypes: tuple[str, ...] = ()
    names: tuple[str, ...] = NAMES
    rounds: int = 3
    rep_ms: float = 0.0
    compiled: bool = True
    max_autotune: bool = False

    def __post_init__(self) -> None:
        unknown = [name for name in self.names if name not in NAMES]
        if unknown:
            raise ArgumentError("only", f"{unknown[0]!r} is no benchmark", f"use some of {', '.join(NAMES)}")
        for name in self.dtypes:
            if name not in DTYPES:
                raise ArgumentError("dtype", f"{name!r} is unknown", f"use one of {', '.join(DTYPES)}")
        for d, f in self.sizes:
            if d < 64 or d % 64 or f < 1:
                raise ArgumentError("sizes", f"{d},{f} is no model", "pass D,F with D a multiple of 64")
        if self.rows < 0 or self.rounds < 1:
            raise ArgumentError("rows", f"{self.rows} rows in {self.rounds} rounds", "pass positive numbers")

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def jobs(self) -> list[tuple[int, int, str, str]]:
        """(D, F, dtype, name) of every row, in order."""
        sizes = self.sizes or (GPU_SIZES if self.on_gpu else CPU_SIZES)
        dtypes = self.dtypes or (("bf16",) if self.on_gpu else ("fp32", "bf16"))
        return [(d, f, dtype, name) for d, f in sizes for dtype in dtypes for name in self.names]

    def case(self, d: int, f: int, dtype: str, name: str) -> Case:
        rows = self.rows or (16384 if self.on_gpu else 512)
        return cases(d, f, rows, self.device, DTYPES[dtype], VOCABULARY[self.device.type], {name})[0]


@dataclass
class Record:
    """One run, as it is kept in benchmarks/results."""

    bench: str
    device: str
    command: str
    rows: list[Row] = field(default_factory=list)
    ceilings: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=lambda: versions())
    date: str = field(default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"))
    commit: str = field(default_factory=lambda: commit())

    def json(self) -> dict[str, Any]:
        keys = ("bench", "device", "versions", "date", "commit", "command", "ceilings", "rows")
        return {key: getattr(self, key) for key in keys}

    def part(self, rows: list[Row]) -> Record:
        """The same run with some of its rows: what is done is kept, whatever becomes of the rest."""
        return replace(self, rows=rows)

    def append_to(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(self.json()) + "\n")


def run_kernels(bench: KernelBench, command: str, on_row: Callable[[Row], None] | None = None) -> Record:
    """Measure every case; `on_row` hears of each row as it is done."""
    record = Record("kernels", device_name(bench.device), command)
    record.ceilings = ceilings(bench.device)
    for job in bench.jobs():
        row = measure(bench, *job)
        record.rows.append(row)
        if on_row is not None:
            on_row(row)
        # The tensors of a case take gigabytes, and what was compiled for their shapes is of no further use.
        gc.collect()
        torch._dynamo.reset()
        if bench.on_gpu:
            torch.cuda.empty_cache()
    return record


def measure(bench: KernelBench, d: int, f: int, dtype: str, name: str) -> Row:
    """One row: the errors, then the times of all contenders in turns."""
    case = bench.case(d, f, dtype, name)
    ours, backend, tile, why = prepared(case)
    tensors = case.tensors()
    m, n, k = case.shape
    outs = [torch.empty(m, w.shape[0], device=bench.device, dtype=case.a.dtype) for w in case.weights]

    a = case.a if case.a.dim() == 2 else case.a.flatten(0, -2)

    def product() -> None:
        for w, out in zip(case.weights, outs, strict=True):
            torch.mm(a, w.T, out=out)

    contenders: dict[str, Callable[[], object]] = {
        "ms": ours,
        "cublas_ms": product,
        "eager_ms": lambda: case.eager(*tensors),
    }
    with torch.no_grad():
        mine, theirs = errors(case, backend)
        if bench.compiled:
            mode = "max-autotune-no-cudagraphs" if bench.max_autotune else "default"
            compiled = torch.compile(case.eager, dynamic=False, fullgraph=True, mode=mode)
            contenders["compile_ms"] = lambda: compiled(*tensors)
        rep_ms = bench.rep_ms or (60.0 if bench.on_gpu else 200.0)
        times = medians(contenders, bench.device, rounds=bench.rounds, rep_ms=rep_ms)
    row: Row = {"program": name, "dtype": dtype, "M": m, "N": n, "K": k}
    for key in ("ms", "cublas_ms", "compile_ms", "eager_ms"):
        row[key] = round(times[key], 5) if key in times else None
    row |= {"err_ratio": round(mine / theirs, 3), "err": mine, "within_budget": mine <= 2 * theirs + EPS[DTYPES[dtype]], "tile": tile, "backend": backend}  # fmt: skip
    return row | ({"why": why} if why else {})


def prepared(case: Case) -> tuple[Callable[[], object], str, str, str]:
    """Our contender with everything bound once; its backend and tile, and why it is not a fast backend, if it is not."""
    program, binding = case.bind()
    try:
        backend, reasons = dispatch.choose(program, binding)
    except ImportError as error:
        backend, reasons = dispatch.load_backend("reference"), [error]  # type: ignore[list-item]
    why = "; ".join(str(reason) for reason in reasons)
    if backend.name != "triton":
        return lambda: backend.run(program, binding), backend.name, "", why
    from codetta.backends.triton import TritonBackend

    triton: Backend = backend
    assert isinstance(triton, TritonBackend)
    tile = triton.tile(program, binding)
    return triton.prepare(program, binding, tile), "triton", str(tile), why


def ceilings(device: torch.device) -> dict[str, float]:
    """What the device reads and multiplies at most: terabytes and tera-operations per second."""
    gpu = device.type == "cuda"
    x = torch.ones(2**29 if gpu else 2**26, device=device)
    size, dtype = (8192, torch.bfloat16) if gpu else (1024, torch.float32)
    # Random numbers: a card that multiplies zeros stays cool and fast.
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    # A CPU's sum is not as fast as its memory (43 and 56 GB/s on two cores of Zen 4), the largest number is.
    read = x.sum if gpu else x.amax
    times = medians({"read": lambda: read(), "product": lambda: torch.mm(a, b, out=out)}, device, rounds=2)
    return {
        "read_tbs": round(x.numel() * x.element_size() / times["read"] / 1e9, 3),
        "matmul_tflops": round(2 * size**3 / times["product"] / 1e9, 2),
    }


def geometric_means(rows: Iterable[Row]) -> dict[str, float | None]:
    """How many times faster than the bare product, torch.compile and eager, over all rows; None where nothing is known."""
    rows = list(rows)
    means: dict[str, float | None] = {}
    for key in ("cublas_ms", "compile_ms", "eager_ms"):
        logs = [math.log(row[key] / row["ms"]) for row in rows if row.get(key)]
        means[key.removesuffix("_ms")] = round(math.exp(sum(logs) / len(logs)), 4) if logs else None
    return means


def versions() -> dict[str, str]:
    found = {"codetta": codetta.__version__, "torch": torch.__version__, "python": platform.python_version()}
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = "absent"
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
    if torch.version.hip:
        found["hip"] = torch.version.hip
    return found


def commit() -> str:
    """The commit of the source that runs, marked if files differ from it; empty outside a repository."""
    folder = Path(codetta.__file__).parent
    try:
        head = _git(folder, "rev-parse", "--short", "HEAD")
        return head + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no", ".") else "")
    except (OSError, subprocess.CalledProcessError):
        return ""


def _git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return f"{name}, {torch.get_num_threads()} threads"
