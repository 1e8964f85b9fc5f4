"""Logits that are made when somebody looks at them.

A model with a loss hands out its logits beside it, and training rarely reads them: 4 GB for 16,384 tokens and a vocabulary of 128,256.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from codetta.capture.loss import Spared
from codetta.errors import CodettaError

# What is known of logits that are not there.
_ATTRIBUTES = ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad")
_KNOWN = {getattr(Tensor, name).__get__ for name in _ATTRIBUTES} | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.is_complex, Tensor.__len__
}  # fmt: skip
# What can wait as well: wrappers of models cast or detach whatever they are handed.
_WAIT = {Tensor.float: torch.float32, Tensor.bfloat16: torch.bfloat16, Tensor.half: torch.float16, Tensor.detach: None}


class Logits(Tensor):
    """A tensor that is made when it is first used."""

    _make: Callable[[], Tensor]
    _made: Tensor | None

    @staticmethod
    def of(
        make: Callable[[], Tensor], shape: Sequence[int], dtype: torch.dtype, device: torch.device, grad: bool
    ) -> Logits:
        made: Any = Tensor._make_wrapper_subclass(Logits, shape, dtype=dtype, device=device, requires_grad=grad)
        made._make, made._made = make, None
        found: Logits = made
        return found

    def looked_at(self) -> Tensor:
        if self._made is None:
            self._made = self._make()
        return self._made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in _WAIT and len(args) == 1 and not kwargs:
            (self,) = args
            grad = self.requires_grad and func is not Tensor.detach
            return Logits.of(lambda: func(self.looked_at()), self.shape, _WAIT[func] or self.dtype, self.device, grad)
        args, kwargs = pytree.tree_map_only(Logits, Logits.looked_at, (args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """For those who do not ask from Python."""
        args, kwargs = pytree.tree_map_only(Logits, lambda each: each.looked_at().detach(), (args, kwargs or {}))
        return func(*args, **kwargs)


def with_logits(function: Callable[..., Any], spared: list[Spared]) -> Callable[..., Any]:
    """The compiled graph, handing out logits where rows stand for them."""

    def run(*args: Any) -> tuple[Any, ...]:
        results = list(function(*args))
        for each in spared:
            parameters = [args[at] for at in each.parameters]
            make = _Later(each, results[each.at], parameters)
            shape = (*make.rows.shape[:-1], parameters[0].shape[0])
            grad = torch.is_grad_enabled() and any(given.requires_grad for given in (make.rows, *parameters))
            results[each.at] = Logits.of(make, shape, each.dtype, make.rows.device, grad)
        return tuple(results)

    return run


class _Later:
    """The head, with what it is to be applied to."""

    def __init__(self, spared: Spared, rows: Tensor, parameters: list[Tensor]) -> None:
        self.spared, self.rows, self.parameters = spared, rows, parameters
        self.versions = [each._version for each in parameters]
        self.grad = torch.is_grad_enabled()

    def __call__(self) -> Tensor:
        if [each._version for each in self.parameters] != self.versions:
            raise CodettaError(
                "these logits were not made, since nobody had looked at them, and the head's weight has changed since: look at them "
                "before the optimiser's step, or compile with Options(logits='always')"
            )
        kind = self.rows.device.type
        dtype = self.spared.autocast.get(kind)
        with torch.set_grad_enabled(self.grad), torch.autocast(kind, dtype, enabled=dtype is not None):
            found: Tensor = self.spared.make(self.rows, *self.parameters)
        return found
