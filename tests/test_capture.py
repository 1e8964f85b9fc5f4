"""Capture, piece by piece: views against PyTorch's own, laws against what they rewrite, and each family of operators.

What is captured runs on the reference backend: these tests are about meaning. An operator that stays with the graph gives the
right answer as well, so each test also says which operators may stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from modules import complaints
from torch import Tensor, nn

import codetta
from codetta import dispatch
from codetta.capture.at import operator_name
from codetta.capture.kinds import is_view
from codetta.integrations.dynamo import backend_of
from codetta.ir import view as views
from codetta.ir.graph import Node, Space, node
from codetta.ir.op import apply
from codetta.ir.view import Dims, Factor
from codetta.rewrite.gradient import Use, inner_product_moves
from codetta.rewrite.scale import affine_form, row_scale_commutes, why_not_defer
from codetta.runtime.executor import Executor
from codetta.steps import Launch, Region, Run

# ---- views ---------------------------------------------------------------------------------------------------------


def presented(matrix: Tensor, dims: Dims) -> Tensor:
    """The tensor that dims make of a matrix, by their definition: take it apart into factors, and put these in order."""
    order = [*views.factors(dims, "row"), *views.factors(dims, "col")]
    flat = [factor for dim in dims for factor in dim]
    apart = matrix.reshape([factor.size for factor in order])
    return apart.permute([order.index(factor) for factor in flat]).reshape(views.shape_of(dims))


def start(*shape: int) -> tuple[Tensor, Tensor, Dims]:
    """A tensor, its matrix and its dims."""
    x = torch.arange(torch.Size(shape).numel()).reshape(shape)
    dims = views.tokens(shape)
    assert dims is not None
    return x, x.reshape(-1, shape[-1]), dims


def test_tokens() -> None:
    x, matrix, dims = start(2, 1, 5, 24)
    assert torch.equal(presented(matrix, dims), x)
    assert [len(dim) for dim in dims] == [1, 0, 1, 1]  # a dimension of one is made of nothing
    assert [factor.kind for factor in dims[-1]] == ["col"]
    assert views.is_matrix(dims)
    assert views.tokens([]) is None


@pytest.mark.parametrize(
    "steps",
    [
        [(2, 5, 4, 6), [0, 2, 1, 3]],  # heads
        [(2, 5, 4, 6), [0, 2, 1, 3], (8, 5, 6), (2, 4, 5, 6), [0, 2, 1, 3], (2, 5, 24)],  # there and back
        [(10, 24), (10, 4, 3, 2), [0, 2, 1, 3], (10, 3, 8)],
        [(2, 5, 2, 12), (2, 5, 2, 3, 4), (2, 5, 6, 4), [2, 0, 1, 3]],
        [(1, 2, 5, 24, 1), [4, 1, 0, 2, 3], (2, 5, 24)],  # dimensions of one come and go
        [[1, 0, 2], (5, 48)],  # rows and columns in one dimension
        [[2, 1, 0], (24, 10), (6, 4, 5, 2)],
    ],
)
def test_reshape_and_permute(steps: list[Any]) -> None:
    """Tuples reshape, lists permute."""
    x, matrix, dims = start(2, 5, 24)
    for step in steps:
        x = x.permute(step) if isinstance(step, list) else x.reshape(step)
        found = views.permute(dims, step) if isinstance(step, list) else views.reshape(dims, step)
        assert found is not None
        dims = found
        assert views.shape_of(dims) == list(x.shape)
        assert torch.equal(presented(matrix, dims), x)


@st.composite
def _journeys(draw: st.DrawFn) -> list[Any]:
    """Reshapes that split a dimension or merge two, and permutations, one behind the other."""
    shape: list[int] = [2, 6, 24]
    steps: list[Any] = []
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(shape) - 1))
        match draw(st.sampled_from(("split", "merge", "permute"))):
            case "split":
                first = draw(st.sampled_from([n for n in range(1, shape[at] + 1) if shape[at] % n == 0]))
                shape = [*shape[:at], first, shape[at] // first, *shape[at + 1 :]]
                steps.append(tuple(shape))
            case "merge" if at + 1 < len(shape):
                shape = [*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]]
                steps.append(tuple(shape))
            case _:
                order = draw(st.permutations(range(len(shape))))
                shape = [shape[index] for index in order]
                steps.append(list(order))
    return steps


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(_journeys())
def test_random_views(steps: list[Any]) -> None:
    """Whatever is not refused is what PyTorch does; splits and merges of whole factors are not refused."""
    x, matrix, dims = start(2, 6, 24)
    for step in steps:
        x = x.permute(step) if isinstance(step, list) else x.reshape(step)
        found = views.permute(dims, step) if isinstance(step, list) else views.reshape(dims, step)
        if found is None:
            # Only a dimension of factors that do not divide it may be: 4 of 6 · 2, say.
            assert any(len(dim) > 1 for dim in dims)
            return
        dims = found
        assert torch.equal(presented(matrix, dims), x)


@pytest.mark.parametrize(("shape", "wanted"), [((2, 5, 24), (4, 60)), ((2, 5, 24), (2, 5, 23)), ((6, 4), (4, 6))])
def test_reshape_refuses(shape: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Dimensions that cut through the border of rows and columns, and sizes that do not agree."""
    _, _, dims = start(*shape)
    assert views.reshape(dims, wanted) is None


