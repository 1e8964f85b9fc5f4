"""Things that go wrong: numbers that are not finite, memory that runs out, compilers that fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from zoo import ZOO, outputs

import codetta
from codetta import dispatch, library
from codetta.backends.triton import TritonBackend
from codetta.errors import LoweringError


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


class Small(nn.Module):
    """A norm, a gate and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate, self.up, self.down = (
            nn.RMSNorm(16),
            nn.Linear(16, 24),
            nn.Linear(16, 24),
            nn.Linear(24, 16),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def results(model: nn.Module, x: Tensor) -> list[Tensor]:
    y = model(x)
    return [y.detach(), *torch.autograd.grad(y.sum(), list(model.parameters()))]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["input", "weight"])
def test_numbers_that_are_not_finite(bad: float, where: str) -> None:
    """They are where eager has them, and nowhere else: in the results and in all gradients."""
    torch.manual_seed(0)
    model, x = Small(), torch.randn(3, 5, 16)
    with torch.no_grad():
        (x[1, 2] if where == "input" else model.up.weight[3]).fill_(bad)
    expected = results(model, x)
    codetta.compile(model)
    for mine, theirs in zip(results(model, x), expected, strict=True):
        assert torch.equal(mine.isfinite(), theirs.isfinite())
        good = theirs.isfinite()
        torch.testing.assert_close(mine[good], theirs[good], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_bad_token_stays_where_it_is(name: str) -> None:
    """An embedding that is NaN spoils the positions behind it, as attention is causal, and the other sample not at all."""
    entry = ZOO[name]
    model = entry.model()
    args, named = entry.example(2, 6)
    table = model.get_input_embeddings()
    model.set_output_embeddings(nn.Linear(table.weight.shape[1], table.weight.shape[0], bias=False))
    with torch.no_grad():
        table.weight[named["input_ids"][0, 3]] = torch.nan
        expected = outputs(model(*args, **named))[0]
        codetta.compile(model)
        found = outputs(model(*args, **named))[0]
    assert expected.isnan().any() and not expected.isnan().all()
    assert torch.equal(found.isnan(), expected.isnan())


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_out_of_memory(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch that gets no memory says so; the next call of the same model is as good as any."""
    torch.manual_seed(0)
    model, x = Small(), torch.randn(3, 5, 16)
    expected = results(model, x)
    codetta.compile(model)
    results(model, x)
    run, launches = dispatch.run, []

    def scarce(*args: Any, **named: Any) -> Any:
        launches.append(args)
        if len(launches) == (2 if when == "forward" else 4):
            raise torch.OutOfMemoryError("no memory left")
        return run(*args, **named)

    monkeypatch.setattr(dispatch, "run", scarce)
    with pytest.raises(torch.OutOfMemoryError):
        results(model, x)
    for mine, theirs in zip(results(model, x), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def call(backend: str | None = None) -> Tensor:
    torch.manual_seed(0)
    found: Tensor = library.bias_gelu(torch.randn(40, 32), torch.randn(48, 32), bias=torch.randn(48), backend=backend)
    return found


@pytest.mark.parametrize("all_fail", [False, True])
def test_a_kernel_that_does_not_compile(all_fail: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next tile is tried; without one, the reference runs the program and the reason is said. Who asks for Triton by name is told."""
    expected = call("reference")
    backend, tried = TritonBackend(), []
    launch = backend.launch

    def compile(program: Any, binding: Any, tile: Any) -> None:
        if all_fail or tile == tried[0]:
            raise RuntimeError("PassManager::run failed")

    def failing(program: Any, binding: Any, tile: Any) -> Any:
        tried.append(tile)
        compile(program, binding, tile)
        return launch(program, binding, tile)

    monkeypatch.setattr(backend, "launch", failing)
    monkeypatch.setattr(backend, "compile", compile)
    load = dispatch.load_backend
    monkeypatch.setattr(dispatch, "load_backend", lambda name: backend if name == "triton" else load(name))
    monkeypatch.setattr(dispatch, "_fast", lambda device: "triton")
    monkeypatch.setattr(dispatch, "_said", set())
    if all_fail:
        with pytest.warns(RuntimeWarning, match="reference backend: compiler: .* PassManager::run failed"):
            found = call()
        assert len(set(tried)) == len(tried) > 1
        with pytest.raises(LoweringError):
            call("triton")
    else:
        found = call()
        assert len(tried) == 2 and tried[0] != tried[1]
        call()
        assert tried[2] == tried[1]  # the first is not tried again
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_launch_that_fails_is_no_compiler_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = TritonBackend()

    def failing(program: Any, binding: Any, tile: Any) -> Any:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(backend, "launch", failing)
    monkeypatch.setattr(dispatch, "load_backend", lambda name: backend)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        call("triton")
