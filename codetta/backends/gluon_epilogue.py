"""Epilogue -> Gluon source, for the specialised loop: the same statements, with layouts spelled out.

One consumer owns 64 rows of the tile, and a chunk of them sits in registers in the layout of the matrix instruction. Halving
columns, sums over rows and all arithmetic stay inside a thread or a warp in that layout. Two functions per segment: `chunk`
computes what is stored, `reduce` the reductions, which run after the stores have been handed over.
"""

from __future__ import annotations

from dataclasses import dataclass

from codetta.backends.triton_epilogue import PLACE, EpilogueWriter, cast_text, parameters, wrapped
from codetta.ir.graph import Frame, Node
from codetta.plan.tile import Tile
from codetta.plan.traffic import CONSUMERS, load_move, store_move
from codetta.program import Program, Store


@dataclass
class GluonWriter(EpilogueWriter):
    """Writes `chunk` and `reduce` of one segment."""

    @property
    def rows(self) -> int:
        return self.tile.rows // CONSUMERS

    def widths(self) -> list[int]:
        spaces = {node.space.cols for node in self.segment.nodes if node.space.cols} | {self.segment.cols}
        return sorted({self._width(cols) for cols in spaces if self._width(cols) > 1})

    def layouts(self) -> list[str]:
        """The register layout of each width of values."""
        form = "gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, {}, 16])"
        return [f"L{width}: gl.constexpr = {form.format(width)}" for width in self.widths()]

    # ---- what the pieces of the kernel exchange

    def tile_loads(self) -> list[Node]:
        """Loads that come through shared memory, one node per buffer."""
        found = {}
        for node in self.segment.nodes:
            if node.op == "load":
                move = load_move(node, self.program.operand(node.attr("name")), self.segment, self.tile)
                if move:
                    found[move.name] = node
        return list(found.values())

    def vectors(self) -> list[Node]:
        """Loads that are the same for all rows of a consumer: fetched one chunk ahead."""
        return [
            node
            for node in self.segment.nodes
            if node.op in ("load", "load_int")
            and node.space.cols
            and self._width(node.space.cols) > 1
            and self._uniform(node)
        ]

    def _uniform(self, node: Node) -> bool:
        operand = self.program.operand(node.attr("name"))
        return operand.rows in ("none", "sample") and operand.layout == "rows"

    def moved_stores(self) -> list[tuple[Store, int]]:
        pairs = [(self.program.stores[s], p) for s, p in self.segment.stores]
        return [(s, p) for s, p in pairs if store_move(s, p, self.segment, self.tile.chunk(self.segment))]

    def sink_values(self) -> list[Node]:
        values = [value for index in self.segment.sinks for value in self.program.sinks[index].values]
        return list(dict.fromkeys(values))

    def chunk_inputs(self) -> list[str]:
        accs = [f"acc{index}" for index in range(len(self.segment.strips))]
        tiles = [f"{self.value_name(node)}_raw" for node in self.tile_loads()]
        return accs + tiles + [self.name_of(n) for n in self.hoisted()] + [self.value_name(n) for n in self.vectors()]

    def vector_function(self) -> list[str]:
        """The function that fetches the vectors of one chunk."""
        self._start()
        names = [self._say(self.value_name(node), self._load(node)) for node in self.vectors()]
        if not names:
            return []
        return self._wrap(f"vectors_{self.number}", ["m0", "row", "row_ok", "j0"], [f"return {', '.join(names)}"])

    def hoist_function(self) -> list[str]:
        """The function that loads what is the same for every column, once per tile."""
        self._start()
        names = [self._say(self.name_of(node), self._load(node)) for node in self.hoisted()]
        if not names:
            return []
        return self._wrap(f"hoist_{self.number}", ["row", "row_ok"], [f"return {', '.join(names)}"])

    def chunk_function(self) -> list[str]:
        self._start()
        for node in self.hoisted():
            self.named[id(node)] = self.name_of(node)
        for node in self.vectors():
            self.named[id(node)] = self.value_name(node)
        for node in self.segment.nodes:
            if id(node) not in self.named:
                self._node(node)
        moved = {(store.name, piece) for store, piece in self.moved_stores()}
        for store_index, piece in self.segment.stores:
            store = self.program.stores[store_index]
            if (store.name, piece) not in moved:
                self._store(store, piece)
        outputs = []
        for store, piece in self.moved_stores():
            value = store.pieces[piece].value
            name = self._full(value, self.named[id(value)])
            outputs.append(self._say(f"out_{store.name}_{piece}", cast_text(name, store.dtype, back=False)))
        outputs += [self._full(value, self.named[id(value)]) for value in self.sink_values()]
        return self._wrap(
            f"chunk_{self.number}", [*self.chunk_inputs(), *PLACE], [f"return {', '.join(outputs)}"] if outputs else []
        )

    def reduce_function(self) -> list[str]:
        """The function of one chunk's reductions: returns row partials, writes column partials."""
        self._start()
        if not self.segment.sinks:
            return []
        for number, value in enumerate(self.sink_values()):
            self.named[id(value)] = f"s{number}"
        names = list(self.named.values())
        for index in self.segment.sinks:
            self._sink(index)
        results = self.results()
        return self._wrap(
            f"reduce_{self.number}", [*names, *PLACE], [f"return {', '.join(results)}"] if results else []
        )

    # ---- spelling

    def _start(self) -> None:
        self.lines, self.defined, self.named = [], set(), {}

    def _wrap(self, name: str, arguments: list[str], end: list[str]) -> list[str]:
        body = [*self.layouts(), *self.lines, *end]
        return [
            "@gluon.jit",
            f"def {name}(",
            *wrapped([*arguments, *parameters(self.program)]),
            "):",
            *(f"    {x}" for x in body),
            "",
        ]

    def value_name(self, node: Node) -> str:
        return self.name_of(node) + (f"_{node.space.cols}" if node.attr("period") else "")

    def _layout(self, cols: int) -> str:
        width = self._width(cols) if cols else 1
        return f"L{width}" if width > 1 else f"L{self.tile.chunk(self.segment)}"

    def _argument(self, arg: Node, node: Node) -> str:
        """Values without columns of their own are in the layout of the whole chunk: others get them in theirs."""
        name = self.named[id(arg)]
        narrow = arg.space.cols == 0 or self._width(arg.space.cols) == 1
        if narrow and arg.space.rows and node.op != "spread" and self._layout(node.space.cols) != self._layout(0):
            return self._in_layout(name, node.space.cols)
        return name

    def _in_layout(self, name: str, cols: int) -> str:
        converted = f"{name}_w{self._width(cols)}"
        if converted not in self.defined:
            self.defined.add(converted)
            self._say(converted, f"gl.convert_layout({name}, {self._layout(cols)})")
        return converted

    def _node(self, node: Node) -> None:
        match node.op:
            case "load" if any(node is each for each in self.tile_loads()):
                name = self.value_name(node)
                self.named[id(node)] = self._say(name, f"{name}_raw.to(tl.float32)")
            case "load" if (same := self._same_tile(node)) is not None:
                self.named[id(node)] = self.named[id(same)]
            case "join":
                self._cols_of_join = node.space.cols
                super()._node(node)
            case "group_sum" | "group_max":
                reduce = "tl.sum({}, 1)" if node.op == "group_sum" else "tl.reduce({}, 1, max_nan)"
                reduced = f"gl.expand_dims({reduce.format(self._full(node.args[0], self.named[id(node.args[0])]))}, 1)"
                self.named[id(node)] = self._say(
                    f"v{len(self.named)}", f"gl.convert_layout({reduced}, {self._layout(0)})"
                )
            case "spread":
                name = self.named[id(node.args[0])]
                self.named[id(node)] = (
                    self._in_layout(name, node.space.cols) if self._layout(node.space.cols) != self._layout(0) else name
                )
            case _:
                super()._node(node)

    def _same_tile(self, node: Node) -> Node | None:
        """Another load of the same tile, already there."""
        return next((each for each in self.tile_loads() if self.value_name(each) == self.value_name(node)), None)

    def _full(self, node: Node, name: str) -> str:
        """The value at its full size in the layout of its width."""
        if (
            node.space.rows
            and node.space.cols
            and node.op not in ("spread", "load")
            and not self._is_narrow_chain(node)
        ):
            return name
        return f"tl.broadcast_to({name}, ({self.rows}, {self._width(node.space.cols)}))"

    def _is_narrow_chain(self, node: Node) -> bool:
        """Whether the value may still have one column only: made of spreads and row values alone."""
        if node.op in ("acc", "part", "join", "load"):
            return node.op == "load" and not any(node is each for each in self.tile_loads())
        return all(self._is_narrow_chain(arg) or not arg.space.cols for arg in node.args)

    def _rows(self, node: Node) -> int:
        return self.rows

    def _split(self, source: str, names: list[str], block: int) -> None:
        super()._split(source, names, block)
        if len(names) == 2:
            cols = self._cols_of_part
            self.lines += [f"{name} = gl.convert_layout({name}, {self._layout(cols)})" for name in names]

    def _part(self, node: Node, source: str) -> str:
        self._cols_of_part = node.space.cols
        whole = self._full(node.args[0], source)
        if whole != source:
            source = self._say(f"{source}_whole", whole) if f"{source}_whole" not in self.defined else f"{source}_whole"
            self.defined.add(source)
        return super()._part(node, source)

    def _join(self, names: list[str], block: int, fresh: str) -> str:
        name = super()._join(names, block, fresh)
        if not fresh.endswith(("_low", "_high")):
            self._say(name, f"gl.convert_layout({name}, {self._layout(self._cols_of_join)})")
        return name

    def _whole(self, node: Node, like: Node, name: str) -> str:
        return f"tl.broadcast_to({name}, ({self.rows}, {self._width(node.space.cols)}))"

    def _column(self, cols: int, frame: Frame | None = None) -> str:
        if self._width(cols) == 1:
            return f"(j0 // {self.segment.cols // cols})"
        count = len(self.lines)
        name = super()._column(cols, frame)
        if len(self.lines) > count:
            layout = f"gl.SliceLayout(0, {self._layout(cols)})"
            plain = f"tl.arange(0, {self._width(cols)})[None, :]"
            first = self.lines[-1].removesuffix(plain)
            self.lines[-1] = f"{first}gl.expand_dims(gl.arange(0, {self._width(cols)}, {layout}), 0)"
        return name

    def _row(self, group: int, cols: int) -> tuple[str, str]:
        if not cols or self._layout(cols) == self._layout(0):
            return "row", "row_ok"
        return self._in_layout("row", cols), self._in_layout("row_ok", cols)

    def _load(self, node: Node) -> str:
        operand = self.program.operand(node.attr("name"))
        if operand.rows == "sample" and self._uniform(node):
            column = self._column(node.space.cols, node.attr("frame"))
            ok = self._column_ok(node.space.cols)
            mask = f", mask={ok}, other=0" if ok else ""
            # The second half of the last tile may lie beyond the last row.
            first = f"(tl.minimum(m0, M - 1) // in_{operand.name}_span) * in_{operand.name}_stride"
            return f"tl.load(in_{operand.name}_ptr + {first} + {column}{mask}).to(tl.float32)"
        return super()._load(node)

    def _row_sink(self, name: str, how: str, values: list[str], cols: int, ok: str | None) -> None:
        super()._row_sink(name, how, values, cols, ok)
        if self._layout(cols) != self._layout(0):
            for part in (each for each in self.results() if each.startswith(f"{name}_")):
                self._say(part, f"gl.convert_layout({part}, gl.SliceLayout(1, {self._layout(0)}))")


def segment_writers(program: Program, tile: Tile) -> list[GluonWriter]:
    return [GluonWriter(program, segment, number, tile) for number, segment in enumerate(program.segments)]
