"""The gradient of a weight behind a norm: a product whose columns are multiplied by the norm's gain, in one program."""

from __future__ import annotations

import torch
from torch import Tensor

from codetta.call import epilogue
from codetta.dsl import Row, Value


@epilogue
def _gained(acc: Value, gain: Row) -> dict[str, Value]:
    return {"dw": acc * gain}


@torch.library.custom_op("codetta::gained_gradient", mutates_args=())
def gained_gradient(gradient: Tensor, x: Tensor, gain: Tensor) -> Tensor:
    """(gradientᵀ x) · gain, rounded once; gradient (M, N), x (M, K), gain (K,)."""
    found: Tensor = _gained(gradient.t(), x.t(), gain=gain)
    return found


@gained_gradient.register_fake
def _(gradient: Tensor, x: Tensor, gain: Tensor) -> Tensor:
    return gradient.new_empty(gradient.shape[1], x.shape[1])
