"""The epilogue language: a plain Python function of the accumulator is traced once into a Program.

    @codetta.epilogue
    def residual_stats(acc, x: codetta.Tile, g: codetta.Row):
        y = acc + x
        return {"y": y, "h": y * g, "sumsq": codetta.row_sum(y * y)}

The function sees `Value`s, which record what is done to them. It may use Python freely around them (loops, helper
functions, closures), but not on what they contain: there is nothing in them yet. Kinds of operands come from the
annotations, or from the shapes of the tensors where those leave no doubt.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from codetta.errors import ArgumentError, TraceError
from codetta.ir.graph import Frame, Node, Space, const, node, rebuilt
from codetta.ir.op import OPS, QUANTISED, is_sink
from codetta.ir.show import formula
from codetta.program import LAYOUTS
from codetta.rewrite.onesided import one_plus_is_one_sided


class Value:
    """A traced value: numbers that will exist on the chip for each element of the tile."""

    __slots__ = ("node",)

    def __init__(self, node: Node) -> None:
        self.node = node

    @property
    def cols(self) -> int:
        return self.node.space.cols

    def __repr__(self) -> str:
        return f"Value({formula(self.node)} {self.node.space})"

    def __add__(self, other: Numeric) -> Value:
        return _apply("add", self, other)

    def __sub__(self, other: Numeric) -> Value:
        return _apply("sub", self, other)

    def __mul__(self, other: Numeric) -> Value:
        return _apply("mul", self, other)

    def __truediv__(self, other: Numeric) -> Value:
        return _apply("div", self, other)

    def __radd__(self, other: Numeric) -> Value:
        return _apply("add", other, self)

    def __rsub__(self, other: Numeric) -> Value:
        return _apply("sub", other, self)

    def __rmul__(self, other: Numeric) -> Value:
        return _apply("mul", other, self)

    def __rtruediv__(self, other: Numeric) -> Value:
        return _apply("div", other, self)

    def __neg__(self) -> Value:
        return _apply("neg", self)

    def __abs__(self) -> Value:
        return _apply("abs", self)

    def __pow__(self, power: float) -> Value:
        """Whole powers by multiplication, 0.5 and -0.5 by roots; others have no exact meaning on every target."""
        if not isinstance(power, int | float):
            raise TraceError(f"power {power!r}: a power is a plain number; write others with exp and log")
        if power == 0.5:
            return sqrt(self)
        if power == -0.5:
            return rsqrt(self)
        if not isinstance(power, int) or not 1 <= power <= 8:
            raise TraceError(
                f"power {power!r}: only 0.5, -0.5 and whole powers from 1 to 8; write others with exp and log"
            )
        half = self ** (power // 2) if power > 1 else self
        return half if power == 1 else half * half if power % 2 == 0 else half * half * self

    def __lt__(self, other: Numeric) -> Value:
        return _apply("lt", self, other)

    def __le__(self, other: Numeric) -> Value:
        return _apply("le", self, other)

    def __gt__(self, other: Numeric) -> Value:
        return _apply("lt", other, self)

    def __ge__(self, other: Numeric) -> Value:
        return _apply("le", other, self)

    def __eq__(self, other: object) -> Value:  # type: ignore[override]
        return _apply("eq", self, other)

    def __ne__(self, other: object) -> Value:  # type: ignore[override]
        return _apply("ne", self, other)

    __hash__ = None  # type: ignore[assignment]

    def __and__(self, other: Value) -> Value:
        return _apply("and", self, other)

    def __or__(self, other: Value) -> Value:
        return _apply("or", self, other)

    def __invert__(self) -> Value:
        return _apply("not", self)

    def __bool__(self) -> NoReturn:
        raise TraceError(
            f"the epilogue branches on {formula(self.node)}, whose value is not known while tracing: use codetta.where"
        )

    def __float__(self) -> NoReturn:
        raise TraceError(f"the epilogue asks for the number behind {formula(self.node)}, which exists only on the chip")

    __int__ = __index__ = __float__

    def __iter__(self) -> NoReturn:
        raise TraceError("a value cannot be iterated or unpacked: use codetta.halves, pairs or parts")

    def __len__(self) -> NoReturn:
        raise TraceError(
            "a value has no length while tracing: use its cols for the number of columns, codetta.parts to split"
        )

    def __matmul__(self, other: object) -> NoReturn:
        raise TraceError(
            "an epilogue cannot multiply matrices: make it a second codetta program that reads this one's output"
        )

    __rmatmul__ = __matmul__

    def __mod__(self, other: object) -> NoReturn:
        raise TraceError("a value has no remainder: write x - codetta.floor(x / y) * y")

    __rmod__ = __floordiv__ = __rfloordiv__ = __mod__

    def __getattr__(self, name: str) -> NoReturn:
        # Names with underscores are questions that Python and its tools ask of any object.
        if name.startswith("_"):
            raise AttributeError(name)
        raise TraceError(f"a traced value has no {name}: it is no tensor yet; use the functions of codetta")

    __array_ufunc__ = None  # numpy's numbers leave the operation to us

    def __getitem__(self, key: object) -> NoReturn:
        raise TraceError(
            "a value cannot be indexed: use codetta.halves, pairs or parts for columns, a Table operand for look-ups"
        )

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Value:
        name = getattr(func, "__name__", str(func))
        mine = _TORCH_NAMES.get(name)
        if mine is None:
            raise TraceError(
                f"torch.{name} has no meaning on a traced value: use the functions of codetta ({', '.join(sorted(_TORCH_NAMES))})"
            )
        given = dict(kwargs or {})
        if given.pop("inplace", False):
            raise TraceError(f"torch.{name} cannot work in place on a traced value: leave inplace away")
        return mine(*args, **given)


@dataclass(frozen=True)
class Moments:
    """Mean and (biased) variance of each row, as `row_moments` returned them in another program."""

    mean: Value
    var: Value


Numeric = Value | float | int


# ---- kinds of operands -------------------------------------------------------------------------------------------


# To a type checker, a parameter annotated with a kind is the value that the function computes with.
if TYPE_CHECKING:

    class _Annotation(Value):
        def __init__(self) -> None: ...

else:
    _Annotation = object


@dataclass(frozen=True)
class Kind(_Annotation):
    """What an operand is to the product; used as an annotation, as a class or with arguments.

    `Row | None` and `Scalar | float` mean the kind in them; `Annotated[Value, Table("repeat")]` is the spelling of a kind
    with arguments that type checkers accept.
    """


@dataclass(frozen=True)
class Scalar(Kind):
    """One number: a Python number (becomes part of the program) or a tensor with one element."""


@dataclass(frozen=True)
class Row(Kind):
    """One number per column: (N,), such as a bias or a norm's weight."""


