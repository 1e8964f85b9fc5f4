"""Sums of products: one product over joined columns, where joining them costs nothing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from codetta.capture.kinds import behind, call, is_call, is_tangent, made_of, packet_of

aten = torch.ops.aten
_VIEWS = (aten.view, aten._unsafe_view, aten.reshape)
_PRODUCTS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)


@dataclass(frozen=True)
class _Term:
    """A product of a sum, a · w, and the products aᵀ · n that a also goes into."""

    product: fx.Node
    turned: tuple[fx.Node, ...]

    @property
    def left(self) -> fx.Node:
        return self.product.args[0]  # type: ignore[return-value]


def sums_of_products_join(graph: fx.Graph, parameters: list[fx.Node]) -> None:
    """a · v + b · w  ->  [a b] · [v; w]

    Reassociates. Where a and b come out of attention (gradients of queries, keys and values), whoever makes them puts them side by side;
    partial sums are then never stored, and the weights' gradients aᵀ · n and bᵀ · n are parts of [a b]ᵀ · n. Refuses factors that a
    product makes: its program stores them, and joining would copy them.
    """
    constant = made_of(graph, parameters)
    gradient = behind(graph, is_tangent)
    for root in [each for each in graph.nodes if packet_of(each) is aten.add and each in gradient]:
        if any(packet_of(user) is aten.add for user in _users(root)):
            continue  # a part of a larger sum
        terms, others = _terms(root, constant, gradient)
        if len(terms) > 1:
            _join(graph, root, terms, others)
            _order(graph)
    graph.eliminate_dead_code()


def _users(each: fx.Node) -> list[fx.Node]:
    """Who reads it, behind views."""
    return [found for user in each.users for found in (_users(user) if packet_of(user) in _VIEWS else [user])]


def _seen(each: Any) -> Any:
    """What a view shows, if nobody else looks at that."""
    while isinstance(each, fx.Node) and packet_of(each) in _VIEWS and len(each.users) == 1:
        each = each.args[0]
    return each


def _terms(root: fx.Node, constant: set[fx.Node], gradient: set[fx.Node]) -> tuple[list[_Term], list[fx.Node]]:
    """The products of a sum that can be joined, and what else is added."""
    terms: list[_Term] = []
    others: list[fx.Node] = []
    stack: list[Any] = [root]
    while stack:
        each = stack.pop()
        inner = _seen(each)
        single = isinstance(inner, fx.Node) and (inner is root or len(inner.users) == 1)
        if single and packet_of(inner) is aten.add and not inner.kwargs and _adds_tensors(inner):
            stack += reversed(inner.args)
        elif (
            single
            and packet_of(inner) is aten.mm
            and inner.args[1] in constant
            and _is_made_by_others(inner.args[0], gradient)
        ):
            terms.append(_Term(inner, tuple(_turned(inner.args[0]))))
        elif isinstance(each, fx.Node):
            others.append(each)
        else:
            return [], []
    right = {tuple(each.args[1] for each in term.turned) for term in terms}
    alike = all(_kind(term.product) == _kind(terms[0].product) for term in terms)
    same = len(right) == 1 and len(right.pop()) <= 1
    if not same or not alike or any(_kind(each) != _kind(root) for each in others):
        return [], []
    return terms, others


def _kind(each: Any) -> tuple[torch.dtype, str]:
    """Type and shape. Sizes may be symbols, which nobody is to compare."""
    return each.meta["val"].dtype, str(tuple(each.meta["val"].shape))


def _adds_tensors(each: fx.Node) -> bool:
    """Whether a sum is one of whole tensors of the same kind."""
    return all(isinstance(arg, fx.Node) and _kind(arg) == _kind(each) for arg in each.args)


def _is_made_by_others(factor: Any, gradient: set[fx.Node]) -> bool:
    """Whether it comes out of attention, by way of operators that are left to the graph."""
    stack, seen, found = [factor], set(), False
    while stack:
        each = stack.pop()
        if each in seen or each not in gradient:
            continue
        seen.add(each)
        if packet_of(each) in _PRODUCTS:
            return False
        found |= is_call(each)
        if not is_call(each):
            stack += each.all_input_nodes
    return found


def _turned(each: Any) -> list[fx.Node]:
    """The products aᵀ · n."""
    turns = [user for user in each.users if packet_of(user) is aten.t]
    return [user for turn in turns for user in turn.users if packet_of(user) is aten.mm and user.args[0] is turn]


def _join(graph: fx.Graph, root: fx.Node, terms: list[_Term], others: list[fx.Node]) -> None:
    place = {each: number for number, each in enumerate(graph.nodes)}
    turned = [each for term in terms for each in term.turned]
    add = partial(call, graph)
    # How a product is seen in the sum; sizes are taken from there, since they may be symbols.
    seen = next((user for user in terms[0].product.users if packet_of(user) in _VIEWS), None)
    factors: list[Any] = [term.left for term in terms] + [each.args[1] for each in turned]
    with graph.inserting_before(max(factors, key=place.__getitem__).next):
        left = add(aten.cat.default, [term.left for term in terms], 1)
        weight = add(aten.cat.default, [term.product.args[1] for term in terms], 0)
        total = add(aten.mm.default, left, weight)
        total.meta["fwd_nn_module_stack"] = terms[0].product.meta.get("fwd_nn_module_stack")
        if seen is not None:
            total = add(aten.view.default, total, seen.args[1])
        parts = add(aten.mm.default, add(aten.t.default, left), turned[0].args[1]) if turned else None
        start = 0
        for term in terms:
            stop = start + term.left.meta["val"].shape[1]
            for each in term.turned:
                each.replace_all_uses_with(add(aten.slice.Tensor, parts, 0, start, stop))
            start = stop
    with graph.inserting_before(root):
        for other in others:
            total = add(aten.add.Tensor, other, total)
    root.replace_all_uses_with(total)


def _order(graph: fx.Graph) -> None:
    """Readers behind what they read: the gradient of a joined weight comes later than that of its first part came."""
    seen: set[fx.Node] = set()
    each = next(iter(graph.nodes))
    while each.op != "root":
        seen.add(each)
        for user in list(each.users):
            if user in seen:
                each.append(user)
                seen.discard(user)
        each = each.next
