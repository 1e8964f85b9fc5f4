"""Compiled models on the GPU: the zoo at its tiny sizes, and a Llama that the fast loops can carry, against eager and float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modules import complaints
from torch import nn
from zoo import ZOO, outputs

import codetta
from codetta.bench import shapes
from codetta.integrations.dynamo import backend_of
from codetta.steps import Launch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


def check(model: nn.Module, exact: nn.Module, named: dict[str, Any], args: tuple[Any, ...] = ()) -> list[Launch]:
    """Ours against eager, both against float64; what was launched."""
    wide = lambda x: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x  # noqa: E731
    with torch.no_grad():
        truth = outputs(exact(*map(wide, args), **{name: wide(each) for name, each in named.items()}))
        eager, ours = outputs(model.forward(*args, **named)), outputs(model(*args, **named))
    bad = complaints(ours, eager, truth, torch.bfloat16)
    assert not bad, bad
    backend = backend_of(model)
    assert backend is not None
    return [step for executor in backend.executors for step in executor.plan.steps if isinstance(step, Launch)]


@pytest.mark.parametrize("name", ZOO)
def test_zoo(name: str) -> None:
    """Few rows, which any loop may carry, and more, where a slow one must give way."""
    torch._dynamo.reset()
    entry = ZOO[name]
    model, exact = entry.pair(torch.bfloat16, "cuda")
    codetta.compile(model, dynamic=False)
    for batch, length in ((2, 12), (3, 67)):
        args, named = entry.example(batch, length, "cuda", torch.bfloat16)
        assert check(model, exact, named, args)


@pytest.mark.parametrize("length", [256, 299, 1])
def test_llama(length: int) -> None:
    """Heads of 64, two of queries to one of keys; whole tiles, ragged ones, and a single token."""
    torch._dynamo.reset()
    device = torch.device("cuda")
    model = shapes.build("tiny", device, torch.bfloat16)
    exact = shapes.build("tiny", device, torch.float64)
    exact.load_state_dict(model.state_dict())
    codetta.compile(model)
    launched = check(model, exact, shapes.inputs("tiny", model, device, 3, length))
    assert [each.program.multiplies for each in launched].count(True) == 9