@dataclass(frozen=True)
class Col(Kind):
    """One number per row: (M,), such as a row's scale, or a Stat that is finished as it is loaded."""


@dataclass(frozen=True)
class SampleRow(Kind):
    """One row vector for each sample: (B, N), rows grouped by sample, such as the gate of adaLN."""


@dataclass(frozen=True)
class Tile(Kind):
    """One number per element: (M, N), or by heads: (B, T, H, D), (B, H, T, D) or (B, H, D, T)."""

    layout: str = "rows"


@dataclass(frozen=True)
class Table(Kind):
    """(rows, width): its columns repeat over the columns of the value, such as RoPE's cosines over the heads.

    rows: "each" (one table row per row), "repeat" (row m % rows), or the name of an integer Col operand to look up by.
    """

    rows: str = "each"


@dataclass(frozen=True)
class Group(Kind):
    """One number per block of rows x cols elements: (M / rows, N / cols), such as scales of a quantised operand."""

    rows: int = 1
    cols: int = 128


# ---- functions ---------------------------------------------------------------------------------------------------


def _apply(op: str, *args: Any, **attrs: Any) -> Value:
    nodes = [lift(arg).node for arg in args]
    if OPS[op].result != "bool" and OPS[op].shape not in ("part", "join", "spread"):
        # Truth counts as 1 and 0 in arithmetic, on every backend; only where takes it as it is.
        nodes = [_as_number(each) if index or op != "where" else each for index, each in enumerate(nodes)]
    cols = max((each.space.cols for each in nodes), default=0)
    nodes = [_repeated(each, cols) for each in nodes]
    if OPS[op].shape == "elementwise":
        _check_columns(op, nodes)
    made = node(op, *nodes, **attrs)
    return Value(one_plus_is_one_sided(made) or made)


