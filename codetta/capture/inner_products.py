"""The row sum that a norm's gradient needs, where its gradient comes out of attention."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from codetta.capture.kinds import behind, is_tangent, packet_of
from codetta.errors import Reason

aten, ours = torch.ops.aten, torch.ops.codetta
_SEEN_OTHERWISE = {
    aten.view, aten._unsafe_view, aten.reshape, aten.transpose, aten.permute, aten.clone, aten.expand, aten.unsqueeze, aten.squeeze,
    aten.slice, aten.cat, aten.neg, aten.alias, aten.split, aten.split_with_sizes, aten.unbind, aten.stack, aten.select, aten._to_copy,
}  # fmt: skip


def inner_product_passes(graph: fx.Graph) -> dict[fx.Node, Reason]:
    """Σ (dq Wq + dk Wk + dv Wv) · n  ->  Σ dq'·q' + Σ dk'·k' + Σ dv'·v'

    Reassociates. What attention is given (q', k', v') is linear in the products n Wᵀ, whatever turns them, so the inner product of a
    norm's result with its gradient is that of attention's arguments with theirs: it is known before the product with the weights is, and
    the norm's gradient can end in that product's epilogue. Refuses ways into attention that are not linear (norms of heads, biases).
    Gives the operators that stay with the graph: whoever turns attention's gradients reads those tensors anyway.
    """
    left: dict[fx.Node, Reason] = {}
    multiplied = behind(graph, lambda each: packet_of(each) in (aten.mm, aten.addmm))
    gradient = behind(graph, is_tangent)
    for each in list(graph.find_nodes(op="call_function", target=aten.sum.dim_IntList)):
        found = _site(each, multiplied, gradient)
        if found is not None:
            made = _replace(graph, each, *found)
            left |= dict.fromkeys(made, Reason("attention", "taken of its gradients, where they are turned"))
    graph.eliminate_dead_code()
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


def _site(total: fx.Node, multiplied: set[fx.Node], gradient: set[fx.Node]) -> tuple[fx.Node, fx.Node] | None:
    """The scale of the rows, and attention's gradients, if this is Σ dn·g·x, with n = r·x·g and dn = Σ a·W out of attention."""
    value = total.meta["val"]
    last = value.dim() - 1
    if value.dim() != 3 or total.args[1] not in ([-1], [last]) or [*total.args, False][2] is not True:
        return None
    factors = _factors(total.args[0])
    products = [each for each in factors if each in gradient and packet_of(each) is aten.mm]
    left = products[0].args[0] if len(products) == 1 else None
    if left is None or packet_of(left) is not aten.cat:
        return None
    normed = {user.args[1] for turn in left.users if packet_of(turn) is aten.t for user in turn.users}
    if len(normed) != 1:
        return None
    rest, known = [each for each in factors if each is not products[0]], _factors(normed.pop())
    scales = [each for each in known if isinstance(each, fx.Node) and _is_scale(each)]
    if len(scales) != 1 or sorted(map(str, rest)) != sorted(str(each) for each in known if each is not scales[0]):
        return None
    call = _attention_behind(left, multiplied, gradient)
    return (scales[0], call) if call is not None else None


def _is_scale(each: fx.Node) -> bool:
    value = each.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[-1] == 1


def _attention_behind(left: fx.Node, multiplied: set[fx.Node], gradient: set[fx.Node]) -> fx.Node | None:
    """The one call whose gradients, all of them, are turned into these columns, if its arguments are linear in the products."""
    calls: set[fx.Node] = set()
    stack, seen = [left], set()
    while stack:
        each = stack.pop()
        if each in seen:
            continue
        seen.add(each)
        if packet_of(each) is ours.attention_backward:
            calls.add(each)
        else:
            stack += [arg for arg in each.all_input_nodes if arg in gradient]
    if len(calls) != 1:
        return None
    (call,) = calls
    items = {user.args[1] for user in call.users if user.target is operator.getitem}
    arguments = call.args[4:7]
    linear = all(isinstance(each, fx.Node) and _is_linear(each, multiplied) for each in arguments)
    return call if linear and items == {0, 1, 2} and len(left.args[0]) == 3 else None  # type: ignore[arg-type]


def _is_linear(each: fx.Node, multiplied: set[fx.Node]) -> bool:
    """Whether it is made of products by operators that are linear, and nobody but attention reads it."""
    readers = {packet_of(user) for user in each.users}
    if not readers <= {ours.attention_forward, ours.attention_backward}:
        return False
    stack, seen = [each], set()
    while stack:
        node = stack.pop()
        if node in seen or node not in multiplied:
            continue
        seen.add(node)
        packet = packet_of(node)
        if packet is aten.mm:
            continue
        if packet is aten.mul:
            if sum(arg in multiplied for arg in node.all_input_nodes) > 1:
                return False
        elif packet in (aten.add, aten.sub):
            if any(arg not in multiplied for arg in node.args):  # a bias
                return False
        elif packet not in _SEEN_OTHERWISE and node.target is not operator.getitem:
            return False
        stack += node.all_input_nodes
    return True


def _replace(graph: fx.Graph, total: fx.Node, scale: fx.Node, call: fx.Node) -> list[fx.Node]:
    value, gradients = total.meta["val"], {user.args[1]: user for user in call.users}
    all_made: list[fx.Node] = []

    def add(target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        made = graph.call_function(target, args, kwargs)
        given = fx.node.map_arg((args, kwargs), lambda each: each.meta["val"])
        with value.fake_mode:
            made.meta["val"] = target(*given[0], **given[1])
        all_made.append(made)
        return made

    with graph.inserting_before(total):
        found = None
        for at, argument in enumerate(call.args[4:7]):
            wide = [add(aten._to_copy.default, each, dtype=value.dtype) for each in (gradients[at], argument)]
            part = add(aten.sum.dim_IntList, add(aten.mul.Tensor, *wide), [1, 3])  # over heads and their columns
            found = part if found is None else add(aten.add.Tensor, found, part)
        total.replace_all_uses_with(add(aten.div.Tensor, add(aten.unsqueeze.default, found, -1), scale))
    return all_made
