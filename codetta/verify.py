"""Verify: a compiled model's error against float64, beside eager's own, output by output."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from codetta.errors import ArgumentError
from codetta.integrations.dynamo import compile
from codetta.options import Options

# The budget is twice eager's error and this.
EPS = {torch.float32: 2e-6, torch.bfloat16: 5e-4, torch.float16: 1e-4, torch.float64: 1e-12}


@dataclass(frozen=True)
class Verdict:
    """One output: relative errors against float64, and whether ours is within twice eager's and a little."""

    output: str
    error: float
    eager_error: float
    within_budget: bool

    def __str__(self) -> str:
        mark = "ok" if self.within_budget else "OVER"
        return f"{self.output}: {self.error:.3e} (eager {self.eager_error:.3e}) {mark}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def verify(model: nn.Module, *inputs: Any, options: Options | None = None, **named: Any) -> list[Verdict]:
    """Run the model plain, compiled and in float64 on the same inputs, and compare every floating output."""
    if not isinstance(model, nn.Module):
        raise ArgumentError("model", f"is a {type(model).__name__}", "pass an nn.Module")
    plain = copy.copy(model)
    plain._compiled_call_impl = None
    ours = copy.copy(plain)
    compile(ours, options=options)
    with torch.no_grad():
        got, eager = ours(*inputs, **named), plain(*inputs, **named)
        wide = copy.deepcopy(plain).double()
        truth = wide(*pytree.tree_map(_double, inputs), **pytree.tree_map(_double, named))
    verdicts = []
    for (path, x), (_, y), (_, t) in zip(_outputs(got), _outputs(eager), _outputs(truth), strict=True):
        error, theirs = _error(x, t), _error(y, t)
        verdicts.append(Verdict(path, error, theirs, error <= 2 * theirs + EPS[x.dtype]))
    return verdicts


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _outputs(result: Any) -> list[tuple[str, Tensor]]:
    leaves = pytree.tree_flatten_with_path(result)[0]
    return [
        (pytree.keystr(path) or "output", leaf)
        for path, leaf in leaves
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    ]


def _error(x: Tensor, truth: Tensor) -> float:
    """The relative error in the Euclidean norm; not-a-numbers must be where the truth has them."""
    x, truth = x.double(), truth.double()
    if not torch.equal(x.isnan(), truth.isnan()):
        return float("inf")
    x, truth = x.nan_to_num(), truth.nan_to_num()
    return float((x - truth).norm() / truth.norm().clamp_min(1e-300))
