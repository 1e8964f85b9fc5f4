"""Operands of several types: what eager refuses is refused with the same words, and what it promotes is right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from zoo import ZOO, outputs

import codetta

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def normed(x: Tensor, dtype: torch.dtype) -> Tensor:
    made: Tensor = F.layer_norm(x, (16,), torch.ones(16, dtype=dtype), torch.ones(16, dtype=dtype))
    return made


def made(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype)


# Functions of an input and of the type of what else is read.
REFUSED: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "product": lambda x, dtype: x @ torch.ones(16, 8, dtype=dtype),
    "product of a made operand": lambda x, dtype: torch.relu(x @ torch.ones(16, 16, dtype=x.dtype)) @ torch.ones(16, 8, dtype=dtype),
    "bias": lambda x, dtype: F.linear(x, torch.ones(8, 16, dtype=x.dtype), torch.ones(8, dtype=dtype)),
    "added": lambda x, dtype: torch.addmm(torch.ones(3, 8, dtype=dtype), x[0], torch.ones(16, 8, dtype=x.dtype)),
    "loss": lambda x, dtype: F.cross_entropy(F.linear(x[0], torch.ones(8, 16, dtype=dtype)), torch.arange(3)),
}  # fmt: skip


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("types", [(F32, F16), (BF16, F32)], ids=str)
@pytest.mark.parametrize("name", REFUSED)
def test_refused_as_eager_refuses(name: str, types: tuple[torch.dtype, torch.dtype], grad: bool) -> None:
    weights, inputs = types
    x = made(2, 3, 16, dtype=inputs).requires_grad_(grad)
    with pytest.raises(RuntimeError) as expected:
        REFUSED[name](x, weights)
    with pytest.raises(RuntimeError) as found:
        codetta.compile(lambda x: REFUSED[name](x, weights))(x)
    assert "same dtype" in str(expected.value) and str(found.value) == str(expected.value)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_a_norm_refuses_parameters_of_a_narrower_type(grad: bool) -> None:
    """Which tracing lets pass as well; before a product and behind one."""
    x, weight = made(3, 16, dtype=F32).requires_grad_(grad), made(16, 16, dtype=F32)
    for function in (lambda x: F.linear(normed(x, BF16), weight), lambda x: normed(F.linear(x, weight), BF16)):
        with pytest.raises(RuntimeError) as expected:
            function(x)
        with pytest.raises(RuntimeError) as found:
            codetta.compile(function)(x)
        assert str(found.value) == str(expected.value)


def test_a_model_given_embeddings_of_another_type() -> None:
    """It says so, and goes on with the right ones."""
    model = codetta.compile(ZOO["llama"].model(BF16))
    table = model.get_input_embeddings()
    right = table(torch.randint(0, 30, (2, 5)))
    with torch.no_grad():
        expected = outputs(model.forward(inputs_embeds=right))[0]
        with pytest.raises(RuntimeError, match="same dtype"):
            model(inputs_embeds=right.float())
        found = outputs(model(inputs_embeds=right))[0]
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)


# Functions of (..., 16) in one type and another tensor like it in a second one, which eager promotes.
PROMOTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda x, y: F.linear(x, torch.eye(16, dtype=x.dtype)) + y,
    "factor for each column": lambda x, y: F.linear(x, torch.eye(16, dtype=x.dtype)) * y[0, 0],
    "a number": lambda x, y: F.linear(x, torch.eye(16, dtype=x.dtype)) * y[0, 0, 0],
    "choice": lambda x, y: torch.where(y > 0, F.linear(x, torch.eye(16, dtype=x.dtype)), y),
    "joined": lambda x, y: torch.cat([F.linear(x, torch.eye(16, dtype=x.dtype)), y], -1),
    "rms_norm": lambda x, y: F.rms_norm(F.linear(x, torch.eye(16, dtype=x.dtype)), (16,), y[0, 0]),
    "mask": lambda x, y: F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], (y @ y.mT)[:, None].clamp(-1, 1).float()),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("types", [(F32, BF16), (BF16, F32), (BF16, F16)], ids=str)
@pytest.mark.parametrize("name", PROMOTED)
def test_promoted_as_eager_promotes(name: str, types: tuple[torch.dtype, torch.dtype], grad: bool) -> None:
    torch.manual_seed(0)
    function = PROMOTED[name]
    x, y = (made(2, 3, 16, dtype=dtype) for dtype in types)
    results = []
    for call in (function, codetta.compile(lambda x, y: function(x, y))):
        mine, other = x.clone().requires_grad_(grad), y.clone().requires_grad_(grad and name != "mask")
        result = call(mine, other)
        gradients = (
            torch.autograd.grad(result.sum(), [each for each in (mine, other) if each.requires_grad]) if grad else ()
        )
        results.append([result.detach(), *gradients])
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)
