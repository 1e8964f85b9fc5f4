"""Which tile to use: the candidates that are legal for a program on a target, best guess first.

The order is the shipped default: it was measured on the devices named, and stands in until `codetta tune` has measured the
program itself. Small numbers of rows get small tiles, so that every multiprocessor has one.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from codetta.errors import Reason
from codetta.ir.graph import Node
from codetta.plan.target import Target
from codetta.plan.tile import STREAM, Tile, why_not
from codetta.plan.traffic import CONSUMERS, SPECIALISED, specialised_tiles, why_not_specialised
from codetta.program import Program, Segment

# Buckets of M: within one, the same tile serves. Upper ends; above the last is one more bucket.
BUCKETS = (1, 2, 4, 16, 64, 128, 256, 512, 1024, 4096)
STAGES = ((8, 512), (16, 256), (32, 128), (32, 64), (32, 32))  # rows and columns of a tile without a product
FEW = 64  # rows, up to which the weights' way to the chip is all that counts
STREAMED = 4  # rows at most that meet weights element by element
# Columns of a tile that streams weights, and how deep a step is: 16 KB of them, four warps.
STREAMS = ((2, 4096), (4, 2048), (8, 1024), (16, 512))
# Columns, depth and stages of a tile for up to 16 rows, narrow ones first, and blocks of them that a multiprocessor holds (measured on an
# H200, docs/log.md): a product takes the first of which all blocks run at once. PAIRED: for pairs of strips.
EARLY, PAIRED = (((32, 256, 6), 1), ((64, 256, 4), 1), ((64, 256, 3), 2), ((128, 128, 4), 2)), (64, 128, 4)
SMALL_SPILL = 128  # registers that the specialised loop may lack and still be the best guess


def bucket(rows: int) -> int:
    """The smallest bucket that holds so many rows; 0 for "more than all of them"."""
    return next((end for end in BUCKETS if rows <= end), 0)


def loops(target: Target | None, aligned: bool) -> tuple[str, ...]:
    """Main loops that the target has for such tensors, best first."""
    if target is not None and target.bulk_copy and aligned:
        return ("descriptor", "pointer")
    return ("pointer",)


def _shapes(rows: int, target: Target | None, exact: bool = False) -> list[tuple[int, int, int, int, int]]:
    """(rows, cols, depth, stages, warps), best guess first; depth counts elements of two bytes.

    exact: fp32 products without tf32, which no matrix instruction does: small tiles, or the unrolled loop spills.
    """
    if target is None:  # the interpreter: small, so that ragged edges and several tiles occur
        return [(32, 32, 32, 2, 4), (32, 64, 32, 2, 4), (32, 128, 32, 2, 4), (32, 256, 32, 2, 4)]
    if exact:
        return [(64, 64, 32, 2, 8), (32, 128, 32, 2, 8), (32, 64, 32, 2, 8), (64, 128, 32, 2, 8), (16, 256, 32, 2, 8)]
    if 0 < rows <= 64 and target.vendor == "hip":
        m = 16 if rows <= 16 else 64
        return [(m, 64, 64, 2, 4), (m, 128, 64, 2, 4), (m, 256, 32, 2, 4), (m, 256, 32, 2, 8)]
    if rows and rows <= 16:
        return [(16, 64, 128, 4, 4), (16, 128, 64, 4, 4), (16, 256, 64, 3, 4)]
    if rows and rows <= 64:
        return [(64, 64, 128, 3, 4), (64, 128, 64, 4, 4), (64, 256, 64, 3, 8)]
    small = [(128, 128, 64, 3, 8), (128, 128, 32, 3, 8), (64, 128, 32, 3, 8), (128, 64, 32, 3, 4), (64, 64, 32, 3, 4)]
    if target.vendor == "hip":
        small = [(256, 128, 32, 2, 8), (128, 128, 32, 2, 4), (128, 128, 32, 2, 8), (64, 128, 32, 2, 4)]
        return small[1:] if rows and rows <= 256 else [(256, 256, 32, 2, 8), *small]
    if not target.bulk_copy:
        small = small[1:]  # deeper steps take too many registers for addresses
    if rows and rows <= 256:
        return [*small, (64, 256, 32, 3, 8)]
    if target.shared > 200_000:
        return [(128, 256, 64, 3, 8), *small, (64, 256, 32, 3, 8)]
    return [(128, 256, 32, 3, 8), *small, (64, 256, 32, 3, 8)]


def _chunks(rows: int, cols: int, target: Target | None) -> tuple[int, ...]:
    if target is None or cols < 128:
        return (1,)
    # Taking the largest tiles apart twice spills by itself on AMD.
    return (2, 1) if target.vendor == "hip" and rows * cols > 128 * 256 else (2, 4, 1)


def epilogue_registers(program: Program, tile: Tile, target: Target) -> float:
    """Registers per thread of the accumulator and of what the epilogue of one chunk keeps at once: an estimate.

    Values live from the statement that makes them to the last that reads them; stores and reductions come last. Compilers do
    better on pure elementwise runs, so that what counts is the order: `Target.headroom` says where spilling begins.
    """
    live = max(_live_values(program, segment) / len(segment.strips) for segment in program.segments)
    threads = (4 * CONSUMERS if tile.loop in SPECIALISED else tile.warps) * target.warp
    # Each further B has addresses of its own in the pointer loop.
    addresses = 64 * (max(len(segment.strips) for segment in program.segments) - 1) if tile.loop == "pointer" else 0
    return tile.rows * tile.cols / threads * (1 + live / tile.chunks) + addresses


def _live_values(program: Program, segment: Segment) -> float:
    """How many values the size of a strip are alive at once, at most."""
    nodes = segment.nodes
    last = {id(arg): number for number, node in enumerate(nodes) for arg in node.args}
    kept = [program.stores[s].pieces[p].value for s, p in segment.stores]
    kept += [value for s in segment.sinks for value in program.sinks[s].values]
    last |= {id(node): len(nodes) for node in kept}
    alive: list[Node] = []
    most = 0.0
    for number, node in enumerate(nodes):
        if node.space.rows and node.space.cols and node.op not in ("acc", "const", "row_index", "col_index"):
            alive.append(node)
        most = max(most, sum(each.space.cols / segment.cols for each in alive))
        alive = [each for each in alive if last.get(id(each), -1) > number]
    return most


def _excess(program: Program, tile: Tile, target: Target) -> float:
    """By how many registers the epilogue is likely to spill on such a tile."""
    if tile.loop in ("detached", STREAM):
        return 0.0  # its accumulator is not in registers while the epilogue runs, or is a few numbers
    # Consumers of the specialised loop have most of the block's registers, and handle a chunk row by row.
    share, warps = (1.25, 4 * CONSUMERS) if tile.loop in SPECIALISED else (target.headroom, tile.warps)
    allowed = share * target.registers_for(warps)
    return max(epilogue_registers(program, tile, target) - allowed, 0.0)


def _stage_tiles(program: Program, target: Target | None) -> tuple[tuple[Tile, ...], tuple[Reason, ...]]:
    """Tiles for a program that multiplies nothing."""
    tiles = {tile: why_not(program, tile, target) for tile in (Tile(m, n, 16, 1, 4, 8, 1) for m, n in STAGES)}
    legal = [tile for tile, reasons in tiles.items() if not reasons]
    return tuple(legal), tuple(dict.fromkeys(each for reasons in tiles.values() for each in reasons))


def _stream_tiles(program: Program, rows: int, target: Target | None) -> list[Tile]:
    """For a few rows: as deep as the rows are long, or the next less."""
    if not 0 < rows <= STREAMED:
        return []
    if target is None:  # the interpreter: small, so that several steps and tiles occur
        return [Tile(rows, 8, 32, 1, 4, 8, 1, STREAM)]
    deep = [(cols, depth) for cols, depth in STREAMS if depth < 2 * program.k] or [STREAMS[-1]]
    size = program.a_dtype.itemsize
    return [Tile(rows, cols, depth * 2 // size, 1, 4, 8, 1, STREAM, early=target.starts_early) for cols, depth in deep]


def _early_tiles(program: Program, rows: int, target: Target | None) -> list[Tile]:
    """For rows that a matrix instruction takes at once: weights by pointers, the first of them while the kernel before still runs."""
    if target is None or not target.starts_early or not STREAMED < rows <= 16 or program.a_dtype.itemsize != 2:
        return []
    if all(len(segment.strips) > 1 for segment in program.narrow.segments):
        shapes = [PAIRED]
    else:
        shapes = [shape for shape, held in EARLY if program.cols <= shape[0] * held * target.units] or [EARLY[-1][0]]
    shapes += [shape for shape, _ in EARLY if shape not in shapes]
    return [Tile(16, cols, depth, stages, 4, 8, 1, early=True) for cols, depth, stages in shapes]


@lru_cache(maxsize=1024)
def candidates(
    program: Program, rows: int, target: Target | None, aligned: bool
) -> tuple[tuple[Tile, ...], tuple[Reason, ...]]:
    """Legal tiles for a bucket of rows, best guess first, and why the others are not."""
    legal: list[Tile] = []
    refused: list[Reason] = []
    if not program.multiplies:
        return _stage_tiles(program, target)
    if target is not None and target.warpgroups and aligned and not 0 < rows <= 64:
        for tile in specialised_tiles(program, target, rows):
            reasons = why_not(program, tile) + why_not_specialised(program, tile)
            refused += reasons
            if not reasons:
                legal.append(tile)
    for tile in [*_stream_tiles(program, rows, target), *_early_tiles(program, rows, target)]:
        reasons = why_not(program.narrow, tile, target)
        refused += reasons
        if not reasons:
            legal.append(tile)
    first = len(legal)
    exact = program.a_dtype == torch.float32 and not program.tf32
    for loop in loops(target, aligned):
        for m, n, k, stages, warps in _shapes(rows, target, exact):
            for chunks in _chunks(m, n, target):
                depth = k * 2 // program.a_dtype.itemsize if target is not None else k
                tile = Tile(m, n, depth, stages, warps, 8, chunks, loop)
                reasons = why_not(program, tile, target)
                refused += reasons
                if not reasons:
                    legal.append(tile)
    if target is not None:
        # A tile that spills is a last resort; otherwise the order stays as it is.
        for part in (slice(0, first), slice(first, None)):
            legal[part] = sorted(legal[part], key=lambda tile: _excess(program, tile, target))
        # The specialised loop comes first even where it spills a little, not where the epilogue is far too large for it.
        legal.sort(key=lambda tile: tile.loop in SPECIALISED and _excess(program, tile, target) > SMALL_SPILL)
    return tuple(legal), tuple(dict.fromkeys(refused))
