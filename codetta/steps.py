"""Steps: what a plan is made of, in order. Data alone: partition.py makes them, runtime/writer.py writes them down."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from codetta.capture import Graph, Value
from codetta.errors import Reason
from codetta.ir.graph import Node
from codetta.ir.op import is_sink
from codetta.program import Program


@dataclass(frozen=True, eq=False)
class Source:
    """Where a program's operand comes from: a leaf of the graph, a stored value, a statistic, parameters alone, or the places of rows."""

    kind: str  # leaf, stored, stat, constant, places
    name: str = ""
    value: Node | None = None
    dtype: torch.dtype | None = None
    tensor: fx.Node | None = None  # the places


@dataclass(eq=False)
class Launch:
    """A program with what it reads and what it makes."""

    number: int
    device: torch.device
    program: Program
    rows: Any  # a size, symbolic perhaps
    a: Source
    weights: list[tuple[str, Node | None]]  # a weight's name and its gain
    operands: dict[str, Source]
    stores: dict[str, tuple[Node, torch.dtype]]
    sinks: dict[str, Node]
    into: dict[str, tuple[Room, int]]  # where a store begins that is a part of something joined
    appends: dict[str, fx.Node] = field(default_factory=dict)  # stores that are rows of a cache


@dataclass(eq=False)
class Present:
    """A stored value as the tensor that the graph expects."""

    target: fx.Node
    value: Value
    dtype: torch.dtype


@dataclass(eq=False)
class Finish:
    """A number for each row, or for each column, that is made of reductions alone, as the tensor that the graph expects."""

    target: fx.Node
    value: Node
    dtype: torch.dtype

    @property
    def sinks(self) -> list[Node]:
        return sinks_of(self.value)


@dataclass(eq=False)
class Run:
    """An operator that stays with the graph."""

    target: fx.Node


@dataclass(eq=False)
class Region:
    """Operators that stay with the graph and follow each other: one kernel or a few, where a compiler fuses them."""

    nodes: list[fx.Node]
    inputs: list[fx.Node]
    outputs: list[fx.Node]

    def needed(self, wanted: set[fx.Node]) -> Region:
        """What of it is needed for some of its outputs."""
        outputs = [each for each in self.outputs if each in wanted]
        found = set(outputs)
        for each in reversed(self.nodes):
            if each in found:
                found |= set(each.all_input_nodes)
        return Region(
            [each for each in self.nodes if each in found], [each for each in self.inputs if each in found], outputs
        )


@dataclass(eq=False)
class Mask:
    """A mask that is made of sizes alone, with what makes it."""

    target: fx.Node
    makes: Region


@dataclass(eq=False)
class Fixed:
    """Operators whose results depend on sizes and parameters alone: tables of positions. The same at every call of a size."""

    makes: Region
    lasting: bool  # no parameter comes into it


@dataclass(eq=False)
class Room:
    """Memory for values that the graph joins: programs store them in it side by side."""

    target: fx.Node


@dataclass(frozen=True, eq=False)
class Vector:
    """A row that phases of one kernel hand over; without columns: what all blocks have summed up, each for itself."""

    number: int
    cols: int


@dataclass(eq=False)
class Multiply:
    """A program of one row as a phase of a kernel."""

    launch: Launch
    program: Program  # with all parts on strips
    a: Vector | Source
    operands: dict[str, Vector | Source]
    sends: dict[str, Vector]  # stores and sinks that other phases read
    keeps: list[str] = field(default_factory=list)  # stores that others read


@dataclass(eq=False)
class Attend:
    """Attention of one query over a cache, and the row that is new in it, as a phase."""

    target: fx.Node
    query: Vector
    new: tuple[Vector, Vector]  # key and value
    caches: tuple[fx.Node, fx.Node]
    places: fx.Node
    window: int  # 0: everything before it is seen
    heads: int
    scale: float
    result: Vector


Phase = Multiply | Attend


@dataclass(eq=False)
class Whole:
    """Launches, and the attention between them, as one kernel."""

    phases: list[Phase]
    vectors: list[Vector]

    @property
    def products(self) -> list[Multiply]:
        return [each for each in self.phases if isinstance(each, Multiply)]


Step = Launch | Present | Finish | Run | Region | Mask | Fixed | Room | Whole


@dataclass(eq=False)
class Plan:
    steps: list[Step]
    graph: Graph
    forward: int  # how many of the steps the graph's own results need; the others make gradients
    again: set[int]  # programs that make something once more, so that nobody keeps it
    why_chain: Reason | None = None  # why its launches are not one kernel, where that was wanted


def sinks_of(value: Node) -> list[Node]:
    """The reductions that it is made of, if there is nothing else: no matrix, and no tensor of the graph."""
    found, stack, seen = [], [value], set()
    while stack:
        each = stack.pop()
        if each in seen:
            continue
        seen.add(each)
        if is_sink(each.op):
            found.append(each)
        elif each.op in ("load", "product", "stage", "vector") or each.space.cols:
            return []
        else:
            stack += each.args
    return found
