"""Tile: the shape of an output tile, and the proof that an epilogue is local to it.

Every column op of an epilogue is an affine relation between the columns it writes and the columns it reads. A tile is
legal iff each such read stays in the tile of its writer; isl decides, and gives a counter-example if not. What
does not fit on the chip, or what the copy engine cannot address, is refused here too, each with its reason.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from codetta.errors import Reason
from codetta.ir.graph import Node
from codetta.plan.target import Target
from codetta.program import Program, Segment

STREAM = "stream"


@dataclass(frozen=True)
class Tile:
    """An output tile of rows x cols, taken in K steps of `depth`.

    `cols` counts the columns of all strips of a segment together. `chunks`: the epilogue goes over the tile in so many runs
    of columns. `group`: how many tile rows are visited before the next tile column, for reuse in L2.
    """

    rows: int = 128
    cols: int = 128
    depth: int = 32
    stages: int = 3
    warps: int = 4
    group: int = 8
    chunks: int = 1
    loop: str = "pointer"  # pointer, stream (a few rows), descriptor (persistent, copy engine), specialised or detached (warps with jobs, Hopper)
    load_slots: int = 0  # of the specialised loop: chunks of operand tiles in flight, per consumer
    store_slots: int = 0  # and of output tiles that have no operand's place to take
    stagger: int = 0  # K steps by which its second consumer runs behind the first
    # Its first weights are read while the kernel before it ends; the program is taken in its narrow form.
    early: bool = False

    def __str__(self) -> str:
        """In a few words, for tables: loop, shape, stages, chunks, then warps or slots."""
        text = f"{self.loop} {self.rows}x{self.cols}x{self.depth} s{self.stages} c{self.chunks}"
        slots = f"i{self.load_slots} o{self.store_slots}"
        return f"{text} {slots if self.load_slots or self.store_slots else f'w{self.warps}'}{' early' if self.early else ''}"

    def strip(self, segment: Segment) -> int:
        """Columns of one strip in the tile; a power of two, so three strips take the room of four."""
        return self.cols // _power_of_two_above(len(segment.strips))

    def chunk(self, segment: Segment) -> int:
        """Columns of one strip that the epilogue handles at once."""
        return self.strip(segment) // self.chunks

    def column_tiles(self, segment: Segment) -> int:
        return -(-segment.cols // self.strip(segment))


def why_not(program: Program, tile: Tile, target: Target | None = None) -> list[Reason]:
    """Every reason why the tile cannot carry the program (on the target): empty if it can."""
    reasons: list[Reason] = []
    for size in (tile.rows, tile.cols, tile.depth, tile.chunks):
        if size & (size - 1):
            reasons.append(Reason("power of two", f"{size} is not one, and registers are tiled by powers of two"))
    if reasons:
        return reasons
    for segment in program.segments:
        reasons += _columns_local(program, segment, tile)
        reasons += _rows_local(segment, tile)
    reasons += _streams(program, tile) if tile.loop == STREAM else _boxes_agree(program, tile)
    if target is not None:
        reasons += _fits(program, tile, target)
    return list(dict.fromkeys(reasons))


def _streams(program: Program, tile: Tile) -> list[Reason]:
    """A few rows meet weights that lie row by row, each read once, whole."""
    reasons = []
    if program.batched or program.a_layout != "mk" or any(product.layout != "nk" for product in program.products):
        reasons.append(Reason("stream", "a matrix does not lie in memory as it is read"))
    if tile.chunks > 1:
        reasons.append(Reason("stream", "a tile of a few columns is not taken apart"))
    return reasons


def _boxes_agree(program: Program, tile: Tile) -> list[Reason]:
    """The copy engine reads each product's columns in boxes of one width, whichever segment asks."""
    if tile.loop == "pointer" or not program.multiplies:
        return []
    widths: dict[int, set[int]] = {}
    for segment in program.segments:
        for strip in segment.strips:
            widths.setdefault(strip.product, set()).add(tile.strip(segment))
    return [
        Reason(
            "copy engine", f"results read product {product} in boxes of {' and '.join(map(str, sorted(found)))} columns"
        )
        for product, found in widths.items()
        if len(found) > 1
    ]


def _power_of_two_above(x: int) -> int:
    return 1 << (max(x, 1) - 1).bit_length()


def _columns_local(program: Program, segment: Segment, tile: Tile) -> list[Reason]:
    reasons = []
    chunk = tile.chunk(segment)
    if chunk < (1 if tile.loop == STREAM else 16):
        reasons.append(Reason("narrow", f"{chunk} columns of a strip at a time; matrix instructions need 16"))
        return reasons
    for strip in segment.strips:
        frame = strip.frame
        # A strip with one run may end ragged; one with several must not cross from one run into the next.
        if frame and frame.run < segment.cols and frame.run % tile.strip(segment):
            reasons.append(
                Reason(
                    "strip not contiguous",
                    f"{tile.strip(segment)} columns cross the strip's runs of {frame.run} columns",
                )
            )
    for node in segment.nodes:
        if node.op in ("part", "join", "group_sum", "group_max", "spread"):
            reason = _column_op_local(node, segment.cols, chunk)
            if reason:
                reasons.append(reason)
    return reasons


