"""The epilogue language a second time, directly on float64 matrices: what the traced, canonicalised program must mean.

It shares nothing with the tracer, the rewrites or the reference backend except the names of the functions, and the
counter-based generator, which `test_reference` checks by itself. A source text that says `ct.tanh(acc)` runs with
`ct = codetta` and with `ct = eager`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from codetta.ir.op import philox, round_to


class Matrix:
    """A float64 (or bool, or int) matrix, (M or 1) x (N or 1); fewer columns repeat, as those of tables do."""

    def __init__(self, data: Tensor) -> None:
        self.data = data

    @property
    def cols(self) -> int:
        return int(self.data.shape[1])

    def __invert__(self) -> Matrix:
        return Matrix(~self.data)

    def __neg__(self) -> Matrix:
        return Matrix(-self.data)

    def __abs__(self) -> Matrix:
        return Matrix(self.data.abs())

    def __pow__(self, power: float) -> Matrix:
        return Matrix(self.data**power)


def _meet(*values: Any) -> list[Tensor]:
    data = [
        each.data if isinstance(each, Matrix) else torch.tensor([[float(each)]], dtype=torch.float64) for each in values
    ]
    cols = max(each.shape[1] for each in data)
    return [each.repeat(1, cols // each.shape[1]) if 1 < each.shape[1] < cols else each for each in data]


def _binary(fn: Callable[..., Any], swapped: bool = False) -> Callable[[Any, Any], Matrix]:
    def method(self: Any, other: Any) -> Matrix:
        x, y = _meet(self, other)
        return Matrix(fn(y, x) if swapped else fn(x, y))

    return method


_OPERATORS: dict[str, Any] = {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.true_divide,
    "lt": torch.lt, "le": torch.le, "gt": torch.gt, "ge": torch.ge, "eq": torch.eq, "ne": torch.ne,
    "and": torch.logical_and, "or": torch.logical_or,
}  # fmt: skip
for _name, _fn in _OPERATORS.items():
    setattr(Matrix, f"__{_name}__", _binary(_fn))
    if _name in ("add", "sub", "mul", "truediv"):
        setattr(Matrix, f"__r{_name}__", _binary(_fn, swapped=True))


def _unary(fn: Callable[[Tensor], Tensor]) -> Callable[[Matrix], Matrix]:
    return lambda x: Matrix(fn(x.data))


exp, log, sqrt, rsqrt = _unary(torch.exp), _unary(torch.log), _unary(torch.sqrt), _unary(torch.rsqrt)
tanh, sigmoid, erf = _unary(torch.tanh), _unary(torch.sigmoid), _unary(torch.erf)
round, floor = _unary(torch.round), _unary(torch.floor)
relu, silu = _unary(torch.relu), _unary(torch.nn.functional.silu)
squared_relu = _unary(lambda x: torch.relu(x).square())
maximum, minimum = _binary(torch.maximum), _binary(torch.minimum)


def gelu(x: Matrix, approximate: str = "none") -> Matrix:
    return Matrix(torch.nn.functional.gelu(x.data, approximate=approximate))


def softcap(x: Matrix, cap: Any) -> Matrix:
    x_data, cap_data = _meet(x, cap)
    return Matrix(cap_data * torch.tanh(x_data / cap_data))


def clamp(x: Matrix, low: Any, high: Any) -> Matrix:
    return minimum(maximum(x, low), high)


def where(condition: Matrix, yes: Any, no: Any) -> Matrix:
    test, x, y = _meet(condition, yes, no)
    return Matrix(torch.where(test, x, y))


def cast(x: Matrix, dtype: torch.dtype) -> Matrix:
    return Matrix(round_to(x.data, dtype))


@dataclass
class Rows:
    """How many rows the product has, and in how many batch entries: what functions need to know and are not given."""

    count: int = 0
    batch: int = 1


rows_now = Rows()


def row_index() -> Matrix:
    return Matrix(torch.arange(rows_now.count).double()[:, None])


def col_index(cols: int) -> Matrix:
    return Matrix(torch.arange(cols).double()[None])


def dropout(x: Matrix, p: float, seed: Matrix) -> Matrix:
    uniform = philox(seed.data, row_index().data, col_index(x.cols).data)
    return Matrix(torch.where(uniform >= p, x.data / (1 - p), 0.0))


def parts(x: Matrix, count: int, block: int | None = None) -> tuple[Matrix, ...]:
    block = block or x.cols
    run = block // count
    chosen = [[j for j in range(x.cols) if j % block // run == index] for index in range(count)]
    return tuple(Matrix(x.data[:, columns]) for columns in chosen)


def halves(x: Matrix, block: int | None = None) -> tuple[Matrix, ...]:
    return parts(x, 2, block)


def pairs(x: Matrix) -> tuple[Matrix, ...]:
    return parts(x, 2, 2)


def join(*values: Matrix, block: int | None = None) -> Matrix:
    data = _meet(*values)
    cols = sum(each.shape[1] for each in data)
    run = (block or cols) // len(data)
    shape = torch.broadcast_shapes(*(each.shape for each in data))
    chunks = [each.expand(shape)[:, at : at + run] for at in range(0, shape[1], run) for each in data]
    return Matrix(torch.cat(chunks, 1))


def _groups(x: Matrix, cols: int, rows: int, reduce: Callable[[Tensor], Tensor]) -> Matrix:
    tall = [
        torch.stack([reduce(x.data[i : i + rows, j : j + cols]) for j in range(0, x.cols, cols)])
        for i in range(0, x.data.shape[0], rows)
    ]
    return Matrix(torch.stack(tall))


def group_sum(x: Matrix, cols: int, rows: int = 1) -> Matrix:
    return _groups(x, cols, rows, torch.sum)


def group_max(x: Matrix, cols: int, rows: int = 1) -> Matrix:
    return _groups(x, cols, rows, torch.max)


def spread(x: Matrix, cols: int, rows: int = 1) -> Matrix:
    wide = x.data[:, torch.arange(x.cols * cols) // cols]
    return Matrix(wide if rows == 1 else wide[torch.arange(rows_now.count) // rows])


def quantize(x: Matrix, dtype: torch.dtype, cols: int, rows: int = 1) -> tuple[Matrix, Matrix]:
    limit = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}[dtype]
    scale: Any = maximum(group_max(abs(x), cols, rows), 1e-12) * (1.0 / limit)  # type: ignore[operator]
    return cast(x / spread(scale, cols, rows), dtype), scale  # type: ignore[operator]


def _full(x: Matrix) -> Tensor:
    return x.data.expand(rows_now.count, -1)


def row_sum(x: Matrix) -> Tensor:
    return _full(x).sum(1)


def row_max(x: Matrix) -> Tensor:
    return _full(x).amax(1)


def row_moments(x: Matrix) -> tuple[Tensor, Tensor]:
    return _full(x).mean(1), _full(x).var(1, correction=0)


def row_lse(x: Matrix) -> Tensor:
    return torch.logsumexp(_full(x), 1)


def pick(x: Matrix, column: Matrix) -> Tensor:
    chosen = column.data.long()
    inside = (chosen >= 0) & (chosen < x.cols)
    return torch.where(inside, _full(x).gather(1, chosen.clamp(0, x.cols - 1)), 0.0)[:, 0]


def col_sum(x: Matrix) -> Tensor:
    return _full(x).unflatten(0, (rows_now.batch, -1)).sum(1)


def col_max(x: Matrix) -> Tensor:
    return _full(x).unflatten(0, (rows_now.batch, -1)).amax(1)


@dataclass
class Stored:
    value: Matrix
    dtype: torch.dtype | None = None
    layout: str = "rows"
    head: int = 0
    rows: Matrix | None = None
    accumulate: bool = False


def store(value: Matrix, **how: Any) -> Stored:
    return Stored(value, **how)
