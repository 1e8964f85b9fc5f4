"""Masks of attention that are made of sizes alone: known by name where kernels have a name for them.

A causal mask as a matrix costs a pass over it and hides from the kernel that half of the work need not be done. A mask that
depends on sizes alone is looked at once for each size. If it is one that kernels know by name, it is never made again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from codetta.attention import CAUSAL, FULL
from codetta.runtime.sized import capturing


@dataclass
class SizedMask:
    """Called with sizes: the mask itself, or its name if kernels know it by name. The last mask without a name is kept."""

    make: Callable[..., Any]
    known: dict[tuple[int, ...], str | None] = field(default_factory=dict)
    last: tuple[tuple[int, ...], Tensor] | None = None

    def __call__(self, *sizes: int) -> Tensor | str:
        name = self.known.get(sizes)
        if name is not None:
            return name
        if sizes in self.known and capturing():
            (mask,) = self.make(*sizes)
            return mask
        if self.last is None or self.last[0] != sizes:
            (mask,) = self.make(*sizes)
            name = self.known.setdefault(sizes, name_of(mask))
            if name is not None:
                return name
            self.last = sizes, mask
        return self.last[1]


def name_of(mask: Tensor) -> str | None:
    """What the mask is called, if it is one of those that kernels know by name."""
    allowed = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask <= torch.finfo(mask.dtype).min)).all()):
        return None
    if bool(allowed.all()):
        return FULL
    rows, cols = mask.shape[-2:]
    if rows == cols and bool((allowed == torch.ones(rows, cols, dtype=torch.bool, device=mask.device).tril()).all()):
        return CAUSAL
    return None
