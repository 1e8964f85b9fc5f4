"""Rows and columns that a model sees in another order than programs do: merged, apart, met by others, reduced; results and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import codetta

Rest = Callable[["Two", Tensor, Tensor, Tensor], Tensor]


def rows(y: Tensor) -> Tensor:
    """Positions first, samples second, in one dimension."""
    return y.transpose(0, 1).reshape(-1, 16)


def columns(y: Tensor) -> Tensor:
    return y.unflatten(-1, (4, 4)).transpose(2, 3).reshape(y.shape)


CASES: dict[str, Rest] = {
    "rows and a tensor": lambda m, y, x, w: F.silu(rows(y)) + w,
    "rows and numbers": lambda m, y, x, w: F.silu(rows(y)) * w[:, :1],
    "rows and a value": lambda m, y, x, w: F.silu(rows(y)) + m.second(x).reshape(-1, 16),
    "rows joined": lambda m, y, x, w: torch.cat([F.silu(rows(y)), F.silu(m.second(x).reshape(-1, 16))], -1),
    "rows normed": lambda m, y, x, w: m.second(F.rms_norm(rows(y), (16,))),
    "rows turned round and normed": lambda m, y, x, w: m.second(F.rms_norm(y.flip(0), (16,))),
    "rows summed": lambda m, y, x, w: rows(y).sum(-1, keepdim=True) * m.second(x).reshape(-1, 16),
    "apart, summed": lambda m, y, x, w: y.transpose(0, 1).sum(-1) * w[0, 0],
    "apart, summed, and a tensor": lambda m, y, x, w: y.transpose(0, 1).sum(-1, keepdim=True) * w.view(3, 2, 16),
    "apart, and a tensor": lambda m, y, x, w: F.silu(y.transpose(0, 1)) + w.view(3, 2, 16),
    "apart, and a value": lambda m, y, x, w: F.silu(y.transpose(0, 1)) + m.second(x.transpose(0, 1)),
    "apart, means": lambda m, y, x, w: y - y.transpose(0, 1).mean(-1).reshape(2, 3, 1),
    "apart, greatest": lambda m, y, x, w: y.transpose(0, 1).reshape(2, 3, 16).amax(-1),
    "columns and a tensor": lambda m, y, x, w: F.silu(columns(y)) + w.view(2, 3, 16),
    "columns and a row": lambda m, y, x, w: F.silu(columns(y)) * w[0],
    "columns normed": lambda m, y, x, w: F.layer_norm(columns(y), (16,), w[0], w[1]),
    "columns multiplied": lambda m, y, x, w: m.second(columns(y)),
    "columns and a value": lambda m, y, x, w: columns(y) + m.second(x),
    "a norm over rows": lambda m, y, x, w: F.layer_norm(y.permute(2, 0, 1), (3,)),
    "a sum over rows multiplied": lambda m, y, x, w: m.second(y.reshape(6, 16).sum(0, keepdim=True)),
    "one row for all": lambda m, y, x, w: y.reshape(6, 16) * m.second(y.reshape(6, 16).mean(0, keepdim=True)),
    "multiplied and added": lambda m, y, x, w: m.second(y + w[0]) + y,
}


class Two(nn.Module):
    """A product, and what a case makes of it, a second one perhaps."""

    def __init__(self, rest: Rest) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16, bias=False)
        self.rest = rest

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return self.rest(self, self.first(x), x, w)


@pytest.mark.parametrize("case", CASES)
def test_order(case: str) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x, w = Two(CASES[case]), torch.randn(2, 3, 16, requires_grad=True), torch.randn(6, 16)
    given = [x, *model.parameters()]
    plain = model(x, w)
    tangent = torch.randn_like(plain)
    expected = torch.autograd.grad(plain, given, tangent, allow_unused=True)
    codetta.compile(model)
    with torch.no_grad():
        torch.testing.assert_close(model(x, w), plain, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(torch.autograd.grad(model(x, w), given, tangent, allow_unused=True), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_one_row_as_a_matrix() -> None:
    """Heads of the only row: as many dimensions as a matrix of rows and columns has, and none of them rows."""
    torch.manual_seed(0)
    linear = nn.Linear(16, 16)
    x = torch.randn(1, 16)

    def heads(x: Tensor) -> Tensor:
        return F.silu(linear(x)).view(4, 4)

    assert torch.allclose(codetta.compile(heads)(x), heads(x), atol=1e-6)


@pytest.mark.parametrize("gradients", [False, True])
def test_random_numbers_are_drawn_in_order(gradients: bool) -> None:
    """The same seed, the same numbers as eager, whatever needs them first."""
    torch._dynamo.reset()
    torch.manual_seed(0)

    def draws(m: Two, y: Tensor, x: Tensor, w: Tensor) -> Tensor:
        first = F.dropout(y, 0.5)
        second = torch.rand_like(y) + x
        return m.second(second * torch.rand_like(y)) * torch.rand_like(y) - first

    model, x = Two(draws), torch.randn(6, 16)
    expected = []
    for seed in range(2):
        torch.manual_seed(seed)
        expected.append(model(x, x))
    codetta.compile(model, options=codetta.Options(leftover="graph"))
    for seed in range(2):
        torch.manual_seed(seed)
        with torch.set_grad_enabled(gradients):
            torch.testing.assert_close(model(x, x), expected[seed], rtol=1e-4, atol=1e-5)