def test_is_matrix() -> None:
    _, _, dims = start(2, 5, 24)
    heads = views.reshape(dims, (2, 5, 4, 6))
    assert heads is not None and views.is_matrix(heads)
    assert not views.is_matrix(views.permute(heads, (0, 2, 1, 3)))
    assert not views.is_matrix(views.permute(heads, (0, 1, 3, 2)))
    mixed = views.reshape(views.permute(dims, (1, 0, 2)), (5, 48))
    assert mixed is not None and not views.is_matrix(mixed)


def symbols(*hints: int) -> list[torch.SymInt]:
    """Sizes that are known only by name."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    environment = ShapeEnv()
    fake = FakeTensorMode(shape_env=environment)
    context: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(hints))
    sizes = list(fake.from_tensor(torch.empty(hints), symbolic_context=context).shape)
    assert all(isinstance(size, torch.SymInt) for size in sizes)
    return sizes  # type: ignore[return-value]


def _hints(dims: Dims) -> Dims:
    def known(size: Any) -> int:
        return size if isinstance(size, int) else size.node.hint

    return tuple(tuple(Factor(f.kind, f.place, known(f.size)) for f in dim) for dim in dims)


def test_symbolic_sizes() -> None:
    """Rows may be symbols: merged, taken apart again and moved, without a guard on any of them."""
    b, t = symbols(7, 11)
    x = torch.arange(7 * 11 * 24).reshape(7, 11, 24)
    dims = views.tokens((b, t, 24))
    assert dims is not None
    steps: list[tuple[Any, Callable[[Tensor], Tensor]]] = [
        ((b * t, 24), lambda x: x.reshape(77, 24)),
        ((b, t, 4, 6), lambda x: x.reshape(7, 11, 4, 6)),
        ([0, 2, 1, 3], lambda x: x.permute(0, 2, 1, 3)),
        ((b * 4, t, 6), lambda x: x.reshape(28, 11, 6)),
        ((b, 4, t, 6), lambda x: x.reshape(7, 4, 11, 6)),
        ([0, 2, 1, 3], lambda x: x.permute(0, 2, 1, 3)),
        ((b, t * 24), lambda x: x.reshape(7, 264)),
        ((b * t, 24), lambda x: x.reshape(77, 24)),
    ]
    matrix = x.reshape(77, 24)
    for step, eager in steps:
        found = views.permute(dims, step) if isinstance(step, list) else views.reshape(dims, step)
        assert found is not None, step
        dims, x = found, eager(x)
        assert torch.equal(presented(matrix, _hints(dims)), x), step
    assert not b.node.shape_env.guards


def test_symbols_are_not_cut() -> None:
    b, t = symbols(8, 12)
    dims = views.tokens((b, t, 24))
    assert dims is not None
    assert views.reshape(dims, (b, 2, t // 2, 24)) is None  # is t even?
    assert views.reshape(dims, (t, b, 24)) is None  # not without knowing both
    assert views.tokens((8, b)) is None
    assert not views.same(b, t) and views.same(b * t, t * b)
    assert not views.same(b, 8), "a hint is not a size"


# ---- laws ----------------------------------------------------------------------------------------------------------

ROWS, K, N = 7, 12, 10


def evaluate(value: Node, tensors: Mapping[str, Tensor]) -> Tensor:
    """What a node means, in float64: (rows or 1, cols or 1)."""
    args = [evaluate(arg, tensors) for arg in value.args]
    match value.op:
        case "load":
            return tensors[value.attr("name")]
        case "const":
            return torch.full((1, 1), value.attr("value"), dtype=torch.float64)
        case "product" | "vector":
            weight = tensors[value.attr("weight")]
            if value.attr("gain") is not None:
                weight = weight * evaluate(value.attr("gain"), tensors)
            return args[0].expand(-1, weight.shape[1]) @ weight.T
        case "row_sum":
            return args[0].sum(1, keepdim=True)
        case "stage":
            return args[0]
    return apply(value.op, args, dict(value.attrs))


def _tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)

    def rand(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    names = {"x": (ROWS, K), "y": (ROWS, K), "g": (1, K), "h": (1, K), "moving": (1, K), "w": (N, K)}
    tensors = {name: rand(*shape) for name, shape in names.items()}
    tensors |= {"dz": rand(ROWS, N), "dy": rand(ROWS, N), "v": rand(N, K)}
    tensors |= {"w back": tensors["w"].T, "v back": tensors["v"].T}
    return tensors | {name: rand(ROWS, 1).abs() + 0.5 for name in ("s", "m")}


TENSORS = _tensors()
X, Y = (node("load", space=Space(1, K), name=name) for name in "xy")
G, H = (node("load", space=Space(0, K), name=name, constant=True) for name in "gh")
MOVING = node("load", space=Space(0, K), name="moving")  # a row that is not made of parameters
S, M = (node("load", space=Space(1, 0), name=name) for name in "sm")
TWO = node("const", space=Space(), value=2.0)


def product(left: Node, dtype: torch.dtype = torch.float32) -> Node:
    return node("product", left, space=Space(1, N), weight="w", dtype=dtype)


def mul(x: Node, y: Node) -> Node:
    return node("mul", x, y)


def add(x: Node, y: Node) -> Node:
    return node("add", x, y)


def sub(x: Node, y: Node) -> Node:
    return node("sub", x, y)


def div(x: Node, y: Node) -> Node:
    return node("div", x, y)


DEFERRED = {
    "scale": mul(X, S),
    "scale first": mul(S, X),
    "divide": div(X, S),
    "rms": mul(mul(X, S), G),
    "gain first": mul(mul(X, G), S),
    "gain by division": mul(div(X, G), S),
    "one plus weight": mul(mul(X, S), add(TWO, G)),
    "two gains": mul(G, mul(mul(X, S), H)),
    "center": sub(X, M),
    "center from the other side": sub(M, X),
    "layer norm": add(mul(mul(sub(X, M), S), G), H),
    "layer norm, bias without weight": add(mul(sub(X, M), S), H),
    "shift, then gain, then shift": add(mul(add(mul(X, S), H), G), H),
    "negated": node("neg", mul(X, S)),
    "number": mul(mul(X, TWO), S),
    "shift by a number": mul(add(X, TWO), S),
    "shift by a number behind": add(mul(X, S), TWO),
    "shift by a number, then gain": mul(mul(add(X, TWO), S), G),
    "divided shift": div(sub(add(X, H), M), S),
    "squares stay inside": mul(mul(X, X), S),
    "row of a call": mul(mul(X, MOVING), S),
}


@pytest.mark.parametrize("name", DEFERRED)
def test_row_scale_commutes(name: str) -> None:
    """Same meaning, and nothing per row is left in front of the product."""
    before = product(DEFERRED[name])
    after = row_scale_commutes(before)
    assert after is not None and why_not_defer(before) == []
    torch.testing.assert_close(evaluate(after, TENSORS), evaluate(before, TENSORS), rtol=1e-12, atol=1e-12)
    (inner,) = [each for each in _all(after) if each.op == "product"]
    left = {"squares stay inside": mul(X, X), "row of a call": mul(X, MOVING)}.get(name, X)
    # With a mean to cancel the gain goes into the weight, without one it stays with the left operand.
    gain = affine_form(before.args[0]).gain
    assert inner.args[0] is left or (inner.args[0] is mul(left, gain) and inner.attr("gain") is None)  # type: ignore[arg-type]
    assert not {S, M} & set(_all(inner))


REFUSED = {
    "plain": X,
    "gain only": mul(X, G),
    "gain and shift": add(mul(X, G), H),
    "number": mul(X, TWO),
    "of two rows": mul(X, Y),
    "behind a nonlinearity": node("tanh", mul(X, S)),
    "a sum of two": add(mul(X, S), Y),
}


@pytest.mark.parametrize("name", REFUSED)
def test_row_scale_refuses(name: str) -> None:
    before = product(REFUSED[name])
    assert row_scale_commutes(before) is None
    assert "nothing per row" in str(why_not_defer(before)[0])


def test_row_scale_refuses_half() -> None:
    """A row before its norm may be beyond fp16, not beyond bf16."""
    rms = DEFERRED["rms"]
    assert row_scale_commutes(product(rms, torch.float16)) is None
    assert "fp16" in str(why_not_defer(product(rms, torch.float16))[0])
    assert row_scale_commutes(product(rms, torch.bfloat16)) is not None
    assert row_scale_commutes(rms) is None  # no product


DZ, DY = (node("load", space=Space(1, N), name=name) for name in ("dz", "dy"))


def back(gradient: Node, weight: str = "w") -> Node:
    """The gradient of a product's left operand."""
    return node("product", gradient, space=Space(1, K), weight=f"{weight} back", dtype=torch.float32)


