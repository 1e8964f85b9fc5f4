"""The warp-specialised kernels, executed without a GPU: see gluon_sim.py.

Every program goes through tiles of both loops with rings of several depths, with one tile per block and several, under
different schedules; the results must be the reference's. Faults put into the text show that such mistakes are found.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from gluon_sim import KernelError, simulate
from torch import Tensor

import codetta
from codetta.backends import gluon_gemm, gluon_launch, reference
from codetta.backends.triton import _arguments, _stat
from codetta.bench.samples import Sizes, sample
from codetta.plan.target import TARGETS
from codetta.plan.tile import Tile, why_not
from codetta.plan.traffic import CONSUMERS, SPECIALISED, ring_tiles, why_not_specialised
from codetta.program import Program
from codetta.runtime.bind import Binding
from codetta.stat import Stat

RAGGED = Sizes(rows=328, width=264, hidden=328, vocabulary=520, head=8, samples=1)
SHORT = Sizes(rows=200, width=64, hidden=64, vocabulary=304, head=64, samples=1)  # one step of K
HEADS = Sizes(rows=192, width=1024, hidden=256, vocabulary=512, head=64, samples=3)
FULL = replace(HEADS, rows=384, width=320)
# Each with what it stands for.
CASES = [
    ("residual_stats", RAGGED),  # a load, a result in its place, a row reduction
    ("residual_stats_scaled", RAGGED),  # a result that has slots of its own
    ("residual_moments", RAGGED),  # partials of two fields
    ("gate_residual", FULL),  # an operand with a row per sample
    ("norm_swiglu", RAGGED),  # two strips
    ("norm_swiglu_split", RAGGED),  # of two weights
    ("norm_rope", HEADS),  # three segments, stores by heads, tables
    ("norm_qk_rope", HEADS),  # reductions inside the epilogue
    ("lse_target", RAGGED),  # nothing stored by the copy engine
    ("swiglu_backward", RAGGED),  # two loads
    ("gelu_backward", RAGGED),  # column reductions
    ("weight_gradient", RAGGED),  # both operands transposed
    ("residual_stats_scaled", SHORT),
    ("norm_swiglu", SHORT),
    ("gelu_backward", SHORT),
    ("lse_target", SHORT),
]


def call(name: str, sizes: Sizes) -> tuple[Program, Binding]:
    made = sample(name, sizes, torch.device("cpu"), torch.bfloat16)
    if sizes.samples > 1:
        made.a = made.a.unflatten(0, (sizes.samples, -1))
    return made.bind()


def tiles_of(program: Program, binding: Binding, loop: str, cols: int = 256) -> list[Tile]:
    tiles = [tile for tile in ring_tiles(program, TARGETS["sm_90"], loop, cols=cols) if not why_not(program, tile)]
    tiles = [tile for tile in tiles if not why_not_specialised(program, tile)]
    return [tile for tile in tiles if not gluon_launch.why_not(program, binding, tile)]


def check(program: Program, binding: Binding, tile: Tile, units: int, seed: int, text: str | None = None) -> None:
    """Simulate and compare; `units`: blocks that run at once."""
    before = {name: output.clone() for name, output in binding.outputs.items()}
    expected = reference.run(program, binding, separate=tile.loop == "detached")
    wanted = {name: value if isinstance(value, Stat) else value.clone() for name, value in expected.items()}
    for store in program.stores:
        if store.accumulate:
            binding.outputs[store.name].copy_(before[store.name])
        elif store.row_index is None:
            poison(binding.outputs[store.name])
    row_tiles = -(-binding.rows // tile.rows)
    results: dict[str, Tensor | Stat] = dict(binding.outputs)
    for sink in program.sinks:
        stat = results[sink.name] = _stat(program, sink.name, binding, tile, CONSUMERS * row_tiles)
        stat.partials.fill_(torch.nan)
    tiles = row_tiles * sum(tile.column_tiles(segment) for segment in program.segments)
    text = text or gluon_gemm.source(program, tile)
    simulate(text, _arguments(program, binding, tile, results), min(tiles, units), seed)
    for name, want in wanted.items():
        compare(name, results[name], want)


def poison(output: Tensor) -> None:
    output.fill_(torch.nan if output.is_floating_point() else torch.iinfo(output.dtype).min)


def compare(name: str, got: Tensor | Stat, want: Tensor | Stat) -> None:
    if isinstance(got, Stat):
        assert isinstance(want, Stat)
        ours, theirs = got.finish(), want.finish()
        pairs = list(zip(ours, theirs, strict=True)) if isinstance(ours, tuple) else [(ours, theirs)]
    else:
        pairs = [(got, want)]
    for x, y in pairs:
        assert isinstance(x, Tensor) and isinstance(y, Tensor)
        x, y = x.double(), y.double()
        wrong = ~((x - y).abs() <= 1e-2 * y.abs() + 2e-2 * y.square().mean().sqrt())
        if wrong.any():
            where = wrong.nonzero()
            raise KernelError(
                f"{name}: {len(where)} of {x.numel()} wrong, from {where[0].tolist()} to {where[-1].tolist()}"
            )


@pytest.mark.parametrize("name", ["norm_rope", "norm_qk_rope"])
def test_tables_read_by_the_threads(name: str) -> None:
    """Where a ring has no room for tables, tiles without slots for loads are there and right."""
    program, binding = call(name, HEADS)
    tile = replace(tiles_of(program, binding, "detached")[0], load_slots=0)
    assert "in_cos_load" not in gluon_gemm.source(program, tile)
    check(program, binding, tile, units=2, seed=1)


@pytest.mark.parametrize("loop", SPECIALISED)
@pytest.mark.parametrize(("name", "sizes"), CASES, ids=[f"{name}-{sizes.rows}" for name, sizes in CASES])
def test_simulated_kernels_compute_what_the_reference_does(name: str, sizes: Sizes, loop: str) -> None:
    program, binding = call(name, sizes)
    tiles = tiles_of(program, binding, loop)
    assert tiles
    for number, tile in enumerate(tiles):
        for seed, units in enumerate((1, 3, 100)):
            check(program, binding, tile, units, 10 * number + seed)


@pytest.mark.parametrize("cols", [128, 64])
@pytest.mark.parametrize("loop", SPECIALISED)
@pytest.mark.parametrize(
    "name", ["residual_stats", "norm_swiglu", "norm_rope", "norm_qk_rope", "lse_target", "gelu_backward"]
)
def test_narrow_tiles(name: str, loop: str, cols: int) -> None:
    """The tiles of few rows."""
    program, binding = call(name, HEADS if name.endswith("rope") else RAGGED)
    tiles = tiles_of(program, binding, loop, cols)
    assert tiles and all(tile.cols == cols for tile in tiles)
    for number, tile in enumerate(tiles):
        for seed, units in enumerate((1, 3)):
            check(program, binding, tile, units, 10 * number + seed)


def test_full_precision_results_of_the_attached_loop() -> None:
    program, binding = call("weight_gradient_accumulate", RAGGED)
    assert not tiles_of(program, binding, "detached")
    for seed, tile in enumerate(tiles_of(program, binding, "specialised")):
        check(program, binding, tile, 2, seed)


@pytest.mark.parametrize("stagger", [1, 2])
def test_a_consumer_that_runs_behind(stagger: int) -> None:
    program, binding = call("residual_stats", RAGGED)
    tile = replace(tiles_of(program, binding, "specialised")[0], stagger=stagger)
    assert "mbarrier.wait(lag" in gluon_gemm.source(program, tile)
    for seed in range(3):
        check(program, binding, tile, 2, seed)


UNEVEN = [
    # Chunks behind the last column, where rows of the next head, sample or row begin.
    ("norm_rope", Sizes(rows=384, width=320, hidden=64, vocabulary=64, head=64, samples=3)),
    ("norm_qk_rope", Sizes(rows=384, width=512, hidden=64, vocabulary=64, head=128, samples=3)),
    ("quantize_store", Sizes(rows=200, width=128, hidden=384, vocabulary=64, head=64, samples=1)),
    # Half a tile behind the last row.
    ("gate_residual", HEADS),
    # Parts of an operand that are narrower than a tile.
    ("swiglu_backward", SHORT),
]


@pytest.mark.parametrize(("name", "sizes"), UNEVEN, ids=[name for name, _ in UNEVEN])
def test_simulated_kernels_on_uneven_sizes(name: str, sizes: Sizes) -> None:
    program, binding = call(name, sizes)
    tiles = tiles_of(program, binding, "detached") + tiles_of(program, binding, "specialised")
    assert tiles
    for seed, tile in enumerate(tiles):
        check(program, binding, tile, 2, seed)


@codetta.epilogue
def group_reductions(acc: codetta.Value) -> dict[str, codetta.Value]:
    return {"y": codetta.store(acc, dtype=torch.float32), "s": codetta.row_lse(codetta.group_max(acc - 4.0, cols=32))}


def test_reductions_of_group_values_leave_out_what_is_behind_the_last_column() -> None:
    torch.manual_seed(0)
    program, binding = group_reductions.bind(torch.randn(136, 64).bfloat16(), torch.randn(96, 64).bfloat16() / 8)
    for seed, tile in enumerate(tiles_of(program, binding, "specialised")):
        check(program, binding, tile, 2, seed)


WAIT, ARRIVE, STORED, FENCE = "mbarrier.wait({}", "mbarrier.arrive({}", "tma.store_wait(", "fence_async_shared("
# (program, loop, the statement that is taken out)
FAULTS = [
    ("residual_stats_scaled", loop, statement)
    for loop, waits, arrivals in (
        ("detached", ("full", "left", "parked", "freed", "xfull"), ("left", "parked", "freed")),
        ("specialised", ("full", "empty", "xfull", "yfree", "ready"), ("empty.index(last), pred", "ready", "yfree")),
    )
    for statement in (*map(WAIT.format, waits), *map(ARRIVE.format, arrivals), STORED, FENCE, "mbarrier.expect(")
]  # fmt: skip
FAULTS += [
    ("norm_swiglu", "detached", STORED),
    ("weight_gradient", "detached", STORED),
    ("lse_target", "detached", "acc = warpgroup_mma_wait(1"),
]


@pytest.mark.parametrize(("name", "loop", "statement"), FAULTS, ids=[f"{n}-{w}-{s}" for n, w, s in FAULTS])
def test_faults_are_found(name: str, loop: str, statement: str) -> None:
    program, binding = call(name, RAGGED)
    tile = tiles_of(program, binding, loop)[0]
    text, count = re.subn(
        rf"^( *){re.escape(statement)}.*$", r"\1pass", gluon_gemm.source(program, tile), flags=re.MULTILINE
    )
    assert count
    for seed in range(10):
        try:
            check(program, binding, tile, 1, seed, text)
        except KernelError:
            return
    raise AssertionError(f"the kernel works without {statement}")
