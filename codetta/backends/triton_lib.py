"""Device functions that generated Triton kernels call: what Triton's language lacks or defines differently."""

# Triton reads annotations of device functions itself, so this file must not postpone their evaluation.
import os

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET", "0") == "1")
PARTIALS = tl.constexpr(1024)  # at once, of statistics that a few rows finish


@triton.jit
def let_next_start():
    """The kernel behind this one may start, as soon as there is room. Whatever it reads that this one writes, it waits for."""
    tl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def wait_for_last():
    """Until all kernels before this one have ended and what they wrote is there. Without a dependent launch they have."""
    tl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def fetch(lines):
    """Lines of 128 bytes come into L2 while nobody waits for them."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l,~{memory}", [lines], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def tile_order(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Visit GROUP tile rows before the next tile column, so that both operands are reused from L2."""
    per_group = GROUP * tiles_n
    first = (tile // per_group) * GROUP
    rows = min(tiles_m - first, GROUP)
    inside = tile % per_group
    return first + inside % rows, inside // rows


@triton.jit
def halves(x):
    """The left and the right half of the columns; both stay in the registers they are in."""
    rows: tl.constexpr = x.shape[0]
    half: tl.constexpr = x.shape[1] // 2
    return tl.split(tl.permute(tl.reshape(x, (rows, 2, half)), (0, 2, 1)))


@triton.jit
def part_pair(x, BLOCK: tl.constexpr):
    """Both halves of every block of BLOCK columns."""
    rows: tl.constexpr = x.shape[0]
    cols: tl.constexpr = x.shape[1]
    run: tl.constexpr = BLOCK // 2
    low, high = tl.split(tl.permute(tl.reshape(x, (rows, cols // BLOCK, 2, run)), (0, 1, 3, 2)))
    return tl.reshape(low, (rows, cols // 2)), tl.reshape(high, (rows, cols // 2))


@triton.jit
def join_pair(low, high, BLOCK: tl.constexpr):
    """The inverse of part_pair."""
    rows: tl.constexpr = low.shape[0]
    cols: tl.constexpr = low.shape[1]
    run: tl.constexpr = BLOCK // 2
    low = tl.reshape(low, (rows, cols // run, run))
    high = tl.reshape(high, (rows, cols // run, run))
    return tl.reshape(tl.permute(tl.join(low, high), (0, 1, 3, 2)), (rows, cols * 2))


@triton.jit
def max_nan(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def group_sum(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows: tl.constexpr = x.shape[0]
    cols: tl.constexpr = x.shape[1]
    x = tl.reshape(tl.sum(tl.reshape(x, (rows, cols // COLS, COLS)), 2), (rows, cols // COLS))
    if ROWS > 1:
        x = tl.sum(tl.reshape(x, (rows // ROWS, ROWS, cols // COLS)), 1)
    return x


@triton.jit
def group_max(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows: tl.constexpr = x.shape[0]
    cols: tl.constexpr = x.shape[1]
    x = tl.reduce(tl.reshape(x, (rows, cols // COLS, COLS)), 2, max_nan)
    if ROWS > 1:
        x = tl.reduce(tl.reshape(x, (rows // ROWS, ROWS, cols // COLS)), 1, max_nan)
    return x


@triton.jit
def spread(x, ROWS: tl.constexpr, COLS: tl.constexpr):
    rows: tl.constexpr = x.shape[0]
    cols: tl.constexpr = x.shape[1]
    x = tl.broadcast_to(tl.reshape(x, (rows, 1, cols, 1)), (rows, ROWS, cols, COLS))
    return tl.reshape(x, (rows * ROWS, cols * COLS))


@triton.jit
def tanh(x):
    """Small arguments by their series: 1 - exp(-2x) would lose their digits."""
    square = x * x
    series = x * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    decay = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - decay) / (1.0 + decay)
    return tl.where(tl.abs(x) < 0.3, series, tl.where(x < 0, -large, large))


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def erfc(x):
    """exp(-x²) times a polynomial in 1 / (1 + 0.33 |x|), and 2 minus that for negative numbers; right to 1e-7 (1 + x²).

    Half as long as erf, which must be exact around 0.
    """
    size = tl.abs(x)
    return erfc_of(x, size, 1.0 / (1.0 + 0.33 * size))


@triton.jit
def erfc_of(x, size, t):
    p = 0.0472290442 + t * (0.408484256 + t * (-0.351132597 + t * (0.4602271 + t * -0.135343248)))
    p = t * (0.186357774 + t * (0.182956371 + t * (0.201221293 + t * p)))
    tail = p * tl.exp2(size * size * -1.4426950408889634)
    return tl.where(x < 0, 2.0 - tail, tail)


@triton.jit
def round_even(x):
    """Adding 1.5 · 2^23 leaves no bits for a fraction; larger numbers are whole already."""
    return tl.where(tl.abs(x) < 4194304.0, (x + 12582912.0) - 12582912.0, x)


@triton.jit
def saturate(x, LIMIT: tl.constexpr):
    """Clamp to ±LIMIT; NaN stays NaN."""
    return tl.where(x > LIMIT, LIMIT, tl.where(x < -LIMIT, -LIMIT, x))


@triton.jit
def rounded(x, BITS: tl.constexpr):
    """x to so many bits of mantissa, ties to even, for the interpreter, whose conversions truncate or lose the carry."""
    bits = x.to(tl.int32, bitcast=True)
    half: tl.constexpr = (1 << (22 - BITS)) - 1
    mask: tl.constexpr = -(1 << (23 - BITS))
    nearest = (bits + half + ((bits >> (23 - BITS)) & 1)) & mask
    return tl.where(x == x, nearest.to(tl.float32, bitcast=True), x)


@triton.jit
def to_bf16(x):
    if INTERPRETED:
        x = rounded(x, 7)
    return x.to(tl.bfloat16)


@triton.jit
def to_fp8(x):
    """The nearest e4m3, ties to even, saturated."""
    x = saturate(x, 448.0)
    if INTERPRETED:
        # Below the smallest normal number the steps are 2^-9.
        x = tl.where(tl.abs(x) < 0.015625, (x + 24576.0) - 24576.0, rounded(x, 3))
    return x.to(tl.float8e4nv)


@triton.jit
def to_int8(x):
    """Nearest whole number, ties to even, saturated; NaN becomes 0."""
    x = round_even(saturate(x, 127.0))
    return tl.where(x == x, x, 0.0).to(tl.int8)


@triton.jit
def uniform(seed, row, col):
    """Philox 2x32, 7 rounds, counter (row, col): the same numbers as `codetta.ir.op.philox`."""
    row, col = tl.broadcast(row, col)
    low = col.to(tl.uint32)
    high = row.to(tl.uint32)
    key = seed.to(tl.uint32)
    for _ in tl.static_range(7):
        product_low = low * 0xD256D193
        low = tl.umulhi(low, low * 0 + 0xD256D193) ^ key ^ high
        high = product_low
        key = key + 0x9E3779B9
    return (low >> 8).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def finish_sum(pointer, tiles, length, at, ok):
    """The sum of a statistic's partials, in the order of the tiles; eight loads are in flight at once."""
    length = length.to(tl.int64)  # partials can have more than 2^31 elements
    total = tl.load(pointer + at, mask=ok, other=0.0)
    for first in range(1, tiles, 8):
        for step in tl.static_range(8):
            tile = first + step
            total += tl.load(pointer + tile * length + at, mask=ok & (tile < tiles), other=0.0)
    return total


@triton.jit
def finish_max(pointer, tiles, length, at, ok):
    length = length.to(tl.int64)
    top = tl.load(pointer + at, mask=ok, other=0.0)
    for tile in range(1, tiles):
        top = max_nan(top, tl.load(pointer + tile * length + at, mask=ok, other=0.0))
    return top


@triton.jit
def finite_or_zero(x):
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def scaled_by_exp(part, apart):
    """part · exp(apart); an empty part stays empty, whatever the exponent is."""
    return tl.where(part > 0, part * tl.exp(apart), part)


@triton.jit
def finish_lse(pointer, tiles, length, at, ok):
    """log of the sum of exponentials from partials (max, sum of exp(x - max))."""
    length = length.to(tl.int64)
    top = finish_max(pointer, tiles, length, at, ok)
    shift = finite_or_zero(top)
    sums = pointer + tiles * length
    first = tl.load(pointer + at, mask=ok, other=0.0)
    total = scaled_by_exp(tl.load(sums + at, mask=ok, other=1.0), first - shift)
    for tile in range(1, tiles):
        place = tile * length + at
        top = tl.load(pointer + place, mask=ok, other=0.0)
        total += scaled_by_exp(tl.load(sums + place, mask=ok, other=1.0), top - shift)
    return shift + tl.log(total)


@triton.jit
def finish_mean(pointer, tiles, length, at, ok, width, total):
    """Of the tiles' means, each with its number of columns; eight loads are in flight at once."""
    length = length.to(tl.int64)
    mean = tl.load(pointer + at, mask=ok, other=0.0) * min(width, total)
    for first in range(1, tiles, 8):
        for step in tl.static_range(8):
            tile = first + step
            count = min(width, total - tile * width)
            mean += tl.load(pointer + tile * length + at, mask=ok & (tile < tiles), other=0.0) * count
    return mean / total


@triton.jit
def finish_var(pointer, tiles, length, at, ok, width, total):
    """Chan's merge of tile means and squared deviations; eight loads of each are in flight at once."""
    length = length.to(tl.int64)
    mean = finish_mean(pointer, tiles, length, at, ok, width, total)
    deviations = pointer + tiles * length
    apart = tl.load(pointer + at, mask=ok, other=0.0) - mean
    m2 = tl.load(deviations + at, mask=ok, other=0.0) + apart * apart * min(width, total)
    for first in range(1, tiles, 8):
        for step in tl.static_range(8):
            tile = first + step
            count = tl.where(tile < tiles, min(width, total - tile * width), 0)  # beyond the last there is none
            place = tile * length + at
            apart = tl.load(pointer + place, mask=ok & (tile < tiles), other=0.0) - mean
            m2 += tl.load(deviations + place, mask=ok & (tile < tiles), other=0.0) + apart * apart * count
    return m2 / total


@triton.jit
def finish_few_sum(pointer, tiles, length, at, ok):
    """finish_sum for a few rows and many tiles."""
    total = tl.zeros(at.shape, tl.float32)
    for first in range(0, tiles, PARTIALS):
        tile = first + tl.arange(0, PARTIALS)[None, :]
        part = tl.load(pointer + tile.to(tl.int64) * length + at, mask=ok & (tile < tiles), other=0.0)
        total += tl.sum(part, 1)[:, None]
    return total


@triton.jit
def finish_few_max(pointer, tiles, length, at, ok):
    top = tl.full(at.shape, float("-inf"), tl.float32)
    for first in range(0, tiles, PARTIALS):
        tile = first + tl.arange(0, PARTIALS)[None, :]
        part = tl.load(pointer + tile.to(tl.int64) * length + at, mask=ok & (tile < tiles), other=float("-inf"))
        top = max_nan(top, tl.reduce(part, 1, max_nan)[:, None])
    return tl.where(ok, top, 0.0)


@triton.jit
def finish_few_lse(pointer, tiles, length, at, ok):
    top = finish_few_max(pointer, tiles, length, at, ok)
    shift = finite_or_zero(top)
    total = tl.zeros(at.shape, tl.float32)
    for first in range(0, tiles, PARTIALS):
        tile = first + tl.arange(0, PARTIALS)[None, :]
        place, there = tile.to(tl.int64) * length + at, ok & (tile < tiles)
        part = tl.load(pointer + place, mask=there, other=0.0)
        mass = tl.load(pointer + tiles.to(tl.int64) * length + place, mask=there, other=0.0)
        total += tl.sum(tl.where(there, scaled_by_exp(mass, part - shift), 0.0), 1)[:, None]
    return tl.where(ok, shift + tl.log(total), 0.0)


@triton.jit
def finish_few_mean(pointer, tiles, length, at, ok, width, total):
    mean = tl.zeros(at.shape, tl.float32)
    for first in range(0, tiles, PARTIALS):
        tile = first + tl.arange(0, PARTIALS)[None, :]
        count = tl.minimum(width, total - tile * width)
        part = tl.load(pointer + tile.to(tl.int64) * length + at, mask=ok & (tile < tiles), other=0.0)
        mean += tl.sum(part * count, 1)[:, None]
    return mean / total


@triton.jit
def finish_few_var(pointer, tiles, length, at, ok, width, total):
    mean = finish_few_mean(pointer, tiles, length, at, ok, width, total)
    m2 = tl.zeros(at.shape, tl.float32)
    for first in range(0, tiles, PARTIALS):
        tile = first + tl.arange(0, PARTIALS)[None, :]
        place, there = tile.to(tl.int64) * length + at, ok & (tile < tiles)
        apart = tl.load(pointer + place, mask=there, other=0.0) - mean
        deviation = tl.load(pointer + tiles.to(tl.int64) * length + place, mask=there, other=0.0)
        m2 += tl.sum(tl.where(there, deviation + apart * apart * tl.minimum(width, total - tile * width), 0.0), 1)[
            :, None
        ]
    return m2 / total


@triton.jit
def merge_lse(top1, sum1, top2, sum2):
    """Partials (max, sum of exp(x - max)) of two runs of columns as one."""
    top = max_nan(top1, top2)
    shift = finite_or_zero(top)
    return top, scaled_by_exp(sum1, top1 - shift) + scaled_by_exp(sum2, top2 - shift)


@triton.jit
def merge_moments(mean1, m21, count1, mean2, m22, count2):
    """Partials (mean, sum of squared deviations) of two runs of columns as one: Chan's formula."""
    count = count1 + count2
    apart = mean2 - mean1
    mean = mean1 + apart * (count2 / count)
    return mean, m21 + m22 + apart * apart * (count1 * count2 / count)
