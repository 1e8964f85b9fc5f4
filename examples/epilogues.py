"""Four epilogues of a Transformer block, checked against float64.

python examples/epilogues.py [--backend reference]
"""

from __future__ import annotations

import argparse

import torch
import torch.nn.functional as F

import codetta as ct

ROWS, WIDTH, HIDDEN, HEAD = 256, 512, 1376, 64


@ct.epilogue
def residual_stats(acc, x: ct.Tile, g: ct.Row):
    """Residual, the scaled input of the next product, and what its norm needs."""
    y = acc + x
    return {"y": y, "h": y * g, "sumsq": ct.row_sum(y * y)}


@ct.epilogue
def norm_gated(acc, sumsq: ct.Col):
    """RMSNorm deferred past the product, then SwiGLU on the halves of one weight."""
    gate, up = ct.halves(acc * ct.rsqrt(sumsq / WIDTH + 1e-6))
    return ct.silu(gate) * up


@ct.epilogue
def rope(acc, cos: ct.Table, sin: ct.Table):
    """Rotate-half RoPE on every head, stored head by head as attention wants it."""
    first, second = ct.halves(acc, block=HEAD)
    turned = ct.join(first * cos - second * sin, second * cos + first * sin, block=HEAD)
    return ct.store(turned, layout="bhtd", head=HEAD)


@ct.epilogue
def logits_loss(acc, target: ct.Col):
    """Cross-entropy without logits in memory."""
    return {"lse": ct.row_lse(acc), "picked": ct.pick(acc, target)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", choices=["reference", "cpu", "triton"])
    backend = parser.parse_args().backend
    torch.manual_seed(0)
    a, x, g = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), torch.rand(WIDTH) + 0.5
    wo, w13 = torch.randn(WIDTH, WIDTH) / WIDTH**0.5, torch.randn(2 * HIDDEN, WIDTH) / WIDTH**0.5
    vocabulary, target = torch.randn(1000, WIDTH) / WIDTH**0.5, torch.randint(0, 1000, (ROWS,))
    angle = torch.outer(torch.arange(ROWS).double(), 1e4 ** (-torch.arange(0, HEAD, 2).double() / HEAD))
    cos, sin = angle.cos().float(), angle.sin().float()

    y, h, sumsq = residual_stats(a, wo, x=x, g=g, finish=False, backend=backend)
    gated = norm_gated(h, w13, sumsq=sumsq, backend=backend)
    turned = rope(a, wo, cos=cos, sin=sin, backend=backend)
    lse, picked = logits_loss(a, vocabulary, target=target, backend=backend)

    y64 = a.double() @ wo.double().T + x.double()
    gate, up = (F.rms_norm(y64, (WIDTH,), g.double(), 1e-6) @ w13.double().T).chunk(2, -1)
    q = (a.double() @ wo.double().T).view(1, ROWS, -1, HEAD).transpose(1, 2)
    q1, q2 = q.chunk(2, -1)
    c, s = angle.cos(), angle.sin()
    truths = {
        "residual + statistics": (y, y64),
        "deferred RMSNorm + SwiGLU": (gated, F.silu(gate) * up),
        "RoPE, stored by heads": (turned, torch.cat([q1 * c - q2 * s, q2 * c + q1 * s], -1)),
        "cross-entropy": (lse - picked, F.cross_entropy(a.double() @ vocabulary.double().T, target, reduction="none")),
    }
    print(norm_gated.program(h, w13, sumsq=sumsq), end="\n\n")
    for name, (ours, truth) in truths.items():
        error = ((ours.double() - truth).norm() / truth.norm()).item()
        print(f"{name:28} error against float64 {error:.1e}")
        assert error < 1e-5, name


if __name__ == "__main__":
    main()
