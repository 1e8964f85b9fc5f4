"""Node: an immutable value of an epilogue, and Space: the part of the output it has values for.

Nodes are interned: two nodes with the same op, arguments and attributes are the same object, so common
subexpressions are shared for free and `is` compares graphs. This file knows shapes, not devices or tiles.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from codetta.errors import TraceError
from codetta.ir.op import OPS


@dataclass(frozen=True)
class Space:
    """Where a value lives: which rows and which columns of the product it distinguishes.

    rows: 0 if it is the same for every row, else r for one value per r rows (1: one per row).
    cols: 0 if it is the same for every column, else the number of columns.
    """

    rows: int = 0
    cols: int = 0

    def __str__(self) -> str:
        rows = "1" if not self.rows else "M" if self.rows == 1 else f"M/{self.rows}"
        return f"({rows}, {self.cols or 1})"


@dataclass(frozen=True)
class Frame:
    """A strip of columns: part `index` of `count` equal parts of every block of `block` columns.

    Column j of the strip is column (j // q) * block + index * q + j % q of the whole, with q = block // count.
    Gate and up halves of one weight are count 2, block N; rotate-half RoPE is count 2, block = head size;
    adjacent pairs are count 2, block 2.
    """

    index: int
    count: int
    block: int

    @property
    def run(self) -> int:
        """How many adjacent columns of the strip stay adjacent in the whole."""
        return self.block // self.count

    def column(self, j: Any) -> Any:
        return (j // self.run) * self.block + self.index * self.run + j % self.run


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True)
class Node:
    """One value: an op of the table applied to nodes. Create with `node`, which interns and infers the space."""

    op: str
    args: tuple[Node, ...]
    attrs: tuple[tuple[str, Hashable], ...]
    space: Space
    dtype: str  # what arithmetic sees: "float" (fp32; fp64 in the reference on request), "int" or "bool"

    def attr(self, name: str, default: Any = None) -> Any:
        return next((value for key, value in self.attrs if key == name), default)

    def __repr__(self) -> str:
        return f"<{self.op} {self.space}>"


_interned: weakref.WeakValueDictionary[tuple[Any, ...], Node] = weakref.WeakValueDictionary()


def node(op: str, *args: Node, space: Space | None = None, **attrs: Any) -> Node:
    """The node for `op` over `args`; leaves (acc, load, const, index) say their space, the others infer it."""
    spec = OPS[op]
    if spec.arity >= 0 and len(args) != spec.arity:
        raise TraceError(f"{op} takes {spec.arity} arguments, got {len(args)}")
    pairs = tuple(sorted((key, value) for key, value in attrs.items() if value is not None))
    if space is None:
        space = _infer(op, args, dict(pairs))
    # repr: 0.0 equals -0.0, but is another constant.
    key = (op, tuple(id(arg) for arg in args), tuple((k, repr(v) if k == "value" else v) for k, v in pairs), space)
    found = _interned.get(key)
    if found is None:
        dtype = spec.result if spec.result != "same" else _joined_dtype(args)
        found = _interned[key] = Node(op, args, pairs, space, dtype)
    return found


def const(value: float) -> Node:
    return node("const", space=Space(), value=value)


def rebuilt(old: Node, args: tuple[Node, ...]) -> Node:
    """The same op and attributes over other arguments, its space inferred anew."""
    if all(new is was for new, was in zip(args, old.args, strict=True)):
        return old
    attrs: dict[str, Any] = dict(old.attrs)
    space = old.space if OPS[old.op].shape == "leaf" else None  # products and the like say their own
    return node(old.op, *args, space=space, **attrs)


def unstaged(value: Node) -> Node:
    """What a stage makes: having a program of its own changes no value."""
    return value.args[0] if value.op == "stage" else value


def topological(roots: Iterable[Node], within: Callable[[Node], bool] | None = None) -> list[Node]:
    """Every node that the roots need, arguments before users, in an order that depends on the graph alone.

    within: whose arguments are looked at; others are the last on their way.
    """
    order: list[Node] = []
    seen: set[int] = set()

    def below(each: Node) -> Iterator[Node]:
        return iter(each.args if within is None or within(each) else ())

    def visit(root: Node) -> None:
        stack: list[tuple[Node, Iterator[Node]]] = [(root, below(root))]
        seen.add(id(root))
        while stack:
            current, pending = stack[-1]
            for arg in pending:
                if id(arg) not in seen:
                    seen.add(id(arg))
                    stack.append((arg, below(arg)))
                    break
            else:
                order.append(current)
                stack.pop()

    for root in roots:
        if id(root) not in seen:
            visit(root)
    return order


def transform(roots: Iterable[Node], change: Callable[[Node], Node | None]) -> dict[int, Node]:
    """Rebuild the graph bottom-up through `change` (None: keep); maps id(old node) to the new node."""
    done: dict[int, Node] = {}
    for old in topological(roots):
        new = rebuilt(old, tuple(done[id(arg)] for arg in old.args))
        done[id(old)] = change(new) or new
    return done


def broadcast(spaces: Iterable[Space], what: str) -> Space:
    """The common space of operands that meet elementwise: equal, or absent on one side."""
    rows = cols = 0
    for space in spaces:
        if space.rows and rows and space.rows != rows:
            raise TraceError(f"{what}: one value per {rows} rows meets one per {space.rows}; use codetta.spread first")
        if space.cols and cols and space.cols != cols:
            raise TraceError(
                f"{what}: {cols} columns meet {space.cols}; only values with the same number of columns combine "
                "(halves, pairs and heads shrink it, join and spread restore it)"
            )
        rows, cols = rows or space.rows, cols or space.cols
    return Space(rows, cols)


def _joined_dtype(args: tuple[Node, ...]) -> str:
    kinds = {arg.dtype for arg in args}
    return "float" if "float" in kinds or not kinds else "int" if "int" in kinds else "bool"


def _infer(op: str, args: tuple[Node, ...], attrs: dict[str, Any]) -> Space:
    match OPS[op].shape:
        case "elementwise":
            return broadcast((arg.space for arg in args), op)
        case "part":
            source, frame = args[0].space, attrs["frame"]
            if frame.block % frame.count or not source.cols or source.cols % frame.block:
                raise TraceError(
                    f"{source.cols} columns cannot be split into {frame.count} parts of blocks of {frame.block}"
                )
            return Space(source.rows, source.cols // frame.count)
        case "join":
            source = broadcast((arg.space for arg in args), op)
            run = attrs["block"] // len(args)
            if attrs["block"] % len(args) or not source.cols or source.cols % run:
                raise TraceError(f"{len(args)} values of {source.cols} columns cannot be joined in runs of {run}")
            return Space(source.rows, source.cols * len(args))
        case "group":
            source, rows, cols = args[0].space, attrs["rows"], attrs["cols"]
            if rows < 1 or cols < 1 or not source.cols or source.cols % cols:
                raise TraceError(f"{source.cols} columns cannot be grouped by {cols}")
            if rows > 1 and source.rows != 1:
                raise TraceError(f"rows can be grouped by {rows} only where there is one value per row")
            return Space(source.rows * rows, source.cols // cols)
        case "spread":
            source, rows, cols = args[0].space, attrs["rows"], attrs["cols"]
            if rows < 1 or cols < 1 or not source.cols:
                raise TraceError(
                    f"{source.cols} columns cannot be spread by {cols}: a value without columns needs no spread"
                )
            if rows > 1 and source.rows != rows:
                raise TraceError(f"one value per {source.rows} rows cannot be spread over {rows}")
            return Space(source.rows // rows, source.cols * cols)
        case "row_sink":
            if not (args[0].space.cols and args[0].space.rows == 1):
                raise TraceError("a row reduction needs a value for each row and column")
            return Space(1, 0)
        case "col_sink":
            if not (args[0].space.cols and args[0].space.rows == 1):
                raise TraceError("a column reduction needs a value for each row and column")
            return Space(0, args[0].space.cols)
        case shape:
            raise AssertionError(f"op {op} is a leaf ({shape}) and must be given its space")