def _as_number(value: Node) -> Node:
    if value.dtype != "bool":
        return value
    return node("where", value, lift(1.0).node, lift(0.0).node)


def _check_columns(op: str, nodes: list[Node]) -> None:
    """An operand whose columns do not fit is the caller's mistake, and named; other mismatches are the function's."""
    with_cols = [each for each in nodes if each.space.cols]
    for each in with_cols:
        other = next((value for value in with_cols if value.space.cols != each.space.cols), None)
        if other is not None and each.op in ("load", "load_int"):
            raise ArgumentError(
                each.attr("name"),
                f"has {each.space.cols} columns, but meets {formula(other)}, which has {other.space.cols} ({op})",
                f"pass a tensor whose last dimension is {other.space.cols}, or take the value apart as the operand is",
            )


def _repeated(value: Node, cols: int) -> Node:
    """A value made of tables alone, repeated over `cols` columns; any other value as it is."""
    if not value.space.cols or value.space.cols == cols or cols % value.space.cols:
        return value
    if value.op in ("load", "load_int") and value.attr("period"):
        return node(value.op, space=Space(value.space.rows, cols), **dict(value.attrs))
    if OPS[value.op].shape == "elementwise":
        return rebuilt(value, tuple(_repeated(arg, cols) for arg in value.args))
    return value


def lift(value: object) -> Value:
    if isinstance(value, Value):
        if is_sink(value.node.op):
            raise TraceError(
                f"{value.node.op} reduces the whole {value.node.op[:3]} and is known only when every tile is done: return it, "
                "and read it in the next program (or use group_sum / group_max within the tile)"
            )
        return value
    if isinstance(value, numbers.Real):
        return Value(const(float(value)))
    if isinstance(value, torch.Tensor):
        raise TraceError(
            "a tensor inside an epilogue must be one of its arguments: add a parameter and pass the tensor by keyword"
        )
    raise TraceError(f"{type(value).__name__} {value!r} cannot meet a traced value")


def exp(x: Numeric) -> Value:
    return _apply("exp", x)


def log(x: Numeric) -> Value:
    return _apply("log", x)


def sqrt(x: Numeric) -> Value:
    return _apply("sqrt", x)


def rsqrt(x: Numeric) -> Value:
    return _apply("rsqrt", x)


def tanh(x: Numeric) -> Value:
    return _apply("tanh", x)


def sigmoid(x: Numeric) -> Value:
    return _apply("sigmoid", x)


def erf(x: Numeric) -> Value:
    return _apply("erf", x)


def erfc(x: Numeric) -> Value:
    """1 - erf(x), which keeps its digits where erf is close to 1."""
    return _apply("erfc", x)


def round(x: Numeric) -> Value:
    """To the nearest whole number, ties to even."""
    return _apply("round", x)


def floor(x: Numeric) -> Value:
    return _apply("floor", x)


def maximum(x: Numeric, y: Numeric) -> Value:
    return _apply("maximum", x, y)


def minimum(x: Numeric, y: Numeric) -> Value:
    return _apply("minimum", x, y)


