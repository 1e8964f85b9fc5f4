"""Laws about functions that run from -1 to 1: one added to them is a function of its own, with digits where the sum has none."""

from __future__ import annotations

from codetta.ir.graph import Node, const, node


def one_plus_is_one_sided(value: Node) -> Node | None:
    """1 + erf(x), 1 + tanh(x)  ->  erfc(-x), 2 sigmoid(2 x)

    Exact. As activations write them out: both are close to -1 for negative x, so that the sum keeps few of their digits, and both must
    be exact around 0, which the sum does not need. Refuses (None) any other sum.
    """
    if value.op != "add":
        return None
    for one, function in (value.args, value.args[::-1]):
        if one.op == "const" and one.attr("value") == 1.0 and function.op in ("erf", "tanh"):
            (x,) = function.args
            if function.op == "erf":
                return node("erfc", node("neg", x))
            return node("mul", const(2.0), node("sigmoid", node("mul", const(2.0), x)))
    return None
