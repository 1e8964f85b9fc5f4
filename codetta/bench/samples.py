"""A realistic call of every epilogue in the library, at the sizes of one model.

On the meta device they cost nothing: enough to trace a program, print its source for any target or compile it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from codetta import library
from codetta.call import Epilogue
from codetta.errors import ArgumentError
from codetta.program import Program
from codetta.runtime.bind import Binding
from codetta.stat import FIELDS, Stat

STAT_WIDTH = 256  # columns that one partial of a statistic stands for, as the large tiles leave them


@dataclass(frozen=True)
class Sizes:
    """A model's sizes: rows M, width D, hidden F, vocabulary and head."""

    rows: int = 4096
    width: int = 2048
    hidden: int = 8192
    vocabulary: int = 32768
    head: int = 128
    samples: int = 4

    def __post_init__(self) -> None:
        for name in ("rows", "width", "hidden", "vocabulary", "head", "samples"):
            if getattr(self, name) < 1:
                raise ArgumentError(name, f"is {getattr(self, name)}", "pass a positive number")
        if self.width % self.head:
            raise ArgumentError("head", f"{self.head} columns do not divide the width {self.width}", "pass a divisor")
        if self.rows % self.samples:
            raise ArgumentError("samples", f"{self.samples} do not divide {self.rows} rows", "pass a divisor")


@dataclass
class Sample:
    """One call: the epilogue and its arguments."""

    name: str
    epilogue: Epilogue
    a: Tensor
    w: Tensor | list[Tensor]
    operands: dict[str, Any]
    out: dict[str, Tensor] = field(default_factory=dict)

    def bind(self) -> tuple[Program, Binding]:
        return self.epilogue.bind(self.a, self.w, out=self.out, **self.operands)


