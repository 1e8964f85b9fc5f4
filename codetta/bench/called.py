"""Times of a call as a user makes it, and of what the device does for it.

*As called* is the clock on the wall from before the call until the device has finished, no graph around it, nothing queued.

*Device* is the time the device needs when it never waits for the host: a kernel holds the stream until the host has
enqueued the whole call, and events stand before and behind the call's own work. Nothing is recorded for it, so that a
model does what it does when it is called. Where the host cannot run ahead, because the call waits for a result or has
more launches than the queue takes, it is the time the device is busy with that call's kernels by the profiler, overlaps
counted once.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

WARM = 5  # calls of a contender before the first that counts: graphs are recorded within these
LEAST = 5  # sweeps over all contenders
HELD = 5  # calls with the stream held
LONGEST_HOLD_MS = 400.0

Call = Callable[[], object]


@dataclass
class Timing:
    """What is known of one contender: all in milliseconds, but for bytes."""

    first_ms: float = 0.0
    peak: int = 0  # the largest number of bytes that a call after the first added
    ms: list[float] = field(default_factory=list)
    host_ms: list[float] = field(default_factory=list)  # until the call returned
    device_ms: float | None = None
    device_by: str = ""  # "held" or "busy"


def once(call: Call, device: torch.device, before: Call = lambda: None) -> tuple[float, float, int]:
    """(as called, until it returned, bytes added at the peak) of one call; `before` runs outside the time."""
    gpu = device.type == "cuda"
    before()
    held = 0
    if gpu:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        held = torch.cuda.memory_allocated(device)
    begin = time.perf_counter()
    call()
    returned = time.perf_counter()
    if gpu:
        torch.cuda.synchronize(device)
    end = time.perf_counter()
    peak = torch.cuda.max_memory_allocated(device) - held if gpu else 0
    return (end - begin) * 1000, (returned - begin) * 1000, peak


def warmed(call: Call, device: torch.device, before: Call = lambda: None) -> Timing:
    """A contender's timing with its first calls in it."""
    timing = Timing()
    timing.first_ms, _, _ = once(call, device, before)
    for _ in range(WARM - 1):
        timing.peak = max(timing.peak, once(call, device, before)[2])
    return timing


def in_turns(
    calls: Mapping[str, Call], timings: Mapping[str, Timing], device: torch.device, seconds: float, before: Call
) -> None:
    """As called, in sweeps whose order changes, about so many seconds for each contender.

    In a sweep a fast contender is called more often than a slow one, so that each has about the same time.
    """
    order, shuffle = list(calls), random.Random(0).shuffle
    alone = {name: once(calls[name], device, before)[0] for name in order}
    often = {name: max(1, min(10, round(max(alone.values()) / alone[name]))) for name in order}
    end, sweeps = time.perf_counter() + seconds * len(order), 0
    while sweeps < LEAST or time.perf_counter() < end:
        shuffle(order)
        for name in order:
            for _ in range(often[name]):
                ms, host_ms, peak = once(calls[name], device, before)
                timing = timings[name]
                timing.ms.append(ms)
                timing.host_ms.append(host_ms)
                timing.peak = max(timing.peak, peak)
        sweeps += 1


def on_device(calls: Mapping[str, Call], timings: Mapping[str, Timing], device: torch.device, before: Call) -> None:
    """The device's time of each contender, in turns; nothing on a CPU."""
    if device.type != "cuda":
        return
    rate, found = _cycles_per_ms(device), {name: list[float]() for name in calls}
    hold = {name: 1.0 + 1.5 * statistics.median(timings[name].host_ms) for name in calls}
    for _ in range(HELD):
        for name, call in calls.items():
            while hold[name] <= LONGEST_HOLD_MS:
                ms = _held(call, device, int(hold[name] * rate), before)
                if ms is not None:
                    found[name].append(ms)
                    break
                hold[name] *= 2
    for name, call in calls.items():
        enough = len(found[name]) == HELD
        timings[name].device_ms = statistics.median(found[name]) if enough else _busy(call, device, before)
        timings[name].device_by = "held" if enough else "busy"


def _cycles_per_ms(device: torch.device) -> float:
    times = []
    for _ in range(3):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        torch.cuda._sleep(10_000_000)
        end.record()
        torch.cuda.synchronize(device)
        times.append(begin.elapsed_time(end))
    return 10_000_000 / min(times)


def _held(call: Call, device: torch.device, cycles: int, before: Call) -> float | None:
    """Milliseconds between events around the call's work; None if the stream was free before the host was done."""
    before()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    torch.cuda._sleep(cycles)
    begin.record()
    call()
    late = begin.query()
    end.record()
    torch.cuda.synchronize(device)
    return None if late else begin.elapsed_time(end)


def _busy(call: Call, device: torch.device, before: Call, times: int = 3) -> float | None:
    """Milliseconds in which at least one kernel or copy of the call runs; None where the profiler sees nothing."""
    from torch.profiler import ProfilerActivity, profile

    found = []
    for _ in range(times):
        before()
        torch.cuda.synchronize(device)
        try:
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                call()
                torch.cuda.synchronize(device)
            events = [] if seen.events() is None else list(seen.events())
        except RuntimeError:  # the profiler is taken, or not permitted
            return None
        spans = [(each.time_range.start, each.time_range.end) for each in events if each.device_type.name == "CUDA"]
        if spans:
            found.append(covered(spans) / 1000)
    return statistics.median(found) if found else None


def covered(spans: list[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
