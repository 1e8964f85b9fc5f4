"""Cross-entropy of a linear head: against F.cross_entropy in float64, with every option, chunk and kind of label."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import ZOO

import codetta
from codetta.integrations.dynamo import backend_of
from codetta.integrations.logits import Logits
from codetta.runtime import loss as module
from codetta.steps import Run


def plain(x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, how: dict[str, Any]) -> Tensor:
    how = dict(how)
    cap, z, classes = how.pop("softcap", None), how.pop("z_loss", 0.0), how.pop("class_weight", None)
    reduction, ignore = how.get("reduction", "mean"), how.get("ignore_index", -100)
    logits = F.linear(x, weight, bias).reshape(-1, weight.shape[0])
    if cap is not None:
        logits = cap * torch.tanh(logits / cap)
    classes = None if classes is None else classes.to(logits.dtype)
    loss = F.cross_entropy(logits, target.reshape(-1), classes, **how)
    extra = torch.where(target.reshape(-1) == ignore, 0.0, z * torch.logsumexp(logits, -1) ** 2)
    if reduction == "none":
        return (loss + extra).reshape(target.shape)
    count = (target != ignore).sum() if classes is None else classes[target[target != ignore]].sum()
    return loss + (extra.sum() / count if reduction == "mean" else extra.sum())


def gradients(loss: Tensor, leaves: list[Tensor], seed: int = 1) -> list[Tensor]:
    torch.manual_seed(seed)
    return list(torch.autograd.grad(loss, leaves, torch.rand_like(loss) + 0.5))


def case(rows: int, width: int, classes: int, dtype: torch.dtype, ignored: float = 0.2) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(rows * 31 + classes)
    leaves = [torch.randn(rows, width), torch.randn(classes, width) * 0.5, torch.randn(classes)]
    target = torch.randint(0, classes, (rows,))
    target[1:][torch.rand(rows - 1) < ignored] = -100
    return [each.to(dtype).requires_grad_() for each in leaves], target


OPTIONS: list[dict[str, Any]] = [
    {},
    {"reduction": "sum"},
    {"reduction": "none"},
    {"label_smoothing": 0.1},
    {"softcap": 3.0},
    {"z_loss": 1e-2},
    {"class_weight": True},
    {"class_weight": True, "label_smoothing": 0.2, "z_loss": 1e-3, "softcap": 5.0},
    {"class_weight": True, "label_smoothing": 0.2, "z_loss": 1e-3, "softcap": 5.0, "reduction": "none"},
    {"ignore_index": 2},
]


@pytest.mark.parametrize("how", OPTIONS, ids=lambda each: "-".join(each) or "plain")
@pytest.mark.parametrize("rows", [1, 37])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_options(
    how: dict[str, Any], rows: int, biased: bool, recompute: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float64, in chunks of eight rows or strips of eight classes: the same numbers as PyTorch's, the loss and all gradients."""
    for name, value in {"ROWS": 8, "CHUNK": 1, "COLS": 8, "STRIP": 1}.items():
        monkeypatch.setattr(module, name, value)
    (x, weight, bias), target = case(rows, 12, 29, torch.float64)
    if "ignore_index" in how:
        target = target.clamp_min(0)
        target[0] = 3
    how = how | ({"class_weight": torch.rand(29) + 0.1} if "class_weight" in how else {})
    leaves = [x, weight, bias] if biased else [x, weight]
    ours = codetta.linear_cross_entropy(x, weight, target, bias if biased else None, recompute=recompute, **how)
    theirs = plain(x, weight, target, bias if biased else None, how)
    torch.testing.assert_close(ours, theirs)
    for got, expected in zip(gradients(ours, leaves), gradients(theirs, leaves), strict=True):
        torch.testing.assert_close(got, expected)
    with torch.no_grad():
        again = codetta.linear_cross_entropy(x, weight, target, bias if biased else None, **how)
    torch.testing.assert_close(again, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@given(
    rows=st.integers(1, 70), classes=st.integers(1, 90), ignored=st.sampled_from([0.0, 0.5]), recompute=st.booleans()
)
@settings(max_examples=12, deadline=None)
def test_budget(dtype: torch.dtype, rows: int, classes: int, ignored: float, recompute: bool) -> None:
    """At most twice as far from float64 as PyTorch is on the same numbers."""
    (x, weight, bias), target = case(rows, 24, classes, dtype, ignored)
    wide = [each.detach().double().requires_grad_() for each in (x, weight, bias)]
    truth = plain(*wide[:2], target, wide[2], {})
    eager = F.cross_entropy(F.linear(x, weight, bias).float(), target)
    ours = codetta.linear_cross_entropy(x, weight, target, bias, recompute=recompute)
    found = [
        [each, *torch.autograd.grad(each, leaves)]
        for each, leaves in ((truth, wide), (eager, [x, weight, bias]), (ours, [x, weight, bias]))
    ]
    for exact, usual, mine in zip(*found, strict=True):
        scale = exact.norm().clamp_min(1e-6)
        error, theirs = ((each.double() - exact).norm() / scale for each in (mine, usual))
        assert error <= 2 * theirs + 16 * torch.finfo(dtype).eps, (error, theirs)


@pytest.mark.parametrize("count", [1, 1 << 20, 3_500_001])
def test_rounding_in_place(count: int) -> None:
    wide = torch.randn(1, count)
    wanted = wide.bfloat16()
    found = module._narrowed(wide, torch.bfloat16)
    assert found.data_ptr() == wide.data_ptr() and found.equal(wanted)


def test_many_chunks_add_up_in_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weight's gradient of many chunks, each small against the sum: rounded once."""
    monkeypatch.setattr(module, "ROWS", 8)
    monkeypatch.setattr(module, "CHUNK", 1)
    (x, weight, _), target = case(512, 16, 5, torch.bfloat16, 0.0)
    ours = torch.autograd.grad(codetta.linear_cross_entropy(x, weight, target), weight)[0]
    wide = [each.detach().double().requires_grad_() for each in (x, weight)]
    exact = torch.autograd.grad(plain(*wide, target, None, {}), wide[1])[0]
    eager = torch.autograd.grad(F.cross_entropy(F.linear(x, weight).float(), target), weight)[0]
    assert (ours - exact).norm() <= 2 * (eager - exact).norm()


def test_scaled_loss() -> None:
    """fp16 with the scaling that goes with it: gradients of a mean over many rows would be too small without."""
    torch.manual_seed(0)
    x, weight = (torch.randn(32768, 16) * 0.1).half().requires_grad_(), torch.randn(64, 16).half().requires_grad_()
    target, scale = torch.randint(0, 64, (32768,)), 2.0**16
    wide = [each.detach().double().requires_grad_() for each in (x, weight)]
    exact = torch.autograd.grad(plain(*wide, target, None, {}) * scale, wide)
    eager = torch.autograd.grad(F.cross_entropy(F.linear(x, weight).float(), target) * scale, (x, weight))
    found = torch.autograd.grad(codetta.linear_cross_entropy(x, weight, target) * scale, (x, weight))
    for mine, usual, truth in zip(found, eager, exact, strict=True):
        error, theirs = ((each.double() - truth).norm() / truth.norm() for each in (mine, usual))
        assert error <= 2 * theirs, (error, theirs)


def test_labels() -> None:
    (x, weight, _), target = case(9, 8, 6, torch.float64, 0.0)
    shifted = codetta.linear_cross_entropy(x.view(3, 3, 8), weight, target.view(3, 3), shift=True)
    kept = (x.view(3, 3, 8)[:, :-1].reshape(-1, 8), target.view(3, 3)[:, 1:].reshape(-1))
    torch.testing.assert_close(shifted, F.cross_entropy(F.linear(kept[0], weight), kept[1]))
    nobody = codetta.linear_cross_entropy(x, weight, torch.full_like(target, -100))
    assert nobody.isnan()
    assert all(each.eq(0).all() for each in gradients(nobody, [x, weight]))
    empty = codetta.linear_cross_entropy(x[:0], weight, target[:0], reduction="sum")
    assert empty == 0 and gradients(empty, [weight])[0].eq(0).all()
    empty = codetta.linear_cross_entropy(x[:0], weight, target[:0], reduction="none")
    assert empty.shape == (0,) and gradients(empty, [weight])[0].eq(0).all()
    with pytest.raises(RuntimeError):
        codetta.linear_cross_entropy(x, weight, torch.full_like(target, 6))


def test_nothing_is_made_for_frozen_weights() -> None:
    (x, weight, _), target = case(9, 8, 6, torch.float64, 0.0)
    expected = torch.autograd.grad(F.cross_entropy(F.linear(x, weight), target), x)[0]
    found = codetta.linear_cross_entropy(x, weight.detach(), target)
    torch.testing.assert_close(torch.autograd.grad(found, x)[0], expected)


def test_values_that_are_not_finite() -> None:
    (x, weight, _), target = case(4, 8, 6, torch.float32, 0.0)
    with torch.no_grad():
        x[1] = torch.nan
    ours, theirs = (
        codetta.linear_cross_entropy(x, weight, target, reduction="none"),
        F.cross_entropy(F.linear(x, weight), target, reduction="none"),
    )
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    for mine, usual in zip(gradients(ours, [x, weight]), gradients(theirs, [x, weight]), strict=True):
        torch.testing.assert_close(mine, usual, equal_nan=True)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"weight": torch.zeros(6, 7)}, "weight"),
        ({"target": torch.zeros(4)}, "target"),
        ({"target": torch.zeros(5, dtype=torch.int64)}, "target"),
        ({"bias": torch.zeros(5)}, "bias"),
        ({"reduction": "median"}, "reduction"),
        ({"label_smoothing": 2.0}, "label_smoothing"),
    ],
)
def test_refusals(wrong: dict[str, Any], what: str) -> None:
    given = {"x": torch.zeros(4, 8), "weight": torch.zeros(6, 8), "target": torch.zeros(4, dtype=torch.int64)} | wrong
    with pytest.raises(codetta.ArgumentError, match=what):
        codetta.linear_cross_entropy(**given)


