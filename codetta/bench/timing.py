"""How time is taken: warm, cold cache, contenders interleaved in one run, medians."""

from __future__ import annotations

import random
import statistics
import time
import warnings
from collections.abc import Callable, Mapping

import torch

LEAST = 15  # runs of each on a GPU, however long they take

Contenders = Mapping[str, Callable[[], object]]


def medians(contenders: Contenders, device: torch.device, rounds: int = 3, rep_ms: float = 60.0) -> dict[str, float]:
    """Milliseconds of each contender, `rounds` times `rep_ms` of each, taken in turns.

    Taking turns run by run puts all of them under the same clock: a card at its power limit drifts by some per cent over
    seconds, and the first after a pause would look best. Every round has an order of its own: who always came after the
    hottest contender would look worst.
    """
    for fn in contenders.values():
        fn()
    if device.type == "cuda":
        return _cuda(contenders, rounds * rep_ms)
    return _cpu(contenders, rounds * rep_ms)


def _cuda(contenders: Contenders, each_ms: float) -> dict[str, float]:
    """Single runs with a cold L2, by events on the device."""
    flush = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")
    contenders = {name: _captured(name, fn) for name, fn in contenders.items()}
    order, shuffle = list(contenders), random.Random(0).shuffle

    def sweep() -> dict[str, tuple[torch.cuda.Event, torch.cuda.Event]]:
        events = {}
        shuffle(order)
        for name in order:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            flush.zero_()
            begin.record()
            contenders[name]()
            end.record()
            events[name] = (begin, end)
        return events

    first = sweep()
    torch.cuda.synchronize()
    total = sum(begin.elapsed_time(end) for begin, end in first.values())
    # Some sweeps only to bring the card to its working clock.
    for _ in range(max(2, int(150.0 / max(total, 0.05)))):
        sweep()
    count = max(LEAST, min(300, int(each_ms * len(contenders) / max(total, 0.05))))
    sweeps = [sweep() for _ in range(count)]
    torch.cuda.synchronize()
    return {
        name: statistics.median(events[name][0].elapsed_time(events[name][1]) for events in sweeps)
        for name in contenders
    }


def _captured(name: str, fn: Callable[[], object]) -> Callable[[], object]:
    """The work as a CUDA graph, so that only the device's time counts; as it is where it cannot be captured, which is said."""
    try:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            fn()
        torch.cuda.synchronize()
    except RuntimeError as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        warnings.warn(f"{name} is timed with its launches, no CUDA graph can be made of it: {reason}", stacklevel=2)
        return fn
    return graph.replay


def _cpu(contenders: Contenders, each_ms: float) -> dict[str, float]:
    """Single runs by the clock on the wall; whatever else the machine does meets all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    end = time.perf_counter() + each_ms * len(contenders) / 1000
    while time.perf_counter() < end or len(next(iter(times.values()))) < 5:
        for name, fn in contenders.items():
            start = time.perf_counter()
            fn()
            times[name].append((time.perf_counter() - start) * 1000)
    return {name: statistics.median(samples) for name, samples in times.items()}
