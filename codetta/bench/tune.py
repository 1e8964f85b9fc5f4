"""Tuning: measures the legal tiles of a program against each other on the device, and remembers the best.

Candidates are compiled first, side by side; nothing is measured meanwhile. One that does not compile or run, or that gives
another answer than the default, is left out with the reason. Only a complete result is remembered, so that an interrupted
run leaves everything as it was. The CPU backend has one schedule: there is nothing to tune.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from codetta.backends import reference
from codetta.backends.triton import TritonBackend, interpreting, tune_key
from codetta.bench.timing import medians
from codetta.errors import ArgumentError, LoweringError
from codetta.plan.tile import Tile
from codetta.plan.tune import Tuned, remember
from codetta.program import Program
from codetta.runtime.bind import Binding
from codetta.stat import Stat

Progress = Callable[[str, int, int], None]  # stage, done, total

SMALL = 2**24  # elements of a product that the reference still computes in no time
WORTH = 0.99  # of the default's time: what is not even that much faster is noise


@dataclass(frozen=True)
class Tuning:
    """What was measured, fastest first, and what was left out and why."""

    tuned: Tuned
    times: tuple[tuple[Tile, float], ...]
    skipped: tuple[tuple[Tile, str], ...]


def tune(
    program: Program,
    binding: Binding,
    candidates: Sequence[Tile] | None = None,
    *,
    limit: int = 24,
    progress: Progress | None = None,
    workers: int | None = None,
    backend: TritonBackend | None = None,
) -> Tuning:
    """Measure candidates (default: a selection of the legal ones) and remember the best for such calls on this device."""
    if not (binding.a.is_cuda or interpreting()):
        raise ArgumentError(
            "device", f"there is nothing to tune on {binding.a.device}: it has one schedule", "tune on a GPU"
        )
    backend, say = backend or TritonBackend(), progress or _silent
    legal, refused = backend.candidates(program, binding)
    if not legal:
        raise LoweringError(f"no legal tile for {program.name}", refused)
    default = legal[0]
    # The default always takes part: without it there is nothing to be faster than.
    tiles = list(dict.fromkeys([default, *(candidates if candidates is not None else selection(legal, limit))]))
    skipped = {tile: "not legal for these tensors" for tile in tiles if tile not in legal}
    tiles = [tile for tile in tiles if tile not in skipped]
    skipped |= _compile(backend, program, binding, tiles, say, workers)
    with _restored(binding):
        skipped |= _check(backend, program, binding, [tile for tile in tiles if tile not in skipped], say)
        left = [tile for tile in tiles if tile not in skipped]
        if not left:
            listed = "; ".join(f"{tile}: {why}" for tile, why in skipped.items())
            raise LoweringError(f"no tile of {program.name} works: {listed}", refused)
        times = _measure(backend, program, binding, left, say)
    best = min(times, key=lambda tile: times[tile])
    if default in times and times[best] > WORTH * times[default]:
        best = default
    tuned = Tuned(best, times[best], times.get(default, times[best]), len(times))
    remember(tune_key(program, binding), tuned)
    return Tuning(tuned, tuple(sorted(times.items(), key=lambda each: each[1])), tuple(skipped.items()))


def selection(legal: Sequence[Tile], limit: int) -> list[Tile]:
    """At most so many of the legal tiles: the best guesses of each loop in turn, since guesses compare loops worst."""
    loops = list(dict.fromkeys(tile.loop for tile in legal))
    queues = [[tile for tile in legal if tile.loop == loop] for loop in loops]
    # The pointer loop is for what the others cannot address; one of it tells enough.
    queues = [queue[:2] if queue[0].loop == "pointer" and len(queues) > 1 else queue for queue in queues]
    chosen: list[Tile] = []
    for turn in range(max(len(queue) for queue in queues)):
        chosen += [queue[turn] for queue in queues if turn < len(queue)]
    return chosen[:limit]


def _silent(stage: str, done: int, total: int) -> None:
    pass


def _compile(
    backend: TritonBackend, program: Program, binding: Binding, tiles: list[Tile], say: Progress, workers: int | None
) -> dict[Tile, str]:
    """Compile every tile's kernel into Triton's cache; most of the work is done outside the interpreter lock."""
    skipped: dict[Tile, str] = {}

    def build(tile: Tile) -> None:
        if binding.a.is_cuda:
            torch.cuda.set_device(binding.a.device)  # each thread has a current device of its own
        backend.compile(program, binding, tile)

    pool = ThreadPoolExecutor(workers or min(16, os.cpu_count() or 1))
    try:
        futures = {pool.submit(build, tile): tile for tile in tiles}
        say("compile", 0, len(tiles))
        for done, future in enumerate(as_completed(futures), 1):
            error = future.exception()
            if error is not None:
                skipped[futures[future]] = f"does not compile: {_first_line(error)}"
            say("compile", done, len(tiles))
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
    return skipped


def _check(
    backend: TritonBackend, program: Program, binding: Binding, tiles: list[Tile], say: Progress
) -> dict[Tile, str]:
    """Run each tile once and compare: with the reference where that is cheap, else with the first that runs."""
    skipped: dict[Tile, str] = {}
    truth: dict[str, tuple[Tensor, ...]] | None = None
    read = _also_read(binding)
    before = {name: binding.outputs[name].clone() for name in read}
    if binding.rows * program.cols <= SMALL:
        truth = _values(program, reference.run(program, binding))
    for done, tile in enumerate(tiles):
        say("check", done, len(tiles))
        for name, output in binding.outputs.items():
            if name in read:
                output.copy_(before[name])
            elif output.dtype.is_floating_point and not _by_index(program, name):
                output.copy_(torch.full((), torch.nan, device=output.device).expand_as(output))
        try:
            results = backend.launch(program, binding, tile)
            if binding.a.is_cuda:
                torch.cuda.synchronize(binding.a.device)
        except Exception as error:  # whatever a compiler, a driver or a launch has to say
            skipped[tile] = f"does not run: {_first_line(error)}"
            continue
        values = _values(program, results)
        if truth is None:
            truth = values
        elif wrong := _differs(values, truth, program.a_dtype):
            skipped[tile] = f"wrong answer: {wrong}"
    say("check", len(tiles), len(tiles))
    return skipped


def _measure(
    backend: TritonBackend, program: Program, binding: Binding, tiles: list[Tile], say: Progress
) -> dict[Tile, float]:
    """All in turns for a first impression, then the best few for longer."""
    device = binding.a.device
    launches = {str(number): backend.prepare(program, binding, tile) for number, tile in enumerate(tiles)}
    say("measure", 0, 2)
    first = medians(launches, device, rounds=1, rep_ms=30.0)
    say("measure", 1, 2)
    best = sorted(first, key=lambda number: first[number])[:4]
    again = medians({number: launches[number] for number in dict.fromkeys(["0", *best])}, device)
    say("measure", 2, 2)
    return {tiles[int(number)]: ms for number, ms in {**first, **again}.items()}


def _also_read(binding: Binding) -> set[str]:
    """Outputs that are read as well: added to, or written over an operand."""
    pointers = {value.data_ptr() for value in binding.operands.values() if isinstance(value, Tensor)}
    return {name for name, output in binding.outputs.items() if output.data_ptr() in pointers}


def _by_index(program: Program, name: str) -> bool:
    return any(store.name == name and store.row_index for store in program.stores)


@contextmanager
def _restored(binding: Binding) -> Iterator[None]:
    """Outputs that are also inputs come back as they were."""
    before = {name: binding.outputs[name].clone() for name in _also_read(binding)}
    try:
        yield
    finally:
        for name, value in before.items():
            binding.outputs[name].copy_(value)


def _values(program: Program, results: dict[str, Tensor | Stat]) -> dict[str, tuple[Tensor, ...]]:
    """Every output as tensors of its own, reductions finished."""
    found: dict[str, tuple[Tensor, ...]] = {}
    for name, value in results.items():
        finished = value.finish() if isinstance(value, Stat) else value.clone()
        found[name] = finished if isinstance(finished, tuple) else (finished,)
    return found


def _differs(values: dict[str, tuple[Tensor, ...]], truth: dict[str, tuple[Tensor, ...]], dtype: torch.dtype) -> str:
    """What is wrong, empty if nothing: tiles round and sum in other orders, and that is all they may do."""
    allowed = 8 * torch.finfo(dtype).eps
    for name, expected in truth.items():
        for got, want in zip(values[name], expected, strict=True):
            error, size = _distance(got, want)
            if not error <= allowed * max(size, 1e-30):
                return f"{name} is off by {error / max(size, 1e-30):.2g}, {allowed:.2g} allowed"
    return ""


def _distance(got: Tensor, want: Tensor) -> tuple[float, float]:
    """Norms of the difference and of the truth, by runs of rows: as float32 the whole might not fit."""
    error = size = 0.0
    for x, y in zip(
        got.reshape(got.shape[0], -1).split(1024), want.reshape(want.shape[0], -1).split(1024), strict=True
    ):
        x, y = x.float(), y.float()
        same = (x == y) | (x.isnan() & y.isnan())  # rows that no index names hold anything
        error += (x - y).masked_fill(same, 0.0).square().sum().item()
        size += y.nan_to_num().square().sum().item()
    return error**0.5, size**0.5


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return f"{type(error).__name__}: {lines[-1].strip()[:200]}"