# ---- in compiled models --------------------------------------------------------------------------------------------


class Speaks(nn.Module):
    """A head with a loss, written in one of the ways in which people write it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.body, self.head = how, nn.Linear(12, 12), nn.Linear(12, 19, bias=how == "bias")

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        logits = self.head(torch.tanh(self.body(x)))
        match self.how:
            case "shifted":
                loss = F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, 19), target[..., 1:].reshape(-1))
            case "capped":
                logits = torch.tanh(logits / 2.0) * 2.0
                loss = F.cross_entropy(logits.float().view(-1, 19), target.view(-1), label_smoothing=0.1)
            case "used":
                loss = F.cross_entropy(logits.flatten(0, 1), target.flatten()) + logits.square().mean()
            case "alone":
                return (F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="sum"),)
            case _:
                loss = nn.CrossEntropyLoss()(logits.view(-1, 19).float(), target.view(-1))
        return loss, logits


@pytest.mark.parametrize("how", ["plain", "bias", "shifted", "capped", "used", "alone"])
def test_compiled(how: str) -> None:
    """The loss and all gradients; logits are there for whoever looks, and not made before."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Speaks(how).double(), torch.randn(2, 5, 12, dtype=torch.float64)
    target = torch.randint(0, 19, (2, 5))
    target[0, 0] = -100
    found = []
    for compiled in (False, True):
        if compiled:
            codetta.compile(model)
        loss, *logits = model(x, target)
        found.append(
            [loss, *torch.autograd.grad(loss, list(model.parameters())), *(each.detach() + 0 for each in logits)]
        )
        if compiled and logits:
            assert isinstance(logits[0], Logits) == (how != "used")
            assert logits[0].shape == (2, 5, 19) and logits[0].dtype == torch.float64
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)
    with torch.no_grad():
        loss, *logits = model(x, target)
        assert not any(isinstance(each, Logits) for each in logits)
        torch.testing.assert_close(loss, found[0][0].detach())


