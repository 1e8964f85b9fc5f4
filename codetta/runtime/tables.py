"""Tables of rows, as large as a vocabulary: scaled and rounded in one pass, and rows added to those that integers name."""

from __future__ import annotations

import torch
from torch import Tensor

from codetta.ir.op import compute_dtype


def times(base: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """base·scale in another type, with nothing in between in memory. On a GPU PyTorch takes three times as long as the bytes do."""
    table = torch.empty_like(base, dtype=dtype)
    if base.is_cuda and base.is_contiguous() and base.numel() and torch.float64 not in (base.dtype, dtype):
        from codetta.backends.triton_rows import scaled

        return scaled(table, base, scale)
    return table.copy_(base) if scale is None else torch.mul(base, scale, out=table)


def add_rows(
    table: Tensor, rows: Tensor, places: Tensor, padding: int, base: Tensor | None, scale: Tensor | None
) -> None:
    """table[i] = base[i]·scale + the sum of rows whose place is i, for every i that is somebody's place and not the padding."""
    if rows.is_cuda and rows.dtype != torch.float64:
        from codetta.backends import triton_rows

        return triton_rows.add_rows(table, rows.contiguous(), places, padding, base, scale)
    kept = places != padding
    named, which = places[kept].unique(return_inverse=True)
    wide = compute_dtype(rows.dtype)
    total = torch.zeros(len(named), rows.shape[1], dtype=wide, device=rows.device)
    total.index_add_(0, which, rows[kept].to(wide))
    if base is not None:
        total += base[named].to(wide) * (1.0 if scale is None else scale)
    table[named] = total.to(table.dtype)