def clamp(x: Numeric, low: Numeric, high: Numeric) -> Value:
    return minimum(maximum(x, low), high)


def where(condition: Value, yes: Numeric, no: Numeric) -> Value:
    return _apply("where", condition, yes, no)


def cast(x: Numeric, dtype: torch.dtype) -> Value:
    """The value rounded to `dtype` (int8 and fp8 saturate); arithmetic goes on in fp32."""
    return _apply("cast", x, dtype=dtype)


def relu(x: Numeric) -> Value:
    return maximum(x, 0.0)


def squared_relu(x: Numeric) -> Value:
    return relu(x) ** 2


def silu(x: Value) -> Value:
    return x * sigmoid(x)


def gelu(x: Value, approximate: str = "none") -> Value:
    if approximate == "tanh":
        # 0.5 (1 + tanh(u)) = sigmoid(2u): one special function instead of two passes over tanh's branches.
        return x * sigmoid(x * (1.0 + 0.044715 * x * x) * (2.0 * math.sqrt(2.0 / math.pi)))
    if approximate != "none":
        raise TraceError(f"gelu's approximate is 'none' or 'tanh', not {approximate!r}")
    return 0.5 * x * erfc(x * -math.sqrt(0.5))


def softcap(x: Value, cap: Numeric) -> Value:
    return tanh(x / cap) * cap


def dropout(x: Value, p: float, seed: Value | int) -> Value:
    """Zero each element with probability p and scale the rest, by a mask that depends on (seed, row, column) alone."""
    if not 0.0 <= p < 1.0:
        raise TraceError(f"dropout's p is a number from 0 up to, not including, 1; got {p!r}")
    if isinstance(seed, float) or (isinstance(seed, int) and not 0 <= seed < 2**24):
        # A number becomes an fp32 constant, and larger ones would collide.
        raise TraceError(
            f"dropout's seed {seed!r} is no whole number below 2^24: pass a tensor, seed=torch.tensor(...)"
        )
    keep = p <= _apply("random", seed, row_index(), col_index(x.cols))
    return where(keep, x * (1.0 / (1.0 - p)), 0.0)


def row_index() -> Value:
    return Value(node("row_index", space=Space(1, 0)))


def col_index(cols: int) -> Value:
    """The column's number, over a space of `cols` columns (`value.cols` of the value it is compared with)."""
    return Value(node("col_index", space=Space(0, cols)))


def parts(x: Value, count: int, block: int | None = None) -> tuple[Value, ...]:
    """Each block of `block` columns (default: all of them) taken apart into `count` equal parts."""
    if count < 1:
        raise TraceError(f"a value cannot be taken apart into {count} parts")
    block = block or x.cols
    return tuple(_apply("part", x, frame=Frame(index, count, block)) for index in range(count))


def halves(x: Value, block: int | None = None) -> tuple[Value, ...]:
    """The first and the second half of all columns, or of each block: gate and up, or rotate-half RoPE's (block=head)."""
    return parts(x, 2, block)


def pairs(x: Value) -> tuple[Value, ...]:
    """Even and odd columns: interleaved RoPE, interleaved gate and up."""
    return parts(x, 2, 2)


def join(*values: Value, block: int | None = None) -> Value:
    """The inverse of `parts`: the values side by side, in every block of `block` columns (default: all)."""
    lifted = [lift(value) for value in values]
    return _apply("join", *lifted, block=block or sum(value.cols for value in lifted))


def group_sum(x: Value, cols: int, rows: int = 1) -> Value:
    """The sum over each group of rows x cols elements, which must lie in one tile: a head's sum of squares, say."""
    return _apply("group_sum", x, rows=rows, cols=cols)


def group_max(x: Value, cols: int, rows: int = 1) -> Value:
    return _apply("group_max", x, rows=rows, cols=cols)


def spread(x: Value, cols: int, rows: int = 1) -> Value:
    """Each value repeated over its group: the inverse of group_sum's shrinking."""
    return _apply("spread", x, rows=rows, cols=cols)


