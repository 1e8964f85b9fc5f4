"""Stat: a reduction that is not finished yet, as the tiles left it.

A program's row and column reductions leave the chip as one partial per tile, in a fixed order, without atomics, so that
the same inputs give the same bits. Whoever reads them finishes them: another program as it loads them, or `finish`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Fields of a partial: sum and max are one number, moments are (mean, sum of squared deviations), lse is (max, sum of exp).
FIELDS = {"sum": 1, "max": 1, "moments": 2, "lse": 2}


@dataclass(frozen=True)
class Stat:
    """Σ over a row  ->  Σ over tiles of the tiles' sums, finished by whoever reads it

    Reassociates, in a fixed order. Partials (fields, tiles, length) of a reduction over `total` elements, `width` of them to
    a tile. Means and variances travel as (mean, squared deviations) and merge by Chan's formula.
    """

    partials: Tensor
    how: str
    width: int
    total: int

    @property
    def length(self) -> int:
        return int(self.partials.shape[2])

    @property
    def device(self) -> torch.device:
        return self.partials.device

    def counts(self) -> Tensor:
        """How many elements each partial stands for; only the last can be short."""
        tiles = self.partials.shape[1]
        starts = torch.arange(tiles, device=self.device) * self.width
        return (self.total - starts).clamp(max=self.width).to(self.partials.dtype)

    def finish(self) -> Tensor | tuple[Tensor, Tensor]:
        """The reduction itself: a vector; for moments the mean and the (biased) variance."""
        match self.how:
            case "sum":
                return self.partials[0].sum(0)
            case "max":
                return self.partials[0].amax(0)
            case "lse":
                top = self.partials[0].amax(0)
                # A row of -inf has no finite maximum to subtract; its sum is 0 and its log -inf.
                shift = torch.where(torch.isfinite(top), top, 0.0)
                scaled = torch.where(
                    self.partials[1] > 0, self.partials[1] * torch.exp(self.partials[0] - shift), self.partials[1]
                )
                return shift + torch.log(scaled.sum(0))
            case "moments":
                mean, m2 = merge_moments(self.partials[0], self.partials[1], self.counts())
                return mean, m2 / self.total
            case how:
                raise AssertionError(how)


def merge_moments(mean: Tensor, m2: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and sum of squared deviations of all tiles (dim 0) from those of each: Chan's formula.

    Never E[x²] - mean², which loses every digit when the mean is large against the deviation.
    """
    weights = counts[:, None]
    total = (mean * weights).sum(0) / counts.sum()
    return total, (m2 + weights * (mean - total) ** 2).sum(0)