def test_logits_are_differentiable_too() -> None:
    """Whoever makes another loss of them gets the sum of both gradients."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x, target = (
        Speaks("plain").double(),
        torch.randn(2, 5, 12, dtype=torch.float64),
        torch.randint(0, 19, (2, 5)),
    )
    found = []
    for compiled in (False, True):
        if compiled:
            codetta.compile(model)
        loss, logits = model(x, target)
        found.append(torch.autograd.grad(loss + logits.float().sigmoid().sum(), list(model.parameters())))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)


def test_logits_after_the_step() -> None:
    """They would be those of other weights."""
    torch._dynamo.reset()
    model, x, target = Speaks("plain"), torch.randn(2, 5, 12), torch.randint(0, 19, (2, 5))
    codetta.compile(model)
    seen, missed = model(x, target)[1], model(x, target)[1]
    before = seen.argmax(-1)
    with torch.no_grad():
        model.head.weight.mul_(-1.0)
    assert torch.equal(seen.argmax(-1), before)
    assert missed.shape == (2, 5, 19)
    with pytest.raises(codetta.CodettaError, match="logits='always'"):
        missed.argmax(-1)
    torch._dynamo.reset()
    always = codetta.compile(Speaks("plain"), options=codetta.Options(logits="always"))
    assert not isinstance(always(x, target)[1], Logits)
    with pytest.raises(codetta.ArgumentError, match="logits"):
        codetta.Options(logits="never")


def test_autocast() -> None:
    """Products in bfloat16, loss and gradients in float32; logits, too, are those of the autocast that was on."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x, target = Speaks("capped"), torch.randn(2, 5, 12), torch.randint(0, 19, (2, 5))
    found = []
    for compiled in (False, True):
        if compiled:
            codetta.compile(model)
        with torch.autocast("cpu", torch.bfloat16):
            loss, logits = model(x, target)
        assert loss.dtype == torch.float32 and logits.dtype == torch.bfloat16
        found.append([loss, *torch.autograd.grad(loss, list(model.parameters())), logits.detach() + 0])
    assert isinstance(logits, Logits)
    for mine, theirs in zip(*found, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=0.03, atol=0.01)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_models(name: str) -> None:
    """Their own losses, whatever they say on the way there: one graph, with the loss and its head in one call."""
    torch._dynamo.reset()
    entry = ZOO[name]
    model = entry.model()
    args, named = entry.example(2, 12)
    expected = model(*args, **named, labels=named["input_ids"]).loss
    codetta.compile(model)
    found = model(*args, **named, labels=named["input_ids"]).loss
    torch.testing.assert_close(found, expected)
    backend = backend_of(model)
    assert backend is not None
    (training,) = backend.trainings
    assert "codetta.linear_loss.default" in {
        str(step.target.target) for step in training.plan.steps if isinstance(step, Run)
    }
