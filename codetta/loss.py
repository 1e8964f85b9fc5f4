"""Cross-entropy of a linear head, whose logits exist for a few rows at a time only.

A chunk of rows goes through four products' worth of work and is forgotten: logits with their row statistics in the epilogue, the gradient
of the logits in place, then the gradients of the rows and of the weight, the latter added up in fp32. Where the loss is one number, all of
this happens on the way forward, and the way back only multiplies by the gradient that arrives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from codetta import dsl
from codetta.dsl import Value
from codetta.errors import ArgumentError
from codetta.ir.op import compute_dtype
from codetta.library import logits_target, lse_target, onehot
from codetta.program import Operand, Program
from codetta.runtime.launch import launch
from codetta.trace import trace

CHUNK = 1 << 30  # bytes of logits that exist at a time
ROWS = 256  # a chunk has a multiple of so many


def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, softcap: float | None = None, class_weight: Tensor | None = None, z_loss: float = 0.0,
    shift: bool = False,
) -> Tensor:  # fmt: skip
    """F.cross_entropy(F.linear(x, weight, bias), target), in fp32, without the logits in memory.

    x (..., D), weight (V, D) and target (...) of classes. softcap: logits become softcap·tanh(logits / softcap). z_loss: adds
    z_loss·lse² of each row. class_weight, label_smoothing, ignore_index, reduction (mean, sum, none): as F.cross_entropy has them.
    shift: each position predicts the target of the next one.
    """
    _check(x, weight, target, bias, reduction, label_smoothing, class_weight)
    if shift:
        target = F.pad(target[..., 1:], (0, 1), value=ignore_index)
    rows, labels = x.reshape(-1, x.shape[-1]), target.reshape(-1).long()
    how = (ignore_index, label_smoothing, softcap, z_loss)
    wanted = [each is not None and each.requires_grad and torch.is_grad_enabled() for each in (x, weight, bias)]
    if reduction == "none" or not any(wanted):
        losses = torch.ops.codetta.linear_losses(rows, weight, labels, bias, class_weight, *how)
        if reduction == "none":
            return losses.reshape(target.shape)
        total = losses.sum()
        return total if reduction == "sum" else total / _divisor(labels, class_weight, ignore_index, losses.dtype)
    return torch.ops.codetta.linear_loss(rows, weight, labels, bias, class_weight, *how, reduction == "mean", wanted)[0]


def _check(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, reduction: str, smoothing: float, classes: Tensor | None
) -> None:  # fmt: skip
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ArgumentError(
            "weight", f"has shape {tuple(weight.shape)}", f"pass (V, D) with D = {x.shape[-1]}, as x has it"
        )
    if target.shape != x.shape[:-1] or target.dtype not in (torch.int64, torch.int32):
        raise ArgumentError(
            "target", f"is {target.dtype} of shape {tuple(target.shape)}", f"pass classes (integers) of shape {tuple(x.shape[:-1])}"
        )  # fmt: skip
    for name, each in (("bias", bias), ("class_weight", classes)):
        if each is not None and each.shape != weight.shape[:1]:
            raise ArgumentError(
                name, f"has shape {tuple(each.shape)}", f"pass ({weight.shape[0]},), a number for each class"
            )
    if reduction not in ("mean", "sum", "none"):
        raise ArgumentError("reduction", f"{reduction!r} is unknown", "use mean, sum or none")
    if not 0.0 <= smoothing <= 1.0:
        raise ArgumentError("label_smoothing", f"is {smoothing}", "use a number from 0 to 1")


def _divisor(target: Tensor, classes: Tensor | None, ignore: int, dtype: torch.dtype) -> Tensor:
    valid = target != ignore
    return (valid.sum() if classes is None else _of_class(classes, target, valid).sum()).to(dtype)


def _of_class(classes: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, classes[target.clamp(0, classes.shape[0] - 1)], 0.0)


@dataclass(frozen=True)
class _Head:
    """What a loss is made of: rows, weight and labels, and how they are looked at."""

    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    classes: Tensor | None
    ignore: int
    smoothing: float
    cap: float | None
    z: float

    @property
    def dtype(self) -> torch.dtype:
        return compute_dtype(self.x.dtype)

    def chunks(self) -> Iterator[tuple[slice, _Head]]:
        """Rows, a few at a time: as many as fit, in parts of about the same size."""
        count = self.x.shape[0]
        most = max(ROWS, CHUNK // (self.weight.shape[0] * self.x.element_size()))
        parts = -(-count // most)
        size = -(-count // (parts or 1) // ROWS) * ROWS
        for begin in range(0, count, size or 1):
            at = slice(begin, begin + size)
            yield at, replace(self, x=self.x[at], target=self.target[at])

    def valid(self) -> Tensor:
        found = self.target != self.ignore
        torch._assert_async(((self.target >= 0) & (self.target < self.weight.shape[0]) | ~found).all())
        return found

    def shares(self) -> Tensor | None:
        """Of each class in a smoothed label."""
        if not self.smoothing:
            return None
        if self.classes is not None:
            return self.classes.to(self.dtype)
        return torch.ones(self.weight.shape[0], dtype=self.dtype, device=self.x.device)

    def own(self) -> Tensor:
        """The weight of each row's class; 0 where the label is ignored."""
        valid = self.valid()
        return (
            valid.to(self.dtype) if self.classes is None else _of_class(self.classes.to(self.dtype), self.target, valid)
        )

    def losses(self, lse: Tensor, picked: Tensor, shared: Tensor | None, own: Tensor) -> Tensor:
        """Of each row, from the statistics of its logits."""
        loss = (1.0 - self.smoothing) * own * (lse - picked)
        if shared is not None:
            shares = self.shares()
            assert shares is not None
            loss = loss + self.smoothing / self.weight.shape[0] * (lse * shares.sum() - shared)
        if self.z:
            loss = loss + self.z * lse * lse
        return torch.where(self.target == self.ignore, 0.0, loss)

    def factors(self, lse: Tensor, own: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """dz = up·p - hit·onehot - even·shares: the numbers of each row; `scale`: what its loss counts for."""
        found = {"hit": (1.0 - self.smoothing) * own * scale}
        shares, found["up"] = self.shares(), found["hit"]
        if shares is not None:
            found["even"] = self.smoothing / self.weight.shape[0] * scale.expand_as(own)
            found["up"] = found["up"] + found["even"] * shares.sum()
            found["shares"] = shares
        if self.z:
            found["up"] = found["up"] + 2.0 * self.z * lse * scale
        return found


def _statistics(head: _Head, keep: bool) -> tuple[Tensor, ...]:
    """lse, the logit of the label and (smoothed) the sum over shares of each row; before them the logits, if they are kept."""
    given: dict[str, Any] = {"target": head.target, "bias": head.bias, "cap": head.cap}
    shares = head.shares()
    program = logits_target if keep or shares is not None else lse_target
    if program is logits_target:
        given |= {"shares": shares, "dtype": head.x.dtype}
    found = program(head.x, head.weight, **{name: each for name, each in given.items() if each is not None})
    logits, rest = (found[0], found[1:]) if program is logits_target else (None, found)
    lse, picked, shared = (*rest, None)[:3]
    return (logits, lse, picked, shared)  # type: ignore[return-value]


def _passed(head: _Head, scale: Tensor, wanted: list[bool]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses of the rows, and the gradients of x, weight and bias of Σ scale·loss; those that nobody wants are empty."""
    x, weight = head.x, head.weight
    nothing = x.new_empty(0)
    losses = torch.empty(x.shape[0], dtype=head.dtype, device=x.device)
    dx = torch.empty_like(x) if wanted[0] else nothing
    dw = torch.empty(weight.shape if wanted[1] else 0, dtype=head.dtype, device=x.device)
    db = torch.zeros(weight.shape[0] if wanted[2] else 0, dtype=head.dtype, device=x.device)
    if not len(x):
        dw.zero_()
    for at, part in head.chunks():
        logits, lse, picked, shared = _statistics(part, keep=True)
        own = part.own()
        losses[at] = part.losses(lse, picked, shared, own)
        values = {"logits": logits, "lse": lse, "target": part.target, **part.factors(lse, own, scale[at])}
        stage = _gradient(weight.shape[0], x.dtype, head.cap, "even" in values, wanted[2])
        dz, *sums = launch(stage, logits, [], values, out={"dz": logits})  # type: ignore[arg-type]
        assert isinstance(dz, Tensor)
        if wanted[0]:
            torch.mm(dz, weight, out=dx[at])
        if wanted[1]:
            _accumulate(dw, dz, part.x, first=at.start == 0)
        if wanted[2]:
            db += sums[0].finish()  # type: ignore[union-attr, arg-type]
    return losses, dx, dw, db


def _accumulate(dw: Tensor, dz: Tensor, x: Tensor, first: bool) -> None:
    """dw += dzᵀ x, in the precision of dw; the first time without what was there."""
    left, right = dz.t(), x
    kind: dict[str, Any] = {}
    if dz.dtype != dw.dtype:
        if dz.is_cuda:
            kind = {"out_dtype": dw.dtype}
        else:
            left, right = left.to(dw.dtype), right.to(dw.dtype)  # no product there widens its result
    if first:
        torch.mm(left, right, **kind, out=dw)
    else:
        torch.addmm(dw, left, right, **kind, out=dw)


@lru_cache(maxsize=64)
def _gradient(cols: int, dtype: torch.dtype, cap: float | None, smooth: bool, bias: bool) -> Program:
    """The gradient of logits, from the logits."""

    def fn(
        logits: Value,
        lse: Value,
        target: Value,
        up: Value,
        hit: Value,
        even: Value | None = None,
        shares: Value | None = None,
    ) -> dict[str, Value]:
        dz = dsl.exp(logits - lse) * up - onehot(target, cols) * hit
        if even is not None and shares is not None:
            dz = dz - even * shares
        if cap is not None:
            dz = dz * (1.0 - (logits * (1.0 / cap)) ** 2)
        return {"dz": dz, "db": dsl.col_sum(dz)} if bias else {"dz": dz}

    wide = compute_dtype(dtype)
    kinds = {"lse": wide, "target": torch.int64, "up": wide, "hit": wide} | ({"even": wide} if smooth else {})
    operands = {"logits": Operand("logits", dtype, "each", cols)} | {
        name: Operand(name, kind, "each", 0) for name, kind in kinds.items()
    }
    if smooth:
        operands["shares"] = Operand("shares", wide, "none", cols)
    return trace(fn, name="loss_gradient", k=0, a_dtype=dtype, products=(), operands=operands)  # type: ignore[arg-type]


# ---- operators that graphs name ------------------------------------------------------------------------------------


@torch.library.custom_op("codetta::linear_loss", mutates_args=())
def linear_loss(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, classes: Tensor | None, ignore: int, smoothing: float,
    cap: float | None, z: float, mean: bool, wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss of all rows, and its gradients, of which the weight's and the bias's are in fp32."""
    head = _Head(x, weight, target, bias, classes, ignore, smoothing, cap, z)
    divisor = (
        _divisor(target, classes, ignore, head.dtype) if mean else torch.ones((), dtype=head.dtype, device=x.device)
    )
    # Without a label there is nothing to divide by: the loss is NaN, as F.cross_entropy's, and no row has a gradient.
    scale = torch.where(target == ignore, 0.0, 1.0 / divisor).to(head.dtype)
    losses, *gradients = _passed(head, scale, wanted)
    return losses.sum() / divisor, *gradients  # type: ignore[return-value]


@linear_loss.register_fake
def _(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, classes: Tensor | None, ignore: int, smoothing: float,
    cap: float | None, z: float, mean: bool, wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    wide = compute_dtype(x.dtype)
    dx = torch.empty_like(x) if wanted[0] else x.new_empty(0)
    dw = weight.new_empty(weight.shape if wanted[1] else 0, dtype=wide)
    db = weight.new_empty(weight.shape[:1] if wanted[2] else 0, dtype=wide)
    return x.new_empty((), dtype=wide), dx, dw, db


def _keep_gradients(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: tuple[Tensor, ...]
) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[1:])
    ctx.wanted = inputs[-1]  # type: ignore[attr-defined]
    ctx.dtypes = [each.dtype if isinstance(each, Tensor) else None for each in (inputs[0], inputs[1], inputs[3])]  # type: ignore[attr-defined]


def _multiply_gradients(
    ctx: torch.autograd.function.FunctionCtx, gradient: Tensor, *_: Tensor
) -> tuple[Tensor | None, ...]:
    kept, wanted, dtypes = ctx.saved_tensors, ctx.wanted, ctx.dtypes  # type: ignore[attr-defined]
    dx, dw, db = (
        (each * gradient).to(dtype) if want else None for each, want, dtype in zip(kept, wanted, dtypes, strict=True)
    )
    return (dx, dw, None, db, *[None] * 7)


linear_loss.register_autograd(_multiply_gradients, setup_context=_keep_gradients)


@torch.library.custom_op("codetta::linear_losses", mutates_args=())
def linear_losses(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, classes: Tensor | None, ignore: int, smoothing: float,
    cap: float | None, z: float,
) -> Tensor:  # fmt: skip
    """The loss of each row; gradients go through the products again."""
    head = _Head(x, weight, target, bias, classes, ignore, smoothing, cap, z)
    losses = torch.empty(x.shape[0], dtype=head.dtype, device=x.device)
    for at, part in head.chunks():
        _, lse, picked, shared = _statistics(part, keep=False)
        losses[at] = part.losses(lse, picked, shared, part.own())
    return losses


@linear_losses.register_fake
def _(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, classes: Tensor | None, ignore: int, smoothing: float,
    cap: float | None, z: float,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], dtype=compute_dtype(x.dtype))


@torch.library.custom_op("codetta::linear_losses_backward", mutates_args=())
def linear_losses_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, classes: Tensor | None, ignore: int,
    smoothing: float, cap: float | None, z: float, wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    head = _Head(x, weight, target, bias, classes, ignore, smoothing, cap, z)
    scale = torch.where(target == ignore, 0.0, gradient.to(head.dtype))
    _, dx, dw, db = _passed(head, scale, wanted)
    return dx, dw.to(weight.dtype), db.to(weight.dtype)


@linear_losses_backward.register_fake
def _(
    gradient: Tensor, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, classes: Tensor | None, ignore: int,
    smoothing: float, cap: float | None, z: float, wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx = torch.empty_like(x) if wanted[0] else x.new_empty(0)
    dw = weight.new_empty(weight.shape if wanted[1] else 0)
    return dx, dw, weight.new_empty(weight.shape[:1] if wanted[2] else 0)


def _keep_inputs(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:5])  # type: ignore[arg-type]
    ctx.how = inputs[5:]  # type: ignore[attr-defined]


def _differentiate(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
    kept, needs = ctx.saved_tensors, ctx.needs_input_grad  # type: ignore[attr-defined]
    wanted = [needs[0], needs[1], needs[3]]
    found = torch.ops.codetta.linear_losses_backward(gradient, *kept, *ctx.how, wanted)  # type: ignore[attr-defined]
    dx, dw, db = (each if want else None for each, want in zip(found, wanted, strict=True))
    return (dx, dw, None, db, *[None] * 5)


linear_losses.register_autograd(_differentiate, setup_context=_keep_inputs)
