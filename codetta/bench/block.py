"""`codetta bench block`: everything in a Transformer block that is not attention, compiled against the peers.

The block starts where attention ends: output projection, residual, norm, gated feed-forward, residual, norm, and the next
layer's queries, keys and values with RoPE. It is an ordinary module, and all contenders get the same one.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import codetta
from codetta.bench.run import Record, Row, ceilings, device_name
from codetta.bench.timing import medians
from codetta.errors import ArgumentError
from codetta.verify import EPS

GPU_SIZES = ((2048, 8192), (4096, 14336), (8192, 28672))
CPU_SIZES = ((512, 1408),)
HEAD = 128  # columns of a head; D is a multiple of it
IMPLEMENTATIONS = ("eager", "compile", "compile-max", "gemm-only", "codetta")


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Block(nn.Module):
    """One block from the end of its attention to the beginning of the next."""

    def __init__(self, width: int, hidden: int, head: int = HEAD) -> None:
        super().__init__()
        self.head, kv = head, max(width // 4, head)
        linear = lambda i, o: nn.Linear(i, o, bias=False)  # noqa: E731
        self.o, self.gate, self.up = linear(width, width), linear(width, hidden), linear(width, hidden)
        self.down, self.q, self.k, self.v = (
            linear(hidden, width),
            linear(width, width),
            linear(width, kv),
            linear(width, kv),
        )
        self.norm, self.next_norm = Norm(width), Norm(width)

    def forward(self, x: Tensor, attended: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        x = x + self.o(attended)
        h = self.norm(x)
        x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        h = self.next_norm(x)
        q, k, v = (self._heads(linear(h)) for linear in (self.q, self.k, self.v))
        return x, _rotated(q, cos, sin), _rotated(k, cos, sin), v

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head).transpose(1, 2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


@dataclass(frozen=True)
class BlockBench:
    """What to measure. Fields left empty follow the device."""

    device: torch.device
    tokens: int = 0
    sizes: tuple[tuple[int, int], ...] = ()
    implementations: tuple[str, ...] = IMPLEMENTATIONS
    rounds: int = 3

    def __post_init__(self) -> None:
        unknown = [name for name in self.implementations if name not in IMPLEMENTATIONS]
        if unknown:
            raise ArgumentError("only", f"{unknown[0]!r} is no contender", f"use some of {', '.join(IMPLEMENTATIONS)}")

    def jobs(self) -> tuple[tuple[int, int], ...]:
        return self.sizes or (GPU_SIZES if self.device.type == "cuda" else CPU_SIZES)


def new_record(bench: BlockBench, command: str) -> Record:
    record = Record("block", device_name(bench.device), command)
    record.ceilings = ceilings(bench.device)
    return record


def measure_blocks(bench: BlockBench) -> Iterator[list[Row]]:
    """The rows of every size; all contenders of a size take turns."""
    for d, f in bench.jobs():
        yield measure_block(bench, d, f)
        gc.collect()
        torch._dynamo.reset()
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()


@torch.no_grad()
def measure_block(bench: BlockBench, d: int, f: int) -> list[Row]:
    gpu = bench.device.type == "cuda"
    tokens, dtype = bench.tokens or (16384 if gpu else 512), torch.bfloat16
    torch.manual_seed(0)
    with torch.device(bench.device):
        model = Block(d, f).to(dtype).eval()
        length = tokens // 2 if tokens % 2 == 0 else tokens
        x, attended = (torch.randn(tokens // length, length, d).to(dtype) for _ in range(2))
        wide = torch.randn(tokens // length, length, f).to(dtype)
        angle = torch.randn(1, 1, length, model.head)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    inputs = (x, attended, cos, sin)
    contenders = contestants(model, inputs, bench.implementations, gemms=lambda: _products(model, attended, wide))
    error = _error_ratio(model, contenders["codetta"], inputs) if "codetta" in contenders else None
    times = medians(contenders, bench.device, rounds=bench.rounds, rep_ms=100.0)
    rows = []
    for name, ms in times.items():
        row: Row = {"D": d, "F": f, "tokens": tokens, "pass": "forward", "impl": name, "ms": round(ms, 4)}
        if name == "codetta" and error is not None:
            row |= {
                "err_ratio": round(error[0] / error[1], 3),
                "within_budget": error[0] <= 2 * error[1] + EPS[torch.bfloat16],
            }
        rows.append(row)
    return rows


def contestants(
    model: nn.Module,
    inputs: tuple[Any, ...],
    names: tuple[str, ...],
    gemms: Callable[[], object] | None = None,
) -> dict[str, Callable[[], object]]:
    """The same module, plain and compiled by each; the parameters are shared."""
    made: dict[str, Callable[[], object]] = {}
    for name in names:
        if name == "gemm-only":
            if gemms is not None:
                made[name] = gemms
            continue
        call: Any = model
        if name == "compile":
            call = torch.compile(model, dynamic=False)
        elif name == "compile-max":
            call = torch.compile(model, dynamic=False, mode="max-autotune-no-cudagraphs")
        elif name == "codetta":
            call = codetta.compile(copy.copy(model))
        made[name] = lambda call=call: call(*inputs)  # type: ignore[misc]
    return made


def _products(model: Block, attended: Tensor, wide: Tensor) -> list[Tensor]:
    narrow = [model.o, model.gate, model.up, model.q, model.k, model.v]
    return [F.linear(attended, each.weight) for each in narrow] + [F.linear(wide, model.down.weight)]


def _error_ratio(model: nn.Module, ours: Callable[[], object], inputs: tuple[Tensor, ...]) -> tuple[float, float]:
    """The largest error of ours and of eager over the outputs, against fp32, on the first rows."""
    truth = copy.deepcopy(model).float()(*(each.float() for each in inputs))
    errors = []
    for got in (ours(), model(*inputs)):
        assert isinstance(got, tuple)
        errors.append(max(((g.float() - t).norm() / t.norm()).item() for g, t in zip(got, truth, strict=True)))
    return errors[0], errors[1]
