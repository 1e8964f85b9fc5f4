"""Bad input: each mistake gets an error that names the argument and the remedy, or just works."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import codetta as ct
from codetta import ArgumentError, LoweringError, TraceError

A, W = torch.randn(6, 8), torch.randn(10, 8)
META = torch.device("meta")


@ct.epilogue
def biased(acc, bias: ct.Row):
    return acc + bias


@ct.epilogue
def residual(acc, x: ct.Tile):
    return {"y": acc + x}


@ct.epilogue
def scaled(acc, s: ct.Col):
    return acc * s


@ct.epilogue
def inferred(acc, v):
    return acc * v


@ct.epilogue
def gated(gate, up):
    return ct.silu(gate) * up


@ct.epilogue
def plain(acc):
    return {"y": acc}


@ct.epilogue
def heads(acc, x: ct.Tile("bhtd")):
    return acc + x


@ct.epilogue
def appended(acc, slot: ct.Col):
    return {"cache": ct.store(acc, rows=slot)}


@ct.epilogue
def added(acc):
    return {"y": ct.store(acc, accumulate=True)}


def stat_of_4_rows() -> ct.Stat:
    return ct.epilogue(lambda acc: ct.row_sum(acc))(A[:4], W, finish=False, backend="reference")


BIAS = torch.randn(10)
BAD_ARGUMENTS: dict[str, tuple[Any, str, str]] = {
    # what is wrong: (the call, the argument to be named, part of the message or the remedy)
    "a is no tensor": (lambda: plain([[1.0]], W), "a", "left operand"),
    "a has no rows dimension": (lambda: plain(A[0], W), "a", "at least one row dimension"),
    "a is sparse": (lambda: plain(A.to_sparse(), W), "a", "dense"),
    "a is an integer matrix": (lambda: plain(A.int(), W.int()), "a", "convert it"),
    "a is complex": (lambda: plain(A.cfloat(), W.cfloat()), "a", "convert it"),
    "w is no tensor": (lambda: plain(A, [3.0]), "w", "torch.Tensor"),
    "w is a number": (lambda: plain(A, 3.0), "w", "torch.Tensor"),
    "w is a vector": (lambda: plain(A, W[0]), "w", "(N, K)"),
    "w is an empty list": (lambda: plain(A, []), "w", "pass a weight"),
    "w has no columns": (lambda: plain(A, W[:0]), "w", "N = 0"),
    "w has another K": (lambda: plain(A, torch.randn(10, 9)), "w", "K = 9, but a has K = 8"),
    "w is transposed": (lambda: plain(A, torch.randn(8, 10)), "w", "w.T"),
    "w has another dtype": (lambda: plain(A, W.bfloat16()), "w", "w.to(torch.float32)"),
    "w is elsewhere": (lambda: plain(A, W.to(META)), "w", "move it: w.to('cpu')"),
    "second w has another K": (lambda: gated(A, [W, torch.randn(10, 9)]), "w[1]", "K = 9"),
    "too many weights": (lambda: plain(A, [W, W]), "w", "one weight per leading parameter"),
    "too few weights": (lambda: gated(A, W), "up", "pass up="),
    "batched w, flat a": (lambda: plain(A, torch.randn(2, 10, 8)), "w", "(B, M, K)"),
    "batched w, other batch": (lambda: plain(torch.randn(3, 6, 8), torch.randn(2, 10, 8)), "w", "(B, M, K)"),
    "batched and unbatched w": (lambda: gated(torch.randn(2, 6, 8), [torch.randn(2, 10, 8), W]), "w[1]", "batch"),
    "operand is unknown": (lambda: biased(A, W, bias=BIAS, scale=BIAS), "scale", "its operands are bias"),
    "operand is missing": (lambda: biased(A, W), "bias", "pass bias="),
    "row has another length": (lambda: biased(A, W, bias=torch.randn(9)), "bias", "last dimension is 10"),
    "col has another length": (lambda: scaled(A, W, s=torch.randn(7)), "s", "one number per row"),
    "tile has other rows": (lambda: residual(A, W, x=torch.randn(5, 10)), "x", "(6, 10)"),
    "tile has other columns": (lambda: residual(A, W, x=torch.randn(6, 11)), "x", "last dimension is 10"),
    "tile by heads is flat": (lambda: heads(A, W, x=torch.randn(6, 10)), "x", "4-dimensional"),
    "tile by heads is transposed": (lambda: heads(A, W, x=torch.randn(1, 6, 2, 5)), "x", "last dimension is 10"),
    "operand is complex": (lambda: biased(A, W, bias=BIAS.cfloat()), "bias", "dtype"),
    "operand is elsewhere": (lambda: biased(A, W, bias=BIAS.to(META)), "bias", "bias.to('cpu')"),
    "operand is sparse": (lambda: residual(A, W, x=torch.randn(6, 10).to_sparse()), "x", "dense"),
    "operand is a string": (lambda: biased(A, W, bias="gelu"), "bias", "tensor"),
    "operand is None": (lambda: biased(A, W, bias=None), "bias", "tensor"),
    "statistic of other rows": (lambda: scaled(A, W, s=stat_of_4_rows()), "s", "same rows"),
    "M = N": (lambda: inferred(torch.randn(10, 8), W, v=BIAS), "v", "annotate the parameter with codetta.Row, Col"),
    "shape of no kind": (lambda: inferred(A, W, v=torch.randn(3, 4)), "v", "annotate"),
    "vector of no length": (lambda: inferred(A, W, v=torch.randn(7)), "v", "last dimension is 10"),
    "scalar with many elements": (lambda: ct.epilogue(scalar_times)(A, W, c=BIAS), "c", "one element"),
    "out of an unknown name": (lambda: plain(A, W, out={"z": torch.empty(6, 10)}), "out", "'y'"),
    "out is no tensor": (lambda: plain(A, W, out={"y": 3.0}), "out['y']", "torch.Tensor"),
    "out has another shape": (lambda: plain(A, W, out={"y": torch.empty(6, 9)}), "out['y']", "(6, 10)"),
    "out has another dtype": (lambda: plain(A, W, out={"y": torch.empty(6, 10).half()}), "out['y']", "dtype="),
    "out is elsewhere": (lambda: plain(A, W, out={"y": torch.empty(6, 10, device=META)}), "out['y']", "to('cpu')"),
    "out is expanded": (lambda: plain(A, W, out={"y": torch.empty(1, 10).expand(6, 10)}), "out['y']", "clone"),
    "out is transposed": (lambda: plain(A, W, out={"y": torch.empty(10, 6).T}), "out['y']", "stride 1"),
    "out overlaps itself": (lambda: plain(A, W, out={"y": torch.empty(60).as_strided((6, 10), (5, 1))}), "out['y']", "clone"),
    "out is a": (lambda: plain(SQUARE, SQUARE_W, out={"y": SQUARE}), "out['y']", "tensor of its own"),
    "out is w": (lambda: plain(SQUARE, SQUARE_W, out={"y": SQUARE_W}), "out['y']", "tensor of its own"),
    "outs overlap": (lambda: both_outs_the_same(), "out['z']", "tensor of its own"),
    "rows by index without out": (lambda: appended(A, W, slot=torch.arange(6)), "out['cache']", "pass out="),
    "accumulate without out": (lambda: added(A, W), "out['y']", "pass out="),
    "backend is unknown": (lambda: plain(A, W, backend="gpu"), "backend", "reference, cpu, triton"),
}  # fmt: skip
SQUARE, SQUARE_W = torch.randn(8, 8), torch.randn(8, 8)


def scalar_times(acc, c: ct.Scalar):
    return acc * c


def both_outs_the_same() -> Any:
    shared = torch.empty(6, 10)
    return ct.epilogue(lambda acc: {"y": acc, "z": acc * 2.0})(A, W, out={"y": shared, "z": shared})


@pytest.mark.parametrize("mistake", BAD_ARGUMENTS)
def test_argument(mistake: str) -> None:
    call, argument, remedy = BAD_ARGUMENTS[mistake]
    with pytest.raises(ArgumentError) as raised:
        call()
    assert raised.value.argument == argument, str(raised.value)
    assert remedy.lower() in str(raised.value).lower()
    assert raised.value.remedy
    assert isinstance(raised.value, ValueError), "callers who know nothing of codetta catch ValueError"


def captured(acc):
    return acc + BIAS


BAD_EPILOGUES: dict[str, tuple[Any, str]] = {
    "returns nothing": (lambda acc: None, "returns nothing: return a value"),
    "returns an empty dict": (lambda acc: {}, "return a value"),
    "returns a number": (lambda acc: 3.0, "return a value"),
    "returns a dict with a number": (lambda acc: {"y": acc, "n": 3.0}, "'n' = 3.0, which is not made of its arguments"),
    "returns a name that is none": (lambda acc: {"y 1": acc}, "'y 1': names are Python identifiers"),
    "returns a name that is no string": (lambda acc: {1: acc}, "names are Python identifiers"),
    "returns a tensor": (lambda acc: torch.zeros(3), "return a value"),
    "ignores the product": (lambda acc: {"y": ct.row_index() * 1.0}, "made of the accumulator"),
    "returns what is no tile": (lambda acc: {"y": acc, "c": ct.col_index(10) * 2.0}, "compute it outside the epilogue"),
    "if": (lambda acc: acc if acc > 0 else -acc, "codetta.where"),
    "and": (lambda acc: (acc > 0) and acc, "codetta.where"),
    "chained comparison": (lambda acc: 0 < acc < 1, "codetta.where"),
    "float": (lambda acc: acc * float(acc), "exists only on the chip"),
    "int": (lambda acc: acc * int(acc), "exists only on the chip"),
    "range": (lambda acc: acc * sum(range(acc)), "exists only on the chip"),
    "iteration": (lambda acc: sum(acc), "codetta.halves, pairs or parts"),
    "unpacking": (lambda acc: (lambda x, y: x * y)(*acc), "codetta.halves, pairs or parts"),
    "indexing": (lambda acc: acc[:, :5], "codetta.halves, pairs or parts"),
    "len": (lambda acc: acc * len(acc), "codetta"),
    "item": (lambda acc: acc * acc.item(), "codetta"),
    "a tensor's method": (lambda acc: acc.softmax(-1), "codetta"),
    "matmul": (lambda acc: acc @ acc, "codetta"),
    "a torch function without meaning": (lambda acc: torch.softmax(acc, -1), "torch.softmax has no meaning"),
    "a torch function on the wrong kind": (lambda acc: torch.sum(acc), "torch.sum has no meaning"),
    "captured tensor": (captured, "add a parameter and pass the tensor by keyword"),
    "captured tensor on the left": (lambda acc: BIAS * acc, "add a parameter and pass the tensor by keyword"),
    "string": (lambda acc: acc + "1", "str '1' cannot meet a traced value"),
    "None": (lambda acc: acc + None, "cannot meet a traced value"),
    "sink as a value": (lambda acc: acc / ct.row_sum(acc), "read it in the next program"),
    "sink of a sink": (lambda acc: ct.row_sum(ct.row_sum(acc)), "read it in the next program"),
    "stored sink": (lambda acc: ct.store(ct.row_sum(acc), dtype=torch.float16), "read it in the next program"),
    "columns that differ": (lambda acc: acc + ct.pairs(acc)[0], "10 columns meet 5"),
    "columns that do not split": (lambda acc: ct.parts(acc, 3)[0], "cannot be split into 3 parts"),
    "no parts": (lambda acc: ct.parts(acc, 0)[0], "parts"),
    "blocks that do not fit": (lambda acc: ct.halves(acc, block=4)[0], "blocks of 4"),
    "groups that do not fit": (lambda acc: ct.group_sum(acc, 3), "cannot be grouped by 3"),
    "groups of nothing": (lambda acc: ct.group_sum(acc, 0), "grouped by 0"),
    "rows that differ": (lambda acc: acc + ct.spread(ct.group_sum(acc, 2, rows=4), 2), "codetta.spread"),
    "spread of a column": (lambda acc: acc + ct.spread(ct.row_index() * 1.0, 10), "spread"),
    "reduction of a vector": (lambda acc: {"y": acc, "s": ct.row_sum(ct.row_index() * 1.0)}, "each row and column"),
    "power": (lambda acc: acc ** 2.5, "exp and log"),
    "negative power": (lambda acc: acc ** -1, "exp and log"),
    "traced power": (lambda acc: acc ** acc, "power"),
    "gelu": (lambda acc: ct.gelu(acc, approximate="fast"), "'none' or 'tanh'"),
    "dropout of everything": (lambda acc: ct.dropout(acc, 1.0, ct.row_index()), "up to, not including, 1"),
    "quantize to a float type": (lambda acc: ct.quantize(acc, torch.float16, 2)[0], "torch.int8 or torch.float8_e4m3fn"),
    "store in an unknown layout": (lambda acc: ct.store(acc, layout="hbtd", head=5), "bthd, bhtd, bhdt"),
    "store by heads without a head": (lambda acc: ct.store(acc, layout="bhtd"), "needs head="),
    "store in heads that do not fit": (lambda acc: ct.store(acc, layout="bhtd", head=3), "whole heads of 3"),
    "store to rows that are no operand": (lambda acc: ct.store(acc, rows=ct.row_index()), "integer Col operand"),
    "store to rows that are a number": (lambda acc: ct.store(acc, rows=3), "integer Col operand"),
    "store in a type without meaning": (lambda acc: ct.store(acc, dtype=torch.complex64), "dtype"),
    "store of a store": (lambda acc: ct.store(ct.store(acc)), "cannot meet a traced value"),
    "two ways of taking apart": (
        lambda acc: {"y": ct.halves(acc)[0], "z": ct.parts(acc, 5)[0]}, "in one way only"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", BAD_EPILOGUES)
def test_epilogue(mistake: str) -> None:
    fn, message = BAD_EPILOGUES[mistake]
    with pytest.raises(TraceError, match=re.escape(message)) as raised:
        ct.epilogue(fn)(A, W)
    assert isinstance(raised.value, TypeError)


def test_star_arguments_are_refused() -> None:
    with pytest.raises(TraceError, match="name each operand"):
        ct.epilogue(lambda acc, *rest: acc)


def test_unreadable_annotation_is_refused() -> None:
    def fn(acc, x):
        return acc

    fn.__annotations__ = {"x": "NoSuchKind"}
    with pytest.raises(TraceError, match="NoSuchKind"):
        ct.epilogue(fn)


def test_values_of_products_of_different_width_cannot_meet() -> None:
    def fn(acc, other):
        return ct.pairs(acc)[0] + other

    with pytest.raises(TraceError, match="columns"):
        ct.epilogue(fn)(A, [W, W[:5]])


def test_an_added_output_cannot_have_the_name_of_an_operand() -> None:
    def fn(acc, y: ct.Tile):
        return {"y": ct.store(acc + y, accumulate=True)}

    with pytest.raises(TraceError, match="'y'"):
        ct.epilogue(fn)(A, W, y=torch.zeros(6, 10), out={"y": torch.zeros(6, 10)})


def test_table_index_must_be_an_operand() -> None:
    def fn(acc, t: ct.Table("position")):
        return acc * t

    with pytest.raises(ArgumentError, match="position"):
        ct.epilogue(fn)(A, W, t=torch.randn(7, 5))


def test_an_operand_written_in_place_may_not_be_read_by_another_product() -> None:
    x = torch.randn(6, 10)

    def fn(q, k, x: ct.Tile):
        return {"q": q + x, "k": k + x}

    with pytest.raises(ArgumentError, match="shares memory with x"):
        ct.epilogue(fn)(A, [W, W], x=x, out={"q": x})


def test_a_backend_that_cannot_says_why() -> None:
    with pytest.raises(LoweringError) as raised:
        plain(A.double(), W.double(), backend="triton")
    assert raised.value.reasons


# ---- what just works ---------------------------------------------------------------------------------------------


def expect(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lead", [(0,), (2, 0), (0, 3)])
def test_no_rows(lead: tuple[int, ...]) -> None:
    fn = ct.epilogue(lambda acc: {"y": acc, "s": ct.row_sum(acc), "c": ct.col_sum(acc), "m": ct.row_moments(acc)})
    y, s, c, (mean, var) = fn(torch.randn(*lead, 8), W)
    assert y.shape == (*lead, 10)
    assert s.shape == mean.shape == var.shape == lead
    assert torch.equal(c, torch.zeros(10))


def test_no_rows_batched() -> None:
    y, c = ct.epilogue(lambda acc: {"y": acc, "c": ct.col_sum(acc)})(torch.randn(2, 0, 8), torch.randn(2, 10, 8))
    assert y.shape == (2, 0, 10)
    assert torch.equal(c, torch.zeros(2, 10))


def test_no_depth() -> None:
    assert torch.equal(biased(A[:, :0], W[:, :0], bias=BIAS), BIAS.expand(6, 10))


@pytest.mark.parametrize("form", ["rows apart", "every other", "transposed", "flipped", "expanded", "offset"])
def test_strided_inputs(form: str) -> None:
    def strided(x: torch.Tensor) -> torch.Tensor:
        match form:
            case "rows apart":
                return torch.cat([x, x], 1)[:, : x.shape[1]]
            case "every other":
                return x.repeat_interleave(2, 1)[:, ::2]
            case "transposed":
                return x.T.contiguous().T
            case "flipped":
                return x.flip(0).flip(0)
            case "expanded":
                return x[:1].expand(x.shape)
            case _:
                return torch.cat([torch.zeros(1), x.flatten()])[1:].view(x.shape)

    x = torch.randn(6, 10)
    a, w, x = strided(A), strided(W), strided(x)
    expect(residual(a, w, x=x, backend="reference"), a @ w.T + x)


def test_strided_vectors() -> None:
    bias = torch.randn(20)[::2]
    expect(biased(A, W, bias=bias, backend="reference"), A @ W.T + bias)
    column = torch.randn(6, 3)[:, 1]
    expect(scaled(A, W, s=column, backend="reference"), (A @ W.T) * column[:, None])


def test_leading_dimensions_come_back() -> None:
    a, x = torch.randn(2, 3, 8), torch.randn(2, 3, 10)
    expect(residual(a, W, x=x, backend="reference"), a @ W.T + x)
    expect(
        residual(a.transpose(0, 1), W, x=x.transpose(0, 1), backend="reference"),
        a.transpose(0, 1) @ W.T + x.transpose(0, 1),
    )


def test_out_with_rows_apart() -> None:
    room = torch.zeros(6, 25)
    plain(A, W, out={"y": room[:, 3:13]}, backend="reference")
    expect(room[:, 3:13], A @ W.T)
    assert not room[:, :3].any()
    assert not room[:, 13:].any()


def test_outs_side_by_side() -> None:
    """Columns of one buffer: their extents in memory overlap, their elements do not."""
    room = torch.zeros(6, 20)
    fn = ct.epilogue(lambda acc: {"y": acc, "z": acc * 2.0})
    fn(A, W, out={"y": room[:, :10], "z": room[:, 10:]}, backend="reference")
    expect(room, torch.cat([A @ W.T, A @ W.T * 2], 1))


def test_out_over_a_tile_operand() -> None:
    x = torch.randn(6, 10)
    wanted = A @ W.T + x
    residual(A, W, x=x, out={"y": x}, backend="reference")
    expect(x, wanted)


def test_programs_on_the_meta_device() -> None:
    """A program needs shapes only; so does everything up to a launch."""
    program, binding = biased.bind(A.to(META), W.to(META), bias=BIAS.to(META))
    assert program == biased.program(A, W, bias=BIAS)
    assert binding.outputs["out"].device == META


def test_gradients_are_not_dropped_in_silence() -> None:
    w = torch.nn.Parameter(W.clone())
    with pytest.raises(ct.ArgumentError, match=r"^w: requires a gradient.*torch\.no_grad"):
        plain(A, w, backend="reference")
    with torch.no_grad():
        expect(plain(A, w, backend="reference"), (A @ w.T).detach())


def test_arguments_of_a_call_cannot_name_operands() -> None:
    with pytest.raises(ct.TraceError, match=r"'finish' is an argument of every call.*rename"):
        ct.epilogue(lambda acc, finish: acc + finish)


def test_a_gate_for_another_number_of_samples() -> None:
    @ct.epilogue
    def gated(acc, gate: ct.SampleRow):
        return acc * gate

    with pytest.raises(ct.ArgumentError, match=r"gate: has 2 rows for 4 samples.*one row per sample"):
        gated(torch.randn(4, 3, 8), torch.randn(6, 8), gate=torch.randn(2, 6), backend="reference")


def test_a_seed_that_fp32_cannot_hold() -> None:
    with pytest.raises(ct.TraceError, match="below 2\\^24: pass a tensor"):
        ct.epilogue(lambda acc: ct.dropout(acc, 0.5, 2**31 + 1))(A, W, backend="reference")


def test_a_default_is_used() -> None:
    def fn(acc, scale: ct.Scalar = 2.0):
        return acc * scale

    expect(ct.epilogue(fn)(A, W, backend="reference"), 2 * (A @ W.T))
