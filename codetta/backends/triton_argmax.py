"""The likeliest column of each row, by as many blocks as a wide row deserves: PyTorch's kernel gives a row to one."""

# Triton reads annotations of device functions itself, so this file must not postpone their evaluation.
import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 2048  # of a block
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def argmax(logits: Tensor, out: Tensor | None = None) -> Tensor:
    """logits.argmax(-1) of a matrix: the first of the largest; NaN is larger than all numbers. out (rows,): where to store it."""
    rows, cols = logits.shape
    parts = triton.cdiv(cols, COLUMNS)
    found = torch.empty((rows, parts), dtype=torch.int64, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device) if out is None else out
    best_of_part[rows, parts](logits, found, cols, parts, *logits.stride(), COLUMNS=COLUMNS)
    best_of_all[rows,](found, out, parts, PARTS=triton.next_power_of_2(parts))
    return out


@triton.jit
def best_of_part(logits, found, cols, parts, row_stride, col_stride, COLUMNS: tl.constexpr):
    """A number that is the larger the larger the logit is, and among equals the smaller the column."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    col = part * COLUMNS + tl.arange(0, COLUMNS)
    # + 0: there is one zero.
    x = (
        tl.load(logits + row * row_stride + col.to(tl.int64) * col_stride, mask=col < cols, other=float("-inf")).to(
            tl.float32
        )
        + 0.0
    )
    bits = x.to(tl.int32, bitcast=True)
    order = tl.where(x != x, 0x7FFFFFFF, tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits))
    both = (order.to(tl.int64) << 32) | (0x7FFFFFFF - col).to(tl.int64)
    tl.store(found + row * parts + part, tl.max(both, 0))


@triton.jit
def best_of_all(found, out, parts, PARTS: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    both = tl.load(found + row * parts + part, mask=part < parts, other=-0x8000000000000000)
    tl.store(out + row, 0x7FFFFFFF - (tl.max(both, 0) & 0x7FFFFFFF))