def uses(*left: Node) -> Callable[[Node], list[Use]]:
    """Products of these with the matrix that is the other way round, as they were before."""

    def found(each: Node) -> list[Use]:
        weight = each.attr("weight").removesuffix(" back")
        made = [node("product", n, space=Space(1, N), weight=weight, dtype=torch.float32) for n in left]
        return [Use(n, value, weight) for n, value in zip(left, made, strict=True)]

    return found


NORM = add(mul(mul(sub(X, M), S), G), H)
RMS = mul(mul(X, S), G)
INNER = {
    "the norm itself": (mul(back(DZ), RMS), RMS),
    "without its scale": (mul(mul(back(DZ), G), X), RMS),
    "by another scale": (mul(mul(mul(back(DZ), G), X), M), RMS),
    "no norm": (mul(back(DZ), X), X),
    "two products": (mul(mul(add(back(DZ), back(DY, "v")), G), X), RMS),
    "layer norm": (mul(mul(back(DZ), G), mul(sub(X, M), S)), NORM),
    "layer norm, its mean": (mul(back(DZ), G), NORM),
    "with a program of its own": (mul(mul(back(DZ), G), X), node("stage", RMS, space=RMS.space, dtype=torch.float32)),
    "one of several": (mul(back(DZ), RMS), Y, RMS),
}


