"""OneKernel: phases of a plan as something to call with tensors: their memory, their table of addresses, their launch."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from codetta.backends import cuda_phases, nvrtc
from codetta.capture.appends import ROWS
from codetta.errors import ArgumentError
from codetta.phases import Life
from codetta.plan.target import COPY_ALIGNMENT, Target, device_target, unit_count
from codetta.runtime.launch import as_stored
from codetta.stat import Stat
from codetta.steps import Attend, Multiply, Phase, Vector, Whole

PACKET = 8  # bytes: two numbers of a vector, or a sum, and the number of the step


@dataclass(frozen=True)
class Entry:
    """One place in the table: what a phase finds there, by its name."""

    phase: Phase
    name: str

    @property
    def kind(self) -> str:
        return self.name.split()[0]

    @property
    def operand(self) -> str:
        return self.name.split()[1]

    @property
    def vector(self) -> Vector | None:
        """The vector that is handed over there, if it is one."""
        phase = self.phase
        if isinstance(phase, Attend):
            named = {"query": phase.query, "new_key": phase.new[0], "new_value": phase.new[1], "result": phase.result}
            return named.get(self.name)
        match self.kind:
            case "a":
                found = phase.a
            case "stat" | "operand":
                found = phase.operands[self.operand]
            case "send" | "sink":
                found = phase.sends[self.operand]
            case _:
                return None
        return found if isinstance(found, Vector) else None

    @property
    def context(self) -> Entry:
        """Of a cache, where its number of positions stands."""
        return Entry(self.phase, "context" if self.kind == "keys" else f"context {self.operand}")

    @property
    def is_given(self) -> bool:
        """Whether a tensor must be passed for it."""
        made = ("count", "keep", "parts", "tops", "context")
        return self.vector is None and self.kind not in made


@dataclass
class Look:
    """How kernels are made that somebody wants to look at: with another ring than usual, with clocks that they read."""

    ring: cuda_phases.Ring | None = None
    timeline: bool = False
    kernels: list[OneKernel] = field(default_factory=list)  # that were made meanwhile


_look: ContextVar[Look | None] = ContextVar("look", default=None)


@contextmanager
def looked_at(ring: cuda_phases.Ring | None = None, timeline: bool = False) -> Iterator[Look]:
    look = Look(ring, timeline)
    token = _look.set(look)
    try:
        yield look
    finally:
        _look.reset(token)


class OneKernel:
    """The phases of a step as one launch. Its memory is its own: calls follow each other on one stream."""

    def __init__(self, whole: Whole, device: torch.device, target: Target | None = None, blocks: int = 0) -> None:
        """target and blocks: those of a device that is not here, to see what would be compiled for it."""
        self.whole, self.device = whole, device
        target = target or device_target(device)
        assert target is not None
        self.target = target
        self.blocks = blocks or unit_count(device)
        widths = [each.program.k for each in whole.products]
        heads = [each.result.cols // each.heads for each in whole.phases if isinstance(each, Attend)]
        look = _look.get() or Look()
        self.ring = look.ring or cuda_phases.ring_for(widths)
        self.room, self.timeline = cuda_phases.room_for(widths, heads), look.timeline
        self.life = Life(whole.phases)
        phases = [written(each, self.ring.slot, self.blocks) for each in whole.phases]
        self.source = self.text(phases)
        self.entries = [
            Entry(phase, name) for phase, text in zip(whole.phases, phases, strict=True) for name in text.names
        ]
        self.index = {entry: at for at, entry in enumerate(self.entries)}
        self.numbers = {phase: number for number, phase in enumerate(whole.phases)}
        self.given = [each for each in self.entries if each.is_given]
        self.keeps = [each for each in self.entries if each.kind == "keep"]
        self.memory: Tensor | None = None
        look.kernels.append(self)

    def text(self, phases: list[cuda_phases.Phase]) -> str:
        return cuda_phases.kernel(phases, self.ring, self.room, self.blocks, self.target, self.timeline)

    def build(self) -> None:
        nvrtc.compiled(self.source, self.target)

    @cached_property
    def kernel(self) -> Callable[..., None]:
        return nvrtc.Kernel(self.source, "whole_step", self.target, self.target.shared, self.device)

    @property
    def stamps(self) -> Tensor:
        """Of the last call (phases, blocks, warps, 4): nanoseconds when a warp began to wait, had what it waited for and was done, and how
        many pieces of weights were ahead of it."""
        return self.counter[cuda_phases.COUNTERS :].view(self.stamps_shape)

    @property
    def stamps_shape(self) -> tuple[int, ...]:
        return len(self.whole.phases), self.blocks, cuda_phases.WARPS, cuda_phases.STAMPS

    @property
    def bytes(self) -> int:
        """Of the memory that phases hand over in."""
        return self.places[1]

    def __call__(self, given: Sequence[Tensor | Stat]) -> list[Tensor]:
        """given: what `self.given` names, in order. Returns what `self.keeps` names."""
        if self.memory is None:
            self.memory = torch.zeros(self.bytes // 8, dtype=torch.int64, device=self.device)
            words = math.prod(self.stamps_shape) if self.timeline else 0
            self.counter = torch.zeros(cuda_phases.COUNTERS + words, dtype=torch.int32, device=self.device)
        read = list(map(_as_read, self.given, given))
        results = [self._result(each) for each in self.keeps]
        base = self.memory.data_ptr()
        table = [0 if at is None else base + at for at in self.offsets]
        for entry, tensor in zip([*self.given, *self.keeps], [*read, *results], strict=True):
            at = self.index[entry]
            if isinstance(tensor, Stat):
                table[at : at + 2] = tensor.partials.data_ptr(), tensor.partials.numel()  # its count stands behind it
            else:
                table[at] = tensor.data_ptr()
            if entry.kind in ("cache", "keys") and isinstance(tensor, Tensor):
                table[self.index[entry.context]] = tensor.shape[ROWS]
        arguments = (ctypes.c_uint64 * len(table))(*table), ctypes.c_void_p(self.counter.data_ptr())
        self.kernel(self.blocks, cuda_phases.THREADS, arguments)
        return results

    def _result(self, entry: Entry) -> Tensor:
        assert isinstance(entry.phase, Multiply)
        store = next(each for each in entry.phase.program.stores if each.name == entry.operand)
        return torch.empty((1, store.cols), dtype=store.dtype, device=self.device)

    @cached_property
    def offsets(self) -> list[int | None]:
        """Of each entry, where it lies in our memory, with how many phases ago it was sent; None for what each call brings along."""
        places, _ = self.places
        found: list[int | None] = []
        for entry in self.entries:
            vector = entry.vector
            if vector is not None:
                found.append(places[vector] + self.numbers[entry.phase] - self.life.made[vector])
            else:
                found.append(places.get(entry))
        return found

    @cached_property
    def places(self) -> tuple[dict[Vector | Entry, int], int]:
        """Where vectors and parts of attention lie, and how much that is in all. What all are done with makes room for others: the same
        few lines are sent and read again and again, and stay in the cache of the device."""
        places: dict[Vector | Entry, int] = {}
        free: list[tuple[int, int, int]] = []  # from which phase on, bytes, place
        end = 0

        def take(key: Vector | Entry, size: int, made: int, released: int) -> None:
            nonlocal end
            size = -(-size // 128) * 128
            fitting = [each for each in free if each[0] <= made and each[1] == size]
            if fitting:
                free.remove(fitting[0])
                place = fitting[0][2]
            else:
                place, end = end, end + size
            places[key] = place
            free.append((released, size, place))

        for entry in self.entries:
            phase, vector = entry.phase, entry.vector
            number = self.numbers[phase]
            if vector is not None and vector not in places and self.life.made[vector] == number:
                count = vector.cols // 2 if vector.cols else 2 * self.blocks
                take(vector, count * PACKET, number, self.life.released(self.life.read[vector]))
            elif isinstance(phase, Attend) and entry.kind in ("parts", "tops"):
                pairs = cuda_phases.pairs_of(phase.heads, phase.caches[0].meta["val"].shape[1])
                each = phase.result.cols // phase.heads if entry.kind == "parts" else 2
                parts = cuda_phases.joined_of(cuda_phases.parts_of(pairs, self.blocks))
                size = phase.heads * parts * each * PACKET
                take(entry, size, number, self.life.released(number))
        return places, end


def written(phase: Phase, slot: int, blocks: int) -> cuda_phases.Phase:
    """The text of a phase."""
    if isinstance(phase, Attend):
        _, groups, _, head = phase.caches[0].meta["val"].shape
        return cuda_phases.attention(phase.heads, groups, head, phase.window, phase.scale, slot, blocks)
    return cuda_phases.product(phase.program, frozenset(phase.sends), frozenset(phase.keeps))


def _as_read(entry: Entry, given: Tensor | Stat) -> Tensor | Stat:
    """A tensor as a phase reads it: rows that follow each other, at addresses that are copied from."""
    if isinstance(given, Stat):
        return given
    if entry.kind == "cache" or isinstance(entry.phase, Attend):
        if given.data_ptr() % COPY_ALIGNMENT and entry.kind != "places":
            raise ArgumentError(
                "cache", f"begins at {given.data_ptr():#x}", f"pass one at a multiple of {COPY_ALIGNMENT} bytes"
            )
        return given
    if entry.kind == "weight":
        given = as_stored(given, entry.phase.program.products[int(entry.operand)])
    given = given.contiguous()
    return given.clone() if given.data_ptr() % COPY_ALIGNMENT else given