def _column_op_local(node: Node, cols: int, chunk: int) -> Reason | None:
    """Whether the op reads only columns of its own chunk, by the relation {written column -> read column}."""
    write, read = node.space.cols, node.args[0].space.cols
    if not write or not read:
        return None
    if (chunk * write) % cols or (chunk * read) % cols:
        return Reason(
            "not tile-local", f"{node.op}: {chunk} of {cols} columns do not hold whole values of {min(write, read)}"
        )
    write_chunk, read_chunk = chunk * write // cols, chunk * read // cols
    match node.op:
        case "part":
            frame = node.attr("frame")
            relation = f"i = {frame.block}*floor(j/{frame.run}) + {frame.index * frame.run} + j mod {frame.run}"
        case "join":
            block, run = node.attr("block"), node.attr("block") // len(node.args)
            relation = f"i = {run}*floor(j/{block}) + j mod {run}"
        case "spread":
            relation = f"i = floor(j/{node.attr('cols')})"
        case _:
            group = node.attr("cols")
            relation = f"{group}*j <= i < {group}*j + {group}"
    example = escaping_read(write, read, write_chunk, read_chunk, relation)
    if example is None:
        return None
    j, i = example
    return Reason(
        "not tile-local",
        f"{node.op}: column {j} is in chunk {j // write_chunk} of {write_chunk} columns but reads column {i} of chunk {i // read_chunk}",
    )


@lru_cache(maxsize=4096)
def escaping_read(write: int, read: int, write_chunk: int, read_chunk: int, relation: str) -> tuple[int, int] | None:
    """A (written, read) pair of columns that lie in different chunks; None if there is none, which proves locality."""
    import islpy as isl

    reads = f"0 <= j < {write} and 0 <= i < {read} and {relation}"
    escape = isl.Set(f"{{ [j, i] : {reads} and floor(j/{write_chunk}) != floor(i/{read_chunk}) }}")
    if escape.is_empty():
        return None
    point = escape.sample_point()
    return tuple(point.get_coordinate_val(isl.dim_type.set, axis).to_python() for axis in (0, 1))  # type: ignore[return-value]


def _rows_local(segment: Segment, tile: Tile) -> list[Reason]:
    reasons = []
    for node in segment.nodes:
        group = node.space.rows
        if group > 1 and (tile.rows % group or group & (group - 1)):
            reasons.append(
                Reason("not tile-local", f"{node.op}: groups of {group} rows do not fit whole into {tile.rows} rows")
            )
        cols = node.attr("cols") if node.op in ("group_sum", "group_max", "spread") else 1
        if cols & (cols - 1):
            reasons.append(
                Reason("power of two", f"{node.op}: groups of {cols} columns; registers are tiled by powers of two")
            )
    return reasons


def shared_bytes(program: Program, tile: Tile) -> int:
    """Shared memory of the main loop's ring."""
    size = program.a_dtype.itemsize
    return tile.stages * (tile.rows + tile.cols) * tile.depth * size


def accumulator_registers(tile: Tile, target: Target) -> int:
    return tile.rows * tile.cols // (tile.warps * target.warp)


def _fits(program: Program, tile: Tile, target: Target) -> list[Reason]:
    reasons: list[Reason] = []
    if tile.loop == STREAM:
        return reasons  # a part of a weight and of a row in registers, and sizes that are known to fit
    need = shared_bytes(program, tile)
    if need > target.shared:
        reasons.append(
            Reason("shared memory", f"the ring needs {need} bytes, a block on {target.name} has {target.shared}")
        )
    registers = accumulator_registers(tile, target)
    # Beside the accumulator a thread needs addresses, masks and one chunk of the epilogue's values.
    limit = target.registers_for(tile.warps)
    if registers > limit - 80:
        reasons.append(Reason("registers", f"the accumulator takes {registers} of {limit} registers per thread"))
    if tile.loop != "pointer" and not target.bulk_copy:
        reasons.append(Reason("copy engine", f"{target.name} has none; use the pointer loop"))
    if tile.loop in ("specialised", "detached") and not target.warpgroups:
        reasons.append(Reason("warp specialisation", f"{target.name} has no warpgroup matrix instructions"))
    return reasons


def alignment_reason(what: str, stride_bytes: int, base_bytes: int, alignment: int) -> Reason | None:
    """Why the copy engine cannot address a tensor, if it cannot."""
    if stride_bytes % alignment or base_bytes % alignment:
        return Reason(
            "alignment",
            f"{what}: rows start every {stride_bytes} bytes; the copy engine needs multiples of {alignment}",
        )
    return None
