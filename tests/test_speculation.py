"""Speculative launches: what is started too soon is what is asked for, or is dropped. The graph is a stand-in, so no GPU is needed."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import codetta
from codetta.runtime import speculation
from codetta.runtime.speculation import FUTILE, MOST, Kinds


class Function:
    """As runtime/bindings.py: asks for what was started, or runs, and teaches the call."""

    def __init__(self) -> None:
        self.launches: list[list[Any]] = []  # of the graph
        self.served = 0

    def __call__(self, args: list[Any]) -> tuple[Any, ...]:
        call = speculation.current()
        if call is not None:
            results = call.results(self, args)
            if results is not None:
                self.served += 1
                return results
        results = self.launch(args)
        if call is not None:
            call.learn(self, self.launch, args)
        return results

    def launch(self, args: list[Any]) -> tuple[Any, ...]:
        assert not torch.is_grad_enabled() or all(not each.requires_grad for each in args)
        self.launches.append(args)
        return (args[0] * args[1],)


@pytest.fixture(autouse=True)
def _only_codetta_between(monkeypatch: pytest.MonkeyPatch) -> None:
    """This file stands for the wrappers between a model's call and its plan."""
    monkeypatch.setattr(speculation, "_HARMLESS", [*speculation._HARMLESS, __file__])


class Model:
    def __init__(self) -> None:
        self.kinds, self.function = Kinds(), Function()
        self.weight = nn.Parameter(torch.randn(3))
        self.before: Callable[[], object] = lambda: None

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.kinds.call(self.forward, args, kwargs, mode=True)

    def forward(self, x: Tensor, more: object = None) -> Tensor:
        self.before()
        with torch.no_grad():
            (result,) = self.function([x, self.weight])
        return result


def test_a_call_that_came_before_is_started_first() -> None:
    model = Model()
    order: list[int] = []
    model.before = lambda: order.append(len(model.function.launches))
    for _ in range(3):
        x = torch.randn(3)
        assert torch.equal(model(x), x * model.weight)
    assert order == [0, 2, 3] and model.function.served == 2


def test_other_kinds_of_calls_are_not_started() -> None:
    model = Model()
    x = torch.randn(3)
    model(x)
    for args in ((torch.randn(1),), (x.double(),), (torch.randn(6)[::2],), (x, 1)):
        order: list[int] = []
        count = len(model.function.launches)
        model.before = lambda order=order: order.append(len(model.function.launches))
        assert torch.equal(model(*args), args[0] * model.weight)
        assert order == [count]
    with torch.no_grad():
        count = len(model.function.launches)
        model(x)
        assert order == [count - 1] or len(model.function.launches) == count + 1
    assert model.function.served == 0


def test_a_parameter_that_was_replaced_is_seen_and_not_kept_alive() -> None:
    model = Model()
    x = torch.randn(3)
    model(x)
    model(x)
    old = model.weight
    model.weight = nn.Parameter(torch.randn(3))
    assert torch.equal(model(x), x * model.weight)  # started with the old one, and dropped
    assert model.function.served == 1
    del old
    model.function.launches.clear()
    model(x)
    assert model.function.served == 2
    model.weight = nn.Parameter(torch.randn(3))
    model.function.launches.clear()
    gc.collect()
    assert torch.equal(model(x), x * model.weight)
    assert len(model.function.launches) == 1, "started with a parameter that is no more"


def test_what_is_never_of_use_is_left_alone() -> None:
    model = Model()
    x = torch.randn(3)
    for _ in range(FUTILE + 6):
        model.weight = nn.Parameter(torch.randn(3))
        assert torch.equal(model(x), x * model.weight)
    count = len(model.function.launches)
    model(x)
    model(x)
    assert len(model.function.launches) == count + 2 and model.function.served == 0


def test_operators_that_ran_before_forbid_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "_HARMLESS", [each for each in speculation._HARMLESS if each != __file__])
    model = Model()
    x = torch.randn(3)
    for _ in range(3):
        model(x)
    assert model.function.served == 0 and len(model.function.launches) == 3


def test_a_launch_that_fails_leaves_the_call_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    x = torch.randn(3)
    model(x)

    def fails(args: list[Any]) -> tuple[Any, ...]:
        raise torch.OutOfMemoryError("no memory")

    (expected,) = model.kinds.expected.values()
    expected.launch = fails
    assert torch.equal(model(x), x * model.weight)


def test_nothing_is_started_where_others_look_on() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    model = Model()
    x = torch.randn(3)
    model(x)
    model(x)
    with Looks():
        model(x)
    assert model.function.served == 1


def test_calls_within_calls() -> None:
    inner, outer = Model(), Model()
    x = torch.randn(3)
    outer.before = lambda: inner(x)
    for _ in range(4):
        assert torch.equal(outer(x), x * outer.weight)
    assert inner.function.served == outer.function.served == 3


