"""Attention of a few queries over a long cache: split over the context, joined in a fixed order.

One block takes the queries that share a head of keys, and a part of the context. Which part of the cache there is anything to see in, it reads
off the mask: lengths, windows and paddings are all masks, and what nobody sees is not read. How the context is split depends on sizes
and on that part alone, so the same inputs give the same bits.
"""

# Triton reads annotations of device functions itself, so this file must not postpone their evaluation.
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from codetta.backends.triton_lib import INTERPRETED, let_next_start, wait_for_last
from codetta.plan.target import Target, device_target, unit_count

FEW = 16  # queries of a head, beyond which others are faster
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
QUERIES = 64  # rows of a block at most: queries that share a head of keys
STEP = 32  # positions at a time
LOOK = 2048  # positions of a mask that are looked at at once
BLOCKS = 4  # for each unit of the device, at most, that the context is split for: so many read at once
WARPS = 4
BESIDE = 4096  # bytes of shared memory for what else there is


def takes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernel can do it: a few queries, of types and sizes that it has."""
    if query.dim() != 4 or query.dtype not in DTYPES or not (query.dtype == key.dtype == value.dtype):
        return False
    if not query.numel() or not key.numel() or query.shape[1] % key.shape[1]:
        return False
    shared = query.shape[1] // key.shape[1] * query.shape[2]
    return (
        query.shape[2] <= FEW
        and shared <= QUERIES
        and max(query.shape[3], value.shape[3]) <= 256
        and (mask is None or mask.dim() == 4)
    )


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(scale·query keyᵀ + mask) value. query (B, H, t, D), key (B, G, T, D), value (B, G, T, E), H a multiple of G; mask (B, H, t, T),
    1 where it is the same for all: bool, or numbers that are added. A query that sees nothing gets zeros."""
    batch, heads, length, depth = query.shape
    groups, context, width = key.shape[1], key.shape[2], value.shape[3]
    shared = heads // groups
    rows = shared * length
    splits = _splits(batch * groups, context, query.device)
    out = query.new_empty(batch, length, heads, width).transpose(1, 2)  # as kernels return it
    parts = tops = None
    joins = splits > 1 or key.element_size() > 2  # registers for the result are short in float32
    if joins:
        parts = torch.empty((batch * groups, splits, rows, width), dtype=torch.float32, device=query.device)
        tops = torch.empty((2, batch * groups, splits, rows), dtype=torch.float32, device=query.device)
    seen = mask if mask is None else mask.expand(batch, heads, length, context)
    seen_strides = (0, 0, 0, 0) if seen is None else seen.stride()
    target = device_target(query.device)
    early = target is not None and target.starts_early
    padded = max(16, triton.next_power_of_2(rows))
    columns, wide = (max(16, triton.next_power_of_2(size)) for size in (depth, width))
    options = {"EARLY": early, "num_warps": WARPS, "num_stages": stages(padded, columns, wide, key.dtype, target)}
    options |= {"launch_pdl": True} if early else {}
    split_kernel[batch * groups, splits](
        query, key, value, seen, parts, tops, out, *query.stride(), *key.stride(), *value.stride(), *seen_strides, *out.stride(),
        scale * math.log2(math.e), groups, shared, length, context, splits,
        KIND=0 if seen is None else 1 if seen.dtype == torch.bool else 2, ROWS=padded, D=depth, COLUMNS=columns, E=width, WIDE=wide,
        STEP=STEP, LOOK=min(LOOK, triton.next_power_of_2(max(context, 16))), **options,
    )  # fmt: skip
    if joins:
        join_kernel[batch * groups, rows](
            parts, tops, out, *out.stride(), groups, shared, length, splits, SPLITS=triton.next_power_of_2(splits), E=width, WIDE=wide,
            **options,
        )  # fmt: skip
    return out


def stages(rows: int, depth: int, width: int, dtype: torch.dtype, target: Target | None) -> int:
    """Steps of the cache that are under way: three where two of them fit into shared memory, beside queries and weights."""
    room = (2 * STEP * (depth + width) + rows * (depth + STEP)) * dtype.itemsize + BESIDE
    return 3 if target is None or room <= target.shared else 2


