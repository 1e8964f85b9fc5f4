"""Epilogue -> Triton source: one statement per node, in one device function per segment.

The function gets one chunk of the accumulator tile and writes the stores and column partials of that chunk itself; row
partials are returned, since the chunks of a tile are merged first. Values are matrices (rows, cols) whose side is 1 where
they do not vary. This file knows Triton's language, not main loops, tiles on a device, or launches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from codetta.ir.graph import Frame, Node
from codetta.plan.tile import STREAM, Tile
from codetta.program import Operand, Program, Segment, Sink, Store

DTYPES = {
    torch.float32: "tl.float32", torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16", torch.int8: "tl.int8",
    torch.float8_e4m3fn: "tl.float8e4nv", torch.uint8: "tl.uint8", torch.int32: "tl.int32", torch.int64: "tl.int64",
    torch.bool: "tl.int1",
}  # fmt: skip

SPELLING = {
    "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "{} / {}", "neg": "-{}", "abs": "tl.abs({})",
    "maximum": "max_nan({}, {})", "minimum": "tl.minimum({}, {}, propagate_nan=tl.PropagateNan.ALL)",
    "exp": "tl.exp({})", "log": "tl.log({})", "sqrt": "tl.sqrt({})", "rsqrt": "tl.rsqrt({})", "tanh": "tanh({})",
    "sigmoid": "sigmoid({})", "erf": "tl.erf({})", "erfc": "erfc({})", "round": "round_even({})", "floor": "tl.floor({})",
    "lt": "{} < {}", "le": "{} <= {}", "eq": "{} == {}", "ne": "{} != {}", "and": "{} & {}", "or": "{} | {}",
    "not": "{} == 0", "where": "tl.where({}, {}, {})", "random": "uniform({}, {}, {})",
}  # fmt: skip

# Where the chunk is: its first row, its rows (rows, 1) and which of them exist, its first column, its tile row.
PLACE = ["m0", "row", "row_ok", "j0", "pm", "batches", "batch"]

# Fields of a row reduction's partial.
ROW_FIELDS = {"sum": ("sum",), "max": ("max",), "lse": ("top", "sum"), "moments": ("mean", "m2")}


# Names from the user's function are prefixed, so that none can meet a name of the kernel's own.
def sink_name(sink: Sink) -> str:
    return f"all_{sink.name}"


def parameters(program: Program) -> list[str]:
    """Kernel parameters for everything but A and B, in the order in which the launcher passes them."""
    names = ["M", "rows_per_sample"]
    for operand in program.operands:
        names.append(f"in_{operand.name}_ptr")
        names += [f"in_{operand.name}_{what}" for what in operand_integers(operand)]
    for store in program.stores:
        names.append(f"out_{store.name}_ptr")
        names += [f"out_{store.name}_{what}" for what in store_integers(store)]
    names += [f"{sink_name(sink)}_part" for sink in program.sinks]
    return names


def unspecialised(names: list[str]) -> list[str]:
    """Parameters whose value must not lead to a kernel of its own: rows and everything counted in them."""
    endings = ("_tiles", "_width", "_total", "_span")
    return [name for name in names if name in ("M", "rows_per_sample", "rows_per_batch") or name.endswith(endings)]


def operand_integers(operand: Operand) -> list[str]:
    """What the kernel must know about an operand's place in memory."""
    if operand.stat:
        return ["tiles", "width", "total"] if operand.stat == "moments" else ["tiles"]
    if operand.rows == "none" or not operand.cols:
        return []
    if operand.layout != "rows":
        return ["sb", "st", "sh", "sd"]
    return ["stride", "span"] if operand.rows in ("sample", "repeat") else ["stride"]


def store_integers(store: Store) -> list[str]:
    if store.layout != "rows":
        return ["sb", "st", "sh", "sd"]
    return ["stride"] if store.cols else []


