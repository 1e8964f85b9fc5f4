"""The judge itself: it passes what is right, and sees each kind of mistake."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import case
import oracle
import pytest
import torch

import codetta as ct
from codetta import Reason, dispatch
from codetta.backends import reference

A, W = (torch.randn(rows, 5, generator=torch.Generator().manual_seed(rows)) for rows in (7, 12))


class Wrong:
    """The reference with a mistake: a backend that the judge must catch."""

    name = "wrong"

    def __init__(self, mistake: Callable[[dict[str, Any]], None]) -> None:
        self.mistake = mistake

    def why_not(self, program: Any, binding: Any) -> list[Any]:
        return []

    def run(self, program: Any, binding: Any) -> dict[str, Any]:
        results = reference.run(program, binding)
        self.mistake(results)
        return results

    def source(self, program: Any, binding: Any) -> str:
        return ""


def unwritten(results: dict[str, Any]) -> None:
    results["y"][0, 0] = math.nan


def one_element(results: dict[str, Any]) -> None:
    results["y"][3, 5] += 0.05


def too_coarse(results: dict[str, Any]) -> None:
    results["y"].copy_(results["y"].bfloat16())


def one_step(results: dict[str, Any]) -> None:
    results["q"][2, 2] -= 1


def statistic(results: dict[str, Any]) -> None:
    results["s"].partials[0, 0, 1] *= 1.001


def beyond_the_end(results: dict[str, Any]) -> None:
    y = results["y"]
    torch.as_strided(y, (1,), (1,), y.storage_offset() + y.numel())[0] = 0.0


def elsewhere(results: dict[str, Any]) -> None:
    results["y"] = results["y"].clone()


@pytest.mark.parametrize(
    "mistake", [unwritten, one_element, too_coarse, one_step, statistic, beyond_the_end, elsewhere]
)
def test_the_judge_sees(mistake: Callable[[dict[str, Any]], None]) -> None:
    def fn(acc):
        return {"y": acc, "q": ct.quantize(acc, torch.int8, cols=4)[0], "s": ct.row_sum(acc)}

    program, binding = ct.epilogue(fn).bind(A, W)
    oracle.check(program, binding, dispatch.load_backend("reference"))
    with pytest.raises(AssertionError):
        oracle.check(program, binding, Wrong(mistake))


def test_the_judge_sees_bits_that_change() -> None:
    turn = iter((0.0, 1e-7))

    def drift(results: dict[str, Any]) -> None:
        results["y"].mul_(1 + next(turn))

    program, binding = ct.epilogue(lambda acc: {"y": acc}).bind(A, W)
    with pytest.raises(AssertionError, match="other bits"):
        oracle.check_bits(program, binding, Wrong(drift))


def truncated(results: dict[str, Any]) -> None:
    """Rounding towards zero where the epilogue rounds to nearest, in the middle of it."""
    results["y"].copy_((A @ W.T).view(torch.int32).bitwise_and(-65536).view(torch.float32))


def test_the_judge_sees_truncation_inside_an_epilogue() -> None:
    program, binding = ct.epilogue(lambda acc: {"y": ct.cast(acc, torch.bfloat16) * 1.0}).bind(A, W)
    oracle.check(program, binding, dispatch.load_backend("reference"))
    with pytest.raises(AssertionError, match="budget"):
        oracle.check(program, binding, Wrong(truncated))


def test_the_budget_of_a_given_eager() -> None:
    """A caller's eager function may be coarser than the reference, and then the budget is."""
    program, binding = ct.epilogue(lambda acc: {"y": acc}).bind(A, W)
    with pytest.raises(AssertionError):
        oracle.check(program, binding, Wrong(too_coarse))
    oracle.check(program, binding, Wrong(too_coarse), eager=lambda: {"y": (A @ W.T).bfloat16()})


def test_a_refusal_is_counted_and_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Wrong(lambda results: None)
    monkeypatch.setattr(backend, "why_not", lambda program, binding: [Reason("no such thing", "a test")])
    monkeypatch.setattr(dispatch, "load_backend", lambda name: backend)
    monkeypatch.setattr(case, "refusals", case.Counter())
    one = case.Case("def random_epilogue(acc):\n    return acc\n", (4,), 3, (5,), torch.float32)
    assert not one.check("wrong")
    assert case.refusals == {"wrong: no such thing": 1}
