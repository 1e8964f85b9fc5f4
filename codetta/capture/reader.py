"""Capture: an FX graph of aten operators -> values on token matrices. Only this folder knows torch.fx and aten.

Everything that depends on a matrix product becomes a `Value`: a node of the project's own kind and the view under which the
graph sees it. What no handler covers, and everything before the first product and its norm, stays a tensor that the graph computes as
it did (a leaf, if a value reads it). Casts between floating types leave no trace: values are computed in fp32, which is at
least as accurate as what was asked for.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx

import codetta.attention
import codetta.loss  # noqa: F401 (operators)
from codetta.capture.at import At, is_tensor, operator_name
from codetta.capture.graph import FLOATS, CutError, Graph, Law, RefusedError, Value
from codetta.capture.kinds import is_random, is_size_of_inputs, is_tangent, packet_of
from codetta.capture.products import heads, tokens
from codetta.capture.table import value_of
from codetta.errors import Reason, TraceError
from codetta.ir import view as views
from codetta.ir.graph import Node, node
from codetta.ir.op import is_sink
from codetta.placement import NOWHERE, Placement

aten = torch.ops.aten
NORMS = (aten.mean, aten.native_layer_norm, aten._fused_rms_norm, aten.var_mean)
_GRADIENTS = {
    *((torch.ops.codetta.attention_backward, index) for index in range(3)),
    (torch.ops.codetta.linear_loss, 1),
    (torch.ops.codetta.linear_losses_backward, 0),
}
_FROM_ONE = (aten._to_copy, aten.pow, aten.mul)  # a wider type, a square


def capture(
    graph: fx.Graph,
    parameters: Iterable[fx.Node],
    laws: Sequence[Law] = (),
    left: Mapping[fx.Node, Reason] | None = None,
) -> Graph:
    """Every node of the graph that depends on a product, as a value, as far as the handlers go.

    Laws are applied to products as they are met. Where something needs a value that is known too late for any program to store
    it, that value gets a program of its own, or is left to the graph, and reading starts again there. `left`: operators that stay with
    the graph, and why.
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
        self.staged: set[fx.Node] = set()
        self.begun: set[fx.Node] = set()  # tensors of the graph whose rows are reduced before the first product
        self.multiplied = _leading_to_products(graph)
        self.latest: dict[fx.Node, int] = {}  # the last group that a node depends on
        self.groups_before: dict[fx.Node, int] = {}

    def _made_by(self, leaf: str) -> int:
        return self._after(self.found.leaves[leaf].source)

    def _after(self, each: fx.Node) -> int:
        """The last group that a tensor depends on. Gradients come behind everything that there is when they are first read."""
        return len(self.found.placement.groups) - 1 if is_tangent(each) else self.latest.get(each, NOWHERE)

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
                at = nodes.index(self._go_back(self._give_way(cut)))
                continue
            if value is None and (other := self._begins(each) or self._waits_for(each)) is not None:
                at = nodes.index(self._go_back(other))
                continue
            latest = [self._after(arg) for arg in each.all_input_nodes]
            if value is not None:
                # What others have been given a program of their own for is not late any more.
                if each in self.begun or (each in self.staged and self.found.placement.is_late(value.node)):
                    value = late_is_staged(self.found, each, value)
                self.found.values[each] = value
                self.found.dtypes.setdefault(value.node, each.meta["val"].dtype)
                latest.append(self.found.placement[value.node].group)
            self.latest[each] = max(latest, default=NOWHERE)
        self.found.refusals |= self.cuts
        return self.found

    def _read(self, each: fx.Node) -> Value | None:
        found = self.found
        gradient = self._is_gradient_of_a_call(each)
        if gradient:
            self.begun.add(each)
        if each in self.begun:
            matrix = heads if gradient and each.meta["val"].dim() == 4 else tokens
            try:
                return matrix(At(found, each, self.laws), each)
            except RefusedError as refusal:  # no matrix of rows and columns: it stays with the graph
                self.begun.discard(each)
                self.cuts[each] = Reason(operator_name(each), str(refusal))
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

    def _is_gradient_of_a_call(self, each: fx.Node) -> bool:
        """A gradient of attention, or of the loss, on its way to a product: programs that turn it begin with it."""
        source, index = each.args if each.target is operator.getitem else (None, None)
        if not isinstance(source, fx.Node) or (packet_of(source), index) not in _GRADIENTS:
            return False
        kernels = each.meta["val"].dtype in FLOATS and each.meta["val"].dtype is not torch.float64
        return kernels and bool(self.laws) and each in self.multiplied and each not in self.cuts

    def _go_back(self, at: fx.Node) -> fx.Node:
        """Forget what was read from there on."""
        found = self.found
        found.placement.forget(self.groups_before[at])
        forgotten = False
        for each in found.nodes.nodes:
            forgotten |= each is at
            if forgotten:
                found.values.pop(each, None)
                found.uses.pop(each, None)
                found.refusals.pop(each, None)
        return at

    def _give_way(self, cut: CutError) -> fx.Node:
        """Give a value that others cannot wait for a program of its own, or leave it to the graph."""
        at = next(each for each, value in self.found.values.items() if value.node is cut.value)
        if self._can_be_staged(at):
            self.staged.add(at)
        else:
            self.cuts[at] = Reason("late", str(cut))
        return at

    def _waits_for(self, each: fx.Node) -> fx.Node | None:
        """A norm that the graph reads, or returns: from now on by a program of its own, since the one before left its statistics."""
        if each in self.cuts or each.op not in ("call_function", "output") or is_size_of_inputs(each):
            return None
        for arg in each.all_input_nodes:
            value = self.found.values.get(arg)
            if value is not None and self._finishes_a_statistic(value.node) and self._can_be_staged(arg):
                self.staged.add(arg)
                return arg
        return None

    def _finishes_a_statistic(self, value: Node) -> bool:
        stack, seen = [value], set()
        while stack:
            each = stack.pop()
            if each in seen or not self.found.placement.is_late(each):
                continue
            seen.add(each)
            if any(is_sink(arg.op) for arg in each.args):
                return True
            stack += each.args
        return False

    def _can_be_staged(self, each: fx.Node) -> bool:
        """A matrix, in a type that kernels have."""
        space = self.found.values[each].node.space
        dtype = each.meta["val"].dtype
        fits = space.rows == 1 and space.cols > 0 and dtype in FLOATS and dtype is not torch.float64
        return fits and each not in self.staged and each not in self.begun

    def _begins(self, each: fx.Node) -> fx.Node | None:
        """The tensor of the graph of which the operator takes a norm, if a program can begin with it and norms may be deferred."""
        if packet_of(each) not in NORMS or each not in self.multiplied or not self.laws or each in self.cuts:
            return None
        source = each.args[0]
        while isinstance(source, fx.Node) and packet_of(source) in _FROM_ONE and len(source.all_input_nodes) == 1:
            source = source.all_input_nodes[0]
        if not isinstance(source, fx.Node) or not is_tensor(source):
            return None
        if source in self.begun or source in self.found.constant or source in self.cuts:
            return None
        value = source.meta["val"]
        whole = value.dim() >= 2 and each.args[0].meta["val"].shape[-1] == value.shape[-1]  # type: ignore[union-attr]
        fits = whole and views.tokens(value.shape) is not None and value.dtype in (torch.float32, torch.bfloat16)
        if not fits or source in self.found.values or not _over_columns(each):
            return None
        self.begun.add(source)
        return source