def _splits(pairs: int, context: int, device: torch.device) -> int:
    """Into how many parts the context is split, so that every unit of the device has something to read."""
    wanted = BLOCKS * unit_count(device) // pairs if device.type == "cuda" else 3
    return max(1, min(wanted, -(-context // STEP)))


@triton.jit
def split_kernel(
    query, key, value, mask, parts, tops, out, qb, qh, qt, qd, kb, kh, kt, kd, vb, vh, vt, vd, mb, mh, mt, mc, ob, oh, ot, oe, scale, groups,
    shared, length, context, splits, KIND: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, COLUMNS: tl.constexpr, E: tl.constexpr,
    WIDE: tl.constexpr, STEP: tl.constexpr, LOOK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One part of the context: the sum of exponentials, the largest score, and values weighted by them. Without parts, all of it."""
    if EARLY:
        let_next_start()
        wait_for_last()
    pair, split = tl.program_id(0), tl.program_id(1)
    sample, group = (pair // groups).to(tl.int64), (pair % groups).to(tl.int64)
    rows = shared * length
    row = tl.arange(0, ROWS)
    head, time = group * shared + row // length, row % length
    row_ok = row < rows
    column, wide = tl.arange(0, COLUMNS), tl.arange(0, WIDE)
    first, last = 0, context
    if KIND != 0:
        mask += sample * mb
        # Where heads see the same, one stands for all.
        looks = length if mh == 0 else rows
        first, last, all_seen = extent(
            mask + group * shared * mh,
            looks,
            length,
            mh,
            mt,
            mc,
            context,
            KIND,
            LOOK,
            key.dtype.element_ty != tl.float32,
        )
    # Whole steps, counted from the first position that is seen.
    count = tl.cdiv(tl.cdiv(last - first, STEP), splits) * STEP
    begin = first + split * count
    end = tl.minimum(begin + count, last)
    q = tl.load(
        query + sample * qb + (head * qh + time * qt)[:, None] + column[None, :] * qd,
        mask=row_ok[:, None] & (column[None, :] < D), other=0.0,
    )  # fmt: skip
    key += sample * kb + group * kh
    value += sample * vb + group * vh
    if KIND != 0:
        mask += (head * mh + time * mt)[:, None]
    # What everybody sees needs no second look at the mask, which no copy runs ahead of. Two loops of float32 would be short of registers.
    if KIND == 0 or q.dtype == tl.float32:
        top, total, acc = mixed_part(
            q, key, value, mask, row_ok, begin, end, kt, kd, vt, vd, mc, scale, KIND, D, E, WIDE, STEP
        )
    elif all_seen:
        top, total, acc = mixed_part(
            q, key, value, mask, row_ok, begin, end, kt, kd, vt, vd, mc, scale, 0, D, E, WIDE, STEP
        )
    else:
        top, total, acc = mixed_part(
            q, key, value, mask, row_ok, begin, end, kt, kd, vt, vd, mc, scale, KIND, D, E, WIDE, STEP
        )
    there = row_ok[:, None] & (wide[None, :] < E)
    if parts is None:
        mixed = acc / tl.where(total == 0, 1.0, total)[:, None]
        to = out + sample * ob + (head * oh + time * ot)[:, None] + wide[None, :] * oe
        tl.store(to, mixed.to(out.dtype.element_ty), mask=there)
    else:
        place = pair.to(tl.int64) * splits + split
        tl.store(parts + (place * rows + row)[:, None] * E + wide[None, :], acc, mask=there)
        tl.store(tops + place * rows + row, top, mask=row_ok)
        pairs = tl.num_programs(0).to(tl.int64)
        tl.store(tops + (pairs * splits + place) * rows + row, total, mask=row_ok)


@triton.jit
def mixed_part(
    q, key, value, mask, row_ok, begin, end, kt, kd, vt, vd, mc, scale, KIND: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    WIDE: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Of each row its largest score, the sum of exponentials, and the values weighted by them."""
    ROWS: tl.constexpr = q.shape[0]
    column, wide = tl.arange(0, q.shape[1]), tl.arange(0, WIDE)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, WIDE), tl.float32)
    # Within a step 32 bits are enough; in 64 they would take the registers that three stages need.
    near = tl.arange(0, STEP)
    keys = near[None, :] * kt + column[:, None] * kd
    values = near[:, None] * vt + wide[None, :] * vd
    for at in range(begin, end, STEP):
        here = at + near < end
        far = tl.cast(at, tl.int64)
        k = tl.load(key + far * kt + keys, mask=here[None, :] & (column[:, None] < D), other=0.0)
        v = tl.load(value + far * vt + values, mask=here[:, None] & (wide[None, :] < E), other=0.0)
        scores = dot(q, k) * scale
        ok = here[None, :] & row_ok[:, None]
        if KIND == 1:
            ok = ok & (tl.load(mask + far * mc + near[None, :] * mc, mask=ok, other=0) != 0)
        if KIND == 2:
            added = tl.load(mask + far * mc + near[None, :] * mc, mask=ok, other=0.0).to(tl.float32)
            # What stands for "not at all" as a finite number stays one: whoever sees nothing else sees all alike.
            scores += tl.where(added == float("-inf"), added, tl.maximum(added * 1.4426950408889634, -3e38))
        scores = tl.where(ok, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        # Where nothing was seen yet, there is nothing to take away.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(scores - base[:, None])
        keep = tl.exp2(top - base)
        total = total * keep + tl.sum(weight, 1)
        acc = acc * keep[:, None] + dot(weight.to(v.dtype), v)
        top = higher
    return top, total, acc


@triton.jit
def extent(mask, rows, length, mh, mt, mc, context, KIND: tl.constexpr, LOOK: tl.constexpr, AT_ONCE: tl.constexpr):
    """From the first to behind the last position that some row sees, and whether all rows see all of them, as they are."""
    # One number for each lane, so that looks follow each other without waiting; or one for all, where registers are short.
    KEPT: tl.constexpr = LOOK if AT_ONCE else 1
    firsts = tl.full((KEPT,), 0, tl.int32) + context
    lasts = tl.zeros((KEPT,), tl.int32)
    plain = tl.zeros((KEPT,), tl.int32)
    for row in range(0, rows):
        for at in range(0, context, LOOK):
            place = at + tl.arange(0, LOOK)
            there = place < context
            seen = tl.load(mask + row // length * mh + row % length * mt + place.to(tl.int64) * mc, mask=there, other=0)
            ok = there & ((seen != 0) if KIND == 1 else (seen != float("-inf")))
            low, high = tl.where(ok, place, context), tl.where(ok, place + 1, 0)
            count = (there & ((seen != 0) if KIND == 1 else (seen == 0))).to(tl.int32)
            if not AT_ONCE:
                low, high, count = tl.min(low, 0)[None], tl.max(high, 0)[None], tl.sum(count, 0)[None]
            firsts = tl.minimum(firsts, low)
            lasts = tl.maximum(lasts, high)
            plain += count
    first = tl.min(firsts, 0)
    last = tl.maximum(first, tl.max(lasts, 0))
    return first, last, tl.sum(plain, 0) == rows * (last - first)


@triton.jit
def dot(x, y):
    """In full precision where it is float32. The interpreter's products of bf16 are wrong."""
    if INTERPRETED or x.dtype == tl.float32:
        return tl.dot(x.to(tl.float32), y.to(tl.float32), input_precision="ieee")
    return tl.dot(x, y)


@triton.jit
def join_kernel(
    parts, tops, out, ob, oh, ot, oe, groups, shared, length, splits, SPLITS: tl.constexpr, E: tl.constexpr, WIDE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The parts of one row, all at once: their order is that of the context."""
    if EARLY:
        let_next_start()
        wait_for_last()
    pair, row = tl.program_id(0), tl.program_id(1)
    sample, group = (pair // groups).to(tl.int64), (pair % groups).to(tl.int64)
    rows = shared * length
    part, wide = tl.arange(0, SPLITS), tl.arange(0, WIDE)
    place = (pair.to(tl.int64) * splits + part) * rows + row
    there = part < splits
    top = tl.load(tops + place, mask=there, other=float("-inf"))
    total = tl.load(tops + tl.num_programs(0).to(tl.int64) * splits * rows + place, mask=there, other=0.0)
    highest = tl.max(top, 0)
    weight = tl.exp2(top - tl.where(highest == float("-inf"), 0.0, highest))
    value = tl.load(parts + place[:, None] * E + wide[None, :], mask=there[:, None] & (wide[None, :] < E), other=0.0)
    number = tl.sum(weight * total, 0)
    mixed = tl.sum(weight[:, None] * value, 0) / tl.where(number == 0, 1.0, number)
    head, time = group * shared + row // length, row % length
    tl.store(out + sample * ob + head * oh + time * ot + wide * oe, mixed.to(out.dtype.element_ty), mask=wide < E)
