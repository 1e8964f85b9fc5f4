"""Named epilogues: the laws of a Transformer block, each a few lines of the language that anyone can write.

Forward epilogues defer a norm (they multiply the accumulator by the row's scale instead of normalising x first),
backward ones follow the laws for gradients. Nothing here knows devices, tiles or models.

Conventions, so that calls look alike:
    x, w     the product is x (M, K) · w (N, K)ᵀ; `acc` is its accumulator (q, k, v or gate, up for several weights)
    sumsq    the row sum of squares of a normalised x: a Stat (finish=False) or a vector; `width` is x's number of columns
    moments  the Stat of `row_moments`; its width is known to it
    g        a norm's weight. Deferred norms expect it in the weights (w * g); backward epilogues apply it to gradients
    dz       a gradient with respect to a deferred norm's product z is stored rescaled, dz' = r·dz, as its GEMMs need it
    cos, sin (T, head / 2), row t for position t; the T rows repeat over the samples of a batch
Operands that are None are left out, with the outputs that need them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch

from codetta import dsl
from codetta.call import epilogue
from codetta.dsl import (
    Col,
    Moments,
    Row,
    SampleRow,
    Scalar,
    Stored,
    Table,
    Tile,
    Value,
    col_index,
    col_sum,
    erfc,
    exp,
    group_sum,
    halves,
    join,
    pairs,
    pick,
    relu,
    row_lse,
    row_moments,
    row_sum,
    rsqrt,
    sigmoid,
    silu,
    spread,
    store,
    tanh,
    where,
)  # fmt: skip
from codetta.errors import TraceError

# Tables whose rows repeat over the samples; a norm's weight for each head is a table of one row.
RopeTable = Annotated[Value, Table("repeat")]
HeadRow = Annotated[Value, Table("repeat")]

Outputs = dict[str, Value | Stored]


# ---- pieces: plain functions of values ---------------------------------------------------------------------------


def rms_scale(sumsq: Value, width: int, eps: float) -> Value:
    """r = 1 / sqrt(sumsq / width + eps)."""
    if width < 1:
        raise TraceError(f"width is {width}: pass the number of columns that sumsq sums over, width=x.shape[-1]")
    return rsqrt(sumsq * (1.0 / width) + eps)


def layer_scale(moments: Moments, eps: float) -> Value:
    """r = 1 / sqrt(var + eps)."""
    if not isinstance(moments, Moments):
        raise TraceError("moments is the Stat that row_moments returns with finish=False, not a tensor")
    return rsqrt(moments.var + eps)


def deferred(acc: Value, sumsq: Value | None, width: int, eps: float) -> Value:
    """(r⊙x)w = r⊙(xw): the product of the normalised x from the product of x itself; acc where there is no norm."""
    return acc if sumsq is None else acc * rms_scale(sumsq, width, eps)


def plus(value: Value, addend: Value | None) -> Value:
    return value if addend is None else value + addend


def times(value: Value, factor: Value | None) -> Value:
    return value if factor is None else value * factor


def rotate_half(z: Value, cos: Value, sin: Value, head: int) -> Value:
    """RoPE on the two halves of each head: (z1 cos - z2 sin, z2 cos + z1 sin)."""
    z1, z2 = halves(z, head)
    return join(z1 * cos - z2 * sin, z2 * cos + z1 * sin, block=head)


def rotate_pairs(z: Value, cos: Value, sin: Value, head: int) -> Value:
    """RoPE on adjacent columns (2i, 2i + 1): the layout of the original paper, GPT-J and FLUX."""
    z1, z2 = pairs(z)
    return join(z1 * cos - z2 * sin, z2 * cos + z1 * sin, block=2)


def rotate(z: Value, cos: Value, sin: Value, head: int, interleaved: bool = False) -> Value:
    # A table of another width would repeat over the columns all the same, in the wrong places.
    _check_table("cos and sin", (cos, sin), head // 2, f"[:, : {head // 2}] of tables of full width")
    return rotate_pairs(z, cos, sin, head) if interleaved else rotate_half(z, cos, sin, head)


def _check_table(name: str, tables: tuple[Value, ...], cols: int, remedy: str) -> None:
    for table in tables:
        if table.cols != cols:
            raise TraceError(f"{name}: got {table.cols} columns, expected {cols}: pass {remedy}")


def head_scale(z: Value, head: int, eps: float) -> Value:
    """ρ = 1 / sqrt(mean over the head of z² + eps), spread over the head's columns."""
    return spread(rsqrt(group_sum(z * z, head) * (1.0 / head) + eps), head)


