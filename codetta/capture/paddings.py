"""Sums of what is padded with zeros: the gradient of something that was taken apart and turned."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from codetta.capture.kinds import call, packet_of

aten = torch.ops.aten


def paddings_join(graph: fx.Graph) -> None:
    """pad(x) + pad(y)  ->  join(x, y)

    Exact. Where two parts of a dimension are padded with zeros to the whole and added, and neither lies where the other does, as the
    gradients of both halves of a head that is rotated. Refuses parts that leave something between them.
    """
    for each in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        parts = [_part(arg) for arg in each.args]
        if each.kwargs or len(parts) != 2 or None in parts:
            continue
        (x, dim, begin, middle, size), (y, other, start, end, _) = sorted(parts, key=lambda part: part[2])  # type: ignore[misc, index]
        if (dim, begin, middle, end) != (other, 0, start, size):
            continue
        with graph.inserting_before(each):
            joined = call(graph, aten.cat.default, [x, y], dim)
        each.replace_all_uses_with(joined)
    graph.eliminate_dead_code()


def _part(arg: Any) -> tuple[fx.Node, int, int, int, int] | None:
    """(x, dimension, begin, end, size of the whole) of a part that is padded; None if it is something else."""
    if not isinstance(arg, fx.Node) or packet_of(arg) is not aten.slice_backward:
        return None
    given: Any = arg.args
    x, sizes, dim, begin, end, step = given
    dim = dim % len(sizes)
    size = sizes[dim]
    if step != 1 or not all(isinstance(each, int) for each in (size, begin, end)) or begin < 0 or end < 0:
        return None
    return x, dim, begin, min(end, size), size
