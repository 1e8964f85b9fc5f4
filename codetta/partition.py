"""Partition: what each program reads, computes and stores, and in which order. Nothing is done twice, nothing is left out.

It starts at what the graph returns and works backwards: a tensor is stored by the program that computes its value, or made by
the graph's own operator; a program reads leaves of the graph, what other programs stored, statistics, and parameters.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from codetta.capture import Graph, Value
from codetta.capture.at import is_whole
from codetta.capture.attention import made_of_sizes, mask_has_a_name
from codetta.capture.kinds import (
    behind,
    is_effect,
    is_random,
    is_size_of_inputs,
    is_tangent,
    is_view,
    origin,
    packet_of,
)
from codetta.errors import Reason, TraceError
from codetta.gather import Gather, region_of
from codetta.ir.graph import Node, Space, node, rebuilt, topological
from codetta.ir.op import OPS, is_sink
from codetta.ir.view import factors, has_columns_last, hint, in_order, is_matrix
from codetta.placement import Group
from codetta.plan.choose import FEW
from codetta.program import Operand, Piece, Product, Store, acc_node, assemble, load_node
from codetta.steps import Finish, Launch, Mask, Plan, Present, Room, Run, Source, Step, sinks_of


@dataclass(eq=False)
class _Needs:
    """What a group must make for others."""

    stores: dict[tuple[Node, torch.dtype], str] = field(default_factory=dict)
    sinks: dict[Node, str] = field(default_factory=dict)
    appends: dict[fx.Node, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.stores) + len(self.sinks) + len(self.appends)


class PartitionError(Exception):
    """The values of a group cannot be computed by one program; the graph must keep its products."""

    def __init__(self, group: Group, reason: Reason) -> None:
        super().__init__(str(reason))
        self.group, self.reason = group, reason


def partition(graph: Graph, outputs: int | None = None, again: bool = True) -> Plan:
    """Find out what every group must store, write the programs, and order what is to be done.

    outputs: how many of the graph's outputs are results; those that follow are gradients, and what only they need comes last.
    again: gradients may make a matrix once more that would have to be kept for them.
    """
    return _Partition(graph).plan(outputs, again)


class _Partition:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.values, self.places = graph, graph.values, graph.placement
        self.needs = [_Needs() for _ in graph.placement.groups]
        self.steps: list[Step] = []
        self.done: set[object] = set()
        self.masks: dict[fx.Node, Mask] = {}
        self.rooms: dict[fx.Node, Room] = {}
        self.joined: dict[tuple[Node, torch.dtype], tuple[Room, int]] = {}  # values that are stored side by side
        self.again: dict[fx.Node, int] = {}  # tensors that a group among the gradients makes once more

    # ---- what must exist

    def plan(self, outputs: int | None, again: bool) -> Plan:
        output = next(each for each in self.graph.nodes.nodes if each.op == "output")
        wanted: list[fx.Node] = list(output.all_input_nodes)
        results = (
            wanted if outputs is None else [each for each in output.args[0][:outputs] if isinstance(each, fx.Node)]
        )
        effects = [each for each in self.graph.nodes.nodes if is_effect(each)]
        self._close(wanted + effects)
        self.launches = {
            group.number: self._launch(group)
            for group, needs in zip(self.places.groups, self.needs, strict=True)
            if len(needs)
        }
        if outputs is not None and again:
            self._make_again(self._all_before(results))
        # Random numbers are drawn in the order of the graph, as eager draws them.
        late = behind(self.graph.nodes, is_tangent)
        for each in self.graph.nodes.nodes:
            if is_random(each) and each in self.tensors and each not in late:
                self._emit(each)
        for each in results:
            self._emit(each)
        for each in effects:
            self._emit(each)
        # Of several results, each is carried over by itself.
        for step in list(self.steps):
            users = step.target.users if isinstance(step, Run) else ()
            for each in users:
                if each.target is operator.getitem and each in self.tensors:
                    self._emit(each)
        forward = len(self.steps)
        # In the order of the graph, so that what a layer's gradients need can go before the next layer's are made.
        position = {each: number for number, each in enumerate(self.graph.nodes.nodes)}
        for each in sorted(wanted, key=position.__getitem__):
            self._emit(each)
        read = {
            self.graph.leaves[source.name].source
            for launch in self.launches.values()
            for source in [launch.a, *launch.operands.values()]
            if source.kind == "leaf"
        }
        # Whoever is given a tensor may write to it.
        given = {origin(each) for each in wanted}
        gather = Gather(self.graph, read, given)
        first, second = (gather(half) for half in (self.steps[:forward], self.steps[forward:]))
        return Plan(first + second, self.graph, len(first), set(self.again.values()))

    def _close(self, wanted: list[fx.Node]) -> None:
        """Mark what the graph's outputs need, and what that needs, until nothing is new."""
        self.tensors: dict[fx.Node, str] = {}  # nodes of the graph that must exist, and who makes them
        self.pending: list[fx.Node] = list(wanted)
        self.open_groups: list[int] = []
        built: dict[int, int] = {}
        while self.pending or self.open_groups:
            while self.pending:
                self._need_tensor(self.pending.pop())
            number = self.open_groups.pop() if self.open_groups else None
            if number is None:
                continue
            size = len(self.needs[number])
            if built.get(number) == size:
                continue
            built[number] = size
            self._sources(self.places.groups[number])

    def _need_tensor(self, each: fx.Node) -> None:
        if each in self.tensors or each.op in ("placeholder", "get_attr", "output"):
            return
        value = self.values.get(each)
        if value is not None and self._is_finished(value, each):
            self.tensors[each] = "finished"
            for sink in sinks_of(value.node):
                self._need_stat(sink)
            return
        if value is not None and self._storable(value, each):
            self.tensors[each] = "stored"
            self._need_stored(value.node, each.meta["val"].dtype)
            return
        if self._is_appended(each):
            self.tensors[each] = "appended"
            self._need_appended(each)
            return
        self.tensors[each] = "run"
        if is_size_of_inputs(each):
            return
        if self._is_joined(each):
            self.rooms[each] = Room(each)
            start = 0
            for part in each.all_input_nodes:
                self.joined[self.values[part].node, part.meta["val"].dtype] = self.rooms[each], start
                start += part.meta["val"].shape[-1]
        mask = mask_has_a_name(each)
        self.pending += [arg for arg in each.all_input_nodes if arg is not mask]

    def _is_finished(self, value: Value, each: fx.Node) -> bool:
        """Whether reductions are all that it is made of, and it has no other dimension."""
        sinks = sinks_of(value.node)
        by_row = value.node.space == Space(1, 0) and all(not sink.op.startswith("col") for sink in sinks)
        alone = value.node.op == "col_sum" or (by_row and self.places[value.node].late)
        ordered = in_order([factor for dim in value.dims for factor in dim])
        return bool(sinks) and alone and ordered and is_whole(value, each)

    def _storable(self, value: Value, each: fx.Node) -> bool:
        return self._exists(value.node) and not is_tensor_of_graph(value.node) and is_whole(value, each)

    def _is_joined(self, each: fx.Node) -> bool:
        """Whether the graph puts matrices side by side that are read nowhere else, each a store of its own."""
        if packet_of(each) is not torch.ops.aten.cat:
            return False
        given: Any = [*each.args, 0]
        parts, dim, last = given[0], given[1], each.meta["val"].dim() - 1
        if last < 1 or dim % (last + 1) != last:
            return False
        stores: set[tuple[Node, torch.dtype]] = set()
        for part in parts:
            value = self.values.get(part)
            if value is None or not self._storable(value, part) or len(part.users) > 1:
                return False
            if not is_matrix(value.dims) or not has_columns_last(value.dims):
                return False
            stores.add((value.node, part.meta["val"].dtype))
        return len(stores) == len(parts) and not stores & set(self.joined)

    def _is_appended(self, each: fx.Node) -> bool:
        """Whether rows of a cache are stored by the program that makes them: a few, as heads. Others have faster ways for many."""
        if packet_of(each) is not torch.ops.codetta.append:
            return False
        cache, _, rows = each.args
        value = self.values.get(rows)  # type: ignore[arg-type]
        if value is None or not self._storable(value, rows):  # type: ignore[arg-type]
            return False
        dims, room = value.dims, cache.meta["val"]  # type: ignore[union-attr]
        matrix = [*dims[0], *dims[2]] == factors(dims, "row") and [*dims[1], *dims[3]] == factors(dims, "col")
        few = math.prod(hint(factor.size) for factor in factors(dims, "row")) <= FEW
        return matrix and few and room.dtype == rows.meta["val"].dtype  # type: ignore[union-attr]

    def _need_appended(self, each: fx.Node) -> None:
        number = self.places[self.values[each.args[2]].node].group  # type: ignore[index]
        needs = self.needs[number]
        needs.appends[each] = f"c{len(needs.appends)}"
        self.pending += each.args[:2]  # type: ignore[arg-type]
        self.open_groups.append(number)

    def _exists(self, value: Node) -> bool:
        """Whether its program can store it."""
        place = self.places[value]
        return (
            place.group >= 0 and not place.late and not is_sink(value.op) and value.space == Space(1, value.space.cols)
        )

    def _need_stored(self, value: Node, dtype: torch.dtype) -> None:
        number = self.places[value].group
        stores = self.needs[number].stores
        if (value, dtype) not in stores:
            stores[value, dtype] = f"y{len(stores)}"
            self.open_groups.append(number)

    def _need_stat(self, sink: Node) -> None:
        number = self.places[sink].group
        sinks = self.needs[number].sinks
        if sink not in sinks:
            sinks[sink] = f"s{len(sinks)}"
            self.open_groups.append(number)

    # ---- programs

    def _sources(self, group: Group) -> tuple[Source, dict[str, Source], dict[str, Operand], dict[int, Node]]:
        """What the group reads, marked as needed; and its values in terms of accumulators and operands."""
        sources: dict[str, Source] = {}
        operands: dict[str, Operand] = {}
        written: dict[int, Node] = {}
        products = self._products(group)
        remade = {self.values[each].node for each, number in self.again.items() if number == group.number}

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
            place = self.places[value]
            if value.op == "const":
                return value
            if value.op == "product" and place.group == group.number:
                return acc_node(products.index(value), value.space.cols)
            if value.op == "stage" and place.group == group.number:
                return write(value.args[0])
            if value.op == "vector":
                made = Operand("", torch.float32, "none", value.space.cols)
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
            if is_tensor_of_graph(value):
                return leaf(value.args[0])
            stored = 0 <= place.group < group.number and not place.late and value not in remade
            if stored and not self._is_of_one(value):
                dtype = self.graph.dtypes.get(value, group.dtype)
                self._need_stored(value, dtype)
                source = Source("stored", value=value, dtype=dtype)
                return operand(source, Operand("", dtype, "each", value.space.cols), value.space.cols)
            return rebuilt(value, tuple(write(arg) for arg in value.args))

        def leaf(value: Node) -> Node:
            known = self.graph.leaves[value.attr("name")]
            if known.source not in self.graph.constant:
                self.pending.append(known.source)
            return operand(Source("leaf", known.operand.name), known.operand, value.space.cols)

        for value, _ in self.needs[group.number].stores:
            write(value)
        for append, name in self.needs[group.number].appends.items():
            write(self.values[append.args[2]].node)  # type: ignore[index]
            sources[_places(name)] = Source("places", tensor=append)
            operands[_places(name)] = Operand(_places(name), torch.int64, "each")
        for sink in self.needs[group.number].sinks:
            written[id(sink)] = node(sink.op, write(sink.args[0]))
        return self._left(group, operands, sources), sources, operands, written

    def _is_of_one(self, value: Node) -> bool:
        """Whether it is a function of one matrix of its group, element by element: whoever reads it has it from that, which others
        want as well as a rule (an activation and its slope). Not where it exists already."""
        group = self.places[value].group
        if any(value is stored for stored, _ in self.needs[group].stores):
            return False
        mine = lambda each: OPS[each.op].shape == "elementwise" and self.places[each].group == group  # noqa: E731
        frontier = {value}
        for each in reversed(topological([value], mine)):
            if each not in frontier:
                continue
            if not mine(each):
                return False
            frontier.remove(each)
            frontier |= {arg for arg in each.args if arg.space.cols and arg.space.rows}
            if len(frontier) == 1:
                return all(self.places[found].group == group for found in frontier)
        return False

    def _products(self, group: Group) -> list[Node]:
        """The group's products that somebody reads; others were cut, or only their parts are wanted."""
        needs = self.needs[group.number]
        appended = [self.values[append.args[2]].node for append in needs.appends]  # type: ignore[index]
        wanted = set(topological([*(value for value, _ in needs.stores), *appended, *needs.sinks]))
        return [product for product in group.products if product in wanted]

    def _left(self, group: Group, operands: dict[str, Operand], sources: dict[str, Source]) -> Source:
        base = group.base
        if base is None:
            # Nothing is multiplied, but rows are counted by what is read.
            tiles = [name for name, each in operands.items() if each.rows == "each" and each.cols and not each.period]
            if not tiles:
                raise PartitionError(group, Reason("program", "it reads no matrix with as many rows"))
            return sources[tiles[0]]
        if is_tensor_of_graph(base) and self._leaf_dtype(base.args[0]) == group.dtype:
            base = base.args[0]
        if base.op == "load":
            leaf = self.graph.leaves[base.attr("name")]
            self.pending.append(leaf.source)
            return Source("leaf", leaf.operand.name)
        if self._exists(base):
            self._need_stored(base, group.dtype)
            return Source("stored", value=base, dtype=group.dtype)
        raise AssertionError(f"{base} is the left operand of a product and exists nowhere")

    def _leaf_dtype(self, load: Node) -> torch.dtype:
        return self.graph.leaves[load.attr("name")].operand.dtype

    def _launch(self, group: Group) -> Launch:
        a, sources, operands, written = self._sources(group)
        needs = self.needs[group.number]
        used = self._products(group)
        products = []
        multiplied = [product for product in used if product.op == "product"]
        for product in multiplied:
            weight = self.graph.weights[product.attr("weight")]
            products.append(Product(product.space.cols, group.dtype, "kn" if weight.transposed else "nk"))
        k = _depth(self.graph, multiplied[0].attr("weight")) if multiplied else 0
        stores = [
            Store(name, (Piece(written[id(value)]),), dtype, value.space.cols)
            for (value, dtype), name in needs.stores.items()
        ]
        stores += [self._appended(append, name, written) for append, name in needs.appends.items()]
        sinks = {name: written[id(sink)] for sink, name in needs.sinks.items()}
        outputs = tuple([store.name for store in stores] + list(sinks))
        try:
            program = assemble(
                f"program_{group.number}", k=k, a_dtype=group.dtype, products=products, operands=operands.values(), stores=stores,
                sinks=sinks, outputs=outputs,
            )  # fmt: skip
        except TraceError as error:
            raise PartitionError(group, Reason("program", str(error))) from None
        read = {each.name for each in program.operands}
        return Launch(
            group.number,
            self.graph.origin[used[0]].meta["val"].device,
            program,
            math.prod(self.graph.origin[used[0]].meta["val"].shape[:-1]),
            a,
            [(product.attr("weight"), product.attr("gain")) for product in multiplied],
            {name: source for name, source in sources.items() if name in read},
            {name: (value, dtype) for (value, dtype), name in needs.stores.items()},
            {name: sink for sink, name in needs.sinks.items()},
            {name: self.joined[store] for store, name in needs.stores.items() if store in self.joined},
            {name: append for append, name in needs.appends.items()},
        )

    def _appended(self, append: fx.Node, name: str, written: dict[int, Node]) -> Store:
        """A store of rows as heads, each at its place in the cache."""
        value, room = self.values[append.args[2]], append.meta["val"]  # type: ignore[index]
        piece = Piece(written[id(value.node)])
        return Store(
            name,
            (piece,),
            room.dtype,
            value.node.space.cols,
            layout="bhtd",
            head=int(room.shape[3]),
            row_index=_places(name),
        )

    # ---- what gradients make once more

    def _make_again(self, before: set[object]) -> None:
        """A matrix that gradients want (a weight's gradient: what the weight was multiplied with), made once more by a program among
        them that reads all it is made of anyway. It need not be kept in between, which costs that program a store.
        before: what the results need."""
        read = {
            number: {source.value for source in launch.operands.values() if source.kind == "stored"}
            for number, launch in self.launches.items()
            if number not in before
        }
        for each, how in self.tensors.items():
            if how != "stored" or packet_of(each) is not torch.ops.aten.alias:
                continue
            value, dtype = self.values[each].node, each.meta["val"].dtype
            made_of = self._made_of(value)
            for number in sorted(read) if made_of else ():
                if number > self.places[value].group and made_of <= read[number] and not self._needs(number, each):
                    self._add_again(each, value, dtype, number)
                    break

    def _made_of(self, value: Node) -> set[Node | None]:
        """The matrices that its program stores beside it and that it is made of, element by element; none if there is more to it."""
        group, stack = self.places[value].group, list(value.args)
        found: set[Node | None] = set()
        stores = {stored for stored, _ in self.needs[group].stores} - {value}
        while stack:
            each = stack.pop()
            if each in stores:
                found.add(each)
            elif each.space.rows and each.space.cols:
                if OPS[each.op].shape != "elementwise" or self.places[each].group != group:
                    return set()
                stack += each.args
        return found if OPS[value.op].shape == "elementwise" else set()

    def _needs(self, number: int, tensor: fx.Node) -> bool:
        """Whether the program can only run when the tensor is there."""
        return tensor in self._all_before([number])

    def _all_before(self, items: Iterable[object]) -> set[object]:
        """Those, and everything that must be there before them."""
        stack, seen = list(items), set()
        while stack:
            each = stack.pop()
            if each not in seen:
                seen.add(each)
                stack += self._before(each)
        return seen

    def _add_again(self, each: fx.Node, value: Node, dtype: torch.dtype, number: int) -> None:
        stores, before = self.needs[number].stores, self.launches[number]
        self.again[each] = number
        stores[value, dtype] = f"y{len(stores)}"
        try:
            self.launches[number] = self._launch(self.places.groups[number])
        except PartitionError:  # not together with what the program stores already
            del self.again[each], stores[value, dtype]
            self.launches[number] = before

    # ---- order

    def _emit(self, each: fx.Node) -> None:
        """Put the steps that make a tensor of the graph behind those that they need."""
        stack: list[tuple[object, bool]] = [(each, False)]
        begun: set[object] = set()
        while stack:
            item, ready = stack.pop()
            if item in self.done:
                continue
            if ready:
                self.done.add(item)
                self._step(item)
                continue
            assert item not in begun, f"{item} is needed for itself"
            begun.add(item)
            stack.append((item, True))
            stack += [(need, False) for need in self._before(item) if need not in self.done]

    def _before(self, item: object) -> list[object]:
        if isinstance(item, int):
            launch = self.launches[item]
            needs = [need for source in [launch.a, *launch.operands.values()] for need in self._maker(source)]
            return [*(room for room, _ in launch.into.values()), *needs]
        if isinstance(item, Mask):
            return list(item.makes.inputs)
        if isinstance(item, Room):
            return []
        assert isinstance(item, fx.Node)
        if self.tensors.get(item) == "stored":
            return [self.again.get(item, self.places[self.values[item].node].group)]
        if self.tensors.get(item) == "finished":
            return [self.places[sink].group for sink in sinks_of(self.values[item].node)]
        if item in self.rooms:
            return [self.places[self.values[part].node].group for part in item.all_input_nodes]
        if is_size_of_inputs(item):
            return []
        if self.tensors.get(item) == "appended":
            return [self.places[self.values[item.args[2]].node].group]  # type: ignore[index]
        if is_effect(item):
            return [*item.all_input_nodes, *self._readers(item.args[0], item)]
        mask = mask_has_a_name(item)
        if mask is None:
            return list(item.all_input_nodes)
        return [*(each for each in item.all_input_nodes if each is not mask), self._mask(mask)]

    def _readers(self, written: Any, writer: fx.Node) -> list[object]:
        """Who must have read a tensor, or seen it through a view, before it is written over."""
        seen = {written}
        found: list[object] = []
        for each in self.graph.nodes.nodes:
            if each is not writer and not is_effect(each) and not seen.isdisjoint(each.all_input_nodes):
                if is_view(each):
                    seen.add(each)
                if each in self.tensors:
                    found.append(each)
        for number, launch in self.launches.items():
            sources = [launch.a, *launch.operands.values()]
            if any(source.kind == "leaf" and self.graph.leaves[source.name].source in seen for source in sources):
                found.append(number)
        return found

    def _mask(self, target: fx.Node) -> Mask:
        if target not in self.masks:
            nodes = made_of_sizes(target)
            assert nodes is not None
            self.masks[target] = Mask(target, replace(region_of(nodes, set()), outputs=[target]))
        return self.masks[target]

    def _maker(self, source: Source) -> list[object]:
        match source.kind:
            case "leaf":
                return [self.graph.leaves[source.name].source]
            case "stored" | "stat":
                assert source.value is not None
                return [self.places[source.value].group]
            case "places":
                assert source.tensor is not None
                return list(source.tensor.args[:2])
        return []

    def _step(self, item: object) -> None:
        if isinstance(item, int):
            self.steps.append(self.launches[item])
            return
        if isinstance(item, Mask | Room):
            self.steps.append(item)
            return
        assert isinstance(item, fx.Node)
        if (
            item.op in ("placeholder", "get_attr", "output")
            or item in self.rooms
            or self.tensors.get(item) == "appended"
        ):
            return  # it is there
        if self.tensors.get(item) == "stored":
            value = self.values[item]
            self.steps.append(Present(item, value, item.meta["val"].dtype))
        elif self.tensors.get(item) == "finished":
            self.steps.append(Finish(item, self.values[item].node, item.meta["val"].dtype))
        else:
            self.steps.append(Run(item))


def is_tensor_of_graph(value: Node) -> bool:
    """A stage that only begins with a tensor of the graph: others read that tensor themselves."""
    return value.op == "stage" and value.args[0].op == "load"


def _places(name: str) -> str:
    """What the operand is called that says where rows of a cache go."""
    return f"{name}_at"


def _same_source(x: Source, y: Source) -> bool:
    return (x.kind, x.name, x.value, x.dtype) == (y.kind, y.name, y.value, y.dtype)


def _depth(graph: Graph, name: str) -> int:
    weight = graph.weights[name]
    rows, cols = weight.source.meta["val"].shape
    return int(rows if weight.transposed else cols)
