"""Every gradient of compiled modules against differences of their own results, in float64: nobody else's derivative is asked."""

from __future__ import annotations

import pytest
import torch
from modules import Design
from torch import Tensor, nn
from torch.nn import functional as F
from zoo import outputs

import codetta
from codetta.integrations.dynamo import backend_of

STEP = 1e-5

# Together they meet every law about gradients; what each is for stands beside it.
DESIGNS = {
    "rms, gate, rotary, q k v apart": Design(),
    "heads shared, pairs, norms of q and k": Design(kv_heads=2, rotary="pairs", qk_norm=True, norm="rms_divided"),
    "layer norm, bias, plain": Design(norm="layer", bias=True, mlp="plain", activation="gelu", rotary="none"),
    "norms on both sides": Design(norm="rms_one_plus", place="sandwich", activation="gelu_tanh"),
    "norms behind": Design(norm="layer_by_hand", place="post", bias=True, mlp="plain", activation="squared_relu"),
    "one weight in halves, one for q k v": Design(mlp="chunked", qkv="chunked", norm="rms_function"),
    "columns alternate, a part is rotated": Design(
        mlp="interleaved", rotary="partial", qkv="unbound", activation="tanh"
    ),
    "side by side, scaled": Design(
        parallel=True, layer_scale=True, residual_scale=True, norm="layer_no_bias", bias=True
    ),
    "layers that share their weights": Design(layers=2, tied=True, norm="rms_eps_outside", residual="f + x"),
    "all of attention, no head": Design(attention="full", head=False, stem=False, branch="normed", norm="rms_sum"),
}


def number(model: nn.Module, x: Tensor) -> Tensor:
    """A number that depends on every output."""
    generator = torch.Generator().manual_seed(5)
    found = [each for each in outputs(model(x)) if each.is_floating_point()]
    return torch.stack(
        [(each * torch.randn(each.shape, dtype=each.dtype, generator=generator)).sum() for each in found]
    ).sum()


def check(model: nn.Module, x: Tensor) -> None:
    """The slope along a random direction of each tensor, and the gradient's part in that direction."""
    leaves = {"x": x, **dict(model.named_parameters())}
    gradients = torch.autograd.grad(number(model, x), list(leaves.values()))
    generator = torch.Generator().manual_seed(7)
    for (name, leaf), gradient in zip(leaves.items(), gradients, strict=True):
        way = torch.randn(leaf.shape, dtype=leaf.dtype, generator=generator)
        way /= way.norm()
        values = []
        for sign in (1.0, -2.0, 1.0):  # there, to the other side, and back
            with torch.no_grad():
                leaf.add_(way, alpha=sign * STEP)
            values.append(number(model, x).item())
        slope, expected = (values[0] - values[1]) / (2 * STEP), float((gradient * way).sum())
        assert abs(slope - expected) <= 1e-6 * max(1.0, float(gradient.norm())), (name, slope, expected)


@pytest.mark.parametrize("name", DESIGNS)
def test_designs(name: str) -> None:
    torch._dynamo.reset()
    model = DESIGNS[name].module(torch.float64)
    x = DESIGNS[name].tokens(torch.float64).requires_grad_()
    codetta.compile(model, options=codetta.Options(leftover="graph"))
    check(model, x)
    backend = backend_of(model)
    assert backend is not None and backend.trainings


class Speaks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.body, self.head = nn.RMSNorm(8), nn.Linear(8, 12), nn.Linear(12, 17)

    def forward(self, x: Tensor) -> Tensor:
        target = torch.arange(x.shape[0] * x.shape[1]) % 17
        return F.cross_entropy(self.head(F.silu(self.body(self.norm(x)))).flatten(0, 1), target, label_smoothing=0.1)


def test_loss() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Speaks().double(), torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    codetta.compile(model)
    check(model, x)


def test_the_judge_sees_a_wrong_gradient() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
            return gradient * 2.001

    class Module(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Wrong.apply(x)

    with pytest.raises(AssertionError):
        check(Module(), torch.randn(3, 4, dtype=torch.float64, requires_grad=True))
