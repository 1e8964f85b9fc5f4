"""Attention as graphs and plans name it: one operator, one that keeps what gradients need, and one for the gradients.

PyTorch's own operator has no meaning until a kernel is chosen, and each kernel has names of its own for both directions. Here PyTorch is
asked, at every call, which kernel it would take (so that `torch.nn.attention.sdpa_kernel` is obeyed). There is no dropout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional as F

from codetta.ir.op import compute_dtype

aten = torch.ops.aten
CAUSAL, FULL = "causal", "full"  # masks that kernels know by name
FLASH, CUDNN = 1, 3  # PyTorch's numbers of kernels
OTHER = 0  # a kernel that is not called by its name
_NUMBERS = {number: torch.tensor(number, device="cpu") for number in (OTHER, FLASH, CUDNN)}


@dataclass(frozen=True)
class Attention:
    """F.scaled_dot_product_attention with what about it is the same every time. grouped: queries share heads of keys and values."""

    causal: bool
    scale: float | None
    grouped: bool

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | str | None) -> Tensor:
        matrix, causal = self._mask(query, mask)
        few = _of_few(query) if (not causal or query.shape[-2] == 1) and _any_kernel() else None
        if few is not None and few.takes(query, key, value, matrix):
            scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
            found: Tensor = few.attend(query, key, value, matrix, scale)
            return found
        if self._repeats(query, matrix):
            return self._repeated()(query, *_repeat(query, key, value), mask)
        return F.scaled_dot_product_attention(
            query, key, value, matrix, is_causal=causal, scale=self.scale, enable_gqa=self.grouped
        )

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | str | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The result, a number for each of its rows that gradients need, and the number of the kernel."""
        matrix, causal = self._mask(query, mask)
        if self._repeats(query, matrix):
            return self._repeated().forward(query, *_repeat(query, key, value), mask)
        kernel = self._kernel(query, key, value, matrix, causal)
        if kernel == OTHER:
            out, sums = self(query, key, value, mask), query.new_empty(0)
        elif not query.is_cuda:
            out, sums = aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, causal, attn_mask=_added(matrix, query), scale=self.scale
            )
        elif kernel == CUDNN:
            out, sums, *_ = aten._scaled_dot_product_cudnn_attention(
                query, key, value, _added(matrix, query), True, 0.0, causal, scale=self.scale
            )
        else:
            out, sums, *_ = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, scale=self.scale)
        return out, sums, _NUMBERS[kernel]

    def backward(
        self, gradient: Tensor, out: Tensor, sums: Tensor, kernel: Tensor, query: Tensor, key: Tensor, value: Tensor,
        mask: Tensor | str | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """The gradients of queries, keys and values."""
        matrix, causal = self._mask(query, mask)
        if self._repeats(query, matrix):
            repeated = _repeat(query, key, value)
            plain = self._repeated().backward(gradient, out, sums, kernel, query, *repeated, mask)
            return plain[0], _folded(plain[1], key), _folded(plain[2], value)
        number = int(kernel)
        arguments = gradient, query, key, value, out, sums
        if number == OTHER:
            return self._written_out(gradient, query, key, value, matrix, causal)
        if not query.is_cuda:
            return aten._scaled_dot_product_flash_attention_for_cpu_backward(
                *arguments, 0.0, causal, attn_mask=_added(matrix, query), scale=self.scale
            )
        seed = torch.empty(0, dtype=torch.int64, device=query.device)  # nothing is dropped
        lengths = query.shape[-2], key.shape[-2]
        if number == CUDNN:
            return aten._scaled_dot_product_cudnn_attention_backward(
                *arguments, seed, seed, _added(matrix, query), None, None, *lengths, 0.0, causal, scale=self.scale
            )
        return aten._scaled_dot_product_flash_attention_backward(
            *arguments, None, None, *lengths, 0.0, causal, seed, seed, scale=self.scale
        )

    def _written_out(
        self, gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients without a kernel: probabilities are made again, all of them."""
        if self.grouped:
            plain = self._repeated()._written_out(gradient, query, *_repeat(query, key, value), mask, causal)
            return plain[0], _folded(plain[1], key), _folded(plain[2], value)
        wide = compute_dtype(query.dtype)
        q, k, v, g = (each.to(wide) for each in (query, key, value, gradient))
        scale = query.shape[-1] ** -0.5 if self.scale is None else self.scale
        scores = scale * (q @ k.transpose(-1, -2))
        if causal:
            scores = scores.masked_fill(~scores.new_ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        added = _added(mask, scores)
        p = aten._safe_softmax(scores if added is None else scores + added, -1)
        dp = g @ v.transpose(-1, -2)
        ds = scale * p * (dp - (dp * p).sum(-1, keepdim=True))
        found = ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ g
        return tuple(each.to(query.dtype) for each in found)

    def _mask(self, query: Tensor, mask: Tensor | str | None) -> tuple[Tensor | None, bool]:
        if isinstance(mask, str):
            return None, self.causal or (mask == CAUSAL and query.shape[-2] > 1)
        return mask, self.causal

    def _repeats(self, query: Tensor, mask: Tensor | None) -> bool:
        """No kernel of a GPU takes both a mask and fewer heads of keys."""
        return self.grouped and mask is not None and query.is_cuda

    def _repeated(self) -> Attention:
        return replace(self, grouped=False)

    def _kernel(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool) -> int:
        if query.dim() != 4 or query.shape[-1] % 8 or not query.numel() or not key.numel():
            return OTHER
        with torch.enable_grad():  # kernels can do more without gradients
            leaves = [each.detach().requires_grad_() for each in (query, key, value)]
            found = aten._fused_sdp_choice(*leaves, mask, 0.0, causal, scale=self.scale, enable_gqa=self.grouped)
        known = (FLASH, CUDNN) if query.is_cuda else (FLASH,)
        return found if found in known else OTHER


def _of_few(query: Tensor) -> ModuleType | None:
    """Who has a kernel of our own for a few queries over a cache, on the device at hand."""
    if query.is_cuda:
        from codetta.backends import triton_attention

        return triton_attention
    if query.device.type == "cpu":
        from codetta.backends import cpu_attention

        return cpu_attention
    return None


def _any_kernel() -> bool:
    """Whether nobody insists on some of PyTorch's kernels (`torch.nn.attention.sdpa_kernel`)."""
    allowed = torch.backends.cuda
    return allowed.flash_sdp_enabled() and allowed.mem_efficient_sdp_enabled() and allowed.math_sdp_enabled()


def _repeat(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))  # type: ignore[return-value]


def _folded(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient of heads, of that of their copies."""
    return gradient.reshape(*like.shape[:2], -1, *like.shape[2:]).sum(2)


def _added(mask: Tensor | None, query: Tensor) -> Tensor | None:
    """A mask as something that is added."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, -torch.inf)


@torch.library.custom_op("codetta::attention", mutates_args=())
def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None, grouped: bool
) -> Tensor:
    return Attention(causal, scale, grouped)(query, key, value, mask)


@attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None, grouped: bool
) -> Tensor:
    sizes = [*query.shape[:-1], value.shape[-1]]
    if len(sizes) != 4:
        return query.new_empty(sizes)
    batch, heads, length, width = sizes
    return query.new_empty(batch, length, heads, width).transpose(1, 2)  # as kernels return it


