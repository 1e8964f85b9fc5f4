"""The Triton backend in Triton's interpreter, held to the error budget against float64.

Each primitive of the language alone, every epilogue of the library, then random compositions; on both main loops that the
interpreter runs, whole tiles and chunks, ragged shapes and all product dtypes. Shapes are tiny: the interpreter is slow.
The specialised loop has instructions that only a GPU has: tests/gpu.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from case import Case, Spec
from generate import cases
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from codetta.backends.triton import TritonBackend, aligned, form, interpreting, load
from codetta.bench.samples import Sizes, library_names, sample
from codetta.errors import Reason
from codetta.plan.tile import Tile, why_not
from codetta.program import Program
from codetta.runtime.bind import Binding
from codetta.stat import Stat

pytestmark = [
    pytest.mark.skipif(not interpreting(), reason="a GPU is here: tests/gpu runs the kernels on it"),
    # The interpreter's own: numpy speaks up where a GPU silently makes an infinity.
    pytest.mark.filterwarnings("ignore::DeprecationWarning:triton", "ignore::RuntimeWarning:triton"),
]

M, N, K = 37, 80, 40  # more rows, columns and steps than a tile has, none a multiple of it


class Forced:
    """The Triton backend with one tile."""

    def __init__(self, tile: Tile) -> None:
        self.tile, self.backend = tile, TritonBackend()
        self.name = f"triton {tile}"

    def why_not(self, program: Program, binding: Binding) -> list[Reason]:
        return why_not(form(program, self.tile), self.tile)

    def run(self, program: Program, binding: Binding) -> dict[str, torch.Tensor | Stat]:
        return self.backend.launch(program, binding, self.tile)

    def source(self, program: Program, binding: Binding) -> str:
        return self.backend.source(program, binding)


TILES = {
    "pointer": Tile(32, 32, 32, 2, 4, 8, 1, "pointer"),
    "pointer, 2 chunks": Tile(16, 64, 32, 2, 4, 2, 2, "pointer"),
    "pointer, 4 chunks": Tile(32, 128, 16, 2, 4, 8, 4, "pointer"),
    "stream": Tile(8, 16, 32, 1, 4, 8, 1, "stream"),
    "stream, 1 row": Tile(1, 64, 32, 1, 4, 8, 1, "stream"),
    "descriptor": Tile(32, 32, 32, 2, 4, 8, 1, "descriptor"),
    "descriptor, 2 chunks": Tile(16, 128, 32, 2, 4, 2, 2, "descriptor"),
    "descriptor, 4 chunks": Tile(32, 256, 16, 2, 4, 8, 4, "descriptor"),
}


def check(case: Case, tile: Tile | None = None, bits: bool = False) -> None:
    """On the tile, or on the default one where the tile is illegal."""
    program, binding = case.bind()
    backend: Any = TritonBackend()
    if tile is not None and not why_not(form(program, tile), tile):
        backend = Forced(tile)
    oracle.check(program, binding, backend)
    if bits:
        oracle.check_bits(program, binding, backend)


def one(text: str, *specs: Spec, parameters: str = "", lead: tuple[int, ...] = (M,), cols: tuple[int, ...] = (N,), **more: Any) -> Case:  # fmt: skip
    """A case of one line: the returned dict, with an acc for each of `cols`."""
    accs = ", ".join(f"acc{i}" for i in range(len(cols)))
    head = f"def random_epilogue({accs}{', ' + parameters if parameters else ''}):"
    return Case(f"{head}\n    return {text}\n", lead, K, cols, more.pop("dtype", torch.float32), specs, **more)


# ---- primitives --------------------------------------------------------------------------------------------------

ELEMENTWISE = {
    "arithmetic": "2.0 * acc0 - acc0 / 3.0 + (1.0 - acc0) * acc0", "divide a number": "1.0 / (3.0 + acc0 * acc0)", "negate": "-abs(acc0)",
    "powers": "acc0**2 + acc0**3 - acc0**5", "roots": "abs(acc0) ** 0.5 + (1 + acc0 * acc0) ** -0.5", "relu": "ct.relu(acc0)",
    "squared relu": "ct.squared_relu(acc0)", "gelu": "ct.gelu(acc0)", "gelu tanh": "ct.gelu(acc0, approximate='tanh')", "silu": "ct.silu(acc0)",
    "sigmoid": "ct.sigmoid(acc0)", "tanh": "ct.tanh(acc0)", "softcap": "ct.softcap(acc0, 0.7)", "exp and log": "ct.log(1.0 + ct.exp(acc0))",
    "sqrt and rsqrt": "ct.sqrt(acc0 * acc0) * ct.rsqrt(acc0 * acc0 + 1)", "erf": "ct.erf(acc0)", "erfc": "ct.erfc(acc0)", "clamp": "ct.clamp(acc0, -0.5, 0.25)",
    "minimum and maximum": "ct.minimum(acc0, 0.3) + ct.maximum(acc0, acc0 * 2)",
    "where": "ct.where((acc0 > 0) & ~(acc0 >= 1) | (acc0 < -1), acc0, 0.0 * acc0)",
    "cast": "ct.cast(acc0, torch.bfloat16) + ct.cast(acc0, torch.float16)", "row number": "acc0 * ct.row_index()",
    "column number": f"acc0 + ct.col_index({N}) / 3", "causal": f"ct.where(ct.row_index() >= ct.col_index({N}), acc0, 0.0)",
}  # fmt: skip


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise(name: str) -> None:
    check(one("{'y': " + ELEMENTWISE[name] + "}"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.float8_e4m3fn, torch.int32, torch.int64, torch.bool])  # fmt: skip
def test_operand_dtypes(dtype: torch.dtype) -> None:
    fill = "bool" if dtype == torch.bool else "scale" if dtype.is_floating_point else "rows"
    check(one("{'y': acc0 * (x + 0.5)}", Spec("x", (M, N), dtype, fill, 9), parameters="x: ct.Tile"))


def operands(t: int) -> dict[str, tuple[str, str, tuple[Spec, ...]]]:
    """Every kind of operand, for three samples of t rows: the value, the parameters, their tensors."""
    return {
        "number and scalar": ("acc0 * c + d", "c: ct.Scalar, d: ct.Scalar", (Spec("c", (), fill="number"), Spec("d", (1,)))),
        "row and column": ("(acc0 + r) * c", "r: ct.Row, c: ct.Col", (Spec("r", (N,)), Spec("c", (3, t)))),
        "tile": ("acc0 + x", "x: ct.Tile", (Spec("x", (3, t, N), strided=True),)),
        "vector by sample": ("acc0 * g", "g: ct.SampleRow", (Spec("g", (3, N)),)),
        "heads bthd": ("acc0 + x", "x: ct.Tile('bthd')", (Spec("x", (3, t, 5, 16)),)),
        "heads bhtd": ("acc0 + x", "x: ct.Tile('bhtd')", (Spec("x", (3, 5, t, 16)),)),
        "heads bhdt": ("acc0 + x", "x: ct.Tile('bhdt')", (Spec("x", (3, 5, 16, t)),)),
        "table by row": ("acc0 + t", "t: ct.Table", (Spec("t", (3, t, 16)),)),
        "table that repeats": ("acc0 * t", "t: ct.Table('repeat')", (Spec("t", (t, 16)),)),
        "table by index": ("acc0 * t", "i: ct.Col, t: ct.Table('i')", (Spec("i", (3, t), torch.int64, "rows", 7), Spec("t", (7, 16)))),
        "scale by group": ("acc0 * ct.spread(s, 16)", "s: ct.Group(1, 16)", (Spec("s", (3 * t, 5), fill="scale"),)),
        "scale by block": ("acc0 * ct.spread(s, 16, rows=4)", "s: ct.Group(4, 16)", (Spec("s", (3 * t // 4, 5), fill="scale"),)),
        "sum of partials": ("acc0 * ct.tanh(s)", "s: ct.Col", (Spec("s", (), fill="stat:sum:32:100"),)),
        "many partials": ("acc0 * ct.tanh(s)", "s: ct.Col", (Spec("s", (), fill="stat:sum:32:352"),)),
        "maximum of partials": ("acc0 * s", "s: ct.Col", (Spec("s", (), fill="stat:max:32:100"),)),
        "lse of partials": ("acc0 - s", "s: ct.Col", (Spec("s", (), fill="stat:lse:32:100"),)),
        "moments of partials": ("(acc0 - s.mean) * ct.rsqrt(s.var + 1)", "s: ct.Col", (Spec("s", (), fill="stat:moments:32:100"),)),
        "dropout": ("ct.dropout(acc0, 0.3, seed)", "seed: ct.Scalar", (Spec("seed", (), torch.int64, "seed", 2**31 - 1),)),
    }  # fmt: skip


OPERANDS = operands(12)


@pytest.mark.parametrize("name", OPERANDS)
def test_operand(name: str) -> None:
    text, parameters, specs = OPERANDS[name]
    check(one("{'y': " + text + "}", *specs, parameters=parameters, lead=(3, 12)))


COLUMNS: dict[str, tuple[str, tuple[int, ...]]] = {
    "halves far apart": "x, y = ct.halves(acc0); r = {'y': ct.silu(x) * y}", "halves beside each other": "x, y = ct.halves(acc0, block=16); r = {'y': ct.join(-y, x, block=16)}",
    "pairs": "x, y = ct.pairs(acc0); r = {'y': ct.join(y, -x, block=2), 'h': x * y}", "four parts": "p = ct.parts(acc0, 4, block=16); r = {'y': p[0] * p[1] + p[2] - p[3]}",
    "group sum": "r = {'y': acc0 * ct.spread(ct.rsqrt(ct.group_sum(acc0 * acc0, 16) + 1), 16)}",
    "group maximum": "r = {'y': acc0 - ct.spread(ct.group_max(acc0, 16), 16), 's': ct.group_max(acc0, 16)}",
    "blocks of rows": "r = {'y': acc0 - ct.spread(ct.group_max(acc0, 16, rows=4), 16, rows=4), 's': ct.group_sum(acc0, 16, rows=4)}",
    "halves far apart, joined": "x, y = ct.halves(acc0); r = {'y': ct.join(y, x * y), 's': ct.row_sum(ct.join(x, y * y)), 'c': ct.col_sum(ct.join(y, x))}",
}  # fmt: skip


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", COLUMNS)
def test_columns(name: str, tile: str) -> None:
    # 160 columns: halves of them are strips of their own, 5 blocks of 16 are not.
    source = f"def random_epilogue(acc0):\n    {COLUMNS[name]}\n    return r\n"
    check(Case(source, (M,), K, (320 if "far" in name else 160,), torch.float32), TILES[tile])


SINKS = {
    "sums": "{'y': acc0, 'r': ct.row_sum(acc0 * acc0), 'c': ct.col_sum(acc0)}", "maxima": "{'r': ct.row_max(abs(acc0)), 'c': ct.col_max(acc0)}",
    "moments": "{'r': ct.row_moments(acc0 + 30.0)}", "lse and pick": "{'r': ct.row_lse(acc0 * 20), 'p': ct.pick(acc0, target)}",
}  # fmt: skip


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", SINKS)
def test_sinks(name: str, tile: str) -> None:
    picks = "pick" in name
    specs = (Spec("target", (M,), torch.int64, "index", N),) if picks else ()
    check(one(SINKS[name], *specs, parameters="target: ct.Col" if picks else ""), TILES[tile], bits=True)


STORES: dict[str, tuple[str, dict[str, Any]]] = {
    "dtypes": ("{'y': acc0, 'h': ct.store(acc0, dtype=torch.bfloat16), 'i': ct.store(acc0 * 20, dtype=torch.int8)}", {}),
    "nothing of the product": ("{'r': ct.row_sum(acc0)}", {}),
    "heads bthd": ("{'y': ct.store(acc0, layout='bthd', head=16)}", {}), "heads bhtd": ("{'y': ct.store(acc0, layout='bhtd', head=16)}", {}),
    "heads bhdt": ("{'y': ct.store(acc0, layout='bhdt', head=16)}", {}),
    "rows by index": ("{'y': ct.store(acc0, rows=slot)}", {"out": (40, N)}),
    "append to a cache": ("{'y': ct.store(acc0, layout='bhtd', head=16, rows=slot)}", {"out": (3, 5, 20, 16)}),
    "accumulate": ("{'y': ct.store(acc0, accumulate=True)}", {"out": (3, 12, N)}),
    "int8 by group": ("dict(zip(('q', 's'), ct.quantize(acc0, torch.int8, cols=16)))", {}), "fp8 by group": ("dict(zip(('q', 's'), ct.quantize(acc0, torch.float8_e4m3fn, cols=16)))", {}),
    "int8 by block": ("dict(zip(('q', 's'), ct.quantize(acc0, torch.int8, cols=16, rows=4)))", {}),
}  # fmt: skip


@pytest.mark.parametrize("tile", ["pointer", "descriptor, 2 chunks"])
@pytest.mark.parametrize("name", STORES)
def test_stores(name: str, tile: str) -> None:
    text, more = STORES[name]
    slotted = "slot" in text
    limit = {2: 40, 4: 20}.get(len(more.get("out", ())), 0)
    shape = (36,) if limit == 40 else (3, 12)
    specs = (Spec("slot", shape, torch.int64, "slots", limit),) if slotted else ()
    case = one(text, *specs, parameters="slot: ct.Col" if slotted else "", lead=(3, 12))
    if "out" in more:
        case = replace(case, outs=(Spec("y", more["out"]),))
    check(case, TILES[tile], bits=True)


PRODUCTS: dict[str, tuple[str, tuple[int, ...]]] = {
    "two that meet": ("{'y': ct.silu(acc0) * acc1, 'r': ct.row_sum(acc0 * acc1)}", (N, N)),
    "three of one launch": ("{'q': acc0, 'k': acc1 * 2, 'v': ct.relu(acc2)}", (80, 32, 17)),
    "three that meet": ("{'y': acc0 * acc1 + acc2}", (N, N, N)),
}  # fmt: skip


@pytest.mark.parametrize("tile", ["pointer", "pointer, 4 chunks", "descriptor", "descriptor, 2 chunks"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_several_products(name: str, tile: str) -> None:
    text, cols = PRODUCTS[name]
    check(one(text, cols=cols), TILES[tile])


@pytest.mark.parametrize("tile", ["pointer", "descriptor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [(False, False), (False, True), (True, False), (True, True)])
def test_layouts_of_a_and_b(transposed: tuple[bool, bool], dtype: torch.dtype, tile: str) -> None:
    # The copy engine needs rows of whole 16 bytes, so 40 rows; the pointer loop takes any.
    rows = 40 if tile == "descriptor" else M
    case = one("{'y': acc0, 'c': ct.col_sum(acc0)}", dtype=dtype, transposed=transposed, lead=(rows,))
    check(case, TILES[tile], bits=True)


@pytest.mark.parametrize("tile", ["pointer", "descriptor"])
@pytest.mark.parametrize("transposed", [(False, False), (False, True)])
def test_batched(transposed: tuple[bool, bool], tile: str) -> None:
    case = one("{'y': ct.relu(acc0), 'r': ct.row_sum(acc0), 'c': ct.col_sum(acc0)}", lead=(3, 21), batched=True, transposed=transposed)  # fmt: skip
    # As one matrix, a batch of (K, N) must have whole steps of K.
    check(replace(case, k=64), TILES[tile])


@pytest.mark.parametrize("rows", [1, 31, 32, 33])
@pytest.mark.parametrize("k", [1, 33])
@pytest.mark.parametrize("cols", [1, 17, 64])
def test_ragged(rows: int, k: int, cols: int) -> None:
    text = "{'y': acc0 * 2, 'r': ct.row_sum(acc0), 'm': ct.row_moments(acc0), 'c': ct.col_max(acc0), 'l': ct.row_lse(acc0)}"
    check(replace(one(text, lead=(rows,), cols=(cols,)), k=k), TILES["pointer, 2 chunks"])


def test_nan_and_infinity_go_through() -> None:
    case = one("{'y': ct.maximum(acc0, 0.0), 'r': ct.row_max(acc0), 'c': ct.col_max(acc0), 'z': ct.minimum(acc0, 1.0)}")
    case.a[0, 0], case.a[1, 0] = torch.nan, torch.inf
    check(case)


# ---- the library -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", library_names())
def test_library(name: str, dtype: torch.dtype) -> None:
    sizes = Sizes(rows=40, width=64, hidden=96, vocabulary=100, head=16, samples=4)
    call = sample(name, sizes, torch.device("cpu"), dtype)
    if name == "quantize_store":
        call.operands["group"] = 16
    program, binding = call.bind()
    oracle.check(program, binding, TritonBackend())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", library_names())
def test_library_of_a_few_rows(name: str, rows: int, dtype: torch.dtype) -> None:
    """Weights are streamed, wherever they lie row by row and heads fit."""
    sizes = Sizes(rows, width=64, hidden=128, vocabulary=200, head=16, samples=1)
    call = sample(name, sizes, torch.device("cpu"), dtype)
    if name == "quantize_store":
        call.operands["group"] = 16
    program, binding = call.bind()
    oracle.check(program, binding, TritonBackend())
    oracle.check_bits(program, binding, TritonBackend())
    streamed = TritonBackend().tile(program, binding).loop == "stream"
    stored_otherwise = program.a_layout == "km" or any(product.layout == "kn" for product in program.products)
    if not stored_otherwise and not any(each in name for each in ("qk", "quantize")):
        assert streamed


def test_parts_of_narrow_programs_are_strips() -> None:
    """Halves of heads, which a tile of a few columns does not hold together."""
    sizes = Sizes(1, width=512, hidden=1024, vocabulary=200, head=128, samples=1)
    program, _ = sample("norm_rope", sizes, torch.device("meta"), torch.bfloat16).bind()
    assert [len(segment.strips) for segment in program.segments] == [1, 1, 1]
    assert [len(segment.strips) for segment in program.narrow.segments] == [2, 2, 1]
    assert (program.narrow.operands, program.narrow.outputs) == (program.operands, program.outputs)
    normed, _ = sample("norm_qk_rope", sizes, torch.device("meta"), torch.bfloat16).bind()
    assert normed.narrow is normed  # a head's statistic spans both halves
    plain, _ = sample("residual_stats", sizes, torch.device("meta"), torch.bfloat16).bind()
    assert plain.narrow == plain


# ---- compositions ------------------------------------------------------------------------------------------------

random_case = settings(
    max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), database=None, print_blob=True
)


@random_case
@given(cases())
def test_random_epilogues(case: Case) -> None:
    case.check("triton")


@random_case
@given(cases(), st.sampled_from(sorted(TILES)))
def test_random_epilogues_on_other_tiles(case: Case, name: str) -> None:
    program, binding = case.bind()
    tile = TILES[name]
    unreachable = tile.loop == "descriptor" and not aligned(program, binding)
    if unreachable or TritonBackend().why_not(program, binding) or why_not(form(program, tile), tile):
        return
    oracle.check(program, binding, Forced(tile))


@settings(parent=random_case, max_examples=20)
@given(cases())
def test_random_epilogues_give_the_same_bits(case: Case) -> None:
    case.check("triton", bits=True)


def test_a_source_that_is_being_loaded_is_waited_for() -> None:
    text = "import time\ntime.sleep(0.2)\nkernel = object()\n"
    with ThreadPoolExecutor(4) as pool:
        kernels = set(pool.map(lambda _: load(text, "slow").kernel, range(4)))
    assert len(kernels) == 1


def test_source_is_readable_python() -> None:
    program, binding = sample("norm_swiglu", Sizes(rows=64, width=64, hidden=64, head=16), torch.device("cpu")).bind()
    text = TritonBackend().source(program, binding)
    compile(text, "kernel", "exec")
    assert "def epilogue_0(" in text
    assert "def kernel(" in text
    assert program.text.splitlines()[0] in text
