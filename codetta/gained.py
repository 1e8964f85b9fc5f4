"""The gradient of a weight behind a norm: a product whose columns are multiplied by the norm's gain, in one program."""

from __future__ import annotations

import torch
from torch import Tensor

from codetta.library import weight_gradient


@torch.library.custom_op("codetta::gained_gradient", mutates_args=())
def gained_gradient(gradient: Tensor, x: Tensor, gain: Tensor) -> Tensor:
    """(gradientᵀ x) · gain, rounded once; gradient (M, N), x (M, K), gain (K,)."""
    found: Tensor = weight_gradient(gradient.t(), x.t(), g=gain)
    return found


@gained_gradient.register_fake
def _(gradient: Tensor, x: Tensor, gain: Tensor) -> Tensor:
    return gradient.new_empty(gradient.shape[1], x.shape[1])
