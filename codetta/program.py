"""Program: one matrix product (or several that share A) and the epilogue its output tile goes through.

A hand-written epilogue and a captured model both become this. It is data: no tensors, no device, no tile sizes.
N, K and the operands' kinds are static, the number of rows is not. What a program means is defined by the reference
backend; every other backend must agree with it.

    x (M, K) · w_i (N_i, K)ᵀ = acc_i        products, fp32 accumulation
    acc_i, operands -> values               nodes, see ir/
    values -> stores and sinks              what leaves the chip
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property

import torch

from codetta.errors import TraceError
from codetta.ir.graph import Frame, Node, Space, node, topological
from codetta.ir.show import equations
from codetta.rewrite.columns import WIDEST_BLOCK, part_sinks_to_leaves, spans_strips, strip, wide_frames

LAYOUTS = ("rows", "bthd", "bhtd", "bhdt")  # b sample, t row within it, h head, d column within the head


@dataclass(frozen=True)
class Product:
    """One B operand: N columns; stored (N, K) as nn.Linear does ("nk") or (K, N) ("kn")."""

    cols: int
    dtype: torch.dtype
    layout: str = "nk"


@dataclass(frozen=True)
class Operand:
    """A tensor that the epilogue reads, and which of its elements belongs to output element (m, n).

    rows: none | each (m) | sample (m // rows per sample) | repeat (m % its rows) | index (the row that `row_index` names)
    cols: 0 for none, else how many columns it has; `period` if they repeat over the columns of the value.
    stat: the reduction whose tile partials it holds, finished as it is loaded.
    """

    name: str
    dtype: torch.dtype
    rows: str = "each"
    cols: int = 0
    period: int = 0
    group: int = 1  # one value per `group` rows
    layout: str = "rows"
    head: int = 0  # columns per head, for layouts other than rows
    row_index: str | None = None
    stat: str | None = None


@dataclass(frozen=True)
class Piece:
    """A value and the strip of the output's columns that it fills (None: all)."""

    value: Node
    frame: Frame | None = None


@dataclass(frozen=True)
class Store:
    """An output tensor: its dtype and layout, and the values that fill it."""

    name: str
    pieces: tuple[Piece, ...]
    dtype: torch.dtype
    cols: int  # 0: one value per row
    group: int = 1  # one value per `group` rows
    layout: str = "rows"
    head: int = 0
    row_index: str | None = None
    accumulate: bool = False


@dataclass(frozen=True)
class Sink:
    """A reduction over rows or columns, written as one partial per tile."""

    name: str
    op: str  # row_sum, row_max, row_moments, row_lse, col_sum, col_max
    values: tuple[Node, ...]  # reduced together: the strips of one value
    cols: int  # columns that a row reduction covers, or that a column reduction returns
    frames: tuple[Frame | None, ...] = (None,)  # of column reductions: where each strip's columns go

    @property
    def by_row(self) -> bool:
        return self.op.startswith("row_")

    @property
    def how(self) -> str:
        return self.op[4:]


@dataclass(frozen=True)
class Strip:
    """What one accumulator holds: the columns of one product, or one frame of them."""

    product: int
    frame: Frame | None


@dataclass(frozen=True)
class Segment:
    """Products that meet in one tile, and what is made of them. Segments share A and a launch, nothing else."""

    strips: tuple[Strip, ...]
    cols: int  # columns of each strip
    stores: tuple[tuple[int, int], ...]  # (store, piece) indices
    sinks: tuple[int, ...]
    nodes: tuple[Node, ...] = field(repr=False)  # in order, arguments first


@dataclass(frozen=True)
class Program:
    name: str
    k: int
    a_dtype: torch.dtype
    products: tuple[Product, ...]
    operands: tuple[Operand, ...]
    stores: tuple[Store, ...]
    sinks: tuple[Sink, ...]
    outputs: tuple[str, ...]  # names of stores and sinks, in the order in which they are returned
    a_layout: str = "mk"  # or "km": A is stored transposed, as weight gradients need it
    batched: bool = False  # one B per batch entry; rows of all entries are counted through
    tf32: bool = False

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        return tuple(_segments(self))

    @cached_property
    def text(self) -> str:
        """The program as equations; equal text, equal meaning."""
        lines = [f"program k={self.k} a={self.a_dtype} {self.a_layout} batched={self.batched} tf32={self.tf32}"]
        lines += [_line(each) for each in self.products] + [_line(each) for each in self.operands]
        roots: dict[str, Node] = {}
        for store in self.stores:
            lines.append(_line(store, skip=("pieces",)))
            for number, piece in enumerate(store.pieces):
                roots[f"{store.name}.{number} {piece.frame or ''}"] = piece.value
        for sink in self.sinks:
            lines.append(_line(sink, skip=("values",)))
            for number, value in enumerate(sink.values):
                roots[f"{sink.name}.{number}"] = value
        return "\n".join(lines + equations(roots))

    @cached_property
    def key(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()[:24]

    @cached_property
    def narrow(self) -> Program:
        """The same program with every part of its columns on a strip of its own, so that a tile of a few columns holds what belongs together.
        The program itself, where columns are taken apart in several ways, or reduced in groups."""
        whole = all(len(store.pieces) == 1 for store in self.stores) and all(len(s.values) == 1 for s in self.sinks)
        if not whole or not self.products:
            return self
        sinks = {sink.name: node(sink.op, sink.values[0]) for sink in self.sinks}
        try:
            return assemble(
                self.name, k=self.k, a_dtype=self.a_dtype, products=self.products, operands=self.operands, stores=self.stores, sinks=sinks,
                outputs=self.outputs, a_layout=self.a_layout, batched=self.batched, tf32=self.tf32, widest=1,
            )  # fmt: skip
        except TraceError:
            return self

    def operand(self, name: str) -> Operand:
        return next(each for each in self.operands if each.name == name)

    @property
    def cols(self) -> int:
        """Columns of all products together."""
        return sum(product.cols for product in self.products)

    @property
    def multiplies(self) -> bool:
        """Whether there is a product: a program can also be a stage between others, which only reads, computes and stores."""
        return bool(self.products)

    def __hash__(self) -> int:
        return hash(self.text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Program) and self.text == other.text

    def __str__(self) -> str:
        return f"{self.name}:\n  " + self.text.replace("\n", "\n  ")


def assemble(
    name: str,
    *,
    k: int,
    a_dtype: torch.dtype,
    products: Iterable[Product],
    operands: Iterable[Operand],
    stores: Iterable[Store],
    sinks: Mapping[str, Node],
    outputs: tuple[str, ...],
    a_layout: str = "mk",
    batched: bool = False,
    tf32: bool = False,
    widest: int = WIDEST_BLOCK,
) -> Program:
    """A checked program from traced values: wide parts become strips, unused operands go.

    Each store comes with one piece that holds its whole value; `sinks` maps names to reduction nodes. widest: the run of columns that a
    tile can hold whole.
    """
    products = tuple(products)
    stores = list(stores)
    roots = [store.pieces[0].value for store in stores] + [sink.args[0] for sink in sinks.values()]
    wide_of = _wide_by_root(roots, widest) if products else dict.fromkeys(map(id, roots))
    placed_stores = []
    for store in stores:
        value = store.pieces[0].value
        wide = wide_of[id(value)]
        if wide and spans_strips(value, wide, widest):
            pieces = tuple(Piece(strip(value, frame, widest), frame) for frame in _frames(value, wide))
        else:
            pieces = (Piece(part_sinks_to_leaves(value, widest)),)
        placed_stores.append(_replace_pieces(store, pieces))
    placed_sinks = []
    for sink_name, sink in sinks.items():
        value = sink.args[0]
        cols = value.space.cols
        frames: tuple[Frame | None, ...] = (None,)
        wide = wide_of[id(value)]
        if wide and spans_strips(value, wide, widest):
            frames = tuple(_frames(value, wide))
            values = tuple(strip(value, frame, widest) for frame in _frames(value, wide))
        else:
            values = (part_sinks_to_leaves(value, widest),)
        placed_sinks.append(Sink(sink_name, sink.op, values, cols, frames))
    used = {
        leaf.attr("name")
        for leaf in topological(
            [p.value for s in placed_stores for p in s.pieces] + [v for s in placed_sinks for v in s.values]
        )
        if leaf.op in ("load", "load_int")
    }
    used |= {store.row_index for store in placed_stores}
    operands = tuple(operands)
    used |= {operand.row_index for operand in operands if operand.name in used}
    operands = tuple(operand for operand in operands if operand.name in used)
    program = Program(
        name,
        k,
        a_dtype,
        products,
        operands,
        tuple(placed_stores),
        tuple(placed_sinks),
        outputs,
        a_layout,
        batched,
        tf32,
    )
    _ = program.segments  # raises where values of different products cannot meet
    return program


def _wide_by_root(roots: list[Node], widest: int) -> dict[int, tuple[int, int, int] | None]:
    """How columns are taken apart for each root: one way for all roots that share products, directly or through others."""
    groups: list[tuple[set[int], list[Node]]] = []
    for root in roots:
        products = {leaf.attr("product") for leaf in topological([root]) if leaf.op == "acc"}
        members = [root]
        for group in [each for each in groups if each[0] & products]:
            groups.remove(group)
            products, members = products | group[0], group[1] + members
        groups.append((products, members))
    return {id(root): wide_frames(members, widest) for _, members in groups for root in members}


def _frames(value: Node, wide: tuple[int, int, int]) -> list[Frame]:
    count, block, cols = wide
    return [Frame(index, count, block * value.space.cols // cols) for index in range(count)]


def _replace_pieces(store: Store, pieces: tuple[Piece, ...]) -> Store:
    values = {each.name: getattr(store, each.name) for each in fields(store)}
    return Store(**{**values, "pieces": pieces})


def _segments(program: Program) -> list[Segment]:
    """Group the products by the outputs that need them together."""
    if not program.products:
        return [_stage(program)]
    strips: dict[Strip, Strip] = {}  # union-find parents

    def find(strip_: Strip) -> Strip:
        while strips[strip_] is not strip_:
            strip_ = strips[strip_]
        return strip_

    def needs(values: Iterable[Node]) -> list[Strip]:
        found = []
        for leaf in topological(values):
            if leaf.op == "acc":
                each = Strip(leaf.attr("product"), leaf.attr("frame"))
                strips.setdefault(each, each)
                found.append(each)
        return found

    roots: list[tuple[str, int, int, tuple[Node, ...]]] = []
    for s, store in enumerate(program.stores):
        roots += [("store", s, p, (piece.value,)) for p, piece in enumerate(store.pieces)]
    roots += [("sink", s, 0, sink.values) for s, sink in enumerate(program.sinks)]
    needed = [needs(values) for *_, values in roots]
    for group in needed:
        for each in group[1:]:
            # The first strip met stays the root, so that segments come in the order of the products.
            strips[find(each)] = find(group[0])
    for each in strips:
        strips[each] = find(each)
    if not strips:
        raise TraceError("no output depends on the product: return something made of the accumulator")
    heads = sorted({id(find(each)): find(each) for each in strips}.values(), key=_strip_order)
    result = []
    for number, head in enumerate(heads):
        members = tuple(sorted((each for each in strips if find(each) is head), key=_strip_order))
        mine = [r for r, group in zip(roots, needed, strict=True) if (find(group[0]) is head if group else number == 0)]
        nodes = tuple(topological([value for *_, values in mine for value in values]))
        widths = {leaf.space.cols for leaf in nodes if leaf.op == "acc"}
        if len(widths) > 1:
            listed = " and ".join(str(width) for width in sorted(widths))
            raise TraceError(
                f"products with {listed} columns meet in one output: only products with the same number of columns can, "
                "or values that are taken apart alike"
            )
        result.append(
            Segment(
                members,
                widths.pop(),
                tuple((s, p) for kind, s, p, _ in mine if kind == "store"),
                tuple(s for kind, s, _, _ in mine if kind == "sink"),
                nodes,
            )
        )
    return result


def _stage(program: Program) -> Segment:
    """The one segment of a program without products."""
    values = [piece.value for store in program.stores for piece in store.pieces]
    values += [value for sink in program.sinks for value in sink.values]
    widths = {value.space.cols for value in values} - {0}
    nodes = tuple(topological(values))
    if len(widths) != 1:
        raise TraceError("all outputs of a program without a product have the same columns")
    stores = tuple((s, p) for s, store in enumerate(program.stores) for p in range(len(store.pieces)))
    return Segment((), widths.pop(), stores, tuple(range(len(program.sinks))), nodes)


def _strip_order(each: Strip) -> tuple[int, int]:
    return each.product, each.frame.index if each.frame else 0


def _line(item: object, skip: tuple[str, ...] = ()) -> str:
    names = [each.name for each in fields(item) if each.name not in skip]  # type: ignore[arg-type]
    return f"{type(item).__name__} " + " ".join(f"{name}={getattr(item, name)}" for name in names)


def acc_node(product: int, cols: int) -> Node:
    return node("acc", space=Space(1, cols), product=product)


def load_node(operand: Operand, cols: int, fieldname: str | None = None) -> Node:
    """The value of an operand over a space of `cols` columns (0: none)."""
    rows = 0 if operand.rows == "none" else operand.group
    integer = (
        not operand.dtype.is_floating_point and operand.dtype in (torch.int32, torch.int64) and operand.stat is None
    )
    return node(
        "load_int" if integer else "load",
        space=Space(rows, cols),
        name=operand.name,
        field=fieldname,
        period=operand.period or None,
    )
