"""Calls of an epilogue that come again: the same bits, other tensors, refusals as before, and which calls are like no other."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import codetta
from codetta import dispatch
from codetta.bench.samples import Sizes, library_names, sample
from codetta.repeated import MOST
from codetta.runtime.bound import Bound
from codetta.stat import Stat

CALLS = 5  # seen, made, plain, taped, bound


@codetta.epilogue
def scaled(acc: Any, x: codetta.Tile, g: codetta.Row, factor: Any = 2.0) -> dict[str, Any]:
    y = (acc + x) * factor
    return {"y": y, "h": y * g, "sumsq": codetta.row_sum(y * y)}


def fresh() -> codetta.Epilogue:
    return codetta.epilogue(scaled.fn)


def arguments(rows: int = 7, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (rows, 32), "w": (48, 32), "x": (rows, 48), "g": (48,)}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def bound_calls(epilogue: codetta.Epilogue) -> int:
    every = [each for _, call in epilogue._repeated.values() for each in call.bindings.known.values()]
    return sum(isinstance(each, Bound) for each in every)


def tensors(value: Any) -> list[Tensor]:
    found = value if isinstance(value, tuple) else (value,)
    return [each.partials if isinstance(each, Stat) else each for each in found]


def test_the_library() -> None:
    """Every epilogue of it, unfinished reductions included: nothing is dispatched any more, and other tensors give what they should."""
    for name in library_names():
        calls = [
            sample(
                name,
                Sizes(37, width=128, hidden=256, vocabulary=100, head=64, samples=1),
                torch.device("cpu"),
                torch.float32,
            )
            for _ in range(2)
        ]
        if any(getattr(each, "out", None) for each in calls) or name == "weight_gradient_accumulate":
            continue
        epilogue = codetta.epilogue(calls[0].epilogue.fn)
        want = [tensors(epilogue(each.a, each.w, finish=False, **each.operands)) for each in calls]
        for _ in range(CALLS):
            epilogue(calls[0].a, calls[0].w, finish=False, **calls[0].operands)
        with mock.patch.object(dispatch, "run", side_effect=AssertionError("dispatched")):
            for each, expected in zip(calls, want, strict=True):
                found = tensors(epilogue(each.a, each.w, finish=False, **each.operands))
                assert len(found) == len(expected) and all(map(torch.equal, found, expected)), name


@pytest.mark.parametrize("finish", [True, False])
def test_leading_dimensions_and_results_of_their_own(finish: bool) -> None:
    epilogue, given = fresh(), arguments(6)
    a, x = given["a"].view(2, 3, 32), given["x"].view(2, 3, 48)
    results = [epilogue(a, given["w"], x=x, g=given["g"], finish=finish) for _ in range(CALLS + 1)]
    assert bound_calls(epilogue) == 1
    y, h, sumsq = results[-1]
    assert y.shape == h.shape == (2, 3, 48)
    if finish:
        assert sumsq.shape == (2, 3)
    else:
        assert isinstance(sumsq, Stat) and (sumsq.how, sumsq.width, sumsq.total) == (
            results[0][2].how, results[0][2].width, results[0][2].total,
        )  # fmt: skip
    for one, two in zip(tensors(results[-2]), tensors(results[-1]), strict=True):
        assert torch.equal(one, two) and one.data_ptr() != two.data_ptr()
    del results, y, h, sumsq
    gone = weakref.ref(a)
    del a
    gc.collect()
    assert gone() is None, "a call that comes again holds no tensors"


def test_tensors_that_are_written_to() -> None:
    epilogue, given = fresh(), arguments()
    call = lambda **out: epilogue(given["a"], given["w"], x=given["x"], g=given["g"], **out)  # noqa: E731
    want = call()
    room = torch.full((7, 48), torch.nan)
    for _ in range(CALLS):
        y, h, sumsq = call(out={"y": room})
    assert bound_calls(epilogue) == 1 and y.data_ptr() == room.data_ptr()
    other = torch.full((7, 48), torch.nan)
    y, h, sumsq = call(out={"y": other})
    assert all(map(torch.equal, (other, y, h, sumsq), (want[0], *want)))
    both = torch.empty(14, 48)
    both[:7] = given["x"]
    # What lies in the memory of an operand is looked at every time.
    with pytest.raises(codetta.ArgumentError, match="out"):
        epilogue(given["a"], given["w"], x=both[:7], g=given["g"], out={"h": both[3:10]})


def test_refusals_and_what_is_like_no_other() -> None:
    epilogue, given = fresh(), arguments()
    call = lambda **more: epilogue(given["a"], given["w"], **({"x": given["x"], "g": given["g"]} | more))  # noqa: E731
    for _ in range(CALLS):
        want = call()
    assert bound_calls(epilogue) == 1
    with pytest.raises(codetta.ArgumentError):
        call(x=given["x"][:, :5])
    with pytest.raises(codetta.ArgumentError):
        call(g=given["g"].to(torch.complex64))
    with pytest.raises(codetta.ArgumentError, match="gradient"):
        call(x=given["x"].clone().requires_grad_())
    with torch.no_grad():
        assert torch.equal(call(x=given["x"].clone().requires_grad_())[0], want[0])
    assert torch.equal(call(factor=3.0)[0], want[0] * 1.5)
    for number in range(3 * MOST):
        call(factor=number + 0.25)
    assert bound_calls(epilogue) == 1 and len(epilogue._repeated) == 1, (
        "a number that is another every time is not bound"
    )
    assert torch.equal(call()[0], want[0])


def test_another_layout_and_another_place() -> None:
    """Strides are part of what a call looks like, addresses are not, and alignment is looked at."""
    epilogue = fresh()
    for seed in range(CALLS):
        given = arguments(seed=seed)
        found = epilogue(given["a"], given["w"], x=given["x"], g=given["g"])
    want = fresh()(given["a"], given["w"], x=given["x"], g=given["g"])
    assert all(map(torch.equal, found, want)) and bound_calls(epilogue) == 1
    room = torch.empty(7 * 48 + 1)
    room[1:] = given["x"].flatten()
    turned = given["w"].t().contiguous().t()
    for w, x in ((given["w"], room[1:].view(7, 48)), (turned, given["x"])):
        for one, two in zip(epilogue(given["a"], w, x=x, g=given["g"]), want, strict=True):
            torch.testing.assert_close(one, two)


def test_threads() -> None:
    epilogue, many = fresh(), [arguments(seed=seed) for seed in range(4)]
    want = [fresh()(each["a"], each["w"], x=each["x"], g=each["g"]) for each in many]
    wrong: list[int] = []

    def work(at: int) -> None:
        each = many[at]
        for _ in range(50):
            if not all(map(torch.equal, epilogue(each["a"], each["w"], x=each["x"], g=each["g"]), want[at])):
                wrong.append(at)

    threads = [threading.Thread(target=work, args=(at,)) for at in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong and bound_calls(epilogue) == 1


@pytest.mark.parametrize(
    ("shape", "view"),
    [
        ((2, 6, 32), lambda a: a[:, ::2]), ((32, 6), lambda a: a.t()), ((6, 64), lambda a: a[:, ::2]), ((2, 32, 3), lambda a: a.transpose(1, 2)),
    ],
)  # fmt: skip
def test_rows_that_are_copied_on_the_way(shape: tuple[int, ...], view: Any) -> None:
    """A copy is made at every call, of what is there then."""
    epilogue, w, g = fresh(), torch.randn(48, 32), torch.randn(48)
    for _ in range(CALLS + 1):
        a = view(torch.randn(shape))
        x = torch.randn(*a.shape[:-1], 48)
        y, h, sumsq = epilogue(a, w, x=x, g=g)
        want = (a @ w.T + x) * 2
        torch.testing.assert_close((y, h, sumsq), (want, want * g, (want * want).sum(-1)), rtol=1e-4, atol=1e-3)
    assert bound_calls(epilogue) == 1