@pytest.mark.parametrize("name", INNER)
def test_inner_product_moves(name: str) -> None:
    """The same sum, of gradients that no matrix has been multiplied with."""
    value, *left = INNER[name]
    moved = inner_product_moves(value, uses(*left))
    assert moved is not None
    total = sum(evaluate(mul(x, y), TENSORS).sum(1, keepdim=True) for x, y in moved.pairs)
    found = evaluate(moved.scale, TENSORS) * total
    torch.testing.assert_close(found, evaluate(value, TENSORS).sum(1, keepdim=True), rtol=1e-11, atol=1e-11)
    assert {x for x, _ in moved.pairs} <= {DZ, DY}


NOT_INNER = {
    "another matrix": (mul(back(DZ), Y), X),
    "another gain": (mul(mul(back(DZ), H), X), RMS),
    "one product has no partner": (mul(add(back(DZ), Y), X), X),
    "a function between": (mul(node("tanh", back(DZ)), X), X),
    "shifted by another mean": (mul(mul(back(DZ), G), sub(X, S)), NORM),
    "no product": (mul(Y, X), X),
    "nobody used the matrix": (mul(back(DZ), X),),
}


@pytest.mark.parametrize("name", NOT_INNER)
def test_inner_product_refuses(name: str) -> None:
    value, *left = NOT_INNER[name]
    assert inner_product_moves(value, uses(*left)) is None


def test_large_mean_cancels() -> None:
    """The mean is subtracted times the column sums of the very weight that is multiplied: in the same precision, exactly."""
    norm = DEFERRED["layer norm"]
    after = row_scale_commutes(product(norm))
    assert after is not None
    (inner,) = [each for each in _all(after) if each.op == "product"]
    sums = [each for each in _all(after) if each.op == "vector" and each.args[0].op == "const"]
    assert [each.attr("gain") for each in sums] == [inner.attr("gain")] == [G]


def test_affine_form() -> None:
    affine = affine_form(DEFERRED["layer norm"])
    assert (affine.base, affine.scale, affine.gain) == (X, S, G)
    scaled = [
        (evaluate(f, TENSORS) if f is not None else 1.0) * (evaluate(v, TENSORS) if v is not None else 1.0)
        for f, v in affine.terms
    ]
    whole = TENSORS["s"] * TENSORS["g"] * TENSORS["x"] + sum(scaled)
    torch.testing.assert_close(whole, evaluate(DEFERRED["layer norm"], TENSORS), rtol=1e-12, atol=1e-12)


def _all(value: Node) -> list[Node]:
    from codetta.ir.graph import topological

    return topological([value])


# ---- operators -----------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch._dynamo.reset()
    load = dispatch.load_backend
    monkeypatch.setattr(dispatch, "load_backend", lambda name: load("reference"))
    with torch.no_grad():
        yield


