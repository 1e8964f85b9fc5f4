"""The reference defines what a program means; here it is held against PyTorch written by hand, in float64.

First each primitive alone, then compositions: random epilogues against an evaluator that shares no code with the tracer, the
canonicalisation or the reference (`eager.py`), and the reference's fp32 against its own float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from case import Case
from generate import FEATURES, cases
from hypothesis import HealthCheck, given, settings
from torch import Tensor

import codetta as ct
from codetta.ir.op import philox, round_to
from codetta.stat import Stat

M, N, K = 7, 12, 5
GENERATOR = torch.Generator().manual_seed(1)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


A, W, W2 = draw(M, K), draw(N, K), draw(N, K)
Z, Z2 = A @ W.T, A @ W2.T


def run(fn: Callable[..., Any], *, a: Tensor = A, w: Any = W, out: Any = None, **operands: Any) -> Any:
    return ct.epilogue(fn)(a, w, out=out, backend="reference", **operands)


def same(got: Any, wanted: Any) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


ELEMENTWISE: dict[str, tuple[Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
    "product": (lambda z: z, lambda z: z),
    "arithmetic": (lambda z: 2.0 * z - z / 3.0 + (1.0 - z) * z, lambda z: 2 * z - z / 3 + (1 - z) * z),
    "divide a number": (lambda z: 1.0 / (3.0 + z * z), lambda z: 1 / (3 + z * z)),
    "negate": (lambda z: -abs(z), lambda z: -z.abs()),
    "powers": (lambda z: z**2 + z**3 - z**5 + z**8, lambda z: z**2 + z**3 - z**5 + z**8),
    "roots": (lambda z: abs(z) ** 0.5 + (1 + z * z) ** -0.5, lambda z: z.abs().sqrt() + (1 + z * z).rsqrt()),
    "relu": (ct.relu, F.relu),
    "squared relu": (ct.squared_relu, lambda z: F.relu(z) ** 2),
    "gelu": (ct.gelu, F.gelu),
    "gelu tanh": (lambda z: ct.gelu(z, approximate="tanh"), lambda z: F.gelu(z, approximate="tanh")),
    "silu": (ct.silu, F.silu),
    "sigmoid": (ct.sigmoid, torch.sigmoid),
    "tanh": (ct.tanh, torch.tanh),
    "softcap": (lambda z: ct.softcap(z, 0.7), lambda z: 0.7 * torch.tanh(z / 0.7)),
    "exp and log": (lambda z: ct.log(1.0 + ct.exp(z)), F.softplus),
    "sqrt and rsqrt": (lambda z: ct.sqrt(z * z) * ct.rsqrt(z * z + 1), lambda z: z.abs() / (z * z + 1).sqrt()),
    "erf": (ct.erf, torch.erf),
    "erfc": (ct.erfc, torch.special.erfc),
    "round and floor": (lambda z: ct.round(z * 8) + ct.floor(z), lambda z: (z * 8).round() + z.floor()),
    "clamp": (lambda z: ct.clamp(z, -0.5, 0.25), lambda z: z.clamp(-0.5, 0.25)),
    "minimum and maximum": (lambda z: ct.minimum(z, 0.3) + ct.maximum(z, z * 2), lambda z: z.clamp(max=0.3) + torch.maximum(z, 2 * z)),
    "where": (lambda z: ct.where((z > 0) & ~(z >= 1) | (z < -1), z, 7.0), lambda z: torch.where((z > 0) & (z < 1) | (z < -1), z, 7.0)),
    "equality": (lambda z: ct.where(ct.round(z) == 0, 1.0, z) * ct.where(ct.round(z) != 1, 1.0, 2.0),
                 lambda z: torch.where(z.round() == 0, 1, z) * torch.where(z.round() != 1, 1.0, 2.0)),
    "truth as a number": (lambda z: (z > 0) + (z > 1) - 2 * (z < -1), lambda z: (z > 0).double() + (z > 1).double() - 2 * (z < -1).double()),
    "cast": (lambda z: ct.cast(z, torch.bfloat16) + 1, lambda z: z.bfloat16().double() + 1),
    "cast to int8 saturates": (lambda z: ct.cast(z * 100, torch.int8) + 0.0, lambda z: (z * 100).round().clamp(-127, 127)),
    "cast to fp8 saturates": (lambda z: ct.cast(z * 300, torch.float8_e4m3fn) + 0.0,
                              lambda z: (z * 300).clamp(-448, 448).to(torch.float8_e4m3fn).double()),
    "row and column numbers": (lambda z: z * ct.row_index() + ct.col_index(N) / 3, lambda z: z * torch.arange(M)[:, None] + torch.arange(N) / 3.0),
    "causal": (lambda z: ct.where(ct.row_index() >= ct.col_index(N), z, 0.0), lambda z: z.tril()),
    "spelled in torch": (lambda z: torch.tanh(z) * torch.sigmoid(z) + torch.clamp(z, -1, 1), lambda z: z.tanh() * z.sigmoid() + z.clamp(-1, 1)),
    "functional": (lambda z: F.silu(z) + F.gelu(z), lambda z: F.silu(z) + F.gelu(z)),
}  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name: str) -> None:
    ours, theirs = ELEMENTWISE[name]
    if name == "row and column numbers":
        # Whole numbers divide as float64 here, whatever PyTorch's default is.
        same(run(lambda acc: ours(acc)), Z * torch.arange(M)[:, None] + torch.arange(N, dtype=torch.float64) / 3)
        return
    same(run(lambda acc: ours(acc)), theirs(Z))


def test_nan_and_infinity_go_through() -> None:
    a = A.clone()
    a[0, 0], a[1, 0] = math.nan, math.inf
    z = a @ W.T
    y, top = run(lambda acc: {"y": ct.maximum(acc, 0.0), "top": ct.row_max(acc)}, a=a)
    torch.testing.assert_close(y, torch.maximum(z, torch.zeros(())), equal_nan=True)
    torch.testing.assert_close(top, z.amax(1), equal_nan=True)


# ---- operands ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.float8_e4m3fn]
)
def test_operand_dtypes(dtype: torch.dtype) -> None:
    def fn(acc, x: ct.Tile):
        return acc + x

    x = (draw(M, N).abs() * 9).to(dtype)
    same(run(fn, x=x), Z + x.double())


def test_scalar_number_and_tensor() -> None:
    def fn(acc, c: ct.Scalar, d: ct.Scalar):
        return acc * c + d

    d = draw(1)
    same(run(fn, c=2.5, d=d), Z * 2.5 + d)


def test_row_and_col() -> None:
    def fn(acc, b: ct.Row, s: ct.Col, n: ct.Col):
        return (acc + b) * s - n

    b, s, n = draw(N), draw(M), torch.arange(M)
    same(run(fn, b=b, s=s, n=n), (Z + b) * s[:, None] - n[:, None])


def test_kinds_from_shapes() -> None:
    def fn(acc, b, s, x, c, t):
        return (acc + b) * s + x * c * t

    b, s, x, c, t = draw(N), draw(M), draw(M, N), draw(1), draw(M, 4)
    same(run(fn, b=b, s=s, x=x, c=c, t=t), (Z + b) * s[:, None] + x * c * t.repeat(1, 3))


def test_sample_row() -> None:
    def fn(acc, g: ct.SampleRow):
        return acc * g

    a, g = draw(3, 4, K), draw(3, N)
    same(run(fn, a=a, g=g), (a @ W.T) * g[:, None])


@pytest.mark.parametrize("layout", ["bthd", "bhtd", "bhdt"])
def test_tile_by_heads_in_and_out(layout: str) -> None:
    def fn(acc, x):
        return ct.store(acc + x, layout=layout, head=4)

    fn.__annotations__ = {"x": ct.Tile(layout)}
    a, x = draw(2, M, K), draw(2, M, 3, 4)
    wanted = (a @ W.T).view(2, M, 3, 4) + x
    same(run(fn, a=a, x=torch.einsum(f"bthd->{layout}", x)), torch.einsum(f"bthd->{layout}", wanted))


def test_tables() -> None:
    def fn(acc, each: ct.Table, again: ct.Table("repeat"), looked: ct.Table("at"), at: ct.Col):
        return acc * each + again * looked

    a = draw(2, M, K)
    each, again, looked, at = draw(2, M, 4), draw(M, 3), draw(9, 6), torch.randint(0, 9, (2, M))
    wanted = (a @ W.T) * each.repeat(1, 1, 3) + again.repeat(1, 4) * looked[at].repeat(1, 1, 2)
    same(run(fn, a=a, each=each, again=again, looked=looked, at=at), wanted)


def test_group_operand_dequantises() -> None:
    def fn(acc, q: ct.Tile, s: ct.Group(2, 4)):
        return acc + q * ct.spread(s, 4, rows=2)

    q, s = torch.randint(-127, 128, (M, N), dtype=torch.int8), draw(4, 3)
    same(run(fn, q=q, s=s), Z + q * s.repeat_interleave(2, 0)[:M].repeat_interleave(4, 1))


# ---- columns -----------------------------------------------------------------------------------------------------


def rotate(z: Any, cos: Any, sin: Any, split: Callable[[Any], Any], block: int | None) -> Any:
    first, second = split(z)
    return ct.join(first * cos - second * sin, second * cos + first * sin, block=block)


def test_rotate_half_and_interleaved() -> None:
    def half(acc, cos: ct.Table, sin: ct.Table):
        return rotate(acc, cos, sin, lambda z: ct.halves(z, block=4), 4)

    def interleaved(acc, cos: ct.Table, sin: ct.Table):
        return rotate(acc, cos, sin, ct.pairs, 2)

    cos, sin = draw(M, 2), draw(M, 2)
    z, full = Z.view(M, 3, 4), lambda t: torch.cat([t, t], 1)[:, None]
    turned = torch.cat([-z[..., 2:], z[..., :2]], -1)
    same(run(half, cos=cos, sin=sin), (z * full(cos) + turned * full(sin)).view(M, N))
    x, y = Z[:, 0::2].view(M, 3, 2), Z[:, 1::2].view(M, 3, 2)
    cos, sin = cos[:, None], sin[:, None]
    wanted = torch.stack([x * cos - y * sin, y * cos + x * sin], -1).view(M, N)
    same(run(interleaved, cos=cos[:, 0], sin=sin[:, 0]), wanted)


@pytest.mark.parametrize("half", [6, 32, 128, 150, 300])
def test_gate_and_up_halves(half: int) -> None:
    """Below and above what a tile holds, a power of two or not: the same meaning."""
    w, bias, x = draw(2 * half, K), draw(2 * half), draw(M, half)

    def fn(acc, bias: ct.Row, x: ct.Tile):
        gate, up = ct.halves(acc + bias)
        y = ct.silu(gate) * up
        return {
            "y": y,
            "z": acc + bias,
            "r": y + x,
            "s": ct.row_sum(y),
            "all": ct.row_moments(acc),
            "c": ct.col_sum(acc),
            "m": ct.col_max(y),
        }

    z = A @ w.T + bias
    y, got_z, r, s, (mean, var), c, m = run(fn, w=w, bias=bias, x=x)
    wanted = F.silu(z[:, :half]) * z[:, half:]
    same(y, wanted)
    same(got_z, z)
    same(r, wanted + x)
    same(s, wanted.sum(1))
    same(mean, (z - bias).mean(1))
    same(var, (z - bias).var(1, correction=0))
    same(c, (z - bias).sum(0))
    same(m, wanted.amax(0))


@pytest.mark.parametrize("head", [4, 5, 64, 100])
def test_interleaved_q_k_v_per_head(head: int) -> None:
    """[q k v] of head 0, then of head 1: strips of count 3, with rotation and statistics within them."""
    heads, a = 2, draw(2, M, K)
    w = draw(heads * 3 * head, K)

    def fn(acc, g: ct.Row):
        q, k, v = ct.parts(acc * g, 3, block=3 * head)
        scale = ct.rsqrt(ct.group_sum(q * q, head) / head + 1e-6) if head in (4, 64) else 1.0
        q = q * (ct.spread(scale, head) if head in (4, 64) else scale)
        return {"q": ct.store(q, layout="bhtd", head=head), "k": k, "v": v, "back": ct.join(v, q, k, block=3 * head)}

    g = draw(heads * 3 * head)
    q, k, v = ((a @ w.T) * g).view(2, M, heads, 3, head).unbind(3)
    if head in (4, 64):
        q = q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6)
    got_q, got_k, got_v, back = run(fn, a=a, w=w, g=g)
    same(got_q, q.transpose(1, 2))
    same(got_k, k.flatten(2))
    same(got_v, v.flatten(2))
    same(back, torch.stack([v, q, k], 3).flatten(2))


def test_parts_within_strips() -> None:
    """Rotation within each of the wide halves: narrow parts of strips."""
    w = draw(2 * 48, K)

    def fn(acc, cos: ct.Table, sin: ct.Table):
        q, k = ct.halves(acc)
        return {
            "q": rotate(q, cos, sin, lambda z: ct.halves(z, block=16), 16),
            "k": ct.join(*ct.pairs(k)[::-1], block=2),
        }

    cos, sin, z = draw(M, 8), draw(M, 8), A @ w.T
    q, k = run(fn, w=w, cos=cos, sin=sin)
    zq = z[:, :48].view(M, 3, 16)
    turned = torch.cat([-zq[..., 8:], zq[..., :8]], -1)
    same(q, (zq * cos.repeat(1, 2)[:, None] + turned * sin.repeat(1, 2)[:, None]).view(M, 48))
    same(k, z[:, 48:].view(M, 24, 2).flip(-1).view(M, 48))


def test_several_products() -> None:
    y, z = run(lambda gate, up: {"y": ct.silu(gate) * up, "z": up + 1}, w=[W, W2])
    same(y, F.silu(Z) * Z2)
    same(z, Z2 + 1)
    q, k = run(lambda q, k: {"q": q * 2, "k": k}, w=[W, W2[:5]])
    same(q, Z * 2)
    same(k, Z2[:, :5])


def test_groups() -> None:
    y, peak, total = run(
        lambda acc: {"y": acc / ct.spread(ct.group_max(abs(acc), 4), 4), "peak": ct.group_max(acc, 3, rows=2), "total": ct.group_sum(acc, 12, rows=4)}
    )  # fmt: skip
    same(y, (Z.view(M, 3, 4) / Z.view(M, 3, 4).abs().amax(-1, keepdim=True)).view(M, N))
    padded = torch.cat([Z, Z.new_full((1, N), -math.inf)])
    same(peak, padded.view(4, 2, 4, 3).amax((1, 3)))
    same(total, torch.stack([Z[:4].sum(), Z[4:].sum()])[:, None])


# ---- products ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("a_transposed", [False, True])
@pytest.mark.parametrize("w_transposed", [False, True])
def test_layouts_of_a_and_w(a_transposed: bool, w_transposed: bool) -> None:
    a = A.T.contiguous().T if a_transposed else A
    w = W.T.contiguous().T if w_transposed else W
    program = ct.epilogue(lambda acc: acc).program(a, w)
    assert program.a_layout == ("km" if a_transposed else "mk")
    assert program.products[0].layout == ("kn" if w_transposed else "nk")
    same(run(lambda acc: acc, a=a, w=w), Z)


def test_batched() -> None:
    a, w = draw(3, M, K), draw(3, N, K)
    y, row, col = run(lambda acc: {"y": acc, "row": ct.row_sum(acc), "col": ct.col_max(acc)}, a=a, w=w)
    z = torch.bmm(a, w.transpose(1, 2))
    same(y, z)
    same(row, z.sum(2))
    same(col, z.amax(1))


# ---- stores ------------------------------------------------------------------------------------------------------


def test_store_dtypes() -> None:
    stores = {"f": torch.float32, "b": torch.bfloat16, "h": torch.float16, "i": torch.int8, "e": torch.float8_e4m3fn}
    results = run(lambda acc: {name: ct.store(acc * 50, dtype=dtype) for name, dtype in stores.items()})
    for got, dtype in zip(results, stores.values(), strict=True):
        assert got.dtype == dtype
        assert torch.equal(got.double(), round_to(Z * 50, dtype))


def test_accumulate() -> None:
    out = draw(M, N)
    wanted = out + Z
    result = run(lambda acc: {"y": ct.store(acc, dtype=torch.float64, accumulate=True)}, out={"y": out})
    assert result.data_ptr() == out.data_ptr()
    same(out, wanted)


def test_cache_append() -> None:
    def fn(acc, slot: ct.Col):
        return {"cache": ct.store(acc, dtype=torch.float64, layout="bhtd", head=4, rows=slot)}

    a, cache = draw(2, 3, K), draw(2, 3, 9, 4)
    slot = torch.tensor([[4, 0, -1], [8, -1, 7]])
    wanted = cache.clone()
    z = (a @ W.T).view(2, 3, 3, 4)
    for sample, row in ((0, 0), (0, 1), (1, 0), (1, 2)):
        wanted[sample, :, slot[sample, row]] = z[sample, row]
    run(fn, a=a, slot=slot, out={"cache": cache})
    same(cache, wanted)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("rows", [1, 4])
def test_quantize(dtype: torch.dtype, rows: int) -> None:
    def fn(acc):
        q, scale = ct.quantize(acc, dtype, cols=4, rows=rows)
        return {"q": q, "scale": ct.store(scale, dtype=torch.float64)}

    q, scale = run(fn)
    assert q.dtype == dtype
    wide = scale.repeat_interleave(rows, 0)[:M].repeat_interleave(4, 1)
    step = wide if dtype == torch.int8 else wide * 32  # fp8's step below 448
    assert ((q.double() * wide - Z).abs() <= 0.5001 * step).all()
    limit = {torch.int8: 127, torch.float8_e4m3fn: 448}[dtype]
    assert q.double().abs().max() == limit, "the largest element of a group uses the whole range"


# ---- reductions --------------------------------------------------------------------------------------------------


def test_row_and_column_reductions() -> None:
    names = {
        "row_sum": Z.sum(1),
        "row_max": Z.amax(1),
        "row_lse": Z.logsumexp(1),
        "col_sum": Z.sum(0),
        "col_max": Z.amax(0),
    }
    for name, wanted in names.items():
        same(run(lambda acc, name=name: getattr(ct, name)(acc)), wanted)
    mean, var = run(lambda acc: ct.row_moments(acc))
    same(mean, Z.mean(1))
    same(var, Z.var(1, correction=0))
    same(run(lambda acc: ct.row_sum(acc * acc)), Z.square().sum(1))
    same(run(lambda acc: ct.row_max(abs(acc))), Z.abs().amax(1))


def test_cross_entropy() -> None:
    def fn(acc, target: ct.Col):
        return {"lse": ct.row_lse(acc), "picked": ct.pick(acc, target)}

    target = torch.randint(0, N, (M,))
    lse, picked = run(fn, target=target)
    same(lse - picked, F.cross_entropy(Z, target, reduction="none"))
    _, picked = run(fn, target=torch.full((M,), -100))
    same(picked, torch.zeros(M, dtype=torch.float64))


def test_lse_of_masked_rows() -> None:
    def fn(acc, mask: ct.Tile):
        return ct.row_lse(acc + mask)

    mask = torch.zeros(M, N, dtype=torch.float64)
    mask[0], mask[1, 1:] = -math.inf, -math.inf
    same(run(fn, mask=mask), (Z + mask).logsumexp(1))


def split_stat(value: Tensor, how: str, width: int) -> Stat:
    """The Stat that tiles of `width` columns leave: each tile's reduction by the textbook."""
    tiles = value.split(width, 1)
    match how:
        case "sum":
            fields = [torch.stack([t.sum(1) for t in tiles])]
        case "max":
            fields = [torch.stack([t.amax(1) for t in tiles])]
        case "lse":
            tops = [t.amax(1) for t in tiles]
            shifts = [torch.where(top.isfinite(), top, 0.0) for top in tops]
            fields = [
                torch.stack(tops),
                torch.stack([(t - s[:, None]).exp().sum(1) for t, s in zip(tiles, shifts, strict=True)]),
            ]
        case _:
            fields = [
                torch.stack([t.mean(1) for t in tiles]),
                torch.stack([((t - t.mean(1, keepdim=True)) ** 2).sum(1) for t in tiles]),
            ]
    return Stat(torch.stack(fields), how, width, value.shape[1])


