"""Laws that move what is done to the left operand of a product behind the product, where it is done to the tile.

A norm scales rows by a statistic of theirs, which is known only when the whole row is; the product of the raw rows need not
wait for it. Laws are about algebra: they do not know what a norm is called or how it was written down.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from codetta.errors import Reason
from codetta.ir.graph import Node, Space, const, node, topological

ONE = const(1.0)
Late = Callable[[Node], bool]


def always(value: Node) -> bool:
    return True


@dataclass(frozen=True)
class Affine:
    """scale (per row) · gain (per column) · base + Σ factor (per row) · vector (per column); None stands for one."""

    base: Node
    scale: Node | None = None
    gain: Node | None = None
    terms: tuple[tuple[Node | None, Node | None], ...] = ()


def row_scale_commutes(product: Node, late: Late = always) -> Node | None:
    """(s ⊙ (x · g) + Σ f ⊗ v) W  ->  s ⊙ (x (g W)) + Σ f ⊗ (v W), or s ⊙ ((x · g) W) where there is no Σ

    Reassociates. s and f are numbers per row, g and v per column and made of parameters alone. A vector that is g itself
    is multiplied as (1 (g W)), the column sums of the very weight that the product uses, so that a large mean cancels
    exactly; that takes a copy of the weight. Without a mean there is nothing to cancel, and the program that makes x stores
    x · g beside it: no copy of a weight, at the price of one more store. `late` tells which values are known only behind the program that makes x: those are taken apart, others are x.
    Refuses (None) where nothing per row is there to move, and for fp16, which cannot hold rows that are
    not normalised yet.
    """
    if product.op != "product" or why_not_defer(product, late):
        return None
    affine = affine_form(product.args[0], late)
    attrs = dict(product.attrs)
    base = affine.base
    if affine.gain is not None:
        if affine.terms:
            attrs["gain"] = affine.gain
        else:
            base = node("mul", base, affine.gain)
    result = node("product", base, space=product.space, **attrs)
    if affine.scale is not None:
        result = node("mul", result, affine.scale)
    for factor, vector in affine.terms:
        if vector is affine.gain:
            row = node("vector", ONE, space=Space(0, product.space.cols), **attrs)
        else:
            plain = {key: value for key, value in attrs.items() if key != "gain"}
            row = node("vector", vector or ONE, space=Space(0, product.space.cols), **plain)
        result = node("add", result, row if factor is None else node("mul", row, factor))
    return result


def why_not_defer(product: Node, late: Late = always) -> list[Reason]:
    """Why the law does not apply to the product; empty if it does."""
    affine = affine_form(product.args[0], late)
    moved = [affine.scale, *(factor for factor, _ in affine.terms)]
    if not any(each is not None and _per_row(each) for each in moved):
        return [Reason("row_scale_commutes", "nothing per row to move")]
    if product.attr("dtype") == torch.float16:
        return [Reason("row_scale_commutes", "fp16 cannot hold rows before they are normalised")]
    return []


def affine_form(value: Node, late: Late = always) -> Affine:
    """The value as an affine function of the first node below it that is not late, or that rows and columns do more to."""
    if not late(value):
        return Affine(value)
    match value.op:
        case "mul":
            for x, y in (value.args, value.args[::-1]):
                if not y.space.cols:
                    return _scaled(affine_form(x, late), y)
                if not y.space.rows and _constant(y):
                    return _gained(affine_form(x, late), y)
        case "div":
            x, y = value.args
            if not y.space.cols:
                return _scaled(affine_form(x, late), node("div", ONE, y))
            if not y.space.rows and _constant(y):
                return _gained(affine_form(x, late), node("div", ONE, y))
        case "neg":
            return _scaled(affine_form(value.args[0], late), const(-1.0))
        case "add":
            for x, y in (value.args, value.args[::-1]):
                if _shifts(y):
                    return _shifted(affine_form(x, late), y)
        case "sub":
            x, y = value.args
            if _shifts(y):
                return _shifted(affine_form(x, late), node("neg", y))
            if _shifts(x):
                return _shifted(_scaled(affine_form(y, late), const(-1.0)), x)
    return Affine(value)


def _per_row(value: Node) -> bool:
    return value.space.rows > 0


def _constant(value: Node) -> bool:
    """Made of parameters and numbers alone: the same for every call until a parameter changes."""
    return all(
        leaf.op in ("const", "vector") or leaf.attr("constant") or leaf.args for leaf in topological([value])
    ) and not any(leaf.op == "product" for leaf in topological([value]))


def _shifts(value: Node) -> bool:
    return not value.space.cols or (not value.space.rows and _constant(value))


def _times(x: Node | None, y: Node | None) -> Node | None:
    if x is None or y is None:
        return x if y is None else y
    return node("mul", x, y)


def _scaled(affine: Affine, factor: Node) -> Affine:
    terms = tuple((_times(each, factor), vector) for each, vector in affine.terms)
    return Affine(affine.base, _times(affine.scale, factor), affine.gain, terms)


def _gained(affine: Affine, gain: Node) -> Affine:
    terms = tuple((factor, _times(vector, gain)) for factor, vector in affine.terms)
    return Affine(affine.base, affine.scale, _times(affine.gain, gain), terms)


def _shifted(affine: Affine, shift: Node) -> Affine:
    term = (None, shift) if shift.space.cols else (shift, None)
    return Affine(affine.base, affine.scale, affine.gain, (*affine.terms, term))
