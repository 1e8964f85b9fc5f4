"""The gradient of an embedding, added to what the table has from elsewhere: a tied head's share.

Only the rows that were looked up are touched, each once: what falls on one row is added up in fp32, in the order in which it was looked
up, and rounded with the rest of the sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from codetta.runtime.tables import add_rows, times


@torch.library.custom_op("codetta::embedding_gradient", mutates_args=())
def embedding_gradient(
    gradient: Tensor, ids: Tensor, classes: int, padding: int, base: Tensor | None, scale: Tensor | None
) -> Tensor:
    """base·scale + the sum of gradient (..., D) over the places where ids (...) name each of the classes; padding: not this one."""
    rows, places = gradient.reshape(-1, gradient.shape[-1]), ids.reshape(-1)
    if base is None:
        table = gradient.new_zeros(classes, rows.shape[1])
    else:
        base = base.contiguous()
        table = times(base, scale, gradient.dtype)
    if not places.numel():
        return table
    add_rows(table, rows, places, padding, base, scale)
    return table


@embedding_gradient.register_fake
def _(gradient: Tensor, ids: Tensor, classes: int, padding: int, base: Tensor | None, scale: Tensor | None) -> Tensor:
    return gradient.new_empty(classes, gradient.shape[-1])
