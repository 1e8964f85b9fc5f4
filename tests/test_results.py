"""What a compiled function hands out: memory of its own where eager's is, eager's strides, and nothing that may not be written to."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import codetta

LAYER = nn.Linear(16, 16)


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def copied(x: Tensor) -> Any:
    y = LAYER(x)
    return y, y.clone()


def copied_leftover(x: Tensor) -> Any:
    y = torch.cumsum(LAYER(x), -1)
    return y, y.clone(), y + 0


def computed_twice(x: Tensor) -> Any:
    return LAYER(x), LAYER(x)


def handed_out_twice(x: Tensor) -> Any:
    y = LAYER(x)
    return y, y


def seen_otherwise(x: Tensor) -> Any:
    y = LAYER(x)
    return y, y.view(-1), y.transpose(0, 1)


def turned_and_copied(x: Tensor) -> Any:
    y = LAYER(x)
    return y.transpose(0, 1).clone(), y


def made_contiguous(x: Tensor) -> Any:
    y = LAYER(x).transpose(0, 1)
    return y, y.contiguous(), torch.cumsum(y, 0)


def seen_as_rows(x: Tensor) -> Any:
    y = LAYER(x).transpose(0, 1)
    return y, y.reshape(-1, 16)


def of_the_input(x: Tensor) -> Any:
    return x.clone(), x.view(-1).clone(), x, LAYER(x)


FUNCTIONS = [
    copied, copied_leftover, computed_twice, handed_out_twice, seen_otherwise, turned_and_copied, made_contiguous, seen_as_rows, of_the_input
]  # fmt: skip


def memory(results: Any) -> Any:
    """Which results share memory, and their strides."""
    places = [each.untyped_storage().data_ptr() for each in results]
    return [[x == y for y in places] for x in places], [each.stride() for each in results]


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_results_lie_as_those_of_eager(function: Callable[[Tensor], Any], grad: bool) -> None:
    x = torch.randn(2, 3, 16)
    with torch.set_grad_enabled(grad):
        expected, found = function(x), codetta.compile(function)(x)
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert memory(found) == memory(expected)


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Turned(Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).transpose(1, 2)


@pytest.mark.parametrize("kind", [Block, Turned])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_result_may_be_written_to(kind: type[Block], dynamic: bool) -> None:
    torch.manual_seed(0)
    plain = kind()
    compiled = codetta.compile(copy.deepcopy(plain), dynamic=dynamic)
    found = []
    for model in (compiled, plain):
        x = torch.linspace(-1, 1, 2 * 3 * 32).view(2, 3, 32).requires_grad_()
        y = model(x)
        y += 1
        y.mul_(2)
        y.square().sum().backward()
        found.append([y.detach(), x.grad, *(each.grad for each in model.parameters())])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("last", [torch.sigmoid, lambda y: torch.softmax(y, -1)], ids=["program", "leftover"])
def test_a_result_that_gradients_need_may_not(last: Callable[[Tensor], Tensor]) -> None:
    """As in eager: it says so, and no gradient is wrong."""
    layer = nn.Linear(16, 16)

    def function(x: Tensor) -> Tensor:
        return last(layer(x))

    for each in (function, codetta.compile(function)):
        y = each(torch.randn(3, 16))
        y += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_gradients_that_are_equal_are_not_one() -> None:
    """Two parameters whose gradient is the same tensor: what is added to one later is not added to the other."""

    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.bias = nn.Linear(16, 8), nn.Linear(16, 8), nn.Parameter(torch.zeros(1, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.first(x) + self.second(x) + self.bias

    torch.manual_seed(0)
    plain = Same()
    compiled = codetta.compile(copy.deepcopy(plain))
    x = torch.randn(5, 16)
    for _ in range(3):
        for model in (compiled, plain):
            model(x).sum().backward()
    for mine, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)


def test_a_region_whose_inputs_lie_otherwise() -> None:
    """Operators lay out their results as their inputs lie, which programs store as rows; regions are compiled for certain strides."""
    transformers = pytest.importorskip("transformers")
    config = transformers.MambaConfig(
        vocab_size=99, hidden_size=32, state_size=4, num_hidden_layers=1, intermediate_size=32, time_step_rank=4
    )
    torch.manual_seed(0)
    plain = transformers.MambaForCausalLM(config).train()
    compiled = codetta.compile(copy.deepcopy(plain), options=codetta.Options(leftover="inductor"))
    tokens = torch.randint(0, 99, (5, 2))
    for model in (compiled, plain):
        model(input_ids=tokens, labels=tokens).loss.backward()
    for mine, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)


def test_a_region_is_given_an_operator_with_several_results() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            a, b = x.split([16, 8], -1)  # alone before the program, so in no region
            return torch.cumsum(b, 0) * torch.cumsum(self.linear(a), 0)

    model = Model()
    compiled = codetta.compile(copy.deepcopy(model), options=codetta.Options(leftover="inductor"))
    with torch.no_grad():
        for length in (5, 7, 9):
            x = torch.randn(length, 24)
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-4)
    for length in (5, 7):
        x = torch.randn(length, 24)
        for each in (compiled, model):
            each(x).sum().backward()
    torch.testing.assert_close(compiled.linear.weight.grad, model.linear.weight.grad, rtol=1e-4, atol=1e-4)


def test_a_region_that_inductors_cache_cannot_judge_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it holds is guarded by names of sizes, and a region may not be given all of them."""
    from torch._inductor import compile_fx, config

    inner, tried = compile_fx.compile_fx_inner, []

    def judged(*args: Any, **kwargs: Any) -> Any:
        tried.append(config.fx_graph_cache)
        if config.fx_graph_cache:
            raise KeyError("input_ids")
        return inner(*args, **kwargs)

    monkeypatch.setattr(compile_fx, "compile_fx_inner", judged)
    x = torch.randn(5, 16)
    with torch.no_grad(), config.patch(fx_graph_cache=True):
        compiled = codetta.compile(copied_leftover, options=codetta.Options(leftover="inductor"))
        torch.testing.assert_close(compiled(x), copied_leftover(x), rtol=1e-4, atol=1e-4)
    assert tried[:2] == [True, False]