def test_kinds_that_are_remembered_are_bounded() -> None:
    model = Model()
    for size in range(1, 2 * MOST):
        model.weight = nn.Parameter(torch.randn(size))
        model(torch.randn(size))
    assert len(model.kinds.expected) <= MOST and len(model.kinds.tries) <= MOST


def test_a_model_with_hooks_takes_the_usual_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook may write to what a launch reads."""
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU())
    compiled = codetta.compile(model, options=codetta.Options(leftover="graph"))
    calls: list[object] = []
    call = Kinds.call
    monkeypatch.setattr(Kinds, "call", lambda self, *args, **kwargs: calls.append(None) or call(self, *args, **kwargs))
    x = torch.randn(3, 8)
    with torch.no_grad():
        compiled(x)
        assert len(calls) == 1
        handle = model[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
        torch.testing.assert_close(compiled(x), model[1](nn.functional.linear(x + 1, model[0].weight, model[0].bias)))
        assert len(calls) == 1
        handle.remove()
        compiled(x)
        assert len(calls) == 2


def test_a_call_that_arrives_nowhere_is_not_started_again() -> None:
    model = Model()
    x = torch.randn(3)
    model(x)
    model.forward = lambda x: x  # type: ignore[method-assign]
    count = len(model.function.launches)
    for _ in range(3):
        assert model(x) is x
    assert len(model.function.launches) == count + 1


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """On a CPU, too; the list tells of the calls at which something had been started whether it served."""
    served: list[bool] = []
    results = speculation.Call.results

    def noted(call: speculation.Call, function: object, args: Any) -> Any:
        started = call.started is not None
        found = results(call, function, args)
        if started:
            served.append(found is not None)
        return found

    monkeypatch.setattr(speculation, "pays_on", lambda device: True)
    monkeypatch.setattr(speculation.Call, "results", noted)
    return served


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def _blocks() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    return model, copy.deepcopy(model)


def _close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_training_steps_are_started_with_the_parameters_of_their_time(everywhere: list[bool]) -> None:
    """Norms' gains are multiplied into weights: what was made of parameters is made anew after each step of the optimiser."""
    model, plain = _blocks()
    codetta.compile(model)
    steps = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, plain)]
    for _ in range(8):
        x = torch.randn(5, 32)
        for each, step in zip((model, plain), steps, strict=True):
            step.zero_grad()
            each(x).square().mean().backward()
            step.step()
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(
                ours, theirs, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
    assert everywhere == [True] * 5


@pytest.mark.parametrize("grad", [False, True])
def test_parameters_that_changed_between_calls(everywhere: list[bool], grad: bool) -> None:
    model, plain = _blocks()
    codetta.compile(model)

    def same(count: int = 1) -> None:
        for _ in range(count):
            x = torch.randn(5, 32)
            with torch.set_grad_enabled(grad):
                _close(model(x), plain(x))

    same(5)
    assert everywhere == [True, True]
    for each in (model, plain):
        with torch.no_grad():
            each[0].norm.weight.mul_(2)
            each[1].up.weight.mul_(-1)
            each[1].down.bias.data.add_(1)
    same(2)
    assert everywhere == [True] * 4
    fresh = nn.Parameter(torch.randn(64, 32))
    for each in (model, plain):
        each[0].up.weight = fresh
    same()
    assert everywhere[4:] in ([], [False])  # the old one may be gone, or have been launched with
    same(3)
    for each in (model, plain):
        each[0].down.weight.data = fresh.data.t().contiguous()
    same(3)
    for each in (model, plain):
        each.requires_grad_(False)
    same(5)
    assert everywhere[-2:] == [True, True]


def test_results_of_calls_are_their_own(everywhere: list[bool]) -> None:
    model, plain = _blocks()
    codetta.compile(model)
    inputs = [torch.randn(5, 32) for _ in range(6)]
    with torch.no_grad():
        results = [model(x) for x in inputs]
        for x, result in zip(inputs, results, strict=True):
            _close(result, plain(x))
    assert everywhere == [True] * 3


def test_several_sizes_and_modes_in_turns(everywhere: list[bool]) -> None:
    model, plain = _blocks()
    model[0].register_module("drop", nn.Dropout(0.0))
    codetta.compile(model)
    for turn in range(6):
        for rows in (1, 3, 7):
            x = torch.randn(rows, 32)
            for context in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
                with context:
                    _close(model(x), plain(x))
        model.train(turn % 2 == 0)
    assert everywhere == [True] * 15


def test_threads(everywhere: list[bool]) -> None:
    model, plain = _blocks()
    codetta.compile(model)
    inputs = [torch.randn(5, 32) for _ in range(40)]
    with torch.no_grad():
        for x in inputs[:4]:
            model(x)

    def call(x: Tensor) -> Tensor:
        with torch.no_grad():
            return model(x)

    with ThreadPoolExecutor(4) as pool:
        for x, result in zip(inputs, pool.map(call, inputs), strict=True):
            _close(result, plain(x))
    assert any(everywhere)
