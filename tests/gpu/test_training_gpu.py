"""Gradients of compiled models on the GPU: the zoo at its tiny sizes, and a Llama that the fast loops can carry."""

from __future__ import annotations

import pytest
import torch
from test_training import check
from zoo import ZOO

import codetta
from codetta.bench import shapes
from codetta.capture import weight_gradients

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")


@pytest.mark.parametrize("name", ZOO)
def test_zoo(name: str) -> None:
    torch._dynamo.reset()
    entry = ZOO[name]
    model, exact = entry.pair(torch.bfloat16, "cuda")
    codetta.compile(model, dynamic=False)
    args, named = entry.example(2, 64, "cuda", torch.bfloat16)
    check(model, exact, args, named, torch.bfloat16)


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("length", [256, 299])
def test_llama(length: int, filled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """filled: as with weights that are large enough for programs of their own for their gradients."""
    torch._dynamo.reset()
    if filled:
        monkeypatch.setattr(weight_gradients, "fills_the_device", lambda weight, rows: True)
    device = torch.device("cuda")
    model, exact = (shapes.build("tiny", device, dtype) for dtype in (torch.bfloat16, torch.float64))
    exact.load_state_dict(model.state_dict())
    codetta.compile(model)
    named = shapes.inputs("tiny", model, device, 3, length) | {"logits_to_keep": 0}
    check(model, exact, (), named, torch.bfloat16)
