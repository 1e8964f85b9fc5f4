"""`codetta demo`: a Transformer block's epilogues on whatever hardware is here, checked, counted and timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from codetta import library
from codetta.bench.kernels import cases, errors
from codetta.bench.run import DTYPES, prepared
from codetta.bench.timing import medians
from codetta.plan.cost import bytes_moved, bytes_unfused
from codetta.verify import EPS

NAMES = (
    "residual_stats", "norm_swiglu", "bias_gelu", "norm_rope", "gate_residual", "lse_target", "swiglu_backward", "norm_backward",
)  # fmt: skip


@dataclass(frozen=True)
class Shown:
    """One row of the demo's table."""

    name: str
    equation: str
    backend: str
    why: str  # why it is not a fast backend, if it is not
    bytes_before: int
    bytes_after: int
    ms: float
    eager_ms: float
    error: float
    eager_error: float
    within_budget: bool


def sizes(device: torch.device) -> tuple[int, int, int, str]:
    """rows, D, F, dtype: a second or two of work in all."""
    return (8192, 4096, 14336, "bf16") if device.type == "cuda" else (512, 1024, 2816, "fp32")


def demo(device: torch.device) -> Iterator[Shown]:
    rows, d, f, dtype = sizes(device)
    for name in NAMES:
        case = cases(d, f, rows, device, DTYPES[dtype], vocabulary=32768 if device.type == "cuda" else 4096, names={name})[0]  # fmt: skip
        program, binding = case.bind()
        ours, backend, _, why = prepared(case)
        with torch.no_grad():
            error, eager_error = errors(case, backend)
            tensors = case.tensors()
            eager = case.eager
            times = medians({"ours": ours, "eager": lambda run=eager, given=tensors: run(*given)}, device, rep_ms=150.0)  # type: ignore[misc]
        yield Shown(
            name, equation(name), backend, why, bytes_unfused(program, rows, binding.samples), bytes_moved(program, rows, binding.samples),
            times["ours"], times["eager"], error, eager_error, error <= 2 * eager_error + EPS[DTYPES[dtype]],
        )  # fmt: skip


def equation(name: str) -> str:
    """The first line of what the library says of the epilogue."""
    text = (getattr(library, name).__doc__ or "").strip().splitlines()
    return text[0].rstrip(".") if text else name
