"""Bound: a function of a plan for one signature of its arguments, in which nothing is left to decide.

What a tape holds is written as a function once more: runs of launches are one call of a C function, views are gone, results that nobody
outside sees share one buffer, and only what is not ours (attention, operators that no program covers) is called as before. That buffer is
taken from PyTorch's allocator at each call, so that calls on several streams and threads do not meet; the allocator mostly gives the same
memory again, and then no address has to be filled in.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from codetta.runtime.bind import strided
from codetta.runtime.function import VARIABLE, last_uses
from codetta.runtime.invocation import Address
from codetta.runtime.launcher import Launches, library
from codetta.runtime.tape import Called, Constant, Launched, Local, Recorded, Ref, Root, StatRef, Tape, UnboundError
from codetta.stat import Stat

ALIGNMENT = 256  # of results in the buffer that they share
KEPT = 4  # addresses of the buffer for which views are remembered


@dataclass
class _Text:
    """A line with the variables that it needs, which include tensors whose addresses it uses."""

    text: str
    names: set[str] = field(default_factory=set)


class Bound:
    """Called with the same arguments as the function that the tape is of, in a list that is emptied, and with their addresses."""

    def __init__(self, tape: Tape) -> None:
        if tape.why is not None:
            raise UnboundError(tape.why)
        launched = [step for step in tape.steps if isinstance(step, Launched)]
        if not launched:
            raise UnboundError("nothing is launched")
        self.roots, self.device, arguments = tape.roots, tape.device, tape.function.arguments
        inner = [root for root in tape.roots if root.is_slot and not root.returned]
        offsets, self.bytes = packed(inner)
        self.offsets = {root.number: offset for root, offset in zip(inner, offsets, strict=True)}
        # Addresses in the order in which the C function reads them: the shared buffer, arguments, then what comes later.
        given = [self.roots[number] for number in tape.given if self.roots[number].name in arguments]
        outer = [*given, *(root for root in tape.roots if root not in given and root.number not in self.offsets)]
        self.index = {root.number: 1 + at for at, root in enumerate(outer)}
        self._tensors = [arguments.index(root.name) for root in given]
        self._low_bits = (ctypes.c_uint8 * len(given))(*(root.begin & 15 for root in given))
        place = {root.number: self.index[root.number] for root in given}
        self._apart = [
            (place[a], place[b], self.roots[b].begin - self.roots[a].begin)
            for a, b in tape.shared
            if {a, b} <= set(place)
        ]
        self._zeros = [0] * (len(outer) - len(given))
        self._addresses = ctypes.c_uint64 * (1 + len(outer))
        self._check = library().codetta_aligned
        self.launches = Launches([step.invocation for step in launched], self._address)
        self.views: list[Recorded] = []
        self._known_views: dict[int, list[Any]] = {}
        self._constants: list[Any] = []
        self._own = self._owned(tape)
        self._read = _read_by_address(tape)
        self.source = self._written(tape)
        scope: dict[str, Any] = {
            "c": tape.objects, "k": self._constants, "torch": torch, "math": math, "Stat": Stat, "strided": strided, "launch": self.launches,
            "views": self._views, "device": self.device, "stream": _stream(self.device), "empty": torch.empty_strided,
        }  # fmt: skip
        exec(compile(self.source, "<codetta bound>", "exec"), scope)
        self._function: Callable[[list[Any], Any], tuple[Any, ...]] = scope["bound"]

    def addresses(self, args: list[Any]) -> Any:
        """Where the arguments lie, with room for more; None if they are aligned otherwise, or no longer share what they shared."""
        found = self._addresses(0, *[args[number].data_ptr() for number in self._tensors], *self._zeros)
        if not self._check(ctypes.byref(found, 8), self._low_bits, len(self._low_bits)):
            return None
        if any(found[b] - found[a] != apart for a, b, apart in self._apart):
            return None
        return found

    def __call__(self, args: list[Any], addresses: Any) -> tuple[Any, ...]:
        return self._function(args, addresses)

    # ---- places

    def _address(self, place: Address) -> tuple[int, int]:
        """Where the C function finds it: which address, and how far behind."""
        if place.root in self.offsets:
            return 0, self.offsets[place.root] + place.offset
        return self.index[place.root], place.offset

    def _anchor(self, root: int) -> str:
        return self.roots[root].name or f"v__own{root}"

    def _spelled(self, value: Recorded, returned: bool = False) -> str:
        """The value, made of what the function has. returned: it is no view, or nobody could write to it where gradients are needed."""
        match value:
            case Local():
                return value.name
            case Constant():
                if value.value is None or type(value.value) in (int, bool, str):
                    return repr(value.value)
                self._constants.append(value.value)
                return f"k[{len(self._constants) - 1}]"
            case StatRef():
                if value.partials.root in self.offsets:
                    return self._view(value)
                return f"Stat({self._spelled(value.partials)}, {value.how!r}, {value.width}, {value.total})"
        if value.root in self.offsets:
            return self._view(value)
        like, name = self._geometry(value.root), self._anchor(value.root)
        if like.dtype != value.dtype or value.offset % value.dtype.itemsize:
            raise UnboundError("memory is seen as another type")
        if not value.offset and (tuple(like.size()), tuple(like.stride())) == (value.size, value.stride):
            return name
        begin = value.offset // value.dtype.itemsize
        view = f"{name}.as_strided({value.size}, {value.stride}, {name}.storage_offset() + {begin})"
        return f"{view}.detach()" if returned else view

    def _geometry(self, root: int) -> Tensor:
        return self._own[root] if root in self._own else self.roots[root].like

    def _view(self, value: Recorded) -> str:
        for number, known in enumerate(self.views):
            if known == value:
                return f"t[{number}]"
        self.views.append(value)
        return f"t[{len(self.views) - 1}]"

    def _views(self, address: int) -> list[Any]:
        """Tensors in the shared buffer. They do not own it: the function does, and gives it back at its end."""
        found = self._known_views.get(address)
        if found is None:
            if len(self._known_views) >= KEPT:
                self._known_views.clear()
            storage = torch._C._construct_storage_from_data_pointer(address, self.device, self.bytes)
            with torch.inference_mode(False), torch.no_grad():  # a later call may be of another mode
                found = self._known_views[address] = [self._made(each, storage) for each in self.views]
        return found

    def _made(self, value: Recorded, storage: Any) -> Any:
        if isinstance(value, StatRef):
            return Stat(self._made(value.partials, storage), value.how, value.width, value.total)
        assert isinstance(value, Ref)
        begin = (self.offsets[value.root] + value.offset) // value.dtype.itemsize
        made = torch.empty(0, dtype=value.dtype, device=self.device)
        return made.set_(storage, begin, value.size, value.stride)

    # ---- text

    def _written(self, tape: Tape) -> str:
        names = tape.function.arguments
        here = set(names)  # variables that the function has at this point
        lines = [_Text(f"[{', '.join(names)}] = args", set(names)), _Text("args.clear()")] if names else []
        for line in tape.opening:
            lines.append(_Text(str(line), line.uses | line.makes))
            here |= line.makes
            for root in (self.roots[number] for number in tape.given):
                if root.name in line.makes:
                    lines.append(_Text(f"a[{self.index[root.number]}] = {root.name}.data_ptr()", {root.name}))
        body: list[_Text] = []
        pending, count = 0, 0  # launches that are yet to be made
        waiting: list[_Text] = []  # memory for them
        used: set[str] = set()

        def flush() -> None:
            nonlocal pending
            body.extend(waiting)
            if pending < count:
                body.append(_Text(f"launch({pending}, {count}, a, s)", set(used)))
            waiting.clear()
            used.clear()
            pending = count

        made_own: set[int] = set()

        def room(root: int) -> None:
            if root in self._own and root not in made_own:
                made_own.add(root)
                like, name = self._own[root], self._anchor(root)
                self._constants.append(like.dtype)
                text = f"{name} = empty({tuple(like.size())}, {tuple(like.stride())}, dtype=k[{len(self._constants) - 1}], device=device)"
                waiting.append(_Text(text, {name}))
                waiting.append(_Text(f"a[{self.index[root]}] = {name}.data_ptr()", {name}))

        for step in tape.steps:
            if isinstance(step, Launched):
                count += 1
                for number in step.roots:
                    room(number)
                    if number not in self.offsets:
                        used |= set(VARIABLE.findall(self._anchor(number)))
                continue
            for value in step.uses.values():
                for ref in _refs(value):
                    room(ref.root)
            flush()
            self._call(step, here, body)
        for value in tape.results:
            for ref in _refs(value):
                room(ref.root)
        flush()
        results = [self._spelled(value, returned=True) for value in tape.results]
        lines.append(_Text("s = stream()"))
        if self.offsets:
            lines.append(_Text(f"w = empty(({max(self.bytes, 1)},), (1,), dtype=torch.uint8, device=device)"))
            lines.append(_Text("a[0] = p = w.data_ptr()"))
        if self.views:
            lines.append(_Text("t = views(p)"))
        result = f"return ({', '.join(results)}{',' if len(results) == 1 else ''})"
        lines += [*body, _Text(result, set(VARIABLE.findall(result)))]
        return _function(lines)

    def _call(self, step: Called, here: set[str], body: list[_Text]) -> None:
        """A line as it was, behind what its variables are, and in front of what others want to know of its results."""
        for name, value in step.uses.items():
            if name in here:
                continue
            spelled = self._spelled(value)
            if spelled != name:
                body.append(_Text(f"{name} = {spelled}", {name, *VARIABLE.findall(spelled)}))
            here.add(name)
        body.append(_Text(str(step.line), step.line.uses | step.line.makes))
        here |= step.line.makes
        for root in self.roots:
            if root.number not in self._read or not any(
                isinstance(v, Ref | StatRef) and self._is_anchor(root, n, v) for n, v in step.made.items()
            ):
                continue
            (name,) = VARIABLE.findall(root.name)
            if root.name == name:  # kernels of others may lay out their results as they like
                self._constants.append(tuple(root.like.stride()))
                body.append(_Text(f"{name} = strided({name}, k[{len(self._constants) - 1}])", {name}))
            body.append(_Text(f"a[{self.index[root.number]}] = {root.name}.data_ptr()", {name}))

    @staticmethod
    def _is_anchor(root: Root, name: str, value: Recorded) -> bool:
        return root.name in (name, f"{name}.partials") and _refs(value)[0].root == root.number

    def _owned(self, tape: Tape) -> dict[int, Tensor]:
        """Memory for results, as tensors without any: in the shape in which they are returned, where that is all of it."""
        owned: dict[int, Tensor] = {}
        for value in tape.results:
            for ref in _refs(value):
                root = self.roots[ref.root]
                if not root.is_slot:
                    continue
                like = torch.empty_strided(ref.size, ref.stride, dtype=ref.dtype, device="meta")
                whole = (
                    not ref.offset
                    and like.untyped_storage().nbytes() == root.bytes
                    and like.numel() * like.itemsize == root.bytes
                )
                if whole:
                    owned[ref.root] = like
                else:
                    owned.setdefault(
                        ref.root, torch.empty(root.bytes // ref.dtype.itemsize, dtype=ref.dtype, device="meta")
                    )
        return owned


def _read_by_address(tape: Tape) -> set[int]:
    """Results of other lines that are read otherwise than by their names."""
    values = [value for step in tape.steps if isinstance(step, Called) for value in step.uses.values()] + tape.results
    refs = [ref for value in values for ref in _refs(value)]
    launched = {root for step in tape.steps if isinstance(step, Launched) for root in step.roots}
    viewed = {
        ref.root for ref in refs
        if ref.offset or (ref.size, ref.stride) != (tuple(tape.roots[ref.root].like.size()), tuple(tape.roots[ref.root].like.stride()))
    }  # fmt: skip
    return {root for root in launched | viewed if not tape.roots[root].is_slot}


def packed(roots: Sequence[Root]) -> tuple[list[int], int]:
    """Offsets in one buffer, such that what is in use at the same time does not overlap, and the bytes of the buffer."""
    offsets: dict[int, int] = {}
    placed: list[tuple[Root, int, int]] = []
    for root in sorted(roots, key=lambda each: (-each.bytes, each.first)):
        size = -(-max(root.bytes, 1) // ALIGNMENT) * ALIGNMENT
        taken = sorted(
            (begin, end) for other, begin, end in placed if other.first <= root.last and root.first <= other.last
        )
        at = 0
        for begin, end in taken:
            if at + size <= begin:
                break
            at = max(at, end)
        offsets[root.number] = at
        placed.append((root, at, at + size))
    return [offsets[root.number] for root in roots], max((end for _, _, end in placed), default=0)


def _refs(value: Recorded) -> list[Ref]:
    match value:
        case Ref():
            return [value]
        case StatRef():
            return [value.partials]
    return []


def _function(lines: list[_Text]) -> str:
    gone = last_uses([line.names for line in lines])
    text = ["def bound(args, a):"]
    for number, (line, names) in enumerate(zip(lines, gone, strict=True)):
        text.append(f"    {line.text}")
        if names and number < len(lines) - 1:
            text.append(f"    del {', '.join(names)}")
    return "\n".join(text)


def _stream(device: torch.device) -> Callable[[], int]:
    if device.type != "cuda":
        return lambda: 0
    index = torch.cuda.current_device() if device.index is None else device.index
    return lambda: torch._C._cuda_getCurrentRawStream(index)
