"""Epilogue -> C++: one statement per node, in one function per segment, over the vectors of cpu_runtime.h.

The function gets a block of rows x a panel of columns. It goes over each row in steps of 16 columns. An op that moves
columns (part, join, group, spread) reads what another step computed; so its argument goes through a row of scratch memory, and
the function takes the row in several passes, its *stages*: one loop for all values of one level and one number of
columns. Where rows are grouped, each stage goes over all rows of the block before the next begins.

Names from the user's function are prefixed (in_, out_, all_), so that none can meet a name of the kernel's own.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from codetta.backends.cpu_arguments import B_ARGUMENTS, parameters, stat_loads
from codetta.backends.cpu_plan import LANES, Rows, panel_cols
from codetta.backends.cpu_spelling import (
    COMPARES,
    DTYPES,
    LANE,
    SPELLING,
    VECTOR,
    as_type,
    framed,
    indented,
    literal,
    minus,
    plus,
    spelled,
    truth,
)  # fmt: skip
from codetta.ir.graph import Frame, Node
from codetta.program import Piece, Program, Segment, Sink, Store

MOVES = ("part", "join", "group_sum", "group_max", "spread")
LEAVES = ("load", "load_int", "col_index")  # cheaper to load again than to keep


@dataclass(eq=False)
class Stage:
    """One loop over columns, for values of `cols` columns and one row per `group` rows."""

    level: int
    group: int
    cols: int
    lines: list[str] = field(default_factory=list)
    named: dict[int, str] = field(default_factory=dict)
    row_lines: list[str] = field(default_factory=list)  # ahead of the loop, for each row
    row_named: dict[object, str] = field(default_factory=dict)


@dataclass
class EpilogueWriter:
    """Writes the function of one segment."""

    program: Program
    segment: Segment
    number: int
    rows: Rows
    stages: dict[tuple[int, int, int], Stage] = field(default_factory=dict)
    levels: dict[int, int] = field(default_factory=dict)
    kept: dict[int, Node] = field(default_factory=dict)  # values that pass through scratch memory
    head_lines: list[str] = field(default_factory=list)
    head_named: dict[object, str] = field(default_factory=dict)
    count: int = 0

    def __post_init__(self) -> None:
        self.panel = panel_cols(self.segment)
        self.by_stage = self.rows.block > 0
        self.room = 0
        self.room_of: dict[object, tuple[int, int]] = {}
        # Row scope of stages that share one row loop.
        self.row_lines: list[str] = []
        self.row_named: dict[object, str] = {}
        self._find_kept()

    # ---- where values are computed

    def level(self, node: Node) -> int:
        """In which pass over the row a value is known."""
        if id(node) not in self.levels:
            level = 0
            for arg in node.args:
                passes = node.op in MOVES and arg.space.cols > 0 and arg.op != "acc"
                passes |= not self._is_free(arg) and arg.op != "acc" and self._shape(arg) != self._shape(node)
                level = max(level, self.level(arg) + passes)
            self.levels[id(node)] = level
        return self.levels[id(node)]

    @staticmethod
    def _shape(node: Node) -> tuple[int, int]:
        return max(node.space.rows, 1), node.space.cols

    @staticmethod
    def _is_free(node: Node) -> bool:
        """Whether any stage can have the value for itself: it needs no other's work."""
        return not node.space.cols or node.op in LEAVES

    def stage_of(self, node: Node, group: int = 0, cols: int = 0) -> Stage:
        key = (self.level(node), group or max(node.space.rows, 1), cols or node.space.cols)
        return self.stages.setdefault(key, Stage(*key))

    def _find_kept(self) -> None:
        read = {id(arg) for node in self.segment.nodes for arg in node.args} | {
            id(value) for value in self._sink_values()
        }
        pieces = [self.program.stores[store].pieces[piece] for store, piece in self.segment.stores]
        never_whole = {id(piece.value) for piece in pieces if _is_split(piece)} - read
        whole = {id(piece.value) for piece in pieces if not _is_split(piece)}
        for node in self.segment.nodes:
            if id(node) in never_whole - whole:
                continue
            for arg in node.args:
                if arg.op == "acc" or not arg.space.cols:
                    continue
                moved = node.op in MOVES
                later = not self._is_free(arg) and self.stage_of(arg) is not self.stage_of(node)
                if moved or later:
                    self.kept[id(arg)] = arg
        for index in self.segment.sinks:
            sink = self.program.sinks[index]
            for value in sink.values if sink.by_row else ():
                if value.op != "acc":
                    self.kept[id(value)] = value

    # ---- the function

    @property
    def name(self) -> str:
        return f"epilogue_{self.number}"

    @property
    def passes(self) -> int:
        return sum(1 for stage in self.stages.values() if stage.lines)

    def function(self) -> list[str]:
        for node in self.kept.values():
            stage = self.stage_of(node)
            place = f"{self._memory(node)} + j"
            stage.lines.append(f"put({place}, {self._value(node, stage)}, 16);")
        for store_index, piece_index in self.segment.stores:
            store = self.program.stores[store_index]
            self._stores(store, store.pieces[piece_index])
        merges: list[str] = []
        tail = Stage(0, 1, 0)
        for index in self.segment.sinks:
            sink = self.program.sinks[index]
            if sink.by_row:
                self._row_sink(sink, tail)
            else:
                merges += self._col_sink(sink)
        for store_index, piece_index in self.segment.stores:
            self._flat_store(self.program.stores[store_index], piece_index, tail)
        body = self._loops(tail)
        head = [f"static void {self.name}(const Place& at, const i64* args) {{"]
        return [*head, *indented([*self._declarations(), *self.head_lines, *body, *merges]), "}", ""]

    def _loops(self, tail: Stage) -> list[str]:
        stages = sorted((s for s in self.stages.values() if s.lines), key=lambda s: (s.level, s.group, s.cols))
        if self.by_stage:
            return [line for stage in [*stages, tail] for line in self._row_loop(stage, stage.row_lines, [stage])]
        return self._row_loop(tail, self.row_lines, [*stages, tail])

    def _row_loop(self, first: Stage, row_lines: list[str], stages: list[Stage]) -> list[str]:
        inner = [*row_lines]
        for stage in stages:
            if stage.cols == 0:
                inner += stage.lines
            elif stage.lines:
                inner += [
                    f"for (i64 j = 0; j < width_{stage.cols}; j += 16) {{",
                    f"  const i64 c = first_{stage.cols} + j;",
                    f"  const int n = lanes(width_{stage.cols} - j);",
                    *indented(stage.lines),
                    "}",
                ]
        if not inner:
            return []
        if first.group == 1:
            return ["for (i64 r = 0; r < at.rows; r++) {", "  const i64 m = at.row + r;", *indented(inner), "}"]
        return [
            f"for (i64 r = 0; r < at.rows; r += {first.group}) {{",
            f"  const i64 m = (at.row + r) / {first.group};",
            f"  const i64 grouped = at.rows - r < {first.group} ? at.rows - r : {first.group};",
            *indented(inner),
            "}",
        ]

    def _declarations(self) -> list[str]:
        lines = ["const i64 ld = at.ld;"]
        lines += [f"const float* const acc{index} = at.acc[{index}];" for index in range(len(self.segment.strips))]
        for cols in sorted({s.cols for s in self.stages.values()} | {v.space.cols for v in self._sink_values()} - {0}):
            scaled = "" if cols == self.segment.cols else f" * {cols} / {self.segment.cols}"
            lines.append(f"const i64 width_{cols} = at.cols{scaled}, first_{cols} = at.col{scaled};")
        return lines

    def _sink_values(self) -> list[Node]:
        return [value for index in self.segment.sinks for value in self.program.sinks[index].values]

    # ---- scratch memory

    def _claim(self, key: object, cols: int, rows: int, lane: int) -> tuple[int, int]:
        """(byte offset, lanes from row to row) of a place in scratch memory, made when first asked for."""
        if key not in self.room_of:
            # Vectors reach beyond the last column, those of pairs by two.
            step = -(-self._width(cols) // LANES) * LANES + 2 * LANES
            self.room_of[key] = (self.room, step)
            self.room += -(-step * rows * lane // 64) * 64
        return self.room_of[key]

    def _width(self, cols: int) -> int:
        return self.panel * cols // self.segment.cols

    def _memory(self, node: Node) -> str:
        """The first column of a kept value (or accumulator) in row r."""
        if node.op == "acc":
            return f"acc{self._strip(node)} + r * ld"
        group, cols = self._shape(node)
        rows = -(-self.rows.block // group) if self.by_stage else 1
        offset, step = self._claim(id(node), cols, rows, 8 if node.dtype == "int" else 4)
        name = f"room_{self._number(node)}"
        if name not in self.head_named:
            self.head_named[name] = name
            lane = LANE[node.dtype]
            self.head_lines.append(f"{lane}* const {name} = ({lane}*)(at.room + {offset});")
        if not self.by_stage:
            return name
        return f"{name} + r * {step}" if group == 1 else f"{name} + r / {group} * {step}"

    def _step(self, node: Node) -> str:
        if node.op == "acc":
            return "ld"
        group, cols = self._shape(node)
        return str(self._claim(id(node), cols, -(-self.rows.block // group) if self.by_stage else 1, 4)[1])

    def _number(self, node: Node) -> int:
        return next(i for i, each in enumerate(self.segment.nodes) if each is node)

    def _strip(self, node: Node) -> int:
        strips = [(strip.product, strip.frame) for strip in self.segment.strips]
        return strips.index((node.attr("product"), node.attr("frame")))

    # ---- values

    def _value(self, node: Node, stage: Stage) -> str:
        """The name of the value in a stage, computed or loaded there if it is not yet."""
        if node.op == "const":
            return f"all<V>({literal(node.attr('value'))})"
        if not node.space.cols:
            return self._flat(node, stage)
        if id(node) in stage.named:
            return stage.named[id(node)]
        mine = self.stage_of(node) is stage or self._is_free(node)
        if node.op == "acc":
            expression = f"get<V>({self._memory(node)} + j, 16)"
        elif not mine:
            expression = f"get<{VECTOR[node.dtype]}>({self._memory(node)} + j, 16)"
        elif node.op in ("load", "load_int"):
            expression = self._load(node, stage)
        elif node.op == "col_index":
            expression = self._col_index(node)
        elif node.op in MOVES:
            return self._move(node, stage)
        elif node.op in COMPARES and any(_is_run(arg) for arg in node.args):
            expression = self._compare_columns(node, stage)
        else:
            expression = spelled(node, [self._value(arg, stage) for arg in node.args])
        return self._say(node, expression, stage)

    def _say(self, node: Node, expression: str, stage: Stage) -> str:
        name = self._fresh(node)
        stage.lines.append(f"const {VECTOR[node.dtype]} {name} = {expression};")
        stage.named[id(node)] = name
        return name

    def _fresh(self, node: Node) -> str:
        self.count += 1
        if node.op in ("load", "load_int"):
            return f"x{self.count}_{node.attr('name')}"
        return f"v{self.count}"

    def _flat(self, node: Node, stage: Stage) -> str:
        """A value without columns: once per function or once per row."""
        lines, named = self._scope(stage) if node.space.rows else (self.head_lines, self.head_named)
        if id(node) in named:
            return named[id(node)]
        if node.op in ("load", "load_int"):
            operand, vector = self.program.operand(node.attr("name")), VECTOR[node.dtype]
            if operand.stat:
                index = [id(n) for n in stat_loads(self.program)].index(id(node))
                expression = f"all<V>(at.stats[{index} * args[ROWS] + m])"
            else:
                place = self._parameter(f"in_{operand.name}", operand.dtype)
                expression = f"get_one<{vector}>({place}{' + m' if node.space.rows else ''})"
        elif node.op == "row_index":
            expression = "all<I>(m)"
        else:
            expression = spelled(node, [self._value(arg, stage) for arg in node.args])
        name = self._fresh(node)
        lines.append(f"const {VECTOR[node.dtype]} {name} = {expression};")
        named[id(node)] = name
        return name

    def _scope(self, stage: Stage) -> tuple[list[str], dict[object, str]]:
        return (stage.row_lines, stage.row_named) if self.by_stage else (self.row_lines, self.row_named)

    def _compare_columns(self, node: Node, stage: Stage) -> str:
        """Column numbers against a number of the row's own: 32 bits will do, since columns of a vector are near."""
        numbers, other = (node.args if _is_run(node.args[0]) else node.args[::-1])[:2]
        if other.dtype != "int" or other.space.cols:
            return spelled(node, [self._value(arg, stage) for arg in node.args])
        distance = f"near({self._value(other, stage)}[0] - c{minus(numbers.attr('frame'))})"
        sides = ("counted()", distance) if numbers is node.args[0] else (distance, "counted()")
        return SPELLING[node.op].format(*sides)

    def _col_index(self, node: Node) -> str:
        frame = node.attr("frame")
        if _is_run(node):
            return f"counted_from(c{plus(frame)})"
        self.count += 1
        return f"columns_from(c, [=](i64 c) {{ return {framed(frame)}; }})"

    def _move(self, node: Node, stage: Stage) -> str:
        source, vector, name = node.args[0], VECTOR[node.dtype], self._fresh(node)
        stage.named[id(node)] = name
        memory = self._memory(source) if source.space.cols else ""
        match node.op:
            case "part":
                frame = node.attr("frame")
                if (frame.count, frame.block) == (2, 2):
                    expression = f"get_{('even', 'odd')[frame.index]}<{vector}>({memory} + 2 * j)"
                elif frame.run == node.space.cols:
                    expression = f"get<{vector}>({memory} + {frame.index * frame.run} + j, 16)"
                else:
                    expression = f"get_{self._way(frame.run)}<{vector}>({memory}, j, n, true, [](i64 c) {{ return {framed(frame)}; }})"
            case "spread":
                cols = node.attr("cols")
                expression = f"all<{vector}>(({memory})[j / {cols}])"
                if cols % LANES:
                    expression = (
                        f"get_by<{vector}>({memory}, j, n, {truth(cols == 1)}, [](i64 c) {{ return c / {cols}; }})"
                    )
            case "join":
                stage.lines += self._join(node, stage, name)
                return name
            case _:
                cols, rows = node.attr("cols"), "grouped" if node.attr("rows") > 1 else "1"
                stage.lines += [
                    f"V {name} = all<V>(0.f);",
                    f"for (int i = 0; i < n; i++) {name}[i] = {node.op}({memory} + (j + i) * {cols}, {self._step(source)}, {rows}, {cols});",
                ]
                return name
        stage.lines.append(f"const {vector} {name} = {expression};")
        return name

    def _join(self, node: Node, stage: Stage, name: str) -> list[str]:
        """Which argument a column comes from changes every `run` columns: for whole vectors, or lane by lane."""
        count, block, vector = len(node.args), node.attr("block"), VECTOR[node.dtype]
        run = block // count
        flat = [None if arg.space.cols else self._value(arg, stage) for arg in node.args]
        flat = [
            as_type(node.dtype, text, arg.dtype) if text else None for text, arg in zip(flat, node.args, strict=True)
        ]
        memory = [self._memory(arg) if arg.space.cols else "" for arg in node.args]
        if block == 2 and count == 2 and not any(flat) and {arg.dtype for arg in node.args} == {node.dtype}:
            return [f"const {vector} {name} = get_zipped<{vector}>({memory[0]} + j / 2, {memory[1]} + j / 2);"]
        whole = run % LANES == 0
        at = f"j / {block} * {run} + j % {run}" if whole else f"(j + i) / {block} * {run} + (j + i) % {run}"
        which, source = f"which_{name}", f"from_{name}"
        choice = ""
        for index, (arg, text, place) in enumerate(zip(node.args, flat, memory, strict=True)):
            if whole:
                one = text or as_type(node.dtype, f"get<{VECTOR[arg.dtype]}>({place} + {source}, 16)", arg.dtype)
            else:
                one = f"({LANE[node.dtype]}){text}[0]" if text else f"({LANE[node.dtype]})({place})[{source}]"
            choice += one if index == count - 1 else f"{which} == {index} ? {one} : "
        if whole:
            return [
                f"const i64 {which} = j / {run} % {count}, {source} = {at};",
                f"const {vector} {name} = {choice};",
            ]
        return [
            f"{vector} {name} = {{}};",
            "for (int i = 0; i < n; i++) {",
            f"  const i64 {which} = (j + i) / {run} % {count}, {source} = {at};",
            f"  {name}[i] = {choice};",
            "}",
        ]

    # ---- tensors

    def _parameter(self, name: str, dtype: torch.dtype | None = None, writes: bool = False) -> str:
        """A variable of the function for one of the call's arguments: a pointer if it has a dtype."""
        if name not in self.head_named:
            self.head_named[name] = name
            place = f"args[FIRST_B + {B_ARGUMENTS * len(self.program.products) + parameters(self.program).index(name)}]"
            kind = "i64" if dtype is None else f"{'' if writes else 'const '}{DTYPES[dtype]}* "
            value = place if dtype is None else f"({kind.strip()}){place}"
            self.head_lines.append(f"{'const i64' if dtype is None else kind + 'const'} {name} = {value};")
        return name

    def _row_place(self, key: str, expression: str, stage: Stage) -> str:
        """A pointer to the row of a tensor, computed once per row."""
        lines, named = self._scope(stage)
        if key not in named:
            named[key] = key
            lines.append(f"auto* const {key} = {expression};")
        return key

    def _load(self, node: Node, stage: Stage) -> str:
        operand, vector = self.program.operand(node.attr("name")), VECTOR[node.dtype]
        base, frame, cols = self._parameter(f"in_{operand.name}", operand.dtype), node.attr("frame"), node.space.cols
        if operand.layout != "rows":
            row = self._row_place(f"row_in_{operand.name}", self._head_row(base, "m % args[ROWS_PER_SAMPLE]"), stage)
            way = self._way(operand.head, *_run(frame, cols), cols=cols)
            return (
                f"get_{way}<{vector}>({row}, c, n, sd_{base} == 1, {self._head_map(base, operand.head, cols, frame)})"
            )
        row = base
        if operand.rows != "none":
            step = self._parameter(f"step_{base}")
            number = "m"
            if operand.rows in ("sample", "repeat"):
                number = f"m {'/' if operand.rows == 'sample' else '%'} {self._parameter(f'span_{base}')}"
            elif operand.rows == "index":
                index = self.program.operand(operand.row_index or "")
                place = f"{self._parameter(f'in_{index.name}', index.dtype)}[m]"
                number = f"counted_back({place}, {self._parameter(f'count_{base}')})"
            row = self._row_place(f"row_in_{operand.name}", f"{base} + ({number}) * {step}", stage)
        if operand.period:
            if operand.period == cols:
                return f"get<{vector}>({row} + c, n)"
            way = self._way(operand.period, cols=cols)
            return f"get_{way}<{vector}>({row}, c, n, true, [](i64 c) {{ return c % {operand.period}; }})"
        if frame is None or frame.run == cols:
            return f"get<{vector}>({row} + c{plus(frame)}, n)"
        return f"get_{self._way(frame.run, cols=cols)}<{vector}>({row}, c, n, true, [](i64 c) {{ return {framed(frame)}; }})"

    def _way(self, *runs: int, cols: int = 0) -> str:
        """How columns in runs are reached: by run where every vector lies in one, else lane by lane if need be.

        cols: of the value, where its columns are counted from the first panel on; vectors begin at multiples of 16 if
        every panel does.
        """
        aligned = not cols or self.panel == self.segment.cols or self._width(cols) % LANES == 0
        return "run" if aligned and all(run % LANES == 0 for run in runs) else "by"

    def _head_row(self, base: str, within: str) -> str:
        sb, st = self._parameter(f"sb_{base}"), self._parameter(f"st_{base}")
        return f"{base} + m / args[ROWS_PER_SAMPLE] * {sb} + {within} * {st}"

    def _head_map(self, base: str, head: int, cols: int, frame: Frame | None) -> str:
        sh, sd = self._parameter(f"sh_{base}"), self._parameter(f"sd_{base}")
        column = "c" if frame is None else f"c{plus(frame)}" if frame.run == cols else framed(frame)
        return f"[=](i64 c) {{ const i64 q = {column}; return q / {head} * {sh} + q % {head} * {sd}; }}"

    def _stores(self, store: Store, piece: Piece) -> None:
        """A stored join is stored part by part, where the parts are known: one pass less over the row."""
        value = piece.value
        if _is_split(piece):
            for index, arg in enumerate(value.args):
                self._store(store, Piece(arg, Frame(index, len(value.args), value.attr("block"))))
        elif store.cols:
            self._store(store, piece)

    def _store(self, store: Store, piece: Piece) -> None:
        frame, value = piece.frame, piece.value
        cols = store.cols // (frame.count if frame else 1)
        stage = self.stage_of(value, store.group, cols)
        text = as_type("float", self._value(value, stage), value.dtype)
        base = self._parameter(f"out_{store.name}", store.dtype, writes=True)
        number, condition = "m", ""
        if store.row_index:
            index = self.program.operand(store.row_index)
            slot = f"{self._parameter(f'in_{index.name}', index.dtype)}[m]"
            condition, number = f"if ({slot} >= 0) ", slot
        if store.layout != "rows":
            within = number if store.row_index else "m % args[ROWS_PER_SAMPLE]"
            row = self._row_place(f"row_out_{store.name}", self._head_row(base, within), stage)
            way = self._way(store.head, *_run(frame, cols), cols=cols)
            target = f"put_{way}({row}, {text}, c, n, sd_{base} == 1, {self._head_map(base, store.head, cols, frame)});"
        else:
            step = self._parameter(f"step_{base}")
            row = self._row_place(f"row_out_{store.name}", f"{base} + {number} * {step}", stage)
            if frame is None or frame.run == cols:
                target = f"put({row} + c{plus(frame)}, {text}, n);"
            else:
                way = self._way(frame.run, cols=cols)
                target = f"put_{way}({row}, {text}, c, n, true, [](i64 c) {{ return {framed(frame)}; }});"
        stage.lines.append(condition + target)

    def _flat_store(self, store: Store, piece_index: int, tail: Stage) -> None:
        """A value per row, written by the first panel."""
        if store.cols:
            return
        value = store.pieces[piece_index].value
        text = as_type("float", self._value(value, tail), value.dtype)
        base = self._parameter(f"out_{store.name}", store.dtype, writes=True)
        number = "m"
        condition = "at.col == 0"
        if store.row_index:
            index = self.program.operand(store.row_index)
            number = f"{self._parameter(f'in_{index.name}', index.dtype)}[m]"
            condition += f" && {number} >= 0"
        tail.lines.append(f"if ({condition}) put({base} + {number} * {self._parameter(f'step_{base}')}, {text}, 1);")

    # ---- reductions

    def _row_sink(self, sink: Sink, tail: Stage) -> None:
        name, cols = f"all_{sink.name}", sink.values[0].space.cols
        partial = self._parameter(name, torch.float32, writes=True)
        width = f"width_{cols}"
        places = [self._memory(value) for value in sink.values]

        def over(function: str, start: str, *extra: str) -> str:
            text = start
            for place in places:
                text = f"{function}({', '.join([text, place, width, *extra])})"
            return text

        zero, lowest = "all<V>(0.f)", "all<V>(-__builtin_inff())"
        match sink.how:
            case "sum":
                results = [f"sum_of({over('sum_over', zero)})"]
            case "max":
                results = [f"max_of({over('max_over', lowest)})"]
            case "lse":
                tail.lines.append(f"const float top_{name} = max_of({over('max_over', lowest)});")
                shift = f"finite_or_zero(top_{name})"
                results = [f"top_{name}", f"sum_of({over('exponentials_over', zero, shift)})"]
            case _:
                count = f"(float)({len(places)} * {width})"
                tail.lines.append(f"const float mean_{name} = sum_of({over('sum_over', zero)}) / {count};")
                results = [f"mean_{name}", f"sum_of({over('squares_over', zero, f'mean_{name}')})"]
        for index, result in enumerate(results):
            tail.lines.append(f"{partial}[({index} * at.panels + at.panel) * args[ROWS] + m] = {result};")

    def _col_sink(self, sink: Sink) -> list[str]:
        """Sums of the block's rows, kept in scratch memory; returned: how they join those of the row tile's other blocks."""
        partial = self._parameter(f"all_{sink.name}", torch.float32, writes=True)
        fill = "0.f" if sink.how == "sum" else "-__builtin_inff()"
        merges = []
        for number, (value, frame) in enumerate(zip(sink.values, sink.frames, strict=True)):
            stage, cols = self.stage_of(value), value.space.cols
            name = f"sums_{sink.name}_{number}"
            offset, _ = self._claim(name, cols, 1, 4)
            self.head_lines += [
                f"float* const {name} = (float*)(at.room + {offset});",
                f"for (i64 j = 0; j < width_{cols}; j += 16) put({name} + j, all<V>({fill}), 16);",
            ]
            text = as_type("float", self._value(value, stage), value.dtype)
            joined = "get<V>({0} + j, 16) + {1}" if sink.how == "sum" else "maximum(get<V>({0} + j, 16), {1})"
            stage.lines.append(f"put({name} + j, {joined.format(name, text)}, 16);")
            place = f"{partial} + (at.row_tile * args[BATCH] + at.batch) * {sink.cols}"
            column = "c" if frame is None else f"c{plus(frame)}" if frame.run == cols else framed(frame)
            where = f"c, n, true, [](i64 c) {{ return {column}; }}"
            merged = "before + block" if sink.how == "sum" else "maximum(before, block)"
            merges += [
                f"for (i64 j = 0; j < width_{cols}; j += 16) {{",
                f"  const i64 c = first_{cols} + j;",
                f"  const int n = lanes(width_{cols} - j);",
                f"  float* const to = {place};",
                f"  const V block = get<V>({name} + j, 16);",
                f"  const V before = at.first ? all<V>({fill}) : get_by<V>(to, {where});",
                f"  put_by(to, {merged}, {where});",
                "}",
            ]
        return merges


def _run(frame: Frame | None, cols: int) -> tuple[int, ...]:
    """The frame's run, where it ends before the value does; its only one must begin where a vector can."""
    return () if frame is None else (frame.run,) if frame.run < cols else (frame.index * frame.run,)


def _is_split(piece: Piece) -> bool:
    """Whether a stored value is a join of parts that fill whole vectors."""
    value = piece.value
    return value.op == "join" and piece.frame is None and value.attr("block") // len(value.args) % LANES == 0


def _is_run(node: Node) -> bool:
    """Whether these are column numbers that follow one another."""
    frame = node.attr("frame")
    return node.op == "col_index" and (frame is None or frame.run == node.space.cols)


def finish_function(program: Program) -> list[str]:
    """The function that finishes the reductions which epilogues read, for rows m0 to m1."""
    loads = stat_loads(program)
    if not loads:
        return []
    names = parameters(program)

    def argument(name: str) -> str:
        return f"args[FIRST_B + {B_ARGUMENTS * len(program.products) + names.index(name)}]"

    lines = []
    for index, node in enumerate(loads):
        operand = program.operand(node.attr("name"))
        name = f"in_{operand.name}"
        how = node.attr("field") if operand.stat == "moments" else operand.stat
        sizes = f", {argument(f'width_{name}')}, {argument(f'total_{name}')}" if operand.stat == "moments" else ""
        partials = f"(const {DTYPES[operand.dtype]}*){argument(name)} + m"
        value = f"finish_{how}({partials}, {argument(f'tiles_{name}')}, args[ROWS], n{sizes})"
        lines.append(f"put(stats + {index} * args[ROWS] + m, {value}, n);")
    return [
        "static void finish(const i64* args, i64 m0, i64 m1, float* stats) {",
        "  for (i64 m = m0; m < m1; m += 16) {",
        "    const int n = lanes(m1 - m);",
        *indented(indented(lines)),
        "  }",
        "}",
        "",
    ]
