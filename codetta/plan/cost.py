"""Cost: how many bytes a program carries between memory and chip, fused and not, and where a program does not pay.

Bytes are a count, not a measurement: each tensor once for each kernel that reads or writes it, caches neither helping nor hurting.
"""

from __future__ import annotations

import math

import torch

from codetta.plan.target import Target, unit_count
from codetta.plan.tile import Tile
from codetta.program import Operand, Program, Sink, Store
from codetta.stat import FIELDS

PARTIAL = 4  # bytes of a number in a statistic
PARTIAL_COLS, PARTIAL_ROWS = 256, 128  # columns and rows that one partial stands for, as the large tiles leave them


def bytes_moved(program: Program, rows: int, samples: int = 1) -> int:
    """Of the fused program: A, every B, every operand and every output once; reductions as the partials of their tiles."""
    outputs = sum(_store(store, rows) for store in program.stores) + sum(
        _partials(sink, rows) for sink in program.sinks
    )
    return _matrices(program, rows) + _operands(program, rows, samples) + outputs


def bytes_unfused(program: Program, rows: int, samples: int = 1) -> int:
    """Of the same work with the product as a kernel of its own, and the rest as well fused as kernels after it can be.

    The products are written in A's dtype. Then one pointwise kernel for each segment (values that meet) reads them and every
    operand once and writes every output; it reduces rows on the way. A column reduction runs across that kernel's blocks, so
    it is a kernel of its own that reads its value again.
    """
    products = rows * program.cols * program.a_dtype.itemsize
    again = sum(rows * sink.cols * program.a_dtype.itemsize for sink in program.sinks if not sink.by_row)
    outputs = sum(_store(store, rows) for store in program.stores) + sum(
        _finished(sink, rows) for sink in program.sinks
    )
    return _matrices(program, rows) + 2 * products + again + _operands(program, rows, samples) + outputs


def flops(program: Program, rows: int) -> int:
    """Of the products alone."""
    return 2 * rows * program.cols * program.k


def predicted_ms(program: Program, rows: int, target: Target, samples: int = 1) -> float:
    """The roofline: as long as its multiplications or its bytes take at the target's best, whichever is longer."""
    return max(flops(program, rows) / target.matmul_tflops, bytes_moved(program, rows, samples) / target.read_tbs) / 1e9


# What a multiprocessor spends on a tile beside its main loop, on an H200: filling the ring, and the epilogue of the last tile, which nothing hides.
FILL_US, EPILOGUE_US = 1.5, 3.0
L2_TBS = 8.0  # that all multiprocessors together read, where several want the same lines (H200)


def loop_us(program: Program, rows: int, tile: Tile, target: Target) -> float:
    """Microseconds of the product on such tiles, one for each multiprocessor at a time.

    Only for comparing tiles: a wide one multiplies more for the bytes that it reads, narrow ones leave fewer multiprocessors without work.
    """
    tiles = -(-rows // tile.rows) * sum(tile.column_tiles(segment) for segment in program.segments)
    busy = min(tiles, target.units)
    step_flops = 2 * tile.rows * tile.cols * tile.depth
    step_bytes = (tile.rows + tile.cols) * tile.depth * program.a_dtype.itemsize
    step = max(step_flops * target.units / target.matmul_tflops, step_bytes * busy / L2_TBS) / 1e6
    whole_epilogue = EPILOGUE_US * tile.cols / 256
    rounds = -(-tiles // target.units)
    return rounds * (math.ceil(program.k / tile.depth) * step + FILL_US) + whole_epilogue


# A program of ours for a weight's gradient is as fast as the vendor's product where its tiles, all of one size, leave hardly a part of the
# device without work in the last round; the vendor has tiles of several sizes.
TILE = (128, 256)
FULL = 0.9
ROWS = 4096


def fills_the_device(weight: torch.Tensor, rows: int) -> bool:
    """Whether the weight's gradient, a sum over so many rows, is worth a program of its own."""
    if weight.device.type != "cuda" or weight.dtype == torch.float32 or rows < ROWS:
        return False
    tiles = math.prod(-(-size // tile) for size, tile in zip(weight.shape, TILE, strict=True))
    units = unit_count(weight.device)
    return tiles >= FULL * units * -(-tiles // units)


def _matrices(program: Program, rows: int) -> int:
    weights = sum(product.cols * product.dtype.itemsize for product in program.products) * program.k
    return rows * program.k * program.a_dtype.itemsize + weights


def _operands(program: Program, rows: int, samples: int) -> int:
    return sum(_operand(operand, program, rows, samples) for operand in program.operands)


def _operand(operand: Operand, program: Program, rows: int, samples: int) -> int:
    if operand.stat:
        # Statistics are of A's rows as a rule, so they have a partial for each run of K.
        width = program.k or max(segment.cols for segment in program.segments)
        return FIELDS[operand.stat] * math.ceil(width / PARTIAL_COLS) * rows * PARTIAL
    count = {"none": 1, "sample": samples, "repeat": rows // samples}.get(operand.rows, math.ceil(rows / operand.group))
    return count * max(operand.cols, 1) * operand.dtype.itemsize


def _store(store: Store, rows: int) -> int:
    return math.ceil(rows / store.group) * max(store.cols, 1) * store.dtype.itemsize


def _partials(sink: Sink, rows: int) -> int:
    if sink.by_row:
        return FIELDS[sink.how] * math.ceil(sink.cols / PARTIAL_COLS) * rows * PARTIAL
    return FIELDS[sink.how] * math.ceil(rows / PARTIAL_ROWS) * sink.cols * PARTIAL


def _finished(sink: Sink, rows: int) -> int:
    return FIELDS[sink.how] * (rows if sink.by_row else sink.cols) * PARTIAL
