"""Capture: an FX graph of aten operators -> values on token matrices. The only file that knows torch.fx and aten.

Everything that depends on a matrix product becomes a `Value`: a node of the project's own kind and the view under which the
graph sees it. What no handler covers, and everything before the first product, stays a tensor that the graph computes as it
did (a leaf, if a value reads it). Casts between floating types leave no trace: values are computed in fp32, which is at
least as accurate as what was asked for.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from codetta import dsl
from codetta.errors import Reason, TraceError
from codetta.ir import view as views
from codetta.ir.graph import Node, Space, node, topological
from codetta.ir.view import Dims
from codetta.placement import NOWHERE, Placement
from codetta.program import Operand

aten = torch.ops.aten
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, eq=False)
class Value:
    """What the graph sees as a tensor: a node and how its rows and columns make up the dimensions."""

    node: Node
    dims: Dims


@dataclass(frozen=True, eq=False)
class Leaf:
    """A tensor of the graph that values read: the operand that it is to them, and the order of its dimensions as a matrix."""

    operand: Operand
    source: fx.Node
    order: tuple[int, ...]  # rows first, then columns; dimensions of size one are left out


@dataclass(frozen=True, eq=False)
class Weight:
    """A B operand: columns start to stop of a matrix of the graph; stored (N, K) or (K, N)."""

    source: fx.Node
    transposed: bool  # stored (K, N)
    start: int
    stop: int


@dataclass
class Graph:
    """A captured graph: the FX graph, and what is known of its nodes."""

    fx: fx.Graph
    placement: Placement
    values: dict[fx.Node, Value] = field(default_factory=dict)
    leaves: dict[str, Leaf] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    constant: set[fx.Node] = field(default_factory=set)  # computed from parameters alone
    dtypes: dict[Node, torch.dtype] = field(default_factory=dict)  # in which the graph holds a value
    refusals: dict[fx.Node, Reason] = field(default_factory=dict)


class Refused(Exception):
    """A handler cannot express the operator; the text says why."""


class Cut(Exception):
    """A value must exist as a tensor before the graph goes on, and no program can make it: the graph must."""

    def __init__(self, value: Node, why: str) -> None:
        super().__init__(why)
        self.value = value


Law = Callable[[Node], Node | None]


def capture(graph: fx.Graph, parameters: Iterable[fx.Node], laws: Sequence[Law] = ()) -> Graph:
    """Every node of the graph that depends on a product, as a value, as far as the handlers go.

    Laws are applied to products as they are met. Where a product needs a value that is known too late for any program to
    store it, the graph keeps that value, and reading starts again behind it.
    """
    return _Reader(graph, parameters, laws).read()


class _Reader:
    def __init__(self, graph: fx.Graph, parameters: Iterable[fx.Node], laws: Sequence[Law]) -> None:
        self.found = Graph(graph, Placement(self._made_by))
        self.found.constant |= set(parameters)
        self.laws = laws
        self.cuts: dict[fx.Node, Reason] = {}
        self.latest: dict[fx.Node, int] = {}  # the last group that a node depends on
        self.groups_before: dict[fx.Node, int] = {}

    def _made_by(self, leaf: str) -> int:
        return self.latest.get(self.found.leaves[leaf].source, NOWHERE)

    def read(self) -> Graph:
        nodes = list(self.found.fx.nodes)
        at = 0
        while at < len(nodes):
            each = nodes[at]
            at += 1
            self.groups_before[each] = len(self.found.placement.groups)
            try:
                value = self._read(each)
            except Cut as cut:
                at = nodes.index(self._go_back(cut))
                continue
            latest = [self.latest.get(arg, NOWHERE) for arg in each.all_input_nodes]
            if value is not None:
                self.found.values[each] = value
                self.found.dtypes.setdefault(value.node, each.meta["val"].dtype)
                latest.append(self.found.placement[value.node].group)
            self.latest[each] = max(latest, default=NOWHERE)
        self.found.refusals |= self.cuts
        return self.found

    def _read(self, each: fx.Node) -> Value | None:
        found = self.found
        if each.op != "call_function" or each in self.cuts:
            return None
        inputs = each.all_input_nodes
        if inputs and all(arg in found.constant for arg in inputs) and _is_tensor(each):
            found.constant.add(each)
            return None
        try:
            return _Importer(found, each, self.laws).value()
        except (Refused, TraceError) as refusal:
            found.refusals[each] = Reason(_name(each), str(refusal))
            return None

    def _go_back(self, cut: Cut) -> fx.Node:
        """Leave the value to the graph, and forget what was read from there on."""
        found = self.found
        at = next(each for each, value in found.values.items() if value.node is cut.value)
        self.cuts[at] = Reason("late", str(cut))
        found.placement.forget(self.groups_before[at])
        forgotten = False
        for each in found.fx.nodes:
            forgotten |= each is at
            if forgotten:
                found.values.pop(each, None)
                found.refusals.pop(each, None)
        return at


def _is_tensor(each: fx.Node) -> bool:
    return isinstance(each.meta.get("val"), torch.Tensor)


def _name(each: fx.Node) -> str:
    target = each.target
    return str(target.overloadpacket if isinstance(target, torch._ops.OpOverload) else target).removeprefix("aten.")


def shape(each: fx.Node) -> list[Any]:
    return list(each.meta["val"].shape)


class _Importer:
    """One operator of the graph, looked at."""

    def __init__(self, graph: Graph, at: fx.Node, laws: Sequence[Law] = ()) -> None:
        self.graph, self.at, self.laws = graph, at, laws

    def value(self) -> Value | None:
        """The value of the operator, None if it does not depend on a product."""
        target = self.at.target
        if target is operator.getitem:
            return self._item()
        packet = target.overloadpacket if isinstance(target, torch._ops.OpOverload) else None
        if packet in (aten.mm, aten.addmm):
            return self._product()
        if not any(arg in self.graph.values for arg in self.at.all_input_nodes):
            return None
        handler = _HANDLERS.get(packet)
        if handler is None:
            if packet in _LATER:
                return None  # its items are looked at one by one
            raise Refused("has no meaning on tiles")
        if not _is_tensor(self.at) or self.at.meta["val"].dtype not in FLOATS:
            raise Refused(f"makes {getattr(self.at.meta.get('val'), 'dtype', 'no tensor')}")
        return handler(self)

    # ---- arguments

    def arg(self, index: int, default: Any = None) -> Any:
        if index < len(self.at.args):
            return self.at.args[index]
        return default

    def option(self, name: str, index: int, default: Any) -> Any:
        return self.at.kwargs.get(name, self.arg(index, default))

    def operand(self, index: int = 0) -> Value:
        arg = self.arg(index)
        value = self.graph.values.get(arg) if isinstance(arg, fx.Node) else None
        if value is None:
            raise Refused("its first argument is not made by a product")
        return value

    def meet(self, args: Sequence[Any]) -> tuple[list[dsl.Value], Dims]:
        """Arguments of an elementwise operator, broadcast as PyTorch does, and the dimensions of the result."""
        wanted = shape(self.at)
        known = [self.graph.values[arg] for arg in args if isinstance(arg, fx.Node) and arg in self.graph.values]
        whole = [each for each in known if _same_shape(views.shape_of(each.dims), wanted)]
        if not whole:
            raise Refused("a value is broadcast over dimensions that no product made")
        # The finest factors of all: the others are cut to fit.
        main = max(whole, key=lambda each: sum(len(dim) for dim in each.dims)).dims
        return [self._aligned(arg, main) for arg in args], main

    def _aligned(self, arg: Any, main: Dims) -> dsl.Value:
        if isinstance(arg, int | float) and not isinstance(arg, bool):
            return dsl.lift(arg)
        if not isinstance(arg, fx.Node) or not _is_tensor(arg):
            raise Refused(f"an argument is {arg}, not a number or a tensor")
        value = self.graph.values.get(arg)
        if value is None:
            return dsl.Value(self._leaf(arg, main))
        offset = len(main) - len(value.dims)
        mine = {id(factor) for at, dim in enumerate(value.dims) if dim for factor in main[at + offset]}
        if any(id(factor) not in mine for factor in views.factors(main, "row")) and value.node.space.rows:
            # A matrix of other rows, such as one for each sample: to this one it is a tensor.
            return dsl.Value(self._leaf(arg, main))
        columns = views.factors(main, "col")
        for at, dim in enumerate(value.dims):
            if dim and not _same_factors(dim, main[at + offset], value.dims, main):
                raise Refused("two values see their rows and columns in different orders")
        covered = {id(factor) for at, dim in enumerate(value.dims) if dim for factor in main[at + offset]}
        missing = [factor for factor in columns if id(factor) not in covered]
        if len(missing) == len(columns) or not missing:
            return dsl.Value(value.node)
        if missing == columns[-len(missing) :]:
            return dsl.spread(dsl.Value(value.node), views.product(factor.size for factor in missing))
        raise Refused("a value is repeated over columns in a way that tiles do not hold")

    def _leaf(self, arg: fx.Node, main: Dims) -> Node:
        """A tensor of the graph as an operand of values with these dimensions."""
        tensor = arg.meta["val"]
        if tensor.dtype not in (*FLOATS, torch.bool):
            raise Refused(f"an operand has type {tensor.dtype}")
        if tensor.dtype == torch.bool:
            raise Refused("an operand is a mask")
        sizes = shape(arg)
        offset = len(main) - len(sizes)
        if offset < 0:
            raise Refused("an operand has more dimensions than the value")
        there = [at for at, size in enumerate(sizes) if not views.same(size, 1) and main[at + offset]]
        for at in there:
            if not views.same(sizes[at], views.product(factor.size for factor in main[at + offset])):
                raise Refused("an operand does not broadcast")
            if len({factor.kind for factor in main[at + offset]}) > 1:
                raise Refused("an operand mixes rows and columns")
        rows, columns = views.factors(main, "row"), views.factors(main, "col")
        covered = {id(factor) for at in there for factor in main[at + offset]}
        my_rows = [factor for factor in rows if id(factor) in covered]
        my_cols = [factor for factor in columns if id(factor) in covered]
        how = self._rows_of(my_rows, rows)
        cols = views.product(factor.size for factor in columns)
        width = views.product(factor.size for factor in my_cols) if my_cols else 0
        if my_cols and my_cols != columns[-len(my_cols) :]:
            raise Refused("an operand has some of the columns, but not the last ones")
        place = {id(factor): number for number, factor in enumerate([*rows, *columns])}
        order = tuple(sorted(there, key=lambda at: place[id(main[at + offset][0])]))
        if how == "sample" and width != cols:
            raise Refused("an operand for each sample repeats over columns")
        period = width if width and width != cols else 0
        return self.leaf_node(arg, Operand("", tensor.dtype, how, width, period=period), order, cols if width else 0)

    @staticmethod
    def _rows_of(mine: list[views.Factor], rows: list[views.Factor]) -> str:
        if not mine:
            return "none"
        if mine == rows:
            return "each"
        if mine == rows[-len(mine) :]:
            return "repeat"
        if mine == rows[: len(mine)]:
            return "sample"
        raise Refused("an operand has some of the rows, neither the first nor the last ones")

    def leaf_node(self, source: fx.Node, operand: Operand, order: tuple[int, ...], cols: int) -> Node:
        graph = self.graph
        for leaf in graph.leaves.values():
            if leaf.source is source and leaf.order == order and replace(leaf.operand, name="") == operand:
                break
        else:
            name = f"{source.name}_{len(graph.leaves)}" if source.name in graph.leaves else source.name
            leaf = graph.leaves[name] = Leaf(replace(operand, name=name), source, order)
        rows = 0 if operand.rows == "none" else 1
        constant = True if source in graph.constant else None
        return node(
            "load", space=Space(rows, cols), name=leaf.operand.name, period=operand.period or None, constant=constant
        )

    # ---- products

    def _product(self) -> Value | None:
        packet = self.at.target.overloadpacket  # type: ignore[union-attr]
        bias, left, right = (None, *self.at.args) if packet is aten.mm else self.at.args
        if self.at.kwargs and any(self.at.kwargs.get(key, 1) != 1 for key in ("alpha", "beta")):
            raise Refused("scales its product")
        weight = self._weight(right)
        k, cols = shape(left)[-1], weight.stop - weight.start
        if not isinstance(k, int) or left.meta["val"].dtype not in FLOATS:
            raise Refused("the depth of the product is not a number")
        value = self.graph.values.get(left)
        if value is None:
            value = self._tokens(left)
        if not views.is_matrix(value.dims) or len(value.dims) != 2:
            raise Refused("its left operand is not a token matrix")
        name = self.weight_name(weight)
        made = node("product", value.node, space=Space(1, cols), weight=name, dtype=left.meta["val"].dtype)
        dims: Dims = (value.dims[0], (views.Factor("col", (0,), cols),))
        self.graph.dtypes.setdefault(made, self.at.meta["val"].dtype)
        made = self.lawful(made)
        if bias is None:
            return Value(made, dims)
        return Value((dsl.Value(made) + dsl.Value(self._leaf(bias, dims))).node, dims)

    def lawful(self, product: Node) -> Node:
        """The product after the laws; its left operand must be something that exists."""
        changed = product
        for law in self.laws:
            changed = law(changed) or changed
        inner = next(each for each in topological([changed])[::-1] if each.op == "product")
        base = inner.args[0]
        if self.graph.placement.is_late(base):
            raise Cut(base, "a product reads it, and it is known only behind the program that makes it")
        self.graph.dtypes.setdefault(inner, self.graph.dtypes[product])
        return changed

    def _weight(self, arg: fx.Node) -> Weight:
        transposed = True
        while isinstance(arg.target, torch._ops.OpOverload) and (
            arg.target.overloadpacket is aten.t
            or (arg.target.overloadpacket in (aten.permute, aten.transpose) and len(shape(arg)) == 2)
        ):
            if arg.target.overloadpacket is aten.permute and list(arg.args[1]) == [0, 1]:  # type: ignore[arg-type]
                pass
            else:
                transposed = not transposed
            arg = arg.args[0]  # type: ignore[assignment]
        if arg not in self.graph.constant:
            raise Refused("its right operand is not a weight")
        sizes = shape(arg)
        if not all(isinstance(size, int) for size in sizes):
            raise Refused("its weight has no fixed size")
        return Weight(arg, transposed, 0, sizes[1] if transposed else sizes[0])

    def _tokens(self, left: fx.Node) -> Value:
        """A tensor of the graph as the left operand, seen through reshapes that only gather its rows."""
        base = left
        while (
            isinstance(base.target, torch._ops.OpOverload)
            and base.target.overloadpacket in (aten.view, aten._unsafe_view, aten.reshape)
            and views.same(shape(base.args[0])[-1], shape(left)[-1])  # type: ignore[arg-type]
        ):
            base = base.args[0]  # type: ignore[assignment]
        dims = views.tokens(shape(base))
        if dims is None:
            raise Refused("its left operand has no fixed number of columns")
        flat = views.reshape(dims, shape(left))
        if flat is None:
            base, flat = left, views.tokens(shape(left))
            assert flat is not None
            dims = flat
        cols = shape(base)[-1]
        order = tuple(at for at, dim in enumerate(dims) if dim)
        load = self.leaf_node(base, Operand("", base.meta["val"].dtype, "each", cols), order, cols)
        return Value(load, flat)

    # ---- views

    def reshape(self) -> Value:
        value = self.operand()
        dims = views.reshape(value.dims, shape(self.at))
        if dims is None:
            raise Refused("cuts through rows or columns whose size is not known")
        return Value(value.node, dims)

    def permute(self) -> Value:
        value = self.operand()
        count = len(value.dims)
        packet = self.at.target.overloadpacket  # type: ignore[union-attr]
        order = list(range(count))
        if packet is aten.permute:
            order = [at % count for at in self.arg(1)]
        else:
            x, y = (0, 1) if packet is aten.t else (self.arg(1) % count, self.arg(2) % count)
            order[x], order[y] = order[y], order[x]
        return Value(value.node, views.permute(value.dims, order))

    def unsqueeze(self) -> Value:
        value, at = self.operand(), self.arg(1)
        at = at % (len(value.dims) + 1)
        return Value(value.node, (*value.dims[:at], (), *value.dims[at:]))

    def same(self) -> Value:
        return self.operand()

    def to_copy(self) -> Value:
        arg = self.arg(0)
        if arg.meta["val"].dtype not in FLOATS:
            raise Refused(f"casts from {arg.meta['val'].dtype}")
        if arg.meta["val"].device != self.at.meta["val"].device:
            raise Refused("moves to another device")
        return self.operand()

    def expand(self) -> Value:
        """Columns repeated between others (heads shared by several queries) are joined; rows cannot be."""
        value, wanted = self.operand(), shape(self.at)
        have = views.shape_of(value.dims)
        if len(have) != len(wanted):
            raise Refused("adds dimensions")
        grown = [at for at, (old, new) in enumerate(zip(have, wanted, strict=True)) if not views.same(old, new)]
        if not grown:
            return value
        if len(grown) > 1 or not isinstance(wanted[grown[0]], int):
            raise Refused("repeats rows")
        at, times = grown[0], wanted[grown[0]]
        columns = views.factors(value.dims, "col")
        after = [factor for dim in value.dims[at + 1 :] for factor in dim if factor.kind == "col"]
        before = [factor for dim in value.dims[:at] for factor in dim if factor.kind == "col"]
        if before + after != columns or not after:
            raise Refused("repeats columns out of their order")
        block = views.product(factor.size for factor in after) * times
        joined = dsl.join(*[dsl.Value(value.node)] * times, block=block)
        numbered = {id(factor): number for number, factor in enumerate(columns)}
        dims = [
            tuple(
                views.Factor("col", (numbered[id(f)] + (numbered[id(f)] >= len(before)),), f.size)
                if f.kind == "col"
                else f
                for f in dim
            )
            for dim in value.dims
        ]
        dims[at] = (views.Factor("col", (len(before),), times),)
        return Value(joined.node, tuple(dims))

    def slice(self) -> Value:
        value, at = self.operand(), self.arg(1, 0) % len(self.operand().dims)
        start, stop, step = self.arg(2, 0) or 0, self.arg(3, None), self.arg(4, 1)
        size = views.shape_of(value.dims)[at]
        if not isinstance(start, int) or not isinstance(step, int):
            raise Refused("cuts at a place that is not a number")
        if start == 0 and step == 1 and views.same(shape(self.at)[at], size):
            return value
        if not isinstance(size, int) or not (stop is None or isinstance(stop, int)):
            raise Refused("cuts rows")
        stop = size if stop is None else min(stop if stop >= 0 else stop + size, size)
        start = start if start >= 0 else start + size
        return self.cut(value, at, start, stop, step)

    def cut(self, value: Value, at: int, start: int, stop: int, step: int = 1) -> Value:
        """Columns start to stop of one dimension."""
        dim = value.dims[at]
        if len(dim) != 1 or dim[0].kind != "col":
            raise Refused("cuts rows")
        factor, columns = dim[0], views.factors(value.dims, "col")
        inner = views.product(each.size for each in columns[columns.index(factor) + 1 :])
        length = len(range(start, stop, step))
        if not length:
            raise Refused("keeps nothing")
        dims = (*value.dims[:at], (views.Factor("col", factor.place, length),), *value.dims[at + 1 :])
        if step != 1:
            if factor.size % step or start >= step or length != factor.size // step:
                raise Refused("takes every other column, but not all of them")
            if inner != 1:
                raise Refused("takes every other group of columns")
            return Value(dsl.parts(dsl.Value(value.node), step, step)[start].node, dims)
        if factor is columns[0] and (narrowed := self._narrowed(value.node, start * inner, stop * inner)) is not None:
            return Value(narrowed, dims)
        unit = math.gcd(start, length, factor.size)
        pieces = dsl.parts(dsl.Value(value.node), factor.size // unit, factor.size * inner)
        mine = pieces[start // unit : stop // unit]
        return Value((mine[0] if len(mine) == 1 else dsl.join(*mine, block=length * inner)).node, dims)

    def _narrowed(self, value: Node, start: int, stop: int) -> Node | None:
        """Columns start to stop of the whole value, taken by cutting the weights: none of the others is computed."""
        if not value.space.cols:
            return value
        match value.op:
            case "product":
                name = self._narrowed_weight(value.attr("weight"), start, stop)
                attrs = {**dict(value.attrs), "weight": name}
                made = node("product", *value.args, space=Space(1, stop - start), **attrs)
                self.graph.dtypes.setdefault(made, self.graph.dtypes[value])
                return made
            case "vector":
                narrow = self._narrowed_weight(value.attr("weight"), start, stop)
                attrs = {**dict(value.attrs), "weight": narrow}
                return node("vector", *value.args, space=Space(0, stop - start), **attrs)
            case "load" if not value.attr("period") and value.space.rows == 0:
                leaf = self.graph.leaves[value.attr("name")]
                return self._cut_leaf(leaf, start, stop)
            case "const":
                return value
        if value.args and value.op in _ELEMENTWISE:
            args = [self._narrowed(arg, start, stop) for arg in value.args]
            if all(arg is not None for arg in args):
                return node(value.op, *(arg for arg in args if arg is not None), **dict(value.attrs))
        return None

    def _narrowed_weight(self, name: str, start: int, stop: int) -> str:
        weight = self.graph.weights[name]
        return self.weight_name(Weight(weight.source, weight.transposed, weight.start + start, weight.start + stop))

    def weight_name(self, weight: Weight) -> str:
        known = self.graph.weights
        for name, each in known.items():
            if (each.source, each.transposed, each.start, each.stop) == (weight.source, weight.transposed, weight.start, weight.stop):
                return name
        known[f"w{len(known)}"] = weight
        return f"w{len(known) - 1}"

    def _cut_leaf(self, leaf: Leaf, start: int, stop: int) -> Node | None:
        if leaf.source not in self.graph.constant:
            return None
        with self.graph.fx.inserting_after(leaf.source):
            cut = self.graph.fx.call_function(aten.slice.Tensor, (leaf.source, -1, start, stop))
        cut.meta["val"] = leaf.source.meta["val"][..., start:stop]
        self.graph.constant.add(cut)
        operand = Operand("", leaf.operand.dtype, "none", stop - start)
        return self.leaf_node(cut, operand, (len(shape(cut)) - 1,), stop - start)

    def _item(self) -> Value | None:
        """One result of an operator with several."""
        source, index = self.at.args
        assert isinstance(source, fx.Node) and isinstance(index, int)
        if not isinstance(source.target, torch._ops.OpOverload):
            return None
        inner = _Importer(self.graph, source, self.laws)
        packet = source.target.overloadpacket
        if not source.args or not isinstance(source.args[0], fx.Node) or source.args[0] not in self.graph.values:
            return None
        if packet in (aten.split, aten.split_with_sizes, aten.chunk, aten.unbind):
            return inner.split(index)
        if packet is aten.native_layer_norm:
            return inner.layer_norm(index)
        if packet is aten.var_mean:
            return inner.var_mean(index)
        if packet is aten._fused_rms_norm and index == 0:
            return inner.rms_norm()
        raise Refused("has no meaning on tiles")

    def split(self, index: int) -> Value:
        value, sizes = self.operand(), [shape_part for shape_part in self.at.meta["val"]]
        at = self.option("dim", 2, 0) % len(value.dims)
        if self.at.target.overloadpacket is aten.unbind:  # type: ignore[union-attr]
            raise Refused("takes single columns")
        lengths = [list(each.shape)[at] for each in sizes]
        if not all(isinstance(length, int) for length in lengths):
            raise Refused("cuts rows")
        start = sum(lengths[:index])
        return self.cut(value, at, start, start + lengths[index])

    def cat(self) -> Value:
        at = self.arg(1, 0) % len(shape(self.at))
        parts = [part for part in self.arg(0) if not views.same(shape(part)[at], 0)]
        if not all(isinstance(part, fx.Node) and part in self.graph.values for part in parts):
            raise Refused("joins values with tensors that no product made")
        pieces = [self.graph.values[part] for part in parts]
        first = pieces[0]
        dim = first.dims[at]
        columns = views.factors(first.dims, "col")
        if len(dim) != 1 or dim[0].kind != "col":
            raise Refused("joins rows")
        inner = views.product(each.size for each in columns[columns.index(dim[0]) + 1 :])
        lengths = []
        for piece in pieces:
            mine = piece.dims[at]
            if len(mine) != 1 or mine[0].kind != "col":
                raise Refused("joins rows")
            for other, factors in enumerate(piece.dims):
                if other != at and not _same_factors(factors, first.dims[other], piece.dims, first.dims):
                    raise Refused("joins values that see their rows and columns in different orders")
            lengths.append(mine[0].size)
        unit, total = math.gcd(*lengths), sum(lengths)
        units: list[dsl.Value] = []
        for piece, length in zip(pieces, lengths, strict=True):
            value = dsl.Value(piece.node)
            units += [value] if length == unit else _units(value, length // unit, length * inner)
        joined = dsl.join(*units, block=total * inner)
        dims = (*first.dims[:at], (views.Factor("col", dim[0].place, total),), *first.dims[at + 1 :])
        return Value(joined.node, dims)

    def stack(self) -> Value:
        """A new last dimension: interleaved columns."""
        parts, at = self.arg(0), self.arg(1, 0) % len(shape(self.at))
        if not all(isinstance(part, fx.Node) and part in self.graph.values for part in parts):
            raise Refused("joins values with tensors that no product made")
        pieces = [self.graph.values[part] for part in parts]
        dims = pieces[0].dims
        after = [factor for dim in dims[at:] for factor in dim]
        if any(factor.kind == "row" for factor in after):
            raise Refused("joins rows")
        columns = views.factors(dims, "col")
        count = len(columns) - len(after)
        if columns[count:] != after:
            raise Refused("joins columns out of their order")
        for piece in pieces[1:]:
            if not all(_same_factors(x, y, piece.dims, dims) for x, y in zip(piece.dims, dims, strict=True)):
                raise Refused("joins values that see their rows and columns in different orders")
        inner = views.product(factor.size for factor in after)
        joined = dsl.join(*(dsl.Value(piece.node) for piece in pieces), block=inner * len(pieces))
        numbered = {id(f): number + (number >= count) for number, f in enumerate(columns)}
        renumbered = [
            tuple(views.Factor("col", (numbered[id(f)],), f.size) if f.kind == "col" else f for f in dim) for dim in dims
        ]
        new = (views.Factor("col", (count,), len(pieces)),)
        return Value(joined.node, (*renumbered[:at], new, *renumbered[at:]))

    # ---- arithmetic

    def elementwise(self, meaning: Callable[..., dsl.Value], args: Sequence[Any]) -> Value:
        values, dims = self.meet(args)
        return Value(meaning(*values).node, dims)

    # ---- reductions

    def reduce(self) -> Value:
        """mean, sum, amax over the last columns: of the whole row, or of each group."""
        packet = self.at.target.overloadpacket  # type: ignore[union-attr]
        value, keep = self.operand(), self.option("keepdim", 2, False)
        count = len(value.dims)
        listed = self.arg(1)
        over = sorted(at % count for at in ([listed] if isinstance(listed, int) else listed or range(count)))
        return self.reduced(value, over, keep, packet)

    def reduced(self, value: Value, over: list[int], keep: bool, packet: Any) -> Value:
        columns = views.factors(value.dims, "col")
        mine = [factor for at in over for factor in value.dims[at]]
        if not mine or any(factor.kind == "row" for factor in mine):
            raise Refused("reduces rows")
        if columns[-len(mine) :] != mine:
            raise Refused("reduces columns that are not the last ones")
        width = views.product(factor.size for factor in mine)
        x = dsl.Value(self.early(value.node))
        if len(mine) == len(columns):
            result = dsl.row_max(x) if packet is aten.amax else dsl.row_sum(x)
        else:
            result = dsl.group_max(x, width) if packet is aten.amax else dsl.group_sum(x, width)
        # By a factor, even of one: a reduction of a whole row is not yet a number that others may compute with.
        result = dsl.Value(node("mul", result.node, dsl.lift(1.0 / width if packet is aten.mean else 1.0).node))
        dims = tuple(() if at in over else dim for at, dim in enumerate(value.dims))
        if not keep:
            dims = tuple(dim for at, dim in enumerate(dims) if at not in over)
        return Value(result.node, dims)

    def early(self, value: Node) -> Node:
        """A value that is about to be reduced: its program must be able to."""
        if self.graph.placement.is_late(value):
            raise Cut(value, "its rows are reduced, and it is known only behind the program that makes it")
        return value

    def moments(self, value: Value, over: list[int]) -> tuple[dsl.Value, dsl.Value, int]:
        columns = views.factors(value.dims, "col")
        mine = [factor for at in over for factor in value.dims[at]]
        if mine != columns:
            raise Refused("takes the variance of some of the columns")
        both = node("row_moments", self.early(value.node))
        mean, var = (dsl.Value(node("moment", both, space=Space(1, 0), field=name)) for name in ("mean", "var"))
        return mean, var, views.product(factor.size for factor in mine)

    def var_mean(self, index: int | None) -> Value:
        value = self.operand()
        count = len(value.dims)
        listed = self.arg(1)
        over = sorted(at % count for at in (listed if isinstance(listed, list | tuple) else [listed]))
        mean, var, width = self.moments(value, over)
        correction = self.at.kwargs.get("correction", 1)
        keep = self.at.kwargs.get("keepdim", False)
        if not isinstance(correction, int | float):
            correction = 1
        result = mean if index == 1 else var * (width / (width - correction))
        dims = tuple(() if at in over else dim for at, dim in enumerate(value.dims))
        return Value(result.node, dims if keep else tuple(dim for at, dim in enumerate(dims) if at not in over))

    def variance(self) -> Value:
        return self.var_mean(0)

    def layer_norm(self, index: int) -> Value:
        value, wanted = self.operand(), self.arg(1)
        over = list(range(len(value.dims) - len(wanted), len(value.dims)))
        mean, var, _ = self.moments(value, over)
        rstd = dsl.rsqrt(var + float(self.arg(4)))
        if index:
            dims = tuple(() if at in over else dim for at, dim in enumerate(value.dims))
            return Value((mean if index == 1 else rstd).node, dims)
        x = (dsl.Value(value.node) - mean) * rstd
        return Value(self._affine(x, value.dims, self.arg(2), self.arg(3)), value.dims)

    def rms_norm(self) -> Value:
        value, wanted = self.operand(), self.arg(1)
        over = list(range(len(value.dims) - len(wanted), len(value.dims)))
        squares = Value((dsl.Value(value.node) * dsl.Value(value.node)).node, value.dims)
        mean = dsl.Value(self.reduced(squares, over, True, aten.mean).node)
        eps = self.arg(3)
        if eps is None:
            eps = torch.finfo(self.arg(0).meta["val"].dtype).eps
        scale = dsl.rsqrt(mean + float(eps))
        if scale.node.space.cols:
            scale = dsl.spread(scale, value.node.space.cols // scale.node.space.cols)
        x = dsl.Value(value.node) * scale
        return Value(self._affine(x, value.dims, self.arg(2), None), value.dims)

    def _affine(self, x: dsl.Value, dims: Dims, gain: Any, shift: Any) -> Node:
        if gain is not None:
            x = x * dsl.Value(self._leaf(gain, dims))
        if shift is not None:
            x = x + dsl.Value(self._leaf(shift, dims))
        return x.node


def _units(value: dsl.Value, count: int, block: int) -> list[dsl.Value]:
    """A value in equal parts; the parts of a join are what was joined."""
    joined = value.node
    if joined.op == "join" and len(joined.args) == count and joined.attr("block") == block:
        return [dsl.Value(arg) for arg in joined.args]
    return list(dsl.parts(value, count, block))


def _same_shape(x: Sequence[Any], y: Sequence[Any]) -> bool:
    return len(x) == len(y) and all(views.same(a, b) for a, b in zip(x, y, strict=True))


def _same_factors(x: Sequence[views.Factor], y: Sequence[views.Factor], of_x: Dims, of_y: Dims) -> bool:
    """Whether two dimensions are the same pieces, in the same place among the rows or columns."""
    if not x and not y:
        return True
    if not x or not y or {f.kind for f in x} != {f.kind for f in y} or len({f.kind for f in x}) > 1:
        return False
    if not views.same(views.product(f.size for f in x), views.product(f.size for f in y)):
        return False
    return _rank(x, of_x) == _rank(y, of_y)


def _rank(dim: Sequence[views.Factor], dims: Dims) -> int:
    """How many dimensions of the same kind come before this one in the matrix."""
    kind, first = dim[0].kind, min(factor.place for factor in dim)
    return sum(1 for other in dims if other and other[0].kind == kind and min(f.place for f in other) < first)


# ---- the table -------------------------------------------------------------------------------------------------------


_ELEMENTWISE = ("add", "sub", "mul", "div", "neg", "abs", "exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "erf", "maximum", "minimum")  # fmt: skip


def _unary(meaning: Callable[..., dsl.Value]) -> Callable[[_Importer], Value]:
    return lambda at: at.elementwise(meaning, at.at.args[:1])


def _binary(meaning: Callable[..., dsl.Value]) -> Callable[[_Importer], Value]:
    def handler(at: _Importer) -> Value:
        x, y = at.at.args[:2]
        alpha = at.at.kwargs.get("alpha", 1)
        if not isinstance(alpha, int | float) or at.at.kwargs.get("rounding_mode"):
            raise Refused("rounds its quotient, or scales by what is not a number")
        return at.elementwise(lambda a, b: meaning(a, b * alpha if alpha != 1 else b), (x, y))

    return handler


def _pow(at: _Importer) -> Value:
    power = at.arg(1)
    if not isinstance(power, int | float):
        raise Refused("its power is not a number")
    whole = int(power) if float(power).is_integer() else power
    if whole == -1:
        return at.elementwise(lambda x: 1.0 / x, at.at.args[:1])
    return at.elementwise(lambda x: x**whole, at.at.args[:1])


def _clamp(at: _Importer) -> Value:
    low, high = at.option("min", 1, None), at.option("max", 2, None)

    def meaning(x: dsl.Value) -> dsl.Value:
        x = dsl.maximum(x, low) if low is not None else x
        return dsl.minimum(x, high) if high is not None else x

    return at.elementwise(meaning, at.at.args[:1])


def _gelu(at: _Importer) -> Value:
    kind = at.at.kwargs.get("approximate", "none")
    return at.elementwise(lambda x: dsl.gelu(x, kind), at.at.args[:1])


_HANDLERS: dict[Any, Callable[[_Importer], Value]] = {
    aten.view: _Importer.reshape, aten._unsafe_view: _Importer.reshape, aten.reshape: _Importer.reshape, aten.squeeze: _Importer.reshape,
    aten.t: _Importer.permute, aten.transpose: _Importer.permute, aten.permute: _Importer.permute, aten.unsqueeze: _Importer.unsqueeze,
    aten.clone: _Importer.same, aten.alias: _Importer.same, aten.detach: _Importer.same, aten._to_copy: _Importer.to_copy,
    aten.expand: _Importer.expand, aten.slice: _Importer.slice, aten.cat: _Importer.cat, aten.stack: _Importer.stack,
    aten.add: _binary(lambda x, y: x + y), aten.sub: _binary(lambda x, y: x - y), aten.rsub: _binary(lambda x, y: y - x),
    aten.mul: _binary(lambda x, y: x * y), aten.div: _binary(lambda x, y: x / y),
    aten.maximum: _binary(dsl.maximum), aten.minimum: _binary(dsl.minimum),
    aten.neg: _unary(lambda x: -x), aten.abs: _unary(abs), aten.exp: _unary(dsl.exp), aten.log: _unary(dsl.log),
    aten.sqrt: _unary(dsl.sqrt), aten.rsqrt: _unary(dsl.rsqrt), aten.tanh: _unary(dsl.tanh), aten.sigmoid: _unary(dsl.sigmoid),
    aten.erf: _unary(dsl.erf), aten.relu: _unary(dsl.relu), aten.silu: _unary(dsl.silu), aten.gelu: _gelu,
    aten.reciprocal: _unary(lambda x: 1.0 / x), aten.square: _unary(lambda x: x * x), aten.pow: _pow, aten.clamp: _clamp,
    aten.mean: _Importer.reduce, aten.sum: _Importer.reduce, aten.amax: _Importer.reduce, aten.var: _Importer.variance,
}  # fmt: skip
_LATER = (
    aten.split,
    aten.split_with_sizes,
    aten.chunk,
    aten.unbind,
    aten.native_layer_norm,
    aten.var_mean,
    aten._fused_rms_norm,
)

__all__ = ["Graph", "Leaf", "Value", "Weight", "capture"]
