"""What a call passes to a kernel: names for the writer of the source, values for the launcher, in one order.

All arguments are 64-bit integers in one array: sizes, steps and addresses. cpu_runtime.h names those that every program has.
"""

from __future__ import annotations

from itertools import chain

import torch
from torch import Tensor

from codetta.backends.cpu_build import Library
from codetta.errors import ArgumentError
from codetta.ir.graph import Node
from codetta.program import Operand, Program, Store
from codetta.runtime.bind import Binding, layout_strides
from codetta.stat import Stat

B_ARGUMENTS = 4  # of each B: address, step, batch step, whether it is transposed


def operand_integers(operand: Operand) -> list[str]:
    """What a kernel must know about an operand's place in memory."""
    if operand.stat:
        return ["tiles", "width", "total"]
    if operand.rows == "none" or not operand.cols:
        return []
    if operand.layout != "rows":
        return ["sb", "st", "sh", "sd"]
    return ["step"] if operand.rows == "each" else ["step", "count" if operand.rows == "index" else "span"]


def store_integers(store: Store) -> list[str]:
    return ["sb", "st", "sh", "sd"] if store.layout != "rows" else ["step"]


def parameters(program: Program) -> list[str]:
    """Names of what follows the matrices in a call's arguments, in the order in which the launcher passes them."""
    names = []
    for operand in program.operands:
        names += [f"in_{operand.name}", *(f"{what}_in_{operand.name}" for what in operand_integers(operand))]
    for store in program.stores:
        names += [f"out_{store.name}", *(f"{what}_out_{store.name}" for what in store_integers(store))]
    return names + [f"all_{sink.name}" for sink in program.sinks]


def stat_loads(program: Program) -> list[Node]:
    """Loads that finish a reduction: done once for all rows, before the main loop."""
    nodes = {
        id(n): n for s in program.segments for n in s.nodes if n.op == "load" and program.operand(n.attr("name")).stat
    }
    return list(nodes.values())


def arguments(
    program: Program, binding: Binding, results: dict[str, Tensor | Stat], passes: int, kept: list[Tensor]
) -> list[int | Tensor]:
    """The call's arguments, in the order of cpu_runtime.h and of `parameters`; a tensor stands for its address."""
    a, by_row = binding.a, program.a_layout == "mk"
    values: list[int | Tensor] = [
        binding.rows, binding.rows_per_batch, binding.batch, max(binding.rows_per_sample, 1), torch.get_num_threads(), program.k,
        a, a.stride(0 if by_row else 1), not by_row,
    ]  # fmt: skip
    for product, b in zip(program.products, binding.b, strict=True):
        by_row = product.layout == "nk"
        values += [b, b.stride(-2 if by_row else -1), b.stride(0) if program.batched else 0, not by_row]
    written = {t.data_ptr(): name for name, t in binding.outputs.items()} if passes > 1 else {}
    for operand in program.operands:
        value = binding.operands[operand.name]
        if isinstance(value, Stat):
            partials = value.partials.contiguous()
            kept.append(partials)
            values += [partials, partials.shape[1], value.width, value.total]
            continue
        if written.get(value.data_ptr(), operand.name) != operand.name:
            # Written in one pass over the row and read in a later one.
            value = value.clone()
            kept.append(value)
        values += _operand(operand, value, binding)
    for store in program.stores:
        values += _output(store, binding.outputs[store.name])
    for sink in program.sinks:
        result = results[sink.name]
        assert isinstance(result, Stat)
        values.append(result.partials)
    return values


def _operand(operand: Operand, value: Tensor, binding: Binding) -> list[int | Tensor]:
    if operand.rows == "none" or not operand.cols:
        return [value]
    if operand.layout != "rows":
        return [value, *layout_strides(operand.layout, value)]
    match operand.rows:
        case "each":
            return [value, value.stride(0)]
        case "sample":
            return [value, value.stride(0), binding.rows // value.shape[0]]
        case _:
            return [value, value.stride(0), value.shape[0]]


def _output(store: Store, value: Tensor) -> list[int | Tensor]:
    if store.layout != "rows":
        return [value, *layout_strides(store.layout, value)]
    return [value, value.stride(0)]


def check_indices(program: Program, binding: Binding, library: Library) -> None:
    """Row numbers are addresses here: one that is out of range must not reach the kernel."""
    tables = [(o.row_index, o.name, binding.operands[o.name]) for o in program.operands if o.row_index]
    targets = [
        (s.row_index, f"out[{s.name!r}]", binding.outputs[s.name], s.layout) for s in program.stores if s.row_index
    ]
    checks = chain(
        ((index, name, t.shape[0], -t.shape[0]) for index, name, t in tables if isinstance(t, Tensor)),
        (
            (index, name, t.shape[0 if layout == "rows" else layout.index("t")], -(2**62))
            for index, name, t, layout in targets
        ),
    )
    for index, name, high, low in checks:
        numbers = binding.operands[index or ""]
        assert isinstance(numbers, Tensor)
        at = library.first_outside(numbers, low, high)
        if at < numbers.numel():
            raise ArgumentError(
                index or "", f"names row {int(numbers[at])} of {name}, which has {high}", f"pass numbers below {high}"
            )
