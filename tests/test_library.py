"""The named epilogues against plain PyTorch in float64, and the backward ones against torch.autograd.

Whole blocks are chained from programs, forward and backward, because a gradient law is only as good as its place in the
chain. Inputs are made in float64 and rounded to the backend's dtype; the truth is computed in float64 from the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from codetta import ArgumentError, Epilogue, Stat, TraceError, library
from codetta.fused import fused_gemm_epilogue
from codetta.library import ACTIVATIONS, GATED

# Other backends run the same tests in float32, with a tolerance relative to the largest element.
BACKENDS = ["reference", "cpu"]
EPS = 0.25  # large, so that a forgotten eps shows
ROWS = [1, 7, 61]


class Lab:
    """Makes inputs, calls epilogues on one backend and compares."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.dtype = torch.float64 if backend == "reference" else torch.float32
        self.tolerance = 1e-10 if backend == "reference" else 1e-4
        self.generator = torch.Generator().manual_seed(20)

    def rand(self, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        values = torch.randn(*shape, generator=self.generator, dtype=torch.float64) * scale + mean
        return values.to(self.dtype)

    def ints(self, high: int, *shape: int) -> Tensor:
        return torch.randint(0, high, shape, generator=self.generator)

    def call(self, epilogue: Epilogue, a: Tensor, w: Any, **operands: Any) -> Any:
        return epilogue(a, w, backend=self.backend, **operands)

    def close(self, ours: Tensor, truth: Tensor, what: str = "") -> None:
        assert ours.shape == truth.shape, f"{what}: {tuple(ours.shape)} against {tuple(truth.shape)}"
        scale = max(1.0, float(truth[truth.isfinite()].abs().max())) if truth.isfinite().any() else 1.0
        torch.testing.assert_close(
            ours.double(), truth.double(), rtol=0, atol=self.tolerance * scale, msg=lambda m: f"{what}: {m}"
        )


@pytest.fixture(params=BACKENDS)
def lab(request: pytest.FixtureRequest) -> Lab:
    return Lab(request.param)


def double(*tensors: Tensor, grad: bool = False) -> list[Tensor]:
    return [tensor.detach().double().requires_grad_(grad) for tensor in tensors]


def grad(leaf: Tensor) -> Tensor:
    assert leaf.grad is not None
    return leaf.grad


def rms(x: Tensor, g: Tensor | float = 1.0, eps: float = EPS) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * g


def rope(z: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """z (B, H, T, D), cos and sin (T, D / 2)."""
    cos, sin = cos.to(z.dtype), sin.to(z.dtype)
    if interleaved:
        pair = torch.view_as_complex(z.unflatten(-1, (-1, 2)).contiguous()) * torch.complex(cos, sin)
        return torch.view_as_real(pair).flatten(-2)
    z1, z2 = z.chunk(2, -1)
    return z * torch.cat([cos, cos], -1) + torch.cat([-z2, z1], -1) * torch.cat([sin, sin], -1)


def by_heads(z: Tensor, head: int) -> Tensor:
    return z.unflatten(-1, (-1, head)).transpose(-2, -3)


def angles(rows: int, head: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    phase = torch.outer(torch.arange(rows).double(), 100.0 ** (-torch.arange(head // 2).double() / head))
    return phase.cos().to(dtype), phase.sin().to(dtype)


TORCH: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


# ---- forward: residual stream ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("biased", [False, True])
def test_residual_and_statistics(lab: Lab, rows: int, biased: bool) -> None:
    a, w, x, g = lab.rand(rows, 13), lab.rand(29, 13), lab.rand(rows, 29), lab.rand(29)
    bias = lab.rand(29) if biased else None
    y = a.double() @ w.double().T + (bias.double() if bias is not None else 0.0)
    u, sumsq = lab.call(library.output_stats, a, w, bias=bias)
    lab.close(u, y)
    lab.close(sumsq, y.square().sum(1))
    y = y + x.double()
    ours, sumsq = lab.call(library.residual_stats, a, w, x=x, bias=bias)
    lab.close(ours, y)
    lab.close(sumsq, y.square().sum(1))
    ours, h, sumsq = lab.call(library.residual_stats_scaled, a, w, x=x, g=g, bias=bias)
    lab.close(ours, y)
    lab.close(h, y * g.double())
    lab.close(sumsq, y.square().sum(1))
    ours, (mean, var) = lab.call(library.residual_moments, a, w, x=x, bias=bias)
    lab.close(ours, y)
    lab.close(mean, y.mean(1))
    lab.close(var, y.var(1, correction=0))


def test_moments_survive_a_large_mean(lab: Lab) -> None:
    a, w, x = lab.rand(7, 5), lab.rand(31, 5), lab.rand(7, 31, mean=3e3)
    _, (_, var) = lab.call(library.residual_moments, a, w, x=x)
    y = a.double() @ w.double().T + x.double()
    # By E[x²] - mean² the variance would carry an error of mean² · eps, millions of times this one.
    torch.testing.assert_close(
        var.double(), y.var(1, correction=0), rtol=1e-12 if lab.dtype == torch.float64 else 2e-3, atol=0
    )


@pytest.mark.parametrize(("samples", "rows"), [(1, 1), (3, 5)])
def test_gate_residual(lab: Lab, samples: int, rows: int) -> None:
    a, w, x = lab.rand(samples, rows, 11), lab.rand(17, 11), lab.rand(samples, rows, 17)
    gate, bias = lab.rand(samples, 17), lab.rand(17)
    a64, w64, x64, gate64, bias64 = double(a, w, x, gate, bias)
    y = x64 + gate64[:, None] * (a64 @ w64.T + bias64)
    lab.close(lab.call(library.gate_residual, a, w, x=x, gate=gate, bias=bias), y)
    ours, (mean, var) = lab.call(library.gate_residual_moments, a, w, x=x, gate=gate, bias=bias)
    lab.close(ours, y)
    lab.close(mean, y.mean(-1))
    lab.close(var, y.var(-1, correction=0))


def test_dropout_residual(lab: Lab) -> None:
    p, seed = 0.3, torch.tensor(1234)
    a, w, x, bias = lab.rand(61, 11), lab.rand(83, 11), lab.rand(61, 83), lab.rand(83)
    ours = lab.call(library.dropout_residual, a, w, x=x, seed=seed, p=p, bias=bias)
    branch, full = ours.double() - x.double(), a.double() @ w.double().T + bias.double()
    kept = branch.abs() > 1e-6
    lab.close(branch, torch.where(kept, full / (1 - p), 0.0))
    share = kept.double().mean().item()
    assert abs(share - (1 - p)) < 4 * math.sqrt(p * (1 - p) / kept.numel())
    again = lab.call(library.dropout_residual, a, w, x=x, seed=seed, p=p, bias=bias)
    other = lab.call(library.dropout_residual, a, w, x=x, seed=seed + 1, p=p, bias=bias)
    assert torch.equal(ours, again)
    assert not torch.equal(ours, other)


# ---- forward: deferred norms -------------------------------------------------------------------------------------


def statistic(
    lab: Lab, rows: int, width: int, mean: float = 0.0, op: Epilogue = library.residual_stats
) -> tuple[Tensor, Stat]:
    """An x and the unfinished row statistic of it, as a producing program leaves them."""
    a, w, residual = lab.rand(rows, 5), lab.rand(width, 5), lab.rand(rows, width, mean=mean)
    y, stat = lab.call(op, a, w, x=residual, finish=False)
    return y, stat


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("as_vector", [False, True])
def test_norm_linear(lab: Lab, rows: int, as_vector: bool) -> None:
    x, sumsq = statistic(lab, rows, 23)
    w, g, bias = lab.rand(19, 23), lab.rand(23), lab.rand(19)
    given = sumsq.finish() if as_vector else sumsq
    out = lab.call(library.norm_linear, x, w * g, sumsq=given, width=23, eps=EPS, bias=bias)
    lab.close(out, rms(x.double()) @ (w * g).double().T + bias.double())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("mean", [0.0, 100.0])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_layernorm_deferred(lab: Lab, rows: int, mean: float, activation: str | None) -> None:
    x, moments = statistic(lab, rows, 23, mean, library.residual_moments)
    w, g, b, c = lab.rand(19, 23), lab.rand(23), lab.rand(23), lab.rand(19)
    scaled = w * g
    s, t = scaled.sum(1), w @ b + c
    z = F.layer_norm(x.double(), (23,), eps=EPS) @ scaled.double().T + t.double()
    if activation is None:
        lab.close(lab.call(library.layernorm_linear, x, scaled, moments=moments, s=s, t=t, eps=EPS), z)
        return
    a, kept = lab.call(
        library.layernorm_activation, x, scaled, moments=moments, s=s, t=t, eps=EPS, activation=activation, keep=True
    )
    lab.close(a, TORCH[activation](z))
    lab.close(kept, z)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("hidden", [37, 64, 200])  # halves apart, within one tile, apart with a block over 256
@pytest.mark.parametrize("kind", ["swiglu", "geglu_none", "geglu_tanh"])
def test_gated(lab: Lab, rows: int, hidden: int, kind: str) -> None:
    x, sumsq = statistic(lab, rows, 23)
    w, bias = lab.rand(2 * hidden, 23), lab.rand(2 * hidden)
    name, _, approximate = kind.partition("_")
    phi = F.silu if name == "swiglu" else lambda z: F.gelu(z, approximate=approximate)
    options: dict[str, Any] = {"approximate": approximate} if approximate else {}
    packed = getattr(library, f"norm_{name}")
    split = getattr(library, f"norm_{name}_split")
    z = rms(x.double()) @ w.double().T
    gate, up = z.chunk(2, 1)
    norm: dict[str, Any] = {"sumsq": sumsq, "width": 23, "eps": EPS, **options}
    lab.close(lab.call(packed, x, w, **norm), phi(gate) * up)
    a, kept = lab.call(packed, x, w, bias=bias, keep=True, **norm)
    lab.close(kept, z + bias.double())
    gate_b, up_b = kept.double().chunk(2, 1)
    lab.close(a, phi(gate_b) * up_b)
    a, kept = lab.call(split, x, w.chunk(2), keep=True, **norm)
    lab.close(a, phi(gate) * up)
    lab.close(kept, z)
    # Without a norm: the plain product.
    gate, up = (x.double() @ w.double().T).chunk(2, 1)
    lab.close(lab.call(packed, x, w, **options), phi(gate) * up)
    lab.close(lab.call(split, x, w.chunk(2), **options), phi(gate) * up)


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_bias_activation(lab: Lab, activation: str) -> None:
    a, w, bias = lab.rand(7, 13), lab.rand(29, 13), lab.rand(29)
    z = a.double() @ w.double().T + bias.double()
    ours, kept = lab.call(library.bias_activation, a, w, bias=bias, activation=activation, keep=True)
    lab.close(ours, TORCH[activation](z))
    lab.close(kept, z)
    lab.close(lab.call(library.bias_activation, a, w, activation=activation), TORCH[activation](z - bias.double()))
    if activation.startswith("gelu"):
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        lab.close(lab.call(library.bias_gelu, a, w, bias=bias, approximate=approximate), TORCH[activation](z))


# ---- forward: queries, keys, values ------------------------------------------------------------------------------


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize(
    ("samples", "rows", "head", "heads", "kv_heads"), [(1, 1, 8, 2, 1), (2, 7, 8, 6, 2), (3, 5, 16, 3, 3)]
)
def test_rope(
    lab: Lab, samples: int, rows: int, head: int, heads: int, kv_heads: int, qk_norm: bool, interleaved: bool
) -> None:
    x, stat = statistic(lab, samples * rows, 23)
    x = x.view(samples, rows, 23)
    # One packed weight, called as three views of its rows.
    packed = lab.rand((heads + 2 * kv_heads) * head, 23)
    weights = packed.split([heads * head, kv_heads * head, kv_heads * head])
    cos, sin = angles(rows, head, lab.dtype)
    shared: dict[str, Any] = {
        "cos": cos,
        "sin": sin,
        "head": head,
        "sumsq": stat,
        "width": 23,
        "eps": EPS,
        "interleaved": interleaved,
    }
    n = rms(x.double())
    q, k, v = (by_heads(n @ w.double().T, head) for w in weights)
    if qk_norm:
        q_weight, k_weight = lab.rand(head), lab.rand(head)
        q, k = rms(q, q_weight.double()), rms(k, k_weight.double())
        ours = lab.call(library.norm_qk_rope, x, weights, q_weight=q_weight, k_weight=k_weight, **shared)
    else:
        ours = lab.call(library.norm_rope, x, weights, **shared)
    for name, got, truth in zip("qkv", ours, (rope(q, cos, sin, interleaved), rope(k, cos, sin, interleaved), v)):
        lab.close(got, truth, name)


def test_rope_of_heads_that_are_no_power_of_two(lab: Lab) -> None:
    x, weights = lab.rand(2, 5, 23), [lab.rand(3 * 10, 23) for _ in range(3)]
    cos, sin = angles(5, 10, lab.dtype)
    q, k, v = lab.call(library.norm_rope, x, weights, cos=cos, sin=sin, head=10)
    lab.close(q, rope(by_heads(x.double() @ weights[0].double().T, 10), cos, sin))
    lab.close(k, rope(by_heads(x.double() @ weights[1].double().T, 10), cos, sin))
    lab.close(v, by_heads(x.double() @ weights[2].double().T, 10))


def test_rope_appends_to_a_cache(lab: Lab) -> None:
    samples, head, kv_heads, capacity = 3, 8, 2, 9
    x = lab.rand(samples, 1, 23)
    weights = [lab.rand(n * head, 23) for n in (4, kv_heads, kv_heads)]
    cos, sin = angles(samples, head, lab.dtype)
    caches = {name: torch.zeros(samples, kv_heads, capacity, head, dtype=lab.dtype) for name in "kv"}
    slot = torch.tensor([4, 0, -1])  # the last sample is padding
    q, _, _ = lab.call(library.norm_rope, x, weights, cos=cos, sin=sin, head=head, slot=slot, out=caches)
    _, k, v = lab.call(library.norm_rope, x, weights, cos=cos, sin=sin, head=head)
    assert q.shape == (samples, 4, 1, head)
    for cache, new in ((caches["k"], k), (caches["v"], v)):
        truth = torch.zeros_like(cache)
        truth[0, :, 4], truth[1, :, 0] = new[0, :, 0], new[1, :, 0]
        lab.close(cache, truth)


# ---- forward: logits and quantised stores ------------------------------------------------------------------------


@pytest.mark.parametrize("deferred", [False, True])
def test_softcap_logits(lab: Lab, deferred: bool) -> None:
    x, sumsq = statistic(lab, 7, 23)
    w = lab.rand(31, 23)
    norm: dict[str, Any] = {"sumsq": sumsq, "width": 23, "eps": EPS} if deferred else {}
    z = (rms(x.double()) if deferred else x.double()) @ w.double().T
    lab.close(lab.call(library.softcap_logits, x, w, cap=3.0, **norm), 3.0 * torch.tanh(z / 3.0))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("group", [8, 32])
def test_quantize_store(lab: Lab, dtype: torch.dtype, group: int) -> None:
    a, w, bias = lab.rand(7, 13), lab.rand(64, 13), lab.rand(64)
    q, scale = lab.call(library.quantize_store, a, w, dtype=dtype, group=group, bias=bias)
    y = a.double() @ w.double().T + bias.double()
    largest = y.unflatten(1, (-1, group)).abs().amax(2)
    lab.close(scale, largest / (127.0 if dtype == torch.int8 else 448.0))
    assert q.dtype == dtype
    back = q.double().unflatten(1, (-1, group)) * scale.double()[..., None]
    # Half a step: of int8's uniform grid, of fp8's 3 bits relative to the element (and of its smallest numbers).
    step = largest / 127.0 if dtype == torch.int8 else largest / 448.0 * 2.0**-9
    relative = 0.0 if dtype == torch.int8 else 2.0**-4
    error = (back - y.unflatten(1, (-1, group))).abs()
    assert (error <= 0.5001 * step[..., None] + relative * y.unflatten(1, (-1, group)).abs()).all()


# ---- backward: pieces --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("rows", ROWS)
def test_activation_backward(lab: Lab, activation: str, rows: int) -> None:
    dy, w, z = lab.rand(rows, 11), lab.rand(17, 11), lab.rand(rows, 17, scale=2.0)
    (z64,) = double(z, grad=True)
    a = TORCH[activation](z64)
    (a * (dy.double() @ w.double().T)).sum().backward()
    dz, db, again = lab.call(library.activation_backward, dy, w, z=z, activation=activation, recompute=True)
    lab.close(dz, grad(z64))
    lab.close(db, grad(z64).sum(0))
    lab.close(again, a.detach())
    if activation.startswith("gelu"):
        approximate = "tanh" if activation == "gelu_tanh" else "none"
        dz, db = lab.call(library.gelu_backward, dy, w, z=z, approximate=approximate)
        lab.close(dz, grad(z64))
        lab.close(db, grad(z64).sum(0))


def test_gradients_at_extreme_inputs_are_finite(lab: Lab) -> None:
    z = torch.tensor([[-1e4, -60.0, -0.0, 60.0, 1e4]], dtype=lab.dtype)
    one, w = torch.ones(1, 1, dtype=lab.dtype), torch.ones(5, 1, dtype=lab.dtype)
    for name in ("silu", "gelu", "gelu_tanh", "sigmoid", "tanh", "relu"):
        (z64,) = double(z, grad=True)
        TORCH[name](z64).sum().backward()
        dz, _ = lab.call(library.activation_backward, one, w, z=z, activation=name)
        lab.close(dz, grad(z64), name)


def test_linear_backward(lab: Lab) -> None:
    dy, w, dx, g = lab.rand(7, 17), lab.rand(17, 11), lab.rand(7, 11), lab.rand(11)
    total, db = lab.call(library.linear_backward, dy, w.T, dx=dx, g=g)
    truth = dy.double() @ w.double() * g.double() + dx.double()
    lab.close(total, truth)
    lab.close(db, truth.sum(0))
    lab.close(lab.call(library.linear_backward, dy, w.T)[0], dy.double() @ w.double())


def test_weight_gradient_accumulates_in_place(lab: Lab) -> None:
    dz, x, weight, g = lab.rand(29, 17), lab.rand(29, 11), lab.rand(17, 11), lab.rand(11)
    start = lab.rand(17, 11)
    total = start.clone()
    u = dz.double().T @ x.double()
    out, dg = lab.call(
        library.weight_gradient_accumulate, dz.T, x.T, g=g, weight=weight, dtype=lab.dtype, out={"dw": total}
    )
    lab.close(total, start.double() + u * g.double())
    assert out.data_ptr() == total.data_ptr()
    lab.close(dg, (weight.double() * u).sum(0))
    lab.call(library.weight_gradient_accumulate, dz.T, x.T, dtype=lab.dtype, out={"dw": total})
    lab.close(total, start.double() + u * g.double() + u)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_backward(lab: Lab, interleaved: bool) -> None:
    """dq = dS·k, one product for each head of each sample, is turned back as it leaves."""
    batch, rows, head = 6, 7, 8
    scores, keys = lab.rand(batch, rows, rows), lab.rand(batch, rows, head)
    z, weight = lab.rand(batch, rows, head), lab.rand(head)
    cos, sin = angles(rows, head, lab.dtype)
    turn: dict[str, Any] = {"cos": cos, "sin": sin, "head": head, "interleaved": interleaved}
    dq = scores.double() @ keys.double()
    z64, weight64 = double(z, weight, grad=True)
    (rope(z64, cos, sin, interleaved) * dq).sum().backward()
    ours = lab.call(library.rope_backward, scores, keys.transpose(1, 2), **turn)
    lab.close(ours, grad(z64))
    z64.grad = None
    (rope(rms(z64, weight64), cos, sin, interleaved) * dq).sum().backward()
    dz, dweight = lab.call(library.qk_rope_backward, scores, keys.transpose(1, 2), z=z, weight=weight, eps=EPS, **turn)
    lab.close(dz, grad(z64))
    lab.close(dweight.reshape(-1, head).sum(0), grad(weight64))


# ---- whole blocks, forward and backward --------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("hidden", [37, 64])
@pytest.mark.parametrize("kind", ["swiglu", "geglu"])
def test_rmsnorm_gated_block(lab: Lab, rows: int, hidden: int, kind: str) -> None:
    """y = x + down(φ(G)·U), (G, U) = RMSNorm(x) Wᵀ + b, where x = a W0ᵀ + residual comes with its sum of squares."""
    width = 23
    a, w0, residual = lab.rand(rows, 5), lab.rand(width, 5), lab.rand(rows, width)
    g, w, bias, down = lab.rand(width), lab.rand(2 * hidden, width), lab.rand(2 * hidden), lab.rand(width, hidden)
    dy = lab.rand(rows, width)

    x64, g64, w64, bias64, down64 = double(a.double() @ w0.double().T + residual.double(), g, w, bias, down, grad=True)
    gate, up = (rms(x64, g64) @ w64.T + bias64).chunk(2, 1)
    phi = F.silu if kind == "swiglu" else lambda v: F.gelu(v, approximate="tanh")
    y64 = x64 + (phi(gate) * up) @ down64.T
    y64.backward(dy.double())

    x, sumsq = lab.call(library.residual_stats, a, w0, x=residual, finish=False)
    norm: dict[str, Any] = {"sumsq": sumsq, "width": width, "eps": EPS}
    hidden_a, z = lab.call(getattr(library, f"norm_{kind}"), x, w * g, bias=bias, keep=True, **norm)
    y, _ = lab.call(library.residual_stats, hidden_a, down, x=x)
    lab.close(y, y64.detach())

    dz, again, s, db = lab.call(
        getattr(library, f"{kind}_backward"), dy, down.T, z=z, bias=bias, recompute=True, finish=False, **norm
    )
    lab.close(again, hidden_a.double())
    lab.close(db.finish(), grad(bias64), "bias")
    dx = lab.call(library.norm_backward, dz, w.T, x=x, s=s, g=g, dx=dy, **norm)
    lab.close(dx, grad(x64), "x")
    dw, dg = lab.call(library.weight_gradient, dz.T, x.T, g=g, weight=w)
    lab.close(dw, grad(w64), "w")
    lab.close(dg, grad(g64), "g")
    lab.close(lab.call(library.weight_gradient, dy.T, again.T), grad(down64), "down")


def test_gate_and_up_as_two_weights(lab: Lab) -> None:
    """The same z and dz for both; the gradient of x is the sum of two products, made one after the other."""
    rows, width, hidden = 7, 23, 37
    x, sumsq = statistic(lab, rows, width)
    w_gate, w_up, g, down, dy = (
        lab.rand(hidden, width),
        lab.rand(hidden, width),
        lab.rand(width),
        lab.rand(width, hidden),
        lab.rand(rows, width),
    )
    x64, g64, gate64, up64 = double(x, g, w_gate, w_up, grad=True)
    n = rms(x64, g64)
    ((F.silu(n @ gate64.T) * (n @ up64.T)) @ down.double().T * dy.double()).sum().backward()
    norm: dict[str, Any] = {"sumsq": sumsq, "width": width, "eps": EPS}
    _, z = lab.call(library.norm_swiglu_split, x, (w_gate * g, w_up * g), keep=True, **norm)
    dz, s = lab.call(library.swiglu_backward, dy, down.T, z=z, finish=False, **norm)
    d_gate, d_up = dz.chunk(2, 1)
    dx = lab.call(library.norm_backward, d_gate, w_gate.T, x=x, s=s, g=g, **norm)
    dx, _ = lab.call(library.linear_backward, d_up, w_up.T, dx=dx, g=g)
    lab.close(dx, grad(x64))
    dw_gate, dg_gate = lab.call(library.weight_gradient, d_gate.T, x.T, g=g, weight=w_gate)
    dw_up, dg_up = lab.call(library.weight_gradient, d_up.T, x.T, g=g, weight=w_up)
    lab.close(dw_gate, grad(gate64))
    lab.close(dw_up, grad(up64))
    lab.close(dg_gate + dg_up, grad(g64))


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("mean", [0.0, 30.0])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "squared_relu"])
def test_layernorm_mlp_block(lab: Lab, rows: int, mean: float, activation: str) -> None:
    """y = x + down(φ(LayerNorm(x) Wᵀ + c)) + d."""
    width, hidden = 23, 37
    a, w0, residual = lab.rand(rows, 5), lab.rand(width, 5), lab.rand(rows, width, mean=mean)
    g, b, w, c = lab.rand(width), lab.rand(width), lab.rand(hidden, width), lab.rand(hidden)
    down, d, dy = lab.rand(width, hidden), lab.rand(width), lab.rand(rows, width)

    x64, g64, b64, w64, c64, down64, d64 = double(
        a.double() @ w0.double().T + residual.double(), g, b, w, c, down, d, grad=True
    )
    y64 = x64 + TORCH[activation](F.layer_norm(x64, (width,), g64, b64, EPS) @ w64.T + c64) @ down64.T + d64
    y64.backward(dy.double())

    x, moments = lab.call(library.residual_moments, a, w0, x=residual, finish=False)
    scaled = w * g
    norm: dict[str, Any] = {
        "moments": moments,
        "s": scaled.sum(1),
        "t": w @ b + c,
        "eps": EPS,
        "activation": activation,
    }
    act, z = lab.call(library.layernorm_activation, x, scaled, keep=True, **norm)
    y, _ = lab.call(library.residual_moments, act, down, x=x, bias=d)
    lab.close(y, y64.detach())

    dz, s1, s2, db, mdz = lab.call(library.layernorm_activation_backward, dy, down.T, z=z, finish=False, **norm)
    dx = lab.call(library.layernorm_backward, dz, w.T, x=x, moments=moments, s1=s1, s2=s2, eps=EPS, g=g, dx=dy)
    lab.close(dx, grad(x64), "x")
    lab.close(db.finish(), grad(c64), "c")
    # The column sums of one program are per-row operands of the next, unfinished.
    dw, dg, d_b = lab.call(library.layernorm_weight_gradient, dz.T, x.T, mdz=mdz, db=db, weight=w, g=g, b=b)
    lab.close(dw, grad(w64), "w")
    lab.close(dg, grad(g64), "g")
    lab.close(d_b, grad(b64), "b")
    dw, dg = lab.call(library.layernorm_weight_gradient, dz.T, x.T, mdz=mdz, db=db, weight=w, g=g)
    lab.close(dw, grad(w64) - torch.outer(grad(c64), b.double()), "w of a norm without bias")
    lab.close(dg, grad(g64), "g of a norm without bias")
    lab.close(lab.call(library.weight_gradient, dy.T, act.T), grad(down64), "down")


@pytest.mark.parametrize("qk_norm", [False, True])
def test_attention_block(lab: Lab, qk_norm: bool) -> None:
    """y = x + o(attention(R q, R k, v)) with GQA; attention and the turning back of its gradients are PyTorch's."""
    samples, rows, head, heads, kv_heads, width = 2, 7, 8, 4, 2, 23
    x, sumsq = statistic(lab, samples * rows, width)
    x = x.view(samples, rows, width)
    g, out = lab.rand(width), lab.rand(width, heads * head)
    sizes = [heads * head, kv_heads * head, kv_heads * head]
    w = lab.rand(sum(sizes), width)
    q_weight, k_weight = lab.rand(head), lab.rand(head)
    cos, sin = angles(rows, head, lab.dtype)
    dy = lab.rand(samples, rows, width)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2)

    x64, g64, w64, out64 = double(x, g, w, out, grad=True)
    q_weight64, k_weight64 = double(q_weight, k_weight)
    q, k, v = (by_heads(each, head) for each in (rms(x64, g64) @ w64.T).split(sizes, -1))
    if qk_norm:
        q, k = rms(q, q_weight64), rms(k, k_weight64)
    y64 = x64 + attend(rope(q, cos, sin), rope(k, cos, sin), v) @ out64.T
    y64.backward(dy.double())

    norm: dict[str, Any] = {"sumsq": sumsq, "width": width, "eps": EPS}
    turn: dict[str, Any] = {"cos": cos, "sin": sin, "head": head}
    weights = (w * g).split(sizes)
    if qk_norm:
        heads_of: dict[str, Any] = {"q_weight": q_weight, "k_weight": k_weight}
        ours = lab.call(library.norm_qk_rope, x, weights, **heads_of, **turn, **norm)
    else:
        ours = lab.call(library.norm_rope, x, weights, **turn, **norm)
    q, k, v = (each.detach().requires_grad_() for each in ours)
    mixed = attend(q, k, v)
    y, _ = lab.call(library.residual_stats, mixed.detach(), out, x=x)
    lab.close(y, y64.detach())
    if qk_norm:
        return
    d_mixed, _ = lab.call(library.linear_backward, dy, out.T)
    mixed.backward(d_mixed)
    lab.close(lab.call(library.weight_gradient, dy.flatten(0, 1).T, mixed.detach().flatten(0, 1).T), grad(out64), "out")

    # R is orthogonal, so s = <dz, z> = <dy, y> needs no z; what is left is elementwise.
    s = sum((each.detach() * grad(each)).sum((1, 3)) for each in (q, k, v))
    dq, dk = rope(grad(q), cos, -sin), rope(grad(k), cos, -sin)
    r = torch.rsqrt(x.flatten(0, 1).square().mean(1, keepdim=True) + EPS)
    dz = r * torch.cat([each.transpose(1, 2).flatten(2).flatten(0, 1) for each in (dq, dk, grad(v))], 1)
    x = x.flatten(0, 1)
    dx = lab.call(library.norm_backward, dz, w.T, x=x, s=s.flatten(), g=g, dx=dy, **norm)
    lab.close(dx, grad(x64).flatten(0, 1), "x")
    dw, dg = lab.call(library.weight_gradient, dz.T, x.T, g=g, weight=w)
    lab.close(dw, grad(w64), "w")
    lab.close(dg, grad(g64), "g")


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("ignore", [-100, 3])
def test_cross_entropy(lab: Lab, rows: int, cap: float | None, deferred: bool, ignore: int) -> None:
    width, vocabulary = 23, 53
    x, sumsq = statistic(lab, rows, width)
    w, bias = lab.rand(vocabulary, width), lab.rand(vocabulary)
    if cap is None:
        bias[[5, 50]] = -torch.inf  # columns that pad the vocabulary
    target = lab.ints(5, rows)
    target[0] = 0  # at least one label counts
    target[1::3] = ignore
    valid = target != ignore
    norm: dict[str, Any] = {"sumsq": sumsq, "width": width, "eps": EPS} if deferred else {}

    x64, w64, bias64 = double(x, w, bias, grad=True)
    logits = (rms(x64) if deferred else x64) @ w64.T + bias64
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    loss64 = F.cross_entropy(logits, target, ignore_index=ignore)
    loss64.backward()

    head: dict[str, Any] = {"target": target, "bias": bias, "cap": cap, **norm}
    lse, picked = lab.call(library.lse_target, x, w, finish=False, **head)
    losses = (lse.finish() - picked.finish())[valid]
    lab.close(losses.mean(), loss64.detach())
    scale = torch.tensor(1.0 / int(valid.sum()), dtype=lab.dtype)
    results = lab.call(library.cross_entropy_backward, x, w, lse=lse, scale=scale, ignore=ignore, finish=False, **head)
    dz, db = results[0], results[-1]
    assert (dz[~valid] == 0).all()
    lab.close(db.finish(), grad(bias64))
    lab.close(lab.call(library.weight_gradient, dz.T, x.T), grad(w64))
    if deferred:
        dx = lab.call(library.norm_backward, dz, w.T, x=x, s=results[1], **norm)
    else:
        dx, _ = lab.call(library.linear_backward, dz, w.T)
    lab.close(dx, grad(x64))


def test_cross_entropy_with_an_upstream_for_each_row(lab: Lab) -> None:
    x, w, target, upstream = lab.rand(7, 23), lab.rand(53, 23), lab.ints(53, 7), lab.rand(7)
    x64, w64 = double(x, w)
    logits = (x64 @ w64.T).requires_grad_()
    (F.cross_entropy(logits, target, reduction="none") * upstream.double()).sum().backward()
    lse, _ = lab.call(library.lse_target, x, w, target=target)
    dz = lab.call(library.cross_entropy_backward, x, w, lse=lse, target=target, upstream=upstream)
    lab.close(dz, grad(logits))


def test_lse_of_rows_without_a_finite_logit(lab: Lab) -> None:
    x, w = lab.rand(2, 5), lab.rand(7, 5)
    bias = torch.full((7,), -torch.inf, dtype=lab.dtype)
    lse, picked = lab.call(library.lse_target, x, w, target=torch.tensor([1, -100]), bias=bias)
    assert lse.tolist() == [-math.inf, -math.inf]
    assert picked.tolist() == [-math.inf, 0.0]


# ---- what the library refuses ------------------------------------------------------------------------------------


def test_library_refuses(lab: Lab) -> None:
    x, w = lab.rand(7, 5), lab.rand(6, 5)
    sumsq = lab.rand(7)
    with pytest.raises(TraceError, match="width is 0"):
        lab.call(library.norm_swiglu, x, w, sumsq=sumsq)
    with pytest.raises(TraceError, match="activation 'swish' is none of"):
        lab.call(library.bias_activation, x, w, activation="swish")
    with pytest.raises(TraceError, match="approximate"):
        lab.call(library.bias_gelu, x, w, approximate="fast")
    with pytest.raises(TraceError, match="not a tensor"):
        lab.call(library.layernorm_linear, x, w, moments=sumsq, s=lab.rand(6))
    with pytest.raises(TraceError, match="seed is 3"):
        lab.call(library.dropout_residual, x, w, x=lab.rand(7, 6), seed=3, p=0.5)
    # Tables that are too wide or too narrow would fit by repeating, and turn the wrong columns.
    weights, (cos, sin) = [lab.rand(16, 5)] * 3, angles(7, 8, lab.dtype)
    full = {"cos": torch.cat([cos, cos], 1), "sin": torch.cat([sin, sin], 1)}
    with pytest.raises(TraceError, match="got 8 columns, expected 4"):
        lab.call(library.norm_rope, x, weights, head=8, **full)
    narrow = {"q_weight": lab.rand(4), "k_weight": lab.rand(4)}
    with pytest.raises(TraceError, match="got 4 columns, expected 8"):
        lab.call(library.norm_qk_rope, x, weights, cos=cos, sin=sin, head=8, **narrow)
    with pytest.raises(ArgumentError, match=r"out\['dw'\]"):
        lab.call(library.weight_gradient_accumulate, x, w)


def test_every_epilogue_has_an_equation() -> None:
    for name, epilogue in vars(library).items():
        if isinstance(epilogue, Epilogue):
            assert name == epilogue.fn.__name__
            assert epilogue.__doc__, name
            assert "=" in epilogue.__doc__, name


# ---- fused_gemm_epilogue -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS, *GATED])
@pytest.mark.parametrize("norm", [None, "rms", "layer"])
def test_fused_gemm_epilogue(lab: Lab, activation: str | None, norm: str | None) -> None:
    rows = 2 * 17 if activation in GATED else 17
    x, w, bias, residual = lab.rand(3, 5, 11), lab.rand(rows, 11), lab.rand(rows), lab.rand(3, 5, 17)
    weight, norm_bias = lab.rand(17), lab.rand(17)
    z = x.double() @ w.double().T + bias.double()
    if activation in GATED:
        gate, up = z.chunk(2, -1)
        z = TORCH[GATED[activation]](gate) * up
    elif activation:
        z = TORCH[activation](z)
    y = z + residual.double()
    common: dict[str, Any] = {"residual": residual, "activation": activation, "backend": lab.backend}
    if norm is None:
        lab.close(fused_gemm_epilogue(x, w, bias=bias, **common), y)
    else:
        given: dict[str, Any] = {"norm": norm, "norm_weight": weight, "norm_bias": norm_bias, "norm_eps": EPS}
        ours, h = fused_gemm_epilogue(x, w, bias=bias, **given, **common)
        lab.close(ours, y)
        truth = rms(y, weight.double()) if norm == "rms" else F.layer_norm(y, (17,), weight.double(), eps=EPS)
        lab.close(h, truth + norm_bias.double())
    if activation in GATED:
        lab.close(fused_gemm_epilogue(x, w.chunk(2), bias=bias.chunk(2), **common), y)


def test_fused_gates_and_dropout(lab: Lab) -> None:
    x, w, residual = lab.rand(3, 5, 11), lab.rand(17, 11), lab.rand(3, 5, 17)
    plain = x.double() @ w.double().T
    for shape in [(17,), (3, 17), (3, 1, 17), (3, 5, 17)]:
        gate = lab.rand(*shape)
        factor = gate.double()[:, None] if shape == (3, 17) else gate.double()
        ours = fused_gemm_epilogue(x, w, gate=gate, residual=residual, backend=lab.backend)
        lab.close(ours, plain * factor + residual.double(), str(shape))
    dropped = fused_gemm_epilogue(x, w, dropout=0.5, seed=2**31 + 7, backend=lab.backend)
    lab.close(dropped, torch.where(dropped.double() != 0, plain * 2, 0.0))
    assert 0.3 < (dropped != 0).double().mean() < 0.7
    assert not torch.equal(dropped, fused_gemm_epilogue(x, w, dropout=0.5, seed=2**31 + 8, backend=lab.backend))


def test_fused_result_feeds_the_next_product(lab: Lab) -> None:
    x, w, residual, following, g = lab.rand(7, 11), lab.rand(17, 11), lab.rand(7, 17), lab.rand(13, 17), lab.rand(17)
    y, sumsq = fused_gemm_epilogue(x, w, residual=residual, norm="rms", finish=False, backend=lab.backend)
    assert isinstance(sumsq, Stat)
    out = lab.call(library.norm_linear, y, following * g, sumsq=sumsq, width=17, eps=EPS)
    _, h = fused_gemm_epilogue(x, w, residual=residual, norm_weight=g, norm_eps=EPS, backend=lab.backend)
    lab.close(out, h.double() @ following.double().T)
    target = torch.empty(7, 17, dtype=lab.dtype)
    assert fused_gemm_epilogue(x, w, out=target, backend=lab.backend).data_ptr() == target.data_ptr()


@pytest.mark.parametrize(
    ("argument", "given"),
    [
        ("x", {"x": torch.zeros(5)}),
        ("w", {"w": torch.zeros(6, 4, 5)}),
        ("w", {"w": (torch.zeros(6, 5), torch.zeros(6, 5))}),
        ("w", {"w": torch.zeros(7, 5), "activation": "swiglu"}),
        ("activation", {"activation": "swish"}),
        ("bias", {"bias": torch.zeros(5)}),
        ("residual", {"residual": torch.zeros(6)}),
        ("gate", {"gate": torch.zeros(2, 6)}),
        ("dropout", {"dropout": 1.0, "seed": 1}),
        ("seed", {"dropout": 0.1}),
        ("norm", {"norm": "batch"}),
        ("norm_weight", {"norm_weight": torch.zeros(5)}),
        ("norm_weight", {"norm_weight": torch.zeros(6), "finish": False}),
        ("norm_bias", {"norm_bias": torch.zeros(6)}),
        ("norm_eps", {"norm": "rms", "norm_eps": -1.0}),
        ("finish", {"finish": False}),
        ("w", {"w": torch.zeros(6, 5, requires_grad=True)}),
    ],
)
def test_fused_names_the_argument_at_fault(argument: str, given: dict[str, Any]) -> None:
    arguments = {"x": torch.zeros(7, 5), "w": torch.zeros(6, 5), "backend": "reference", **given}
    with pytest.raises(ArgumentError) as caught:
        fused_gemm_epilogue(arguments.pop("x"), arguments.pop("w"), **arguments)
    assert caught.value.argument == argument
    assert caught.value.remedy
