"""A training plan as AOTAutograd wants it: two graphs, each of a single call.

AOTAutograd hands over the joint graph of a model's results and gradients and expects two graphs back, of which the first returns what
the second needs beside its own results: (results, tensors, sizes) -> (sizes, tensors, tangents).
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from codetta.runtime.executor import Training

# Stands for a tensor that is carried over. Were it a fake tensor, AOTAutograd would take what it stands for to be ours to overwrite, and
# refuse to walk a graph twice.
UNKNOWN = torch.empty(0, device="meta")


def two_graphs(training: Training) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The graphs of `training.forward` and `training.backward`."""
    forward = fx.Graph()
    given = {each.name: _placeholder(forward, each.name, each.meta["val"]) for each in training.primals}
    call = forward.call_function(training.forward, tuple(given.values()))
    count = len(training.results)
    found: list[Any] = []
    for at, each in enumerate(training.results):
        if isinstance(each, fx.Node) and each.name in given:
            found.append(given[each.name])  # handed through
        else:
            found.append(_item(forward, call, at, each.meta["val"]) if isinstance(each, fx.Node) else each)
    carried = [(name, UNKNOWN) for name in ("widths", *training.tensors)]
    known = {training.writer.variable(each): each.meta.get("val") for each in training.plan.graph.nodes.nodes}
    sizes = [(name, known[name]) for name in training.sizes]
    for at, (name, value) in enumerate([*carried, *sizes]):
        own = given.get(name.removeprefix("v_"))
        found.append(own if own is not None else _item(forward, call, count + at, value))
    forward.output(tuple(found))

    backward = fx.Graph()
    arriving = [_placeholder(backward, name, value) for name, value in [*sizes, *carried]]
    arriving += [_placeholder(backward, each.name, each.meta["val"]) for each in training.tangents]
    call = backward.call_function(training.backward, (arriving,))
    gradients = [
        _item(backward, call, at, each.meta["val"]) if isinstance(each, fx.Node) else None
        for at, each in enumerate(training.gradients)
    ]
    backward.output(tuple(gradients))
    return fx.GraphModule({}, forward), fx.GraphModule({}, backward)


def called(module: fx.GraphModule) -> Callable[..., Any]:
    """What the single call of such a graph calls: the graph, compiled."""
    (function,) = (
        each.target for each in module.graph.nodes if each.op == "call_function" and each.target is not operator.getitem
    )
    return function


def _placeholder(graph: fx.Graph, name: str, value: Any) -> fx.Node:
    made = graph.placeholder(name)
    made.meta["val"] = value
    return made


def _item(graph: fx.Graph, call: fx.Node, at: int, value: Any) -> fx.Node:
    made = graph.call_function(operator.getitem, (call, at))
    made.meta["val"] = value
    return made
