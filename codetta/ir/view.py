"""View: how the dimensions of a tensor are made of the rows and columns of a token matrix.

A tensor (B, T, H, D) may be a matrix of B·T rows and H·D columns; transposed to (B, H, T, D) it still is. A dimension is a
run of factors, each a piece of the rows or of the columns; reshapes split and merge them, transposes move them, and a
dimension of size one has none. Whoever computes sees the matrix, whoever calls a kernel of somebody else's the tensor.
Sizes of rows may be symbolic, sizes of columns are numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

Size = Any  # int or torch.SymInt


@dataclass(frozen=True, eq=False)
class Factor:
    """A piece of the rows or of the columns; `place` orders the pieces, outermost first."""

    kind: str  # "row" or "col"
    place: tuple[int, ...]
    size: Size


Dims = tuple[tuple[Factor, ...], ...]


def same(x: Size, y: Size) -> bool:
    """Whether two sizes are known to be equal, whatever the symbols are."""
    if isinstance(x, int) and isinstance(y, int):
        return x == y
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(x == y))


def hint(size: Size) -> int:
    """A size as a number; of a symbol, the one that the graph was captured with."""
    return size if isinstance(size, int) else int(size.node.hint or 1)


def tokens(shape: Sequence[Size]) -> Dims | None:
    """The dimensions of a tensor whose last one is columns and all others rows; None if its columns are not a number."""
    if not shape or not isinstance(shape[-1], int):
        return None
    rows = [() if same(size, 1) else (Factor("row", (index,), size),) for index, size in enumerate(shape[:-1])]
    return (*rows, (Factor("col", (0,), shape[-1]),))


def factors(dims: Dims, kind: str) -> list[Factor]:
    """The pieces of the rows or columns in their order."""
    return sorted((factor for dim in dims for factor in dim if factor.kind == kind), key=lambda factor: factor.place)


def shape_of(dims: Dims) -> list[Size]:
    return [product(factor.size for factor in dim) for dim in dims]


def product(sizes: Any) -> Size:
    result: Size = 1
    for size in sizes:
        result = result * size
    return result


def is_matrix(dims: Dims) -> bool:
    """Whether the tensor is the matrix: all rows in order, then all columns."""
    flat = [factor for dim in dims for factor in dim]
    return flat == [*factors(dims, "row"), *factors(dims, "col")] and all(
        len({factor.kind for factor in dim}) < 2 for dim in dims
    )


def has_columns_last(dims: Dims) -> bool:
    """Whether the last dimension is all columns in their order, and nothing else."""
    return bool(dims) and list(dims[-1]) == factors(dims, "col")


def in_order(factors: Sequence[Factor]) -> bool:
    """Whether pieces, as they are seen one after the other, come in the order of the matrix: rows among rows, columns among columns."""
    for kind in ("row", "col"):
        places = [factor.place for factor in factors if factor.kind == kind]
        if places != sorted(places):
            return False
    return True


def reshape(dims: Dims, shape: Sequence[Size]) -> Dims | None:
    """The dimensions after a reshape; None where a new dimension would cut through factors of unknown size."""
    left = [factor for dim in dims for factor in dim]
    result: list[tuple[Factor, ...]] = []
    for size in shape:
        taken: list[Factor] = []
        have: Size = 1
        while not same(have, size):
            if not left:
                return None
            factor = left.pop(0)
            if same(have * factor.size, size) or _divides(have * factor.size, size):
                taken.append(factor)
                have = have * factor.size
                continue
            cut = _cut(factor, have, size)
            if cut is None:
                return None
            taken.append(cut[0])
            have = have * cut[0].size
            left.insert(0, cut[1])
        result.append(tuple(taken))
    return None if left else tuple(result)


def _divides(part: Size, whole: Size) -> bool:
    if isinstance(part, int) and isinstance(whole, int):
        return part < whole and whole % part == 0
    # A product of symbols is the start of a longer one if what remains is a product, too.
    import sympy

    quotient = sympy.sympify(_expression(whole)) / sympy.sympify(_expression(part))
    return not same(part, whole) and bool(quotient.is_integer) and quotient != 1


def _cut(factor: Factor, have: Size, size: Size) -> tuple[Factor, Factor] | None:
    """The factor in two, so that the first fills a dimension of `size` of which there is `have`."""
    import sympy

    wanted = sympy.sympify(_expression(size)) / sympy.sympify(_expression(have))
    rest = sympy.sympify(_expression(factor.size)) / wanted
    if not (wanted.is_integer and rest.is_integer) or wanted.is_positive is False:
        return None
    first = size if isinstance(have, int) and have == 1 else size // have
    second = factor.size // first
    return replace(factor, place=(*factor.place, 0), size=first), replace(factor, place=(*factor.place, 1), size=second)


def _expression(size: Size) -> Any:
    return size if isinstance(size, int) else size.node.expr


def permute(dims: Dims, order: Sequence[int]) -> Dims:
    return tuple(dims[index] for index in order)


def with_room(dims: Dims, at: int) -> Dims:
    """The same with the columns numbered anew, so that a piece can come in as number `at`."""
    place = {id(factor): number + (number >= at) for number, factor in enumerate(factors(dims, "col"))}
    return tuple(
        tuple(replace(factor, place=(place[id(factor)],)) if factor.kind == "col" else factor for factor in dim)
        for dim in dims
    )