class Around(nn.Module):
    """A function of a linear layer, and another such layer to put behind it."""

    def __init__(self, meaning: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(12, 24), nn.Linear(24, 24)
        self.weight = nn.Parameter(torch.randn(24))
        self.meaning = meaning

    def forward(self, x: Tensor) -> Any:
        return self.meaning(self, self.first(x), x)


@dataclass(frozen=True)
class Case:
    meaning: Callable[[Any, Tensor, Tensor], Any]  # of the module, its layer's output and its input
    left: frozenset[str]  # operators that compute and stay with the graph
    launches: int


def case(meaning: Callable[[Any, Tensor, Tensor], Any], *left: str, launches: int = 1) -> Case:
    return Case(meaning, frozenset(left), launches)


def _heads(y: Tensor) -> Tensor:
    return y.unflatten(-1, (4, 6)).transpose(1, 2)


FAMILIES = {
    # columns cut out
    "slice first": case(lambda m, y, x: y[..., :8] * 2),
    "slice middle": case(lambda m, y, x: torch.tanh(y)[..., 5:17]),
    "slice last": case(lambda m, y, x: y[..., -6:].relu()),
    "slice behind a sum": case(lambda m, y, x: (y * m.weight + m.weight)[..., 4:10]),
    "slice of heads": case(lambda m, y, x: _heads(y)[:, 1:3]),
    "slice in a head": case(lambda m, y, x: _heads(y)[..., :2] * _heads(y)[..., 2:4]),
    "every other": case(lambda m, y, x: y[..., ::2] * y[..., 1::2]),
    "every third": case(lambda m, y, x: y[..., 2::3].sigmoid()),
    "slice of rows": case(lambda m, y, x: y[:, 1:].relu(), "relu"),
    "last row": case(lambda m, y, x: m.second(y[:, -1]), launches=2),
    "select of columns": case(lambda m, y, x: y.unflatten(-1, (3, 8))[..., 1, :] + 1),
    "keeps nothing": case(lambda m, y, x: (y[..., 3:3], y)),
    # cut in several
    "chunk": case(lambda m, y, x: F.silu(y.chunk(2, -1)[0]) * y.chunk(2, -1)[1]),
    "chunk unequal": case(lambda m, y, x: [part.relu() for part in y.chunk(5, -1)]),
    "split": case(lambda m, y, x: [part * 2 for part in y.split([12, 4, 8], -1)]),
    "split of heads": case(lambda m, y, x: [part.tanh() for part in _heads(y).split([2, 1, 1], 1)]),
    "unbind": case(lambda m, y, x: [part + 1 for part in y.unflatten(-1, (3, 8)).unbind(-2)]),
    "unbind pairs": case(lambda m, y, x: (lambda a, b: a * b)(*y.unflatten(-1, (12, 2)).unbind(-1))),
    "split of rows": case(lambda m, y, x: [part.relu() for part in y.split(1, 0)], "relu"),
    # put together
    "cat": case(lambda m, y, x: torch.cat((-y[..., 12:], y[..., :12]), -1)),
    "cat of three": case(lambda m, y, x: torch.cat((y[..., :8], y[..., 8:16].relu(), y[..., 16:]), -1)),
    "cat unequal": case(lambda m, y, x: torch.cat((y[..., :4].tanh(), y[..., 4:]), -1), "addmm", "tanh", "cat", launches=0),
    "cat in heads": case(lambda m, y, x: torch.cat((-_heads(y)[..., 3:], _heads(y)[..., :3]), -1)),
    "cat with a tensor": case(lambda m, y, x: torch.cat((y, x), -1), "cat"),
    "cat of rows": case(lambda m, y, x: torch.cat((y, y * 2), 1), "cat"),
    "cat backwards": case(lambda m, y, x: torch.cat(y.chunk(5, -1)[::-1], -1), "addmm", "cat", launches=0),
    "stack last": case(lambda m, y, x: torch.stack((y, y * 2), -1).flatten(-2)),
    "stack heads": case(lambda m, y, x: torch.stack((-y[..., 1::2], y[..., ::2]), -1).flatten(-2)),
    "stack of blocks": case(lambda m, y, x: torch.stack((y, y.relu()), -2)),
    "stack of rows": case(lambda m, y, x: torch.stack((y, y * 2)), "stack"),
    "expand heads": case(lambda m, y, x: (_heads(y)[:, :, None].expand(-1, -1, 3, -1, -1) * 2).flatten(1, 2)),
    "expand one": case(lambda m, y, x: y[..., None, :].expand(-1, -1, 2, -1).flatten(-2).relu()),
    "expand rows": case(lambda m, y, x: y[None].expand(3, -1, -1, -1).relu(), "relu"),
    # reduced
    "mean": case(lambda m, y, x: m.second(y - y.mean(-1, keepdim=True)), launches=2),
    "sum": case(lambda m, y, x: m.second(y / (1 + (y * y).sum(-1, keepdim=True))), launches=2),
    "amax": case(lambda m, y, x: m.second(y / (1 + y.abs().amax(-1, keepdim=True))), launches=2),
    "without its dimension": case(lambda m, y, x: m.second(y * y.mean(-1)[..., None]), launches=2),
    "of each head": case(lambda m, y, x: _heads(y) * torch.rsqrt(_heads(y).square().mean(-1, keepdim=True) + 1e-3)),
    "max of each head": case(lambda m, y, x: _heads(y) - _heads(y).amax(-1, keepdim=True)),
    "sum of each head": case(lambda m, y, x: (_heads(y) * 2).sum(-1)),
    "var": case(lambda m, y, x: m.second((y - y.mean(-1, keepdim=True)) / (1 + y.var(-1, keepdim=True))), launches=2),
    "biased var": case(lambda m, y, x: m.second(y / (1 + y.var(-1, keepdim=True, unbiased=False))), launches=2),
    "var and mean": case(lambda m, y, x: m.second(torch.var_mean(y, -1)[1][..., None] - y / (1 + torch.var_mean(y, -1)[0][..., None])), launches=2),
    "layer norm": case(lambda m, y, x: m.second(F.layer_norm(y, (24,), m.weight, m.weight)), launches=2),
    "bare layer norm": case(lambda m, y, x: m.second(F.layer_norm(y, (24,))), launches=2),
    "rms norm": case(lambda m, y, x: m.second(F.rms_norm(y, (24,), m.weight, 1e-3)), launches=2),
    "rms norm of a head": case(lambda m, y, x: F.rms_norm(_heads(y), (6,), m.weight[:6]) * 2),
    "mean over rows": case(lambda m, y, x: m.second(y.mean(1)), "mean", launches=2),
    "sum of everything": case(lambda m, y, x: (y * 2).sum(), "sum"),
    "returned statistic": case(lambda m, y, x: (y, y.mean(-1)), "mean"),
    # arithmetic
    "numbers": case(lambda m, y, x: (2 - y) * 3 / 4 + 1),
    "rsub": case(lambda m, y, x: torch.rsub(y, 2.0, alpha=3)),
    "alpha": case(lambda m, y, x: torch.add(y, m.weight, alpha=2) - torch.sub(m.weight, y, alpha=0.5)),
    "powers": case(lambda m, y, x: y**2 + y.pow(3) + (1 + y * y).pow(-0.5) + (1 + y * y) ** -1),
    "clamps": case(lambda m, y, x: y.clamp(-1, 2) + y.clamp(min=0) + y.clamp(max=0.5)),
    "clamp by a tensor": case(lambda m, y, x: y.clamp(min=m.weight), "clamp"),
    "rounded quotient": case(lambda m, y, x: torch.div(y, 0.3, rounding_mode="floor") + y, "div", "add"),
    "unary": case(lambda m, y, x: y.abs().sqrt() + y.exp().log() + y.erf() + (1 + y * y).reciprocal() + y.square()),
    "activations": case(lambda m, y, x: F.gelu(y) + F.gelu(y, approximate="tanh") + F.silu(y) + y.tanh() + y.sigmoid()),
    "maximum": case(lambda m, y, x: torch.maximum(y, m.weight) + torch.minimum(y, -y)),
    # operands of every kind
    "per column": case(lambda m, y, x: y * m.weight),
    "per row": case(lambda m, y, x: y * x[..., :1], launches=1),
    "per sample": case(lambda m, y, x: y * x[:, :1, :1], "mul"),
    "a row per sample": case(lambda m, y, x: y * F.pad(x[:, :1], (0, 12)), "constant_pad_nd"),
    "per position": case(lambda m, y, x: y * torch.arange(x.shape[1], dtype=y.dtype)[:, None], "arange", "_to_copy", "mul"),
    "per head": case(lambda m, y, x: _heads(y) * m.weight[:4, None, None], "mul"),
    "in a head": case(lambda m, y, x: _heads(y) * m.weight[:6]),
    "rows turned around": case(lambda m, y, x: y + y.flip(1), "flip", "add"),
    "a number of the call": case(lambda m, y, x: y * x.mean(), "mean"),
    "masked": case(lambda m, y, x: y.masked_fill(x[..., :1] > 0, 0.0), "gt", "masked_fill", "where", "full"),
    # casts and copies
    "casts": case(lambda m, y, x: (y.to(torch.float64) * 2).float()),
    "to double": case(lambda m, y, x: y.double()),
    "clone": case(lambda m, y, x: y.clone().contiguous() + 1),
    "in place": case(lambda m, y, x: y.clone().add_(1).mul_(m.weight)),
    # products
    "two that read one": case(lambda m, y, x: y + F.linear(x, m.second.weight[:, :12]), launches=1),
    "transposed weight": case(lambda m, y, x: y @ m.second.weight, launches=2),
    "sum of weights": case(lambda m, y, x: F.linear(y, m.second.weight + m.weight), launches=2),
    "scaled product": case(lambda m, y, x: torch.addmm(m.weight, y[0], m.second.weight, alpha=2.0), "addmm"),
    "bias of the call": case(lambda m, y, x: torch.addmm(y[0], x[0], m.first.weight.T), launches=2),
    "weight on the left": case(lambda m, y, x: m.second.weight @ y[0].T, "mm"),
    "statistic times a row": case(lambda m, y, x: m.second(y.mean(-1, keepdim=True) * m.weight), "mean", "mul", launches=2),
    "statistic plus a row": case(lambda m, y, x: m.second(y.mean(-1, keepdim=True) + m.weight), "mean", "add", launches=2),
}  # fmt: skip


def executors(model: nn.Module) -> list[Executor]:
    backend = backend_of(model)
    assert backend is not None
    return backend.executors


def left_over(model: Any) -> tuple[set[str], int]:
    """The operators that compute and stayed with the graph, and the number of launches."""
    names: set[str] = set()
    count = 0
    for executor in executors(model):
        for step in executor.plan.steps:
            nodes = step.nodes if isinstance(step, Region) else [step.target] if isinstance(step, Run) else []
            names |= {operator_name(each) for each in nodes if not is_view(each)}
            count += isinstance(step, Launch)
    return names, count


@pytest.mark.parametrize("name", FAMILIES)
def test_operator(name: str) -> None:
    each = FAMILIES[name]
    torch.manual_seed(1)
    model = Around(each.meaning)
    x = torch.randn(2, 5, 12)
    exact = _tensors_of(Around.forward(model.double(), x.double()))
    eager = _tensors_of(model.float()(x))
    codetta.compile(model)
    for _ in range(2):  # the second call finds what the first has made
        ours = _tensors_of(model(x))
        bad = complaints(ours, eager, exact, torch.float32)
        assert not bad, bad
    names, launches = left_over(model)
    assert names <= each.left, f"{names - each.left} stayed with the graph: {_refusals(model)}"
    assert launches == each.launches
    longer = torch.randn(3, 9, 12)
    bad = complaints(
        _tensors_of(model(longer)),
        _tensors_of(model.forward(longer)),
        [each.double() for each in _tensors_of(model.forward(longer))],
        torch.float32,
    )
    assert not bad, bad


def _refusals(model: Any) -> list[str]:
    return [str(reason) for each in executors(model) for reason in each.plan.graph.refusals.values()]


def _tensors_of(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else list(result)


def test_refusals_say_why() -> None:
    model = codetta.compile(Around(lambda m, y, x: m.second(y.sort(-1).values)))
    model(torch.randn(2, 5, 12))
    assert any("sort" in reason for reason in _refusals(model)), _refusals(model)


def test_random_numbers_are_drawn_at_every_call() -> None:
    """Even those that only a parameter gives a shape to: they are no constants."""
    model = codetta.compile(Around(lambda m, y, x: y + torch.rand_like(m.weight)))
    x = torch.randn(2, 5, 12)
    assert not torch.equal(model(x), model(x))


def test_changed_input() -> None:
    """A module that writes to its input."""

    def meaning(m: Any, y: Tensor, x: Tensor) -> Tensor:
        x.mul_(2)
        return m.first(x) + y

    model = codetta.compile(Around(meaning))
    x = torch.randn(2, 5, 12)
    mine, theirs = x.clone(), x.clone()
    torch.testing.assert_close(model(mine), model.forward(theirs))
    assert torch.equal(mine, theirs) and torch.equal(mine, x * 2)


def test_changed_buffer() -> None:
    """A buffer that the module itself writes: what was made of it is made again."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(12, 24), nn.Linear(24, 24)
            self.gain = nn.Buffer(torch.ones(24))

        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x)
            y = self.second(y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-3) * self.gain)
            self.gain.add_(0.5)
            return y

    torch.manual_seed(0)
    mine = Counting()
    theirs = Counting()
    theirs.load_state_dict(mine.state_dict())
    codetta.compile(mine)
    x = torch.randn(2, 5, 12)
    for _ in range(3):
        torch.testing.assert_close(mine(x), theirs(x), rtol=1e-4, atol=1e-5)
    assert torch.equal(mine.gain, theirs.gain)


def test_graph_breaks() -> None:
    """A module that Dynamo takes apart becomes several plans."""

    def meaning(m: Any, y: Tensor, x: Tensor) -> Tensor:
        y = y.relu()
        torch._dynamo.graph_break()
        return m.second(y) * 2

    model: Any = codetta.compile(Around(meaning))
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(model(x), model.forward(x))
    assert len(executors(model)) >= 2


@pytest.mark.parametrize("shape", [(12,), (5, 12), (0, 5, 12), (1, 1, 12), (2, 3, 4, 12)], ids=str)
def test_ranks(shape: tuple[int, ...]) -> None:
    model = codetta.compile(Around(lambda m, y, x: m.second(F.rms_norm(y.relu(), (24,), m.weight))))
    x = torch.randn(shape)
    torch.testing.assert_close(model(x), model.forward(x), rtol=1e-4, atol=1e-5)


def test_functions_compile_as_well() -> None:
    linear = nn.Linear(12, 24)
    compiled = codetta.compile(lambda x: F.silu(linear(x)))
    x = torch.randn(2, 5, 12)
    torch.testing.assert_close(compiled(x), F.silu(linear(x)))


# ---- attention -----------------------------------------------------------------------------------------------------


class Attends(nn.Module):
    """Attention over projected rows: `heads` of queries to two of keys and values, repeated for them in one of several ways."""

    def __init__(self, how: str, heads: int = 4) -> None:
        super().__init__()
        self.how, self.heads = how, heads
        self.q, self.k, self.v = (nn.Linear(16, 8 * count) for count in (heads, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, 8)).transpose(1, 2) for each in (self.q, self.k, self.v))
        times = self.heads // 2
        if self.how == "expand":  # as Hugging Face does
            k, v = (
                each[:, :, None].expand(-1, -1, times, -1, -1).reshape(-1, self.heads, x.shape[1], 8) for each in (k, v)
            )
        elif self.how == "interleave":
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        elif self.how == "tile":  # another order of heads
            k, v = k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1)
        elif self.how == "keys":
            k, v = k.repeat_interleave(times, 1), v.repeat(1, times, 1, 1)
        found = F.scaled_dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            scale=0.3,
            dropout_p=0.5 if self.how == "dropout" else 0.0,
            enable_gqa=self.how == "shared",
        )
        return found.transpose(1, 2).flatten(2)


def attention_calls(model: nn.Module) -> list[Any]:
    return [
        each.target
        for each in backend_steps(model)
        if isinstance(each, Run) and operator_name(each.target) == "codetta.attention"
    ]


@pytest.mark.parametrize(
    ("how", "shared"), [("expand", True), ("interleave", True), ("shared", True), ("tile", False), ("keys", False)]
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_attention_stays_whole(how: str, shared: bool, dynamic: bool) -> None:
    """One call, and heads that queries share are not repeated where they are repeated in that order."""
    torch.manual_seed(0)
    model, x = Attends(how), torch.randn(2, 6, 16)
    with torch.no_grad():
        expected = model(x)
        codetta.compile(model, dynamic=dynamic)
        torch.testing.assert_close(model(x), expected)
    (call,) = attention_calls(model)
    assert call.args[6] == shared
    assert call.args[1].meta["val"].shape[1] == (2 if shared else 4)


def test_attention_under_autocast() -> None:
    """Autocast casts what attention is given."""
    torch.manual_seed(0)
    model, x = Attends("shared"), torch.randn(2, 6, 16)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected = model(x)
        codetta.compile(model)
        got = model(x)
    assert got.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.02)
    (call,) = attention_calls(model)
    assert all(arg.meta["val"].dtype == torch.bfloat16 for arg in call.args[:3])


def test_attention_with_dropout() -> None:
    torch.manual_seed(0)
    model, x = Attends("dropout", heads=2), torch.randn(2, 6, 16)
    codetta.compile(model)
    with torch.no_grad():
        assert model(x).isfinite().all()
    assert not attention_calls(model)


# ---- one-sided functions -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("function", [torch.erf, torch.tanh])
def test_one_plus_is_one_sided(function: Callable[[Tensor], Tensor]) -> None:
    """An activation that is written out; far out on the left the sum has no digits left, the law has."""

    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return 0.5 * y * (function(y * 0.7) + 1.0)

    torch.manual_seed(0)
    model, x = Written(), torch.randn(9, 16) * 4
    with torch.no_grad():
        truth = Written.forward(model.double(), x.double())
        expected = model.float()(x)
        codetta.compile(model)
        got = model(x)
    assert (got - truth).norm() <= (expected - truth).norm() + 1e-6
    (program,) = [step.program for step in backend_steps(model) if isinstance(step, Launch)]
    assert "erfc" in program.text or "sigmoid" in program.text
    assert "erf(" not in program.text and "tanh" not in program.text


def backend_steps(model: nn.Module) -> list[Any]:
    backend = backend_of(model)
    assert backend is not None
    return [step for executor in backend.executors for step in executor.plan.steps]
