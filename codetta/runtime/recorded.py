"""A function that is launched from a recording: on a GPU, one call instead of one for each kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

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
    """

    def __init__(self, function: Callable[[], Tensor], kept: Sequence[Tensor]) -> None:
        self.function, self.kept = function, kept
        self.graph: torch.cuda.CUDAGraph | None = None
        self.result: Tensor | None = None

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
        before = [each.clone() for each in self.kept]
        stream = torch.cuda.Stream(self.kept[0].device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM):
                self.function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with own_workspaces(), torch.cuda.graph(graph):
            self.result = self.function()
        for each, was in zip(self.kept, before, strict=True):
            each.copy_(was)
        self.graph = graph
