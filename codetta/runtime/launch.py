"""One launch of a plan: tensors bound to a program, and the program held to its meaning where that is asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence

from torch import Tensor

from codetta import dispatch
from codetta.errors import CheckError
from codetta.program import Product, Program
from codetta.runtime.bind import Binding, bind_operand, bind_output, matrix
from codetta.stat import Stat


def launch(
    program: Program,
    a: Tensor,
    b: Sequence[Tensor],
    values: dict[str, Tensor | Stat],
    out: dict[str, Tensor] | None = None,
) -> list[Tensor | Stat]:
    """Run one program of a plan; its stores and sinks in the order of its outputs. out: where to store, by name."""
    a, major = matrix("a", a)
    if major == "column":
        a = a.contiguous()
    rows = a.shape[0]
    samples = 1
    for operand in program.operands:
        if operand.rows == "sample":
            samples = values[operand.name].shape[0]  # type: ignore[union-attr]
    given = out or {}
    for store in program.stores:
        if store.row_index:
            samples = given[store.name].shape[0]
    bound = {each.name: bind_operand(each, values[each.name], rows, samples) for each in program.operands}
    outputs = {each.name: bind_output(each, given.get(each.name), rows, samples, a.device) for each in program.stores}
    weights = tuple(as_stored(each, product) for each, product in zip(b, program.products, strict=True))
    binding = Binding(rows, samples, 1, (rows,), a, weights, bound, outputs, lasting=True)
    results = dispatch.run(program, binding)
    if os.environ.get("CODETTA_CHECK", "0") not in ("", "0"):
        check(program, binding, results)
    return [results[name] for name in program.outputs]


def as_stored(weight: Tensor, product: Product) -> Tensor:
    """A weight (N, K) lying in memory as the program was written for; copied only where it lies otherwise, as a view of another."""
    if product.layout == "nk":
        return weight if weight.stride(1) == 1 or weight.shape[1] == 1 else weight.contiguous()
    return weight if weight.stride(0) == 1 or weight.shape[0] == 1 else weight.t().contiguous().t()


def check(program: Program, binding: Binding, results: dict[str, Tensor | Stat]) -> None:
    """CODETTA_CHECK=1: hold a program to the reference on the tensors at hand; the first that disagrees is named."""
    from codetta.backends import reference

    got = {name: _finished(value) for name, value in results.items()}
    truth = reference.run(program, binding, precise=True)
    plain = reference.run(program, binding, separate=True)
    for name in program.outputs:
        for mine, exact, usual in zip(got[name], _finished(truth[name]), _finished(plain[name]), strict=True):
            scale = exact.double().norm().clamp_min(1e-30)
            error, theirs = ((each.double() - exact.double()).norm() / scale for each in (mine, usual))
            if not error <= 2 * theirs + 1e-3:
                raise CheckError(
                    f"{program.name}: output {name} is off by {error:.2e} where separate kernels are by {theirs:.2e}\n{program}"
                )


def _finished(value: Tensor | Stat) -> tuple[Tensor, ...]:
    done = value.finish() if isinstance(value, Stat) else value.clone()
    return done if isinstance(done, tuple) else (done,)
