"""The closed op table: everything an epilogue can be made of, one row each.

A row gives the op's arity, its shape rule (see `graph._infer`), the type of its result and its meaning in PyTorch.
The meaning defines the op: backends spell it in their own language and are tested against it. `exact` says
whether every backend must give the same bits for the same inputs (no rounding freedom, no library function).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Op:
    arity: int  # -1: any number
    shape: str  # elementwise, part, join, group, spread, row_sink, col_sink, leaf
    result: str = "same"  # float, int, bool, or same: the widest of the arguments
    meaning: Callable[..., Tensor] | None = None  # of elementwise ops; the reference backend knows the others
    exact: bool = False


# Largest finite values of the quantised store types; casts to them saturate, as inference engines expect.
QUANTISED = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def round_to(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest value (ties to even) that `dtype` can hold, saturating for int8 and fp8, in x's own type.

    NaN stays NaN where the type has one and becomes 0 in int8.
    """
    if dtype in QUANTISED:
        limit = QUANTISED[dtype]
        x = x.clamp(-limit, limit)
        if not dtype.is_floating_point:
            return torch.nan_to_num(x.round(), nan=0.0)
    return x.to(dtype).to(x.dtype)


def philox(seed: Tensor, row: Tensor, col: Tensor) -> Tensor:
    """Uniform [0, 1) with 24 random bits from the counter (row, col) and a 32-bit key: Philox 2x32, 7 rounds.

    Seven rounds are the fewest that Salmon et al. (2011) found to pass BigCrush for this size.
    """
    mask = 0xFFFFFFFF
    row, col = torch.broadcast_tensors(row.long() & mask, col.long() & mask)
    low, high, key = col, row, seed.long() & mask
    for _ in range(7):
        # The 64-bit product by halves: int64 would overflow.
        a, b = low & 0xFFFF, low >> 16
        multiplier = 0xD256D193
        lower = a * multiplier
        upper = b * multiplier + (lower >> 16)
        product_low = ((upper & 0xFFFF) << 16) | (lower & 0xFFFF)
        product_high = (upper >> 16) & mask
        low, high = product_high ^ key ^ high, product_low
        key = (key + 0x9E3779B9) & mask
    return (low >> 8).double() * 2.0**-24


def _elementwise(arity: int, meaning: Callable[..., Tensor], result: str = "same", exact: bool = False) -> Op:
    return Op(arity, "elementwise", result, meaning, exact)


def _compare(meaning: Callable[..., Tensor]) -> Op:
    return _elementwise(2, meaning, "bool", exact=True)


def _where(condition: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    return torch.where(condition, yes, no)


OPS: dict[str, Op] = {
    # leaves
    "acc": Op(0, "leaf", "float"),  # product (index), frame
    "load": Op(0, "leaf", "float"),  # operand (name), field, frame
    "load_int": Op(0, "leaf", "int"),  # the same of an integer operand that is an index, not a number
    "const": Op(0, "leaf", "float"),  # value
    "row_index": Op(0, "leaf", "int"),
    "col_index": Op(0, "leaf", "int"),  # frame
    # arithmetic
    "add": _elementwise(2, torch.add, exact=True),
    "sub": _elementwise(2, torch.sub, exact=True),
    "mul": _elementwise(2, torch.mul, exact=True),
    "div": _elementwise(2, torch.true_divide, "float"),
    "neg": _elementwise(1, torch.neg, exact=True),
    "abs": _elementwise(1, torch.abs, exact=True),
    "maximum": _elementwise(2, torch.maximum, exact=True),  # NaN wins, as in PyTorch
    "minimum": _elementwise(2, torch.minimum, exact=True),
    "exp": _elementwise(1, torch.exp, "float"),
    "log": _elementwise(1, torch.log, "float"),
    "sqrt": _elementwise(1, torch.sqrt, "float"),
    "rsqrt": _elementwise(1, torch.rsqrt, "float"),
    "tanh": _elementwise(1, torch.tanh, "float"),
    "sigmoid": _elementwise(1, torch.sigmoid, "float"),
    "erf": _elementwise(1, torch.erf, "float"),
    "erfc": _elementwise(1, torch.special.erfc, "float"),  # 1 - erf, without its cancellation
    "round": _elementwise(1, torch.round, "float", exact=True),
    "floor": _elementwise(1, torch.floor, "float", exact=True),
    "cast": _elementwise(1, round_to, "float", exact=True),  # dtype: the value is rounded to it
    # logic
    "lt": _compare(torch.lt),
    "le": _compare(torch.le),
    "eq": _compare(torch.eq),
    "ne": _compare(torch.ne),
    "and": _elementwise(2, torch.logical_and, "bool", exact=True),
    "or": _elementwise(2, torch.logical_or, "bool", exact=True),
    "not": _elementwise(1, torch.logical_not, "bool", exact=True),
    "where": Op(3, "elementwise", "float", _where, True),
    "random": _elementwise(3, philox, "float", exact=True),  # (seed, row, col)
    # columns and groups
    "part": Op(1, "part"),  # frame
    "join": Op(-1, "join"),  # block
    "group_sum": Op(1, "group", "float"),  # rows, cols
    "group_max": Op(1, "group", "float"),
    "spread": Op(1, "spread"),  # rows, cols
    # only in whole graphs, never in an epilogue; their space is given
    "product": Op(1, "leaf", "float"),  # weight (name), gain (a value of K columns, multiplied into the weight)
    "stage": Op(1, "leaf", "float"),  # the value itself, by a program of its own that multiplies nothing
    "vector": Op(1, "leaf", "float"),  # a row times such a weight
    "moment": Op(1, "leaf", "float"),  # field (mean or var) of row_moments
    # sinks: reductions over the whole row or column, written as tile partials
    "row_sum": Op(1, "row_sink", "float"),
    "row_max": Op(1, "row_sink", "float"),
    "row_moments": Op(1, "row_sink", "float"),  # mean and sum of squared deviations
    "row_lse": Op(1, "row_sink", "float"),  # log of the sum of exponentials
    "col_sum": Op(1, "col_sink", "float"),
    "col_max": Op(1, "col_sink", "float"),
}


def is_sink(op: str) -> bool:
    return OPS[op].shape in ("row_sink", "col_sink")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """What the accumulator and the epilogue compute in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def apply(op: str, args: list[Any], attrs: dict[str, Any]) -> Tensor:
    """The meaning of an elementwise op on tensors."""
    meaning = OPS[op].meaning
    assert meaning is not None, op
    if op == "where":
        return meaning(args[0].bool(), args[1], args[2])
    return meaning(*args, **attrs)
