"""The row sum that a norm's gradient needs, where its gradient comes out of attention."""

from __future__ import annotations

import operator
from functools import partial
from typing import Any

import torch
from torch import fx

from codetta.capture.attention import MASK, QUERY
from codetta.capture.graph import Graph
from codetta.capture.kinds import behind, call, is_tangent, packet_of
from codetta.errors import Reason
from codetta.ir.view import Factor, product

aten, ours = torch.ops.aten, torch.ops.codetta
# Linear in what they are given, all of it.
_LINEAR = {
    aten.view, aten._unsafe_view, aten.reshape, aten.transpose, aten.permute, aten.clone, aten.expand, aten.unsqueeze, aten.squeeze,
    aten.slice, aten.neg, aten.alias, aten.split, aten.split_with_sizes, aten.unbind, aten.select, aten._to_copy,
}  # fmt: skip
_SUMS = {aten.add, aten.sub, aten.cat, aten.stack}


def inner_product_passes(graph: Graph) -> dict[fx.Node, Reason]:
    """Σ (dq Wq + dk Wk + dv Wv) · n  ->  Σ dq'·q' + Σ dk'·k' + Σ dv'·v'

    Reassociates. What attention is given (q', k', v') is linear in the products n Wᵀ, whatever turns them, so the inner product of a
    norm's result with its gradient is that of attention's arguments with theirs: it is known before the product with the weights is, and
    the norm's gradient can end in that product's epilogue. Refuses ways into attention that are not linear (norms of heads, biases, keys
    from elsewhere), and products that others read as well.
    Gives names for attention's arguments, which stay with the graph: they are there, and whoever turns the gradients reads them whole.
    """
    left: dict[fx.Node, Reason] = {}
    multiplied = behind(graph.nodes, lambda each: packet_of(each) in (aten.mm, aten.addmm))
    gradient = behind(graph.nodes, is_tangent)
    for each in list(graph.nodes.find_nodes(op="call_function", target=aten.sum.dim_IntList)):
        site = _Site(graph, each, multiplied, gradient)
        if each in gradient and site.found():
            left |= dict.fromkeys(site.replace(), Reason("attention", "its argument, as it is"))
    if left:
        graph.nodes.eliminate_dead_code()  # else what was read keeps nodes of its own
    return left


def _plain(each: Any) -> Any:
    """Behind casts and views."""
    while isinstance(each, fx.Node) and packet_of(each) in (
        aten._to_copy, aten.view, aten._unsafe_view, aten.reshape, aten.alias, aten.detach,
    ):  # fmt: skip
        each = each.args[0]
    return each


def _factors(each: Any) -> list[Any]:
    """What is multiplied, behind casts and views."""
    each = _plain(each)
    if isinstance(each, fx.Node) and packet_of(each) is aten.mul:
        return [factor for arg in each.args for factor in _factors(arg)]
    if isinstance(each, fx.Node) and packet_of(each) is aten.pow and each.args[1] == 1:
        return _factors(each.args[0])
    return [each]


def _is_scale(each: Any) -> bool:
    value = each.meta.get("val") if isinstance(each, fx.Node) else None
    return isinstance(value, torch.Tensor) and value.dim() == 3 and value.shape[-1] == 1


def _rows(outer: tuple[Factor, ...], inner: tuple[Factor, ...]) -> list[str] | None:
    """The sizes of two dimensions that are the rows, in that order; None if they are something else."""
    factors = [*outer, *inner]
    ordered = [each.place for each in factors] == sorted(each.place for each in factors)
    if not ordered or any(each.kind != "row" for each in factors):
        return None
    return [str(product(each.size for each in dimension)) for dimension in (outer, inner)]


