"""Random Transformer-like modules from a line of text, and the judge for whole modules.

    @given(designs())
    def test_module(design): ...  # design.module(torch.float32), design.tokens(torch.float32)

A design is data: printed, it can be pasted and run. Same design, same numbers; those of one dtype are those of any other,
rounded. The ways to write a norm, a gate or a rotation are ones found in published models: what differs is how they
are spelled, and in which order they cast, not what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from oracle import EPS, _judge_norm
from torch import Tensor, nn

HEADS = 4
FACTOR = 0.7  # of a scaled residual
NORMS = (
    "rms_cast_before_weight", "rms_cast_after_weight", "rms_divided", "rms_eps_outside", "rms_power", "rms_sum", "rms_one_plus", "rms_bare",
    "rms_function", "rms_function_bare", "rms_module", "layer", "layer_no_bias", "layer_bare", "layer_by_hand", "layer_deviation", "layer_std",
)  # fmt: skip
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "squared_relu": lambda x: F.relu(x).square(),
    "tanh": torch.tanh,
}


@dataclass(frozen=True)
class Design:
    norm: str = "rms_cast_before_weight"
    place: str = "pre"  # of norms: pre, post, sandwich (both), none
    bias: bool = False
    activation: str = "silu"
    mlp: str = (
        "gated"  # plain, gated (two weights), chunked (one weight in halves), interleaved (its columns alternate)
    )
    attention: str = "causal"  # none, full
    qkv: str = "separate"  # chunked, split, unbound: one weight
    kv_heads: int = 4
    rotary: str = "half"  # none, pairs, partial
    qk_norm: bool = False
    residual: str = "x + f"  # f + x
    residual_scale: bool = False
    parallel: bool = False  # attention and MLP read the same x
    layer_scale: bool = False  # a factor per column in front of the sum
    dropout: bool = False  # of eval mode
    layers: int = 1
    tied: bool = False  # the layers share their matrices
    stem: bool = True  # a linear layer in front, so that the first norm reads a product
    head: bool = True
    branch: str = "none"  # what the last layer returns as well: normed, gate, scores
    hidden: int = 24
    batch: int = 2
    length: int = 5
    seed: int = 0

    def __str__(self) -> str:
        """What differs from the defaults: enough to build it again."""
        given = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default]
        return f"Design({', '.join(given)})"

    __repr__ = __str__

    def module(self, dtype: torch.dtype) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = Model(self)
            with torch.no_grad():
                for parameter in model.parameters():
                    noise = torch.randn(parameter.shape)
                    if parameter.dim() == 1:  # away from 0 and 1, so that one that is left out or used twice is seen
                        parameter.add_(0.2 * noise)
                    else:
                        parameter.copy_(noise / parameter.shape[1] ** 0.5)
        return model.to(dtype).eval()

    def tokens(self, dtype: torch.dtype, batch: int | None = None, length: int | None = None) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed + 1)
        # Away from mean 0 and variance 1: a norm that is forgotten must show.
        return (
            1.5 * torch.randn(batch or self.batch, length or self.length, self.hidden, generator=generator) + 0.3
        ).to(dtype)


@st.composite
def designs(draw: st.DrawFn) -> Design:
    pick = st.sampled_from
    layers = draw(pick((1, 1, 2)))
    return Design(
        norm=draw(pick(NORMS)),
        place=draw(pick(("pre", "pre", "post", "sandwich", "none"))),
        bias=draw(st.booleans()),
        activation=draw(pick(sorted(ACTIVATIONS))),
        mlp=draw(pick(("plain", "gated", "chunked", "interleaved"))),
        attention=draw(pick(("none", "causal", "full"))),
        qkv=draw(pick(("separate", "chunked", "split", "unbound"))),
        kv_heads=draw(pick((4, 2, 1))),
        rotary=draw(pick(("none", "half", "pairs", "partial"))),
        qk_norm=draw(st.booleans()),
        residual=draw(pick(("x + f", "f + x"))),
        residual_scale=draw(st.booleans()),
        parallel=draw(st.booleans()),
        layer_scale=draw(st.booleans()),
        dropout=draw(st.booleans()),
        layers=layers,
        tied=layers > 1 and draw(st.booleans()),
        stem=draw(st.booleans()),
        head=draw(st.booleans()),
        branch=draw(pick(("none", "normed", "gate", "scores"))),
        hidden=draw(pick((24, 40, 64))),
        batch=draw(st.integers(1, 3)),
        length=draw(st.integers(1, 17)),
        seed=draw(st.integers(0, 99)),
    )


def complaints(ours: Sequence[Tensor], eager: Sequence[Tensor], truth: Sequence[Tensor], dtype: torch.dtype) -> str:
    """What exceeds err(ours, fp64) <= 2 * err(eager, fp64) + eps, or differs in shape or type; empty if nothing does."""
    if not len(ours) == len(eager) == len(truth):
        return f"{len(ours)} outputs, not {len(eager)}"
    bad = []
    for number, (mine, near, exact) in enumerate(zip(ours, eager, truth, strict=True)):
        if mine.dtype != near.dtype:
            bad.append(f"output {number} is {mine.dtype}, not {near.dtype}")
        verdict = _judge_norm(f"output {number}", mine.double(), exact.double(), [near.double()], EPS[dtype])
        if verdict.complaint:
            bad.append(str(verdict))
    return "\n".join(bad)


class Model(nn.Module):
    def __init__(self, design: Design) -> None:
        super().__init__()
        self.design = design
        hidden = design.hidden
        self.stem = nn.Linear(hidden, hidden, bias=design.bias) if design.stem else nn.Identity()
        self.layers = nn.ModuleList(Layer(design) for _ in range(design.layers))
        if design.tied:
            for layer in self.layers[1:]:
                for name, module in layer.named_modules():
                    if isinstance(module, nn.Linear):
                        first = self.layers[0].get_submodule(name)
                        assert isinstance(first, nn.Linear)
                        module.weight = first.weight
        self.norm = Norm(design.norm, hidden)
        self.head = nn.Linear(hidden, 2 * hidden, bias=design.bias) if design.head else nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.stem(x)
        extra: Tensor | None = None
        for layer in self.layers:
            x, extra = layer(x)
        y = self.head(self.norm(x))
        return (y,) if extra is None else (y, extra)


class Layer(nn.Module):
    def __init__(self, design: Design) -> None:
        super().__init__()
        self.design = design
        hidden = design.hidden
        self.attention = Attention(design) if design.attention != "none" else None
        self.mlp = Mlp(design)
        pre, post = design.place in ("pre", "sandwich"), design.place in ("post", "sandwich")
        self.before = nn.ModuleList(Norm(design.norm, hidden) if pre else nn.Identity() for _ in range(2))
        self.after = nn.ModuleList(Norm(design.norm, hidden) if post else nn.Identity() for _ in range(2))
        self.scale = nn.Parameter(torch.full((hidden,), 0.5)) if design.layer_scale else None
        self.dropout = nn.Dropout(0.3) if design.dropout else nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        design = self.design
        first, second = self.before
        extra: dict[str, Tensor] = {}
        start, y = x, x
        if self.attention is not None:
            y = self.sum(x, self.attention(first(x), extra), 0)
        normed = second(start if design.parallel else y)
        extra["normed"] = normed
        y = self.sum(y, self.mlp(normed, extra), 1)
        return y, extra.get(design.branch)

    def sum(self, x: Tensor, f: Tensor, number: int) -> Tensor:
        design, norm = self.design, self.after[number]
        f = self.dropout(f)
        if design.place == "sandwich":
            f = norm(f)
        if self.scale is not None:
            f = f * self.scale
        if design.residual_scale:
            f = f * FACTOR
        y = x + f if design.residual == "x + f" else f + x
        return norm(y) if design.place == "post" else y


class Mlp(nn.Module):
    def __init__(self, design: Design) -> None:
        super().__init__()
        self.design = design
        hidden, wide, bias = design.hidden, design.hidden // 2 * 3, design.bias
        fused = design.mlp in ("chunked", "interleaved")
        self.up = nn.Linear(hidden, wide * (2 if fused else 1), bias=bias)
        self.gate = nn.Linear(hidden, wide, bias=bias) if design.mlp == "gated" else None
        self.down = nn.Linear(wide, hidden, bias=bias)

    def forward(self, x: Tensor, extra: dict[str, Tensor]) -> Tensor:
        act = ACTIVATIONS[self.design.activation]
        up = self.up(x)
        if self.gate is not None:
            y = act(self.gate(x)) * up
        elif self.design.mlp == "chunked":
            gate, value = up.chunk(2, dim=-1)
            y = act(gate) * value
        elif self.design.mlp == "interleaved":
            y = act(up[..., ::2]) * up[..., 1::2]
        else:
            y = act(up)
        extra["gate"] = y
        return self.down(y)


class Attention(nn.Module):
    def __init__(self, design: Design) -> None:
        super().__init__()
        self.design = design
        hidden, bias = design.hidden, design.bias
        self.head = head = hidden // HEADS
        self.kv = design.kv_heads if design.qkv in ("separate", "split") else HEADS  # equal thirds otherwise
        sizes = [hidden, self.kv * head, self.kv * head]
        parts = sizes if design.qkv == "separate" else [sum(sizes)]
        self.qkv = nn.ModuleList(nn.Linear(hidden, size, bias=bias) for size in parts)
        self.sizes = sizes
        self.out = nn.Linear(hidden, hidden, bias=bias)
        self.q_norm = Norm("rms_cast_before_weight", head) if design.qk_norm else nn.Identity()
        self.k_norm = Norm("rms_cast_before_weight", head) if design.qk_norm else nn.Identity()

    def forward(self, x: Tensor, extra: dict[str, Tensor]) -> Tensor:
        design, (batch, length, hidden) = self.design, x.shape
        if design.qkv == "separate":
            q, k, v = (linear(x) for linear in self.qkv)
        elif design.qkv == "split":
            q, k, v = self.qkv[0](x).split(self.sizes, dim=-1)
        elif design.qkv == "chunked":
            q, k, v = self.qkv[0](x).chunk(3, dim=-1)
        else:
            q, k, v = self.qkv[0](x).view(batch, length, 3, hidden).unbind(2)
        q = self.q_norm(q.view(batch, length, HEADS, self.head)).transpose(1, 2)
        k = self.k_norm(k.view(batch, length, self.kv, self.head)).transpose(1, 2)
        v = v.view(batch, length, self.kv, self.head).transpose(1, 2)
        q, k = rotated(q, design.rotary), rotated(k, design.rotary)
        if self.kv < HEADS:
            k, v = repeated(k, HEADS // self.kv), repeated(v, HEADS // self.kv)
        extra["scores"] = k  # as a cache keeps them
        y = F.scaled_dot_product_attention(q, k, v, is_causal=design.attention == "causal")
        return self.out(y.transpose(1, 2).reshape(batch, length, hidden))


def repeated(x: Tensor, times: int) -> Tensor:
    batch, heads, length, head = x.shape
    return x[:, :, None].expand(batch, heads, times, length, head).reshape(batch, heads * times, length, head)


def rotated(x: Tensor, kind: str) -> Tensor:
    """Positions turned into angles: pairs are halves apart, or neighbours; or only the first half of the head turns."""
    if kind == "none":
        return x
    if kind == "partial":
        part = x.shape[-1] // 4 * 2
        return torch.cat((rotated(x[..., :part], "half"), x[..., part:]), dim=-1)
    width = x.shape[-1]
    frequency = 100.0 ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * frequency
    if kind == "half":
        cos, sin = (torch.cat((f, f), dim=-1).to(x.dtype) for f in (angle.cos(), angle.sin()))
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


class Norm(nn.Module):
    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind, self.width, self.eps = kind, width, 1e-3  # large enough to be missed
        self.inner: nn.Module | None = None
        self.weight = self.bias = None
        if kind == "rms_module":
            self.inner = nn.RMSNorm(width, eps=self.eps)
        elif kind in ("layer", "layer_no_bias", "layer_bare"):
            affine = kind != "layer_bare"
            self.inner = nn.LayerNorm(width, self.eps, elementwise_affine=affine, bias=kind == "layer")
        elif not kind.endswith("_bare"):
            self.weight = nn.Parameter(torch.zeros(width) if kind == "rms_one_plus" else torch.ones(width))
            self.bias = nn.Parameter(torch.zeros(width)) if kind == "layer_by_hand" else None

    def forward(self, x: Tensor) -> Tensor:
        if self.inner is not None:
            return self.inner(x)
        w, eps, kind = self.weight, self.eps, self.kind
        if kind == "rms_function_bare":
            return F.rms_norm(x, (self.width,))
        # Half precision is widened; float64, which is the truth, stays what it is.
        wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
        if kind == "rms_bare":
            return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
        assert w is not None
        match kind:
            case "rms_cast_before_weight":
                return w * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)
            case "rms_cast_after_weight":
                return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * w.to(wide.dtype)).to(x.dtype)
            case "rms_divided":
                return (wide / torch.sqrt((wide * wide).mean(-1, keepdim=True) + eps)).to(x.dtype) * w
            case "rms_eps_outside":
                return (x * w / (wide.square().mean(-1, keepdim=True).sqrt() + eps)).to(x.dtype)
            case "rms_power":
                return (w * (wide * (wide.pow(2).mean(-1, keepdim=True) + eps).pow(-0.5))).to(x.dtype)
            case "rms_sum":
                scale = math.sqrt(self.width) * torch.rsqrt((wide * wide).sum(-1, keepdim=True) + eps)
                return (wide * scale).to(x.dtype) * w
            case "rms_one_plus":
                normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
                return (normed * (1.0 + w.to(wide.dtype))).to(x.dtype)
            case "rms_function":
                return F.rms_norm(x, (self.width,), w, eps)
            case "layer_by_hand":
                assert self.bias is not None
                mean, var = wide.mean(-1, keepdim=True), wide.var(-1, keepdim=True, unbiased=False)
                return ((wide - mean) / torch.sqrt(var + eps)).to(x.dtype) * w + self.bias
            case "layer_deviation":
                deviation = wide - wide.mean(-1, keepdim=True)
                return (deviation * torch.rsqrt(deviation.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * w
            case "layer_std":
                # Bessel's correction, and eps beside the deviation: as in annotated implementations.
                mean, std = wide.mean(-1, keepdim=True), wide.std(-1, keepdim=True)
                return (w * (wide - mean) / (std + eps)).to(x.dtype)
        raise AssertionError(kind)
