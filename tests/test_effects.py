"""Models that write to what they are given, or to their buffers: the same results, and the same left behind, as eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import codetta

Rest = Callable[["Kept", Tensor], object]


class Kept(nn.Module):
    """A product, and something that stays from call to call."""

    def __init__(self, rest: Rest) -> None:
        super().__init__()
        self.linear, self.rest = nn.Linear(16, 16), rest
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("rows", torch.randn(6, 16))
        self.register_buffer("cache", torch.randn(2, 4, 8, 4))

    def forward(self, x: Tensor) -> object:
        return self.rest(self, x)


def heads(m: Kept, x: Tensor) -> Tensor:
    return m.linear(x).view(2, 3, 4, 4).transpose(1, 2)


def counted(m: Kept, x: Tensor) -> Tensor:
    y = F.silu(m.linear(x)) + m.count
    m.count.add_(1)
    return y * m.count


def returned(m: Kept, x: Tensor) -> tuple[Tensor, Tensor]:
    before = m.rows * 2
    return F.silu(m.linear(x)) + before.view(2, 3, 16), m.rows.add_(m.linear(x).view(6, 16))


def seen_before(m: Kept, x: Tensor) -> Tensor:
    """A view of what is written over, read by the last program."""
    old = m.rows.view(2, 3, 16)
    y = m.linear(x)
    m.rows.copy_(y.view(6, 16))
    return m.linear(F.silu(y)) + old.clone()


def appended(m: Kept, x: Tensor) -> Tensor:
    places = torch.arange(3) + m.count.long()
    m.cache.index_copy_(2, places, heads(m, x))
    m.count.add_(3)
    return m.cache.sum(2)


def appended_by_sample(m: Kept, x: Tensor) -> Tensor:
    samples, places = torch.arange(2)[:, None], torch.tensor([[0, 2, 4], [5, 1, 3]]) + m.count.long()
    torch.ops.aten.index_put_(m.cache, [samples, None, places], heads(m, x).transpose(1, 2))
    m.count.add_(1)
    return m.cache * 2


def appended_and_read(m: Kept, x: Tensor) -> tuple[Tensor, Tensor]:
    """The cache as it was, and as it is."""
    old = m.cache.sum()
    m.cache.index_copy_(2, torch.arange(3), heads(m, x))
    return m.cache.sum(2), old


def appended_and_copied(m: Kept, x: Tensor) -> Tensor:
    m.cache.index_copy_(2, torch.arange(3), heads(m, x))
    return m.cache.clone()


def given(m: Kept, x: Tensor) -> Tensor:
    y = m.linear(x)
    x.mul_(0.5)
    return y + x


CASES: dict[str, Rest] = {
    rest.__name__: rest
    for rest in (counted, returned, seen_before, appended, appended_by_sample, appended_and_read, appended_and_copied, given)
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_as_eager(name: str) -> None:
    torch.manual_seed(0)
    ours, plain = Kept(CASES[name]).eval(), Kept(CASES[name]).eval()
    ours.load_state_dict(plain.state_dict())
    codetta.compile(ours)
    results: list[list[object]] = [[], []]
    for _ in range(2):
        x = torch.randn(2, 3, 16)
        for model, found in ((ours, results[0]), (plain, results[1])):
            copy = x.clone()
            with torch.no_grad():
                found.append((model(copy), copy, *model.buffers()))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "in_place"), [("appended", True), ("appended_by_sample", True), ("appended_and_read", False)]
)
def test_a_cache_is_not_copied(name: str, in_place: bool) -> None:
    model = Kept(CASES[name]).eval()
    codetta.compile(model)
    with torch.no_grad():
        model(torch.randn(2, 3, 16))
    (executor,) = model._compiled_call_impl.backend.executors
    assert ("append" in executor.source) == in_place
    assert ("index_" in executor.source) == (not in_place)


def clamped(m: Kept, x: Tensor) -> Tensor:
    m.linear.weight.data.clamp_(-0.1, 0.1)  # as some models do while they train
    return m.linear(torch.relu(m.linear(x)))


def shrunk(m: Kept, x: Tensor) -> Tensor:
    y = m.linear(torch.relu(m.linear(x)))
    m.linear.weight.data.mul_(0.5)  # behind all that reads it
    return y


def averaged(m: Kept, x: Tensor) -> Tensor:
    y = torch.relu(m.linear(x))
    m.rows.mul_(0.9).add_(y.detach().view(6, 16), alpha=0.1)
    return m.linear(y)


@pytest.mark.parametrize("rest", [clamped, shrunk, averaged, counted])
def test_training_as_eager(rest: Rest) -> None:
    """A parameter that a model writes to is another one on the way back: nothing is made of it again."""
    torch.manual_seed(0)
    ours, plain = Kept(rest), Kept(rest)
    ours.load_state_dict(plain.state_dict())
    codetta.compile(ours)
    for _ in range(3):
        x = torch.randn(2, 3, 16)
        for model in (ours, plain):
            result = model(x)
            assert isinstance(result, Tensor)
            if rest is not counted:  # eager refuses its gradient: the counter is written over
                result.square().sum().backward()
        torch.testing.assert_close(list(ours.buffers()), list(plain.buffers()), rtol=1e-4, atol=1e-4)
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4)
