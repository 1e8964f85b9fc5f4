"""Which tile to use: the candidates that are legal for a program on a target, best guess first.

The order is the shipped default: it was measured on the devices named, and stands in until `codetta tune` has measured the
program itself. Small numbers of rows get small tiles, so that every multiprocessor has one.
"""

from __future__ import annotations

from functools import lru_cache

from codetta.errors import Reason
from codetta.plan.target import Target
from codetta.plan.tile import Tile, why_not
from codetta.plan.traffic import specialised_tiles, why_not_specialised
from codetta.program import Program

# Buckets of M: within one, the same tile serves. Upper ends; above the last is one more bucket.
BUCKETS = (16, 64, 256, 1024, 4096)


def bucket(rows: int) -> int:
    """The smallest bucket that holds so many rows; 0 for "more than all of them"."""
    return next((end for end in BUCKETS if rows <= end), 0)


def loops(target: Target | None, aligned: bool) -> tuple[str, ...]:
    """Main loops that the target has for such tensors, best first."""
    if target is not None and target.bulk_copy and aligned:
        return ("descriptor", "pointer")
    return ("pointer",)


def _shapes(rows: int, target: Target | None) -> list[tuple[int, int, int, int, int]]:
    """(rows, cols, depth, stages, warps), best guess first."""
    if target is None:  # the interpreter: small, so that ragged edges and several tiles occur
        return [(32, 32, 32, 2, 4), (32, 64, 32, 2, 4), (32, 128, 32, 2, 4), (32, 256, 32, 2, 4)]
    if rows and rows <= 16:
        return [(16, 64, 128, 4, 4), (16, 128, 64, 4, 4), (16, 256, 64, 3, 4)]
    if rows and rows <= 64:
        return [(64, 64, 128, 3, 4), (64, 128, 64, 4, 4), (64, 256, 64, 3, 4)]
    if target.vendor == "hip":
        return [(256, 256, 32, 2, 8), (128, 128, 32, 2, 4), (128, 256, 32, 2, 8), (128, 64, 32, 2, 4)]
    small = [
        (128, 128, 64, 3, 4),
        (128, 128, 32, 3, 4),
        (128, 64, 32, 3, 4),
        (64, 128, 32, 3, 4),
        (64, 256, 32, 3, 8),
        (64, 64, 32, 3, 4),
    ]
    if target.bulk_copy and target.shared > 200_000 and not (rows and rows <= 256):
        return [(128, 256, 64, 3, 8), *small]
    return [*small, (128, 256, 32, 3, 8)]


@lru_cache(maxsize=1024)
def candidates(
    program: Program, rows: int, target: Target | None, aligned: bool
) -> tuple[tuple[Tile, ...], tuple[Reason, ...]]:
    """Legal tiles for a bucket of rows, best guess first, and why the others are not."""
    legal: list[Tile] = []
    refused: list[Reason] = []
    if target is not None and target.warpgroups and aligned and not 0 < rows <= 64:
        for tile in specialised_tiles(program, target):
            reasons = why_not(program, tile) + why_not_specialised(program, tile)
            refused += reasons
            if not reasons:
                legal.append(tile)
    for loop in loops(target, aligned):
        for m, n, k, stages, warps in _shapes(rows, target):
            for chunks in (2, 1) if n >= 128 and target is not None else (1,):
                depth = k * 2 // program.a_dtype.itemsize if target is not None else k
                tile = Tile(m, n, depth, stages, warps, 8, chunks, loop)
                reasons = why_not(program, tile, target)
                refused += reasons
                if not reasons:
                    legal.append(tile)
    return tuple(legal), tuple(dict.fromkeys(refused))