@pytest.mark.parametrize("width", [3, 5, 12, 40])
def test_partials_are_finished_as_they_are_loaded(width: int) -> None:
    value = draw(M, 40) + 100.0
    value[2, :width] = -math.inf  # a whole tile without a finite maximum

    def fn(acc, s: ct.Col, t: ct.Col, l: ct.Col):
        return acc + ct.tanh(s) + t * 0.01 - l

    finite = value.clone()
    finite[2, :width] = 0.0
    got = run(
        fn, s=split_stat(finite, "sum", width), t=split_stat(value, "max", width), l=split_stat(value, "lse", width)
    )
    wanted = Z + finite.sum(1).tanh()[:, None] + value.amax(1)[:, None] * 0.01 - value.logsumexp(1)[:, None]
    if width == 40:
        assert not got[2].isfinite().any()
        got, wanted = got[torch.arange(M) != 2], wanted[torch.arange(M) != 2]
    same(got, wanted)

    def norm(acc, m: ct.Col):
        return (acc - m.mean) * ct.rsqrt(m.var + 1e-5)

    moments = split_stat(finite, "moments", width)
    same(run(norm, m=moments), (Z - finite.mean(1)[:, None]) * (finite.var(1, correction=0)[:, None] + 1e-5).rsqrt())


def test_a_chain_hands_on_unfinished_statistics() -> None:
    """x + a·W, then RMSNorm of that deferred into the next product."""
    x, g, w_next = draw(M, N), draw(N), draw(6, N)

    def first(acc, x: ct.Tile, g: ct.Row):
        y = acc + x
        return {"y": y, "h": y * g, "sumsq": ct.row_sum(y * y)}

    def second(acc, sumsq: ct.Col):
        return acc * ct.rsqrt(sumsq / N + 1e-6)

    y, h, sumsq = ct.epilogue(first)(A, W, x=x, g=g, finish=False, backend="reference")
    assert isinstance(sumsq, Stat)
    got = run(second, a=h, w=w_next, sumsq=sumsq)
    same(got, F.rms_norm(Z + x, (N,), g, 1e-6) @ w_next.T)
    same(y, Z + x)


