"""A block's forward and backward pass from the library of epilogues, checked against float64.

    python examples/block_gradients.py [--backend reference]

Every result stands beside the error that plain float32 PyTorch makes; none may exceed twice that. In code of your own leave
`backend` out, and the fastest one for the tensors' device is taken.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import codetta
from codetta import library
from codetta.dsl import Value
from codetta.fused import fused_gemm_epilogue

M, K, N, HIDDEN, EPS = 128, 96, 64, 160, 1e-6


# The simplest epilogue. `acc` stands for a · wᵀ; the annotations say what each operand is to the product: Row is one
# number per column, Tile one per element. Names of the dict are names of the outputs.
@codetta.epilogue
def bias_silu_residual(acc: Value, bias: codetta.Row, x: codetta.Tile) -> dict[str, Value]:
    return {"y": codetta.silu(acc + bias) + x}


def ours(t: dict[str, Tensor], backend: str) -> dict[str, Tensor]:
    """Everything as fused products."""
    results = {"bias_silu_residual": bias_silu_residual(t["a"], t["w"], bias=t["bias"], x=t["x"], backend=backend)}

    # With finish=False the sum of squares stays a Stat: tile partials that the next program finishes as it loads them.
    # So RMSNorm costs no pass over y: norm(y) · vᵀ = r ⊙ (y · vᵀ), and only the scale r of each row is needed.
    y, sumsq = library.residual_stats(t["a"], t["w"], x=t["x"], finish=False, backend=backend)
    norm: dict[str, Any] = {"sumsq": sumsq, "width": N, "eps": EPS, "backend": backend}
    # The norm's weight goes into the product's. z is kept for the backward pass.
    hidden, z = library.norm_swiglu(y, t["gate_up"] * t["g"], keep=True, **norm)
    out, _ = library.residual_stats(hidden, t["down"], x=y, backend=backend)
    results |= {"norm_swiglu": hidden, "block": out}

    # Backward: the gradients of the norm and of the activation are made in the epilogues of products that had to run
    # anyway. Transposes are views.
    dy = t["x"]
    dz, again, s = library.swiglu_backward(dy, t["down"].T, z=z, recompute=True, finish=False, **norm)
    dw, dg = library.weight_gradient(dz.T, y.T, g=t["g"], weight=t["gate_up"], backend=backend)
    results |= {
        "gradient of y": library.norm_backward(dz, t["gate_up"].T, x=y, s=s, g=t["g"], dx=dy, **norm),
        "gradient of gate_up": dw,
        "gradient of g": dg,
        "gradient of down": library.weight_gradient(dy.T, again.T, backend=backend),
    }

    # Without writing or chaining anything: one call for the common block.
    _, h = fused_gemm_epilogue(
        t["a"], t["w"], bias=t["bias"], activation="gelu", residual=t["x"], norm="layer", norm_weight=t["g"],
        norm_eps=EPS, backend=backend,
    )  # fmt: skip
    return {**results, "fused_gemm_epilogue": h}


def plain(t: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same in PyTorch, in the tensors' own precision."""
    product = t["a"] @ t["w"].T
    y = (product + t["x"]).requires_grad_()
    leaves = [t[name].clone().requires_grad_() for name in ("gate_up", "g", "down")]
    gate, up = (F.rms_norm(y, (N,), leaves[1], EPS) @ leaves[0].T).chunk(2, -1)
    hidden = F.silu(gate) * up
    out = y + hidden @ leaves[2].T
    gradients = torch.autograd.grad(out, [y, *leaves], t["x"])
    names = [f"gradient of {name}" for name in ("y", "gate_up", "g", "down")]
    return {
        "bias_silu_residual": F.silu(product + t["bias"]) + t["x"],
        "norm_swiglu": hidden.detach(),
        "block": out.detach(),
        **dict(zip(names, gradients, strict=True)),
        "fused_gemm_epilogue": F.layer_norm(F.gelu(product + t["bias"]) + t["x"], (N,), t["g"], eps=EPS),
    }


def error(value: Tensor, exact: Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=["reference", "cpu", "triton"], default="reference")
    backend = parser.parse_args().backend
    torch.manual_seed(0)
    torch.set_default_device("cuda" if backend == "triton" else "cpu")
    tensors = {
        "a": torch.randn(M, K), "w": torch.randn(N, K) / K**0.5, "x": torch.randn(M, N), "bias": torch.randn(N),
        "g": torch.rand(N) + 0.5, "gate_up": torch.randn(2 * HIDDEN, N) / N**0.5,
        "down": torch.randn(N, HIDDEN) / HIDDEN**0.5,
    }  # fmt: skip
    eager, exact = plain(tensors), plain({name: tensor.double() for name, tensor in tensors.items()})
    table = Table("what", "shape", "error", "PyTorch's error", title="relative to float64")
    good = True
    for name, value in ours(tensors, backend).items():
        mine, theirs = error(value, exact[name]), error(eager[name], exact[name])
        good &= mine <= 2 * theirs + 1e-7
        table.add_row(name, " × ".join(map(str, value.shape)), f"{mine:.1e}", f"{theirs:.1e}")
    Console().print(table)
    print("all within twice PyTorch's error" if good else "an error exceeds twice PyTorch's")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
