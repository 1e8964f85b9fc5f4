"""Hooks of a compiled model: registered before its first call or after it, and taken away again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import codetta
from codetta.integrations.dynamo import backend_of


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def halved(module: nn.Module, given: Any, result: Tensor) -> Tensor:
    return result * 0.5


def nothing(module: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (given[0] * 0,)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("place", [None, 1], ids=["model", "layer"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_hooks_count_from_when_they_are_there(place: int | None, grad: bool, dynamic: bool | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    codetta.compile(model, dynamic=dynamic)
    module = model if place is None else model[place]
    x = torch.randn(3, 8)

    def check() -> None:
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(model(x), model._call_impl(x), rtol=1e-4, atol=1e-5)

    check()
    for handle in (module.register_forward_hook(halved), module.register_forward_pre_hook(nothing)):
        check()  # with both, then with one
        handle.remove()
    check()
    graphs = backend_of(model)
    assert graphs is not None
    before = graphs.graphs
    nn.Linear(2, 2).register_forward_hook(halved)  # of nobody's concern here
    check()
    assert graphs.graphs == before, "compiled anew without a reason"


def test_hooks_of_all_modules() -> None:
    model = codetta.compile(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
    x = torch.randn(3, 8)
    with torch.no_grad():
        plain = model(x)
        handle = nn.modules.module.register_module_forward_hook(
            lambda module, given, result: result + 1 if isinstance(module, nn.ReLU) else None
        )
        try:
            torch.testing.assert_close(model(x), plain + 1, rtol=1e-4, atol=1e-5)
        finally:
            handle.remove()
        torch.testing.assert_close(model(x), plain)
