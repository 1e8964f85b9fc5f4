"""Constants: what parameters alone decide (weights with a norm's gain in them, vectors), made when first needed and again whenever
one of those parameters has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from codetta.capture import Graph
from codetta.ir.graph import Node
from codetta.ir.op import apply, compute_dtype
from codetta.runtime.sized import addresses_of, lie_at, state_of


class Constants:
    """What parameters alone decide, by name; made anew when a parameter has changed."""

    def __init__(self, graph: Graph, placeholders: list[fx.Node]) -> None:
        self.graph, self.placeholders = graph, placeholders
        self.index = {each: number for number, each in enumerate(self.placeholders)}
        self.recipes: list[Callable[[_Parameters], Tensor]] = []
        self.keys: list[object] = []
        self.watched: list[int] = []
        self.made: list[Tensor] = []
        self.state: _State | None = None

    def weight(self, name: str, gain: Node | None) -> int:
        return self._recipe(("weight", name, gain), lambda at: at.weight(name, gain))

    def vector(self, value: Node) -> int:
        return self._recipe(("vector", value), lambda at: at.vector(value))

    def _recipe(self, key: object, make: Callable[[_Parameters], Tensor]) -> int:
        if key not in self.keys:
            self.keys.append(key)
            self.recipes.append(make)
        return self.keys.index(key)

    def fresh(self, inputs: Sequence[Any]) -> list[Tensor]:
        if self.state is None or not self.state.holds(inputs):
            at = _Parameters(self.graph, dict(zip(self.placeholders, inputs, strict=True)))
            with torch.no_grad():
                self.made = [recipe(at) for recipe in self.recipes]
            self.watched = sorted(self.index[each] for each in at.used)
            self.state = _State(inputs, self.watched)
        return self.made


class _State:
    """Of the parameters that constants were made of."""

    def __init__(self, inputs: Sequence[Any], watched: list[int]) -> None:
        self.watched = watched
        tensors = [inputs[at] for at in watched]
        self.states = [state_of(each) for each in tensors]
        # On a GPU a state is an address and a version: to be compared by the dozen.
        self.plain = all(each.is_cuda and not each.is_inference() for each in tensors)
        self.where = addresses_of(inputs, watched)
        self.versions = [each._version for each in tensors] if self.plain else []

    def holds(self, inputs: Sequence[Any]) -> bool:
        if not self.plain:
            return [state_of(inputs[at]) for at in self.watched] == self.states
        if not lie_at(list(inputs), self.where, self.watched):
            return False
        try:
            return [inputs[at]._version for at in self.watched] == self.versions
        except RuntimeError:  # of inference tensors nobody counts versions
            return False


class _Parameters:
    """The graph's parameters, for one making of the constants; remembers which were used."""

    def __init__(self, graph: Graph, given: dict[fx.Node, Any]) -> None:
        self.graph, self.known = graph, dict(given)
        self.given = set(given)
        self.used: set[fx.Node] = set()
        self.weights: dict[tuple[str, Node | None], Tensor] = {}

    def tensor(self, each: fx.Node) -> Tensor:
        if each in self.given:
            self.used.add(each)
        elif each not in self.known:
            args, kwargs = fx.node.map_arg((each.args, each.kwargs), self.tensor)
            self.known[each] = each.target(*args, **kwargs)  # type: ignore[operator]
        return self.known[each]

    def weight(self, name: str, gain: Node | None) -> Tensor:
        """(N, K), with the gain of its K columns multiplied in."""
        if (name, gain) not in self.weights:
            known = self.graph.weights[name]
            part = known.matrix(self.tensor(known.source))
            if gain is not None:
                wide = compute_dtype(part.dtype)
                scaled = (part.to(wide) * self.vector(gain).to(wide)).to(part.dtype)
                # As the weight lies in memory, which the program was written for.
                part = scaled.t().contiguous().t() if known.transposed else scaled.contiguous()
            self.weights[name, gain] = part
        return self.weights[name, gain]

    def vector(self, value: Node) -> Tensor:
        """A row made of parameters: fp32, or fp64 for a model in it."""
        match value.op:
            case "const":
                return torch.tensor(value.attr("value"))
            case "load":
                leaf = self.graph.leaves[value.attr("name")]
                tensor = self.tensor(leaf.source)
                flat = leaf.matrix(tensor).reshape(-1).to(compute_dtype(tensor.dtype))
                if not value.space.cols:
                    return flat.reshape(())
                return flat.repeat(value.space.cols // flat.numel())
            case "vector":
                weight = self.weight(value.attr("weight"), value.attr("gain"))
                row = self.vector(value.args[0]).to(weight.device)
                return (weight.to(compute_dtype(weight.dtype)) * row).sum(1)
        args = [self.vector(arg) for arg in value.args]
        return apply(value.op, args, dict(value.attrs))
