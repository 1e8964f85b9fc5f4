"""Operators that move rows and columns about: reshapes, transposes, cuts, joins and repeats."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from codetta import dsl
from codetta.capture.at import At, same_factors, shape
from codetta.capture.graph import FLOATS, Leaf, RefusedError, Value, Weight
from codetta.capture.kinds import call, packet_of
from codetta.ir import view as views
from codetta.ir.graph import Node, Space, node
from codetta.ir.op import OPS
from codetta.program import Operand

aten = torch.ops.aten


def reshape(op: At) -> Value:
    value = op.operand()
    dims = views.reshape(value.dims, shape(op.fx))
    if dims is None:
        raise RefusedError("cuts through rows or columns whose size is not known")
    if not all(views.in_order(dim) for dim in dims):
        raise RefusedError("merges rows or columns out of their order")
    return Value(value.node, dims)


def permute(op: At) -> Value:
    value = op.operand()
    count = len(value.dims)
    order = list(range(count))
    if op.packet is aten.permute:
        order = [at % count for at in op.arg(1)]
    else:
        x, y = (0, 1) if op.packet is aten.t else (op.arg(1) % count, op.arg(2) % count)
        order[x], order[y] = order[y], order[x]
    return Value(value.node, views.permute(value.dims, order))


def unsqueeze(op: At) -> Value:
    value, at = op.operand(), op.arg(1)
    at = at % (len(value.dims) + 1)
    return Value(value.node, (*value.dims[:at], (), *value.dims[at:]))


def same(op: At) -> Value:
    return op.operand(repeated=True)


def to_copy(op: At) -> Value:
    arg = op.arg(0)
    if arg.meta["val"].dtype not in FLOATS:
        raise RefusedError(f"casts from {arg.meta['val'].dtype}")
    if arg.meta["val"].device != op.fx.meta["val"].device:
        raise RefusedError("moves to another device")
    value = op.operand(repeated=True)
    dtype = op.fx.meta["val"].dtype
    if len(arg.users) == 1 and dtype.itemsize < arg.meta["val"].dtype.itemsize:
        op.graph.dtypes[value.node] = dtype  # nobody has the wider one
    return value


def expand(op: At) -> Value:
    """x repeated between its columns  ->  join(x, x, ...)

    Exact. Keys and values that several queries share are stored once for each by the program that makes them. Refuses repeated
    rows.
    """
    value, wanted = op.operand(), shape(op.fx)
    have = views.shape_of(value.dims)
    if len(have) != len(wanted):
        raise RefusedError("adds dimensions")
    grown = [at for at, (old, new) in enumerate(zip(have, wanted, strict=True)) if not views.same(old, new)]
    if not grown or (value.node.space.cols == 0 and grown == [len(have) - 1]):
        return value  # one number for each row stays one
    if len(grown) > 1 or not isinstance(wanted[grown[0]], int):
        raise RefusedError("repeats rows")
    at, times = grown[0], wanted[grown[0]]
    columns = views.factors(value.dims, "col")
    after = [factor for dim in value.dims[at + 1 :] for factor in dim if factor.kind == "col"]
    before = [factor for dim in value.dims[:at] for factor in dim if factor.kind == "col"]
    if before + after != columns or not after:
        raise RefusedError("repeats columns out of their order")
    block = views.product(factor.size for factor in after) * times
    joined = dsl.join(*[dsl.Value(value.node)] * times, block=block)
    dims = list(views.with_room(value.dims, len(before)))
    dims[at] = (views.Factor("col", (len(before),), times),)
    return Value(joined.node, tuple(dims))


def slice(op: At) -> Value:
    value, at = op.operand(), op.arg(1, 0) % len(op.operand().dims)
    start, stop, step = op.arg(2, 0) or 0, op.arg(3, None), op.arg(4, 1)
    size = views.shape_of(value.dims)[at]
    if not isinstance(start, int) or not isinstance(step, int):
        raise RefusedError("cuts at a place that is not a number")
    if start == 0 and step == 1 and views.same(shape(op.fx)[at], size):
        return value
    if not isinstance(size, int) or not (stop is None or isinstance(stop, int)):
        raise RefusedError("cuts rows")
    stop = size if stop is None else min(stop if stop >= 0 else stop + size, size)
    start = start if start >= 0 else start + size
    return cut(op, value, at, start, stop, step)


def cut(op: At, value: Value, at: int, start: int, stop: int, step: int = 1) -> Value:
    """Columns start to stop of one dimension."""
    dim = value.dims[at]
    if len(dim) != 1 or dim[0].kind != "col":
        raise RefusedError("cuts rows")
    factor, columns = dim[0], views.factors(value.dims, "col")
    inner = views.product(each.size for each in columns[columns.index(factor) + 1 :])
    length = len(range(start, stop, step))
    if not length:
        raise RefusedError("keeps nothing")
    dims = (*value.dims[:at], (views.Factor("col", factor.place, length),), *value.dims[at + 1 :])
    if step != 1:
        if factor.size % step or start >= step or length != factor.size // step:
            raise RefusedError("takes every other column, but not all of them")
        if inner != 1:
            raise RefusedError("takes every other group of columns")
        return Value(dsl.parts(dsl.Value(value.node), step, step)[start].node, dims)
    # Where the whole is read as well, its columns must stay together.
    if factor is columns[0] and only_cut(op.fx.args[0]):
        narrowed = cut_commutes(op, value.node, start * inner, stop * inner)
        if narrowed is not None:
            op.fired("cut_commutes")
            return Value(narrowed, dims)
    unit = math.gcd(start, length, factor.size)
    pieces = dsl.parts(dsl.Value(value.node), factor.size // unit, factor.size * inner)
    mine = pieces[start // unit : stop // unit]
    return Value((mine[0] if len(mine) == 1 else dsl.join(*mine, block=length * inner)).node, dims)


def only_cut(source: Any) -> bool:
    """Whether everybody who reads the value reads some of its columns, directly or behind a reshape."""
    for user in source.users:
        packet = packet_of(user)
        if packet in (aten.view, aten._unsafe_view, aten.reshape):
            if not only_cut(user):
                return False
        elif packet not in (aten.slice, aten.split, aten.split_with_sizes, aten.chunk, aten.unbind, aten.select):
            return False
    return True


def cut_commutes(op: At, value: Node, start: int, stop: int) -> Node | None:
    """(x W + b)[columns from i to j]  ->  x W[i to j] + b[i to j]

    Exact. A weight that holds queries, keys and values, or gate and up, is read as several: views of its rows, no copies. Refuses
    (None) values that regroup columns, and values that are read as a whole as well.
    """
    if not value.space.cols:
        return value
    attrs: dict[str, Any] = dict(value.attrs)
    match value.op:
        case "product":
            name = narrow_weight(op, value.attr("weight"), start, stop)
            attrs["weight"] = name
            made = node("product", *value.args, space=Space(1, stop - start), **attrs)
            op.graph.dtypes.setdefault(made, op.graph.dtypes[value])
            op.graph.origin.setdefault(made, op.graph.origin[value])
            return made
        case "vector":
            attrs["weight"] = narrow_weight(op, value.attr("weight"), start, stop)
            return node("vector", *value.args, space=Space(0, stop - start), **attrs)
        case "load" if not value.attr("period") and value.space.rows == 0:
            leaf = op.graph.leaves[value.attr("name")]
            return cut_leaf(op, leaf, start, stop)
        case "const":
            return value
    if value.args and OPS[value.op].shape == "elementwise":
        args = [cut_commutes(op, arg, start, stop) for arg in value.args]
        if all(arg is not None for arg in args):
            return node(value.op, *(arg for arg in args if arg is not None), **attrs)
    return None


def narrow_weight(op: At, name: str, start: int, stop: int) -> str:
    weight = op.graph.weights[name]
    return op.weight_name(Weight(weight.source, weight.transposed, weight.start + start, weight.start + stop))


def cut_leaf(op: At, leaf: Leaf, start: int, stop: int) -> Node | None:
    """Columns of a table that has one row; they may be several of its dimensions."""
    source, graph = leaf.source, op.graph
    if source not in graph.constant:
        return None
    with graph.nodes.inserting_before(source.next):
        if leaf.order != (len(shape(source)) - 1,):
            order = [*(at for at in range(len(shape(source))) if at not in leaf.order), *leaf.order]
            turned = call(graph.nodes, aten.permute.default, source, order)
            source = call(graph.nodes, aten.reshape.default, turned, [leaf.operand.cols])
            graph.constant |= {turned, source}
        cut = call(graph.nodes, aten.slice.Tensor, source, -1, start, stop)
    graph.constant.add(cut)
    operand = Operand("", leaf.operand.dtype, "none", stop - start)
    return op.leaf_node(cut, operand, (len(shape(cut)) - 1,), stop - start)


def split(op: At, index: int) -> Value:
    """One of the pieces that a dimension is cut into; of unbind, one column without its dimension."""
    value, pieces = op.operand(), list(op.fx.meta["val"])
    if op.packet is aten.unbind:
        return select_column(op, value, op.option("dim", 1, 0) % len(value.dims), index)
    at = op.option("dim", 2, 0) % len(value.dims)
    lengths = [list(each.shape)[at] for each in pieces]
    if not all(isinstance(length, int) for length in lengths):
        raise RefusedError("cuts rows")
    start = sum(lengths[:index])
    return cut(op, value, at, start, start + lengths[index])


def select(op: At) -> Value:
    value = op.operand()
    at, index = op.arg(1) % len(value.dims), op.arg(2)
    size = views.shape_of(value.dims)[at]
    if not isinstance(size, int) or not isinstance(index, int):
        raise RefusedError("cuts rows")
    return select_column(op, value, at, index % size)


def select_column(op: At, value: Value, at: int, index: int) -> Value:
    single = cut(op, value, at, index, index + 1)
    return Value(single.node, (*single.dims[:at], *single.dims[at + 1 :]))


def cat(op: At) -> Value:
    at = op.arg(1, 0) % len(shape(op.fx))
    # An empty tensor joins nothing, whatever its shape: key-value caches begin as one of shape (0,).
    parts = [part for part in op.arg(0) if not any(views.same(size, 0) for size in shape(part))]
    if not parts:
        raise RefusedError("joins nothing")
    if len(parts) == 1 and parts[0] in op.graph.values:
        return op.graph.values[parts[0]]
    if not all(isinstance(part, fx.Node) and part in op.graph.values for part in parts):
        raise RefusedError("joins values with tensors that no product made")
    pieces = [op.graph.values[part] for part in parts]
    places = op.graph.placement
    groups = {places[piece.node].group for piece in pieces}
    if len(groups) > 1 and any(group >= 0 and places.groups[group].base is None for group in groups):
        raise RefusedError("joins what several programs make: they store it side by side")
    first = pieces[0]
    dim = first.dims[at]
    columns = views.factors(first.dims, "col")
    if len(dim) != 1 or dim[0].kind != "col":
        raise RefusedError("joins rows")
    inner = views.product(each.size for each in columns[columns.index(dim[0]) + 1 :])
    lengths = []
    for piece in pieces:
        mine = piece.dims[at]
        if len(mine) != 1 or mine[0].kind != "col":
            raise RefusedError("joins rows")
        for other, factors in enumerate(piece.dims):
            if other != at and not same_factors(factors, first.dims[other], piece.dims, first.dims):
                raise RefusedError("joins values that see their rows and columns in different orders")
        lengths.append(mine[0].size)
    unit, total = math.gcd(*lengths), sum(lengths)
    units: list[dsl.Value] = []
    for piece, length in zip(pieces, lengths, strict=True):
        value = dsl.Value(piece.node)
        units += [value] if length == unit else _units(value, length // unit, length * inner)
    joined = dsl.join(*units, block=total * inner)
    dims = (*first.dims[:at], (views.Factor("col", dim[0].place, total),), *first.dims[at + 1 :])
    return Value(joined.node, dims)


def stack(op: At) -> Value:
    """A new last dimension: interleaved columns."""
    parts, at = op.arg(0), op.arg(1, 0) % len(shape(op.fx))
    if not all(isinstance(part, fx.Node) and part in op.graph.values for part in parts):
        raise RefusedError("joins values with tensors that no product made")
    pieces = [op.graph.values[part] for part in parts]
    dims = pieces[0].dims
    after = [factor for dim in dims[at:] for factor in dim]
    if any(factor.kind == "row" for factor in after):
        raise RefusedError("joins rows")
    columns = views.factors(dims, "col")
    count = len(columns) - len(after)
    if columns[count:] != after:
        raise RefusedError("joins columns out of their order")
    for piece in pieces[1:]:
        if not all(same_factors(x, y, piece.dims, dims) for x, y in zip(piece.dims, dims, strict=True)):
            raise RefusedError("joins values that see their rows and columns in different orders")
    inner = views.product(factor.size for factor in after)
    joined = dsl.join(*(dsl.Value(piece.node) for piece in pieces), block=inner * len(pieces))
    renumbered = views.with_room(dims, count)
    new = (views.Factor("col", (count,), len(pieces)),)
    return Value(joined.node, (*renumbered[:at], new, *renumbered[at:]))


def _units(value: dsl.Value, count: int, block: int) -> list[dsl.Value]:
    """A value in equal parts; the parts of a join are what was joined."""
    joined = value.node
    if joined.op == "join" and len(joined.args) == count and joined.attr("block") == block:
        return [dsl.Value(arg) for arg in joined.args]
    return list(dsl.parts(value, count, block))
