"""`codetta bench layer`: everything in a Transformer layer that is not attention, forward and backward, against the peers."""

from __future__ import annotations

import copy
import gc
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import codetta
from codetta.bench.block import CPU_SIZES, GPU_SIZES, Block
from codetta.bench.run import Row
from codetta.bench.timing import medians

IMPLEMENTATIONS = ("eager", "compile", "liger", "codetta")
SIZES = {"cuda": GPU_SIZES, "cpu": CPU_SIZES}


class LigerBlock(Block):
    """The block with Liger's kernels where it has one."""

    def forward(self, x: Tensor, attended: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        from liger_kernel.ops import LigerRMSNormFunction, LigerRopeFunction, LigerSiLUMulFunction

        x = x + self.o(attended)
        h = LigerRMSNormFunction.apply(x, self.norm.weight, 1e-6)
        x = x + self.down(LigerSiLUMulFunction.apply(self.gate(h), self.up(h)))
        h = LigerRMSNormFunction.apply(x, self.next_norm.weight, 1e-6)
        q, k, v = (self._heads(linear(h)) for linear in (self.q, self.k, self.v))
        return x, *LigerRopeFunction.apply(q, k, cos[0], sin[0]), v


def measure_layer(
    d: int,
    f: int,
    device: torch.device,
    implementations: tuple[str, ...] = IMPLEMENTATIONS,
    tokens: int = 0,
    rounds: int = 3,
) -> list[Row]:
    """Three rows for each contender: forward (keeping what gradients need), backward, and both."""
    tokens = tokens or (16384 if device.type == "cuda" else 512)
    torch.manual_seed(0)
    with torch.device(device):
        model = Block(d, f).to(torch.bfloat16)
        x, attended = (torch.randn(2, tokens // 2, d).to(torch.bfloat16).requires_grad_() for _ in range(2))
        angle = torch.randn(1, 1, tokens // 2, model.head)
        cos, sin = angle.cos().to(torch.bfloat16), angle.sin().to(torch.bfloat16)
    given = (x, attended, cos, sin)
    wanted = [x, attended, *model.parameters()]
    tangents = [torch.randn_like(each) for each in model(*given)]
    contenders: dict[str, Callable[[], object]] = {}
    gradients: dict[str, Callable[[], tuple[Tensor, ...]]] = {}
    for name in implementations:
        call = _contender(name, model)
        if call is None:
            continue
        contenders[f"{name} forward"] = lambda call=call: call(*given)  # type: ignore[misc]
        gradients[name] = lambda call=call: torch.autograd.grad(call(*given), wanted, tangents)  # type: ignore[misc]
        contenders[f"{name} both"] = gradients[name]
    distance = _distance(gradients)
    times = medians(contenders, device, rounds=rounds, rep_ms=150.0)
    rows: list[Row] = []
    for name in gradients:
        forward, both = times[f"{name} forward"], times[f"{name} both"]
        for which, ms in (("forward", forward), ("backward", both - forward), ("both", both)):
            row: Row = {"D": d, "F": f, "tokens": tokens, "pass": which, "impl": name, "ms": round(ms, 4)}
            if name == "codetta" and which == "both" and distance is not None:
                row["distance"] = round(distance, 5)  # from eager's gradients
            rows.append(row)
    del contenders, gradients, model
    gc.collect()
    torch._dynamo.reset()
    return rows


def _contender(name: str, model: Block) -> Any:
    """Parameters are shared by all of them. None: not installed here."""
    if name == "liger":
        if importlib.util.find_spec("liger_kernel") is None:
            return None
        changed = copy.copy(model)
        changed.__class__ = LigerBlock
        return changed
    if name == "compile":
        return torch.compile(model, dynamic=False)
    return codetta.compile(copy.copy(model)) if name == "codetta" else model


def _distance(gradients: dict[str, Callable[[], tuple[Tensor, ...]]]) -> float | None:
    """The largest distance of our gradients from eager's, in parts of their size."""
    if not {"eager", "codetta"} <= set(gradients):
        return None
    pairs = zip(gradients["codetta"](), gradients["eager"](), strict=True)
    return max(float((ours - plain).float().norm() / plain.float().norm()) for ours, plain in pairs)
