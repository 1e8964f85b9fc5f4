"""Programs of one row, and attention over a cache, as phases of one CUDA kernel: C++ text around the library in whole.cu.

A phase of a product hands out items: a few columns of each strip, so many that they need two rows of weights, or twice two. The lanes of a
warp that have a column each compute its epilogue as written here, one statement for each node. This file knows CUDA C++, not how tensors are
passed: a phase says by name what it wants to find in its part of the table.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from codetta.backends import nvrtc
from codetta.errors import Reason
from codetta.ir.graph import Frame, Node
from codetta.plan.target import Target, device_target
from codetta.program import Operand, Program, Segment

MOST_AGO = 7  # phases that a vector is waited for, as in whole.cu
WARPS = 8  # that compute
THREADS = 32 * (WARPS + 1)
MOST_QUERIES = 4  # of heads that share keys, in one warp
MOST_LINES = 32  # that a thread receives at once
LEAST_SLOT, MOST_SLOT, IN_FLIGHT = 8192, 16_384, 59 * 1024  # bytes; 50 to 64 KB are best on an H200 (docs/log.md)
BESIDE, BARRIER = 512, 16  # bytes of shared memory beside slots, vectors and the table; and of a slot's barriers
COUNTERS = 2  # words of a kernel's own
STAMPS = 4  # words that a warp writes in each phase where clocks are read, behind them; both as in whole.cu
MOST_ENTRIES = 4000  # of the table: arguments of a kernel have 32 KB
FASTER = ("sm_90",)  # measured there, docs/log.md
LIBRARY, MACHINE = (Path(__file__).with_name(name) for name in ("whole.cu", "whole_machine.cu"))

SPELLING = {
    "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "{} / {}", "neg": "-{}", "abs": "fabsf({})",
    "maximum": "max_nan({}, {})", "minimum": "min_nan({}, {})", "exp": "expf({})", "log": "logf({})", "sqrt": "sqrtf({})",
    "rsqrt": "rsqrtf({})", "tanh": "tanhf({})", "sigmoid": "sigmoid({})", "erf": "erff({})", "erfc": "erfcf({})", "round": "rintf({})",
    "floor": "floorf({})", "lt": "{} < {}", "le": "{} <= {}", "eq": "{} == {}", "ne": "{} != {}", "and": "{} && {}", "or": "{} || {}",
    "not": "!{}", "where": "{} ? {} : {}",
}  # fmt: skip
LOADS = {torch.bfloat16: "load_bf16", torch.float32: "load_float", torch.int64: "load_long"}
TYPES = {"float": "float", "int": "i64", "bool": "bool"}


@dataclass(frozen=True)
class Phase:
    """The text of a phase and what it finds in the table, in order: "a", "stat x0", "count x0", "weight 0", "operand x1", "send y0",
    "keep y0", "cache c0", "sink s0", and those of attention."""

    text: str  # of a struct whose name is NAME
    names: tuple[str, ...]
    attends: bool = False


@dataclass(frozen=True)
class Ring:
    """How weights come: slots of so many bytes, so many of them in flight."""

    slot: int
    ahead: int

    def __str__(self) -> str:
        return f"{self.slot}:{self.ahead}"


def ring_for(widths: Iterable[int]) -> Ring:
    """For phases of so many columns of weights: two whole rows of the narrowest in a slot, or even parts of them."""
    rows = 4 * min(widths)
    piece = rows / math.ceil(rows / MOST_SLOT)
    return Ring(max(LEAST_SLOT, math.ceil(piece / 1024) * 1024), round(IN_FLIGHT / piece))


def runs_on(device: torch.device, measured: bool) -> bool:
    """Whether a device can run such a kernel; measured: and is known to be faster with it than with a chain of kernels."""
    target = device_target(device)
    if target is None or target.vendor != "cuda" or not target.bulk_copy or not nvrtc.is_there():
        return False
    return not measured or target.name in FASTER


def why_not(program: Program) -> list[Reason]:
    """What the phases lack for a program."""
    reasons = []
    if program.a_dtype != torch.bfloat16 or any(each.dtype != torch.bfloat16 for each in program.products):
        reasons.append(Reason("bf16", "weights or rows are of another type"))
    if program.a_layout != "mk" or program.batched or any(each.layout != "nk" for each in program.products):
        reasons.append(Reason("rows of weights", "a weight is stored transposed"))
    if program.k % 8:
        reasons.append(Reason("rows of 16 bytes", f"{program.k} columns"))
    stats = [each for each in program.operands if each.stat]
    if any(each.stat != "sum" for each in stats) or any(sink.op != "row_sum" for sink in program.sinks):
        reasons.append(Reason("sums", "a statistic is something else"))
    if math.ceil(program.k / 4 / (32 * WARPS)) + len(stats) > MOST_LINES or max(len(stats), len(program.sinks)) > 4:
        reasons.append(Reason("a vector in registers", f"{program.k} columns"))
    for segment in program.segments:
        reasons += _why_not_segment(program, segment)
    return reasons


def _why_not_segment(program: Program, segment: Segment) -> list[Reason]:
    reasons = []
    frames = [strip.frame for strip in segment.strips]
    for store, piece in segment.stores:
        stored = program.stores[store]
        frames.append(stored.pieces[piece].frame)
        plain = stored.layout == "rows" and not stored.row_index
        kept = stored.cols and not stored.accumulate and (plain or stored.layout == "bhtd")
        if stored.dtype != torch.bfloat16 or not kept:
            reasons.append(Reason("stores of rows", f"{stored.name} is stored otherwise"))
    if len(segment.strips) > 2 or segment.cols % 4 or any(frame and frame.run % 2 for frame in frames):
        reasons.append(Reason("pairs of rows", f"{len(segment.strips)} strips of {segment.cols} columns"))
    for node in segment.nodes:
        if node.op in ("load", "load_int"):
            operand = program.operand(node.attr("name"))
            if not operand.stat and (operand.dtype not in LOADS or operand.rows == "index" or operand.layout != "rows"):
                reasons.append(Reason("operands of rows", f"{operand.name} is of another kind"))
        elif node.op not in ("acc", "const", "col_index", "row_index", "cast", *SPELLING):
            reasons.append(Reason("columns by themselves", f"{node.op} brings columns together"))
        elif node.dtype == "int" and node.args:
            reasons.append(Reason("numbers", f"{node.op} of whole numbers"))
        if node.space.cols not in (0, segment.cols):
            reasons.append(
                Reason("columns by themselves", f"a value of {node.space.cols} beside {segment.cols} columns")
            )
        if node.op == "cast" and node.attr("dtype") not in (torch.bfloat16, torch.float32):
            reasons.append(Reason("bf16", f"a value is rounded to {node.attr('dtype')}"))
    return reasons


def why_not_attend(heads: int, groups: int, head: int, dtype: torch.dtype) -> list[Reason]:
    """What the phase of attention lacks."""
    if dtype != torch.bfloat16 or head not in (64, 128, 256) or heads % groups:
        return [Reason("attention of a phase", f"heads of {head} in {dtype}")]
    return []


# ---- products


def product(program: Program, sends: frozenset[str], keeps: frozenset[str]) -> Phase:
    """A program as a phase. sends: stores and sinks that phases read, keeps: that others do."""
    stats = [each for each in program.operands if each.stat]
    names = ["a"]
    for each in stats:
        names += [f"stat {each.name}", f"count {each.name}"]
    names += [f"weight {number}" for number in range(len(program.products))]
    loaded = {
        node.attr("name") for segment in program.segments for node in segment.nodes if node.op in ("load", "load_int")
    }
    names += [f"operand {each.name}" for each in program.operands if each.name in loaded and not each.stat]
    for store in program.stores:
        names += [f"send {store.name}"] if store.name in sends else []
        if store.row_index:
            names += [f"cache {store.name}", f"context {store.name}"]
        elif store.name in keeps:
            names += [f"keep {store.name}"]
    first_sink = len(names)
    names += [f"sink {sink.name}" for sink in program.sinks]
    shared = [each for each in program.operands if each.name in loaded and each.rows == "none"]
    fetches = [
        f"fetch_row(t[{names.index(f'operand {each.name}')}], {each.cols * each.dtype.itemsize});" for each in shared
    ]
    pairs = max(len(segment.strips) for segment in program.segments)
    begin, rows, items, functions = 0, [], [], []
    for number, segment in enumerate(program.segments):
        writer = _Segment(program, segment, number, begin, pairs, tuple(names))
        end = begin + segment.cols // writer.columns
        rows += [f"if (item < {end}) {{", *_indented(writer.rows()), "}"]
        items += [f"if (item < {end}) return segment_{number}(t, item - {begin}, stats, sinks, walk, dot);"]
        functions += writer.function()
        begin = end
    text = [
        "struct NAME {",
        f"    static constexpr int K = {program.k}, PAIRS = {pairs}, ITEMS = {begin}, STATS = {len(stats)}, SINKS = {len(program.sinks)}, "
        f"FIRST_SINK = {first_sink};",
        "    static __device__ __forceinline__ Rows rows(const u64* t, int item, int pair) {",
        *_indented(_indented([*rows, "return {0, 0};"])),
        "    }",
        "    static __device__ __forceinline__ void fetch(const u64* t) {",
        *_indented(_indented(fetches)),
        "    }",
        *_indented(functions),
        "    template <class Dot>",
        "    static __device__ __forceinline__ void item(const u64* t, int item, const float* stats, float* sinks, const Walk& walk, Dot&& dot) {",
        *_indented(_indented(items)),
        "    }",
        "};",
    ]
    return Phase("\n".join(text), tuple(names))


@dataclass
class _Segment:
    """Writes what is made of one segment's columns."""

    program: Program
    segment: Segment
    number: int
    begin: int
    pairs: int
    names: tuple[str, ...]

    @property
    def columns(self) -> int:
        """Columns of an item: one for each of so many lanes."""
        return 2 * self.pairs // len(self.segment.strips)

    def at(self, name: str) -> str:
        return f"t[{self.names.index(name)}]"

    def rows(self) -> list[str]:
        """Where the two rows of a pair begin."""
        strips = self.segment.strips
        item = f"(item - {self.begin})" if self.begin else "item"
        if len(strips) == 2:
            column, second = f"{item} * {self.columns} + pair", "c"
        else:
            column, second = f"{item} * {self.columns} + 2 * pair", "c + 1"
        ends = [(strips[0], "c"), (strips[-1], second)]
        rows = [
            f"{self.at(f'weight {s.product}')} + (i64)({_framed(c, s.frame)}) * {2 * self.program.k}" for s, c in ends
        ]
        return [f"const int c = {column};", f"return {{{rows[0]}, {rows[1]}}};"]

    def function(self) -> list[str]:
        lines = [f"const int c = item * {self.columns} + lane() % {self.columns};"]
        named: dict[int, str] = {}
        loads = [node for node in self.segment.nodes if node.op in ("load", "load_int")]
        for number, node in enumerate(loads):
            lines += self._load(node, f"x{number}", named)
        lines += [f"float a[{self.pairs}], b[{self.pairs}];", "dot(a, b);"]
        for strip in range(len(self.segment.strips)):
            lines.append(f"const float acc{strip} = {self._acc(strip)};")
        for number, node in enumerate(self.segment.nodes):
            self._node(node, f"v{number}", named, lines)
        for store, piece in self.segment.stores:
            lines += self._store(store, piece, named)
        for sink in self.segment.sinks:
            for value in self.program.sinks[sink].values:
                lines.append(f"if (lane() < {self.columns}) sinks[{sink}] += {named[id(value)]};")
        head = f"static __device__ __forceinline__ void segment_{self.number}"
        arguments = "const u64* t, int item, const float* stats, float* sinks, const Walk& walk, Dot&& dot"
        return ["template <class Dot>", f"{head}({arguments}) {{", *_indented(lines), "}"]

    def _acc(self, strip: int) -> str:
        """Of this lane's column: the first row of a pair or the second, of this pair or that."""
        if len(self.segment.strips) == 2:
            name = "ab"[strip]
            return f"lane() % 2 ? {name}[1] : {name}[0]"
        if self.pairs == 1:
            return "lane() % 2 ? b[0] : a[0]"
        return "lane() & 2 ? (lane() & 1 ? b[1] : a[1]) : (lane() & 1 ? b[0] : a[0])"

    def _load(self, node: Node, name: str, named: dict[int, str]) -> list[str]:
        operand = self.program.operand(node.attr("name"))
        if operand.stat:
            number = [each.name for each in self.program.operands if each.stat].index(operand.name)
            named[id(node)] = f"stats[{number}]"
            return []
        place, column = self.at(f"operand {operand.name}"), "0"
        if node.space.cols:
            column = _framed("c", node.attr("frame"))
            column = f"({column}) % {operand.period}" if operand.period else column
        if is_peeked(operand):
            named[id(node)] = f"{name}.value(walk.now)"
            return [f"Peek {name}({place}, {column});"]
        named[id(node)] = name
        kind = "float" if operand.dtype.is_floating_point else "i64"
        return [f"const {kind} {name} = {LOADS[operand.dtype]}({place}, {column});"]

    def _node(self, node: Node, name: str, named: dict[int, str], lines: list[str]) -> None:
        args = [named[id(arg)] for arg in node.args]
        kind = TYPES[node.dtype]
        match node.op:
            case "load" | "load_int":
                if named[id(node)].endswith(".value(walk.now)"):  # waited for once
                    lines.append(f"const float {name} = {named[id(node)]};")
                    named[id(node)] = name
                return
            case "acc":
                strips = [(strip.product, strip.frame) for strip in self.segment.strips]
                named[id(node)] = f"acc{strips.index((node.attr('product'), node.attr('frame')))}"
                return
            case "const":
                named[id(node)] = _literal(node.attr("value"))
                return
            case "row_index":
                named[id(node)] = "0"
                return
            case "col_index":
                text = _framed("c", node.attr("frame"))
            case "cast":
                text = f"rounded({args[0]})" if node.attr("dtype") == torch.bfloat16 else args[0]
            case op:
                whole = [arg.dtype == "int" and kind == "float" for arg in node.args]
                args = [f"(float){arg}" if wide else arg for arg, wide in zip(args, whole, strict=True)]
                text = SPELLING[op].format(*args)
        lines.append(f"const {kind} {name} = {text};")
        named[id(node)] = name

    def _store(self, index: int, piece_index: int, named: dict[int, str]) -> list[str]:
        store = self.program.stores[index]
        piece = store.pieces[piece_index]
        value, column, count = named[id(piece.value)], _framed("c", piece.frame), self.columns
        lines = []
        if f"send {store.name}" in self.names:
            lines.append(f"put<{count}>({self.at(f'send {store.name}')}, {column}, {value}, walk.now);")
        if f"keep {store.name}" in self.names:
            lines.append(f"put_plain<{count}>({self.at(f'keep {store.name}')}, {column}, {value});")
        if store.row_index:
            at = f"((i64)(({column}) / {store.head}) * (i64){self.at(f'context {store.name}')} + walk.place) * {store.head} + ({column}) % {store.head}"
            lines.append(f"put_cache<{count}>({self.at(f'cache {store.name}')}, {at}, {value});")
        return lines


