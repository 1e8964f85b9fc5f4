"""Ahead: kernels of a plan, built side by side before the first call needs them one after the other.

A kernel depends on the types, sizes and alignment of its tensors, not on what is in them: tensors without memory stand in. Where
a stand-in was wrong (a tensor that is strided in an unusual way), the kernel is built at the first launch, as without this.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

import torch
from torch import Tensor

from codetta import dispatch
from codetta.capture import Graph
from codetta.ir.view import hint
from codetta.partition import Launch, Plan
from codetta.plan.cost import PARTIAL_COLS
from codetta.program import Operand, Product
from codetta.runtime.bind import Binding, bind_operand, bind_output
from codetta.stat import FIELDS, Stat


class Ahead:
    """The kernels of a plan under construction. Whoever needs them waits."""

    def __init__(self, plan: Plan) -> None:
        steps = [step for step in plan.steps if isinstance(step, Launch)]
        # Layers share their programs.
        different = {(step.program, step.device, hint(step.rows)): step for step in steps}
        self.pool = ThreadPoolExecutor(min(16, os.cpu_count() or 1))
        self.builds: dict[Future[None], str] = {
            self.pool.submit(_build, plan.graph, step): step.program.name for step in different.values()
        }

    def __len__(self) -> int:
        return len(self.builds)

    def wait(self, done: Callable[[str], None]) -> None:
        """Until all are built; those that fail say so when they are launched."""
        for each in as_completed(self.builds):
            done(self.builds[each])
        self.pool.shutdown()


def _build(graph: Graph, step: Launch) -> None:
    # In a thread of its own: here nobody intercepts the making of tensors, as the tracer does where it waits.
    dispatch.build(step.program, stand_ins(graph, step), step.device)


def stand_ins(graph: Graph, step: Launch) -> Binding:
    """Tensors without memory, of the sizes that the launch was captured with, as a rule has them in memory."""
    program, rows, samples = step.program, hint(step.rows), 1
    values: dict[str, Tensor | Stat] = {}
    for operand in program.operands:
        source = step.operands[operand.name]
        count = 1
        if source.kind == "leaf":
            shape = graph.leaves[source.name].source.meta["val"].shape
            count = math.prod(map(hint, shape)) // max(operand.cols, 1)
        values[operand.name] = _operand(operand, rows, count, program.k)
        if operand.rows == "sample":
            samples = count
    bound = {each.name: bind_operand(each, values[each.name], rows, samples) for each in program.operands}
    meta = torch.device("meta")
    outputs = {each.name: bind_output(each, None, rows, samples, meta) for each in program.stores}
    a = torch.empty(rows, program.k, dtype=program.a_dtype, device=meta)
    return Binding(
        rows, samples, 1, (rows,), a, tuple(_weight(each, program.k) for each in program.products), bound, outputs
    )


def _weight(product: Product, k: int) -> Tensor:
    """(N, K), as it lies in memory."""
    if product.layout == "nk":
        return torch.empty(product.cols, k, dtype=product.dtype, device="meta")
    return torch.empty(k, product.cols, dtype=product.dtype, device="meta").t()


def _operand(operand: Operand, rows: int, count: int, k: int) -> Tensor | Stat:
    if operand.stat:
        partials = torch.empty(
            FIELDS[operand.stat], math.ceil(k / PARTIAL_COLS), rows, dtype=torch.float32, device="meta"
        )
        return Stat(partials, operand.stat, PARTIAL_COLS, k)
    shape = [{"none": 1, "each": math.ceil(rows / operand.group)}.get(operand.rows, count)]
    if operand.cols:
        shape = [*shape, operand.cols] if operand.rows != "none" else [operand.cols]
    return torch.empty(shape, dtype=operand.dtype, device="meta")
