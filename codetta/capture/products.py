"""Products of the graph: their weights, their left operands, and the laws that are applied to them."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from codetta import dsl
from codetta.capture.at import At, shape
from codetta.capture.graph import FLOATS, CutError, RefusedError, Value, Weight
from codetta.capture.kinds import packet_of
from codetta.ir import view as views
from codetta.ir.graph import Node, Space, node, topological
from codetta.ir.view import Dims
from codetta.program import Operand
from codetta.rewrite.gradient import Use

aten = torch.ops.aten


def product(op: At) -> Value | None:
    given: Any = op.fx.args
    bias, left, right = (None, *given) if op.packet is aten.mm else given
    if op.fx.kwargs and any(op.fx.kwargs.get(key, 1) != 1 for key in ("alpha", "beta")):
        raise RefusedError("scales its product")
    weight = weight_of(op, right)
    k, cols = shape(left)[-1], weight.stop - weight.start
    if not isinstance(k, int) or left.meta["val"].dtype not in FLOATS:
        raise RefusedError("the depth of the product is not a number")
    if left.meta["val"].dtype == torch.float64:
        raise RefusedError("products of float64 have no fast kernel")
    value = op.graph.values.get(left)
    if value is None:
        value = tokens(op, left)
    summed = any(each.op.startswith("col_") for each in topological([value.node], lambda each: each.op != "product"))
    seen = views.is_matrix(value.dims) and views.has_columns_last(value.dims)
    if not seen or len(value.dims) != 2 or summed:
        raise RefusedError("its left operand is not a token matrix")
    name = op.weight_name(weight)
    made = node("product", value.node, space=Space(1, cols), weight=name, dtype=left.meta["val"].dtype)
    dims: Dims = (value.dims[0], (views.Factor("col", (0,), cols),))
    op.graph.dtypes.setdefault(made, op.fx.meta["val"].dtype)
    made = lawful(op, made)
    shift = dsl.Value(op.leaf(bias, dims)) if bias is not None else None
    result = dsl.Value(made) if shift is None else dsl.Value(made) + shift
    # What exists is the sum, if there is one.
    alone = result if shift is None else result - shift
    op.graph.uses[op.fx] = Use(value.node, alone.node, name)
    return Value(result.node, dims)


def uses_of(op: At, product: Node) -> list[Use]:
    """Products with the same matrix the other way round, if both take all of it."""
    mine = op.graph.weights[product.attr("weight")]
    if (mine.start, mine.stop) != (0, shape(mine.source)[1 if mine.transposed else 0]):
        return []
    found = []
    for use in op.graph.uses.values():
        theirs = op.graph.weights[use.weight]
        if theirs.source is mine.source and theirs.transposed != mine.transposed:
            found.append(use)
    return found


def lawful(op: At, product: Node) -> Node:
    """The product after the laws; its left operand must be something that exists."""
    changed = product
    for law in op.laws:
        new = law(changed, op.graph.placement.is_late)
        if new is not None:
            changed = new
            op.fired(law.__name__)
    inner = next(each for each in topological([changed])[::-1] if each.op == "product")
    base = inner.args[0]
    if op.graph.placement.is_late(base):
        # The law may have multiplied a gain onto what the graph has, or have left over what the graph has not.
        known = {value.node for value in op.graph.values.values()}
        while base not in known:
            matrices = [arg for arg in base.args if arg.space.rows and arg.space.cols]
            base = matrices[0] if base.op == "mul" and len(matrices) == 1 else product.args[0]
        raise CutError(base, "a product reads it, and it is known only behind the program that makes it")
    op.graph.dtypes.setdefault(inner, op.graph.dtypes[product])
    op.graph.origin.setdefault(inner, op.fx)
    return changed


def weight_of(op: At, arg: fx.Node) -> Weight:
    transposed = True
    while packet_of(arg) is aten.t or (packet_of(arg) in (aten.permute, aten.transpose) and len(shape(arg)) == 2):
        unchanged = packet_of(arg) is aten.permute and list(arg.args[1]) == [0, 1]  # type: ignore[arg-type]
        transposed ^= not unchanged
        arg = arg.args[0]  # type: ignore[assignment]
    if arg not in op.graph.constant:
        raise RefusedError("its right operand is not a weight")
    sizes = shape(arg)
    if not all(isinstance(size, int) for size in sizes):
        raise RefusedError("its weight has no fixed size")
    return Weight(arg, transposed, 0, sizes[1] if transposed else sizes[0])


def heads(op: At, each: fx.Node) -> Value:
    """A tensor (B, H, T, D) as the matrix of B·T rows and H·D columns that it is to whoever attends to it."""
    sizes, kinds = shape(each), ("row", "col", "row", "col")
    if len(sizes) != 4 or not isinstance(sizes[1], int) or not isinstance(sizes[3], int):
        raise RefusedError("its heads have no fixed size")
    dims = tuple(
        () if views.same(size, 1) else (views.Factor(kind, (at // 2,), size),)
        for at, (kind, size) in enumerate(zip(kinds, sizes, strict=True))
    )
    order = tuple(at for at in (0, 2, 1, 3) if dims[at])
    cols = sizes[1] * sizes[3]
    return Value(op.leaf_node(each, Operand("", each.meta["val"].dtype, "each", cols), order, cols), dims)


def tokens(op: At, left: fx.Node) -> Value:
    """A tensor of the graph as the left operand, seen through reshapes that only gather its rows."""
    base = left
    while packet_of(base) in (aten.view, aten._unsafe_view, aten.reshape) and views.same(
        shape(base.args[0])[-1],  # type: ignore[arg-type]
        shape(left)[-1],
    ):
        base = base.args[0]  # type: ignore[assignment]
    dims = views.tokens(shape(base))
    if dims is None:
        raise RefusedError("its left operand has no fixed number of columns")
    flat = views.reshape(dims, shape(left))
    if flat is None:
        base, flat = left, views.tokens(shape(left))
        assert flat is not None
        dims = flat
    cols = shape(base)[-1]
    order = tuple(at for at, dim in enumerate(dims) if dim)
    load = op.leaf_node(base, Operand("", base.meta["val"].dtype, "each", cols), order, cols)
    return Value(load, flat)