def test_moments_survive_a_large_mean() -> None:
    a = torch.cat([torch.full((M, 1), 1e6), torch.randn(M, K)], 1)
    w = torch.cat([torch.ones(N, 1), torch.randn(N, K)], 1)
    _, var = run(lambda acc: ct.row_moments(acc), a=a, w=w)
    wanted = (a.double() @ w.double().T).var(1, correction=0)
    assert ((var - wanted).abs() / wanted).max() < 0.1, "E[x²] - mean² would have no digit left"


# ---- dropout -----------------------------------------------------------------------------------------------------


def philox_by_hand(key: int, row: int, col: int) -> float:
    """Philox 2x32, 7 rounds, in Python's whole numbers (Salmon et al., 2011)."""
    mask = 0xFFFFFFFF
    low, high = col, row
    for _ in range(7):
        product = low * 0xD256D193
        low, high = (product >> 32) ^ key ^ high, product & mask
        key = (key + 0x9E3779B9) & mask
    return (low >> 8) * 2.0**-24


def test_generator_is_philox() -> None:
    for key, row, col in [(0, 0, 0), (1, 2, 3), (0xFFFFFFFF, 123456, 99999), (0x12345678, 2**31, 5), (7, 0, 2**32 - 1)]:
        got = philox(torch.tensor(key), torch.tensor(row), torch.tensor(col)).item()
        assert got == philox_by_hand(key, row, col)


