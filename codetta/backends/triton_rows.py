"""Tables of rows: scaled and rounded in one pass, and rows added to those that integers name, in a fixed order and without atomics."""

# Triton reads annotations of device functions itself, so this file must not postpone their evaluation.
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # numbers at a time
ROWS, COLS, WARPS = 4, 1024, 8  # a program's part of the rows to be added


def scaled(table: Tensor, base: Tensor, scale: Tensor | None) -> Tensor:
    """table = base·scale, in its own type; all are contiguous, the scale is one number."""
    count = table.numel()
    scale_kernel[triton.cdiv(count, BLOCK),](table, base, scale, count, scale is not None, BLOCK)
    return table


def add_rows(
    table: Tensor, rows: Tensor, places: Tensor, padding: int, base: Tensor | None, scale: Tensor | None
) -> None:
    """table[i] = base[i]·scale + the sum of rows whose place is i, for every i that is somebody's place and not the padding."""
    named, order = places.to(torch.int32).sort(stable=True)
    cols = min(COLS, triton.next_power_of_2(rows.shape[1]))
    grid = (len(places), triton.cdiv(rows.shape[1], cols))
    rows_kernel[grid](
        table, rows, named, order, base, scale, len(places), rows.shape[1], padding, base is not None, scale is not None, ROWS, cols,
        num_warps=WARPS,
    )  # fmt: skip


@triton.jit
def scale_kernel(table, base, scale, count, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(base + at, mask=at < count, other=0.0).to(tl.float32)
    if HAS_SCALE:
        value = value * tl.load(scale).to(tl.float32)
    tl.store(table + at, value.to(table.dtype.element_ty), mask=at < count)


@triton.jit
def rows_kernel(
    table, rows, named, order, base, scale, count, width, padding, HAS_BASE: tl.constexpr, HAS_SCALE: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Places are sorted; whoever stands at the first of those that are alike adds up all of them."""
    first = tl.program_id(0)
    mine = tl.load(named + first)
    before = tl.load(named + first - 1, mask=first > 0, other=-1)
    if (before != mine) & (mine != padding):
        col = tl.program_id(1) * COLS + tl.arange(0, COLS)
        inside = col < width
        to = mine.to(tl.int64) * width + col
        was = tl.zeros([COLS], tl.float32)
        if HAS_BASE:  # on its way while the rows are looked for
            was = tl.load(base + to, mask=inside, other=0.0).to(tl.float32)
            if HAS_SCALE:
                was = was * tl.load(scale).to(tl.float32)
        total = tl.zeros([COLS], tl.float32)
        at = first
        alike = ROWS
        while alike == ROWS:
            place = at + tl.arange(0, ROWS)
            here = tl.load(named + place, mask=place < count, other=-1) == mine
            row = tl.load(order + place, mask=here, other=0).to(tl.int64)
            values = tl.load(
                rows + row[:, None] * width + col[None, :], mask=here[:, None] & inside[None, :], other=0.0
            )
            total += tl.sum(values.to(tl.float32), 0)
            alike = tl.sum(here.to(tl.int32), 0)
            at += ROWS
        tl.store(table + to, (was + total).to(table.dtype.element_ty), mask=inside)
