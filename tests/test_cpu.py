"""The CPU backend against the float64 reference, by the error budget of `oracle.py`: primitives, then random compositions.

Kernels take about a second to compile, so a program here holds many primitives. The library's epilogues run on this backend in
`test_library.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import oracle
import pytest
import torch
from case import Case
from generate import cases
from hypothesis import HealthCheck, Phase, given, settings
from processors import FEWER
from torch import Tensor

import codetta as ct
from codetta import dispatch
from codetta.backends import cpu, cpu_build
from codetta.backends.cpu import Cpu
from codetta.errors import ArgumentError, LoweringError
from codetta.stat import Stat

GENERATOR = torch.Generator()


@pytest.fixture(autouse=True)
def the_same_numbers_in_any_order() -> None:
    GENERATOR.manual_seed(3)


HALVES = (torch.bfloat16, torch.float16)
FLOATS = (torch.float32, *HALVES)


def has_compiler() -> bool:
    try:
        cpu_build.toolchain()
    except cpu_build.BuildError:
        return False
    return True


pytestmark = pytest.mark.skipif(not has_compiler(), reason="no C++ compiler")
BACKEND = Cpu()


def rand(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(shape, generator=GENERATOR) * scale).to(dtype)


def check(fn: Callable[..., Any], a: Tensor, w: Any, *, out: Any = None, bits: bool = False, **operands: Any) -> None:
    program, binding = ct.epilogue(fn).bind(a, w, out=out, **operands)
    assert BACKEND.why_not(program, binding) == []
    oracle.check(program, binding, BACKEND)
    if bits:
        oracle.check_bits(program, binding, BACKEND)


def run(fn: Callable[..., Any], a: Tensor, w: Any, **operands: Any) -> Any:
    return ct.epilogue(fn)(a, w, backend="cpu", **operands)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


# ---- the product -------------------------------------------------------------------------------------------------


def plain(acc: Any) -> Any:
    return {"y": ct.store(acc, dtype=torch.float32), "s": ct.row_sum(acc), "c": ct.col_sum(acc)}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", ["nk", "kn", "tn", "tk"])
def test_product(dtype: torch.dtype, layout: str) -> None:
    """Every way through the main loop: dot products, streams and packing, whole and ragged."""
    sizes = [
        (1, 5, 3),
        (1, 130, 257),
        (2, 64, 32),
        (7, 33, 31),
        (12, 70, 100),
        (13, 31, 8),
        (16, 200, 65),
        (17, 96, 64),
        (130, 65, 47),
        (300, 1, 33),
        # Rows too long for their columns to be taken one by one.
        (1, 7, 4111),
        (3, 6, 2053),
        (11, 9, 521),
    ]
    for m, n, k in sizes:
        a, w = rand(m, k, dtype=dtype), rand(n, k, dtype=dtype, scale=k**-0.5)
        if layout in ("tn", "tk"):
            a = a.T.contiguous().T
        if layout in ("kn", "tn"):
            w = w.T.contiguous().T
        check(plain, a, w, bits=m < 20)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_row_is_the_same_in_any_company(dtype: torch.dtype) -> None:
    """Up to 16 rows, whether columns are taken one by one or four at a time."""
    for k in (67, 700, 5003):
        a, w = rand(16, k, dtype=dtype), rand(13, k, dtype=dtype)
        alone = torch.cat([ct.epilogue(plain)(a[row : row + 1], w)[0] for row in range(16)])
        for rows in (2, 3, 7, 16):
            assert torch.equal(ct.epilogue(plain)(a[:rows], w)[0], alone[:rows])


def test_strided_product() -> None:
    """Views of larger matrices, and weights that are columns of one."""
    a, w = rand(40, 100)[:, 10:67], rand(90, 80)[3:73, 7:64]
    check(plain, a, w)
    check(plain, rand(57, 60).T[3:43], rand(57, 99).T[20:90])


@pytest.mark.parametrize("dtype", FLOATS)
def test_batched(dtype: torch.dtype) -> None:
    for m in (3, 40):
        check(plain, rand(3, m, 37, dtype=dtype), rand(3, 50, 37, dtype=dtype))
        check(plain, rand(2, m, 37, dtype=dtype), rand(2, 37, 50, dtype=dtype).transpose(1, 2))


def test_many_rows() -> None:
    """More rows than are taken on at once: partials and row numbers go on where the first part ended."""

    def numbered(acc: Any, x: ct.Tile) -> Any:
        y = acc + 0.001 * ct.row_index() + x
        return {"y": y, "c": ct.col_sum(y), "top": ct.col_max(y), "m": ct.row_moments(y)}

    check(numbered, rand(1500, 2100), rand(70, 2100, scale=0.02), x=rand(1500, 70))
    check(numbered, rand(2100, 1500).T, rand(70, 2100, scale=0.02), x=rand(1500, 70))
    # A tile by tile, the last of them ragged.
    check(numbered, rand(3, 4500).T, rand(300, 3), x=rand(4500, 300))


@pytest.mark.parametrize("dtype", FLOATS)
def test_rows_in_place_and_packed(dtype: torch.dtype) -> None:
    """Rows that are read where they are, also in pairs of panels, and those too far apart for that."""
    for step, k in ((64, 64), (131, 131), (4096, 70)):
        for m in (17, 43, 130):
            check(plain, rand(m, step, dtype=dtype)[:, :k], rand(900, k, dtype=dtype, scale=k**-0.5))


# ---- elementwise -------------------------------------------------------------------------------------------------


def functions(acc: Any) -> Any:
    return {
        "exp": ct.exp(acc), "log": ct.log(acc), "sqrt": ct.sqrt(acc), "rsqrt": ct.rsqrt(acc), "tanh": ct.tanh(acc), "sigmoid": ct.sigmoid(acc),
        "erf": ct.erf(acc), "erfc": ct.erfc(acc), "round": ct.round(acc), "floor": ct.floor(acc), "silu": ct.silu(acc), "gelu": ct.gelu(acc),
        "gelu_tanh": ct.gelu(acc, approximate="tanh"), "relu": ct.relu(acc), "abs": abs(acc), "neg": -acc, "inverse": 1.0 / acc,
        "low": ct.minimum(acc, 0.5), "clamp": ct.clamp(acc, -1.0, 2.0), "power": acc**5,
    }  # fmt: skip


def test_functions_everywhere() -> None:
    """Over the whole range of fp32, against float64: a few units in the last place, and the same special values."""
    grid = torch.cat([torch.linspace(-12, 12, 4001), torch.logspace(-44, 38, 2000), -torch.logspace(-44, 38, 2000)])
    special = torch.tensor(
        [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, -1e-45, 88.7, 88.73, -87.4, -103.9, -104.5, 3.4e38]
    )
    x = torch.cat([grid, special])[:, None].contiguous()
    epilogue, one = ct.epilogue(functions), torch.ones(1, 1)
    names = epilogue.program(x, one).outputs
    mine, eagers = epilogue(x, one, backend="cpu"), epilogue(x, one, backend="reference")
    truths = epilogue(x.double(), one.double(), backend="reference")
    for name, ours, eager, truth in zip(names, mine, eagers, truths, strict=True):
        finite = eager.isfinite() & ours.isfinite() & (truth.abs() > 1e-30)
        errors = (ours.double() - truth).abs()
        # Where a function nears zero through cancellation, its error is relative to what cancels.
        allowed = 4e-7 * torch.maximum(truth.abs(), x.double().abs().clamp(max=8.0) if "gelu" in name else truth.abs())
        if name == "erfc":
            allowed = allowed * (1 + x.double().abs().clamp(max=12.0) ** 2)  # the rounding of x², in an exponent
        assert (errors <= allowed + 1e-37)[finite].all(), (name, (errors / truth.abs())[finite].max())
        # Next to the largest number, rounding decides whether there is an infinity.
        certain = (eager.abs() < 3e38) | x.isinf() | x.isnan() | eager.isnan()
        kinds, expected = (torch.stack([y.isnan(), y == torch.inf, y == -torch.inf]) for y in (ours, eager))
        assert (kinds == expected)[:, certain].all(), name


def test_values_that_are_no_numbers() -> None:
    """NaN and infinity go where PyTorch sends them: through maxima, comparisons, groups and reductions."""

    def special(acc: Any, x: ct.Tile, low: ct.Row) -> Any:
        y = ct.where(acc == 0.0, x, acc)
        return {
            "both": ct.maximum(y, low), "either": ct.minimum(low, y), "relu": ct.relu(y), "chosen": ct.where(y < low, 1.0, y), "wide": ct.group_max(y, 8),
            "sum": ct.group_sum(y, 8), "logic": ct.where((y != y) | ~(y <= 0.0) & (y >= low), 1.0, 0.0),
            "rmax": ct.row_max(y), "rlse": ct.row_lse(y), "rsum": ct.row_sum(y), "cmax": ct.col_max(y), "csum": ct.col_sum(y),
            "half": ct.cast(y, torch.float16), "int8": ct.store(y, dtype=torch.int8), "fp8": ct.store(y, dtype=torch.float8_e4m3fn),
        }  # fmt: skip

    x, low = rand(37, 40), rand(40)
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf, 1e38, -1e38, 3e4, 7e4, 1e-8)):
        x[row, row + 3] = x[20, 2 * row] = value
    x[30], x[31, :20], low[5], low[6] = -torch.inf, torch.inf, torch.nan, -torch.inf
    a, w = torch.zeros(37, 4), torch.zeros(40, 4)
    mine = ct.epilogue(special)(a, w, x=x, low=low, backend="cpu")
    theirs = ct.epilogue(special)(a, w, x=x, low=low, backend="reference")
    for ours, eager in zip(mine, theirs, strict=True):
        torch.testing.assert_close(ours.float(), eager.float(), rtol=1e-6, atol=1e-6, equal_nan=True)


def test_conversions_are_exact() -> None:
    """Every number of the small types is loaded, and fp32 numbers near their ties are stored, as PyTorch does it."""

    def through(acc: Any, h: ct.Tile, b: ct.Tile, e: ct.Tile, i: ct.Tile, u: ct.Tile, t: ct.Tile, d: ct.Tile) -> Any:
        loaded = {"h": h, "b": b, "e": e, "i": i, "u": u, "t": t}
        outputs = {f"{k}_": ct.store(ct.where(acc == 0.0, v, acc), dtype=torch.float32) for k, v in loaded.items()}
        d = ct.where(acc == 0.0, d, acc)
        kinds = {
            "f16": torch.float16,
            "bf16": torch.bfloat16,
            "f8": torch.float8_e4m3fn,
            "i8": torch.int8,
            "f64": torch.float64,
        }
        stored = {k: ct.store(d, dtype=kind) for k, kind in kinds.items()}
        return {
            **outputs,
            **stored,
            **{f"{k}_cast": ct.store(ct.cast(d, kind), dtype=torch.float32) for k, kind in kinds.items()},
        }

    patterns = torch.arange(65536).to(torch.int32)
    h, b = (patterns.to(torch.int16).view(t).view(256, 256) for t in (torch.float16, torch.bfloat16))
    bytes_ = patterns.to(torch.uint8).view(256, 256)
    # Each half, its neighbours in fp32, the ties between halves and their neighbours; small ones, for fp8 and int8 too.
    bits = patterns.view(256, 256).long() << 16
    noise = torch.tensor([-1, 0, 1, 0x7FFF, 0x8000, 0x8001, 0x0FFF, 0x1000, 0x1001, 0xFFFFF, 0x100000])
    bits = (bits + noise[torch.arange(65536).view(256, 256) % 11]) & 0xFFFFFFFF
    d = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)
    d[::2] = rand(128, 256, scale=30.0)
    d[1::4] = d[1::4] * 0 + (torch.randint(-4000, 4000, (64, 256), generator=GENERATOR) / 2.0**12).to(torch.float32)
    d = torch.nan_to_num(d, nan=torch.nan)
    operands = {
        "h": h,
        "b": b,
        "e": bytes_.view(torch.float8_e4m3fn),
        "i": bytes_.view(torch.int8),
        "u": bytes_,
        "t": bytes_ > 7,
        "d": d.double(),
    }
    a, w = torch.zeros(256, 1), torch.zeros(256, 1)
    mine = ct.epilogue(through)(a, w, backend="cpu", **operands)
    theirs = ct.epilogue(through)(a, w, backend="reference", **operands)
    for index, (ours, exact) in enumerate(zip(mine, theirs, strict=True)):
        ours, exact = ours.double(), exact.double()
        assert torch.equal(ours.isnan(), exact.isnan()), index
        assert torch.equal(ours.nan_to_num(), exact.nan_to_num()), index


# ---- operands, columns, groups -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_operands(dtype: torch.dtype) -> None:
    def kinds(
        acc: Any, s: ct.Scalar, row: ct.Row, col: ct.Col, gate: ct.SampleRow, x: ct.Tile, bthd: ct.Tile("bthd"), bhtd: ct.Tile("bhtd"),
        bhdt: ct.Tile("bhdt"), each: ct.Table, repeat: ct.Table("repeat"), one: ct.Table("repeat"), at: ct.Col, table: ct.Table("at"), scale: ct.Group(1, 6), ids: ct.Tile,
    ) -> Any:  # fmt: skip
        y = acc * s + row * col + gate + x * each - repeat * one + table
        y = y + bthd * bhtd - bhdt + ct.spread(scale, 6)
        return {"y": y, "h": ct.where(ids > at, y, -y), "at": ct.store(at * 2.0 + col, dtype=torch.float32)}

    m, n, head = 22, 84, 12
    shapes = {
        "bthd": (2, 11, 7, head),
        "bhtd": (2, 7, 11, head),
        "bhdt": (2, 7, head, 11),
        "each": (m, head),
        "repeat": (11, head),
        "one": (1, head),
    }
    operands: dict[str, Any] = {name: rand(*shape, dtype=dtype) for name, shape in shapes.items()}
    operands |= {
        "s": rand(dtype=dtype),
        "row": rand(n, dtype=dtype),
        "col": rand(m),
        "gate": rand(2, n, dtype=dtype),
        "x": rand(m, n + 5, dtype=dtype)[:, 2:-3],
    }
    operands |= {
        "at": torch.randint(0, 5, (m,)),
        "table": rand(5, head),
        "scale": rand(m, n // 6),
        "ids": torch.randint(0, 9, (m, n)).int(),
    }
    check(kinds, rand(2, 11, 19, dtype=dtype), rand(n, 19, dtype=dtype), **operands)


@pytest.mark.parametrize("how", ["sum", "max", "moments", "lse"])
def test_statistics_are_finished_as_they_are_loaded(how: str) -> None:
    def first(acc: Any) -> Any:
        return {"y": acc, "s": getattr(ct, f"row_{how}")(acc)}

    def second(acc: Any, s: ct.Col) -> Any:
        return acc * (s.mean + ct.rsqrt(s.var + 1.0) if how == "moments" else s)

    for m, n in ((5, 150), (40, 301), (33, 40)):
        y, s = ct.epilogue(first)(rand(m, 30), rand(n, 30), backend="cpu", finish=False)
        assert isinstance(s, Stat)
        check(second, y, rand(70, n), s=s)


@pytest.mark.parametrize("head", [2, 16, 64])
def test_columns(head: int) -> None:
    """Parts and joins, sums inside of heads, pairs; numbers and truth values move alike."""

    def heads(acc: Any, weight: ct.Table("repeat")) -> Any:
        z = acc * ct.spread(ct.rsqrt(ct.group_sum(acc * acc, head) + 1.0), head) * weight
        left, right = ct.halves(z, head)
        turned = ct.join(left - 0.5 * right, right + 0.5 * left, block=head)
        even, odd = ct.pairs(acc)
        later = ct.join(odd, 2.0 * even, block=2)
        numbers = ct.spread(ct.pairs(ct.col_index(acc.cols))[1], 2)
        chosen = ct.join(ct.pairs(acc > 0.0)[1], ct.pairs(acc > 0.0)[0], block=2)
        return {
            "turned": ct.store(turned, layout="bhtd", head=head), "z": z, "later": later, "tops": ct.group_max(later, head), "even": even * odd,
            "numbers": ct.store(numbers + acc, dtype=torch.float32), "sums": ct.row_sum(left), "cols": ct.col_sum(turned), "peaks": ct.col_max(even),
            "back": ct.store(turned, layout="bhdt", head=head * 7), "chosen": ct.where(chosen, acc, 0.0),
        }  # fmt: skip

    check(heads, rand(3, 9, 21), rand(head * 7, 21), weight=rand(head), bits=True)


@pytest.mark.parametrize("head", [6, 80, 96])
def test_heads_of_any_size(head: int) -> None:
    def norms(acc: Any, weight: ct.Table("repeat")) -> Any:
        z = acc * ct.spread(ct.rsqrt(ct.group_sum(acc * acc, head) + 1.0), head) * weight
        return {"z": ct.store(z, layout="bhtd", head=head), "tops": ct.group_max(z, head // 2), "s": ct.row_moments(z)}

    def rotated(acc: Any, cos: ct.Table("repeat")) -> Any:
        left, right = ct.halves(acc, head)
        return ct.store(ct.join(left * cos - right, right * cos + left, block=head), layout="bhtd", head=head)

    check(norms, rand(3, 9, 21), rand(head * 7, 21), weight=rand(head))
    check(rotated, rand(3, 9, 21), rand(head * 7, 21), cos=rand(9, head // 2))


@pytest.mark.parametrize(("count", "run", "dtype"), [*zip((2, 3, 2), (100, 17, 300), FLOATS, strict=True)])
def test_strips(count: int, run: int, dtype: torch.dtype) -> None:
    """Columns that lie apart, of one weight or of several, with runs that end within a vector."""

    def strips(acc: Any, other: Any, bias: ct.Row, x: ct.Tile) -> Any:
        parts = ct.parts(acc + bias, count, block=count * run)
        others = ct.parts(other, count, block=count * run)
        joined = ct.join(*(p * ct.sigmoid(q) for p, q in zip(parts, others, strict=True)), block=count * run)
        y = joined + x
        return {
            "y": ct.store(y, accumulate=True), "z": ct.store(joined, layout="bthd", head=run), "gate": parts[0] * parts[-1], "s": ct.row_sum(y * y), "m": ct.row_moments(y),
            "c": ct.col_sum(joined), "t": ct.row_lse(parts[1]), "q": ct.quantize(y, torch.int8, run)[0], "n": ct.where(ct.col_index(acc.cols) < 100.0, y, 0.0),
        }  # fmt: skip

    n = count * run * 2
    for m in (5, 31):
        w = [rand(n, 23, dtype=dtype), rand(23, n, dtype=dtype).T]
        check(strips, rand(m, 23, dtype=dtype), w, bias=rand(n), x=rand(m, n), out={"y": rand(m, n, dtype=dtype)})


@pytest.mark.parametrize("rows", [2, 3, 16, 128])
def test_groups_of_rows(rows: int) -> None:
    def quantized(acc: Any, scale: Any, x: ct.Tile) -> Any:
        y = acc + x * ct.spread(scale, 10, rows)
        q, s = ct.quantize(y, torch.float8_e4m3fn, cols=20, rows=rows)
        return {
            "q": q,
            "scale": s,
            "sum": ct.group_sum(y, 40, rows),
            "r": ct.row_sum(y),
            "c": ct.col_max(y),
            "y": ct.store(y, dtype=torch.bfloat16),
        }

    # Annotations are read where the function is defined, and know no local names.
    quantized.__annotations__ = {"scale": ct.Group(rows, 10), "x": ct.Tile}
    for m in (1, 37, 150):
        groups = -(-m // rows)
        check(quantized, rand(m, 33), rand(120, 33), scale=rand(groups, 12), x=rand(m, 120), bits=True)


def test_whole_rows_as_groups() -> None:
    """A group as wide as the row: the panel is the whole row."""
    check(lambda acc: ct.quantize(acc, torch.int8, acc.cols), rand(30, 20), rand(700, 20))


def test_dropout_is_the_reference_mask() -> None:
    def dropped(acc: Any, seed: ct.Scalar) -> Any:
        left, right = ct.halves(ct.dropout(acc, 0.3, seed))
        return {"y": ct.dropout(acc, 0.5, seed), "z": left + right, "fixed": ct.dropout(acc, 0.2, 7)}

    seed = torch.tensor(2**40 + 12345)
    a, w = torch.ones(70, 1), torch.ones(600, 1)
    mine, theirs = (ct.epilogue(dropped)(a, w, seed=seed, backend=name) for name in ("cpu", "reference"))
    for ours, exact in zip(mine, theirs, strict=True):
        assert torch.equal(ours, exact)


@pytest.mark.parametrize("layout", ["rows", "bthd", "bhtd", "bhdt"])
def test_stores_by_index(layout: str) -> None:
    def append(acc: Any, slot: ct.Col) -> Any:
        head = {} if layout == "rows" else {"layout": layout, "head": 20}
        return {"k": ct.store(acc, rows=slot, **head), "at": ct.store(slot * 1.0, dtype=torch.float16)}  # type: ignore[arg-type]

    a, w = rand(2, 9, 15), rand(60, 15)
    slot = torch.stack([torch.randperm(18)[:9], 9 - torch.arange(9) - 1])
    slot[0, 3] = -1
    shapes = {"rows": (40, 60), "bthd": (2, 18, 3, 20), "bhtd": (2, 3, 18, 20), "bhdt": (2, 3, 20, 18)}
    if layout == "rows":
        slot[1] += 20
    check(append, a, w, slot=slot, out={"k": torch.zeros(shapes[layout])})
    slot[1, 2] = 40
    with pytest.raises(ArgumentError, match=r"slot: names row 40 of out\['k'\]"):
        run(append, a, w, slot=slot, out={"k": torch.zeros(shapes[layout])})


def test_table_rows_are_checked() -> None:
    def looked_up(acc: Any, at: ct.Col, table: ct.Table("at")) -> Any:
        return acc + table

    a, w, table = rand(9, 4), rand(30, 4), rand(5, 10)
    check(
        looked_up, a, w, at=torch.arange(9) % 5 - torch.arange(9) % 3, table=table
    )  # negative ones count from the end
    with pytest.raises(ArgumentError, match="at: names row 5 of table, which has 5"):
        run(looked_up, a, w, at=torch.arange(9).int(), table=table)


def test_outputs_over_operands() -> None:
    """An output may take an operand's place, even where the row is gone over several times."""

    def inplace(acc: Any, x: ct.Tile, z: ct.Tile) -> Any:
        even, odd = ct.pairs(x)
        return {"y": acc * 2.0, "z": acc + z, "p": even - odd, "r": ct.row_sum(x)}

    a, w, x, z = rand(20, 6), rand(64, 6), rand(20, 64), rand(20, 64)
    expected = ct.epilogue(inplace)(a, w, x=x, z=z, backend="reference")
    got = ct.epilogue(inplace)(a, w, x=x, z=z, backend="cpu", out={"y": x, "z": z})
    for ours, exact in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, exact)
    assert got[0].data_ptr() == x.data_ptr() and got[1].data_ptr() == z.data_ptr()


