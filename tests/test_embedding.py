"""The gradient of an embedding: against float64, whatever is looked up how often, and in a graph with a tied head."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import codetta
from codetta.backends import triton_rows
from codetta.backends.triton import interpreting
from codetta.integrations.dynamo import Backend
from codetta.options import Options

ours = torch.ops.codetta


def exact(
    gradient: Tensor, ids: Tensor, classes: int, padding: int, base: Tensor | None, scale: Tensor | None
) -> Tensor:
    total = torch.zeros(classes, gradient.shape[-1], dtype=torch.float64)
    if base is not None:
        total += base.double() * (1.0 if scale is None else scale.double())
    for row, place in zip(gradient.double().reshape(-1, gradient.shape[-1]), ids.reshape(-1).tolist(), strict=True):
        if place != padding:
            total[place] += row
    return total


def by_kernel(
    gradient: Tensor, ids: Tensor, classes: int, padding: int, base: Tensor | None, scale: Tensor | None
) -> Tensor:
    """What a GPU runs, in Triton's interpreter."""
    table = torch.zeros(classes, gradient.shape[-1], dtype=gradient.dtype)
    if base is not None:
        table.copy_(base if scale is None else base * scale)
    triton_rows.add_rows(table, gradient.reshape(-1, gradient.shape[-1]), ids.reshape(-1), padding, base, scale)
    return table


@pytest.mark.parametrize("how", [ours.embedding_gradient, by_kernel], ids=["operator", "kernel"])
@given(
    count=st.sampled_from([1, 7, 8, 9, 40]), classes=st.sampled_from([1, 3, 50]), width=st.sampled_from([1, 33]),
    padding=st.sampled_from([-1, 0]), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    given_base=st.sampled_from(["none", "plain", "scaled"]),
)  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_against_float64(
    how, count: int, classes: int, width: int, padding: int, dtype: torch.dtype, given_base: str
) -> None:  # type: ignore[no-untyped-def]
    if how is by_kernel and not interpreting():
        pytest.skip("Triton's interpreter is off: tests/gpu runs the kernel on the GPU that is here")
    torch.manual_seed(count)
    gradient, ids = torch.randn(1, count, width).to(dtype), torch.randint(0, classes, (1, count))
    base = None if given_base == "none" else torch.randn(classes, width)
    scale = torch.tensor(0.5) if given_base == "scaled" else None
    truth = exact(gradient, ids, classes, padding, base, scale)
    found = how(gradient, ids, classes, padding, base, scale)
    assert found.dtype == dtype
    # Rounded once to its type; before that, added up in fp32.
    added = exact(gradient.abs(), ids, classes, padding, None if base is None else base.abs(), scale)
    bound = torch.finfo(dtype).eps * truth.abs() + count * torch.finfo(torch.float32).eps * added
    assert ((found.double() - truth).abs() <= bound + torch.finfo(dtype).tiny).all()


def test_nothing_is_looked_up() -> None:
    base = torch.randn(5, 4)
    nothing = torch.empty(0, dtype=torch.int64)
    assert ours.embedding_gradient(torch.empty(0, 4), nothing, 5, -1, base, None).equal(base)


class Tied(nn.Module):
    """Rows of a table, a product, and the table again as the head."""

    def __init__(self, padding: int | None = None) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 16, padding_idx=padding)
        self.inner = nn.Linear(16, 16, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        x = F.rms_norm(x + self.inner(x), (16,))
        logits = F.linear(x, self.table.weight)
        return F.cross_entropy(logits[:, :-1].reshape(-1, 40), ids[:, 1:].reshape(-1))


@pytest.mark.parametrize("padding", [None, 3])
def test_in_a_model_with_a_tied_head(padding: int | None) -> None:
    torch.manual_seed(0)
    model, ids = Tied(padding), torch.randint(0, 5, (3, 20))
    plain = torch.autograd.grad(model(ids), list(model.parameters()))
    backend = Backend(Options())
    found = torch.autograd.grad(codetta.compile(model, backend=backend)(ids), list(model.parameters()))
    for mine, theirs in zip(found, plain, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)
    (training,) = backend.trainings
    targets = [str(each.target) for each in training.plan.graph.nodes.nodes]
    assert "codetta.embedding_gradient.default" in targets and not any("embedding_dense" in each for each in targets)
