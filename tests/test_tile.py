"""Which tiles are legal, by proof, and what the refusals say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import codetta as ct
from codetta.backends.triton import TritonBackend, aligned, could_be_aligned, form, why_slow
from codetta.bench.samples import Sizes, library_names, sample
from codetta.errors import Reason
from codetta.plan.choose import BUCKETS, bucket, candidates, epilogue_registers
from codetta.plan.target import TARGETS
from codetta.plan.tile import Tile, accumulator_registers, alignment_reason, escaping_read, shared_bytes, why_not
from codetta.plan.traffic import SPECIALISED, specialised_tiles, why_not_specialised
from codetta.program import Program


def program(fn: Callable[..., Any], *cols: int, k: int = 256, dtype: torch.dtype = torch.bfloat16, rows: int = 256, **operands: Any) -> Program:  # fmt: skip
    a = torch.empty(rows, k, device="meta", dtype=dtype)
    w = [torch.empty(n, k, device="meta", dtype=dtype) for n in cols]
    return ct.epilogue(fn).program(a, w, **operands)


def rules(reasons: list[Reason]) -> set[str]:
    return {reason.rule for reason in reasons}


def rotate(block: int) -> Callable[..., Any]:
    def fn(acc):
        x, y = ct.halves(acc, block=block)
        return ct.join(x - y, y + x, block=block)

    return fn


# ---- columns -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("head", "cols", "legal"), [(64, 64, True), (64, 128, True), (128, 64, False), (128, 128, True), (32, 256, True)])  # fmt: skip
def test_rotate_half_stays_in_the_tile_iff_heads_do(head: int, cols: int, legal: bool) -> None:
    found = why_not(program(rotate(head), 768), Tile(32, cols, 32))
    assert (not found) == legal, found


@pytest.mark.parametrize(("cols", "legal"), [(32, True), (64, False), (128, False)])
def test_heads_of_96_are_strips_of_48(cols: int, legal: bool) -> None:
    """No power of two holds whole heads of 96, so their halves come as strips: 16 columns of each divide 48, 32 do not."""
    rotated = program(rotate(96), 768)
    assert [len(segment.strips) for segment in rotated.segments] == [2]
    found = why_not(rotated, Tile(32, cols, 32))
    assert rules(found) == (set() if legal else {"strip not contiguous"})


@pytest.mark.parametrize(("loop", "legal"), [("pointer", True), ("descriptor", False)])
def test_a_product_read_in_two_widths_has_no_one_box(loop: str, legal: bool) -> None:
    def fn(acc):
        first, _, last = ct.parts(acc, 3)
        return {"gated": ct.silu(first) * last, "raw": ct.store(acc, dtype=torch.float32)}

    found = why_not(program(fn, 6), Tile(64, 64, 16, loop=loop))
    assert rules(found) == (set() if legal else {"copy engine"})


def test_a_refusal_has_a_counter_example() -> None:
    found = why_not(program(rotate(128), 768), Tile(32, 64, 32))
    text = next(reason.detail for reason in found if reason.detail.startswith("part"))
    # "column j is in chunk c of w columns but reads column i of chunk d": checked against the meaning of the op.
    numbers = [int(word) for word in text.replace(":", " ").split() if word.isdigit()]
    j, chunk, width, i, other = numbers
    assert chunk == j // width
    assert chunk != other
    assert i in {j // 64 * 128 + part * 64 + j % 64 for part in (0, 1)}


@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_chunks_must_hold_whole_heads(chunks: int) -> None:
    found = why_not(program(rotate(64), 512), Tile(32, 128, 32, chunks=chunks))
    assert (not found) == (128 // chunks >= 64)


def test_escaping_reads_are_found_and_absent() -> None:
    # Halves of blocks of 8: column j of the first half is column 8 (j // 4) + j % 4 of the whole.
    relation = "i = 8*floor(j/4) + j mod 4"
    assert escaping_read(16, 32, 4, 8, relation) is None
    assert escaping_read(16, 32, 8, 16, relation) is None
    example = escaping_read(16, 32, 2, 4, relation)
    assert example is not None
    j, i = example
    assert i == 8 * (j // 4) + j % 4
    assert j // 2 != i // 4


def test_halves_far_apart_are_strips() -> None:
    def gate(acc):
        x, y = ct.halves(acc)
        return ct.silu(x) * y

    gated = program(gate, 2 * 352)
    assert [len(segment.strips) for segment in gated.segments] == [2]
    tile = Tile(128, 128, 64)
    assert not why_not(gated, tile)
    assert tile.strip(gated.segments[0]) == 64


def test_a_strip_must_not_cross_its_runs() -> None:
    def gate(acc):
        x, y = ct.halves(acc, block=2 * 320)
        return ct.silu(x) * y

    several = program(gate, 3 * 2 * 320)
    assert "strip not contiguous" in rules(why_not(several, Tile(32, 256, 32)))
    assert not why_not(several, Tile(32, 128, 32))


@pytest.mark.parametrize(("cols", "chunks", "legal"), [(128, 1, True), (256, 2, True), (64, 1, False), (128, 2, False)])
def test_groups_of_columns(cols: int, chunks: int, legal: bool) -> None:
    scaled = program(lambda acc: acc * ct.spread(ct.rsqrt(ct.group_sum(acc * acc, 128) + 1), 128), 512)
    assert (not why_not(scaled, Tile(32, cols, 32, chunks=chunks))) == legal


def test_groups_of_columns_and_rows_are_powers_of_two() -> None:
    def by(rows: int, cols: int) -> Program:
        return program(lambda acc: {"s": ct.group_max(acc, cols, rows=rows)}, 192)

    assert "power of two" in rules(why_not(by(1, 96), Tile(32, 192 // 3, 32)))
    assert not why_not(by(4, 64), Tile(32, 64, 32))
    assert rules(why_not(by(64, 64), Tile(32, 64, 32))) == {"not tile-local"}
    assert rules(why_not(by(3, 64), Tile(32, 64, 32))) == {"not tile-local"}


def test_sizes_are_powers_of_two() -> None:
    assert rules(why_not(program(ct.relu, 512), Tile(96, 128, 32))) == {"power of two"}


def test_a_chunk_is_as_wide_as_an_instruction() -> None:
    assert rules(why_not(program(ct.relu, 512), Tile(32, 32, 32, chunks=4))) == {"narrow"}


# ---- what fits on a target ---------------------------------------------------------------------------------------


def test_shared_memory() -> None:
    plain, tile = program(ct.relu, 512), Tile(128, 256, 64, 4, 8)
    assert shared_bytes(plain, tile) == 4 * (128 + 256) * 64 * 2
    assert not why_not(plain, tile, TARGETS["sm_90"])
    assert rules(why_not(plain, tile, TARGETS["sm_120"])) == {"shared memory"}
    assert "101376" in str(why_not(plain, tile, TARGETS["sm_120"])[0])


def test_registers() -> None:
    tile = Tile(256, 256, 32, 2, 8)
    assert accumulator_registers(tile, TARGETS["sm_90"]) == 256
    assert rules(why_not(program(ct.relu, 512), tile, TARGETS["sm_90"])) == {"registers"}
    assert not why_not(program(ct.relu, 512), tile, TARGETS["gfx942"])


def test_copy_engine_and_warpgroups() -> None:
    plain = program(ct.relu, 512)
    assert rules(why_not(plain, Tile(loop="descriptor"), TARGETS["sm_80"])) == {"copy engine"}
    assert "warp specialisation" in rules(why_not(plain, Tile(loop="specialised"), TARGETS["sm_120"]))


def test_alignment_of_the_copy_engine() -> None:
    assert alignment_reason("a", 100, 0, 16) is not None
    assert alignment_reason("a", 96, 8, 16) is not None
    assert alignment_reason("a", 96, 32, 16) is None
    fn = ct.epilogue(ct.relu)
    for k, whole in ((64, True), (63, False), (60, False)):
        bound = fn.bind(torch.zeros(32, k, dtype=torch.bfloat16), torch.zeros(32, k, dtype=torch.bfloat16))
        assert aligned(*bound) == whole
        tiles, _ = TritonBackend().candidates(*bound, TARGETS["sm_90"])
        assert {"pointer"} == {tile.loop for tile in tiles} or whole


def test_specialised_loop_says_what_it_cannot_do() -> None:
    single = program(ct.relu, 512, dtype=torch.float32)
    tile = Tile(128, 256, 64, loop="specialised")
    assert "specialised" in rules(why_not_specialised(single, tile))
    three = program(lambda x, y, z: x * y + z, 512, 512, 512)
    assert any("3 strips" in reason.detail for reason in why_not_specialised(three, tile))
    assert not why_not_specialised(program(ct.relu, 512), tile)
    for tile in specialised_tiles(program(ct.relu, 512), TARGETS["sm_90"]):
        assert shared_bytes(program(ct.relu, 512), tile) < TARGETS["sm_90"].shared


# ---- the choice --------------------------------------------------------------------------------------------------


def test_buckets() -> None:
    assert [bucket(rows) for rows in (1, 3, 5, 16, 17, 4096, 4097)] == [1, 4, 16, 16, 64, 4096, 0]
    assert list(BUCKETS) == sorted(BUCKETS)


@pytest.mark.parametrize("rows", [1, 48, 200, 4096])
def test_every_epilogue_has_a_tile_everywhere(rows: int) -> None:
    samples = 4 if rows % 4 == 0 else 1
    for name in library_names():
        call, binding = sample(name, Sizes(rows=rows, samples=samples)).bind()
        for target in TARGETS.values():
            where = f"{name} on {target.name}"
            tiles, refused = TritonBackend().candidates(call, binding, target)
            assert tiles, f"{where}: {[str(reason) for reason in refused]}"
            illegal = [tile for tile in tiles if why_not(form(call, tile), tile)]
            assert not illegal, f"{where}: {illegal[0]} is offered and not legal"
            if rows == 1:
                streams = [tile for tile in tiles if tile.loop == "stream"]
                assert tiles[: len(streams)] == streams, f"{where}: streams come first, where there are any"
                assert all(tile.rows == 1 and tile.early == target.starts_early for tile in streams), where
                next_rows = tiles[len(streams)].rows
                assert next_rows == 16 or name.endswith(("gradient", "accumulate")), f"{where}: then {next_rows} rows"


def test_a_large_epilogue_gets_a_smaller_tile() -> None:
    target = TARGETS["sm_80"]
    light, heavy = (sample(name).bind()[0] for name in ("norm_linear", "qk_rope_backward"))
    tile = Tile(128, 128, 32, 3, 8)
    assert epilogue_registers(heavy, tile, target) > 2 * epilogue_registers(light, tile, target)
    first, second = (candidates(each, 0, target, True)[0][0] for each in (light, heavy))
    assert first.rows * first.cols > second.rows * second.cols


def test_the_specialised_loop_comes_first_on_hopper() -> None:
    for name in ("residual_stats", "norm_swiglu", "norm_rope", "lse_target", "weight_gradient"):
        tiles, _ = TritonBackend().candidates(*sample(name).bind(), TARGETS["sm_90"])
        assert tiles[0].loop in SPECIALISED


def test_what_does_not_pay_is_not_made() -> None:
    """Programs that only the slow loops can carry, and full precision, are left to the vendor's product; with few rows they are not."""
    hopper, ampere = TARGETS["sm_90"], TARGETS["sm_80"]

    def slow(each: Program, rows: int, target: str = "sm_90") -> list[Reason]:
        tiles, refused = candidates(each, bucket(rows), TARGETS[target], could_be_aligned(each))
        return why_slow(each, rows, TARGETS[target], tiles[0], refused)

    plain = program(lambda acc: acc, 512)
    assert hopper.warpgroups and not ampere.warpgroups
    assert not slow(plain, 16384) and not slow(plain, 16384, "sm_80")
    interleaved = program(rotate(1024), 4096)  # halves of several runs each
    assert rules(slow(interleaved, 16384)) == {"cost"} and "runs" in slow(interleaved, 16384)[0].detail
    assert not slow(interleaved, 16) and not slow(interleaved, 16384, "sm_80")
    ragged = program(lambda acc: acc, 512, k=255)
    assert not could_be_aligned(ragged) and "not aligned" in slow(ragged, 16384)[0].detail
    assert rules(slow(program(lambda acc: acc, 512, dtype=torch.float32), 16384)) == {"cost"}