@torch.library.custom_op("codetta::attention_forward", mutates_args=())
def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None, grouped: bool
) -> tuple[Tensor, Tensor, Tensor]:
    out, sums, kernel = Attention(causal, scale, grouped).forward(query, key, value, mask)
    return out, sums, kernel.clone()


@attention_forward.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None, grouped: bool
) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.ops.codetta.attention(query, key, value, mask, causal, scale, grouped)
    return out, query.new_empty(query.shape[:-1], dtype=torch.float32), torch.empty((), dtype=torch.int64, device="cpu")


@torch.library.custom_op("codetta::attention_backward", mutates_args=())
def attention_backward(
    gradient: Tensor, out: Tensor, sums: Tensor, kernel: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    causal: bool, scale: float | None, grouped: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return Attention(causal, scale, grouped).backward(gradient, out, sums, kernel, query, key, value, mask)


@attention_backward.register_fake
def _(
    gradient: Tensor, out: Tensor, sums: Tensor, kernel: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None,
    causal: bool, scale: float | None, grouped: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[object, ...], output: tuple[Tensor, ...]) -> None:
    query, key, value, mask, *how = inputs
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, query, key, value, mask)  # type: ignore[arg-type]
    ctx.how = how  # type: ignore[attr-defined]


def _differentiate(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
    kept = ctx.saved_tensors  # type: ignore[attr-defined]
    gradients = torch.ops.codetta.attention_backward(gradient, *kept, *ctx.how)  # type: ignore[attr-defined]
    return (*gradients, None, None, None, None)


attention_forward.register_autograd(_differentiate, setup_context=_keep)
