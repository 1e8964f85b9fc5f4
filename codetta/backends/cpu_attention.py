"""Attention of a few queries over a cache, on the CPU: what nobody sees is not read, and heads of keys are read once for all their queries.

The kernel is cpu_attention.cpp, the same for all sizes and types. Without a compiler, or for anything else, PyTorch's serves.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from codetta.backends import cpu_build

FEW = 4  # queries of a head, beyond which others are faster
ROWS, COLS = 64, 256  # queries that share a head of keys, and columns of a head: what the kernel has room for
KINDS = {torch.bool: 1, torch.float32: 2, torch.bfloat16: 3, torch.float16: 4}  # as cpu_attention.cpp numbers them
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Tensor(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p)] + [(name, ctypes.c_int64) for name in ("sample", "head", "row", "col")]


_TENSORS = ("query", "key", "value", "mask", "out")
_SIZES = ("batch", "groups", "shared", "length", "context", "depth", "width", "element", "kind", "threads")


class _Call(ctypes.Structure):
    _fields_ = [
        *((name, _Tensor) for name in _TENSORS),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("scale", ctypes.c_double),
    ]


def takes(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether the kernel can do it: a few queries, of types and sizes that it has, with columns side by side in memory."""
    if query.dim() != 4 or query.dtype not in DTYPES or not (query.dtype == key.dtype == value.dtype):
        return False
    if not query.numel() or not key.numel() or query.shape[1] % key.shape[1] or query.shape[2] > FEW:
        return False
    if any(each.stride(3) != 1 for each in (query, key, value)):
        return False
    shared = query.shape[1] // key.shape[1] * query.shape[2]
    return (
        shared <= ROWS
        and max(query.shape[3], value.shape[3]) <= COLS
        and (mask is None or (mask.dim() == 4 and mask.dtype in KINDS))
        and _kernel() is not None
    )


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(scale·query keyᵀ + mask) value. query (B, H, t, D), key (B, G, T, D), value (B, G, T, E), H a multiple of G; mask (B, H, t, T),
    1 where it is the same for all: bool, or numbers that are added. A query that sees nothing gets zeros."""
    batch, heads, length, depth = query.shape
    groups, context, width = key.shape[1], key.shape[2], value.shape[3]
    out = query.new_empty(batch, length, heads, width).transpose(1, 2)  # as kernels return it
    seen = _Tensor() if mask is None else _described(mask.expand(batch, heads, length, context))
    call = _Call(
        _described(query), _described(key), _described(value), seen, _described(out), batch, groups, heads // groups, length, context,
        depth, width, KINDS[query.dtype], 0 if mask is None else KINDS[mask.dtype], torch.get_num_threads(), scale,
    )  # fmt: skip
    kernel = _kernel()
    assert kernel is not None
    if kernel.codetta_attend(ctypes.byref(call)):
        raise MemoryError("the CPU backend got no memory for parts of attention")
    return out


def _described(tensor: Tensor) -> _Tensor:
    size = tensor.element_size()
    sample, head, row, col = tensor.stride()
    return _Tensor(tensor.data_ptr(), sample * size, head * size, row * size, col * size)


@cache
def _kernel() -> ctypes.CDLL | None:
    """None where there is no compiler."""
    try:
        return cpu_build.load_attention()
    except cpu_build.BuildError:
        return None
