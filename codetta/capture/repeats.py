"""Repeats: what a graph computes twice is computed once. Every layer of a model makes its mask anew."""

from __future__ import annotations

from typing import Any

from torch import fx

from codetta.capture.kinds import is_random, packet_of


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
