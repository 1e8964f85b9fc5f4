"""Sizes as symbols, in training as in inference: whatever is made of them is known where it is needed, of whatever it is made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import codetta
from codetta.integrations import dynamo
from codetta.integrations.dynamo import backend_of


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> None:
    torch._dynamo.reset()


def gradients(model: Callable[..., Any], inputs: list[Tensor], parameters: list[Tensor]) -> list[Tensor]:
    given = [each.clone().requires_grad_() if each.is_floating_point() else each for each in inputs]
    result = model(*given)
    wanted = [*(each for each in given if each.requires_grad), *parameters]
    return [result.detach(), *torch.autograd.grad(result.sin().sum(), wanted)]


def compare(model: Callable[..., Any], sizes: list[tuple[int, ...]], **how: Any) -> None:
    """Results and gradients of a compiled copy for each of the sizes, one compilation for all of them."""
    plain: Any = copy.deepcopy(model) if isinstance(model, nn.Module) else model
    compiled: Any = codetta.compile(model, dynamic=True, options=codetta.Options(**how))
    parameters = [list(each.parameters()) if isinstance(each, nn.Module) else [] for each in (compiled, plain)]
    for size in sizes:
        x = torch.randn(size)
        ours, theirs = gradients(compiled, [x], parameters[0]), gradients(plain, [x], parameters[1])
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), plain(x), rtol=1e-4, atol=1e-4)


class Two(nn.Module):
    """Two products with something in between and behind."""

    def __init__(self, between: Callable[[Tensor], Tensor], behind: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)
        self.between, self.behind = between, behind

    def forward(self, x: Tensor) -> Tensor:
        return self.behind(x, self.second(torch.relu(self.first(self.between(x)))))


def test_a_size_that_only_a_result_has() -> None:
    """It is computed, and not read off the gradient of that result, which comes later."""

    def behind(x: Tensor, y: Tensor) -> Tensor:
        pairs = x.shape[1] // 2
        return y.view(x.shape[0], pairs, 2, 16).transpose(1, 2).reshape(x.shape[0], 2 * pairs, 16)

    model = Two(lambda x: x[:, : x.shape[1] // 2 * 2], behind)
    compare(model, [(3, 10, 16), (2, 7, 16)], leftover="graph")


def test_halves_of_a_size() -> None:
    def gated(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    compare(gated, [(3, 8), (3, 12), (5, 2)])


def test_functions_of_sizes() -> None:
    """A root, as of the number of patches of a square picture; and one that gradients need as a number that is none of integers."""

    def behind(x: Tensor, y: Tensor) -> Tensor:
        side = int(x.shape[1] ** 0.5)
        return y.reshape(x.shape[0], side, side, 16) * x.shape[1] ** -0.5

    compare(Two(lambda x: x, behind), [(2, 9, 16), (3, 16, 16)], leftover="graph")


@pytest.mark.parametrize("leftover", ["graph", "inductor"])
def test_operators_between_programs_see_products_of_sizes(leftover: str) -> None:
    """Rows of a matrix are samples times positions; whoever compiles such operators is told of each."""

    def behind(x: Tensor, y: Tensor) -> Tensor:
        return torch.cumsum(y.reshape(-1, 16), 0).cos() * torch.cumsum(y.flatten(0, 1), 1)

    compare(Two(lambda x: x, behind), [(2, 9, 16), (3, 5, 16)], leftover=leftover)


def test_regions_of_symbolic_sizes_that_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Llama whose leftovers are large enough for Inductor, at several batches and lengths."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=512, intermediate_size=640, vocab_size=500, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).train()
    plain, compiled, regions = copy.deepcopy(model), codetta.compile(model), []
    by_inductor = dynamo.by_inductor
    monkeypatch.setattr(dynamo, "by_inductor", lambda region: regions.append(region) or by_inductor(region))
    for batch, length in ((4, 128), (4, 200), (3, 150)):
        tokens = torch.randint(0, 500, (batch, length))
        for each in (compiled, plain):
            each.zero_grad()
            each(input_ids=tokens, labels=tokens).loss.backward()
        for mine, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4)
    symbolic = [each for each in regions if any(node.name.startswith("size_") for node in each.graph.nodes)]
    assert symbolic, "no region was compiled for sizes that its inputs do not show"
    backend = backend_of(compiled)
    assert backend is not None and len(backend.trainings) == 2


def test_as_many_heads_as_there_are() -> None:
    """The number of heads is a symbol: gradients of attention are no matrices of rows and columns."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(16, 16) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.out(F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x), is_causal=True))

    model = Model()
    compiled = codetta.compile(copy.deepcopy(model), dynamic=True)
    for sizes in ((2, 3, 5), (3, 4, 7)):
        x = torch.randn(*sizes, 16)
        mine, theirs = compiled(x), model(x)
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
        mine.square().sum().backward()
        theirs.square().sum().backward()
    for one, other in zip(compiled.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-4)
