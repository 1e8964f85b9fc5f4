"""The gradient of an embedding in a graph, and what it is added to."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import codetta.embedding  # noqa: F401 (its operator)
from codetta.capture.kinds import call, packet_of

aten, ours = torch.ops.aten, torch.ops.codetta


def embedding_adds_up(graph: fx.Graph) -> None:
    """s·h + embedding_backward(dx, ids)  ->  embedding_gradient(dx, ids, h, s)

    Exact, but for one rounding less. The table's gradient is made once, the rows that were looked up are added to it where they belong,
    in a fixed order, and no table of zeros is filled and added. h: what a tied head gives, if there is any. Refuses gradients that are
    divided by how often a row was looked up.
    """
    for each in graph.find_nodes(op="call_function", target=aten.embedding_dense_backward.default):
        gradient, ids, classes, padding, by_frequency = each.args
        if by_frequency or not isinstance(classes, int):
            continue
        total, base, scale = _sum(each)
        with graph.inserting_before(total):
            made = call(graph, ours.embedding_gradient.default, gradient, ids, classes, padding, base, scale)
        total.replace_all_uses_with(made)
    graph.eliminate_dead_code()


def _sum(each: fx.Node) -> tuple[fx.Node, Any, Any]:
    """The sum that the table is a part of, with the other part and its factor; or the table alone."""
    (user,) = each.users if len(each.users) == 1 else (None,)
    if user is None or packet_of(user) is not aten.add or user.kwargs or not _alike(each, user):
        return each, None, None
    (other,) = [arg for arg in user.args if arg is not each] or [None]
    if not isinstance(other, fx.Node) or not _alike(each, other):
        return each, None, None
    wide = other.args[0] if packet_of(other) is aten._to_copy and len(other.users) == 1 else other
    if isinstance(wide, fx.Node) and packet_of(wide) is aten.mul and len(wide.users) == 1:
        for table, scale in (wide.args, wide.args[::-1]):
            if isinstance(scale, fx.Node) and scale.meta["val"].dim() == 0 and isinstance(table, fx.Node):
                return user, table, scale
    return user, other, None


def _alike(x: fx.Node, y: fx.Node) -> bool:
    one, other = x.meta["val"], y.meta["val"]
    return bool(one.dtype == other.dtype and one.shape == other.shape and one.device == other.device)
