"""The table: which handler reads which aten operator. A new operator is one row."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from codetta import dsl
from codetta.capture import columns, gradients, reductions
from codetta.capture.at import At, is_tensor
from codetta.capture.graph import FLOATS, RefusedError, Value
from codetta.capture.products import product

aten = torch.ops.aten


def value_of(op: At) -> Value | None:
    """The value of the operator, None if it does not depend on a product."""
    if op.fx.target is operator.getitem:
        return item(op)
    packet = op.packet
    if packet in (aten.mm, aten.addmm):
        return product(op)
    if not any(arg in op.graph.values for arg in op.fx.all_input_nodes):
        return None
    handler = _HANDLERS.get(packet)
    if handler is None:
        if packet in _LATER:
            return None  # its items are looked at one by one
        raise RefusedError("has no meaning on tiles")
    if not is_tensor(op.fx) or op.fx.meta["val"].dtype not in FLOATS:
        raise RefusedError(f"makes {getattr(op.fx.meta.get('val'), 'dtype', 'no tensor')}")
    return handler(op)


def item(op: At) -> Value | None:
    """One result of an operator with several."""
    source, index = op.fx.args
    assert isinstance(source, fx.Node) and isinstance(index, int)
    inner = At(op.graph, source, op.laws)
    packet = inner.packet
    if not source.args or not isinstance(source.args[0], fx.Node) or source.args[0] not in op.graph.values:
        return None
    if packet in (aten.split, aten.split_with_sizes, aten.chunk, aten.unbind):
        return columns.split(inner, index)
    if packet is aten.native_layer_norm:
        return reductions.layer_norm(inner, index)
    if packet is aten.var_mean:
        return reductions.var_mean(inner, index)
    if packet is aten._fused_rms_norm and index == 0:
        return reductions.rms_norm(inner)
    if packet is aten.native_layer_norm_backward:
        return gradients.layer_norm(inner, index)
    if packet is aten._fused_rms_norm_backward:
        return gradients.rms_norm(inner, index)
    raise RefusedError("has no meaning on tiles")


def _unary(meaning: Callable[..., dsl.Value]) -> Callable[[At], Value]:
    return lambda at: at.elementwise(meaning, at.fx.args[:1])


def _binary(meaning: Callable[..., dsl.Value]) -> Callable[[At], Value]:
    def handler(at: At) -> Value:
        x, y = at.fx.args[:2]
        alpha = at.fx.kwargs.get("alpha", 1)
        if not isinstance(alpha, int | float) or at.fx.kwargs.get("rounding_mode"):
            raise RefusedError("rounds its quotient, or scales by what is not a number")
        return at.elementwise(lambda a, b: meaning(a, b * alpha if alpha != 1 else b), (x, y))

    return handler


def _rsub(at: At) -> Value:
    x, y = at.fx.args[:2]
    alpha: Any = at.fx.kwargs.get("alpha", at.arg(2, 1))
    return at.elementwise(lambda a, b: b - (a * alpha if alpha != 1 else a), (x, y))


def _pow(at: At) -> Value:
    power = at.arg(1)
    if not isinstance(power, int | float):
        raise RefusedError("its power is not a number")
    whole = int(power) if float(power).is_integer() else power
    if whole == -1:
        return at.elementwise(lambda x: 1.0 / x, at.fx.args[:1])
    return at.elementwise(lambda x: x**whole, at.fx.args[:1])


def _clamp(at: At) -> Value:
    low, high = at.option("min", 1, None), at.option("max", 2, None)

    def meaning(x: dsl.Value) -> dsl.Value:
        x = dsl.maximum(x, low) if low is not None else x
        return dsl.minimum(x, high) if high is not None else x

    return at.elementwise(meaning, at.fx.args[:1])


def _gelu(at: At) -> Value:
    kind: Any = at.fx.kwargs.get("approximate", "none")
    return at.elementwise(lambda x: dsl.gelu(x, kind), at.fx.args[:1])


_HANDLERS: dict[Any, Callable[[At], Value]] = {
    aten.view: columns.reshape, aten._unsafe_view: columns.reshape, aten.reshape: columns.reshape, aten.squeeze: columns.reshape,
    aten.t: columns.permute, aten.transpose: columns.permute, aten.permute: columns.permute, aten.unsqueeze: columns.unsqueeze,
    aten.clone: columns.same, aten.alias: columns.same, aten.detach: columns.same, aten._to_copy: columns.to_copy,
    aten.expand: columns.expand, aten.slice: columns.slice, aten.select: columns.select, aten.cat: columns.cat, aten.stack: columns.stack,
    aten.add: _binary(lambda x, y: x + y), aten.sub: _binary(lambda x, y: x - y), aten.rsub: _rsub,
    aten.mul: _binary(lambda x, y: x * y), aten.div: _binary(lambda x, y: x / y),
    aten.maximum: _binary(dsl.maximum), aten.minimum: _binary(dsl.minimum),
    aten.neg: _unary(lambda x: -x), aten.abs: _unary(abs), aten.exp: _unary(dsl.exp), aten.log: _unary(dsl.log),
    aten.sqrt: _unary(dsl.sqrt), aten.rsqrt: _unary(dsl.rsqrt), aten.tanh: _unary(dsl.tanh), aten.sigmoid: _unary(dsl.sigmoid),
    aten.erf: _unary(dsl.erf), aten.erfc: _unary(dsl.erfc), aten.relu: _unary(dsl.relu), aten.silu: _unary(dsl.silu), aten.gelu: _gelu,
    aten.reciprocal: _unary(lambda x: 1.0 / x), aten.square: _unary(lambda x: x * x), aten.pow: _pow, aten.clamp: _clamp,
    aten.silu_backward: gradients.activation("silu"), aten.gelu_backward: gradients.gelu, aten.tanh_backward: gradients.tanh,
    aten.sigmoid_backward: gradients.sigmoid, aten.threshold_backward: gradients.threshold,
    aten.mean: reductions.reduce, aten.sum: reductions.reduce, aten.amax: reductions.reduce, aten.var: reductions.variance, aten.std: reductions.deviation,
}  # fmt: skip
_LATER = (
    aten.split,
    aten.split_with_sizes,
    aten.chunk,
    aten.unbind,
    aten.native_layer_norm,
    aten.var_mean,
    aten._fused_rms_norm,
    aten.native_layer_norm_backward,
    aten._fused_rms_norm_backward,
)
