"""Epilogue -> C++: one statement per node, in one function per segment, over the vectors of cpu_runtime.h.

The function gets a block of rows x a panel of columns, goes over each row in steps of 16 columns, and writes stores and
partials itself. How values are made is in cpu_values.py.

Names from the user's function are prefixed (in_, out_, all_), so that none can meet a name of the kernel's own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from codetta.backends.cpu_arguments import B_ARGUMENTS, parameters, stat_loads
from codetta.backends.cpu_spelling import DTYPES, as_type, framed, indented, plus
from codetta.backends.cpu_values import Stage, ValueWriter, is_split, run_of
from codetta.ir.graph import Frame
from codetta.program import Piece, Program, Sink, Store


@dataclass
class EpilogueWriter(ValueWriter):
    """Writes the function of one segment."""

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

    def _stores(self, store: Store, piece: Piece) -> None:
        """A stored join is stored part by part, where the parts are known: one pass less over the row."""
        value = piece.value
        if is_split(piece):
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
            way = self._way(store.head, *run_of(frame, cols), cols=cols)
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
