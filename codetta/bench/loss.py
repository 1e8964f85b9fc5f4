"""`codetta bench loss`: a linear head with cross-entropy, forward and backward: time, memory and error, against the peers."""

from __future__ import annotations

import gc
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import codetta
from codetta.bench.run import Row
from codetta.bench.timing import medians

IMPLEMENTATIONS = ("eager", "compile", "liger", "cce", "codetta", "codetta-recompute")


def measure_loss(
    device: torch.device, rows: int = 0, width: int = 0, classes: int = 0, implementations: tuple[str, ...] = IMPLEMENTATIONS,
    rounds: int = 3,
) -> list[Row]:  # fmt: skip
    """A row for each contender: milliseconds, bytes beside what is given (on a GPU), and the errors of both gradients against float64."""
    gpu = device.type == "cuda"
    rows, width, classes = (
        rows or (16384 if gpu else 256),
        width or (2048 if gpu else 128),
        classes or (128256 if gpu else 1000),
    )
    torch.manual_seed(0)
    with torch.device(device):
        x = torch.randn(rows, width).to(torch.bfloat16).requires_grad_()
        weight = (torch.randn(classes, width) * width**-0.5 * 2).to(torch.bfloat16).requires_grad_()
        target = torch.randint(0, classes, (rows,))
    calls = {name: call for name in implementations if (call := _contender(name)) is not None}

    def step(call: Callable[..., Tensor]) -> Callable[[], tuple[Tensor, ...]]:
        return lambda: torch.autograd.grad(call(x, weight, target), (x, weight))

    steps = {name: step(call) for name, call in calls.items()}
    exact = _exact(x, weight, target)
    found: list[Row] = []
    for name, run in steps.items():
        run()  # compiles, too
        row: Row = {"rows": rows, "D": width, "V": classes, "impl": name}
        if gpu:
            gc.collect()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        gradients = run()
        if gpu:
            row["gib"] = round((torch.cuda.max_memory_allocated() - before) / 2**30, 3)
        for key, got, truth in zip(("dx_error", "dw_error"), gradients, exact, strict=True):
            row[key] = float(f"{_error(got, truth):.3e}")
        found.append(row)
        del gradients
    for name, ms in medians(steps, device, rounds=rounds, rep_ms=200.0).items():
        next(row for row in found if row["impl"] == name)["ms"] = round(ms, 3)
    torch._dynamo.reset()
    return found


def _contender(name: str) -> Any:
    """What somebody would call; None: not installed here."""
    if name in ("eager", "compile"):
        return torch.compile(_eager, dynamic=False) if name == "compile" else _eager
    if name == "liger":
        return _liger if importlib.util.find_spec("liger_kernel") is not None else None
    if name == "cce":
        return _cce if importlib.util.find_spec("cut_cross_entropy") is not None else None
    return partial(codetta.linear_cross_entropy, recompute=name.endswith("recompute"))


def _eager(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target)


def _liger(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    from liger_kernel.ops import LigerFusedLinearCrossEntropyFunction

    found: Tensor = LigerFusedLinearCrossEntropyFunction.apply(x, weight, target)[0]
    return found


def _cce(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    found: Tensor = linear_cross_entropy(x, weight, target)
    return found


def _exact(x: Tensor, weight: Tensor, target: Tensor, part: int = 2048) -> tuple[Tensor, Tensor]:
    """Both gradients in float64, a few rows at a time."""
    with torch.no_grad():
        wide, dw = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
        dx = torch.empty_like(x, dtype=torch.float64)
        for begin in range(0, x.shape[0], part):
            at = slice(begin, begin + part)
            rows = x[at].double()
            dz = torch.softmax(rows @ wide.t(), -1)
            dz[torch.arange(len(rows), device=x.device), target[at]] -= 1.0
            dz /= x.shape[0]
            dx[at] = dz @ wide
            dw += dz.t() @ rows
    return dx, dw


def _error(got: Tensor, truth: Tensor) -> float:
    return float((got.double() - truth).norm() / truth.norm())
