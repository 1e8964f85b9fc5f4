"""Values of an epilogue -> C++ statements: where each is computed, kept and loaded. What leaves the chip is in cpu_epilogue.py.

An op that moves columns (part, join, group, spread) reads what another step of 16 columns computed; so its argument goes
through a row of scratch memory, and the function takes the row in several passes, its *stages*: one loop for all values of
one level and one number of columns. Where rows are grouped, each stage goes over all rows of the block before the next begins.
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
    literal,
    minus,
    plus,
    spelled,
    truth,
)
from codetta.ir.graph import Frame, Node
from codetta.program import Piece, Program, Segment

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
class ValueWriter:
    """Writes the values of one segment, each in the stage that needs it."""

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
        never_whole = {id(piece.value) for piece in pieces if is_split(piece)} - read
        whole = {id(piece.value) for piece in pieces if not is_split(piece)}
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
            way = self._way(operand.head, *run_of(frame, cols), cols=cols)
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


def run_of(frame: Frame | None, cols: int) -> tuple[int, ...]:
    """The frame's run, where it ends before the value does; its only one must begin where a vector can."""
    return () if frame is None else (frame.run,) if frame.run < cols else (frame.index * frame.run,)


def is_split(piece: Piece) -> bool:
    """Whether a stored value is a join of parts that fill whole vectors."""
    value = piece.value
    return value.op == "join" and piece.frame is None and value.attr("block") // len(value.args) % LANES == 0


def _is_run(node: Node) -> bool:
    """Whether these are column numbers that follow one another."""
    frame = node.attr("frame")
    return node.op == "col_index" and (frame is None or frame.run == node.space.cols)