def onehot(target: Value, cols: int) -> Value:
    return where(col_index(cols) == target, 1.0, 0.0)


@dataclass(frozen=True)
class Activation:
    """φ and its derivative."""

    fn: Callable[[Value], Value]
    slope: Callable[[Value], Value]


def _silu_slope(x: Value) -> Value:
    s = sigmoid(x)
    return s * (1.0 + x * (1.0 - s))


def _gelu_slope(x: Value) -> Value:
    return 0.5 * erfc(x * -math.sqrt(0.5)) + x * exp(x * x * -0.5) * (1.0 / math.sqrt(2.0 * math.pi))


def _gelu_tanh_slope(x: Value) -> Value:
    # gelu_tanh is x·sigmoid(v) with v = c·x(1 + 0.044715 x²), as in dsl.gelu.
    c = 2.0 * math.sqrt(2.0 / math.pi)
    s = sigmoid(x * (1.0 + 0.044715 * x * x) * c)
    return s * (1.0 + x * (1.0 - s) * (1.0 + 3 * 0.044715 * x * x) * c)


def _sigmoid_slope(x: Value) -> Value:
    return sigmoid(x) * (1.0 - sigmoid(x))


ACTIVATIONS: dict[str, Activation] = {
    "relu": Activation(relu, lambda x: where(x > 0.0, 1.0, 0.0)),
    "squared_relu": Activation(dsl.squared_relu, lambda x: 2.0 * relu(x)),
    "silu": Activation(silu, _silu_slope),
    "gelu": Activation(dsl.gelu, _gelu_slope),
    "gelu_tanh": Activation(lambda x: dsl.gelu(x, "tanh"), _gelu_tanh_slope),
    "sigmoid": Activation(sigmoid, _sigmoid_slope),
    "tanh": Activation(tanh, lambda x: 1.0 - tanh(x) ** 2),
}

# Gated activations φ(gate)·up by the name of the whole, with the name of φ.
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}