def test_dropout() -> None:
    def fn(acc, seed: ct.Scalar):
        return {"y": ct.dropout(acc, 0.25, seed), "z": ct.dropout(acc * 2, 0.25, seed), "w": ct.dropout(acc, 0.0, seed)}

    seed = torch.tensor(2**40 + 17)
    y, z, whole = run(fn, seed=seed)
    keep = torch.tensor([[philox_by_hand(17, row, col) >= 0.25 for col in range(N)] for row in range(M)])
    same(y, torch.where(keep, Z / 0.75, 0.0))
    same(z, 2 * y)
    same(whole, Z)


def test_dropout_rate() -> None:
    uniform = philox(torch.tensor(3), torch.arange(400)[:, None], torch.arange(500)[None])
    for p in (0.1, 0.5, 0.9):
        assert abs((uniform < p).double().mean().item() - p) < 4 * math.sqrt(p * (1 - p) / 200_000)


def test_dropout_of_strips_is_dropout_of_the_whole() -> None:
    def fn(acc, seed: ct.Scalar):
        z = ct.dropout(acc, 0.5, seed)
        return {"first": ct.halves(z)[0], "z": z}

    first, z = run(fn, seed=torch.tensor(5))
    same(first, z[:, : N // 2])


# ---- programs ----------------------------------------------------------------------------------------------------


def test_equal_epilogues_are_equal_programs() -> None:
    def fn(acc, b: ct.Row):
        return ct.relu(acc + b)

    def other(acc, b: ct.Row):
        return ct.maximum(acc + b, 0.0)

    b = draw(N)
    assert ct.epilogue(fn).program(A, W, b=b) == ct.epilogue(other).program(A[:3], W, b=b)
    assert ct.epilogue(fn).program(A, W, b=b).key != ct.epilogue(fn).program(A, W, b=b.float()).key


def test_minus_zero_is_a_constant_of_its_own() -> None:
    keep = run(lambda acc: ct.where(acc == acc, -0.0, acc))
    assert torch.signbit(keep).all()
    assert not torch.signbit(run(lambda acc: ct.where(acc == acc, 0.0, acc))).any()


def test_unused_operands_are_not_read() -> None:
    def fn(acc, b: ct.Row, unused: ct.Tile):
        return acc + b

    program = ct.epilogue(fn).program(A, W, b=draw(N), unused=draw(M, N))
    assert [operand.name for operand in program.operands] == ["b"]


# ---- compositions ------------------------------------------------------------------------------------------------

random_cases = settings(
    max_examples=250, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)  # fmt: skip


@random_cases
@given(cases())
def test_random_epilogues_mean_what_they_say(case: Case) -> None:
    """Tracing, canonicalisation and the reference against the independent evaluator, in float64."""
    case.check_meaning()


@random_cases
@given(cases())
def test_random_epilogues_in_fp32(case: Case) -> None:
    assert case.check("reference", bits=True)


@settings(random_cases, max_examples=40)
@given(cases(FEATURES - {"half", "adversarial", "wide"}))
def test_the_vocabulary_can_be_reduced(case: Case) -> None:
    assert case.dtype == torch.float32
    assert case.values == "plain"
    program, _ = case.bind()
    assert not any(strip.frame for segment in program.segments for strip in segment.strips)
