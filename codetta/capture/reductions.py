"""Operators that reduce columns: sums, means, variances, and the norms that are one operator."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

from codetta import dsl
from codetta.capture.at import At
from codetta.capture.graph import CutError, RefusedError, Value
from codetta.capture.products import uses_of
from codetta.ir import view as views
from codetta.ir.graph import Node, Space, const, node
from codetta.ir.op import OPS
from codetta.ir.view import Dims
from codetta.rewrite.gradient import inner_product_moves
from codetta.rewrite.scale import ONE
from codetta.rewrite.statistic import variance_is_a_moment

aten = torch.ops.aten


def reduce(op: At) -> Value:
    """mean, sum, amax over the last columns: of the whole row, or of each group."""
    value, keep = op.operand(), op.option("keepdim", 2, False)
    count = len(value.dims)
    listed = op.arg(1)
    over = sorted(at % count for at in ([listed] if isinstance(listed, int) else listed or range(count)))
    return reduced(op, value, over, keep, op.packet)


def reduced(op: At, value: Value, over: list[int], keep: bool, packet: Any) -> Value:
    columns = views.factors(value.dims, "col")
    mine = [factor for at in over for factor in value.dims[at]]
    dims = tuple(() if at in over else dim for at, dim in enumerate(value.dims) if keep or at not in over)
    if mine and mine == views.factors(value.dims, "row") and packet is aten.sum:
        return Value(column_sum(op, value).node, dims)
    if not mine or any(factor.kind == "row" for factor in mine):
        raise RefusedError("reduces rows")
    if columns[-len(mine) :] != mine:
        raise RefusedError("reduces columns that are not the last ones")
    width = views.product(factor.size for factor in mine)
    factor = 1.0 / width if packet is aten.mean else 1.0
    whole = len(mine) == len(columns)
    moment = variance_is_a_moment(value.node) if whole and packet is not aten.amax else None
    if moment is not None:
        op.fired("variance_is_a_moment")
        result = _number(moment, factor)
    elif whole and packet is not aten.amax:
        result = row_total(op, value.node, factor)
    else:
        x = dsl.Value(early(op, value.node))
        if whole:
            total = dsl.row_max(x)
        else:
            total = dsl.group_max(x, width) if packet is aten.amax else dsl.group_sum(x, width)
        result = _number(total.node, factor)
    return Value(result, dims)


def row_total(op: At, value: Node, factor: float = 1.0) -> Node:
    """The sum of a row, by a factor: where the law allows, from what is known before its product."""
    moved = inner_product_moves(value, lambda product: uses_of(op, product)) if op.laws else None
    places = op.graph.placement
    if moved is not None and not any(places.is_late(node("mul", x, y)) for x, y in moved.pairs):
        by_group: dict[tuple[int, int], list[dsl.Value]] = {}
        for x, y in moved.pairs:
            each = dsl.Value(x) * dsl.Value(y)
            by_group.setdefault((places[each.node].group, x.space.cols), []).append(each)
        if all(group >= 0 for group, _ in by_group):
            op.fired("inner_product_moves")
            sums = [
                _number(dsl.row_sum(functools.reduce(operator.add, parts)).node, factor) for parts in by_group.values()
            ]
            total = functools.reduce(operator.add, map(dsl.Value, sums))
            return total.node if moved.scale is ONE else (total * dsl.Value(moved.scale)).node
    return _number(dsl.row_sum(dsl.Value(early(op, value))).node, factor)


def _number(total: Node, factor: float = 1.0) -> Node:
    """By a factor, even of one: a reduction of a whole row is not yet a number that others may compute with."""
    return node("mul", total, const(factor))


def column_sum(op: At, value: Value) -> Value:
    """Over all rows: the gradient of what is added to, or multiplied with, every row."""
    if not value.node.space.cols or value.node.space.rows != 1:
        raise RefusedError("reduces rows of what has no columns")
    order = views.factors(value.dims, "col")
    if [factor for dim in value.dims for factor in dim if factor.kind == "col"] != order:
        raise RefusedError("reduces rows, and its columns are not in order")
    total = dsl.col_sum(dsl.Value(early(op, value.node))).node
    return Value(total, tuple(dim for dim in value.dims if dim and dim[0].kind == "col"))


def early(op: At, value: Node) -> Node:
    """A value that is about to be reduced: its program must be able to."""
    if op.graph.placement.is_late(value):
        raise CutError(
            _made_of(op, value), "its rows are reduced, and it is known only behind the program that makes it"
        )
    return value


def _made_of(op: At, value: Node) -> Node:
    """What a value such as a square is made of, if that alone: whoever needs the one needs the other soon."""
    known = {each.node for each in op.graph.values.values()}
    while OPS[value.op].shape == "elementwise":
        wide = {arg for arg in value.args if arg.space.cols and arg.space.rows}
        if len(wide) != 1 or not wide <= known or not op.graph.placement.is_late(*wide):
            break
        (value,) = wide
    return value


def moments(op: At, value: Value, over: list[int]) -> tuple[dsl.Value, dsl.Value, int]:
    columns = views.factors(value.dims, "col")
    mine = [factor for at in over for factor in value.dims[at]]
    if mine != columns:
        raise RefusedError("takes the variance of some of the columns")
    both = node("row_moments", early(op, value.node))
    mean, var = (dsl.Value(node("moment", both, space=Space(1, 0), field=name)) for name in ("mean", "var"))
    return mean, var, views.product(factor.size for factor in mine)


def var_mean(op: At, index: int | None) -> Value:
    value = op.operand()
    count = len(value.dims)
    listed = op.arg(1)
    over = sorted(at % count for at in (listed if isinstance(listed, list | tuple) else [listed]))
    mean, var, width = moments(op, value, over)
    correction = op.fx.kwargs.get("correction", 1)
    keep = op.fx.kwargs.get("keepdim", False)
    if not isinstance(correction, int | float):
        correction = 1
    result = mean if index == 1 else var * (width / (width - correction))
    dims = tuple(() if at in over else dim for at, dim in enumerate(value.dims))
    return Value(result.node, dims if keep else tuple(dim for at, dim in enumerate(dims) if at not in over))


def variance(op: At) -> Value:
    return var_mean(op, 0)


def deviation(op: At) -> Value:
    value = var_mean(op, 0)
    return Value(dsl.sqrt(dsl.Value(value.node)).node, value.dims)


def layer_norm(op: At, index: int) -> Value:
    value, wanted = op.operand(), op.arg(1)
    over = list(range(len(value.dims) - len(wanted), len(value.dims)))
    mean, var, _ = moments(op, value, over)
    rstd = dsl.rsqrt(var + float(op.arg(4)))
    if index:
        dims = tuple(() if at in over else dim for at, dim in enumerate(value.dims))
        return Value((mean if index == 1 else rstd).node, dims)
    x = (dsl.Value(value.node) - mean) * rstd
    return Value(affine(op, x, value.dims, op.arg(2), op.arg(3)), value.dims)


def rms_norm(op: At) -> Value:
    value, wanted = op.operand(), op.arg(1)
    over = list(range(len(value.dims) - len(wanted), len(value.dims)))
    squares = Value((dsl.Value(value.node) * dsl.Value(value.node)).node, value.dims)
    mean = dsl.Value(reduced(op, squares, over, True, aten.mean).node)
    eps = op.arg(3)
    if eps is None:
        eps = torch.finfo(op.arg(0).meta["val"].dtype).eps
    scale = dsl.rsqrt(mean + float(eps))
    if scale.node.space.cols:
        scale = dsl.spread(scale, value.node.space.cols // scale.node.space.cols)
    x = dsl.Value(value.node) * scale
    return Value(affine(op, x, value.dims, op.arg(2), None), value.dims)


def affine(op: At, x: dsl.Value, dims: Dims, gain: Any, shift: Any) -> Node:
    if gain is not None:
        x = x * dsl.Value(op.leaf(gain, dims))
    if shift is not None:
        x = x + dsl.Value(op.leaf(shift, dims))
    return x.node
