"""Gradients of weights behind a norm: made of what there is, not of what the norm would make."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

import codetta.gained  # noqa: F401 (its operator)
from codetta.capture.graph import Graph
from codetta.capture.kinds import behind, is_tangent, made_of, packet_of
from codetta.ir.graph import Node, unstaged
from codetta.ir.view import hint, same
from codetta.plan.cost import fills_the_device
from codetta.rewrite.scale import affine_form

aten = torch.ops.aten


def row_scale_crosses(graph: Graph) -> bool:
    """dzᵀ (r ⊙ x · g)  ->  ((r ⊙ dz)ᵀ x) · g

    Reassociates. The gradient of a weight multiplies what the weight was multiplied with, and behind a norm nobody has stored that. On
    the right only x is needed, and r ⊙ dz, which the program that makes dz stores instead of dz: the product with Wᵀ takes it too,
    and divides its rows by r. Refuses norms with a mean, which would be subtracted from a rounded product, and fp16.
    Tells whether the graph was changed: then it must be read again.
    """
    changed = False
    scaled: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
    for each in list(graph.nodes.nodes):
        if packet_of(each) is aten.mm and each not in graph.values:
            changed |= _Site(graph, each, scaled).rewrite()
    if changed:
        graph.nodes.eliminate_dead_code()
    return changed


def gradients_look_again(graph: fx.Graph, parameters: Iterable[fx.Node]) -> None:
    """dzᵀ n  ->  dzᵀ alias(n)

    Exact. Where n is known too late for the program that makes its rows, and so gets a program of its own, that program comes where the
    alias is: among the gradients. Results do not wait for it, and nobody carries n over.
    """
    depends, constant = behind(graph, is_tangent), made_of(graph, parameters)
    for each in list(graph.nodes):
        if each in depends and packet_of(each) is aten.mm:
            for arg in each.all_input_nodes:
                if arg not in depends and arg not in constant and arg.op == "call_function":
                    with graph.inserting_before(each):
                        again = graph.call_function(aten.alias.default, (arg,))
                    again.meta |= {"val": arg.meta["val"]}
                    each.replace_input_with(arg, again)


class _Site:
    """One product dzᵀ n. `scaled`: what has been made of gradients and scales already."""

    def __init__(self, graph: Graph, at: fx.Node, scaled: dict[tuple[fx.Node, fx.Node], fx.Node]) -> None:
        self.graph, self.at, self.scaled = graph, at, scaled

    def rewrite(self) -> bool:
        left, right = self.at.args
        assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
        dz = _transposed(left)
        value = self.graph.values.get(right)
        if dz is None or value is None or right.meta["val"].dtype == torch.float16:
            return False
        affine = affine_form(unstaged(value.node), self.graph.placement.is_late)
        if affine.scale is None or not affine.scale.space.rows or affine.terms:
            return False
        scale, gain = self._tensor(affine.scale), self._gain(affine.gain)
        base = self._tensor(affine.base, right.meta["val"].dtype)
        if scale is None or base is None or (gain is None and affine.gain is not None):
            return False
        width = right.meta["val"].shape[1]
        if not same(base.meta["val"].shape[-1], width) or not same(scale.meta["val"].shape[-1], 1):
            return False
        self._write(dz, scale, base, gain, width)
        return True

    def _tensor(self, value: Node, dtype: torch.dtype | None = None) -> fx.Node | None:
        """A tensor of the graph that is this value."""
        for each, known in self.graph.values.items():
            tensor = each.meta["val"]
            if (
                value in (known.node, unstaged(known.node))
                and (dtype is None or tensor.dtype == dtype)
                and tensor.dim() > 1
            ):
                return each
        return None

    def _gain(self, gain: Node | None) -> fx.Node | None:
        if gain is None or gain.op != "load":
            return None
        leaf = self.graph.leaves[gain.attr("name")]
        return leaf.source if leaf.start is None and not leaf.operand.period else None

    def _write(self, dz: fx.Node, scale: fx.Node, base: fx.Node, gain: fx.Node | None, width: int) -> None:
        scaled, value = self._scaled(dz, scale), self.at.meta["val"]
        with self.graph.nodes.inserting_before(self.at):
            rows = self._add(aten.view.default, base, [-1, width], val=base.meta["val"].reshape(-1, width))
            if gain is not None and fills_the_device(value, hint(scaled.meta["val"].shape[0])):
                result = self._add(torch.ops.codetta.gained_gradient.default, scaled, rows, gain, val=value)
            else:
                turned = self._add(aten.t.default, scaled, val=scaled.meta["val"].t())
                result = self._add(aten.mm.default, turned, rows, val=value)
                if gain is not None:
                    wide = self._add(aten.mul.Tensor, result, gain, val=value * gain.meta["val"])
                    result = self._add(aten._to_copy.default, wide, val=value, dtype=value.dtype)
        self.at.replace_all_uses_with(result)

    def _scaled(self, dz: fx.Node, scale: fx.Node) -> fx.Node:
        """r ⊙ dz, once; products with dz take it as well."""
        if (dz, scale) in self.scaled:
            return self.scaled[dz, scale]
        users, value = list(dz.users), dz.meta["val"]
        products = [
            user for user in users if packet_of(user) is aten.mm and user.args[0] is dz and user.args[1] is not dz
        ]
        # Not before it is needed: a gradient that is given is there from the beginning of the graph, among the results.
        first = next(each for each in self.graph.nodes.nodes if each is self.at or each in products)
        with self.graph.nodes.inserting_before(first):
            column = self._add(aten.view.default, scale, [-1, 1], val=scale.meta["val"].reshape(-1, 1))
            # Whoever makes the parts of what is joined scales them.
            parts = dz.all_input_nodes if packet_of(dz) is aten.cat and dz.args[1:] == (1,) else [dz]
            found = []
            for part in parts:
                wide = self._add(aten.mul.Tensor, part, column, val=part.meta["val"] * column.meta["val"])
                found.append(self._add(aten._to_copy.default, wide, val=part.meta["val"], dtype=value.dtype))
            made = found[0] if len(found) == 1 else self._add(aten.cat.default, found, 1, val=value)
        self.scaled[dz, scale] = made
        for user in products:
            self._divide(user, made, column)
        return made

    def _divide(self, product: fx.Node, scaled: fx.Node, column: fx.Node) -> None:
        """dz Wᵀ = (r ⊙ dz) Wᵀ / r"""
        product.args = (scaled, product.args[1])
        value = product.meta["val"]
        with self.graph.nodes.inserting_before(product.next):
            inverse = self._add(aten.reciprocal.default, column, val=column.meta["val"].reciprocal())
            wide = self._add(aten.mul.Tensor, product, inverse, val=value * inverse.meta["val"])
            result = self._add(aten._to_copy.default, wide, val=value, dtype=value.dtype)
        product.replace_all_uses_with(result, delete_user_cb=lambda user: user is not wide)

    def _add(self, target: Any, *args: Any, val: Any, **kwargs: Any) -> fx.Node:
        made = self.graph.nodes.call_function(target, args, kwargs)
        made.meta["val"] = val
        return made


def _transposed(each: fx.Node) -> fx.Node | None:
    """What a matrix is the transpose of."""
    source = each.args[0] if each.args else None
    turned = packet_of(each) is aten.t or (
        packet_of(each) in (aten.permute, aten.transpose) and each.meta["val"].dim() == 2
    )
    return source if turned and isinstance(source, fx.Node) else None
