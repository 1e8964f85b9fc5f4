"""The reference: what a program means, in PyTorch, on whole matrices, in any dtype including float64.

Nothing here is fast or clever. Inputs are read exactly, arithmetic is in fp32 (fp64 for fp64 inputs, or everywhere with
`precise=True`), and each store rounds once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from codetta.errors import Reason
from codetta.ir.graph import Frame, Node
from codetta.ir.op import OPS, apply, compute_dtype, round_to
from codetta.program import Operand, Program, Sink, Store
from codetta.runtime.bind import Binding, layout_strides
from codetta.stat import Stat, merge_moments


def run(
    program: Program, binding: Binding, *, precise: bool = False, separate: bool = False
) -> dict[str, Tensor | Stat]:
    """Carry the program out; with `precise`, in float64 throughout and without rounding the stores.

    `separate`: the products are rounded to the type of A first, as a kernel of their own would leave them. This is what
    eager PyTorch computes, and what a backend may do that parks its accumulator between product and epilogue.
    """
    dtype = torch.float64 if precise else compute_dtype(program.a_dtype)
    accs = [_product(binding, b, dtype) for b in binding.b]
    if separate:
        accs = [round_to(acc, program.a_dtype) for acc in accs]
    results: dict[str, Tensor | Stat] = {}
    values: dict[int, Any] = {}
    for segment in program.segments:
        for node in segment.nodes:
            if id(node) not in values:
                values[id(node)] = _value(node, values, program, binding, accs, dtype)
    for store in program.stores:
        results[store.name] = _store(store, values, binding, dtype if precise else None)
    for sink in program.sinks:
        results[sink.name] = _reduce(sink, values, binding)
    return results


def _product(binding: Binding, b: Tensor, dtype: torch.dtype) -> Tensor:
    a = binding.a.to(dtype)
    if b.dim() == 2:
        return a @ b.to(dtype).T
    per_batch = a.unflatten(0, (binding.batch, binding.rows_per_batch))
    return torch.bmm(per_batch, b.to(dtype).transpose(1, 2)).flatten(0, 1)


def _value(
    node: Node, values: Mapping[int, Any], program: Program, binding: Binding, accs: list[Tensor], dtype: torch.dtype
) -> Tensor:
    args = [values[id(arg)] for arg in node.args]
    device = binding.a.device
    match node.op:
        case "acc":
            return _framed(accs[node.attr("product")], node.attr("frame"))
        case "load" | "load_int":
            return _load(node, program.operand(node.attr("name")), binding, dtype)
        case "const":
            return torch.full((1, 1), node.attr("value"), dtype=dtype, device=device)
        case "row_index":
            return torch.arange(binding.rows, device=device)[:, None]
        case "col_index":
            frame = node.attr("frame")
            cols = node.space.cols * (frame.count if frame else 1)
            return _framed(torch.arange(cols, device=device)[None, :], frame)
        case "part":
            return _framed(args[0], node.attr("frame"))
        case "join":
            run = node.attr("block") // len(args)
            shape = torch.broadcast_shapes(*(arg.shape for arg in args))
            blocks = [arg.expand(shape).unflatten(-1, (-1, 1, run)) for arg in args]
            return torch.cat(blocks, dim=-2).flatten(-3)
        case "group_sum" | "group_max":
            return _group(args[0], node.attr("rows"), node.attr("cols"), node.op)
        case "spread":
            spread = args[0].repeat_interleave(node.attr("cols"), 1).repeat_interleave(node.attr("rows"), 0)
            return spread[: binding.rows] if node.attr("rows") > 1 else spread
        case op:
            return apply(op, [_number(arg, dtype, op) for arg in args], dict(node.attrs))


def _number(value: Tensor, dtype: torch.dtype, op: str) -> Tensor:
    """What the op computes with: whole numbers stay whole unless its result is a fraction."""
    whole = value.dtype in (torch.int64, torch.bool) and (OPS[op].result != "float" or op == "where")
    return value if op == "random" or whole else value.to(dtype)


def _framed(whole: Tensor, frame: Frame | None) -> Tensor:
    if frame is None:
        return whole
    return whole.unflatten(-1, (-1, frame.count, frame.run))[..., frame.index, :].flatten(-2)


def _group(value: Tensor, rows: int, cols: int, op: str) -> Tensor:
    fill = 0.0 if op == "group_sum" else -torch.inf
    missing = -value.shape[0] % rows
    if missing:
        value = torch.cat([value, value.new_full((missing, value.shape[1]), fill)])
    blocks = value.unflatten(1, (-1, cols)).unflatten(0, (-1, rows))  # (M/r, r, N/c, c)
    return blocks.sum((1, 3)) if op == "group_sum" else blocks.amax((1, 3))


def _load(node: Node, operand: Operand, binding: Binding, dtype: torch.dtype) -> Tensor:
    value = binding.operands[operand.name]
    if isinstance(value, Stat):
        finished = _precise(value, dtype).finish()
        if isinstance(finished, tuple):
            finished = finished[0 if node.attr("field") == "mean" else 1]
        return finished.to(dtype)[:, None]
    value = value.long() if node.op == "load_int" else value.to(dtype)
    device = binding.a.device
    if operand.rows == "none":
        value = value.reshape(1, -1)
    elif not operand.cols:
        value = value.reshape(-1, 1)
    elif operand.layout != "rows":
        order = [operand.layout.index(letter) for letter in "bthd"]
        value = value.permute(order).reshape(binding.rows, operand.cols)
    elif operand.rows == "sample":
        value = value.repeat_interleave(binding.rows // value.shape[0], 0)
    elif operand.rows == "repeat":
        value = value.repeat(binding.rows // max(value.shape[0], 1), 1)
    elif operand.rows == "index":
        index = binding.operands[operand.row_index or ""]
        assert isinstance(index, Tensor)
        value = value[index.long().to(device)]
    if operand.period:
        return value.repeat(1, node.space.cols // operand.period)
    return _framed(value, node.attr("frame"))


def _precise(stat: Stat, dtype: torch.dtype) -> Stat:
    return Stat(stat.partials.to(dtype), stat.how, stat.width, stat.total)


def _store(store: Store, values: Mapping[int, Any], binding: Binding, exact: torch.dtype | None) -> Tensor:
    target = binding.outputs[store.name]
    if exact is not None:
        target = target.to(exact, copy=True)
    for piece in store.pieces:
        rounded = values[id(piece.value)]
        if exact is None:
            rounded = round_to(rounded, store.dtype).to(store.dtype)
        if store.layout == "rows" and store.row_index is None:
            whole = target if store.cols else target[:, None]
            view = _framed_view(whole, piece.frame)
            view.copy_(rounded.expand(whole.shape[0], -1).unflatten(-1, view.shape[1:]))
            continue
        index = binding.operands[store.row_index].long() if store.row_index else None  # type: ignore[union-attr]
        _scatter(store, target, rounded.expand(binding.rows, -1), piece.frame, index, binding)
    return target


def _framed_view(whole: Tensor, frame: Frame | None) -> Tensor:
    """A view of the frame's columns: (rows, blocks, run)."""
    if frame is None:
        return whole.unflatten(-1, (1, -1))
    return whole.unflatten(-1, (-1, frame.count, frame.run))[:, :, frame.index]