def late_is_staged(graph: Graph, each: fx.Node, value: Value) -> Value:
    """Σ f(x, norm(u)) -> Σ of what a program of its own has made: it reads x, u and the statistics of u

    Exact. What a norm makes is known only behind the program that makes its rows. As a rule whoever reads it computes it on the way;
    where its rows are reduced again (norms behind a block as well as before it), where a product must read it, and where the graph
    does, a program without a product computes and stores it, and reduces its rows as it goes. The first norm of a model begins with
    such a program, too. Refuses values that take columns apart, and types that kernels do not have.
    """
    staged = node("stage", value.node, space=value.node.space, dtype=each.meta["val"].dtype)
    graph.origin[staged] = each
    return Value(staged, value.dims)


def _leading_to_products(graph: fx.Graph) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for each in reversed(graph.nodes):
        if packet_of(each) in (aten.mm, aten.addmm) or any(user in found for user in each.users):
            found.add(each)
    return found


def _over_columns(norm: fx.Node) -> bool:
    """Whether the last dimension is reduced, and no other."""
    over = norm.args[1] if len(norm.args) > 1 else None
    if packet_of(norm) in (aten.native_layer_norm, aten._fused_rms_norm):
        return isinstance(over, list | tuple) and len(over) == 1
    last = norm.args[0].meta["val"].dim() - 1  # type: ignore[union-attr]
    return isinstance(over, list | tuple) and len(over) == 1 and over[0] in (-1, last)
