"""Laws about statistics of rows: what a tile can reduce on its own, and how the pieces are put together."""

from __future__ import annotations

from codetta.ir.graph import Node, Space, const, node


def variance_is_a_moment(summand: Node) -> Node | None:
    """Σ (x - Σx / K)²  ->  K · var(x), the variance from the (mean, squared deviations) of tiles

    Reassociates. A variance that is written out needs the mean before it can begin, so it would take a second pass over
    the row; tiles keep their own means and deviations, which merge without a cancellation. Refuses (None) anything but the square
    of a value's distance from its own mean.
    """
    if summand.op != "mul" or summand.args[0] is not summand.args[1] or summand.args[0].op != "sub":
        return None
    x, mean = summand.args[0].args
    if not is_mean(mean, x):
        return None
    var = node("moment", node("row_moments", x), space=Space(1, 0), field="var")
    return node("mul", var, const(float(x.space.cols)))


def is_mean(value: Node, of: Node) -> bool:
    """Whether the value is the mean over all columns of another."""
    if value.op == "moment":
        return value.attr("field") == "mean" and value.args[0].args[0] is of
    if value.op != "mul":
        return False
    total, factor = value.args
    return (
        total.op == "row_sum"
        and total.args[0] is of
        and factor.op == "const"
        and factor.attr("value") == 1.0 / of.space.cols
    )
