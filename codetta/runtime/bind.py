"""Binding: the tensors of one call, checked against the program and brought into the form that kernels expect.

Every complaint names the argument and the remedy. Tensors that are merely strided in an unusual way are copied.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from codetta.errors import ArgumentError
from codetta.program import Operand, Program, Store
from codetta.stat import Stat


@dataclass
class Binding:
    """One call's tensors. `rows` counts all rows; `samples` is how many samples they belong to."""

    rows: int
    samples: int
    batch: int  # B operands per product; 1 unless the program is batched
    lead: tuple[int, ...]  # A's shape before its last dimension: outputs get it back
    a: Tensor  # (rows, K)
    b: tuple[Tensor, ...]  # (N, K), batched (batch, N, K)
    operands: dict[str, Tensor | Stat]
    outputs: dict[str, Tensor]
    lasting: bool = (
        False  # B are parameters: no launch of a plan writes them, so they may be read before the last one has ended
    )

    @property
    def rows_per_sample(self) -> int:
        return self.rows // max(self.samples, 1)

    @property
    def rows_per_batch(self) -> int:
        return self.rows // max(self.batch, 1)


def matrix(name: str, tensor: Tensor) -> tuple[Tensor, str]:
    """The tensor with a unit stride in one of its last two dimensions, and which: "row" or "column" major."""
    rows, cols = tensor.shape[-2:]
    step, unit = tensor.stride()[-2:]
    if unit == 1 and (step >= cols or rows <= 1):
        return tensor, "row"
    if step == 1 and (unit >= rows or cols <= 1):
        return tensor, "column"
    return tensor.contiguous(), "row"


def flat_rows(tensor: Tensor) -> Tensor:
    """All dimensions but the last counted through as rows."""
    return tensor if tensor.dim() == 2 else tensor.reshape(-1, tensor.shape[-1])