def is_peeked(operand: Operand) -> bool:
    """Whether another phase may make it: a number of the row for each column."""
    return operand.dtype == torch.bfloat16 and operand.rows == "each" and bool(operand.cols)


# ---- attention


def attention(heads: int, groups: int, head: int, window: int, scale: float, slot: int, blocks: int) -> Phase:
    """Attention of one query of each head over a cache of `groups` heads of keys."""
    pairs = pairs_of(heads, groups)
    queries, parts = heads // pairs, parts_of(pairs, blocks)
    text = f"""struct NAME {{
    static constexpr int HEAD = {head}, QUERIES = {queries}, GROUPS = {pairs}, AGAIN = {pairs // groups};
    static constexpr int WINDOW = {window}, TILE = {slot // (4 * head)}, PARTS = {parts}, JOINED = {joined_of(parts)};
    static __device__ __forceinline__ float scale() {{ return {_literal(scale * math.log2(math.e))}; }}
}};"""
    names = ("query", "new_key", "new_value", "result", "keys", "values", "places", "parts", "tops", "context")
    return Phase(text, names, attends=True)


def pairs_of(heads: int, groups: int) -> int:
    """How many times keys are read by some queries: once for each head of keys, or more often where too many queries share it."""
    shared = heads // groups
    return heads // max(each for each in range(1, MOST_QUERIES + 1) if shared % each == 0)