@dataclass
class EpilogueWriter:
    """Writes the device function of one segment."""

    program: Program
    segment: Segment
    number: int
    tile: Tile
    lines: list[str] = field(default_factory=list)
    named: dict[int, str] = field(default_factory=dict)
    defined: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"epilogue_{self.number}"

    @property
    def rows(self) -> int:
        """Rows that one call of the function handles."""
        return self.tile.rows

    def hoisted(self) -> list[Node]:
        """Values that are the same for every column: loaded once per tile, not once per chunk."""
        needed = [n for n in self.segment.nodes if not n.space.cols and n.op in ("load", "load_int")]
        return needed

    def hoist(self) -> list[str]:
        """Statements that load the hoisted values."""
        self.lines = []
        for node in self.hoisted():
            self._say(self.name_of(node), self._load(node))
        return self.lines

    def arguments(self) -> list[str]:
        accs = [f"acc{index}" for index in range(len(self.segment.strips))]
        return accs + [self.name_of(node) for node in self.hoisted()]

    def results(self) -> list[str]:
        """Row partials that the function returns, field by field."""
        return [
            f"{sink_name(sink)}_{part}"
            for sink in (self.program.sinks[index] for index in self.segment.sinks)
            if sink.by_row
            for part in ROW_FIELDS[sink.how]
        ]

    def function(self) -> list[str]:
        """The source of the device function."""
        self.lines, self.defined, self.named = [], set(), {}
        for node in self.hoisted():
            self.named[id(node)] = self.name_of(node)
        for node in self.segment.nodes:
            if id(node) not in self.named:
                self._node(node)
        for store_index, piece_index in self.segment.stores:
            self._store(self.program.stores[store_index], piece_index)
        for index in self.segment.sinks:
            self._sink(index)
        results = self.results()
        if results:
            self.lines.append(f"return {', '.join(results)}")
        signature = [*self.arguments(), *PLACE, *parameters(self.program)]
        head = ["@triton.jit", f"def {self.name}(", *wrapped(signature), "):"]
        chunk = self.tile.chunk(self.segment)
        doc = f'    """{chunk} columns of each strip, from column j0; row is (rows, 1)."""'
        return [*head, doc, *(f"    {line}" for line in self.lines or ["pass"])]

    # ---- values

    def _say(self, name: str, expression: str) -> str:
        self.lines.append(f"{name} = {expression}")
        return name

    def name_of(self, node: Node) -> str:
        field_name = node.attr("field")
        return f"in_{node.attr('name')}" + (f"_{field_name}" if field_name else "") + _suffix(node.attr("frame"))

    def _node(self, node: Node) -> None:
        args = [self._argument(arg, node) for arg in node.args]
        fresh = f"v{len(self.named)}"
        match node.op:
            case "acc":
                strips = [(strip.product, strip.frame) for strip in self.segment.strips]
                name = f"acc{strips.index((node.attr('product'), node.attr('frame')))}"
            case "const":
                name = _literal(node.attr("value"))
            case "load" | "load_int":
                suffix = "" if not node.attr("period") else f"_{node.space.cols}"
                name = self._say(self.name_of(node) + suffix, self._load(node))
            case "row_index":
                name = "row"
            case "col_index":
                name = self._column(node.space.cols, node.attr("frame"))
            case "part":
                name = self._part(node, args[0])
            case "join":
                whole = [self._whole(arg, node.args[0], name) for arg, name in zip(node.args, args, strict=True)]
                name = self._join(whole, node.attr("block"), fresh)
            case "group_sum" | "group_max":
                fill = "0.0" if node.op == "group_sum" else 'float("-inf")'
                source = args[0]
                if node.attr("rows") > 1:
                    source = f"tl.where(row_ok, {source}, {fill})"
                name = self._say(fresh, f"{node.op}({source}, {node.attr('rows')}, {node.attr('cols')})")
            case "spread":
                name = self._say(fresh, f"spread({args[0]}, {node.attr('rows')}, {node.attr('cols')})")
            case "cast":
                name = self._say(fresh, cast_text(args[0], node.attr("dtype"), back=True))
            case "where":
                condition = args[0] if node.args[0].dtype == "bool" else f"({args[0]} != 0)"
                name = self._say(fresh, SPELLING["where"].format(condition, *args[1:]))
            case op:
                name = self._say(fresh, SPELLING[op].format(*args))
        self.named[id(node)] = name

    def _argument(self, arg: Node, node: Node) -> str:
        """The argument as the node needs it."""
        return self.named[id(arg)]

    def _width(self, cols: int) -> int:
        return self.tile.chunk(self.segment) * cols // self.segment.cols

    def _rows(self, node: Node) -> int:
        return self.tile.rows // node.space.rows if node.space.rows else 1

    def _whole(self, node: Node, like: Node, name: str) -> str:
        """The value at its full size, where a side of 1 would not do."""
        rows, cols = max(self._rows(node), self._rows(like)), self._width(node.space.cols)
        return f"tl.broadcast_to({name}, ({rows}, {cols}))"

    def _part(self, node: Node, source: str) -> str:
        frame = node.attr("frame")
        names = [f"{source}_{index}of{frame.count}at{frame.block}" for index in range(frame.count)]
        if names[0] not in self.defined:
            self.defined.add(names[0])
            self._split(source, names, frame.block)
        return names[frame.index]

    def _split(self, source: str, names: list[str], block: int) -> None:
        if len(names) == 2:
            self.lines.append(f"{names[0]}, {names[1]} = part_pair({source}, {block})")
            return
        low, high = f"{names[0]}_low", f"{names[0]}_high"
        self.lines.append(f"{low}, {high} = part_pair({source}, {block})")
        half = len(names) // 2
        self._split(low, names[:half], block // 2)
        self._split(high, names[half:], block // 2)

    def _join(self, names: list[str], block: int, fresh: str) -> str:
        if len(names) == 2:
            return self._say(fresh, f"join_pair({names[0]}, {names[1]}, {block})")
        half = len(names) // 2
        low = self._join(names[:half], block // 2, f"{fresh}_low")
        high = self._join(names[half:], block // 2, f"{fresh}_high")
        return self._say(fresh, f"join_pair({low}, {high}, {block})")

    # ---- places

    def _column(self, cols: int, frame: Frame | None = None) -> str:
        """The variable with the column numbers of this chunk in a space of `cols` columns, on a frame of the whole."""
        name = f"col{cols}{_suffix(frame)}"
        if name not in self.defined:
            self.defined.add(name)
            first = "j0"
            if cols < self.segment.cols:
                first = f"j0 // {self.segment.cols // cols}"
            elif cols > self.segment.cols:
                first = f"j0 * {cols // self.segment.cols}"
            if frame and frame.run == cols:
                first = f"{first} + {frame.index * frame.run}"
            elif frame:
                first = (
                    f"({first}) // {frame.run} * {frame.block} + {frame.index * frame.run} + ({first}) % {frame.run}"
                )
            self._say(name, f"{first} + tl.arange(0, {self._width(cols)})[None, :]")
        return name

    def _column_ok(self, cols: int) -> str | None:
        """The mask of columns that exist; None where all of them do."""
        if self.segment.cols % self.tile.strip(self.segment) == 0:
            return None
        name = f"ok{cols}"
        if name not in self.defined:
            column = self._column(cols)
            self.defined.add(name)
            self._say(name, f"{column} < {cols}")
        return name

    def _row(self, group: int, cols: int) -> tuple[str, str]:
        """Variables with the row numbers (one per group of rows) and their mask, to meet values of `cols` columns."""
        if group == 1:
            return "row", "row_ok"
        name = f"row_by{group}"
        if name not in self.defined:
            self.defined.add(name)
            self._say(name, f"m0 // {group} + tl.arange(0, {self.rows // group})[:, None]")
            self._say(f"{name}_ok", f"{name} < tl.cdiv(M, {group})")
        return name, f"{name}_ok"

    def _load(self, node: Node) -> str:
        operand = self.program.operand(node.attr("name"))
        name, kind = f"in_{operand.name}", "" if node.op == "load_int" else ".to(tl.float32)"
        zero = "0.0" if operand.dtype.is_floating_point else "0"  # no whole number converts to fp8
        if operand.stat:
            return self._finish(node, operand)
        if operand.rows == "none" and not operand.cols:
            return f"tl.load({name}_ptr){kind}"
        cols = node.space.cols
        column = self._column(cols, node.attr("frame")) if cols else ""
        column_ok = self._column_ok(cols) if cols else None
        if operand.period:
            column = f"{column} % {operand.period}"
        if operand.rows == "none":
            mask = f", mask={column_ok}, other={zero}" if column_ok else ""
            return f"tl.load({name}_ptr + {column}{mask}){kind}"
        row, row_ok = self._row(operand.group, cols)
        mask = f"{row_ok} & {column_ok}" if column_ok else row_ok
        if not cols:
            return f"tl.load({name}_ptr + {row}, mask={row_ok}, other={zero}){kind}"
        if operand.layout != "rows":
            address = self._head_address(f"{name}_ptr", f"{name}_", row, column, operand.head)
            return f"tl.load({address}, mask={mask}, other={zero}){kind}"
        match operand.rows:
            case "sample":
                row = f"({row} // {name}_span)"
            case "repeat":
                row = f"({row} % {name}_span)"
            case "index":
                row = f"tl.load(in_{operand.row_index}_ptr + {row}, mask={row_ok}, other=0)"
        return f"tl.load({name}_ptr + {row}.to(tl.int64) * {name}_stride + {column}, mask={mask}, other={zero}){kind}"

    def _finish(self, node: Node, operand: Operand) -> str:
        place = f"in_{operand.name}_ptr, in_{operand.name}_tiles, M, row, row_ok"
        # Of a few rows, as many partials at once as a block can hold: tiles are narrow there, and partials many.
        how = "finish_few" if self.tile.loop == STREAM else "finish"
        if operand.stat == "moments":
            return f"{how}_{node.attr('field')}({place}, in_{operand.name}_width, in_{operand.name}_total)"
        return f"{how}_{operand.stat}({place})"

    def _head_address(self, base: str, prefix: str, row: str, column: str, head: int, within: str | None = None) -> str:
        within = within or f"({row} % rows_per_sample)"
        sample = f"({row} // rows_per_sample).to(tl.int64) * {prefix}sb + {within}.to(tl.int64) * {prefix}st"
        return f"{base} + {sample} + ({column}) // {head} * {prefix}sh + ({column}) % {head} * {prefix}sd"

    # ---- what leaves the chip

    def _store(self, store: Store, piece_index: int) -> None:
        piece = store.pieces[piece_index]
        value = piece.value
        base, prefix = f"out_{store.name}_ptr", f"out_{store.name}_"
        row, row_ok = self._row(store.group, value.space.cols)
        stored = cast_text(self.named[id(value)], store.dtype, back=False)
        if value.op == "const":
            stored = f"tl.full((1, 1), {self.named[id(value)]}, tl.float32).to({DTYPES[store.dtype]})"
        if not store.cols:
            self.lines.append(f"tl.store({base} + {row}, {stored}, mask={row_ok} & (j0 == 0))")
            return
        column = self._column(value.space.cols, piece.frame)
        column_ok = self._column_ok(value.space.cols)
        mask = f"{row_ok} & {column_ok}" if column_ok else row_ok
        within = None
        if store.row_index:
            within = f"out_{store.name}_row"
            self._say(within, f"tl.load(in_{store.row_index}_ptr + {row}, mask={row_ok}, other=-1)")
            mask = f"{mask} & ({within} >= 0)"
        if store.layout == "rows":
            address = f"{base} + {within or row}.to(tl.int64) * {prefix}stride + {column}"
        else:
            address = self._head_address(base, prefix, row, column, store.head, within)
        shape = f"({self.rows // store.group}, {self._width(value.space.cols)})"
        self.lines.append(f"tl.store({address}, tl.broadcast_to({stored}, {shape}), mask={mask})")

    def _sink(self, index: int) -> None:
        sink = self.program.sinks[index]
        values = [self.named[id(value)] for value in sink.values]
        cols = sink.values[0].space.cols
        ok = self._column_ok(cols)
        if sink.by_row:
            fill = "0.0" if sink.how in ("sum", "moments") else 'float("-inf")'
            masked = [f"tl.where({ok}, {value}, {fill})" if ok else value for value in values]
            names = [self._say(f"{sink_name(sink)}_x{i}", text) for i, text in enumerate(masked)]
            self._row_sink(sink_name(sink), sink.how, names, cols, ok)
            return
        for value, node, frame in zip(values, sink.values, sink.frames, strict=True):
            column = self._column(node.space.cols, frame)
            fill, reduce = (
                ("0.0", "tl.sum({}, 0)") if sink.how == "sum" else ('float("-inf")', "tl.reduce({}, 0, max_nan)")
            )
            reduced = reduce.format(f"tl.where({self._row(1, node.space.cols)[1]}, {value}, {fill})")
            mask = f", mask={ok}" if ok else ""
            self.lines.append(
                f"tl.store({sink_name(sink)}_part + (pm * batches + batch) * {sink.cols} + {column}, {reduced}[None, :]{mask})"
            )

    def _row_sink(self, name: str, how: str, values: list[str], cols: int, ok: str | None) -> None:
        match how:
            case "sum":
                self._say(f"{name}_sum", " + ".join(f"tl.sum({value}, 1)" for value in values))
            case "max":
                self._say(f"{name}_max", _fold("max_nan({}, {})", [f"tl.reduce({v}, 1, max_nan)" for v in values]))
            case "lse":
                top = self._say(
                    f"{name}_top", _fold("max_nan({}, {})", [f"tl.reduce({v}, 1, max_nan)" for v in values])
                )
                shift = self._say(f"{name}_shift", f"finite_or_zero({top})")
                self._say(f"{name}_sum", " + ".join(f"tl.sum(tl.exp({v} - {shift}[:, None]), 1)" for v in values))
            case "moments":
                count = self._say(f"{name}_count", self.count(cols, len(values)))
                total = " + ".join(f"tl.sum({value}, 1)" for value in values)
                mean = self._say(f"{name}_mean", f"({total}) / tl.maximum({count}, 1.0)")
                apart = [f"{value} - {mean}[:, None]" for value in values]
                if ok:
                    apart = [f"tl.where({ok}, {text}, 0.0)" for text in apart]
                names = [self._say(f"{name}_d{i}", text) for i, text in enumerate(apart)]
                self._say(f"{name}_m2", " + ".join(f"tl.sum({d} * {d}, 1)" for d in names))

    def count(self, cols: int, strips: int) -> str:
        """How many elements a row of this chunk has in a space of `cols` columns."""
        width = self._width(cols)
        if self.segment.cols % self.tile.strip(self.segment) == 0:
            return str(float(strips * width))
        first = f"j0 * {cols} // {self.segment.cols}"
        return f"{strips} * tl.maximum(tl.minimum({cols} - {first}, {width}), 0).to(tl.float32)"


def merge_statements(writer: EpilogueWriter, suffix: str, number: int) -> list[str]:
    """Merge the row partials of chunk `number` (names with `suffix`) into those of the chunks before it.

    Uses `j0`, the first column of the tile.
    """
    lines = []
    segment, chunk = writer.segment, writer.tile.chunk(writer.segment)
    for index in segment.sinks:
        sink = writer.program.sinks[index]
        if not sink.by_row:
            continue
        left = [f"{sink_name(sink)}_{part}" for part in ROW_FIELDS[sink.how]]
        right = [f"{name}{suffix}" for name in left]
        targets = ", ".join(left)
        match sink.how:
            case "sum":
                lines.append(f"{targets} = {left[0]} + {right[0]}")
            case "max":
                lines.append(f"{targets} = max_nan({left[0]}, {right[0]})")
            case "lse":
                lines.append(f"{targets} = merge_lse({', '.join(left + right)})")
            case _:
                cols, strips = sink.values[0].space.cols, len(sink.values)
                width = chunk * cols // segment.cols
                before, here = str(float(strips * width * number)), str(float(strips * width))
                if segment.cols % writer.tile.strip(segment):
                    # Columns before this chunk, and in it: both end at the last column.
                    left_over = f"{cols} - j0 * {cols} // {segment.cols}"
                    before = f"{strips} * tl.minimum({left_over}, {width * number}).to(tl.float32)"
                    here = (
                        f"{strips} * tl.maximum(tl.minimum({left_over} - {width * number}, {width}), 0).to(tl.float32)"
                    )
                lines.append(
                    f"{targets} = merge_moments({left[0]}, {left[1]}, {before}, {right[0]}, {right[1]}, {here})"
                )
    return lines


def _suffix(frame: Frame | None) -> str:
    return f"_{frame.index}of{frame.count}" if frame else ""


def _literal(value: float) -> str:
    return f'float("{value}")' if math.isinf(value) or math.isnan(value) else repr(value)


def cast_text(name: str, dtype: torch.dtype, back: bool) -> str:
    """The value rounded to dtype; `back`: as fp32 again."""
    if dtype == torch.int8:
        text = f"to_int8({name})"
    elif dtype == torch.float8_e4m3fn:
        text = f"to_fp8({name})"
    elif dtype == torch.bfloat16:
        text = f"to_bf16({name})"
    else:
        text = f"{name}.to({DTYPES[dtype]})"
    return f"{text}.to(tl.float32)" if back else text


def _fold(template: str, items: list[str]) -> str:
    text = items[0]
    for item in items[1:]:
        text = template.format(text, item)
    return text


def wrapped(names: list[str], width: int = 100) -> list[str]:
    """Names as lines of a parameter list."""
    lines, line = [], ""
    for name in names:
        if len(line) + len(name) > width:
            lines.append(f"    {line.rstrip()}")
            line = ""
        line += f"{name}, "
    return [*lines, f"    {line.rstrip()}"]
