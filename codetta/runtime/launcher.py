"""Launcher: invocations packed into memory, and the C function that launches them one after another (launcher.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from codetta.backends import cpu_build
from codetta.errors import CodettaError
from codetta.runtime.cache import Cache, key_of
from codetta.runtime.invocation import Address, Argument, Invocation, Number, TensorMap

SOURCE = Path(__file__).with_name("launcher.c")
FLAGS = ("-x", "c", "-std=c11", "-O2", "-fPIC", "-fvisibility=hidden", "-shared", "-D_GNU_SOURCE")
MAP_BYTES, MAP_ALIGNMENT = 128, 64  # CUtensorMap
SAID = {
    -1: "no memory for packed matrices",
    -2: "the CUDA driver lacks the functions that launch",
    -3: "too many arguments",
}

Place = Callable[[Address], tuple[int, int]]  # which of the addresses that come with the call, and bytes behind it


class _Pointer(ctypes.Structure):
    _fields_ = [
        ("offset", ctypes.c_int64),
        ("place", ctypes.c_void_p),
        ("root", ctypes.c_uint32),
        ("index", ctypes.c_uint32),
    ]


class _Map(ctypes.Structure):
    _fields_ = [
        ("offset", ctypes.c_int64), ("address", ctypes.c_uint64), ("map", ctypes.c_void_p), ("sizes", ctypes.c_uint64 * 5),
        ("strides", ctypes.c_uint64 * 5), ("box", ctypes.c_uint32 * 5), ("rank", ctypes.c_uint32), ("root", ctypes.c_uint32),
        ("element", ctypes.c_int32), ("swizzle", ctypes.c_int32), ("fill", ctypes.c_int32),
    ]  # fmt: skip


class _Launch(ctypes.Structure):
    _fields_ = [
        ("function", ctypes.c_void_p), ("plan", ctypes.c_void_p), ("arguments", ctypes.c_void_p), ("pointers", ctypes.c_void_p),
        ("maps", ctypes.c_void_p), ("count", ctypes.c_uint32), ("pointer_count", ctypes.c_uint32), ("map_count", ctypes.c_uint32),
        ("grid", ctypes.c_uint32 * 3), ("threads", ctypes.c_uint32), ("shared", ctypes.c_uint32), ("dependent", ctypes.c_uint32),
    ]  # fmt: skip


class Launches:
    """Invocations in the memory that the C function walks over. Called with a range of them, the addresses of roots and a stream."""

    def __init__(self, invocations: Sequence[Invocation], place: Place) -> None:
        self._kept: list[Any] = []  # memory that the structures point to
        self.owners = [each.keeps for each in invocations]
        self._table = (_Launch * max(len(invocations), 1))(*(self._packed(each, place) for each in invocations))
        self._launch = library().codetta_launch
        self._address = ctypes.addressof(self._table)

    def __call__(self, first: int, last: int, roots: Any, stream: int) -> None:
        failed = self._launch(self._address, first, last, roots, stream)
        if failed:
            raise CodettaError(
                f"a launch of a bound plan failed: {SAID.get(failed, f'error {failed} of the CUDA driver')}"
            )

    def _packed(self, each: Invocation, place: Place) -> _Launch:
        return self._gpu(each, place) if each.on_gpu else self._cpu(each, place)

    def _cpu(self, each: Invocation, place: Place) -> _Launch:
        values = (ctypes.c_int64 * len(each.arguments))()
        pointers = []
        for index, argument in enumerate(each.arguments):
            if isinstance(argument, Number):
                values[index] = argument.value
            else:
                root, offset = place(_address(argument))
                pointers.append(_Pointer(offset, None, root, index))
        table = self._table_of(_Pointer, pointers)
        return _Launch(
            function=each.function, plan=each.plan, arguments=self._keep(values), pointers=table, count=len(values),
            pointer_count=len(pointers),
        )  # fmt: skip

    def _gpu(self, each: Invocation, place: Place) -> _Launch:
        sizes = [
            MAP_BYTES if isinstance(a, TensorMap) else a.size if isinstance(a, Number) else 8 for a in each.arguments
        ]
        begins, end = [], 0
        for argument, size in zip(each.arguments, sizes, strict=True):
            step = MAP_ALIGNMENT if isinstance(argument, TensorMap) else 8
            begins.append(-(-end // step) * step)
            end = begins[-1] + size
        room = (ctypes.c_char * (end + MAP_ALIGNMENT))()
        base = -(-self._keep(room) // MAP_ALIGNMENT) * MAP_ALIGNMENT
        pointers, maps = [], []
        for argument, begin, size in zip(each.arguments, begins, sizes, strict=True):
            if isinstance(argument, Number):
                ctypes.memmove(base + begin, argument.value.to_bytes(size, "little", signed=argument.value < 0), size)
            elif isinstance(argument, TensorMap):
                root, offset = place(_address(argument.base))
                maps.append(
                    _Map(
                        offset, 0, base + begin, (ctypes.c_uint64 * 5)(*argument.sizes), (ctypes.c_uint64 * 5)(*argument.strides),
                        (ctypes.c_uint32 * 5)(*argument.box), len(argument.sizes), root, argument.element, argument.swizzle,
                        argument.fill,
                    )
                )  # fmt: skip
            else:
                root, offset = place(_address(argument))
                pointers.append(_Pointer(offset, base + begin, root, 0))
        addresses = (ctypes.c_void_p * max(len(begins), 1))(*(base + begin for begin in begins))
        return _Launch(
            function=each.function, arguments=self._keep(addresses), pointers=self._table_of(_Pointer, pointers),
            maps=self._table_of(_Map, maps), count=len(begins), pointer_count=len(pointers), map_count=len(maps),
            grid=(ctypes.c_uint32 * 3)(*each.grid), threads=each.threads, shared=each.shared, dependent=each.dependent,
        )  # fmt: skip

    def _table_of(self, kind: Any, entries: Sequence[ctypes.Structure]) -> int | None:
        return self._keep((kind * len(entries))(*entries)) if entries else None

    def _keep(self, memory: Any) -> int:
        self._kept.append(memory)
        return ctypes.addressof(memory)


def _address(argument: Argument) -> Address:
    assert isinstance(argument, Address), "an invocation is packed once its tensors are addresses"
    return argument


@cache
def library() -> ctypes.CDLL:
    """The compiled C file; raises BuildError where there is no compiler."""
    tools = cpu_build.toolchain()

    def build(path: Path) -> None:
        cpu_build.run([*tools.command, *FLAGS, str(SOURCE), "-o", str(path), "-ldl", "-lpthread"])

    key = key_of(source=SOURCE.read_text(), command=tools.command, version=tools.version, flags=FLAGS)
    found = cpu_build.open_library(Cache("launcher").get_file(key, build, suffix=".so"))
    found.codetta_launch.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]
    found.codetta_aligned.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int]
    found.codetta_use.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    return found
