"""Rows written into a cache where it lies, as graphs and plans name it."""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("codetta", "FRAGMENT")
_library.define("append(Tensor(a!) cache, Tensor places, Tensor rows) -> Tensor(a!)")


def append(cache: Tensor, places: Tensor, rows: Tensor) -> Tensor:
    """cache[b, :, places[b, t]] = rows[b, :, t], in place; cache (B, H, T, D), rows (B, H, t, D), places (B, t) or, for all alike, (t,)."""
    if places.dim() == 1:
        return cache.index_copy_(2, places, rows)
    batch = torch.arange(cache.shape[0], device=cache.device)[:, None]
    cache[batch, :, places] = rows.transpose(1, 2)
    return cache


_library.impl("append", append, "CompositeExplicitAutograd")
