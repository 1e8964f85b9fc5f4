"""What no program covers runs as it did: control flow that depends on data, odd tensors, odd types; and the report says so."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import codetta
from codetta.integrations.dynamo import backend_of
from codetta.program import Program


def compare(model: nn.Module, *inputs: Any) -> nn.Module:
    """The compiled model gives what it gave before."""
    with torch.no_grad():
        expected = model(*inputs)
        compiled = codetta.compile(model)
        got = compiled(*inputs)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    return compiled


class Branches(nn.Module):
    """Another layer for another sign: the graph breaks where the number is looked at."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.plus, self.minus = nn.Linear(12, 12), nn.Linear(12, 8), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return self.plus(x) if x.mean() > 0.5 else self.minus(x)


@pytest.mark.parametrize("scale", [0.01, 10.0])
def test_control_flow_that_depends_on_data(scale: float) -> None:
    torch.manual_seed(0)
    model = compare(Branches(), torch.randn(5, 12) * scale)
    backend = backend_of(model)
    assert backend is not None and len(backend.executors) == 2, "one graph before the question and one behind it"


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(12, 12)
        self.register_buffer("graph", torch.eye(6).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return torch.sparse.mm(self.graph, torch.relu(self.dense(x)))  # type: ignore[no-any-return, no-untyped-call]


def test_sparse_tensor() -> None:
    compare(Sparse(), torch.randn(6, 12))


class Loop(nn.Module):
    """As many layers as a number in a tensor says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        for _ in range(int(times)):
            x = torch.tanh(self.layer(x))
        return x


def test_loop_whose_length_is_in_a_tensor() -> None:
    compare(Loop(), torch.randn(3, 8), torch.tensor(3))


class Tagged(Tensor):
    """A subclass that leaves everything to the tensor under it."""

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def test_tensor_subclass() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 4))
    x = torch.randn(5, 12)
    with torch.no_grad():
        expected = model(x)
        got = codetta.compile(model)(x.as_subclass(Tagged))
    torch.testing.assert_close(got.as_subclass(Tensor), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_types_without_kernels(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4)).to(dtype)
    x = torch.randn(5, 12, dtype=dtype)
    with torch.no_grad():
        expected = model(x)
    report = codetta.explain(model, x)
    assert not report.programs
    assert any("mm" in each["op"] for each in report.refusals), "the report says why"
    with torch.no_grad():
        torch.testing.assert_close(codetta.compile(model)(x), expected)


def test_quantised_layer() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    quantised = torch.ao.quantization.quantize_dynamic(plain, {nn.Linear}, dtype=torch.qint8)
    compare(quantised, torch.randn(4, 16))


def test_activations_times_activations() -> None:
    """Both sides of the second product change at every call: it is no weight, and stays with the graph."""

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(12, 8), nn.Linear(12, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) @ self.k(x).T

    model, x = Scores(), torch.randn(7, 12)
    report = codetta.explain(model, x)
    assert len(report.programs) == 1 and [each["op"] for each in report.leftover_ops] == ["aten.mm"]
    assert "not a weight" in report.leftover_ops[0]["reason"]
    compare(model, x)


@pytest.mark.parametrize("again", [False, True])
def test_what_the_graph_makes_of_a_program_comes_too_late_for_it(again: bool) -> None:
    """A running sum of the product is added, scaled, to the product itself: no program can do that, and none must try."""

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            z = torch.add(y * 3.0, torch.cumsum(y, -1), alpha=2.0)
            # Behind the second product it is early enough, unless it depends on that as well.
            w = self.second(y)
            return z * w if not again else torch.add(z * w, torch.cumsum(w, -1), alpha=0.5)

    torch.manual_seed(0)
    model, x = Sums(), torch.randn(5, 12)
    assert len(codetta.explain(model, x).programs) == 2
    compare(model, x)


def test_no_compiler_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compiler the products stay with PyTorch, whose own are faster than the reference, and the report says why."""
    from codetta.backends.cpu import Cpu
    from codetta.errors import Reason

    monkeypatch.setattr(Cpu, "why_never", lambda self, program, device, rows: [Reason("compiler", "none is here")])
    model = nn.Sequential(
        nn.LayerNorm(12), nn.Linear(12, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4), nn.LayerNorm(4)
    )
    report = codetta.explain(model, torch.randn(5, 12))
    assert not report.programs and all("none is here" in each["reason"] for each in report.refusals)
    compare(model, torch.randn(5, 12))


def test_stages_that_no_backend_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms go back to the graph, and the products stay programs."""
    from codetta.backends.cpu import Cpu
    from codetta.errors import Reason

    plain = Cpu.why_never

    def why_never(self: Cpu, program: Program, device: torch.device, rows: int) -> list[Reason]:
        return plain(self, program, device, rows) if program.multiplies else [Reason("stage", "none here")]

    monkeypatch.setattr(Cpu, "why_never", why_never)
    model = nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 16), nn.LayerNorm(16), nn.LayerNorm(16), nn.Linear(16, 4))
    report = codetta.explain(model, torch.randn(5, 12))
    assert len(report.programs) == 2 and all(program.products for program in report.programs)
    compare(model, torch.randn(5, 12))


def test_an_empty_batch() -> None:
    compare(nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 4)), torch.randn(0, 12))
    compare(nn.Sequential(nn.LayerNorm(12), nn.Linear(12, 16), nn.LayerNorm(16)), torch.randn(0, 12))


def test_outputs_that_are_inputs() -> None:
    """A model may give back what it was given, a parameter, or the same thing twice."""

    class Echo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            y = self.layer(x)
            return x, y, y, self.layer.weight, y.transpose(0, 1), x.clone()

    torch.manual_seed(0)
    model, x = Echo(), torch.randn(3, 8)
    compiled = compare(model, x)
    with torch.no_grad():
        copied = compiled(x)[-1]
    copied.zero_()
    assert x.abs().sum() > 0, "a copy is a copy"


def test_written_in_place() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            y = self.layer(x)
            y.mul_(2.0).add_(self.count)
            return y

    torch.manual_seed(0)
    model, x = Writes(), torch.randn(3, 8)
    with torch.no_grad():
        plain = model.layer(x) * 2
        compiled = codetta.compile(model)
        for call in (1, 2, 3):
            torch.testing.assert_close(compiled(x), plain + call, rtol=1e-4, atol=1e-4)
    assert model.count == 3


def test_a_model_that_dynamo_cannot_follow_is_said_once() -> None:
    model, x = nn.LSTM(16, 16), torch.randn(5, 2, 16)
    report = codetta.explain(model, x)
    assert not report.graphs and "LSTM" in report.breaks[0]
    assert "no graph: everything runs as it would without codetta" in str(report)
    compiled = codetta.compile(copy.deepcopy(model))
    with pytest.warns(RuntimeWarning, match="nothing of LSTM was compiled"):
        torch.testing.assert_close(compiled(x)[0], model(x)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compiled(x)
        codetta.compile(nn.Linear(16, 8))(x)
        codetta.compile(nn.Identity())(x)  # nothing to compile, and nothing in the way


def test_a_graph_that_breaks_is_in_the_report() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.relu(x @ w)
        torch._dynamo.graph_break()
        return torch.relu(y @ w)

    report = codetta.explain(function, torch.randn(3, 8), torch.randn(8, 8))
    assert report.graphs == 2 and len(report.breaks) == 1
    assert "the graph breaks (2 graphs):" in str(report) and "test_fallback.py" in report.breaks[0]
