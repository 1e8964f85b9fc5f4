"""An exception inside of a compilation, at every stage: the graph is left to others, results and gradients are right, and it is said once."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import codetta
from codetta import compiler, dispatch, options
from codetta.errors import ArgumentError, LoweringError, Reason
from codetta.integrations import contain, dynamo
from codetta.runtime import ahead, writer


@pytest.fixture(autouse=True)
def _contained(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.delenv("CODETTA_RAISE")
    monkeypatch.setattr(contain, "_said", set())


class Model(nn.Module):
    """A block with attention and leftover operators, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out, self.head = (
            nn.RMSNorm(16),
            nn.Linear(16, 48),
            nn.Linear(16, 16),
            nn.Linear(16, 11),
        )

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        y = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], is_causal=True)[:, 0]
        x = x + torch.cumsum(torch.cumsum(self.out(y), -1).cos(), -2)
        logits = self.head(x)
        return logits if labels is None else F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class InjectedError(RuntimeError):
    pass


def fail(*args: Any, **kwargs: Any) -> Any:
    raise InjectedError("injected")


# Where an exception is raised, and how the warning names that stage.
STAGES: dict[str, tuple[Any, str, str]] = {
    "laws before tracing": (dynamo, "stays_whole", "rewriting"),
    "the loss": (dynamo, "loss_takes_the_head", "rewriting"),
    "rewriting": (compiler, "without_repeats", "rewriting"),
    "capture": (compiler, "capture", "capture"),
    "partition": (compiler, "partition", "partition"),
    "lowering": (compiler, "why_never", "lowering"),
    "kernels": (ahead, "stand_ins", "kernels"),
    "writing": (writer.Writer, "_launch", "writing"),
    "regions": (dynamo, "by_inductor", "region compilation"),
    "a call": (writer, "launch", "a call of the plan"),
}


def outcomes(model: nn.Module, training: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for batch, length in ((2, 5), (3, 4), (2, 5)):
        x, labels = (
            torch.randn(batch, length, 16, generator=generator),
            torch.randint(0, 11, (batch, length), generator=generator),
        )
        if training:
            result = model(x.requires_grad_(), labels)
            found += [result.detach(), *torch.autograd.grad(result, [x, *model.parameters()])]
        else:
            with torch.no_grad():
                found.append(model(x))
    return found


def check(training: bool, stage: str, **how: Any) -> None:
    torch.manual_seed(0)
    plain = Model()
    compiled = codetta.compile(copy.deepcopy(plain), options=codetta.Options(leftover="inductor"), **how)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = outcomes(compiled, training)
    for mine, theirs in zip(found, outcomes(plain, training), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    ours = [str(each.message) for each in said if "codetta" in str(each.message)]
    assert len(ours) == 1, ours
    assert f"codetta failed in {stage}: " in ours[0] and "CODETTA_DEBUG=1" in ours[0] and "codetta env" in ours[0]


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("place", STAGES)
def test_an_exception_at_every_stage(place: str, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    module, name, stage = STAGES[place]
    monkeypatch.setattr(module, name, fail)
    check(training, stage)


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_inductor_fails_as_well(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    monkeypatch.setattr(compile_fx, "compile_fx", fail)
    monkeypatch.setattr(compiler, "partition", fail)
    check(training, "partition")


@pytest.mark.parametrize("variable", ["CODETTA_DEBUG", "CODETTA_RAISE"])
def test_it_is_raised_for_those_who_look_for_it(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(compiler, "partition", fail)
    with pytest.raises(RuntimeError, match="injected"):
        outcomes(codetta.compile(Model()), False)


def test_a_debug_level_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODETTA_DEBUG", "x")
    with pytest.raises(ArgumentError, match="a number from 0 to 4"):
        options.debug_level()


@pytest.mark.parametrize("where", ["partition", "call"])
def test_memory_that_runs_out_is_the_caller_s(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def scarce(*args: Any, **named: Any) -> Any:
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(*((compiler, "partition") if where == "partition" else (writer, "launch")), scarce)
    monkeypatch.setattr(contain, "warn", fail)
    model = codetta.compile(Model())
    with pytest.raises(RuntimeError, match="no memory left"):
        outcomes(model, False)


def test_what_eager_refuses_is_the_caller_s() -> None:
    """As eager says it, and without a warning: a label that no class has."""
    x, labels = torch.randn(2, 5, 16), torch.full((2, 5), 11)
    plain = Model()
    compiled = codetta.compile(copy.deepcopy(plain))
    for grad in (False, True):
        with torch.set_grad_enabled(grad), warnings.catch_warnings():
            warnings.filterwarnings("error", message="codetta")
            with pytest.raises(IndexError) as expected:
                plain(x, labels)
            with pytest.raises(IndexError) as found:
                compiled(x, labels)
        assert str(found.value) == str(expected.value)


def test_what_has_been_written_over_is_not_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer that is counted up would be counted twice: the exception is the caller's to see."""

    class Counts(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return torch.relu(self.layer(x))

    monkeypatch.setattr(writer, "launch", fail)
    with torch.no_grad(), pytest.raises(RuntimeError, match="injected"):
        codetta.compile(Counts())(torch.randn(3, 8))


def test_a_kernel_that_no_compiler_takes_is_none_of_these(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs on the reference backend, which is said there."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise LoweringError("backend", [Reason("compiler", "failed")])

    monkeypatch.setattr(dispatch.load_backend("cpu"), "run", refused)
    monkeypatch.setattr(dispatch.load_backend("cpu"), "build", refused)
    plain: Callable[..., Any] = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    x = torch.randn(3, 16)
    with torch.no_grad():
        expected = plain(x)
        with pytest.warns(RuntimeWarning, match="runs on the reference backend"):
            found = codetta.compile(plain)(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
