"""Placement: which program computes a value. Found value by value, as the graph is read.

Products with one left operand that follow each other make a group, and a group becomes a program. A value is computed by the
last group that it depends on. Groups are numbered in the order of the graph, and a group reads only what earlier ones, or the
graph before it, have made: cycles cannot arise. A reduction of a whole row is known only behind its program: values that use
it are "late" and are computed where they are read, by later programs, or by a program of their own without a product (a
stage), where something cannot wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from codetta.ir.graph import Node
from codetta.ir.op import is_sink

NOWHERE = -1  # made of leaves alone: computed by whoever reads it


@dataclass(frozen=True)
class Place:
    group: int
    late: bool = False  # known only behind the group
    made: int = NOWHERE  # of what is computed where it is read: the last group that its tensors depend on


@dataclass(eq=False)
class Group:
    """Products of one left operand, or a stage: a program to be."""

    number: int
    base: Node | None  # None: a stage
    dtype: torch.dtype
    products: list[Node] = field(default_factory=list)


@dataclass(eq=False)
class Placement:
    """`made_by(leaf)`: the last group that a leaf's tensor depends on."""

    made_by: Callable[[str], int]
    groups: list[Group] = field(default_factory=list)
    places: dict[Node, Place] = field(default_factory=dict)

    def __getitem__(self, value: Node) -> Place:
        # Only what is new: a value of the last layer has the whole model behind it.
        stack = [value]
        while stack:
            missing = [arg for arg in stack[-1].args if arg not in self.places] if stack[-1] not in self.places else []
            if missing:
                stack += reversed(missing)
                continue
            each = stack.pop()
            if each not in self.places:
                self.places[each] = self._find(each)
        return self.places[value]

    def is_late(self, value: Node) -> bool:
        return self[value].late

    def forget(self, groups: int) -> None:
        """Take back all groups but the first few, and what was placed in the others."""
        del self.groups[groups:]
        # What is made of leaves alone is looked at anew: its tensors may come behind other groups now.
        self.places = {
            value: place
            for value, place in self.places.items()
            if place.group != NOWHERE and max(place.group, place.made) < groups
        }

    def _find(self, value: Node) -> Place:
        if value.op == "product":
            return Place(self.products_merge(value).number)
        if value.op == "stage":
            self.groups.append(Group(len(self.groups), None, value.attr("dtype"), [value]))
            return Place(len(self.groups) - 1)
        if value.op == "load":
            return Place(NOWHERE, made=self.made_by(value.attr("name")))
        if not value.args or value.op == "vector":
            return Place(NOWHERE)
        args = [self.places[arg] for arg in value.args]
        group, made = max(arg.group for arg in args), max(arg.made for arg in args)
        if group == NOWHERE:
            return Place(NOWHERE, made=made)
        if is_sink(value.op):
            return Place(group, args[0].late, made if args[0].late else NOWHERE)
        behind = [place.group for place, arg in zip(args, value.args, strict=True) if place.late or is_sink(arg.op)]
        # What the graph makes of this very group's results comes too late for it as well.
        late = group in behind or made >= group
        return Place(group, late, made if late else NOWHERE)

    def products_merge(self, product: Node) -> Group:
        """x W1, x W2, x W3  ->  one program with the accumulators x W1, x W2, x W3

        Exact. Queries, keys and values, or gate and up, read their rows once, whether they are one weight or several. Only
        products that follow each other in the graph: what comes between them might be needed by one and need the other.
        """
        dtype, base = product.attr("dtype"), product.args[0]
        last = self.groups[-1] if self.groups else None
        if last is None or last.base is not base or last.dtype != dtype:
            last = Group(len(self.groups), base, dtype)
            self.groups.append(last)
        last.products.append(product)
        return last
