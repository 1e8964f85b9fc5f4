"""Times of a call as a user makes it, and of what the device does for it.

*As called* is the clock on the wall from before the call until the device has finished, no graph around it, nothing queued.

*Device* is the time the device needs when it never waits for the host: the stream is busy until the host has enqueued the
whole call, and events stand before and behind the call's own work. It is busy with earlier calls of the same contender
where those take the device longer than the host, for a card that has rested is faster (its power is limited); otherwise
with a kernel that waits. Nothing is recorded for it, so that a model does what it does when it is called. Where the host
cannot run ahead, because the call waits for a result or has more launches than the queue takes, it is the time the device
is busy with that call's kernels by the profiler, overlaps counted once.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

WARM = 5  # calls of a contender before the first that counts: graphs are recorded within these
LEAST = 5  # sweeps over all contenders
HELD = 5  # calls with the stream held
LONGEST_HOLD_MS = 400.0
MOST_AHEAD = 8  # calls that are enqueued to keep the device busy
SPARE_MS = 0.3  # by which the host is to be ahead

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
    error: str = ""  # why there is nothing, or no more, to measure


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


@contextmanager
def noted(timing: Timing) -> Iterator[None]:
    """A contender that fails is out, with the reason; the others go on."""
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())
        full = isinstance(error, torch.OutOfMemoryError)
        timing.error = "out of memory" if full else f"{type(error).__name__}: {text[:200]}"


def warmed(call: Call, device: torch.device, before: Call = lambda: None) -> Timing:
    """A contender's timing with its first calls in it."""
    timing = Timing()
    with noted(timing):
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
    alone: dict[str, float] = {}
    for name, call in calls.items():
        with noted(timings[name]):
            alone[name] = once(call, device, before)[0]
    order, shuffle = list(alone), random.Random(0).shuffle
    often = {name: max(1, min(10, round(max(alone.values()) / alone[name]))) for name in order}
    end, sweeps = time.perf_counter() + seconds * len(order), 0
    while order and (sweeps < LEAST or time.perf_counter() < end):
        shuffle(order)
        for name in order:
            timing = timings[name]
            with noted(timing):
                for _ in range(often[name]):
                    ms, host_ms, peak = once(calls[name], device, before)
                    timing.ms.append(ms)
                    timing.host_ms.append(host_ms)
                    timing.peak = max(timing.peak, peak)
        order = [name for name in order if not timings[name].error]
        sweeps += 1


def on_device(calls: Mapping[str, Call], timings: Mapping[str, Timing], device: torch.device, before: Call) -> None:
    """The device's time of each contender, in turns; nothing on a CPU."""
    going = [name for name in calls if not timings[name].error]
    if device.type != "cuda" or not going:
        return
    rate, found = _cycles_per_ms(device), {name: list[float]() for name in going}
    hold = {name: 1.0 + 1.5 * statistics.median(timings[name].host_ms) for name in going}
    ahead = {name: _calls_ahead(timings[name]) for name in going}
    for _ in range(HELD):
        for name in going:
            with noted(timings[name]):
                while hold[name] <= LONGEST_HOLD_MS:
                    cycles = 0 if ahead[name] else int(hold[name] * rate)
                    ms = _held(calls[name], device, ahead[name], cycles, before)
                    if ms is not None:
                        found[name].append(ms)
                        break
                    if ahead[name]:
                        ahead[name] = 0
                    else:
                        hold[name] *= 2
        going = [name for name in going if not timings[name].error]
    for name in going:
        with noted(timings[name]):
            enough = len(found[name]) == HELD
            timings[name].device_ms = statistics.median(found[name]) if enough else _busy(calls[name], device, before)
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


def _calls_ahead(timing: Timing) -> int:
    """How many calls keep the device busy until the host has enqueued one more; 0 if the host is no faster than the device."""
    if not timing.ms:
        return 0
    host = statistics.median(timing.host_ms)
    gained = statistics.median(timing.ms) - host
    needed = math.ceil((host + SPARE_MS) / gained) if gained > 0 else MOST_AHEAD + 1
    return needed if needed <= MOST_AHEAD else 0


def _held(call: Call, device: torch.device, ahead: int, cycles: int, before: Call) -> float | None:
    """Milliseconds between events around the call's work, behind so many others or a kernel of so many cycles; None if the stream was
    free before the host was done."""
    before()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize(device)
    for _ in range(ahead):
        call()
        before()
    if cycles:
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