def strided(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The tensor with these strides; copied only if it has others, in a dimension where it matters."""
    own = tensor.stride()
    if own == strides or all(size == 1 or x == y for size, x, y in zip(tensor.shape, own, strides, strict=True)):
        return tensor
    repeated = [stride == 0 and size > 1 for size, stride in zip(tensor.shape, strides, strict=True)]
    if any(repeated):  # the same memory all along that dimension, so that one copy of it is all
        once = tensor[tuple(slice(0, 1) if each else slice(None) for each in repeated)]
        return strided(once, strides).expand(tensor.shape)
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def check_tensor(name: str, value: object, device: torch.device) -> Tensor:
    if not isinstance(value, Tensor):
        raise ArgumentError(name, f"expected a tensor, got {type(value).__name__}", "pass a torch.Tensor")
    if value.layout != torch.strided or value.is_quantized:
        raise ArgumentError(name, f"is a {value.layout} tensor", "pass a dense tensor, for example x.to_dense()")
    if value.device != device:
        raise ArgumentError(name, f"is on {value.device}, but a is on {device}", f"move it: {name}.to({str(device)!r})")
    return value


def bind_operand(operand: Operand, value: Tensor | Stat, rows: int, samples: int) -> Tensor | Stat:
    """The operand as kernels read it; raises if its shape does not fit."""
    name = operand.name
    if isinstance(value, Stat):
        if value.length != rows:
            raise ArgumentError(
                name, f"is a statistic of {value.length} rows, but a has {rows}", "pass the statistic of the same rows"
            )
        return value
    per_sample = rows // max(samples, 1)
    match operand:
        case Operand(rows="none", cols=0):
            if value.numel() != 1:
                raise ArgumentError(
                    name, f"is a scalar, got shape {tuple(value.shape)}", "pass a tensor with one element"
                )
            return value.reshape(1)
        case Operand(rows="none"):
            if value.numel() != operand.cols:
                raise _shape(name, value, f"({operand.cols},)")
            return value.reshape(operand.cols).contiguous()
        case Operand(cols=0):
            if value.numel() != rows:
                raise _shape(name, value, f"({rows},), one number per row")
            return value.reshape(rows).contiguous()
        case Operand(layout="rows"):
            value = flat_rows(value) if value.dim() >= 2 else value
            if value.dim() != 2 or value.shape[1] != operand.cols:
                raise _shape(name, value, f"(..., {operand.cols})")
            expected = math.ceil(rows / operand.group)
            if operand.rows == "each" and value.shape[0] != expected:
                raise _shape(name, value, f"({expected}, {operand.cols})")
            if operand.rows == "sample" and samples > 1 and value.shape[0] != samples:
                raise ArgumentError(name, f"has {value.shape[0]} rows for {samples} samples", "pass one row per sample")
            if operand.rows in ("sample", "repeat") and (value.shape[0] == 0 or rows % value.shape[0]):
                raise ArgumentError(
                    name, f"{value.shape[0]} rows do not divide the {rows} rows of a", "pass one row per sample"
                )
            return value if value.stride(1) == 1 else value.contiguous()
        case _:
            heads = operand.cols // operand.head
            expected_shape = layout_shape(operand.layout, samples, per_sample, heads, operand.head)
            if tuple(value.shape) != expected_shape:
                raise _shape(name, value, f"{expected_shape} (layout {operand.layout})")
            return value


def layout_shape(layout: str, samples: int, per_sample: int, heads: int, head: int) -> tuple[int, ...]:
    sizes = {"b": samples, "t": per_sample, "h": heads, "d": head}
    return tuple(sizes[letter] for letter in layout)


def layout_strides(layout: str, tensor: Tensor) -> tuple[int, int, int, int]:
    """Strides over (sample, row within it, head, column within the head)."""
    by_letter = dict(zip(layout, tensor.stride(), strict=True))
    return by_letter["b"], by_letter["t"], by_letter["h"], by_letter["d"]


def bind_output(store: Store, given: Tensor | None, rows: int, samples: int, device: torch.device) -> Tensor:
    """The tensor that a store fills, in the shape kernels write: the given one, or a new one."""
    name, per_sample = f"out[{store.name!r}]", rows // max(samples, 1)
    if store.layout == "rows":
        group_rows = math.ceil(rows / store.group)
        shape: tuple[int, ...] = (group_rows, store.cols) if store.cols else (group_rows,)
    else:
        shape = layout_shape(store.layout, samples, per_sample, store.cols // store.head, store.head)
    if given is None:
        if store.row_index or store.accumulate:
            what = "rows by index" if store.row_index else "in addition to what is there"
            raise ArgumentError(
                name,
                f"is written {what}, so there must be a tensor to write to",
                f"pass out={{{store.name!r}: tensor}}",
            )
        return torch.empty(shape, dtype=store.dtype, device=device)
    check_tensor(name, given, device)
    if given.dtype != store.dtype:
        raise ArgumentError(
            name,
            f"has dtype {given.dtype}, the epilogue stores {store.dtype}",
            "pass that dtype, or store(..., dtype=)",
        )
    flat = given
    if store.layout == "rows":
        try:
            flat = given.view(-1, store.cols) if store.cols and given.dim() > 2 else given
        except RuntimeError:
            raise ArgumentError(name, "cannot be seen as rows without a copy", "pass a contiguous tensor") from None
    got = tuple(flat.shape)
    # With an index the output's rows are not the product's: only the other sizes must fit.
    if store.row_index:
        at = 0 if store.layout == "rows" else store.layout.index("t")
        got, shape = got[:at] + got[at + 1 :], shape[:at] + shape[at + 1 :]
    if got != shape:
        raise _shape(name, given, str(shape))
    if store.layout == "rows" and store.cols and flat.stride(1) != 1:
        raise ArgumentError(
            name, "its columns are not adjacent in memory", "pass a tensor whose last dimension has stride 1"
        )
    if _shares_places(given):
        raise ArgumentError(
            name, "several of its elements share one place in memory", "pass a tensor of its own, x.clone()"
        )
    return flat


def check_overlap(program: Program, binding: Binding, given: Collection[str]) -> None:
    """Outputs may be written over an operand tile (each tile is read before it is written), over nothing else.

    `given`: the outputs that the caller brought; the others are new, and share memory with nobody.
    """
    outputs = [(name, output) for name, output in binding.outputs.items() if name in given]
    for index, (name, output) in enumerate(outputs):
        inputs: list[tuple[str, Tensor]] = [("a", binding.a), *((f"w{i}", b) for i, b in enumerate(binding.b))]
        for key, value in binding.operands.items():
            # The cheap question first: this runs at every call.
            if (
                isinstance(value, Tensor)
                and _overlap(output, value)
                and not _same_tile(program, name, output, key, value)
            ):
                inputs.append((key, value))
        inputs += [(f"out[{other!r}]", tensor) for other, tensor in outputs[:index]]
        for key, tensor in inputs:
            if _overlap(output, tensor):
                raise ArgumentError(
                    f"out[{name!r}]",
                    f"shares memory with {key}, which other tiles still read",
                    "pass a tensor of its own",
                )


def _same_tile(program: Program, store_name: str, output: Tensor, key: str, value: Tensor) -> bool:
    operand = program.operand(key)
    store = next(each for each in program.stores if each.name == store_name)
    if store.accumulate and key == store_name:
        return True  # each element is read where it is written, and nowhere else
    readers = [s for s in program.segments if any(n.attr("name") == key for n in s.nodes if n.op.startswith("load"))]
    return (
        operand.rows == "each" and not operand.period and (operand.layout, operand.head) == (store.layout, store.head)
        and store.row_index is None and output.data_ptr() == value.data_ptr() and output.stride() == value.stride()
        and output.dtype == value.dtype and len({piece.frame for piece in store.pieces}) == 1
        and len(readers) == 1  # another segment's tiles may be computed later
    )  # fmt: skip


def _overlap(x: Tensor, y: Tensor) -> bool:
    if not x.numel() or not y.numel():
        return False
    if x.is_meta or y.is_meta:
        return False  # no memory to share
    (x0, x1), (y0, y1) = _extent(x), _extent(y)
    return x0 < y1 and y0 < x1 and not _side_by_side(x, y)


def _side_by_side(x: Tensor, y: Tensor) -> bool:
    """Whether these are disjoint ranges of columns of one matrix: their rows interleave, their elements do not meet."""
    if not (x.dim() == y.dim() == 2 and x.stride() == y.stride() and x.stride(1) == 1 and x.dtype == y.dtype):
        return False
    step = x.stride(0)
    apart = (y.data_ptr() - x.data_ptr()) // x.element_size() % max(step, 1)
    return x.shape[1] <= apart and apart + y.shape[1] <= step


def _shares_places(x: Tensor) -> bool:
    """Whether elements of x may lie on one another: some stride is shorter than what the smaller ones reach."""
    reach = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride < reach:
            return x.numel() > 1
        reach += (size - 1) * stride
    return False


def _extent(x: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _shape(name: str, value: Tensor, expected: str) -> ArgumentError:
    return ArgumentError(name, f"has shape {tuple(value.shape)}, expected {expected}", "check it against a and w")
