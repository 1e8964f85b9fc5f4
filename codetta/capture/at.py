"""At: one operator of the graph, and what handlers ask of it: its arguments, broadcast and brought into one form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from codetta import dsl
from codetta.capture.graph import FLOATS, Graph, Law, Leaf, RefusedError, Value, Weight
from codetta.capture.kinds import packet_of
from codetta.ir import view as views
from codetta.ir.graph import Frame, Node, Space, node
from codetta.ir.view import Dims
from codetta.program import Operand
from codetta.rewrite.columns import join_rises

aten = torch.ops.aten


def is_tensor(each: fx.Node) -> bool:
    return isinstance(each.meta.get("val"), torch.Tensor)


def operator_name(each: fx.Node) -> str:
    return str(packet_of(each) or each.target).removeprefix("aten.")


def shape(each: fx.Node) -> list[Any]:
    return list(each.meta["val"].shape)


class At:
    """One operator of the graph, looked at."""

    def __init__(self, graph: Graph, at: fx.Node, laws: Sequence[Law]) -> None:
        self.graph, self.fx, self.laws = graph, at, laws

    @property
    def packet(self) -> Any:
        return packet_of(self.fx)

    def arg(self, index: int, default: Any = None) -> Any:
        if index < len(self.fx.args):
            return self.fx.args[index]
        return default

    def option(self, name: str, index: int, default: Any) -> Any:
        return self.fx.kwargs.get(name, self.arg(index, default))

    def operand(self, index: int = 0, repeated: bool = False) -> Value:
        """The value of an argument; repeated: it may be one that the graph repeats over columns, and that has none itself."""
        arg = self.arg(index)
        value = self.graph.values.get(arg) if isinstance(arg, fx.Node) else None
        if value is None:
            raise RefusedError("its first argument is not made by a product")
        if not repeated and not is_whole(value, arg):
            raise RefusedError("its first argument repeats over columns")
        return value

    def meet(self, args: Sequence[Any], at: Any = None) -> tuple[list[dsl.Value], Dims]:
        """Arguments of an elementwise operator, broadcast as PyTorch does, and the dimensions of the result.

        at: an argument that has the result's dimensions, where the operator has several results.
        """
        wanted = shape(self.fx if at is None else at)
        known = [self.graph.values[arg] for arg in args if isinstance(arg, fx.Node) and arg in self.graph.values]
        whole = [each for each in known if _same_shape(views.shape_of(each.dims), wanted)]
        if not whole:
            # One number for each row, repeated by the graph: it stays one number until it meets the columns.
            alone = [arg for arg in args if isinstance(arg, fx.Node)]
            if len(alone) == 1 and known and known[0].node.space.cols == 0:
                return [self._aligned(arg, known[0].dims) for arg in args], known[0].dims
            raise RefusedError("a value is broadcast over dimensions that no product made")
        # The finest factors of all: the others are cut to fit.
        main = max(whole, key=lambda each: sum(len(dim) for dim in each.dims)).dims
        return [self._aligned(arg, main) for arg in args], main

    def _aligned(self, arg: Any, main: Dims) -> dsl.Value:
        if isinstance(arg, int | float) and not isinstance(arg, bool):
            return dsl.lift(arg)
        if not isinstance(arg, fx.Node) or not is_tensor(arg):
            raise RefusedError(f"an argument is {arg}, not a number or a tensor")
        value = self.graph.values.get(arg)
        if value is None:
            return dsl.Value(self.leaf(arg, main))
        offset = len(main) - len(value.dims)
        covered = {id(factor) for at, dim in enumerate(value.dims) if dim for factor in main[at + offset]}
        if any(id(factor) not in covered for factor in views.factors(main, "row")) and value.node.space.rows:
            # A matrix of other rows, such as one for each sample: to this one it is a tensor.
            return dsl.Value(self.leaf(arg, main))
        columns = views.factors(main, "col")
        for at, dim in enumerate(value.dims):
            if dim and not same_factors(dim, main[at + offset], value.dims, main):
                raise RefusedError("two values see their rows and columns in different orders")
        missing = [factor for factor in columns if id(factor) not in covered]
        if len(missing) == len(columns) or not missing:
            return dsl.Value(value.node)
        if missing == columns[-len(missing) :]:
            return dsl.spread(dsl.Value(value.node), views.product(factor.size for factor in missing))
        raise RefusedError("a value is repeated over columns in a way that tiles do not hold")

    def leaf(self, arg: fx.Node, main: Dims) -> Node:
        """A tensor of the graph as an operand of values with these dimensions."""
        tensor = arg.meta["val"]
        if tensor.dtype not in FLOATS:
            raise RefusedError(
                "an operand is a mask" if tensor.dtype == torch.bool else f"an operand has type {tensor.dtype}"
            )
        sizes = shape(arg)
        offset = len(main) - len(sizes)
        if offset < 0:
            raise RefusedError("an operand has more dimensions than the value")
        there = [at for at, size in enumerate(sizes) if not views.same(size, 1) and main[at + offset]]
        for at in there:
            if not views.same(sizes[at], views.product(factor.size for factor in main[at + offset])):
                raise RefusedError("an operand does not broadcast")
            if len({factor.kind for factor in main[at + offset]}) > 1:
                raise RefusedError("an operand mixes rows and columns")
        rows, columns = views.factors(main, "row"), views.factors(main, "col")
        covered = {id(factor) for at in there for factor in main[at + offset]}
        my_rows = [factor for factor in rows if id(factor) in covered]
        my_cols = [factor for factor in columns if id(factor) in covered]
        how = self._rows_of(my_rows, rows)
        cols = views.product(factor.size for factor in columns)
        width = views.product(factor.size for factor in my_cols) if my_cols else 0
        if my_cols and my_cols != columns[-len(my_cols) :]:
            raise RefusedError("an operand has some of the columns, but not the last ones")
        place = {id(factor): number for number, factor in enumerate([*rows, *columns])}
        order = tuple(sorted(there, key=lambda at: place[id(main[at + offset][0])]))
        if how == "sample" and width != cols:
            raise RefusedError("an operand for each sample repeats over columns")
        if how == "repeat" and not width:
            raise RefusedError("an operand has one number for each position of a sample")
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
        raise RefusedError("an operand has some of the rows, neither the first nor the last ones")

    def leaf_node(
        self, source: fx.Node, operand: Operand, order: tuple[int, ...], cols: int, start: int | None = None
    ) -> Node:
        graph = self.graph
        for leaf in graph.leaves.values():
            same = leaf.source is source and (leaf.order, leaf.start) == (order, start)
            if same and replace(leaf.operand, name="") == operand:
                break
        else:
            name = f"{source.name}_{len(graph.leaves)}" if source.name in graph.leaves else source.name
            leaf = graph.leaves[name] = Leaf(replace(operand, name=name), source, order, start)
        rows = 0 if operand.rows == "none" else 1
        constant = True if source in graph.constant else None
        return node(
            "load", space=Space(rows, cols), name=leaf.operand.name, period=operand.period or None, constant=constant
        )

    def weight_name(self, weight: Weight) -> str:
        known = self.graph.weights
        for name, each in known.items():
            if each == weight:
                return name
        known[f"w{len(known)}"] = weight
        return f"w{len(known) - 1}"

    def elementwise(self, meaning: Callable[..., dsl.Value], args: Sequence[Any]) -> Value:
        values, dims = self.meet(args)
        plain = meaning(*values).node
        value = join_rises(plain, self.cut_table)
        if value is not plain:
            self.fired("join_rises")
        return Value(value, dims)

    def fired(self, law: str) -> None:
        """Remember that a law was applied here."""
        laws = self.graph.fired.setdefault(self.fx, [])
        if law not in laws:
            laws.append(law)

    def cut_table(self, table: Node, frame: Frame) -> Node | None:
        """A part of a table that repeats with the very blocks that are taken apart."""
        leaf = self.graph.leaves[table.attr("name")]
        if leaf.operand.period != frame.block or leaf.start is not None or list(leaf.order) != sorted(leaf.order):
            return None
        width = frame.block // frame.count
        start = 0 if repeats(leaf.source, width) else frame.index * width
        operand = replace(leaf.operand, name="", cols=width, period=width)
        return self.leaf_node(leaf.source, operand, leaf.order, table.space.cols // frame.count, start)


def repeats(source: fx.Node, width: int) -> bool:
    """Whether the last dimension is one block of `width` columns over and over, by the way the tensor is made."""
    size = shape(source)[-1]
    if size == width:
        return True
    packet = packet_of(source)
    args: Any = source.args
    if packet is aten.cat:
        last = args[1] % len(shape(source)) == len(shape(source)) - 1 if len(args) > 1 else len(shape(source)) == 1
        return last and len(set(args[0])) == 1 and shape(args[0][0])[-1] == width
    if packet in (aten.cos, aten.sin, aten._to_copy, aten.neg, aten.clone) or (
        packet in (aten.mul, aten.div, aten.add) and not isinstance(args[1], fx.Node)
    ):
        return repeats(args[0], width)
    if packet in (aten.unsqueeze, aten.expand, aten.view) and shape(args[0])[-1] == size:
        return repeats(args[0], width)
    return False


def is_whole(value: Value, at: fx.Node) -> bool:
    """Whether the value has the dimensions of the tensor: one without columns may stand for as many as the graph repeats it over."""
    return _same_shape(views.shape_of(value.dims), shape(at))


def _same_shape(x: Sequence[Any], y: Sequence[Any]) -> bool:
    return len(x) == len(y) and all(views.same(a, b) for a, b in zip(x, y, strict=True))


def same_factors(x: Sequence[views.Factor], y: Sequence[views.Factor], of_x: Dims, of_y: Dims) -> bool:
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
