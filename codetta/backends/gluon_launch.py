"""The tensors of a call as the specialised loop addresses them, and whether it can."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from codetta.backends import gluon_gemm
from codetta.errors import Reason
from codetta.ir.graph import Frame
from codetta.plan.target import COPY_ALIGNMENT
from codetta.plan.tile import Tile, alignment_reason
from codetta.plan.traffic import CONSUMERS, Move, traffic
from codetta.program import Program, Strip
from codetta.runtime.bind import Binding


def why_not(program: Program, binding: Binding, tile: Tile) -> list[Reason]:
    """What about these tensors the specialised loop cannot take."""
    reasons = []
    part = tile.rows // CONSUMERS
    for operand in program.operands:
        value = binding.operands[operand.name]
        if operand.rows in ("sample", "repeat") and isinstance(value, Tensor):
            span = binding.rows // value.shape[0] if operand.rows == "sample" else value.shape[0]
            if span % part:
                reasons.append(
                    Reason("specialised", f"{operand.name}: {span} rows at a time are not whole parts of {part} rows")
                )
    moves = [move for segment in traffic(program, tile).segments for move in (*segment.loads, *segment.stores)]
    if any(move.place == "bhtd" for move in moves) and binding.rows_per_sample % part:
        reasons.append(
            Reason("specialised", f"samples of {binding.rows_per_sample} rows are not whole parts of {part} rows")
        )
    if reasons:
        return reasons
    for name, role, what in gluon_gemm.descriptors(program, tile):
        matrix = _matrix(program, binding, role, what)
        if matrix is None:
            reasons.append(Reason("specialised", f"{name}: heads are not contiguous"))
            continue
        step = matrix.stride(0) * matrix.element_size()
        misaligned = alignment_reason(name, step, matrix.data_ptr(), COPY_ALIGNMENT)
        if misaligned:
            reasons.append(misaligned)
        elif matrix.stride(1) != 1:
            reasons.append(Reason("alignment", f"{name}: its columns are not adjacent in memory"))
    return reasons


def descriptors(program: Program, binding: Binding, tile: Tile) -> list[Any]:
    """Tensor descriptors in the order of the kernel's parameters."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    found = []
    for role, what, block, layout in _blocks(program, tile):
        matrix = _matrix(program, binding, role, what)
        assert matrix is not None
        found.append(TensorDescriptor.from_tensor(matrix, block, layout))
    return found


@cache
def _blocks(program: Program, tile: Tile) -> list[tuple[str, object, list[int], Any]]:
    """What each descriptor addresses, its block and how that lies in shared memory; on the way of every call."""
    found = []
    for _, role, what in gluon_gemm.descriptors(program, tile):
        block, dtype = gluon_gemm.block_of(program, tile, role, what)
        found.append((role, what, block, gluon_gemm.shared_layout(block, dtype)))
    return found


def _matrix(program: Program, binding: Binding, role: str, what: object) -> Tensor | None:
    """The matrix that a descriptor addresses: a strip of B, or of a tile's tensor."""
    if role == "a":
        return binding.a if program.a_layout == "mk" else binding.a.T
    if role == "b":
        assert isinstance(what, Strip)
        b = binding.b[what.product]
        strip = _columns(b.T, what.frame)
        return strip if program.products[what.product].layout == "kn" else strip.T
    assert isinstance(what, tuple)
    move: Move = what[1]
    tensor = binding.operands[move.tensor] if role == "load" else binding.outputs[move.tensor]
    assert isinstance(tensor, Tensor)
    if move.place == "bhtd":
        return tensor.view(-1, move.head) if tensor.is_contiguous() else None
    return tensor if move.period else _columns(tensor, move.frame)


def _columns(matrix: Tensor, frame: Frame | None) -> Tensor:
    return matrix if frame is None else matrix[:, frame.index * frame.run : (frame.index + 1) * frame.run]
