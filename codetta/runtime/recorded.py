"""A function that is launched from a recording: on a GPU, one call instead of one for each kernel."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from codetta.runtime.memsets import memsets_become_kernels

Result = TypeVar("Result")

WARM = 2  # calls before the recording: kernels are built and tensors of constants made in them


@contextmanager
def own_workspaces() -> Iterator[None]:
    """What cuBLAS works in while a graph is recorded is the graph's own: elsewhere, others may have it freed (torch.compile's own graphs do)."""
    torch._C._cuda_clearCublasWorkspaces()
    try:
        yield
    finally:
        torch._C._cuda_clearCublasWorkspaces()


class Recorded:
    """A function without arguments whose tensors stay where they are; `kept`: those that it changes, which recording it does not.

    On a CPU the function itself. A recording reads what was made of parameters when it was made: `forget` it when they have changed.
    pool: memory that it shares with others, none of which run at the same time.
    """

    def __init__(self, function: Callable[[], Tensor], kept: Sequence[Tensor], pool: Any = None) -> None:
        self.function, self.kept, self.pool = function, kept, pool
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Tensor | None = None

    @property
    def is_there(self) -> bool:
        return self.graph is not None

    def forget(self) -> None:
        self.graph = self.result = None

    def __call__(self) -> Tensor:
        if not self.kept[0].is_cuda:
            return self.function()
        if self.graph is None:
            self._record()
        assert self.graph is not None and self.result is not None
        self.graph.replay()
        return self.result

    def _record(self) -> None:
        device = self.kept[0].device
        before = [each.clone() for each in self.kept]
        side = _side_stream(device)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            for _ in range(WARM):
                self.function()
        torch.cuda.current_stream(device).wait_stream(side)
        with recording:
            graph, self.result = record(self.function, device, self.pool)
        for each, was in zip(self.kept, before, strict=True):
            each.copy_(was)
        self.graph = graph


recording = threading.Lock()  # random numbers know of one recording at a time


def record(
    function: Callable[[], Result], device: torch.device, pool: Any = None
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A call of the function as a graph, and what it returned, whose memory is the graph's. Hold `recording` meanwhile."""
    side, graph = _side_stream(device), torch.cuda.CUDAGraph(keep_graph=True)
    current = torch.cuda.current_stream(device)
    side.wait_stream(current)
    try:
        with own_workspaces(), torch.cuda.stream(side):
            graph.capture_begin(pool, capture_error_mode="thread_local")
            try:
                result = function()
            finally:
                graph.capture_end()
    except BaseException:
        _end_capture(side)
        raise
    memsets_become_kernels(graph, device)
    graph.instantiate()
    current.wait_stream(side)
    return graph, result


_side: dict[torch.device, torch.cuda.Stream] = {}


def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that is recorded."""
    if device not in _side:
        _side[device] = torch.cuda.Stream(device)
    return _side[device]


def _end_capture(side: torch.cuda.Stream) -> None:
    """Have PyTorch's random numbers know that a recording which failed is over: only one that ends well tells them."""
    graph = torch.cuda.CUDAGraph()
    with contextlib.suppress(Exception), torch.cuda.stream(side):
        some = torch.zeros(1, device=side.device)
        graph.capture_begin(capture_error_mode="thread_local")
        some.add_(1)
        graph.capture_end()
