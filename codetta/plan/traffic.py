"""Traffic: which tiles of an epilogue pass through shared memory, and how deep their rings are.

The specialised loop has operand tiles brought in by the copy engine during the main loop, and output tiles taken away behind
it. A move is such a tile, chunk by chunk; what the copy engine cannot address is read or written directly by the threads.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from codetta.errors import Reason
from codetta.ir.graph import Frame, Node
from codetta.plan.cost import loop_us
from codetta.plan.target import Target
from codetta.plan.tile import Tile
from codetta.program import Operand, Program, Segment, Store

CONSUMERS = 2  # warpgroups that share a tile, half of its rows each
SPECIALISED = ("specialised", "detached")  # loops whose warps have different jobs
WIDTHS = (256, 128, 64)  # columns of their tiles
SHORT = 1024  # rows, up to which wide tiles may be too few for all multiprocessors
WIDEST_CHUNK = 128  # columns that the epilogue's warps have registers for
MOVABLE = (torch.bfloat16, torch.float16, torch.float32)
BARRIERS = 1024  # bytes for barriers and the captured arguments of the warp partitions


@dataclass(frozen=True)
class Move:
    """A tile that passes through shared memory: an operand on its way in, or an output on its way out."""

    name: str
    tensor: str  # operand or store
    dtype: torch.dtype
    cols: int  # of its space
    frame: Frame | None = None
    place: str = "rows"  # rows (m, n) | repeat (m % rows, n) | bhtd (sample, head, row)
    period: int = 0
    head: int = 0

    def width(self, chunk: int, segment: Segment) -> int:
        return chunk * self.cols // segment.cols


def load_move(node: Node, operand: Operand, segment: Segment, tile: Tile) -> Move | None:
    """The move of a load, None where the copy engine cannot do it.

    A tile without slots for loads leaves tables that repeat over the rows to the threads: they stay in the cache.
    """
    chunk = tile.chunk(segment)
    if not tile.load_slots and operand.rows == "repeat":
        return None
    if node.op != "load" or operand.dtype not in MOVABLE or operand.stat or operand.group != 1 or not operand.cols:
        return None
    frame, width = node.attr("frame"), chunk * node.space.cols // segment.cols
    if width < 16 or (frame and frame.run != node.space.cols):
        return None
    name = f"in_{node.attr('name')}" + (f"_{frame.index}of{frame.count}" if frame else "")
    move = Move(name, operand.name, operand.dtype, node.space.cols, frame)
    if operand.period:
        if operand.rows not in ("each", "repeat") or operand.period % width or operand.layout != "rows":
            return None
        place = "rows" if operand.rows == "each" else "repeat"
        return replace(move, name=f"{name}_{node.space.cols}", place=place, period=operand.period)
    if operand.rows != "each":
        return None
    if operand.layout == "bhtd":
        whole = operand.head % width == 0 and segment.cols % chunk == 0 and not frame
        return replace(move, place="bhtd", head=operand.head) if whole else None
    return move if operand.layout == "rows" else None


def store_move(store: Store, piece: int, segment: Segment, chunk: int) -> Move | None:
    """The move of a piece of a store, None where threads must write it themselves."""
    value, frame = store.pieces[piece].value, store.pieces[piece].frame
    width = chunk * value.space.cols // segment.cols
    if store.dtype not in MOVABLE or store.row_index or store.group != 1 or width < 16 or value.op == "const":
        return None
    if frame and frame.run != value.space.cols:
        return None
    move = Move(f"out_{store.name}_{piece}", store.name, store.dtype, value.space.cols, frame)
    if store.layout == "bhtd":
        whole = store.head % width == 0 and segment.cols % chunk == 0 and not frame
        return replace(move, place="bhtd", head=store.head) if whole else None
    return move if store.layout == "rows" else None


@dataclass(frozen=True)
class SegmentTraffic:
    """The moves of one segment and the slot (index into the kernel's buffers) each of them uses."""

    loads: tuple[Move, ...]
    stores: tuple[Move, ...]
    load_slot: tuple[int, ...]  # of each load
    store_place: tuple[
        tuple[str, int], ...
    ]  # of each store: ("x", slot of a load it replaces), ("y", slot), ("acc", strip)


@dataclass(frozen=True)
class Traffic:
    """All moves of a program for a chunk width: buffers are shared between segments where type and width agree."""

    chunk: int
    segments: tuple[SegmentTraffic, ...]
    x_slots: tuple[tuple[torch.dtype, int], ...]  # (dtype, width) of each load buffer
    y_slots: tuple[tuple[torch.dtype, int], ...]  # and of each buffer for stores without a partner


@lru_cache(maxsize=1024)
def traffic(program: Program, tile: Tile) -> Traffic:
    """Sort every tile-sized load and store of the program into buffers."""
    x_slots: list[tuple[torch.dtype, int]] = []
    y_slots: list[tuple[torch.dtype, int]] = []
    found = []
    for segment in program.segments:
        chunk = tile.chunk(segment)
        loads = {}
        for node in segment.nodes:
            if node.op == "load" and (move := load_move(node, program.operand(node.attr("name")), segment, tile)):
                loads[move.name] = move
        stores = [store_move(program.stores[s], p, segment, chunk) for s, p in segment.stores]
        kinds = [(move.dtype, move.width(chunk, segment)) for move in loads.values()]
        load_slot = _assign(kinds, x_slots)
        free = dict(zip(load_slot, kinds, strict=True))
        places: list[tuple[str, int]] = []
        lonely: list[tuple[torch.dtype, int]] = []
        # The detached loop parks the accumulator in shared memory: results can take its place.
        parked = list(range(len(segment.strips))) if tile.loop == "detached" else []
        # There, a result in an operand's place keeps the warps waiting until it has left; with slots of its own it does not.
        in_place = tile.loop == "specialised" or not tile.store_slots
        for move in (each for each in stores if each):
            kind = (move.dtype, move.width(chunk, segment))
            if parked and kind == (program.a_dtype, chunk):
                places.append(("acc", parked.pop(0)))
                continue
            partner = next((slot for slot, other in free.items() if other == kind), None)
            if partner is not None and in_place:
                del free[partner]
                places.append(("x", partner))
            else:
                places.append(("y", len(lonely)))
                lonely.append(kind)
        own = _assign(lonely, y_slots)
        places = [(ring, own[index] if ring == "y" else index) for ring, index in places]
        moved = tuple(each for each in stores if each)
        found.append(SegmentTraffic(tuple(loads.values()), moved, tuple(load_slot), tuple(places)))
    return Traffic(tile.chunk(program.segments[0]), tuple(found), tuple(x_slots), tuple(y_slots))


def _assign(kinds: list[tuple[torch.dtype, int]], slots: list[tuple[torch.dtype, int]]) -> list[int]:
    """A slot of the right kind for each, adding slots where there are too few."""
    taken: list[int] = []
    for kind in kinds:
        index = next((i for i, slot in enumerate(slots) if slot == kind and i not in taken), None)
        if index is None:
            slots.append(kind)
            index = len(slots) - 1
        taken.append(index)
    return taken


def why_not_specialised(program: Program, tile: Tile) -> list[Reason]:
    """What the specialised loop cannot do, beyond what no tile can."""
    reasons = []
    if program.batched:
        reasons.append(Reason("specialised", "batched products take the descriptor loop"))
    if len({product.layout for product in program.products}) > 1:
        reasons.append(Reason("specialised", "all B operands must be stored the same way"))
    wide = [store.name for store in program.stores if store.cols and store.dtype.itemsize > 2]
    if tile.loop == "detached" and wide:
        reasons.append(
            Reason("detached", f"{wide[0]} is stored in full precision, which the parked accumulator has not")
        )
    if program.a_dtype.itemsize != 2:
        reasons.append(Reason("specialised", f"products of {program.a_dtype} take the descriptor loop"))
    if len({len(segment.strips) for segment in program.segments}) > 1:
        reasons.append(Reason("specialised", "all segments must have the same number of strips"))
    for segment in program.segments:
        chunk = tile.chunk(segment)
        if len(segment.strips) & (len(segment.strips) - 1):
            reasons.append(Reason("specialised", f"{len(segment.strips)} strips are not a power of two"))
        for strip in segment.strips:
            if strip.frame and strip.frame.run != segment.cols:
                reasons.append(Reason("specialised", "strips of several runs need the descriptor loop"))
        for node in segment.nodes:
            width = chunk * node.space.cols // segment.cols
            if node.space.rows > 1:
                reasons.append(Reason("specialised", f"{node.op}: groups of rows cross threads"))
            if node.op in ("group_sum", "group_max", "spread"):
                grouped = node.args[0] if node.op != "spread" else node
                if chunk * grouped.space.cols // segment.cols != node.attr("cols"):
                    reasons.append(
                        Reason("specialised", f"{node.op}: a chunk must be one group of {node.attr('cols')} columns")
                    )
            elif node.op in ("part", "join") and _run(node) < 8 and _run(node) != 1:
                # A thread has two neighbouring columns in eight: it can split pairs, or runs of whole eights.
                reasons.append(Reason("specialised", f"{node.op}: runs of {_run(node)} columns cross threads"))
            elif node.space.cols and 1 < width < 16:
                reasons.append(Reason("specialised", f"{node.op}: {width} columns in a chunk are too narrow"))
        for index in segment.sinks:
            sink = program.sinks[index]
            if not sink.by_row and any(chunk * value.space.cols // segment.cols < 16 for value in sink.values):
                reasons.append(Reason("specialised", f"{sink.op}: {sink.name} has too few columns in a chunk"))
    return list(dict.fromkeys(reasons))


def _run(node: Node) -> int:
    """Adjacent columns that stay together in a part or join."""
    return node.attr("frame").run if node.op == "part" else node.attr("block") // len(node.args)


def parked_bytes(program: Program, tile: Tile) -> int:
    """Shared memory in which the detached loop parks a tile's accumulator, rounded to the type of A."""
    return tile.rows * tile.cols * program.a_dtype.itemsize if tile.loop == "detached" else 0


def specialised_tiles(program: Program, target: Target, rows: int = 0) -> list[Tile]:
    """Tiles for the warp-specialised loops and so many rows (0: unknown), best guess first.

    The detached loop hides whatever the epilogue does and was faster for every program measured on an H200 (docs/log.md);
    the attached one keeps the accumulator in full precision. With more than two reductions the detached epilogue keeps more
    values alive than its warps have registers for. Up to `SHORT` rows, narrow tiles come first where they leave less of the device idle.
    """
    crowded = max(len(segment.sinks) for segment in program.segments) > 2
    loops = ("specialised", "detached") if crowded else ("detached", "specialised")
    widths = list(WIDTHS) if 0 < rows <= SHORT else [WIDTHS[0]]
    widths.sort(key=lambda cols: loop_us(program, rows, Tile(cols=cols, depth=64), target))
    return [tile for loop in loops for cols in widths for tile in ring_tiles(program, target, loop, cols=cols)]


def ring_tiles(program: Program, target: Target, loop: str, rows: int = 128, cols: int = 256) -> list[Tile]:
    """Tiles of one loop with the best rings that fit for each number of chunks and stages, shortest epilogue first."""
    size = program.a_dtype.itemsize
    depth = 128 // size
    # Many tile columns: visiting more rows of tiles between them keeps B in L2 longer.
    group = 16 if sum(-(-product.cols // cols) for product in program.products) >= 32 else 8
    options: list[tuple[tuple[float, int], Tile]] = []
    for chunks in (each for each in (1, 2, 4, 8) if cols // each <= WIDEST_CHUNK):
        for stages in (4, 3):
            base = Tile(rows, cols, depth, stages, 4, group, chunks, loop)
            if all(base.chunk(segment) >= 16 for segment in program.segments):
                options += _rings(program, target, base)
    best: dict[tuple[int, int], Tile] = {}
    for _, tile in sorted(options, key=lambda option: option[0]):
        best.setdefault((tile.chunks, tile.stages), tile)
    if loop == "specialised":
        return list(best.values())
    # Beside the main loop, fine chunks keep more operands in flight and fewer values in registers, down to 32 columns.
    wanted = 8 // len(program.segments[0].strips)
    return sorted(best.values(), key=lambda tile: (abs(tile.chunks - wanted), -tile.chunks))


def _rings(program: Program, target: Target, base: Tile) -> list[tuple[tuple[float, int], Tile]]:
    """All rings that fit beside the tile's stages, each with its expected cost."""
    half = base.rows // CONSUMERS
    stage = (base.rows + base.cols) * base.depth * program.a_dtype.itemsize
    fixed = BARRIERS + scratch_bytes(program, base) + parked_bytes(program, base)
    # Consumers that run their own epilogues have rings of their own.
    room = (target.shared - fixed - base.stages * stage) // (CONSUMERS if base.loop == "specialised" else 1)
    nodes = sum(len(segment.nodes) for segment in program.segments) / len(program.segments)
    work = 120 + base.chunk(program.segments[0]) * (3 + nodes)
    # The fourth stage helps the main loop little; a late load costs a trip to memory.
    penalty = 1.0 if base.stages == 4 else 1.3
    options = []
    tables = any(operand.rows == "repeat" for operand in program.operands)
    for y, with_loads in itertools.product(range(base.chunks + 1), (1, 0) if tables else (1,)):
        moves = traffic(program, replace(base, store_slots=y, load_slots=with_loads))
        places = [ring for each in moves.segments for ring, _ in each.store_place]
        if (y > 0) != ("y" in places):
            continue
        x_bytes = half * sum(dtype.itemsize * width for dtype, width in moves.x_slots)
        y_bytes = half * sum(dtype.itemsize * width for dtype, width in moves.y_slots)
        stored = [
            half * move.width(moves.chunk, segment) * move.dtype.itemsize
            for segment, each in zip(program.segments, moves.segments, strict=True)
            for move in each.stores
        ]
        drain = 400 + sum(stored) / len(program.segments) / 32
        waits = base.loop == "detached" and "x" in places
        if x_bytes and not with_loads:
            continue  # other operands need the slots
        # Threads that read tables themselves wait for each.
        slow = 1.0 if with_loads else 1.5
        for x in range(1, base.chunks + 1) if x_bytes else (0,):
            if x * x_bytes + y * y_bytes <= room:
                cycles = epilogue_cycles(
                    base.chunks, x, y, work * slow, drain, 1200.0, in_place="x" in places, waits=waits
                )
                options.append(((cycles * penalty, -x - y), replace(base, load_slots=x, store_slots=y)))
    return options


def scratch_bytes(program: Program, tile: Tile) -> int:
    """Column reductions cross the warps of a consumer through shared memory."""
    has_columns = any(not sink.by_row for sink in program.sinks)
    return 64 * max(tile.chunk(segment) for segment in program.segments) if has_columns else 0


def epilogue_cycles(
    chunks: int, x: int, y: int, work: float, drain: float, load: float, *, in_place: bool = True, waits: bool = False
) -> float:
    """The length of a tile's epilogue: a rough model of waiting for slots, of which only the order matters.

    Chunk i waits for the load slot of chunk i - x (drained, if a result was put there, and loaded again) and the store slot of
    chunk i - y (drained). waits: whoever computes also waits for the draining.
    """
    done: list[float] = []
    drained: list[float] = []
    for i in range(chunks):
        start = done[-1] if done else 0.0
        if x and i >= x:
            start = max(start, (drained if in_place else done)[i - x] + load)
        if y and i >= y:
            start = max(start, drained[i - y])
        done.append(start + work + (drain if waits else 0.0))
        drained.append(done[-1] if waits else max(done[-1], drained[-1] if drained else 0.0) + drain)
    return done[-1]
