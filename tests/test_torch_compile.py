"""What torch.compile and codetta.compile may be told, and hear about what they may not."""

from __future__ import annotations

import pytest
import torch

import codetta


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
