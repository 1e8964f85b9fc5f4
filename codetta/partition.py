"""Partition: who computes what. Every value belongs to one program, or stays with the graph it came from.

Products with one left operand that follow each other make a group, and a group becomes a program. A value is computed by the
last group that it depends on. Groups are numbered in the order of the graph, and a group reads only what earlier ones or the
graph before it have made: cycles cannot arise. A reduction of a whole row is known only behind its program, so values that
use it are computed where they are read, by later programs ("late").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from codetta.capture import Graph, Value
from codetta.errors import Reason, TraceError
from codetta.ir.graph import Node, Space, node, rebuilt, topological, transform
from codetta.ir.op import is_sink
from codetta.program import Operand, Piece, Product, Program, Store, acc_node, assemble, load_node

NOWHERE = -1  # made of leaves alone: computed by whoever reads it
GRAPH = -2  # left to the graph


@dataclass(frozen=True)
class Place:
    group: int
    late: bool = False  # known only behind the group


@dataclass(frozen=True, eq=False)
class Stored:
    """A value that a program stores for others: a matrix, or one number per row."""

    value: Node
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Source:
    """Where a program's operand comes from: a leaf of the graph, a stored value, a statistic, or parameters alone."""

    kind: str  # leaf, stored, stat, constant
    name: str = ""
    value: Node | None = None
    dtype: torch.dtype | None = None


@dataclass(eq=False)
class Launch:
    """A program with what it reads and what it makes."""

    number: int
    program: Program
    a: Source
    weights: list[tuple[str, Node | None]]  # a weight's name and its gain
    operands: dict[str, Source]
    stores: dict[str, tuple[Node, torch.dtype]]
    sinks: dict[str, Node]
    sizes: list[object] = field(default_factory=list)


@dataclass(eq=False)
class Present:
    """A stored value as the tensor that the graph expects."""

    target: fx.Node
    value: Value
    dtype: torch.dtype


@dataclass(eq=False)
class Run:
    """An operator that stays with the graph."""

    target: fx.Node


Step = Launch | Present | Run


@dataclass(eq=False)
class Plan:
    steps: list[Step]
    graph: Graph
    refusals: dict[fx.Node, Reason]


@dataclass(eq=False)
class _Group:
    number: int
    base: Node
    dtype: torch.dtype
    products: list[Node] = field(default_factory=list)
    stores: dict[tuple[Node, torch.dtype], str] = field(default_factory=dict)
    sinks: dict[Node, str] = field(default_factory=dict)


def partition(graph: Graph, law: Callable[[Node], Node | None]) -> Plan:
    """Apply the law to every product, place all values, and order what is to be done."""
    changed = transform([value.node for value in graph.values.values()], law)
    values = {
        each: replace(value, node=changed[id(value.node)]) for each, value in graph.values.items()
    }
    dtypes = {changed[id(old)]: dtype for old, dtype in graph.dtypes.items() if id(old) in changed}
    return _Partition(graph, values, dtypes).plan()


