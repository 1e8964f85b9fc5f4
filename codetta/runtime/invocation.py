"""Invocation: a launch as data, so that it can be made again with other addresses and nothing else looked at.

A backend describes what it has just launched; bound plans (runtime/bound.py) pack such descriptions into memory that one C function walks
over (runtime/launcher.c). This file knows no backend and launches nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Number:
    """An integer argument of so many bytes."""

    value: int
    size: int


@dataclass(frozen=True)
class Address:
    """What stands for a tensor once nobody is to hold its memory: a root, whose address comes with the call, and bytes behind it."""

    root: int
    offset: int


@dataclass(frozen=True, eq=False)
class TensorMap:
    """A matrix as the copy engine addresses it: the arguments of cuTensorMapEncodeTiled, innermost dimension first."""

    base: Tensor | Address
    element: int  # the driver's number of the data type
    sizes: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, of all dimensions but the innermost
    box: tuple[int, ...]
    swizzle: int
    fill: int


Argument = Tensor | Address | Number | TensorMap


@dataclass(frozen=True, eq=False)
class Invocation:
    """A kernel of a GPU, or a function of a CPU, with its arguments in order; a tensor stands for its address.

    A function of a CPU is called with `plan` and the arguments as one array of 64-bit integers.
    """

    function: int  # the driver's handle, or an address
    arguments: Sequence[Argument]
    keeps: object  # what owns the function
    plan: int = 0
    grid: tuple[int, int, int] = (0, 0, 0)  # without blocks: a function of the CPU
    threads: int = 0
    shared: int = 0
    dependent: bool = False  # may start before the kernel ahead of it has ended

    @property
    def on_gpu(self) -> bool:
        return self.threads > 0


class _Listener(threading.local):
    heard: list[Invocation | None] | None = None


_listener = _Listener()


@contextmanager
def listening() -> Iterator[list[Invocation | None]]:
    """What this thread launches meanwhile, in order; None for a launch that cannot be made again as data."""
    before, _listener.heard = _listener.heard, []
    try:
        yield _listener.heard
    finally:
        _listener.heard = before


def announce(describe: Callable[[], Invocation | None]) -> None:
    """Tell a listener what was launched. Costs one look where nobody listens."""
    if _listener.heard is not None:
        _listener.heard.append(describe())
