"""Compile a small Transformer, look at what became of it, and check it against float64.

python examples/compile_model.py
codetta explain examples/compile_model.py:example
codetta verify examples/compile_model.py:example
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import codetta


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(128, 4, 256) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def example() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = Model().eval()
    return model, (torch.randn(2, 24, 128),)


if __name__ == "__main__":
    model, inputs = example()
    print(codetta.explain(model, *inputs))
    for verdict in codetta.verify(model, *inputs):
        print(verdict)
    model = codetta.compile(model)
    with torch.no_grad():
        print("output", tuple(model(*inputs).shape))
