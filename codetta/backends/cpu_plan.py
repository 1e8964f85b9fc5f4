"""How the CPU main loop cuts up a program: panels of columns, blocks and tiles of rows, and what it refuses.

A panel holds every block and group of columns whole, whatever its size: heads of 80 or 96 columns are as good as 64. This
file knows sizes, not C++.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from codetta.errors import Reason
from codetta.ir.graph import Node
from codetta.program import Program, Segment

PRODUCT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LANES = 16  # of a vector
STRIP = 32  # columns that the main loop computes at once; a panel that is no multiple wastes the rest
PANEL = 128  # columns of a panel where the program leaves the choice: narrower ones read operands in too short runs
WIDEST = 256
ROW_STRIP = 14  # rows that the main loop computes at once
ROW_TILE = 112  # rows of a partial of a column reduction, and the least that a thread takes on
MOST_STRIPS = 16  # as cpu_runtime.h's Place has room for
MOST_ROOM = 1 << 28  # bytes of scratch memory for each thread


@dataclass(frozen=True)
class Rows:
    """`block`: rows that an epilogue must see together, 0 for any number. `tile`: rows of a column reduction's partial."""

    block: int
    tile: int


def panel_cols(segment: Segment) -> int:
    """Columns of a strip that make a panel: whole blocks and groups, few wasted, near PANEL."""
    grain = _grain(segment)
    if grain >= segment.cols:
        return segment.cols
    widths = range(grain, max(WIDEST, grain) + 1, grain)
    best = min(widths, key=lambda width: (-(-width // STRIP) * STRIP / width, abs(width - PANEL)))
    return min(best, segment.cols)


def _grain(segment: Segment) -> int:
    """The fewest columns of a strip that hold every block and group whole, and whole columns of every value."""
    grain, cols = 1, segment.cols
    for node in segment.nodes:
        if node.space.cols:
            grain = math.lcm(grain, cols // math.gcd(cols, node.space.cols))
        for block, of in _blocks(node):
            grain = math.lcm(grain, block * cols // math.gcd(block * cols, of))
    return grain


def _blocks(node: Node) -> list[tuple[int, int]]:
    """(columns that must stay together, columns of the value that they are counted in)."""
    match node.op:
        case "part":
            return [(node.attr("frame").block, node.args[0].space.cols)]
        case "join":
            return [(node.attr("block"), node.space.cols)]
        case "group_sum" | "group_max":
            return [(node.attr("cols"), node.args[0].space.cols)]
        case "spread":
            return [(node.attr("cols"), node.space.cols)]
    return []


def row_groups(program: Program) -> int:
    """The fewest rows that hold every group of rows whole: 1 where there are no groups."""
    groups = [node.space.rows for segment in program.segments for node in segment.nodes]
    return math.lcm(*(group for group in groups if group > 1))


def rows_of(program: Program) -> Rows:
    group = row_groups(program)
    if group == 1:
        return Rows(0, ROW_TILE)
    block = math.lcm(group, ROW_STRIP)
    if block > WIDEST:
        block = group * max(1, PANEL // group)
    return Rows(block, block * max(1, ROW_TILE // block))


def why_not(program: Program) -> list[Reason]:
    """What the language of the kernels lacks."""
    reasons = []
    if program.a_dtype not in PRODUCT_DTYPES:
        reasons.append(Reason("dtype", f"products of {program.a_dtype} have no kernel"))
    for segment in program.segments:
        if len(segment.strips) > MOST_STRIPS:
            reasons.append(
                Reason("strips", f"{len(segment.strips)} strips meet in one panel, {MOST_STRIPS} is the most")
            )
        for node in segment.nodes:
            if node.space.rows > 1 and not node.space.cols:
                reasons.append(Reason("groups", f"{node.op}: a value for {node.space.rows} rows and no column"))
    return list(dict.fromkeys(reasons))
