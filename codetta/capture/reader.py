"""Capture: an FX graph of aten operators -> values on token matrices. Only this folder knows torch.fx and aten.

Everything that depends on a matrix product becomes a `Value`: a node of the project's own kind and the view under which the
graph sees it. What no handler covers, and everything before the first product, stays a tensor that the graph computes as it
did (a leaf, if a value reads it). Casts between floating types leave no trace: values are computed in fp32, which is at
least as accurate as what was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import fx

from codetta.capture.at import At, is_tensor, operator_name
from codetta.capture.graph import CutError, Graph, Law, RefusedError, Value
from codetta.capture.kinds import is_random
from codetta.capture.table import value_of
from codetta.errors import Reason, TraceError
from codetta.placement import NOWHERE, Placement


def capture(
    graph: fx.Graph,
    parameters: Iterable[fx.Node],
    laws: Sequence[Law] = (),
    left: Mapping[fx.Node, Reason] | None = None,
) -> Graph:
    """Every node of the graph that depends on a product, as a value, as far as the handlers go.

    Laws are applied to products as they are met. Where a product needs a value that is known too late for any program to
    store it, the graph keeps that value, and reading starts again behind it. `left`: operators that stay with the graph, and why.
    """
    return _Reader(graph, parameters, laws, left or {}).read()


class _Reader:
    def __init__(
        self, graph: fx.Graph, parameters: Iterable[fx.Node], laws: Sequence[Law], left: Mapping[fx.Node, Reason]
    ) -> None:
        self.found = Graph(graph, Placement(self._made_by))
        self.found.constant |= set(parameters)
        self.laws = laws
        self.cuts: dict[fx.Node, Reason] = dict(left)
        self.latest: dict[fx.Node, int] = {}  # the last group that a node depends on
        self.groups_before: dict[fx.Node, int] = {}

    def _made_by(self, leaf: str) -> int:
        return self.latest.get(self.found.leaves[leaf].source, NOWHERE)

    def read(self) -> Graph:
        nodes = list(self.found.nodes.nodes)
        at = 0
        while at < len(nodes):
            each = nodes[at]
            at += 1
            self.groups_before[each] = len(self.found.placement.groups)
            try:
                value = self._read(each)
            except CutError as cut:
                at = nodes.index(self._go_back(cut))
                continue
            latest = [self.latest.get(arg, NOWHERE) for arg in each.all_input_nodes]
            if value is not None:
                self.found.values[each] = value
                self.found.dtypes.setdefault(value.node, each.meta["val"].dtype)
                latest.append(self.found.placement[value.node].group)
            self.latest[each] = max(latest, default=NOWHERE)
        self.found.refusals |= self.cuts
        return self.found

    def _read(self, each: fx.Node) -> Value | None:
        found = self.found
        if each.op != "call_function" or each in self.cuts:
            return None
        inputs = each.all_input_nodes
        if inputs and all(arg in found.constant for arg in inputs) and is_tensor(each) and not is_random(each):
            found.constant.add(each)
            return None
        try:
            return value_of(At(found, each, self.laws))
        except (RefusedError, TraceError) as refusal:
            found.refusals[each] = Reason(operator_name(each), str(refusal))
            return None

    def _go_back(self, cut: CutError) -> fx.Node:
        """Leave the value to the graph, and forget what was read from there on."""
        found = self.found
        at = next(each for each, value in found.values.items() if value.node is cut.value)
        self.cuts[at] = Reason("late", str(cut))
        found.placement.forget(self.groups_before[at])
        forgotten = False
        for each in found.nodes.nodes:
            forgotten |= each is at
            if forgotten:
                found.values.pop(each, None)
                found.refusals.pop(each, None)
        return at