class _Site:
    """One sum over columns, Σ dn·g·x, with n = r·x·g and dn = Σ a·W out of attention; or something else."""

    scale: fx.Node  # r
    attention: fx.Node  # its gradients

    def __init__(self, graph: Graph, total: fx.Node, multiplied: set[fx.Node], gradient: set[fx.Node]) -> None:
        self.graph, self.total, self.multiplied, self.gradient = graph, total, multiplied, gradient

    def found(self) -> bool:
        value = self.total.meta["val"]
        if value.dim() != 3 or self.total.args[1] not in ([-1], [2]) or [*self.total.args, False][2] is not True:
            return False
        factors = _factors(self.total.args[0])
        products = [each for each in factors if each in self.gradient and packet_of(each) is aten.mm]
        left = products[0].args[0] if len(products) == 1 else None
        if left is None or packet_of(left) is not aten.cat or len(left.args[0]) != 3:
            return False
        normed = {_plain(user.args[1]) for turn in left.users if packet_of(turn) is aten.t for user in turn.users}
        if len(normed) != 1:
            return False
        (result,) = normed
        rest, known = [each for each in factors if each is not products[0]], _factors(result)
        scales = [each for each in known if _is_scale(each)]
        if len(scales) != 1 or sorted(map(str, rest)) != sorted(str(each) for each in known if each is not scales[0]):
            return False
        (self.scale,) = scales
        attention = self._attention_behind(left)
        if attention is None or not self._is_fed_by(attention, result, products[0]):
            return False
        self.attention = attention
        return True

    def _attention_behind(self, left: fx.Node) -> fx.Node | None:
        """The one call whose gradients, and nobody else's, are turned into these columns."""
        calls: set[fx.Node] = set()
        stack, seen = [left], set()
        while stack:
            each = stack.pop()
            if each in seen or each not in self.gradient:
                continue
            seen.add(each)
            if is_tangent(each):
                return None
            if packet_of(each) is ours.attention_backward:
                calls.add(each)
            else:
                stack += each.all_input_nodes
        return calls.pop() if len(calls) == 1 else None

    def _is_fed_by(self, attention: fx.Node, normed: fx.Node, total: fx.Node) -> bool:
        """Whether attention's arguments are linear in three products of the norm's result, each row of its own rows."""
        if {user.args[1] for user in attention.users} != {0, 1, 2}:
            return False
        seen = [self.graph.values.get(user) for user in total.users if user.meta["val"].dim() == 3]
        rows = _rows(*seen[0].dims[:2]) if seen and seen[0] is not None else None
        found: set[fx.Node] = set()
        for each in attention.args[QUERY:MASK]:
            value = self.graph.values.get(each)  # type: ignore[arg-type]
            readers = {packet_of(user) for user in each.users}  # type: ignore[union-attr]
            if (
                value is None
                or len(value.dims) != 4
                or not readers <= {ours.attention_forward, ours.attention_backward}
            ):
                return False
            if rows is None or _rows(value.dims[0], value.dims[2]) != rows:
                return False
            products = self._products_of(each)  # type: ignore[arg-type]
            if products is None:
                return False
            found |= products
        return len(found) == 3 and all(_plain(each.args[0]) is normed for each in found)

    def _products_of(self, argument: fx.Node) -> set[fx.Node] | None:
        """The products that it is linear in; None if there is more to it."""
        found: set[fx.Node] = set()
        stack, seen = [argument], set()
        while stack:
            each = stack.pop()
            if each in seen or each not in self.multiplied:
                continue
            seen.add(each)
            packet = packet_of(each)
            if packet is aten.mm:
                found.add(each)
                continue
            turned = [arg in self.multiplied for arg in each.all_input_nodes]
            if packet is aten.mul:
                linear = sum(turned) == 1
            elif packet in _SUMS:
                number = packet in (aten.add, aten.sub) and any(isinstance(arg, int | float) for arg in each.args)
                linear = all(turned) and not number
            else:
                linear = packet in _LINEAR or each.target is operator.getitem
            if not linear:
                return None
            stack += each.all_input_nodes
        return found

    def replace(self) -> list[fx.Node]:
        dtype, gradients = self.total.meta["val"].dtype, {user.args[1]: user for user in self.attention.users}
        add = partial(call, self.graph.nodes)
        with self.graph.nodes.inserting_before(self.total):
            parts = []
            arguments = [add(aten.alias.default, each) for each in self.attention.args[QUERY:MASK]]
            for at, argument in enumerate(arguments):
                wide = add(aten._to_copy.default, gradients[at], dtype=dtype)
                parts.append(
                    add(aten.sum.dim_IntList, add(aten.mul.Tensor, wide, argument), [1, 3])
                )  # heads and columns
            rows = add(aten.add.Tensor, add(aten.add.Tensor, parts[0], parts[1]), parts[2])
            self.total.replace_all_uses_with(add(aten.div.Tensor, add(aten.unsqueeze.default, rows, -1), self.scale))
        return arguments
