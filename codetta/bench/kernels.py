"""The library's epilogues against the product alone, eager PyTorch and torch.compile, with the error of each.

A row compares one program at one shape: `ms` ours, `cublas_ms` the bare product of the same shape, `eager_ms` and
`compile_ms` the same result by PyTorch. `err_ratio` is our error against float64 over eager's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from codetta import library
from codetta.call import Epilogue
from codetta.program import Program
from codetta.runtime.bind import Binding


@dataclass
class Case:
    """One program with its tensors: how we call it, and what PyTorch would do."""

    name: str
    epilogue: Epilogue
    a: Tensor
    w: Tensor | tuple[Tensor, ...]
    operands: dict[str, Any]
    eager: Callable[..., tuple[Tensor, ...]]  # (a, *weights, *operands) -> outputs in our order
    rows_independent: bool = True  # errors can be measured on some rows only

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return self.w if isinstance(self.w, tuple) else (self.w,)

    @property
    def shape(self) -> tuple[int, int, int]:
        k = self.a.shape[-1]
        return self.a.numel() // k, sum(w.shape[0] for w in self.weights), k

    def bind(self) -> tuple[Program, Binding]:
        return self.epilogue.bind(self.a, self.w, **self.operands)

    def tensors(self) -> list[Tensor]:
        return [self.a, *self.weights, *(value for value in self.operands.values() if isinstance(value, Tensor))]


class Maker:
    """Random tensors of realistic size and scale."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.generator = torch.Generator(device).manual_seed(seed)
        self.device, self.dtype = device, dtype

    def __call__(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        x = torch.randn(*shape, device=self.device, generator=self.generator, dtype=torch.float32)
        return (x * scale).to(dtype or self.dtype)

    def weight(self, n: int, k: int) -> Tensor:
        return self(n, k, scale=k**-0.5)


def rms(sumsq: Tensor, width: int) -> Tensor:
    return torch.rsqrt(sumsq / width + 1e-6)[:, None]


def eager_residual(a: Tensor, w: Tensor, x: Tensor) -> tuple[Tensor, ...]:
    y = a @ w.T + x
    return y, y.float().square().sum(-1)


def eager_residual_scaled(a: Tensor, w: Tensor, x: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    y = a @ w.T + x
    return y, y * g, y.float().square().sum(-1)


def eager_bias_gelu(a: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
    return (F.gelu(a @ w.T + bias, approximate="tanh"),)


def eager_gate(a: Tensor, w: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, ...]:
    product = (a @ w.T).view(gate.shape[0], -1, w.shape[0])
    return ((x.view_as(product) + gate[:, None] * product).flatten(0, 1),)


def eager_swiglu(a: Tensor, w: Tensor, sumsq: Tensor) -> tuple[Tensor, ...]:
    z = (a @ w.T) * rms(sumsq, a.shape[1]).to(a.dtype)
    gate, up = z.chunk(2, -1)
    return (F.silu(gate) * up,)


def eager_swiglu_keep(a: Tensor, w: Tensor, sumsq: Tensor) -> tuple[Tensor, ...]:
    z = (a @ w.T) * rms(sumsq, a.shape[1]).to(a.dtype)
    gate, up = z.chunk(2, -1)
    return F.silu(gate) * up, z


def _rotated(z: Tensor, cos: Tensor, sin: Tensor, samples: int, head: int) -> Tensor:
    z = z.view(samples, -1, z.shape[1] // head, head).transpose(1, 2)
    z1, z2 = z.chunk(2, -1)
    return torch.cat([z1 * cos - z2 * sin, z2 * cos + z1 * sin], -1).contiguous()


def eager_rope(samples: int, head: int) -> Callable[..., tuple[Tensor, ...]]:
    def eager(
        a: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, cos: Tensor, sin: Tensor, sumsq: Tensor
    ) -> tuple[Tensor, ...]:
        a = a.flatten(0, 1)
        r = rms(sumsq, a.shape[1]).to(a.dtype)
        q, k, v = (a @ wq.T) * r, (a @ wk.T) * r, (a @ wv.T) * r
        heads = v.view(samples, -1, v.shape[1] // head, head).transpose(1, 2).contiguous()
        return _rotated(q, cos, sin, samples, head), _rotated(k, cos, sin, samples, head), heads

    return eager


def eager_qk_rope(samples: int, head: int) -> Callable[..., tuple[Tensor, ...]]:
    def eager(
        a: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, sumsq: Tensor
    ) -> tuple[Tensor, ...]:  # fmt: skip
        a = a.flatten(0, 1)
        r = rms(sumsq, a.shape[1]).to(a.dtype)
        outputs = []
        for w, g in ((wq, q_weight), (wk, k_weight)):
            z = ((a @ w.T) * r).unflatten(-1, (-1, head))
            z = F.rms_norm(z, (head,), g, 1e-6).flatten(-2)
            outputs.append(_rotated(z, cos, sin, samples, head))
        v = (a @ wv.T) * r
        return (*outputs, v.view(samples, -1, v.shape[1] // head, head).transpose(1, 2).contiguous())

    return eager


def eager_lse(a: Tensor, w: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    logits = (a @ w.T).float() if a.dtype != torch.float64 else a @ w.T
    return torch.logsumexp(logits, -1), logits.gather(1, target[:, None])[:, 0]


def eager_swiglu_backward(a: Tensor, w: Tensor, z: Tensor, sumsq: Tensor) -> tuple[Tensor, ...]:
    da = a @ w.T
    gate, up = z.chunk(2, -1)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    d_gate, d_up = da * up * (sigmoid + silu * (1 - sigmoid)), da * silu
    r = rms(sumsq, w.shape[1]).to(a.dtype)
    s = (gate * d_gate).float().sum(-1) + (up * d_up).float().sum(-1)
    return torch.cat([d_gate * r, d_up * r], -1), s


def eager_gelu_backward(a: Tensor, w: Tensor, z: Tensor) -> tuple[Tensor, ...]:
    dz = torch.ops.aten.gelu_backward(a @ w.T, z, approximate="tanh")
    return dz, dz.sum(0)


def eager_norm_backward(
    a: Tensor, w: Tensor, x: Tensor, sumsq: Tensor, s: Tensor, g: Tensor, dx: Tensor
) -> tuple[Tensor, ...]:
    r = rms(sumsq, w.shape[0])
    return ((a @ w.T) * g - (r * r * (s / w.shape[0])[:, None]).to(a.dtype) * x + dx,)


def eager_weight_gradient(a: Tensor, w: Tensor, g: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    u = a @ w.T
    return u * g, (weight * u).sum(0)


def eager_cross_entropy_backward(a: Tensor, w: Tensor, lse: Tensor, target: Tensor) -> tuple[Tensor, ...]:
    logits = a @ w.T
    p = (
        torch.exp(logits - lse[:, None].to(logits.dtype))
        if a.dtype == torch.float64
        else torch.exp(logits.float() - lse[:, None])
    )
    p = p.scatter_add(1, target[:, None], -torch.ones_like(lse, dtype=p.dtype)[:, None])
    return (p.to(a.dtype),)


def cases(
    d: int,
    f: int,
    rows: int,
    device: torch.device,
    dtype: torch.dtype,
    vocabulary: int = 0,
    names: set[str] | None = None,
) -> list[Case]:
    """The library's programs at the sizes of one model; built one at a time by name, since tensors are large."""
    make = Maker(device, dtype)
    samples, head = (4 if rows % 256 == 0 else 1), 128 if d >= 1024 else 64
    kv = max(d // 4, head)
    vocabulary = vocabulary or 16 * d // 4

    def table() -> Tensor:
        return make(rows // samples, head // 2)

    def sumsq(width: int) -> Tensor:
        return make(rows, dtype=torch.float32).square() * 0.1 + float(width)

    def targets() -> Tensor:
        return torch.randint(0, vocabulary, (rows,), device=device, generator=make.generator)

    lib = library
    builders: dict[str, Callable[[], Case]] = {
        "residual_stats": lambda: Case(
            "residual_stats", lib.residual_stats, make(rows, d), make.weight(d, d), {"x": make(rows, d)}, eager_residual
        ),
        "residual_stats_down": lambda: Case(
            "residual_stats_down", lib.residual_stats, make(rows, f), make.weight(d, f), {"x": make(rows, d)}, eager_residual
        ),
        "residual_stats_scaled": lambda: Case(
            "residual_stats_scaled", lib.residual_stats_scaled, make(rows, d), make.weight(d, d), {"x": make(rows, d), "g": make(d)},
            eager_residual_scaled,
        ),
        "gate_residual": lambda: Case(
            "gate_residual", lib.gate_residual, make(rows, f), make.weight(d, f), {"x": make(rows, d), "gate": make(samples, d)}, eager_gate
        ),
        "bias_gelu": lambda: Case(
            "bias_gelu", _gelu_tanh, make(rows, d), make.weight(f, d), {"bias": make(f)}, eager_bias_gelu
        ),
        "norm_swiglu": lambda: Case(
            "norm_swiglu", lib.norm_swiglu, make(rows, d), make.weight(2 * f, d), {"sumsq": sumsq(d), "width": d}, eager_swiglu
        ),
        "norm_swiglu_keep": lambda: Case(
            "norm_swiglu_keep", lib.norm_swiglu, make(rows, d), make.weight(2 * f, d), {"sumsq": sumsq(d), "width": d, "keep": True},
            eager_swiglu_keep,
        ),
        "norm_rope": lambda: Case(
            "norm_rope", lib.norm_rope, make(samples, rows // samples, d), (make.weight(d, d), make.weight(kv, d), make.weight(kv, d)),
            {"cos": table(), "sin": table(), "head": head, "sumsq": sumsq(d), "width": d}, eager_rope(samples, head), False,
        ),
        "norm_qk_rope": lambda: Case(
            "norm_qk_rope", lib.norm_qk_rope, make(samples, rows // samples, d), (make.weight(d, d), make.weight(kv, d), make.weight(kv, d)),
            {"q_weight": make(head), "k_weight": make(head), "cos": table(), "sin": table(), "head": head, "sumsq": sumsq(d), "width": d},
            eager_qk_rope(samples, head), False,
        ),
        "lse_target": lambda: Case(
            "lse_target", lib.lse_target, make(rows, d), make.weight(vocabulary, d), {"target": targets()}, eager_lse
        ),
        "swiglu_backward": lambda: Case(
            "swiglu_backward", lib.swiglu_backward, make(rows, d), make.weight(f, d),
            {"z": make(rows, 2 * f), "sumsq": sumsq(d), "width": d}, eager_swiglu_backward,
        ),
        "gelu_backward": lambda: Case(
            "gelu_backward", _gelu_tanh_backward, make(rows, d), make.weight(f, d), {"z": make(rows, f)}, eager_gelu_backward, False
        ),
        "norm_backward": lambda: Case(
            "norm_backward", lib.norm_backward, make(rows, 2 * f), make.weight(2 * f, d).T,
            {"x": make(rows, d), "sumsq": sumsq(d), "s": make(rows, dtype=torch.float32), "width": d, "g": make(d), "dx": make(rows, d)},
            eager_norm_backward,
        ),
        "weight_gradient": lambda: Case(
            "weight_gradient", lib.weight_gradient, make(rows, f, scale=rows**-0.5).T, make(rows, d).T,
            {"g": make(d), "weight": make(f, d)}, eager_weight_gradient, False,
        ),
        "cross_entropy_backward": lambda: Case(
            "cross_entropy_backward", lib.cross_entropy_backward, make(rows, d), make.weight(vocabulary, d),
            {"lse": make(rows, dtype=torch.float32) * 0.1 + 10.0, "target": targets()}, eager_cross_entropy_backward,
        ),
    }  # fmt: skip
    return [build() for name, build in builders.items() if names is None or name in names]


NAMES = (
    "residual_stats", "residual_stats_down", "residual_stats_scaled", "gate_residual", "bias_gelu", "norm_swiglu", "norm_swiglu_keep",
    "norm_rope", "norm_qk_rope", "lse_target", "swiglu_backward", "gelu_backward", "norm_backward", "weight_gradient",
    "cross_entropy_backward",
)  # fmt: skip


@Epilogue
def _gelu_tanh(acc: Any, bias: library.Row) -> Any:
    return library.bias_gelu.fn(acc, bias, "tanh")


@Epilogue
def _gelu_tanh_backward(acc: Any, z: library.Tile) -> Any:
    return library.gelu_backward.fn(acc, z, "tanh")


def errors(case: Case, backend: str | None = None, rows: int = 512) -> tuple[float, float]:
    """(our error, eager's error) against float64, the worst output counting; on some rows where rows are independent."""
    if case.rows_independent and case.a.shape[0] > 2 * rows:
        pick = torch.cat([torch.arange(rows), torch.arange(case.a.shape[0] - rows, case.a.shape[0])]).to(case.a.device)
    else:
        pick = torch.arange(case.a.shape[0], device=case.a.device)
    ours = _tuple(case.epilogue(case.a, case.w, backend=backend, **case.operands))
    inputs = case.tensors()
    some = [t[pick] if t.shape[0] == case.a.shape[0] and not any(t is w for w in case.weights) else t for t in inputs]
    if "gate" in case.operands:
        some, pick = inputs, torch.arange(case.a.shape[0], device=case.a.device)
    eager = case.eager(*some)
    truth = case.eager(*(t.double() if t.is_floating_point() else t for t in some))
    worst = (0.0, 1e-30)
    for mine, theirs, true in zip(ours, eager, truth, strict=True):
        mine = mine if mine.shape == true.shape else mine[pick]
        pair = _error(mine, true), _error(theirs, true)
        if not pair[0] <= pair[1] * (worst[0] / worst[1]):
            worst = (pair[0], max(pair[1], 1e-9))
    return worst


def _error(x: Tensor, truth: Tensor) -> float:
    scale = truth.norm().item()
    return ((x.double() - truth).norm().item()) / (scale or 1.0)


def _tuple(x: Any) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)