# ---- compositions ------------------------------------------------------------------------------------------------


@settings(
    max_examples=25,
    derandomize=True,
    deadline=None,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(cases())
def test_random_programs(case: Case) -> None:
    case.check("cpu", bits=True)


def test_threads_change_no_bit(threads: Callable[[int], None]) -> None:
    def everything(acc: Any, up: Any, x: ct.Tile) -> Any:
        y = ct.silu(acc) * up + x
        return {
            "y": ct.store(y, dtype=torch.float32),
            "s": ct.row_sum(y * y),
            "m": ct.row_moments(y),
            "l": ct.row_lse(y),
            "c": ct.col_sum(y),
            "t": ct.col_max(y),
        }

    for dtype in FLOATS:
        for m, n, k in ((1, 300, 70), (11, 300, 70), (40, 900, 70), (400, 100, 70), (1400, 300, 30)):
            for transposed in (False, True):
                w = [rand(k, n, dtype=dtype).T if transposed else rand(n, k, dtype=dtype) for _ in range(2)]
                a = rand(k, m, dtype=dtype).T if transposed and m > 1 else rand(m, k, dtype=dtype)
                program, binding = ct.epilogue(everything).bind(a, w, x=rand(m, n))
                seen = []
                for number in (1, 2, 3):
                    threads(number)
                    with oracle.fresh(binding) as mine:
                        seen.append({k: oracle._bits(v) for k, v in BACKEND.run(program, mine).items()})
                for other in seen[1:]:
                    assert all(torch.equal(seen[0][k], other[k]) for k in other), (dtype, m, transposed)


@pytest.mark.parametrize("flags", FEWER.values(), ids=FEWER)
def test_portable_path(flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The same on processors that have less than this one."""
    monkeypatch.setattr(cpu_build, "_machine_flags", lambda: flags)
    backend = Cpu()

    def epilogue(acc: Any, up: Any, x: ct.Tile, stat: ct.Col) -> Any:
        even, odd = ct.pairs(ct.gelu(acc) * ct.sigmoid(up) + x)
        y = ct.join(odd, ct.tanh(even) * ct.rsqrt(stat + 40.0), block=2)
        return {
            "y": ct.store(y, dtype=torch.float32), "q": ct.quantize(y, torch.float8_e4m3fn, 4)[0], "i": ct.store(y * 40.0, dtype=torch.int8), "h": ct.store(y, dtype=torch.float16),
            "b": ct.store(y, dtype=torch.bfloat16), "l": ct.row_lse(y), "c": ct.col_max(y), "f": ct.store(ct.floor(x) + ct.round(x) + ct.exp(ct.minimum(x, 2.0)), dtype=torch.float32),
            "g": ct.store(ct.log(1.0 + abs(x)) + ct.sqrt(abs(x)) + acc, dtype=torch.float32), "d": ct.store(ct.dropout(acc, 0.5, 3), dtype=torch.float16),
        }  # fmt: skip

    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for m in (1, 3, 40):
            w = [rand(72, 50, dtype=dtype), rand(50, 72, dtype=dtype).T if m > 10 else rand(72, 50, dtype=dtype)]
            program, binding = ct.epilogue(epilogue).bind(
                rand(m, 50, dtype=dtype), w, x=rand(m, 72), stat=Stat(rand(2, 3, m).abs(), "lse", 32, 90)
            )
            assert backend.why_not(program, binding) == []
            oracle.check(program, binding, backend)
    check_stream, binding = ct.epilogue(plain).bind(rand(3, 50), rand(50, 72).T)
    oracle.check(check_stream, binding, backend)


# ---- building ----------------------------------------------------------------------------------------------------


def relu(acc: Any) -> Any:
    return ct.relu(acc)


@pytest.fixture
def private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A backend and a cache of its own."""
    monkeypatch.setenv("CODETTA_CACHE", str(tmp_path))
    fresh = Cpu()
    load = dispatch.load_backend
    monkeypatch.setattr(dispatch, "load_backend", lambda name: fresh if name == "cpu" else load(name))
    return tmp_path


@pytest.mark.parametrize("failing", ["none", "broken"])
def test_without_a_compiler_the_reference_runs(monkeypatch: pytest.MonkeyPatch, private: Path, failing: str) -> None:
    if failing == "none":
        monkeypatch.setenv("PATH", "/nonexistent")
        monkeypatch.delenv("CXX", raising=False)
    else:
        fake = private / "cxx"
        fake.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "error: no room" >&2\nexit 1\n')
        fake.chmod(0o755)
        monkeypatch.setenv("CXX", str(fake))
    a, w = rand(3, 4), rand(5, 4)
    dispatch._said.clear()
    with pytest.warns(RuntimeWarning, match="no C\\+\\+ compiler" if failing == "none" else "no room"):
        y = ct.epilogue(relu)(a, w)
    torch.testing.assert_close(y, torch.relu(a @ w.T))
    with pytest.raises(LoweringError, match="compiler"):
        ct.epilogue(relu)(a, w, backend="cpu")


def test_damaged_libraries_are_built_again(private: Path) -> None:
    a, w = rand(3, 4), rand(5, 4)
    ct.epilogue(relu)(a, w, backend="cpu")
    libraries = sorted(private.rglob("*.so"))
    assert len(libraries) == 2  # main loop and epilogue
    for path in libraries:
        # Renamed over, not written into: this process has the old one mapped.
        new = path.with_suffix(".new")
        new.write_bytes(path.read_bytes()[:1000])
        new.replace(path)
    program, binding = ct.epilogue(relu).bind(a, w)
    torch.testing.assert_close(Cpu().run(program, binding)["out"], torch.relu(a @ w.T))
    assert all(path.stat().st_size > 1000 for path in libraries)


def test_without_precompiled_headers_a_program_is_built_all_the_same(private: Path) -> None:
    """They only save time: the file may be gone, or one that the compiler does not take."""
    cpu_build._precompiled_headers.cache_clear()
    program, binding = ct.epilogue(relu).bind(rand(3, 4), rand(5, 4))
    (first,) = Cpu().run(program, binding).values()
    (headers,) = private.rglob("*.h.gch")
    for damage in (lambda: headers.write_bytes(b"no header"), headers.unlink):
        damage()
        for path in private.rglob("*.so"):
            path.unlink()
        (again,) = Cpu().run(program, binding).values()
        assert torch.equal(again, first)
    cpu_build._precompiled_headers.cache_clear()


def test_the_source_can_be_read(private: Path) -> None:
    source = ct.epilogue(relu).source(rand(3, 4), rand(5, 4), backend="cpu")
    assert "at_least(0.0f" in source and "// relu:" in source


def test_other_devices_and_dtypes_are_refused() -> None:
    program, binding = ct.epilogue(relu).bind(rand(3, 4).double(), rand(5, 4).double())
    assert [reason.rule for reason in BACKEND.why_not(program, binding)] == ["dtype"]
    meta = ct.epilogue(relu).bind(torch.empty(3, 4, device="meta"), torch.empty(5, 4, device="meta"))
    assert [reason.rule for reason in BACKEND.why_not(*meta)] == ["device"]


def test_groups_of_rows_across_batch_entries_are_refused() -> None:
    def grouped(acc: Any) -> Any:
        return ct.quantize(acc, torch.int8, 10, rows=4)

    program, binding = ct.epilogue(grouped).bind(rand(2, 6, 5), rand(2, 20, 5))
    assert [reason.rule for reason in BACKEND.why_not(program, binding)] == ["batched"]
    check(grouped, rand(2, 8, 5), rand(2, 20, 5))


def test_weights_may_change_between_calls() -> None:
    a, w = rand(60, 20), rand(40, 20)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            torch.testing.assert_close(ct.epilogue(relu)(a, w), torch.relu(a @ w.T), rtol=1e-5, atol=1e-5)
            w.mul_(-1.5)


def test_no_compiler_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise cpu_build.BuildError("no C++ compiler: c++ not found; install one")

    monkeypatch.setattr(cpu_build, "toolchain", missing)
    cpu._say_once.cache_clear()
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
    with torch.no_grad(), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for rows in (2, 3, 4):
            torch._dynamo.reset()
            ct.compile(model)(torch.randn(rows, 8))
    assert len([each for each in said if "no C++ compiler" in str(each.message)]) == 1