def row_sum(x: Value) -> Value:
    return _apply("row_sum", x)


def row_max(x: Value) -> Value:
    return _apply("row_max", x)


def row_moments(x: Value) -> Value:
    """Mean and variance of each row, by tile means and squared deviations (Chan), never by E[x²] - mean²."""
    return _apply("row_moments", x)


def row_lse(x: Value) -> Value:
    """log(sum(exp(x))) of each row, online: the row never exists as a whole."""
    return _apply("row_lse", x)


def pick(x: Value, column: Value) -> Value:
    """The element of each row in the column that `column` (an integer Col) names; 0 where it names none."""
    return row_sum(where(col_index(x.cols) == column, x, 0.0))


def col_sum(x: Value) -> Value:
    return _apply("col_sum", x)


def col_max(x: Value) -> Value:
    return _apply("col_max", x)


def quantize(x: Value, dtype: torch.dtype, cols: int, rows: int = 1) -> tuple[Value, Value]:
    """(x / scale rounded to int8 or fp8, scale), one scale per group of rows x cols elements."""
    if dtype not in QUANTISED:
        raise TraceError(f"quantize takes torch.int8 or torch.float8_e4m3fn, not {dtype}")
    scale = maximum(group_max(abs(x), cols, rows), 1e-12) * (1.0 / QUANTISED[dtype])
    return cast(x / spread(scale, cols, rows), dtype), scale


_TORCH_NAMES: dict[str, Callable[..., Value]] = {
    "exp": exp, "log": log, "sqrt": sqrt, "rsqrt": rsqrt, "tanh": tanh, "sigmoid": sigmoid, "erf": erf, "erfc": erfc, "relu": relu,
    "silu": silu, "gelu": gelu, "maximum": maximum, "minimum": minimum, "clamp": clamp, "where": where, "abs": abs,
    "round": round, "floor": floor, "add": lambda x, y: _apply("add", x, y), "sub": lambda x, y: _apply("sub", x, y),
    "mul": lambda x, y: _apply("mul", x, y), "div": lambda x, y: _apply("div", x, y),
}  # fmt: skip


# ---- stores ------------------------------------------------------------------------------------------------------


STORED = (torch.float64, torch.float32, torch.bfloat16, torch.float16, *QUANTISED)


@dataclass(frozen=True)
class Stored:
    """A value with the form in which it leaves the chip."""

    value: Value
    dtype: torch.dtype | None = None
    layout: str = "rows"
    head: int = 0
    rows: Value | None = None
    accumulate: bool = False


def store(
    value: Value,
    *,
    dtype: torch.dtype | None = None,
    layout: str = "rows",
    head: int = 0,
    rows: Value | None = None,
    accumulate: bool = False,
) -> Stored:
    """How to store a returned value: its dtype, its layout by heads, the rows it goes to, or that it is added.

    layout: "rows" (M, N), or by heads of `head` columns "bthd", "bhtd", "bhdt". rows: an integer Col operand naming the
    output row (within the sample) for each row of the product, negative for none: a KV-cache append. accumulate: the
    output is added to what is there.
    """
    if layout not in LAYOUTS:
        raise TraceError(f"layout {layout!r} is none of {', '.join(LAYOUTS)}")
    if (layout != "rows") != bool(head):
        raise TraceError(
            "a layout by heads needs head=, the number of columns of one head, and only such a layout has one"
        )
    if dtype is not None and dtype not in STORED:
        raise TraceError(f"dtype {dtype} cannot be stored: use {', '.join(str(each) for each in STORED)}")
    if rows is not None and (
        not isinstance(rows, Value) or rows.node.op != "load_int" or rows.node.space != Space(1, 0)
    ):
        raise TraceError("store's rows is an integer Col operand of the epilogue")
    return Stored(value, dtype, layout, head, rows, accumulate)
