"""What a graph writes back to its inputs: a cache of keys and values that grows by a row."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

import codetta.append  # noqa: F401 (its operator)
from codetta.capture.kinds import packet_of

aten, ours = torch.ops.aten, torch.ops.codetta
ROWS = 2  # the dimension of a cache (samples, heads, rows, columns) that grows


def rows_are_appended(graph: fx.Graph) -> None:
    """cache.copy_(index_copy(cache, places, rows))  ->  append(cache, places, rows)

    Exact. The new rows are written where the cache lies, instead of a copy of it that is written back; a few of them by the program that
    makes them, as a store of its own. Refuses a cache that is read elsewhere: whoever reads it may come too late to see it as it was.
    """
    for each in graph.find_nodes(op="call_function", target=aten.copy_.default):
        cache, new = each.args[:2]
        assert isinstance(cache, fx.Node) and isinstance(new, fx.Node)
        found = _places_and_rows(cache, new)
        if found is None or set(cache.users) != {each, new} or each.users:
            continue
        with graph.inserting_before(new):
            made = graph.call_function(ours.append.default, (cache, *found))
        made.meta |= {"val": new.meta["val"]}
        new.replace_all_uses_with(made)
        graph.erase_node(each)
        graph.erase_node(new)


def _places_and_rows(cache: fx.Node, new: fx.Node) -> tuple[Any, Any] | None:
    """What is written where; None if it is something else."""
    value = cache.meta["val"]
    if cache.op != "placeholder" or value.dim() != 4 or not new.args or new.args[0] is not cache:
        return None
    if packet_of(new) is aten.index_copy and new.args[1] == ROWS:
        return new.args[2], new.args[3]
    given: Any = new.args
    if packet_of(new) is aten.index_put and len(given) == 3 and len(given[1]) == 3:
        samples, heads, places = given[1]
        if (
            heads is None
            and _counts(samples, value.shape[0])
            and _is_turned(given[2])
            and places.meta["val"].dim() == 2
        ):
            return places, given[2].args[0]
    return None


def _counts(each: Any, size: Any) -> bool:
    """Whether it is 0, 1, ... as a column."""
    if not isinstance(each, fx.Node) or packet_of(each) is not aten.unsqueeze or each.args[1] not in (1, -1):
        return False
    numbers = each.args[0]
    return isinstance(numbers, fx.Node) and numbers.target is aten.arange.default and numbers.args == (size,)


def _is_turned(each: Any) -> bool:
    """Whether it is rows (samples, heads, rows, columns) with rows before heads."""
    return isinstance(each, fx.Node) and packet_of(each) is aten.transpose and set(each.args[1:]) == {1, 2}
