"""Repeats: what a graph computes twice is computed once, and slices that cut nothing off are dropped.

Every layer of a model makes its mask anew, and indexing with `:` leaves slices where sizes are symbols.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from codetta.capture.kinds import is_effect, is_random, packet_of

aten = torch.ops.aten


def whole_slice_vanishes(graph: fx.Graph) -> None:
    """x[0 : all of it]  ->  x

    Exact. Where sizes are symbols, a model's `:` arrives as a slice, behind which laws would not find what they look for. Refuses slices
    that are written to or handed out.
    """
    for each in list(graph.nodes):
        if packet_of(each) is not aten.slice or (len(each.args) > 4 and each.args[4] != 1):
            continue
        source = each.args[0]
        same = source.meta["val"].shape == each.meta["val"].shape
        if same and not any(user.op == "output" or is_effect(user) for user in each.users):
            each.replace_all_uses_with(source)
            graph.erase_node(each)


def without_repeats(graph: fx.Graph) -> None:
    """Equal operators on equal arguments become one; in place."""
    first: dict[Any, fx.Node] = {}
    for each in list(graph.nodes):
        # New memory is for its owner to write to.
        if each.op != "call_function" or is_random(each) or "empty" in getattr(packet_of(each), "__name__", ""):
            continue
        key = each.target, _key(each.args), _key(each.kwargs)
        try:
            known = first.setdefault(key, each)
        except TypeError:
            continue  # an argument that cannot be compared
        if known is not each:
            each.replace_all_uses_with(known)
            graph.erase_node(each)


def _key(argument: Any) -> Any:
    """Arguments as something to look up: 1, 1.0 and True are three different ones."""
    if isinstance(argument, tuple | list):
        return tuple(_key(each) for each in argument)
    if isinstance(argument, dict):
        return tuple((name, _key(each)) for name, each in sorted(argument.items()))
    if isinstance(argument, slice):
        return slice, _key((argument.start, argument.stop, argument.step))
    return type(argument), argument