def parts_of(pairs: int, blocks: int) -> int:
    """Into how many parts the context is split at most: one for each warp."""
    return max(1, WARPS * blocks // pairs)


def joined_of(parts: int) -> int:
    """How many blocks at most have warps with parts of the same queries, which they put together first."""
    return (parts + 2 * WARPS - 2) // WARPS


# ---- the kernel


@cache
def text_of(path: Path) -> str:
    return path.read_text()


def room_for(widths: Iterable[int], heads: Iterable[int]) -> int:
    """Bytes for the widest vector, or what all warps sum up for their queries, or what they join."""
    sums = WARPS * (MOST_QUERIES + 1) * 4 * max(heads)
    return -(-max(2 * max(widths), sums, 16 * 32 * WARPS) // 128) * 128


def kernel(
    phases: list[Phase], ring: Ring, room: int, blocks: int, target: Target, timeline: bool, machine: Path = MACHINE
) -> str:
    """The source of a kernel that goes through the phases in this order; those with the same text share their code."""
    kinds = list(dict.fromkeys((each.text, each.attends) for each in phases))
    names = [name for each in phases for name in each.names]
    slots = (target.shared - room - BESIDE - 8 * len(names)) // (ring.slot + BARRIER)
    sizes = f"constexpr int BLOCKS = {blocks}, SLOT = {ring.slot}, SLOTS = {slots}, AHEAD = {min(ring.ahead, slots)}, ROOM = {room}, ENTRIES = {len(names)}, "
    sizes += f"PLACE = {names.index('places')}, PHASES = {len(phases)}, COMPUTING = {32 * WARPS}; constexpr bool TIMELINE = {str(timeline).lower()};"
    order = ", ".join(str(kinds.index((each.text, each.attends))) for each in phases)
    first, firsts = 0, []
    for each in phases:
        firsts.append(first)
        first += len(each.names)
    structs = [text.replace("struct NAME", f"struct Phase{number}") for number, (text, _) in enumerate(kinds)]

    def cases(product: str, attention: str, more: str) -> list[str]:
        chosen = [attention if attends else product for _, attends in kinds]
        return [f"case {number}: {name}<Phase{number}>(walk, t{more}); break;" for number, name in enumerate(chosen)]

    def loop(name: str, arguments: str, body: list[str]) -> list[str]:
        return [
            f"static __device__ __forceinline__ void {name}(Walk& walk, const u64* table{arguments}) {{",
            f"    for (int phase = 0; phase < {len(phases)}; ++phase, ++walk.now) {{",
            "        const u64* const t = table + FIRST[phase];",
            "        switch (ORDER[phase]) {",
            *_indented(body, 3),
            "        }",
            "    }",
            "}",
        ]

    text = [
        sizes,
        text_of(machine),
        text_of(LIBRARY),
        *structs,
        f"__constant__ unsigned char ORDER[] = {{{order}}};",
        f"__constant__ unsigned short FIRST[] = {{{', '.join(map(str, firsts))}}};",
        "struct Phases {",
        *_indented(loop("feed", ", u64 policy", cases("feed_product", "feed_attention", ", policy"))),
        *_indented(loop("compute", "", cases("product", "attention", ""))),
        "};",
        f'extern "C" __global__ void __launch_bounds__({THREADS}, 1) whole_step(const __grid_constant__ Table table, u32* counter) {{',
        "    run<Phases>(table, counter);",
        "}",
    ]
    return "\n".join(text) + "\n"


def _framed(column: str, frame: Frame | None) -> str:
    if frame is None:
        return column
    column = column if column.isidentifier() else f"({column})"
    start = f" + {frame.index * frame.run}" if frame.index else ""
    return f"{column} / {frame.run} * {frame.block}{start} + {column} % {frame.run}"


def _literal(value: float) -> str:
    if math.isnan(value):
        return "__uint_as_float(0x7fc00000u)"
    if math.isinf(value):
        return f"({'-' if value < 0 else ''}__uint_as_float(0x7f800000u))"
    return f"{float(value)!r}f" if value >= 0 else f"({float(value)!r}f)"


def _indented(lines: list[str], steps: int = 1) -> list[str]:
    return ["    " * steps + line for line in lines]
