"""Constants: tensors that depend on parameters alone, such as weights with a norm's gain multiplied in.

A plan for inference keeps them between calls, and makes them again when PyTorch counts a change of one of their parameters or gradients
have been computed since: an optimiser may follow, and some optimisers write through pointers or `.data`, which PyTorch does not count. For
the same reason a plan for training makes them at every call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from codetta.capture import Graph
from codetta.ir.graph import Node, topological
from codetta.ir.op import apply, compute_dtype
from codetta.rewrite.scale import ONE
from codetta.runtime.sized import addresses_of, backwards, lie_at, state_of

Weight = tuple[str, Node | None]  # a weight of the graph by its name, and the gain of its K columns


@dataclass(frozen=True, eq=False)
class Recipe:
    """How one constant is made. Called with the tensors of `sources`, then with the constants that `parts` numbers."""

    graph: Graph
    what: Weight | Node  # a Node: a row vector
    sources: list[fx.Node]  # placeholders
    parts: dict[Weight, int]

    def __call__(self, *tensors: Tensor) -> Tensor:
        given = dict(zip(self.sources, tensors, strict=False))
        parts = dict(zip(self.parts, tensors[len(self.sources) :], strict=True))
        making = _Making(self.graph, given, parts)
        return making.vector(self.what) if isinstance(self.what, Node) else making.weight(*self.what)


class Constants:
    """The recipes of a plan's constants, in an order in which they can be made, and those that were made last."""

    def __init__(self, graph: Graph, placeholders: list[fx.Node]) -> None:
        self.graph = graph
        self.index = {each: number for number, each in enumerate(placeholders)}
        self.recipes: list[Recipe] = []
        self.numbers: dict[Weight | Node, int] = {}
        self.made: list[Tensor] = []
        self.state: _State | None = None

    def weight(self, name: str, gain: Node | None) -> int:
        """The number of the constant (N, K)."""
        return self._number((name, gain), {})

    def vector(self, value: Node) -> int:
        """The number of the constant row."""
        # Sums over a weight with a gain are taken over the very copy that the product reads.
        scaled = [(each.attr("weight"), each.attr("gain")) for each in topological([value]) if each.op == "vector"]
        return self._number(value, {key: self.weight(*key) for key in scaled if key[1] is not None})

    def _number(self, what: Weight | Node, parts: dict[Weight, int]) -> int:
        if what not in self.numbers:
            sources = list(dict.fromkeys(_sources(self.graph, what, set(parts))))
            self.recipes.append(Recipe(self.graph, what, sources, parts))
            self.numbers[what] = len(self.recipes) - 1
        return self.numbers[what]

    def kept(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """All constants: those of the last call, unless one of their parameters has changed since."""
        if self.state is None or not self.state.holds(inputs):
            made: list[Tensor] = []
            with torch.no_grad():
                for recipe in self.recipes:
                    sources = [inputs[self.index[each]] for each in recipe.sources]
                    made.append(recipe(*sources, *(made[number] for number in recipe.parts.values())))
            self.made = made
            self.state = _State(
                inputs, sorted({self.index[each] for recipe in self.recipes for each in recipe.sources})
            )
        return self.made


class _State:
    """Of the parameters that constants were made of."""

    def __init__(self, inputs: Sequence[Tensor], watched: list[int]) -> None:
        self.watched, self.backwards = watched, backwards.count
        tensors = [inputs[at] for at in watched]
        self.states = [state_of(each) for each in tensors]
        # On a GPU a state is an address and a version: to be compared by the dozen.
        self.plain = all(each.is_cuda and not each.is_inference() for each in tensors)
        self.where = addresses_of(inputs, watched)
        self.versions = [each._version for each in tensors] if self.plain else []

    def holds(self, inputs: Sequence[Tensor]) -> bool:
        if self.backwards != backwards.count:
            return False
        if not self.plain:
            return [state_of(inputs[at]) for at in self.watched] == self.states
        if not lie_at(list(inputs), self.where, self.watched):
            return False
        try:
            return [inputs[at]._version for at in self.watched] == self.versions
        except RuntimeError:  # of inference tensors nobody counts versions
            return False


def _sources(graph: Graph, what: Weight | Node, parts: set[Weight]) -> Iterator[fx.Node]:
    """The placeholders that a constant is made of, beside other constants."""
    if isinstance(what, Node):
        for each in topological([what]):
            if each.op == "load":
                yield from _placeholders(graph.leaves[each.attr("name")].source)
            elif each.op == "vector" and (each.attr("weight"), each.attr("gain")) not in parts:
                yield from _sources(graph, (each.attr("weight"), each.attr("gain")), parts)
        return
    name, gain = what
    yield from _placeholders(graph.weights[name].source)
    if gain is not None:
        yield from _sources(graph, gain, parts)


def _placeholders(each: fx.Node) -> Iterator[fx.Node]:
    if each.op == "placeholder":
        yield each
    for source in each.all_input_nodes:
        yield from _placeholders(source)


@dataclass
class _Making:
    """The making of one constant."""

    graph: Graph
    known: dict[fx.Node, Tensor]
    weights: dict[Weight, Tensor] = field(default_factory=dict)

    def tensor(self, each: fx.Node) -> Tensor:
        if each not in self.known:
            args, kwargs = fx.node.map_arg((each.args, each.kwargs), self.tensor)
            self.known[each] = each.target(*args, **kwargs)  # type: ignore[operator]
        return self.known[each]

    def weight(self, name: str, gain: Node | None) -> Tensor:
        """(N, K), with the gain of its K columns multiplied in, lying in memory as the program was written for."""
        if (name, gain) in self.weights:
            return self.weights[name, gain]
        known = self.graph.weights[name]
        part = known.matrix(self.tensor(known.source))
        if gain is None:
            return part
        stored = part.t() if known.transposed else part  # its rows are contiguous, or are to be
        row = self.vector(gain).to(compute_dtype(part.dtype))
        made = torch.empty(stored.shape, dtype=part.dtype, device=part.device)
        torch.mul(stored, row[:, None] if known.transposed else row, out=made)
        return made.t() if known.transposed else made

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
                wide = compute_dtype(weight.dtype)
                if value.args[0] is ONE:
                    return weight.sum(1, dtype=wide)
                return (weight.to(wide) * self.vector(value.args[0]).to(weight.device)).sum(1)
        args = [self.vector(arg) for arg in value.args]
        return apply(value.op, args, dict(value.attrs))
