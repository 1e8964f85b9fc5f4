"""Operators that only gradients have: those of activations, and of the norms that are one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from codetta import dsl
from codetta.capture.at import At
from codetta.capture.graph import RefusedError, Value
from codetta.capture.reductions import column_sum, row_total
from codetta.ir import view as views
from codetta.library import ACTIVATIONS

aten = torch.ops.aten


def activation(name: str) -> Callable[[At], Value]:
    """gradient · φ'(x), of the activation's input."""
    return lambda op: op.elementwise(lambda g, x: g * ACTIVATIONS[name].slope(x), op.fx.args[:2])


def gelu(op: At) -> Value:
    kind = op.fx.kwargs.get("approximate", "none")
    return activation("gelu_tanh" if kind == "tanh" else "gelu")(op)


def tanh(op: At) -> Value:
    return op.elementwise(lambda g, y: g * (1.0 - y * y), op.fx.args[:2])


def sigmoid(op: At) -> Value:
    return op.elementwise(lambda g, y: g * y * (1.0 - y), op.fx.args[:2])


def threshold(op: At) -> Value:
    limit: Any = op.arg(2)
    return op.elementwise(lambda g, x: dsl.where(x <= limit, 0.0, g), op.fx.args[:2])


def _over_columns(op: At, args: tuple[Any, ...], wanted: Any) -> tuple[list[dsl.Value], views.Dims]:
    """What a norm's gradient is made of, laid out as the gradient that is given."""
    if len(wanted) != 1:
        raise RefusedError("a norm over several dimensions")
    values, dims = op.meet(args, at=args[0])
    if not views.has_columns_last(dims):
        raise RefusedError("a norm over something else than the columns")
    return values, dims


def layer_norm(op: At, index: int) -> Value:
    """Of native_layer_norm_backward(g, x, shape, mean, rstd, weight, bias, mask): the gradient of x, of the weight, of the bias."""
    grad, x, wanted, mean, rstd, weight = op.fx.args[:6]
    values, dims = _over_columns(op, (grad, x, mean, rstd), wanted)
    g, normal = values[0], (values[1] - values[2]) * values[3]
    if index:
        return column_sum(op, Value((g * normal if index == 1 else g).node, dims))
    gained = g if weight is None else g * dsl.Value(op.leaf(weight, dims))  # type: ignore[arg-type]
    width = views.product(factor.size for factor in dims[-1])
    sums = [dsl.Value(row_total(op, each.node, 1.0 / width)) for each in (gained, gained * normal)]
    return Value(((gained - sums[0] - normal * sums[1]) * values[3]).node, dims)


def rms_norm(op: At, index: int) -> Value:
    """Of _fused_rms_norm_backward(g, x, shape, rstd, weight, mask): the gradient of x, and of the weight."""
    grad, x, wanted, rstd, weight = op.fx.args[:5]
    values, dims = _over_columns(op, (grad, x, rstd), wanted)
    g, normal = values[0], values[1] * values[2]
    if index:
        return column_sum(op, Value((g * normal).node, dims))
    gained = g if weight is None else g * dsl.Value(op.leaf(weight, dims))  # type: ignore[arg-type]
    width = views.product(factor.size for factor in dims[-1])
    inner = dsl.Value(row_total(op, (gained * normal).node, 1.0 / width))
    return Value(((gained - normal * inner) * values[2]).node, dims)
