"""Laws about gradients: what a norm's gradient reduces can be reduced earlier, where the gradient of the product behind it is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from codetta.ir.graph import Node, Space, node, unstaged
from codetta.rewrite.scale import ONE, Affine, affine_form


@dataclass(frozen=True)
class Use:
    """A product n W whose matrix another product has transposed: its left operand, its value, and the weight's name."""

    left: Node
    value: Node
    weight: str


@dataclass(frozen=True)
class Moved:
    """scale · Σ over the pairs of Σ_j x_j y_j, each pair a gradient and what it is multiplied with."""

    scale: Node
    pairs: tuple[tuple[Node, Node], ...]


def inner_product_moves(value: Node, uses: Callable[[Node], Sequence[Use]]) -> Moved | None:
    """Σ_k (dz Wᵀ)_k · n_k  ->  Σ_j dz_j · (n W)_j

    Reassociates. The gradient of a norm needs the inner product of every row with its own gradient. On the right it is known when dz
    is, before the product with Wᵀ: whoever makes dz reduces it, and the norm's gradient is finished in the epilogue of the product. n may
    come scaled by rows and shifted by a vector v, whose share is Σ_j dz_j (v W)_j; or be a vector alone. `uses`: products with the same matrix, not transposed, of a product.
    Refuses (None) what is not such an inner product.
    """
    factors = _factors(value)
    for at, factor in enumerate(factors):
        terms = [_scaled_product(each) for each in _terms(factor)]
        products = [product for product, _ in terms if product.op == "product" and product.attr("gain") is None]
        if len(products) < len(terms) or len({id(scale) for _, scale in terms}) > 1:
            continue
        rest = _product_of([*factors[:at], *factors[at + 1 :], terms[0][1]])
        moved = [_moved(each, rest, uses(each)) for each in products]
        scales = {id(each.scale): each.scale for each in moved if each is not None}
        if None not in moved and len(scales) == 1:
            (scale,) = scales.values()
            return Moved(scale, tuple(pair for each in moved if each is not None for pair in each.pairs))
    return None


def _product_of(factors: Sequence[Node]) -> Node:
    """The matrix first, then what is multiplied with its columns, then with its rows."""
    result = ONE
    for each in sorted(factors, key=lambda each: (not (each.space.rows and each.space.cols), not each.space.cols)):
        if each is not ONE:
            result = each if result is ONE else node("mul", result, each)
    return result


def _scaled_product(value: Node) -> tuple[Node, Node]:
    """A product that its rows are scaled behind, and the scale."""
    if value.op == "mul":
        for x, y in (value.args, value.args[::-1]):
            if x.op == "product" and not y.space.cols:
                return x, y
    return value, ONE


def _moved(product: Node, rest: Node, uses: Sequence[Use]) -> Moved | None:
    """The same of one product, Σ_k (dz Wᵀ)_k · rest_k."""
    dz = product.args[0]
    wanted = affine_form(rest)
    for use in uses:
        space = Space(0, use.value.space.cols)
        if not rest.space.rows:
            row = node("vector", rest, space=space, weight=use.weight, dtype=product.attr("dtype"))
            return Moved(ONE, ((dz, row),))
        known = affine_form(unstaged(use.left))
        left_out = _without(known, wanted)
        if left_out is None:
            continue
        value = use.value
        for vector in left_out:
            row = node("vector", vector or ONE, space=space, weight=use.weight, dtype=product.attr("dtype"))
            value = node("sub", value, row)
        return Moved(_ratio(wanted.scale, known.scale), ((dz, value),))
    return None


def _without(whole: Affine, part: Affine) -> list[Node | None] | None:
    """Vectors that the whole has and the part lacks, if that and a scale for each row is all that distinguishes them."""
    if whole.base is not part.base or whole.gain is not part.gain:
        return None
    if whole.terms and whole.scale is not part.scale:
        return None  # the terms are scaled, too
    missing = [term for term in whole.terms if term not in part.terms]
    if len(missing) + len(part.terms) != len(whole.terms) or any(factor is not None for factor, _ in missing):
        return None
    return [vector for _, vector in missing]


def _ratio(x: Node | None, y: Node | None) -> Node:
    if x is y:
        return ONE
    if y is None:
        return x or ONE
    return node("div", x or ONE, y)


def _factors(value: Node) -> list[Node]:
    """Of a product of numbers."""
    if value.op == "mul":
        return [factor for arg in value.args for factor in _factors(arg)]
    return [value]


def _terms(value: Node) -> list[Node]:
    if value.op == "add":
        return [term for arg in value.args for term in _terms(arg)]
    return [value]
