"""Cross-entropy of a linear head, whose logits exist for a few rows or columns at a time only (runtime/loss.py).

Where the loss is one number, a chunk of rows goes through everything on the way forward and is forgotten: logits with their statistics in
the epilogue, their gradient in their place, then the gradients of the rows and of the weight, which is added up in fp32. The way back only
multiplies by the gradient that arrives. Otherwise, or to spare memory, logits are made once more on the way back.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from codetta.errors import ArgumentError
from codetta.ir.op import compute_dtype
from codetta.runtime.loss import Head, by_columns, by_rows, of_class, statistics
from codetta.runtime.tables import times


def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, *, ignore_index: int = -100, reduction: str = "mean",
    label_smoothing: float = 0.0, softcap: float | None = None, class_weight: Tensor | None = None, z_loss: float = 0.0,
    shift: bool = False, recompute: bool = False,
) -> Tensor:  # fmt: skip
    """F.cross_entropy(F.linear(x, weight, bias), target), in fp32, without the logits in memory.

    x (..., D), weight (V, D) and target (...) of classes. softcap: logits become softcap·tanh(logits / softcap). z_loss: adds
    z_loss·lse² of each row. class_weight, label_smoothing, ignore_index, reduction (mean, sum, none): as F.cross_entropy has them.
    shift: each position predicts the target of the next one. recompute: make the logits once more for the gradients, which takes a
    third more work and hardly any memory beside the gradients; always so for fp16.
    """
    _check(x, weight, target, bias, reduction, label_smoothing, class_weight)
    if shift:
        target = F.pad(target[..., 1:], (0, 1), value=ignore_index)
    rows, labels = x.reshape(-1, x.shape[-1]), target.reshape(-1).long()
    how = (ignore_index, label_smoothing, softcap, z_loss)
    wanted = [each is not None and each.requires_grad and torch.is_grad_enabled() for each in (x, weight, bias)]
    # fp16 holds a row's part of a mean only once the loss is scaled, and that factor arrives on the way back.
    late = recompute or reduction == "none" or rows.dtype == torch.float16
    if any(wanted) and not late:
        mean = reduction == "mean"
        return torch.ops.codetta.linear_loss(rows, weight, labels, bias, class_weight, *how, mean, wanted)[0]
    losses = torch.ops.codetta.linear_losses(rows, weight, labels, bias, class_weight, *how)[0]
    if reduction == "none":
        return losses.reshape(target.shape)
    total = losses.sum()
    return total if reduction == "sum" else total / _divisor(labels, class_weight, ignore_index, losses.dtype)


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
    return (valid.sum() if classes is None else of_class(classes, target, valid).sum()).to(dtype)


# ---- operators that graphs name ------------------------------------------------------------------------------------


@torch.library.custom_op("codetta::linear_loss", mutates_args=())
def linear_loss(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, classes: Tensor | None, ignore: int, smoothing: float,
    cap: float | None, z: float, mean: bool, wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The loss of all rows, and its gradients, of which the weight's and the bias's are in fp32."""
    head = Head(x, weight, target, bias, classes, ignore, smoothing, cap, z)
    divisor = (
        _divisor(target, classes, ignore, head.dtype) if mean else torch.ones((), dtype=head.dtype, device=x.device)
    )
    # Without a label there is nothing to divide by: the loss is NaN, as F.cross_entropy's, and no row has a gradient.
    scale = torch.where(target == ignore, 0.0, 1.0 / divisor).to(head.dtype)
    losses, *gradients = by_rows(head, scale, wanted)
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
    ctx.set_materialize_grads(False)  # those of what has none would be zeros, as large as the weight
    ctx.save_for_backward(*output[1:])
    ctx.wanted = inputs[-1]  # type: ignore[attr-defined]
    ctx.dtypes = [each.dtype if isinstance(each, Tensor) else None for each in (inputs[0], inputs[1], inputs[3])]  # type: ignore[attr-defined]


def _multiply_gradients(
    ctx: torch.autograd.function.FunctionCtx, gradient: Tensor, *_: Tensor
) -> tuple[Tensor | None, ...]:
    kept, wanted, dtypes = ctx.saved_tensors, ctx.wanted, ctx.dtypes  # type: ignore[attr-defined]
    dx, dw, db = (
        _times(each, gradient, dtype) if want else None for each, want, dtype in zip(kept, wanted, dtypes, strict=True)
    )
    return (dx, dw, None, db, *[None] * 7)


def _times(kept: Tensor, gradient: Tensor, dtype: torch.dtype) -> Tensor:
    if type(kept) is not Tensor or kept.dtype == dtype:
        return (kept * gradient).to(dtype)  # whoever traces this fuses it
    return times(kept, gradient, dtype)


linear_loss.register_autograd(_multiply_gradients, setup_context=_keep_gradients)


@torch.library.custom_op("codetta::linear_losses", mutates_args=())
def linear_losses(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, classes: Tensor | None, ignore: int, smoothing: float,
    cap: float | None, z: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The loss of each row, and its lse, with which gradients make the logits once more."""
    return statistics(Head(x, weight, target, bias, classes, ignore, smoothing, cap, z))


@linear_losses.register_fake
def _(
    x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, classes: Tensor | None, ignore: int, smoothing: float,
    cap: float | None, z: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    losses, lse = (x.new_empty(x.shape[0], dtype=compute_dtype(x.dtype)) for _ in range(2))
    return losses, lse


@torch.library.custom_op("codetta::linear_losses_backward", mutates_args=())
def linear_losses_backward(
    gradient: Tensor, lse: Tensor, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, classes: Tensor | None, ignore: int,
    smoothing: float, cap: float | None, z: float, wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    head = Head(x, weight, target, bias, classes, ignore, smoothing, cap, z)
    scale = torch.where(target == ignore, 0.0, gradient.to(head.dtype))
    dx, dw, db = by_columns(head, lse, scale, wanted)
    return dx, dw, db.to(weight.dtype)


@linear_losses_backward.register_fake
def _(
    gradient: Tensor, lse: Tensor, x: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None, classes: Tensor | None, ignore: int,
    smoothing: float, cap: float | None, z: float, wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dx = torch.empty_like(x) if wanted[0] else x.new_empty(0)
    dw = weight.new_empty(weight.shape if wanted[1] else 0)
    return dx, dw, weight.new_empty(weight.shape[:1] if wanted[2] else 0)


def _keep_inputs(
    ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: tuple[Tensor, ...]
) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1], *inputs[:5])  # type: ignore[arg-type]
    ctx.how = inputs[5:]  # type: ignore[attr-defined]


def _differentiate(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    kept, needs = ctx.saved_tensors, ctx.needs_input_grad  # type: ignore[attr-defined]
    wanted = [needs[0], needs[1], needs[3]]
    found = torch.ops.codetta.linear_losses_backward(gradient, *kept, *ctx.how, wanted)  # type: ignore[attr-defined]
    dx, dw, db = (each if want else None for each, want in zip(found, wanted, strict=True))
    return (dx, dw, None, db, *[None] * 5)


linear_losses.register_autograd(_differentiate, setup_context=_keep_inputs)