class _Partition:
    def __init__(self, graph: Graph, values: dict[fx.Node, Value], dtypes: dict[Node, torch.dtype]) -> None:
        self.graph, self.values, self.dtypes = graph, values, dtypes
        self.refusals = dict(graph.refusals)
        self.groups: list[_Group] = []
        self.group_of: dict[Node, int] = {}
        self.latest: dict[fx.Node, int] = {}  # the last group that a node of the graph depends on
        self.places: dict[Node, Place] = {}
        self.of_value: dict[Node, fx.Node] = {}
        self.steps: list[Step] = []
        self.done: set[object] = set()
        self._number()

    # ---- groups and places

    def _number(self) -> None:
        """Number the groups in the order in which the graph meets their products, and what depends on them."""
        for each in self.graph.fx.nodes:
            latest = max((self.latest.get(arg, NOWHERE) for arg in each.all_input_nodes), default=NOWHERE)
            value = self.values.get(each)
            if value is not None:
                for part in topological([value.node]):
                    if part.op == "product" and part not in self.group_of:
                        self._join_group(part)
                    self._place(part)
                latest = max([latest, *(self.places[part].group for part in topological([value.node]))])
                self.of_value.setdefault(value.node, each)
            self.latest[each] = latest

    def _join_group(self, product: Node) -> None:
        dtype, base = product.attr("dtype"), product.args[0]
        last = self.groups[-1] if self.groups else None
        if last is None or last.base is not base or last.dtype != dtype:
            last = _Group(len(self.groups), base, dtype)
            self.groups.append(last)
        self.group_of[product] = last.number
        last.products.append(product)

    def _place(self, value: Node) -> Place:
        if value in self.places:
            return self.places[value]
        self.places[value] = found = self._find(value)
        return found

    def _find(self, value: Node) -> Place:
        if value.op == "product":
            return Place(self.group_of[value])
        if value.op in ("const", "load", "vector") or not value.args:
            return Place(NOWHERE)
        args = [self._place(arg) for arg in value.args]
        if any(arg.group == GRAPH for arg in args):
            return Place(GRAPH)
        group = max(arg.group for arg in args)
        if group == NOWHERE:
            return Place(NOWHERE)
        behind = max((p.group for p, arg in zip(args, value.args, strict=True) if p.late or is_sink(arg.op)), default=NOWHERE)
        if is_sink(value.op):
            # A reduction of something late would need a pass of its own.
            return Place(GRAPH) if args[0].late else Place(group)
        for leaf in value.args:
            if leaf.op == "load" and self.latest.get(self.graph.leaves[leaf.attr("name")].source, NOWHERE) >= group:
                return Place(GRAPH)
        return Place(group, late=behind == group)

    # ---- what must exist

    def plan(self) -> Plan:
        output = next(each for each in self.graph.fx.nodes if each.op == "output")
        wanted: list[fx.Node] = list(output.all_input_nodes)
        # First find out what every group must store, then write the programs, then order the steps.
        self.needs: list[object] = []
        self._close(wanted)
        self.launches = {group.number: self._launch(group) for group in self.groups if group.stores or group.sinks}
        for each in wanted:
            self._emit(each)
        return Plan(self.steps, self.graph, self.refusals)

    def _close(self, wanted: list[fx.Node]) -> None:
        """Mark what the graph's outputs need, and what that needs, until nothing is new."""
        self.tensors: dict[fx.Node, str] = {}  # nodes of the graph that must exist, and who makes them
        self.pending: list[fx.Node] = list(wanted)
        self.open_groups: list[int] = []
        built: dict[int, tuple[int, int]] = {}
        while self.pending or self.open_groups:
            while self.pending:
                self._need_tensor(self.pending.pop())
            number = self.open_groups.pop() if self.open_groups else None
            if number is None:
                continue
            group = self.groups[number]
            size = (len(group.stores), len(group.sinks))
            if built.get(number) == size:
                continue
            built[number] = size
            self._sources(group)

    def _need_tensor(self, each: fx.Node) -> None:
        if each in self.tensors or each.op in ("placeholder", "get_attr", "output"):
            return
        value = self.values.get(each)
        if value is not None and self._storable(value.node):
            self.tensors[each] = "stored"
            self._need_stored(value.node, each.meta["val"].dtype)
            return
        self.tensors[each] = "run"
        self.pending += each.all_input_nodes

    def _storable(self, value: Node) -> bool:
        place = self.places[value]
        return place.group >= 0 and not place.late and not is_sink(value.op) and value.space == Space(1, value.space.cols)

    def _need_stored(self, value: Node, dtype: torch.dtype) -> None:
        group = self.groups[self.places[value].group]
        if (value, dtype) not in group.stores:
            group.stores[value, dtype] = f"y{len(group.stores)}"
            self.open_groups.append(group.number)

    def _need_stat(self, sink: Node) -> None:
        group = self.groups[self.places[sink].group]
        if sink not in group.sinks:
            group.sinks[sink] = f"s{len(group.sinks)}"
            self.open_groups.append(group.number)

    # ---- programs

    def _sources(self, group: _Group) -> tuple[Source, dict[str, Source], dict[str, Operand], dict[int, Node]]:
        """What the group reads, marked as needed; and its values in terms of accumulators and operands."""
        sources: dict[str, Source] = {}
        operands: dict[str, Operand] = {}
        written: dict[int, Node] = {}

        def operand(source: Source, made: Operand, cols: int, part: str | None = None) -> Node:
            key = next((name for name, each in sources.items() if _same_source(each, source)), "")
            if not key or replace(operands[key], name="") != replace(made, name=""):
                key = f"x{len(sources)}"
                sources[key], operands[key] = source, replace(made, name=key)
            return load_node(operands[key], cols, part)

        def write(value: Node) -> Node:
            if id(value) not in written:
                written[id(value)] = fresh(value)
            return written[id(value)]

        def fresh(value: Node) -> Node:
            place = self.places.get(value) or self._place(value)
            if value.op == "const":
                return value
            if value.op == "product" and place.group == group.number:
                return acc_node(group.products.index(value), value.space.cols)
            if place.group == NOWHERE and not value.space.rows and _is_constant(value):
                made = Operand("", torch.float32, "none", value.space.cols)
                if value.op == "load" and value.attr("period"):
                    return leaf(value)
                return operand(Source("constant", value=value), made, value.space.cols)
            if value.op == "load":
                return leaf(value)
            if value.op == "moment" and self.places[value.args[0]].group < group.number:
                self._need_stat(value.args[0])
                made = Operand("", torch.float32, "each", stat="moments")
                return operand(Source("stat", value=value.args[0]), made, 0, value.attr("field"))
            if is_sink(value.op) and place.group < group.number:
                self._need_stat(value)
                return operand(Source("stat", value=value), Operand("", torch.float32, "each", stat=value.op[4:]), 0)
            if 0 <= place.group < group.number and not place.late:
                dtype = self.dtypes.get(value, group.dtype)
                self._need_stored(value, dtype)
                source = Source("stored", value=value, dtype=dtype)
                return operand(source, Operand("", dtype, "each", value.space.cols), value.space.cols)
            return rebuilt(value, tuple(write(arg) for arg in value.args))

        def leaf(value: Node) -> Node:
            known = self.graph.leaves[value.attr("name")]
            if known.source not in self.graph.constant:
                self.pending.append(known.source)
            return operand(Source("leaf", known.operand.name), known.operand, value.space.cols)

        for value, _ in group.stores:
            write(value)
        for sink in group.sinks:
            written[id(sink)] = node(sink.op, write(sink.args[0]))
        return self._left(group), sources, operands, written

    def _left(self, group: _Group) -> Source:
        base = group.base
        if base.op == "load":
            leaf = self.graph.leaves[base.attr("name")]
            self.pending.append(leaf.source)
            return Source("leaf", leaf.operand.name)
        if self._storable(base):
            self._need_stored(base, group.dtype)
            return Source("stored", value=base, dtype=group.dtype)
        at = self.of_value.get(base)
        if at is None:
            raise TraceError("a product's left operand is nowhere in the graph")
        self.pending.append(at)
        self.refusals.setdefault(at, Reason("late", "a product reads it, but it is known only behind the program that makes it"))
        return Source("tensor", at.name)

    def _launch(self, group: _Group) -> Launch:
        a, sources, operands, written = self._sources(group)
        products = []
        for product in group.products:
            weight = self.graph.weights[product.attr("weight")]
            products.append(Product(product.space.cols, group.dtype, "kn" if weight.transposed else "nk"))
        k = _depth(self.graph, group.products[0].attr("weight"))
        stores = [
            Store(name, (Piece(written[id(value)]),), dtype, value.space.cols)
            for (value, dtype), name in group.stores.items()
        ]
        sinks = {name: written[id(sink)] for sink, name in group.sinks.items()}
        program = assemble(
            f"program_{group.number}",
            k=k,
            a_dtype=group.dtype,
            products=products,
            operands=operands.values(),
            stores=stores,
            sinks=sinks,
            outputs=tuple([store.name for store in stores] + list(sinks)),
        )
        used = {each.name for each in program.operands}
        return Launch(
            group.number,
            program,
            a,
            [(product.attr("weight"), product.attr("gain")) for product in group.products],
            {name: source for name, source in sources.items() if name in used},
            {name: (value, dtype) for (value, dtype), name in group.stores.items()},
            {name: sink for sink, name in group.sinks.items()},
        )

    # ---- order

    def _emit(self, each: fx.Node) -> None:
        """Put the steps that make a tensor of the graph behind those that they need."""
        stack: list[tuple[object, bool]] = [(each, False)]
        while stack:
            item, ready = stack.pop()
            if item in self.done:
                continue
            if ready:
                self.done.add(item)
                self._step(item)
                continue
            stack.append((item, True))
            stack += [(need, False) for need in self._before(item) if need not in self.done]

    def _before(self, item: object) -> list[object]:
        if isinstance(item, int):
            launch = self.launches[item]
            return [need for source in [launch.a, *launch.operands.values()] for need in self._maker(source)]
        assert isinstance(item, fx.Node)
        if self.tensors.get(item) == "stored":
            return [self.places[self.values[item].node].group]
        return list(item.all_input_nodes)

    def _maker(self, source: Source) -> list[object]:
        match source.kind:
            case "leaf":
                return [self.graph.leaves[source.name].source]
            case "tensor":
                return [next(each for each in self.graph.fx.nodes if each.name == source.name)]
            case "stored" | "stat":
                assert source.value is not None
                return [self.places[source.value].group]
        return []

    def _step(self, item: object) -> None:
        if isinstance(item, int):
            self.steps.append(self.launches[item])
            return
        assert isinstance(item, fx.Node)
        if item.op in ("placeholder", "get_attr", "output"):
            return
        if self.tensors.get(item) == "stored":
            value = self.values[item]
            self.steps.append(Present(item, value, item.meta["val"].dtype))
        else:
            self.steps.append(Run(item))


def _is_constant(value: Node) -> bool:
    return all(each.op in ("const", "vector") or each.args or each.attr("constant") for each in topological([value]))


def _same_source(x: Source, y: Source) -> bool:
    return (x.kind, x.name, x.value, x.dtype) == (y.kind, y.name, y.value, y.dtype)


def _depth(graph: Graph, name: str) -> int:
    weight = graph.weights[name]
    rows, cols = weight.source.meta["val"].shape
    return int(rows if weight.transposed else cols)