def _scatter(
    store: Store, target: Tensor, value: Tensor, frame: Frame | None, index: Tensor | None, binding: Binding
) -> None:
    """Write by address: offset(m, n) = sample, row, head and column strides."""
    device = value.device
    rows = torch.arange(binding.rows, device=device)
    cols = torch.arange(value.shape[1], device=device)
    if frame:
        cols = frame.column(cols)
    sample, row = rows // max(binding.rows_per_sample, 1), rows % max(binding.rows_per_sample, 1)
    if store.layout == "rows":
        row = rows if index is None else index
        offset = row[:, None] * target.stride(0) + cols * target.stride(1)
    else:
        sb, st, sh, sd = layout_strides(store.layout, target)
        row = row if index is None else index
        offset = (sample * sb + row * st)[:, None] + (cols // store.head) * sh + (cols % store.head) * sd
    wanted = (row >= 0)[:, None].expand_as(offset)
    flat = torch.as_strided(target, (_size(target),), (1,), target.storage_offset())
    flat[offset[wanted]] = value[wanted]


def _size(x: Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0


def _reduce(sink: Sink, values: Mapping[int, Any], binding: Binding) -> Stat:
    """The reduction as a Stat with a single partial."""
    tensors = [values[id(value)] for value in sink.values]
    tensors = [t.expand(binding.rows, value.space.cols) for t, value in zip(tensors, sink.values, strict=True)]
    if sink.by_row:
        return row_stat(torch.cat(tensors, 1), sink.how)
    whole = tensors[0].new_empty((binding.rows, sink.cols))
    for tensor, frame in zip(tensors, sink.frames, strict=True):
        view = _framed_view(whole, frame)
        view.copy_(tensor.unflatten(-1, view.shape[1:]))
    batches = whole.unflatten(0, (binding.batch, binding.rows_per_batch)) if binding.batch > 1 else whole[None]
    if sink.how == "sum":
        reduced = batches.sum(1)
    else:
        reduced = batches.amax(1) if binding.rows else batches.new_full((batches.shape[0], sink.cols), -torch.inf)
    return Stat(reduced.reshape(1, 1, -1), sink.how, binding.rows, binding.rows)


def row_stat(value: Tensor, how: str) -> Stat:
    cols = value.shape[1]
    match how:
        case "sum":
            partials = value.sum(1)[None]
        case "max":
            partials = value.amax(1)[None]
        case "lse":
            top = value.amax(1)
            shift = torch.where(torch.isfinite(top), top, 0.0)
            partials = torch.stack([top, torch.exp(value - shift[:, None]).sum(1)])
        case _:
            mean, m2 = merge_moments(value.T, torch.zeros_like(value.T), value.new_ones(cols))
            partials = torch.stack([mean, m2])
    return Stat(partials[:, None], how, cols, cols)


class Reference:
    """The reference as a backend: runs everything."""

    name = "reference"

    def why_not(self, program: Program, binding: Binding) -> list[Reason]:
        return []

    def why_never(self, program: Program, device: torch.device, rows: int) -> list[Reason]:
        return []

    def build(self, program: Program, binding: Binding, device: torch.device) -> None:
        return None

    def run(self, program: Program, binding: Binding) -> dict[str, Tensor | Stat]:
        return run(program, binding)

    def source(self, program: Program, binding: Binding) -> str:
        return str(program)