def activation_named(name: str) -> Activation:
    if name not in ACTIVATIONS:
        raise TraceError(f"activation {name!r} is none of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _gelu_named(approximate: str) -> str:
    if approximate not in ("none", "tanh"):
        raise TraceError(f"approximate is 'none' or 'tanh', as in torch.nn.functional.gelu, not {approximate!r}")
    return "gelu" if approximate == "none" else "gelu_tanh"


# ---- forward: residual stream and statistics ---------------------------------------------------------------------


@epilogue
def output_stats(acc: Value, bias: Row | None = None) -> Outputs:
    """u = acc + bias; sumsq = Σ u². For norms that come after a projection and before the residual (sandwich norm)."""
    u = plus(acc, bias)
    return {"u": u, "sumsq": row_sum(u * u)}


@epilogue
def residual_stats(acc: Value, x: Tile, bias: Row | None = None) -> Outputs:
    """y = acc + bias + x; sumsq = Σ y², for the RMSNorm that follows."""
    y = plus(acc, bias) + x
    return {"y": y, "sumsq": row_sum(y * y)}


@epilogue
def residual_stats_scaled(acc: Value, x: Tile, g: Row, bias: Row | None = None) -> Outputs:
    """y = acc + bias + x; h = y·g; sumsq = Σ y². h is the next product's input where g cannot go into its weights."""
    y = plus(acc, bias) + x
    return {"y": y, "h": y * g, "sumsq": row_sum(y * y)}


@epilogue
def residual_moments(acc: Value, x: Tile, bias: Row | None = None) -> Outputs:
    """y = acc + bias + x; moments = mean and variance of y's rows, for the LayerNorm that follows."""
    y = plus(acc, bias) + x
    return {"y": y, "moments": row_moments(y)}


@epilogue
def gate_residual(acc: Value, x: Tile, gate: SampleRow, bias: Row | None = None) -> Outputs:
    """y = x + gate_b·(acc + bias): adaLN's gated residual, one gate vector for each sample b."""
    return {"y": x + gate * plus(acc, bias)}


@epilogue
def gate_residual_moments(acc: Value, x: Tile, gate: SampleRow, bias: Row | None = None) -> Outputs:
    """y = x + gate_b·(acc + bias); moments of y's rows, for the LayerNorm that adaLN modulates next."""
    y = x + gate * plus(acc, bias)
    return {"y": y, "moments": row_moments(y)}


@epilogue
def dropout_residual(acc: Value, x: Tile, seed: Scalar, p: float, bias: Row | None = None) -> Outputs:
    """y = x + dropout(acc + bias). seed: an integer tensor with one element; the mask depends on (seed, row, column)."""
    if not isinstance(seed, Value):
        # A number would become part of the program: a new program for each seed, and only its 24 highest bits in fp32.
        raise TraceError(f"seed is {seed!r}: pass an integer tensor with one element, torch.tensor({seed!r})")
    return {"y": x + dsl.dropout(plus(acc, bias), p, seed)}


# ---- forward: deferred norms and activations ---------------------------------------------------------------------


@epilogue
def norm_linear(acc: Value, sumsq: Col, width: int, eps: float = 1e-6, bias: Row | None = None) -> Outputs:
    """out = r·acc + bias = RMSNorm(x) wᵀ + bias."""
    return {"out": plus(deferred(acc, sumsq, width, eps), bias)}


def _layer_deferred(acc: Value, moments: Moments, s: Value, t: Value | None, eps: float) -> Value:
    return plus(layer_scale(moments, eps) * (acc - moments.mean * s), t)


@epilogue
def layernorm_linear(acc: Value, moments: Moments, s: Row, t: Row | None = None, eps: float = 1e-5) -> Outputs:
    """out = r·(acc - μ·s) + t = LayerNorm(x) Wᵀ + c, called with w = W·g.

    s = w.sum(1), of the rounded w, so that r(xw - μs) = r(x - μ)w exactly; t = W b + c.
    """
    return {"out": _layer_deferred(acc, moments, s, t, eps)}


@epilogue
def layernorm_activation(
    acc: Value, moments: Moments, s: Row, t: Row | None = None, eps: float = 1e-5, activation: str = "gelu", keep: bool = False
) -> Outputs:  # fmt: skip
    """a = φ(z), z = r·(acc - μ·s) + t; z is stored too with keep=True."""
    return _activated(_layer_deferred(acc, moments, s, t, eps), activation, keep)


def _activated(z: Value, activation: str, keep: bool) -> Outputs:
    return _kept({"a": activation_named(activation).fn(z)}, z, keep)


def _kept(outputs: Outputs, z: Value, keep: bool) -> Outputs:
    return {**outputs, "z": z} if keep else outputs


@epilogue
def bias_activation(acc: Value, bias: Row | None = None, activation: str = "gelu", keep: bool = False) -> Outputs:
    """a = φ(z), z = acc + bias; z is stored too with keep=True."""
    return _activated(plus(acc, bias), activation, keep)


@epilogue
def bias_gelu(acc: Value, bias: Row | None = None, approximate: str = "none", keep: bool = False) -> Outputs:
    """a = gelu(z), z = acc + bias; exact, or with approximate="tanh"; z is stored too with keep=True."""
    return _activated(plus(acc, bias), _gelu_named(approximate), keep)


def _gated(z: Value, activation: str, keep: bool) -> Outputs:
    gate, up = halves(z)
    return _kept({"a": activation_named(activation).fn(gate) * up}, z, keep)


@epilogue
def norm_swiglu(
    acc: Value, sumsq: Col | None = None, width: int = 0, eps: float = 1e-6, bias: Row | None = None, keep: bool = False
) -> Outputs:  # fmt: skip
    """a = silu(G)·U with (G, U) = z = r·acc + bias, the halves of one (2F, K) weight; z is stored too with keep=True."""
    return _gated(plus(deferred(acc, sumsq, width, eps), bias), "silu", keep)


@epilogue
def norm_swiglu_split(
    gate: Value, up: Value, sumsq: Col | None = None, width: int = 0, eps: float = 1e-6, keep: bool = False
) -> Outputs:
    """a = silu(r·gate)·(r·up) of two weights; with keep=True also z (M, 2F), gate beside up."""
    return _gated_split(gate, up, sumsq, width, eps, "silu", keep)


@epilogue
def norm_geglu(
    acc: Value, sumsq: Col | None = None, width: int = 0, eps: float = 1e-6, bias: Row | None = None,
    approximate: str = "tanh", keep: bool = False,
) -> Outputs:  # fmt: skip
    """a = gelu(G)·U with (G, U) = z = r·acc + bias, the halves of one (2F, K) weight; z is stored too with keep=True."""
    return _gated(plus(deferred(acc, sumsq, width, eps), bias), _gelu_named(approximate), keep)


@epilogue
def norm_geglu_split(
    gate: Value, up: Value, sumsq: Col | None = None, width: int = 0, eps: float = 1e-6,
    approximate: str = "tanh", keep: bool = False,
) -> Outputs:  # fmt: skip
    """a = gelu(r·gate)·(r·up) of two weights; with keep=True also z (M, 2F), gate beside up."""
    return _gated_split(gate, up, sumsq, width, eps, _gelu_named(approximate), keep)


def _gated_split(
    gate: Value, up: Value, sumsq: Value | None, width: int, eps: float, activation: str, keep: bool
) -> Outputs:
    gate, up = deferred(gate, sumsq, width, eps), deferred(up, sumsq, width, eps)
    a = activation_named(activation).fn(gate) * up
    return _kept({"a": a}, join(gate, up), keep)


# ---- forward: queries, keys, values ------------------------------------------------------------------------------


@epilogue
def norm_rope(
    q: Value, k: Value, v: Value, cos: RopeTable, sin: RopeTable, head: int, sumsq: Col | None = None, width: int = 0,
    eps: float = 1e-6, interleaved: bool = False, slot: Col | None = None,
) -> Outputs:  # fmt: skip
    """q = R(r·q), k = R(r·k), v = r·v, stored by heads (B, H, T, head).

    k and v may have fewer heads than q. A packed qkv weight is called as three views of its rows. slot: the row of the
    cache that each k and v goes to (out={"k": cache, "v": cache}).
    """
    q, k, v = (deferred(each, sumsq, width, eps) for each in (q, k, v))
    return _by_heads(rotate(q, cos, sin, head, interleaved), rotate(k, cos, sin, head, interleaved), v, head, slot)


@epilogue
def norm_qk_rope(
    q: Value, k: Value, v: Value, q_weight: HeadRow, k_weight: HeadRow, cos: RopeTable, sin: RopeTable, head: int,
    sumsq: Col | None = None, width: int = 0, eps: float = 1e-6, interleaved: bool = False, slot: Col | None = None,
) -> Outputs:  # fmt: skip
    """q = R(ρ·q_weight·z), z = r·q, ρ = 1/sqrt(mean over the head of z² + eps); k alike; v = r·v. Stored by heads.

    q_weight, k_weight: (head,), the weights of the norms inside each head.
    """
    q, k, v = (deferred(each, sumsq, width, eps) for each in (q, k, v))
    _check_table("q_weight and k_weight", (q_weight, k_weight), head, "one number for each column of a head")
    q = q * head_scale(q, head, eps) * q_weight
    k = k * head_scale(k, head, eps) * k_weight
    return _by_heads(rotate(q, cos, sin, head, interleaved), rotate(k, cos, sin, head, interleaved), v, head, slot)


def _by_heads(q: Value, k: Value, v: Value, head: int, slot: Value | None) -> Outputs:
    return {
        "q": store(q, layout="bhtd", head=head),
        "k": store(k, layout="bhtd", head=head, rows=slot),
        "v": store(v, layout="bhtd", head=head, rows=slot),
    }


# ---- forward: logits, loss, quantised stores ---------------------------------------------------------------------


@epilogue
def softcap_logits(acc: Value, cap: float, sumsq: Col | None = None, width: int = 0, eps: float = 1e-6) -> Outputs:
    """logits = cap·tanh(r·acc / cap)."""
    return {"logits": dsl.softcap(deferred(acc, sumsq, width, eps), cap)}


def _logits(z: Value, bias: Value | None, cap: float | None) -> Value:
    z = plus(z, bias)
    return z if cap is None else dsl.softcap(z, cap)


@epilogue
def lse_target(
    acc: Value, target: Col, bias: Row | None = None, cap: float | None = None,
    sumsq: Col | None = None, width: int = 0, eps: float = 1e-6, shares: Row | None = None,
) -> Outputs:  # fmt: skip
    """lse = log Σ exp(logits) and picked = logits[target] of each row; the logits themselves are not stored.

    logits = r·acc + bias, capped if `cap` is given. Cross-entropy is lse - picked; a target outside the columns (an ignored
    label) picks 0, and the caller leaves its row out. shared = Σ shares·logits if they are given, for smoothed labels.
    """
    return _scores(_logits(deferred(acc, sumsq, width, eps), bias, cap), target, shares)


def _scores(logits: Value, target: Value, shares: Value | None) -> Outputs:
    found: Outputs = {"lse": row_lse(logits), "picked": pick(logits, target)}
    return found if shares is None else {**found, "shared": row_sum(logits * shares)}


@epilogue
def logits_target(
    acc: Value,
    target: Col,
    dtype: torch.dtype,
    bias: Row | None = None,
    cap: float | None = None,
    shares: Row | None = None,
) -> Outputs:
    """lse_target that stores the logits, too, for a loss whose gradients follow at once; shared = Σ shares·logits if they are given.

    Everything is taken of the logits as they are stored: exp(logits - lse) must add up to 1, or where a label is all but certain the
    gradient would be nothing but rounding.
    """
    logits = dsl.cast(_logits(acc, bias, cap), dtype)
    return {"logits": logits, **_scores(logits, target, shares)}


@epilogue
def quantize_store(acc: Value, dtype: torch.dtype, group: int = 128, bias: Row | None = None) -> Outputs:
    """(q, scale): acc + bias = q·scale with q in int8 or fp8 and one scale for each `group` columns of a row."""
    q, scale = dsl.quantize(plus(acc, bias), dtype, group)
    return {"q": q, "scale": scale}


# ---- backward: activations ---------------------------------------------------------------------------------------


def _gated_backward(
    acc: Value, z: Value, sumsq: Value | None, width: int, eps: float, bias: Value | None, activation: str, recompute: bool
) -> Outputs:  # fmt: skip
    """The gradient of φ(G)·U, (G, U) = z; s pairs dz with the product alone, so the bias is taken off z again."""
    gate, up = halves(z)
    phi = activation_named(activation)
    d_gate, d_up = acc * up * phi.slope(gate), acc * phi.fn(gate)
    outputs: Outputs = {"dz": join(deferred(d_gate, sumsq, width, eps), deferred(d_up, sumsq, width, eps))}
    if recompute:
        outputs["a"] = phi.fn(gate) * up
    if sumsq is not None:
        gate_part, up_part = halves(z if bias is None else z - bias)
        outputs["s"] = row_sum(gate_part * d_gate + up_part * d_up)
    if bias is not None:
        outputs["db"] = col_sum(join(d_gate, d_up))
    return outputs


@epilogue
def swiglu_backward(
    acc: Value, z: Tile, sumsq: Col | None = None, width: int = 0, eps: float = 1e-6, bias: Row | None = None,
    recompute: bool = False,
) -> Outputs:  # fmt: skip
    """acc = da. dz = r·(acc·U·silu'(G), acc·silu(G)) with (G, U) = z (M, 2F); s = Σ (z - bias)·dz; db = Σ_m dz.

    recompute=True stores a = silu(G)·U again, for the weight gradient of the product that follows.
    """
    return _gated_backward(acc, z, sumsq, width, eps, bias, "silu", recompute)


@epilogue
def geglu_backward(
    acc: Value, z: Tile, sumsq: Col | None = None, width: int = 0, eps: float = 1e-6, bias: Row | None = None,
    approximate: str = "tanh", recompute: bool = False,
) -> Outputs:  # fmt: skip
    """acc = da. dz = r·(acc·U·gelu'(G), acc·gelu(G)) with (G, U) = z (M, 2F); s = Σ (z - bias)·dz; db = Σ_m dz."""
    return _gated_backward(acc, z, sumsq, width, eps, bias, _gelu_named(approximate), recompute)


def _activation_backward(acc: Value, z: Value, activation: str, recompute: bool) -> Outputs:
    phi = activation_named(activation)
    dz = acc * phi.slope(z)
    outputs: Outputs = {"dz": dz, "db": col_sum(dz)}
    return {**outputs, "a": phi.fn(z)} if recompute else outputs


@epilogue
def activation_backward(acc: Value, z: Tile, activation: str = "gelu", recompute: bool = False) -> Outputs:
    """acc = da. dz = acc·φ'(z); db = Σ_m dz, the gradient of the bias in z; a = φ(z) again with recompute=True."""
    return _activation_backward(acc, z, activation, recompute)


@epilogue
def gelu_backward(acc: Value, z: Tile, approximate: str = "none", recompute: bool = False) -> Outputs:
    """acc = da. dz = acc·gelu'(z); db = Σ_m dz; a = gelu(z) again with recompute=True."""
    return _activation_backward(acc, z, _gelu_named(approximate), recompute)


@epilogue
def layernorm_activation_backward(
    acc: Value, z: Tile, moments: Moments, s: Row, t: Row | None = None, eps: float = 1e-5, activation: str = "gelu",
    recompute: bool = False,
) -> Outputs:  # fmt: skip
    """acc = da, z as layernorm_activation kept it. With d = acc·φ'(z): dz = r·d, and what LayerNorm's gradient needs:

    s1 = Σ d·s, s2 = Σ d·(z - t) for each row; db = Σ_m d, mdz = Σ_m μ·r·d for each column (db is also the bias gradient).
    """
    phi, r = activation_named(activation), layer_scale(moments, eps)
    d = acc * phi.slope(z)
    outputs: Outputs = {
        "dz": r * d,
        "s1": row_sum(d * s),
        "s2": row_sum(d * (z if t is None else z - t)),
        "db": col_sum(d),
        "mdz": col_sum(moments.mean * r * d),
    }
    return {**outputs, "a": phi.fn(z)} if recompute else outputs


# ---- backward: norms ---------------------------------------------------------------------------------------------


@epilogue
def linear_backward(acc: Value, dx: Tile | None = None, g: Row | None = None) -> Outputs:
    """dx = acc·g + dx; db = Σ_m dx: the gradient of a product's input, and of the bias that made that input.

    Called with a = dz (M, N) and w = W.T (K, N). Also adds a second product's part to a norm's gradient.
    """
    total = plus(times(acc, g), dx)
    return {"dx": total, "db": col_sum(total)}


@epilogue
def norm_backward(
    acc: Value, x: Tile, sumsq: Col, s: Col, width: int, eps: float = 1e-6, g: Row | None = None, dx: Tile | None = None
) -> Outputs:  # fmt: skip
    """dx = acc·g - r²·(s / width)·x + dx of the residual stream: RMSNorm's gradient, of a = dz', w = W.T.

    s is the Stat that the epilogue which made dz' returned.
    """
    r = rms_scale(sumsq, width, eps)
    return {"dx": plus(times(acc, g) - r * r * (s * (1.0 / width)) * x, dx)}


@epilogue
def layernorm_backward(
    acc: Value, x: Tile, moments: Moments, s1: Col, s2: Col, eps: float = 1e-5, g: Row | None = None, dx: Tile | None = None
) -> Outputs:  # fmt: skip
    """dx = acc·g - r·s1/K - r²·(x - μ)·s2/K + dx of the residual stream: LayerNorm's gradient, of a = dz', w = W.T."""
    r = layer_scale(moments, eps)
    per_column = 1.0 / x.cols
    inner = r * (s1 * per_column) + r * r * (s2 * per_column) * (x - moments.mean)
    return {"dx": plus(times(acc, g) - inner, dx)}


# ---- backward: weights -------------------------------------------------------------------------------------------


@epilogue
def weight_gradient(
    acc: Value, g: Row | None = None, weight: Tile | None = None, dtype: torch.dtype | None = None
) -> Outputs:
    """dw = acc·g (N, K), as nn.Linear stores w, of a = dz.T and w = x.T, both views; dg = Σ_n weight·acc if the weight is given.

    With a deferred norm, dz is dz' and x the saved input of the norm: nothing normalised is rebuilt.
    """
    outputs: Outputs = {"dw": store(times(acc, g), dtype=dtype)}
    return outputs if weight is None else {**outputs, "dg": col_sum(weight * acc)}


@epilogue
def weight_gradient_accumulate(
    acc: Value, g: Row | None = None, weight: Tile | None = None, dtype: torch.dtype = torch.float32
) -> Outputs:
    """dw += acc·g, in fp32 unless dtype says otherwise; pass out={"dw": tensor}. dg as in weight_gradient."""
    outputs: Outputs = {"dw": store(times(acc, g), dtype=dtype, accumulate=True)}
    return outputs if weight is None else {**outputs, "dg": col_sum(weight * acc)}


@epilogue
def layernorm_weight_gradient(
    acc: Value, mdz: Col, db: Col, weight: Tile, g: Row, b: Row | None = None, dtype: torch.dtype | None = None
) -> Outputs:
    """V = acc - mdz: dw = g·V + b·db, dg = Σ_n weight·V, d_b = Σ_n weight·db, of a = dz'.T and w = x.T.

    mdz, db: the column sums of layernorm_activation_backward, one number for each row of dw.
    """
    v = acc - mdz
    dw = v * g if b is None else v * g + b * db
    outputs: Outputs = {"dw": store(dw, dtype=dtype), "dg": col_sum(weight * v)}
    return outputs if b is None else {**outputs, "d_b": col_sum(weight * db)}


# ---- backward: loss and rotations --------------------------------------------------------------------------------


@epilogue
def cross_entropy_backward(
    acc: Value, lse: Col, target: Col, scale: Scalar | float = 1.0, upstream: Col | None = None, ignore: int = -100,
    bias: Row | None = None, cap: float | None = None, sumsq: Col | None = None, width: int = 0, eps: float = 1e-6,
) -> Outputs:  # fmt: skip
    """dz = r·(exp(logits - lse) - onehot(target))·scale·upstream, rows whose target is `ignore` zero; s = Σ z·dz.

    The logits are computed again, not stored: call it like lse_target, whose `lse` it reads. upstream: one factor for each
    row; scale: one for all, such as 1 / number of labels.
    """
    z = deferred(acc, sumsq, width, eps)
    logits = _logits(z, bias, cap)
    factor = scale if upstream is None else upstream * scale
    dz = where(target == ignore, 0.0, (exp(logits - lse) - onehot(target, acc.cols)) * factor)
    if cap is not None:
        dz = dz * (1.0 - (logits * (1.0 / cap)) ** 2)
    outputs: Outputs = {"dz": deferred(dz, sumsq, width, eps)}
    if sumsq is not None:
        outputs["s"] = row_sum(dz * z)
    if bias is not None:
        outputs["db"] = col_sum(dz)
    return outputs


@epilogue
def rope_backward(acc: Value, cos: RopeTable, sin: RopeTable, head: int, interleaved: bool = False) -> Outputs:
    """dz = Rᵀ·acc: a rotation is undone by the opposite angle. acc: the gradient of rotated queries or keys."""
    return {"dz": rotate(acc, cos, -sin, head, interleaved)}


@epilogue
def qk_rope_backward(
    acc: Value, z: Tile, weight: HeadRow, cos: RopeTable, sin: RopeTable, head: int, eps: float = 1e-6,
    interleaved: bool = False,
) -> Outputs:  # fmt: skip
    """ζ = Rᵀ·acc; dz = ρ·γ·ζ - z·(ρ³/head)·Σ_head ζγz; dγ = Σ_m ζ·z·ρ for each column (the caller adds the heads).

    z: the queries or keys before the norm inside each head; γ = weight (head,).
    """
    _check_table("weight", (weight,), head, "one number for each column of a head")
    zeta = rotate(acc, cos, -sin, head, interleaved)
    rho = head_scale(z, head, eps)
    inner = spread(group_sum(zeta * weight * z, head) * (1.0 / head), head)
    return {"dz": rho * weight * zeta - z * rho * rho * rho * inner, "dweight": col_sum(zeta * z * rho)}
