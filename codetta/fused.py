"""fused_gemm_epilogue: the common block of a Transformer as one call, for code that does not write epilogues.

It only translates arguments: one epilogue below covers every combination (an operand that is None leaves no trace in
its program), so each configuration is traced once and kept with the epilogue. Knows no devices and records no gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from codetta import dsl
from codetta.call import epilogue
from codetta.dsl import Row, SampleRow, Scalar, Tile, Value
from codetta.errors import ArgumentError
from codetta.ir.op import compute_dtype
from codetta.library import ACTIVATIONS, GATED, Outputs, activation_named, plus, times
from codetta.stat import Stat

NORMS = ("rms", "layer")


@epilogue
def fused_block(
    acc: Value, bias: Row | None = None, residual: Tile | None = None, layer_gate: Row | None = None,
    sample_gate: SampleRow | None = None, element_gate: Tile | None = None, seed: Scalar | None = None,
    activation: str | None = None, dropout: float = 0.0, norm: str | None = None,
) -> Outputs:  # fmt: skip
    """y = residual + gate·dropout(φ(acc + bias)), and the row statistic of y that the norm needs."""
    z = plus(acc, bias)
    if activation in GATED:
        gate, up = dsl.halves(z)
        z = activation_named(GATED[activation]).fn(gate) * up
    elif activation is not None:
        z = activation_named(activation).fn(z)
    return _finished(z, (layer_gate, sample_gate, element_gate), residual, seed, dropout, norm)


@epilogue
def fused_block_split(
    gate: Value, up: Value, gate_bias: Row | None = None, up_bias: Row | None = None, residual: Tile | None = None,
    layer_gate: Row | None = None, sample_gate: SampleRow | None = None, element_gate: Tile | None = None,
    seed: Scalar | None = None, activation: str = "swiglu", dropout: float = 0.0, norm: str | None = None,
) -> Outputs:  # fmt: skip
    """fused_block with a gated activation whose halves are two weights."""
    z = activation_named(GATED[activation]).fn(plus(gate, gate_bias)) * plus(up, up_bias)
    return _finished(z, (layer_gate, sample_gate, element_gate), residual, seed, dropout, norm)


def _finished(
    z: Value, gates: tuple[Value | None, ...], residual: Value | None, seed: Value | None, dropout: float, norm: str | None
) -> Outputs:  # fmt: skip
    if seed is not None:
        z = dsl.dropout(z, dropout, seed)
    for gate in gates:
        z = times(z, gate)
    y = plus(z, residual)
    if norm == "rms":
        return {"y": y, "sumsq": dsl.row_sum(y * y)}
    return {"y": y, "moments": dsl.row_moments(y)} if norm == "layer" else {"y": y}


def fused_gemm_epilogue(
    x: Tensor,
    w: Tensor | Sequence[Tensor],
    *,
    bias: Tensor | Sequence[Tensor] | None = None,
    residual: Tensor | None = None,
    activation: str | None = None,
    gate: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | Tensor | None = None,
    norm: str | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    norm_eps: float = 1e-6,
    finish: bool = True,
    out: Tensor | None = None,
    backend: str | None = None,
    tf32: bool = False,
) -> Any:  # like an Epilogue's, the type depends on the arguments
    """y = residual + gate · dropout(activation(x wᵀ + bias)), and with a norm also h = norm(y), in one fused product.

    x           (..., K)
    w, bias     (N, K) and (N,), as nn.Linear stores them. Gated activations (swiglu, geglu, geglu_tanh, reglu) take the gate
                and up weights as one (2N, K) tensor, gate first, or as a pair of (N, K) tensors with a pair of biases.
    activation  relu, squared_relu, silu, gelu, gelu_tanh, sigmoid, tanh, or a gated one
    residual    (..., N), added last
    gate        multiplies before the residual is added: (N,) as in LayerScale, (B, N) or (B, 1, N) for x (B, T, K) as in
                adaLN, or one for each element (..., N)
    dropout     the probability of zero, with `seed`, an integer: the same seed gives the same mask on every device
    norm        "rms" or "layer" (rms if only norm_weight is given): y's row statistics are taken from the tiles on the chip,
                before y is rounded to its dtype, and h = (y - μ)·r·norm_weight + norm_bias follows in one pass over y
                (μ = 0 for rms).
    finish      False: returns (y, Stat) instead of (y, h). The next product reads y, finishes the Stat as it loads it and
                so applies the norm without another pass over y (library.norm_linear, norm_swiglu, norm_rope, layernorm_linear); norm_weight
                then belongs to that product's weights.
    out         a tensor for y

    Returns y, (y, h) or (y, Stat). No gradient is recorded, and arguments that would need one are refused.
    """
    if not isinstance(x, Tensor) or x.dim() < 2:
        got = f"has shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
        raise ArgumentError("x", got, "pass the input of the layer, a tensor (..., K) with at least one row dimension")
    weights, biases = _listed("w", w), [] if bias is None else _listed("bias", bias)
    norm = _norm_named(norm, norm_weight, norm_bias, norm_eps, finish)
    cols = _columns(weights, biases, activation)
    lead = tuple(x.shape[:-1])
    if residual is not None and tuple(residual.shape) != (*lead, cols):
        raise ArgumentError("residual", f"has shape {tuple(residual.shape)}", f"pass {(*lead, cols)}, the shape of y")
    for name, vector in (("norm_weight", norm_weight), ("norm_bias", norm_bias)):
        if vector is not None and tuple(vector.shape) != (cols,):
            raise ArgumentError(name, f"has shape {tuple(vector.shape)}", f"pass ({cols},), one number per column of y")
    _refuse_gradients(
        x=x, w=weights, bias=biases, residual=residual, gate=gate, norm_weight=norm_weight, norm_bias=norm_bias
    )
    shared: dict[str, Any] = {
        **_gate_operand(gate, lead, cols), "residual": residual, "seed": _seed(dropout, seed, x.device),
        "dropout": dropout, "norm": norm, "activation": activation,
    }  # fmt: skip
    call: dict[str, Any] = {
        "out": None if out is None else {"y": out},
        "backend": backend,
        "tf32": tf32,
        "finish": False,
    }
    if len(weights) == 2:
        gate_bias, up_bias = biases or (None, None)
        result = fused_block_split(x, weights, gate_bias=gate_bias, up_bias=up_bias, **shared, **call)
    else:
        result = fused_block(x, weights[0], bias=biases[0] if biases else None, **shared, **call)
    if norm is None or not finish:
        return result
    y, stat = result
    return y, normalised(y, stat, norm_weight, norm_bias, norm_eps)


def normalised(y: Tensor, stat: Stat, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """norm(y) from y and its row statistic: RMSNorm from a sum of squares, LayerNorm from moments."""
    value, finished = y.to(compute_dtype(y.dtype)), stat.finish()
    if isinstance(finished, tuple):
        mean, var = (each.to(value.dtype).view(*y.shape[:-1], 1) for each in finished)
        value = (value - mean) * torch.rsqrt(var + eps)
    else:
        value = value * torch.rsqrt(finished.to(value.dtype).view(*y.shape[:-1], 1) / y.shape[-1] + eps)
    value = value if weight is None else value * weight.to(value.dtype)
    return (value if bias is None else value + bias.to(value.dtype)).to(y.dtype)


def _listed(name: str, given: Tensor | Sequence[Tensor]) -> list[Tensor]:
    listed = [given] if isinstance(given, Tensor) else list(given)
    for each in listed:
        if not isinstance(each, Tensor):
            raise ArgumentError(name, f"holds a {type(each).__name__}", "pass a tensor, or a pair of tensors")
    if len(listed) not in (1, 2):
        raise ArgumentError(name, f"holds {len(listed)} tensors", "pass one, or a pair (gate, up)")
    return listed


def _columns(weights: list[Tensor], biases: list[Tensor], activation: str | None) -> int:
    """The number of columns of y; checks w, bias and activation against each other."""
    known = (*ACTIVATIONS, *GATED)
    if activation is not None and activation not in known:
        raise ArgumentError("activation", f"{activation!r} is unknown", f"use one of {', '.join(known)}, or None")
    for each in weights:
        if each.dim() != 2:
            raise ArgumentError("w", f"has shape {tuple(each.shape)}", "pass (N, K) as nn.Linear stores it")
    if len(weights) == 2:
        if activation not in GATED:
            raise ArgumentError("w", "is a pair of weights", f"pass one, or a gated activation: {', '.join(GATED)}")
        if weights[0].shape != weights[1].shape:
            raise ArgumentError(
                "w",
                f"gate and up have shapes {tuple(weights[0].shape)} and {tuple(weights[1].shape)}",
                "pass two weights of the same shape",
            )
    rows = weights[0].shape[0]
    if biases and (len(biases) != len(weights) or any(tuple(each.shape) != (rows,) for each in biases)):
        raise ArgumentError(
            "bias",
            f"has shape {', '.join(str(tuple(each.shape)) for each in biases)}",
            f"pass ({rows},) for each weight",
        )
    if len(weights) == 1 and activation in GATED:
        if rows % 2:
            raise ArgumentError(
                "w", f"has {rows} rows, which have no halves", f"{activation} takes (2N, K), gate first"
            )
        return rows // 2
    return rows


def _norm_named(norm: str | None, weight: Tensor | None, bias: Tensor | None, eps: float, finish: bool) -> str | None:
    if norm is None and weight is not None:
        norm = "rms"
    if norm is not None and norm not in NORMS:
        raise ArgumentError("norm", f"{norm!r} is unknown", f"use one of {', '.join(NORMS)}, or None")
    if norm is None and bias is not None:
        raise ArgumentError("norm_bias", "is given without a norm", 'pass norm="layer" (or "rms") as well')
    if norm is not None and not eps >= 0.0:
        raise ArgumentError("norm_eps", f"is {eps!r}", "pass a number that is not negative")
    if not finish and norm is None:
        raise ArgumentError("finish", "is False, but no statistic is asked for", 'pass norm="rms" or norm="layer"')
    if not finish and (weight is not None or bias is not None):
        name = "norm_weight" if weight is not None else "norm_bias"
        remedy = (
            "scale the next weight by it (W * norm_weight)"
            if weight is not None
            else "add W @ norm_bias to the next bias"
        )
        raise ArgumentError(name, "is not applied with finish=False", remedy)
    return norm


def _gate_operand(gate: Tensor | None, lead: tuple[int, ...], cols: int) -> dict[str, Tensor]:
    """The gate under the name of its kind: one vector for all rows, one for each sample, or one number per element."""
    if gate is None:
        return {}
    shape, samples = tuple(gate.shape), lead[:-1]
    if shape == (cols,):
        return {"layer_gate": gate}
    if shape == (*lead, cols):
        return {"element_gate": gate}
    # (B, 1, N) is how adaLN's chunks come.
    if shape in ((*samples, cols), (*samples, 1, cols)):
        return {"sample_gate": gate.reshape(-1, cols)}
    raise ArgumentError(
        "gate",
        f"has shape {shape}",
        f"pass ({cols},), one vector per sample {(*samples, cols)}, or the shape of y {(*lead, cols)}",
    )


def _seed(dropout: float, seed: int | Tensor | None, device: torch.device) -> Tensor | None:
    if not 0.0 <= dropout < 1.0:
        raise ArgumentError("dropout", f"is {dropout!r}", "pass a probability from 0 up to, not including, 1")
    if dropout == 0.0:
        return None
    if seed is None:
        raise ArgumentError("seed", "is missing", "dropout needs seed=, an integer that changes with every call")
    if isinstance(seed, Tensor):
        return seed
    # As a tensor, so that a new seed is not a new program, and all its bits count.
    return torch.tensor(seed, dtype=torch.int64, device=device)


def _refuse_gradients(**arguments: Tensor | list[Tensor] | None) -> None:
    """A result that looks differentiable and is not would be a silent wrong answer."""
    if not torch.is_grad_enabled():
        return
    for name, given in arguments.items():
        for each in given if isinstance(given, list) else [given]:
            if each is not None and each.requires_grad:
                raise ArgumentError(
                    name,
                    "requires a gradient, and fused_gemm_epilogue records none",
                    f"call it under torch.no_grad(), or pass {name}.detach()",
                )
