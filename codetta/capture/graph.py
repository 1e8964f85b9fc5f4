"""What is captured: values on token matrices, the tensors they read, and why others stayed with the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from codetta.errors import Reason
from codetta.ir.graph import Node
from codetta.ir.view import Dims
from codetta.placement import Placement
from codetta.program import Operand
from codetta.rewrite.gradient import Use

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Law = Callable[[Node, Callable[[Node], bool]], Node | None]  # of a product, and which values are late


@dataclass(frozen=True, eq=False)
class Value:
    """What the graph sees as a tensor: a node and how its rows and columns make up the dimensions."""

    node: Node
    dims: Dims


@dataclass(frozen=True, eq=False)
class Leaf:
    """A tensor of the graph that values read: the operand that it is to them, and the order of its dimensions as a matrix."""

    operand: Operand
    source: fx.Node
    order: tuple[int, ...]  # rows first, then columns; dimensions of size one are left out
    start: int | None = None  # its first column, where some are left out

    def matrix(self, tensor: Tensor) -> Tensor:
        """The tensor as programs read it."""
        cols = self.operand.cols
        if self.start is not None:
            tensor = tensor[..., self.start : self.start + cols]
        order = [*(at for at in range(tensor.dim()) if at not in self.order), *self.order]
        if order != sorted(order):
            tensor = tensor.permute(order)
        if self.operand.rows == "none":
            return tensor.reshape(-1)
        if tensor.dim() == 2 and tensor.shape[1] == cols:
            return tensor
        return tensor.reshape(-1, cols) if cols else tensor.reshape(-1)


@dataclass(frozen=True)
class Weight:
    """A B operand: columns start to stop of a matrix of the graph; stored (N, K) or (K, N)."""

    source: fx.Node
    transposed: bool  # stored (K, N)
    start: int
    stop: int

    def matrix(self, tensor: Tensor) -> Tensor:
        """(N, K), as it lies in memory."""
        return (tensor.t() if self.transposed else tensor)[self.start : self.stop]


@dataclass
class Graph:
    """A captured graph: the FX graph, and what is known of its nodes."""

    nodes: fx.Graph
    placement: Placement
    values: dict[fx.Node, Value] = field(default_factory=dict)
    leaves: dict[str, Leaf] = field(default_factory=dict)
    weights: dict[str, Weight] = field(default_factory=dict)
    constant: set[fx.Node] = field(default_factory=set)  # computed from parameters alone
    fired: dict[fx.Node, list[str]] = field(default_factory=dict)  # laws, by the operator that they were applied to
    origin: dict[Node, fx.Node] = field(default_factory=dict)  # of products
    dtypes: dict[Node, torch.dtype] = field(default_factory=dict)  # in which the graph holds a value
    refusals: dict[fx.Node, Reason] = field(default_factory=dict)
    uses: dict[fx.Node, Use] = field(default_factory=dict)  # products, as they were written


class RefusedError(Exception):
    """A handler cannot express the operator; the text says why."""


class CutError(Exception):
    """A value must exist as a tensor before the graph goes on, and no program can make it: the graph must."""

    def __init__(self, value: Node, why: str) -> None:
        super().__init__(why)
        self.value = value