class Maker:
    """Tensors of one device and dtype, random where there is memory to hold them."""

    def __init__(self, sizes: Sizes, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        self.sizes, self.device, self.dtype = sizes, device, dtype
        self.generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        if self.generator is None:
            return torch.empty(shape, device=self.device, dtype=dtype or self.dtype)
        x = torch.randn(shape, device=self.device, generator=self.generator)
        return (x * scale).to(dtype or self.dtype)

    def acts(self, cols: int) -> Tensor:
        """Activations, one row for each row of the product."""
        return self(self.sizes.rows, cols)

    def weight(self, n: int, k: int) -> Tensor:
        return self(n, k, scale=k**-0.5)

    def per_row(self) -> Tensor:
        return self(self.sizes.rows, dtype=torch.float32)

    def targets(self) -> Tensor:
        shape = (self.sizes.rows,)
        if self.generator is None:
            return torch.empty(shape, device=self.device, dtype=torch.int64)
        return torch.randint(0, self.sizes.vocabulary, shape, device=self.device, generator=self.generator)

    def table(self) -> Tensor:
        return self(self.sizes.rows // self.sizes.samples, self.sizes.head // 2)

    def stat(self, how: str, width: int) -> Stat:
        """Partials of a statistic over rows of `width` columns, as the program before leaves them."""
        tiles = -(-width // STAT_WIDTH)
        partials = self(FIELDS[how], tiles, self.sizes.rows, dtype=torch.float32)
        if self.generator is not None:
            # Sums of squares are positive, and so are sums of squared deviations.
            partials[-1] = partials[-1].abs() + min(STAT_WIDTH, width)
        return Stat(partials, how, STAT_WIDTH, width)


def _builders(make: Maker) -> dict[str, Callable[[], dict[str, Any]]]:
    """name -> the call's arguments: a, w, operands, and `out` where the epilogue adds to or indexes a tensor."""
    s = make.sizes
    rows, d, f, vocabulary, head = s.rows, s.width, s.hidden, s.vocabulary, s.head
    kv = max(d // 4 // head, 1) * head

    def acts(cols: int) -> Tensor:
        return make.acts(cols)

    def norm() -> dict[str, Any]:
        return {"sumsq": make.stat("sum", d), "width": d}

    def residual(**more: Any) -> dict[str, Any]:
        return {"a": acts(f), "w": make.weight(d, f), "x": acts(d), **more}

    def qkv(**more: Any) -> dict[str, Any]:
        weights = [make.weight(d, d), make.weight(kv, d), make.weight(kv, d)]
        return {"a": acts(d), "w": weights, "cos": make.table(), "sin": make.table(), "head": head, **norm(), **more}

    def logits(**more: Any) -> dict[str, Any]:
        return {"a": acts(d), "w": make.weight(vocabulary, d), **more}

    def split(**more: Any) -> dict[str, Any]:
        return {"a": acts(d), "w": [make.weight(f, d), make.weight(f, d)], **more}

    def gradient(**more: Any) -> dict[str, Any]:
        """Of a weight (F, D): a = dz.T, w = x.T, both views."""
        return {"a": make(rows, f, scale=rows**-0.5).T, "w": acts(d).T, **more}

    def moments() -> Stat:
        return make.stat("moments", d)

    return {
        "output_stats": lambda: {"a": acts(f), "w": make.weight(d, f)},
        "residual_stats": lambda: residual(),
        "residual_stats_scaled": lambda: residual(g=make(d)),
        "residual_moments": lambda: residual(bias=make(d)),
        "gate_residual": lambda: residual(gate=make(s.samples, d)),
        "gate_residual_moments": lambda: residual(gate=make(s.samples, d), bias=make(d)),
        "dropout_residual": lambda: residual(seed=make(1, scale=1e6, dtype=torch.int64), p=0.1),
        "norm_linear": lambda: {"a": acts(d), "w": make.weight(d, d), **norm()},
        "layernorm_linear": lambda: {"a": acts(d), "w": make.weight(d, d), "moments": moments(), "s": make(d), "t": make(d)},
        "layernorm_activation": lambda: {
            "a": acts(d), "w": make.weight(f, d), "moments": moments(), "s": make(f), "t": make(f), "keep": True
        },
        "bias_activation": lambda: {"a": acts(d), "w": make.weight(f, d), "bias": make(f), "keep": True},
        "bias_gelu": lambda: {"a": acts(d), "w": make.weight(f, d), "bias": make(f)},
        "norm_swiglu": lambda: {"a": acts(d), "w": make.weight(2 * f, d), **norm(), "keep": True},
        "norm_swiglu_split": lambda: split(**norm()),
        "norm_geglu": lambda: {"a": acts(d), "w": make.weight(2 * f, d), **norm()},
        "norm_geglu_split": lambda: split(**norm(), keep=True),
        "norm_rope": lambda: qkv(),
        "norm_qk_rope": lambda: qkv(q_weight=make(head), k_weight=make(head)),
        "softcap_logits": lambda: logits(cap=30.0),
        "lse_target": lambda: logits(target=make.targets()),
        "logits_target": lambda: logits(target=make.targets(), dtype=torch.bfloat16),
        "quantize_store": lambda: {"a": acts(d), "w": make.weight(f, d), "dtype": torch.int8, "group": 128},
        "swiglu_backward": lambda: {"a": acts(d), "w": make.weight(f, d), "z": acts(2 * f), **norm()},
        "geglu_backward": lambda: {"a": acts(d), "w": make.weight(f, d), "z": acts(2 * f), **norm(), "recompute": True},
        "activation_backward": lambda: {"a": acts(d), "w": make.weight(f, d), "z": acts(f), "activation": "silu"},
        "gelu_backward": lambda: {"a": acts(d), "w": make.weight(f, d), "z": acts(f), "recompute": True},
        "layernorm_activation_backward": lambda: {
            "a": acts(d), "w": make.weight(f, d), "z": acts(f), "moments": moments(), "s": make(f), "t": make(f)
        },
        "linear_backward": lambda: {"a": acts(f), "w": make.weight(f, d).T, "dx": acts(d)},
        "norm_backward": lambda: {
            "a": acts(2 * f), "w": make.weight(2 * f, d).T, "x": acts(d), **norm(), "s": make.stat("sum", f), "g": make(d), "dx": acts(d)
        },
        "layernorm_backward": lambda: {
            "a": acts(f), "w": make.weight(f, d).T, "x": acts(d), "moments": moments(), "s1": make.stat("sum", f), "s2": make.stat("sum", f),
            "g": make(d), "dx": acts(d),
        },
        "weight_gradient": lambda: gradient(g=make(d), weight=make(f, d)),
        "weight_gradient_accumulate": lambda: gradient(g=make(d), out={"dw": make(f, d, dtype=torch.float32)}),
        "layernorm_weight_gradient": lambda: gradient(
            mdz=make(f, dtype=torch.float32), db=make(f, dtype=torch.float32), weight=make(f, d), g=make(d), b=make(d)
        ),
        "cross_entropy_backward": lambda: logits(lse=make.per_row(), target=make.targets(), scale=1.0 / rows),
        "rope_backward": lambda: {"a": acts(d), "w": make.weight(d, d), "cos": make.table(), "sin": make.table(), "head": head},
        "qk_rope_backward": lambda: {
            "a": acts(d), "w": make.weight(d, d), "z": acts(d), "weight": make(head), "cos": make.table(), "sin": make.table(), "head": head
        },
    }  # fmt: skip


def library_names() -> list[str]:
    """Every named epilogue, in the order of the library."""
    return [name for name, value in vars(library).items() if isinstance(value, Epilogue)]


def sample(
    name: str,
    sizes: Sizes | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Sample:
    """A call of the named epilogue; without a device, on meta."""
    builders = _builders(Maker(sizes or Sizes(), device or torch.device("meta"), dtype, seed))
    if name not in builders:
        raise ArgumentError("name", f"{name!r} is no epilogue of the library", f"use one of {', '.join(builders)}")
    arguments = builders[name]()
    a, w, out = arguments.pop("a"), arguments.pop("w"), arguments.pop("out", {})
    return Sample(name, getattr(library, name), a, w, arguments, out)
