"""Parameters that are read as rows beside a product: of several dimensions, in whatever order, in parts, of whatever type."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import codetta


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


class Table(nn.Module):
    """A product seen as six heads of sixteen columns, with a parameter beside it."""

    def __init__(self, shape: tuple[int, ...], how: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.table, self.layer, self.how = nn.Parameter(torch.randn(shape)), nn.Linear(16, 96), how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.layer(x).reshape(-1, 6, 16), self.table)


TABLES: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "one head": ((6, 16), lambda y, table: (table + y)[:, 1]),
    "several heads": ((1, 6, 16), lambda y, table: (table * y)[:, 2:5]),
    "columns of all heads": ((6, 16), lambda y, table: (table * y)[..., 3:7]),
    "one column": ((6, 1), lambda y, table: (table * y)[:, 4]),
    "turned": ((16, 6), lambda y, table: y.transpose(1, 2) * table),
    "turned, one head": ((16, 6), lambda y, table: (y.transpose(1, 2) * table)[:, :, 2]),
    "turned, one column": ((16, 6), lambda y, table: (y.transpose(1, 2) * table)[:, 3]),
    "turned back": ((16, 6), lambda y, table: y * table.mT),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_several_dimensions(name: str) -> None:
    torch.manual_seed(0)
    plain = Table(*TABLES[name])
    compiled = codetta.compile(copy.deepcopy(plain))
    x = torch.randn(5, 16)
    results = [
        [each(x), *torch.autograd.grad(each(x).sin().sum(), list(each.parameters()))] for each in (compiled, plain)
    ]
    for mine, theirs in zip(*results, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), plain(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("conjugate", [False, True])
def test_complex_tables(conjugate: bool) -> None:
    """Rotations as complex numbers, made of a buffer: made anew when it changes, and only then."""

    class Rotary(nn.Module):
        frequencies: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 16)
            self.register_buffer("frequencies", torch.rand(8))

        def forward(self, x: Tensor) -> Tensor:
            angles = torch.arange(x.shape[-2])[:, None] * self.frequencies
            turns = torch.polar(torch.ones_like(angles), angles)
            turns = turns.conj() if conjugate else turns
            return torch.view_as_real(torch.view_as_complex(self.layer(x).unflatten(-1, (8, 2))) * turns).flatten(-2)

    plain = Rotary()
    compiled = codetta.compile(copy.deepcopy(plain))
    x = torch.randn(2, 5, 16)
    for _ in range(2):
        for model in (compiled, plain):
            model.zero_grad()
            model(x).sum().backward()
        torch.testing.assert_close(compiled.layer.weight.grad, plain.layer.weight.grad, rtol=1e-4, atol=1e-4)
        for model in (compiled, plain):
            model.frequencies.mul_(2)
