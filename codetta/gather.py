"""Gather: operators that no program took, as regions that follow each other, for a compiler of such things to fuse."""

from __future__ import annotations

import math
import operator

from torch import Tensor, fx

from codetta.capture import Graph
from codetta.capture.kinds import adds_in_any_order, is_call, is_effect, is_random, is_size, is_size_of_inputs, is_view
from codetta.ir.view import hint
from codetta.steps import Finish, Fixed, Present, Region, Room, Run, Step

SMALL = 1 << 20  # elements of a tensor that is kept for all calls of a size


class Gather:
    """Operators of the graph that follow each other as regions, where there are at least two that compute something.

    `read`: what programs read. `given`: what is handed out, and must be made anew at every call.
    """

    def __init__(self, graph: Graph, read: set[fx.Node], given: set[fx.Node]) -> None:
        self.read, self.given = read, given
        # What sizes alone decide outlives a change of the parameters: it is kept apart from what those decide, too.
        self.sized = {
            each for each in graph.nodes.find_nodes(op="get_attr") if isinstance(each.meta.get("val"), Tensor)
        }
        self.fixed = self.sized | {each for each in graph.constant if each.op == "placeholder"}

    def __call__(self, steps: list[Step]) -> list[Step]:
        result: list[Step] = []
        run: list[fx.Node] = []
        for step in [*steps, None]:
            if isinstance(step, Present | Finish | Room) or (isinstance(step, Run) and _is_ready(step.target)):
                result.append(step)  # needs nothing but a launch or a call, and those stand before it already
                continue
            if isinstance(step, Run) and not _stands_alone(step.target):
                run.append(step.target)
                continue
            for known in (self.sized, self.fixed):
                found = self._decided_by(known, run)
                if found:
                    result.append(Fixed(region_of(found, self.read), lasting=known is self.sized))
                    run = [each for each in run if each not in set(found)]
                    known |= set(found)
                    self.fixed |= set(found)
            if sum(not is_view(each) for each in run) >= 2:
                result.append(region_of(run, self.read))
            else:
                result += [Run(each) for each in run]
            run = []
            if step is not None:
                result.append(step)
        return result

    def _decided_by(self, known: set[fx.Node], nodes: list[fx.Node]) -> list[fx.Node]:
        """Those that depend on sizes and on what is known, where there are at least two that compute something.

        Large ones are left to their readers: a mask is made faster where it is used than it is read.
        """
        found: list[fx.Node] = []
        for each in nodes:
            decided = all(arg in known or arg in found or is_size(arg) for arg in each.all_input_nodes)
            if decided and not is_random(each) and each not in self.given and _is_small(each):
                found.append(each)
        return found if sum(not is_view(each) for each in found) >= 2 else []


def _stands_alone(each: fx.Node) -> bool:
    """Whether no compiler is to take it into a region."""
    return is_call(each) or is_effect(each) or adds_in_any_order(each)


def _is_small(each: fx.Node) -> bool:
    value = each.meta.get("val")
    return not isinstance(value, Tensor) or math.prod(hint(size) for size in value.shape) <= SMALL


def _is_ready(each: fx.Node) -> bool:
    """A size, or one of the results of a call."""
    item = each.target is operator.getitem and isinstance(each.args[0], fx.Node) and is_call(each.args[0])
    return item or is_size_of_inputs(each)


def region_of(nodes: list[fx.Node], read: set[fx.Node]) -> Region:
    mine = set(nodes)
    inputs = dict.fromkeys(arg for each in nodes for arg in each.all_input_nodes if arg not in mine)
    outputs = [each for each in nodes if each in read or any(user not in mine for user in each.users)]
    return Region(list(nodes), list(inputs), outputs)
