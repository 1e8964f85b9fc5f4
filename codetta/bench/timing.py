"""How time is taken: warm, cold cache, contenders interleaved in one run, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Contenders = Mapping[str, Callable[[], object]]


def medians(contenders: Contenders, device: torch.device, rounds: int = 3, rep_ms: float = 60.0) -> dict[str, float]:
    """Milliseconds of each contender. Rounds alternate in order, since a card's clock drifts by some per cent over a run."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for name, fn in contenders.items():
        fn()
    for number in range(rounds):
        for name in list(contenders)[:: -1 if number % 2 else 1]:
            times[name] += _cuda(contenders[name], rep_ms) if device.type == "cuda" else _cpu(contenders[name], rep_ms)
    return {name: statistics.median(samples) for name, samples in times.items()}


def _cuda(fn: Callable[[], object], rep_ms: float) -> list[float]:
    """Times of single runs with a cold L2, by events on the device."""
    flush = torch.empty(64 * 2**20, dtype=torch.int32, device="cuda")
    fn()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    fn()
    end.record()
    torch.cuda.synchronize()
    count = max(5, min(200, int(rep_ms / max(start.elapsed_time(end), 0.01))))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
    for begin, finish in events:
        flush.zero_()
        begin.record()
        fn()
        finish.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(finish) for begin, finish in events]


def _cpu(fn: Callable[[], object], rep_ms: float) -> list[float]:
    samples: list[float] = []
    end = time.perf_counter() + rep_ms / 1000
    while time.perf_counter() < end or len(samples) < 5:
        start = time.perf_counter()
        fn()
        samples.append((time.perf_counter() - start) * 1000)
    return samples
