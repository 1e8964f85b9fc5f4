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
from torch import Tensor, fx

from codetta import dispatch
from codetta.capture import Graph
from codetta.errors import ArgumentError, LoweringError
from codetta.ir.view import hint
from codetta.plan.cost import PARTIAL_COLS
from codetta.program import Operand
from codetta.runtime.bind import Binding, bind_operand, bind_output
from codetta.runtime.whole import OneKernel
from codetta.stat import FIELDS, Stat
from codetta.steps import Launch, Plan, Source, Whole

META = torch.device("meta")


class Ahead:
    """The kernels of a plan under construction. Whoever needs them waits."""

    def __init__(self, plan: Plan) -> None:
        steps = [step for step in plan.steps if isinstance(step, Launch)]
        # Layers share their programs. Which of them stands for the others matters little: they are called alike.
        different = {(step.program, step.device, hint(step.rows)): step for step in steps}
        self.pool = ThreadPoolExecutor(min(16, os.cpu_count() or 1))
        self.builds: dict[Future[None], str] = {
            self.pool.submit(_build, plan.graph, step): step.program.name for step in different.values()
        }
        for step in plan.steps:
            if isinstance(step, Whole):
                kernel = OneKernel(step, step.products[0].launch.device)
                self.builds[self.pool.submit(kernel.build)] = "one kernel"

    def __len__(self) -> int:
        return len(self.builds)

    def wait(self, done: Callable[[str], None]) -> None:
        """Until all are built. Those that no compiler takes, or whose stand-ins were wrong, are built when they are launched, or say so
        then; any other failure is one of ours."""
        for each in as_completed(self.builds):
            done(self.builds[each])
        self.pool.shutdown()
        for each in self.builds:
            if (error := each.exception()) is not None and not isinstance(error, LoweringError | ArgumentError):
                raise error


def _build(graph: Graph, step: Launch) -> None:
    # In a thread of its own: here nobody intercepts the making of tensors, as the tracer does where it waits.
    if hint(step.rows):  # nothing is launched for no rows
        dispatch.build(step.program, stand_ins(graph, step), step.device)


def stand_ins(graph: Graph, step: Launch) -> Binding:
    """Tensors without memory, as the launch will have them for the sizes that the graph was captured with."""
    program, rows, samples = step.program, hint(step.rows), 1
    values: dict[str, Tensor | Stat] = {}
    for operand in program.operands:
        values[operand.name] = _operand(graph, operand, step.operands[operand.name], rows, max(program.k, 1))
        if operand.rows == "sample":
            samples = values[operand.name].shape[0]  # type: ignore[union-attr]
    caches = {name: _without_memory(append.args[0]) for name, append in step.appends.items()}  # type: ignore[arg-type]
    for each in caches.values():
        samples = each.shape[0]
    bound = {each.name: bind_operand(each, values[each.name], rows, samples) for each in program.operands}
    outputs = {each.name: bind_output(each, caches.get(each.name), rows, samples, META) for each in program.stores}
    same = [bound[name] for name, source in step.operands.items() if source is step.a]
    a = same[0] if same and not program.multiplies else torch.empty(rows, program.k, dtype=program.a_dtype, device=META)
    assert isinstance(a, Tensor)
    weights = tuple(_weight(graph, name, gain is not None) for name, gain in step.weights)
    return Binding(rows, samples, 1, (rows,), a, weights, bound, outputs, lasting=True)


def _operand(graph: Graph, operand: Operand, source: Source, rows: int, k: int) -> Tensor | Stat:
    if operand.stat:
        shape = (FIELDS[operand.stat], math.ceil(k / PARTIAL_COLS), rows)
        return Stat(torch.empty(shape, dtype=torch.float32, device=META), operand.stat, PARTIAL_COLS, k)
    if source.kind == "leaf":
        leaf = graph.leaves[source.name]
        return leaf.matrix(_without_memory(leaf.source))
    sizes = [size for size in (0 if operand.rows == "none" else rows, operand.cols) if size]
    return torch.empty(sizes or [1], dtype=operand.dtype, device=META)


def _weight(graph: Graph, name: str, copied: bool) -> Tensor:
    known = graph.weights[name]
    weight = known.matrix(_without_memory(known.source))
    if copied:
        return weight.t().contiguous().t() if known.transposed else weight.contiguous()
    return weight


def _without_memory(each: fx.Node) -> Tensor:
    value = each.meta["val"]
    sizes, strides = ([hint(size) for size in sizes] for sizes in (value.shape, value.stride()))
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device=META)
