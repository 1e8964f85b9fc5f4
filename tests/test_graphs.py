"""Random graphs, compiled: results and gradients against float64, beside eager's."""

from __future__ import annotations

import copy

import torch
from graphs import Graph, design
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import codetta


def found(model: nn.Module, x: Tensor, leaves: list[Tensor], tangents: list[Tensor] | None) -> list[Tensor | None]:
    """Results, and with tangents the gradients of x and of every parameter."""
    if tangents is None:
        with torch.no_grad():
            return list(model(x, leaves))
    results = list(model(x, leaves))
    return [*results, *torch.autograd.grad(results, [x, *model.parameters()], tangents, allow_unused=True)]


@given(seed=st.integers(0, 10**9), training=st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_graph(by_reference: None, seed: int, training: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(seed)
    made = design(seed)
    model, x = Graph(made), torch.randn(2, 3, 16, requires_grad=training)
    leaves = [torch.randn(shape) for shape in made.given]
    wide = copy.deepcopy(model).double()
    x_wide = x.detach().double().requires_grad_(training)
    tangents = [torch.randn(made.shapes[at]) for at in made.results] if training else None
    exact = found(wide, x_wide, [each.double() for each in leaves], tangents and [each.double() for each in tangents])
    usual = found(model, x, leaves, tangents)
    codetta.compile(model, dynamic=False, options=codetta.Options(leftover="graph"))
    for mine, theirs, truth in zip(found(model, x, leaves, tangents), usual, exact, strict=True):
        if truth is None:
            assert mine is None or not mine.any()
            continue
        assert mine is not None and theirs is not None and mine.shape == theirs.shape
        errors = [float((each - truth).detach().abs().max()) for each in (mine, theirs)]
        # Sums in another order, of numbers that may all but cancel.
        assert errors[0] <= 20 * errors[1] + 1e-4 * (float(truth.detach().abs().max()) + 1e-3), (errors, made)


def test_designs_are_different() -> None:
    names = {name for seed in range(50) for name, _ in design(seed).steps}
    assert len(names) > 15
