"""The gradient of an embedding, added to what the table has from elsewhere: a tied head's share.

Only the rows that were looked up are touched, each once: what falls on one row is added up in fp32, in the order in which it was looked
up, and rounded with the rest of the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from codetta.ir.op import compute_dtype


@torch.library.custom_op("codetta::embedding_gradient", mutates_args=())
def embedding_gradient(
    gradient: Tensor, ids: Tensor, classes: int, padding: int, base: Tensor | None, scale: Tensor | None
) -> Tensor:
    """base·scale + the sum of gradient (..., D) over the places where ids (...) name each of the classes; padding: not this one."""
    rows, places = gradient.reshape(-1, gradient.shape[-1]), ids.reshape(-1)
    table = torch.empty(classes, rows.shape[1], dtype=gradient.dtype, device=gradient.device)
    if base is None:
        table.zero_()
    elif scale is None:
        table.copy_(base)
    else:
        torch.mul(base, scale, out=table)
    if not places.numel():
        return table
    if rows.is_cuda and rows.dtype != torch.float64:
        from codetta.backends.triton_rows import add_rows

        add_rows(table, rows.contiguous(), places, padding, base, scale)
    else:
        _add(table, rows, places, padding, base, scale)
    return table


@embedding_gradient.register_fake
def _(gradient: Tensor, ids: Tensor, classes: int, padding: int, base: Tensor | None, scale: Tensor | None) -> Tensor:
    return gradient.new_empty(classes, gradient.shape[-1])


def _add(table: Tensor, rows: Tensor, places: Tensor, padding: int, base: Tensor | None, scale: Tensor | None) -> None:
    """Row by row, as PyTorch has it."""
    kept = places != padding
    named, which = places[kept].unique(return_inverse=True)
    wide = compute_dtype(rows.dtype)
    total = torch.zeros(len(named), rows.shape[1], dtype=wide, device=rows.device)
    total.index_add_(0, which, rows[kept].to(wide))
    if base is not None:
        total += base[named].to(wide) * (1.0 if scale is None else scale)
    table[named] = total.to(table.dtype)
