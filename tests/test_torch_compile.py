"""What torch.compile and codetta.compile may be told, and hear about what they may not."""

from __future__ import annotations

import warnings

import pytest
import torch

import codetta
from codetta.integrations.dynamo import Backend


def test_options_of_torch_compile() -> None:
    """Fields of codetta.Options by name; a mode is none of them, and it is said what is."""
    model, x = torch.nn.Linear(8, 8), torch.randn(3, 8)
    with torch.no_grad():
        expected = model(x)
        for options in (None, {"leftover": "graph"}):
            torch._dynamo.reset()
            found = torch.compile(model, backend="codetta", options=options)(x)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        for wrong, message in (
            ({"options": {"speed": 9}}, "'speed', which is unknown"),
            ({"mode": "max-autotune"}, "codetta has none"),
        ):
            torch._dynamo.reset()
            with pytest.raises(RuntimeError, match=message):
                torch.compile(model, backend="codetta", **wrong)(x)
        torch._dynamo.reset()
        torch.testing.assert_close(
            codetta.compile(model, options={"numerics": "strict"})(x), expected, rtol=1e-4, atol=1e-5
        )
    for wrong in ({"leftover": "nobody"}, {"speed": 9}, 3):
        with pytest.raises(codetta.ArgumentError):
            codetta.compile(model, options=wrong)  # type: ignore[arg-type]


def test_fullgraph() -> None:
    def breaks(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    for each in (breaks, type("Breaks", (torch.nn.Module,), {"forward": lambda self, x: breaks(x)})()):
        torch._dynamo.reset()
        codetta.compile(each)(torch.randn(3))
        with pytest.raises(torch._dynamo.exc.Unsupported):
            codetta.compile(each, fullgraph=True)(torch.randn(3))


def test_what_is_compiled_is_part_of_a_graph_that_others_trace() -> None:
    """One graph, of the one that traces; nothing that is kept for calls is touched."""

    class Doubles(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x) * 2

    def triples(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * 3

    x = torch.randn(3, 8)
    for each, factor in ((Doubles(), 2), (triples, 3)):
        for dynamic in (None, True):
            torch._dynamo.reset()
            backend = Backend(codetta.Options())
            compiled = codetta.compile(each, dynamic=dynamic, backend=backend)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                outer = torch.compile(lambda x, compiled=compiled: compiled(x) + 1, backend="eager", fullgraph=True)
                torch.testing.assert_close(outer(x), torch.tanh(x) * factor + 1)
            assert backend.graphs == 0 and not backend.arrived
            torch.testing.assert_close(compiled(x), torch.tanh(x) * factor)
            assert backend.graphs == 1
