"""Memsets of a recorded graph as kernels.

The driver launches a graph of kernels that follow one another in constant time: 5 us for 93 of them. With a memset behind each sixth kernel, as
cuDNN's attention has it, the same graph takes 25 to 50 us, and everything else that the host does for the call up to twice as long (one H200,
driver 580, 2026-11-20, docs/log.md). So small memsets are replaced before a graph is instantiated. The kernel is in the driver's own
assembly: nothing has to be installed to compile it.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

KERNEL, MEMSET = 0, 2  # the driver's numbers of kinds of nodes
LARGEST = 1 << 20  # bytes; larger ones keep the copy engine
THREADS = 256
PTX = b"""
.version 7.0
.target sm_80
.address_size 64
.visible .entry fill(.param .u64 p_to, .param .u64 p_count, .param .u32 p_value, .param .u32 p_size)
{
    .reg .pred %out, %is;
    .reg .b16 %half;
    .reg .b32 %value, %size, %block, %width, %thread;
    .reg .b64 %to, %count, %at, %wide;
    ld.param.u64 %to, [p_to];
    ld.param.u64 %count, [p_count];
    ld.param.u32 %value, [p_value];
    ld.param.u32 %size, [p_size];
    cvta.to.global.u64 %to, %to;
    mov.u32 %block, %ctaid.x;
    mov.u32 %width, %ntid.x;
    mov.u32 %thread, %tid.x;
    mul.wide.u32 %at, %block, %width;
    cvt.u64.u32 %wide, %thread;
    add.u64 %at, %at, %wide;
    setp.ge.u64 %out, %at, %count;
    @%out ret;
    cvt.u64.u32 %wide, %size;
    mul.lo.u64 %at, %at, %wide;
    add.u64 %to, %to, %at;
    cvt.u16.u32 %half, %value;
    setp.eq.u32 %is, %size, 1;
    @%is st.global.u8 [%to], %half;
    setp.eq.u32 %is, %size, 2;
    @%is st.global.u16 [%to], %half;
    setp.eq.u32 %is, %size, 4;
    @%is st.global.u32 [%to], %value;
    ret;
}
"""


class _Memset(ctypes.Structure):
    """CUDA_MEMSET_NODE_PARAMS."""

    _fields_ = [
        ("to", ctypes.c_uint64), ("pitch", ctypes.c_size_t), ("value", ctypes.c_uint32), ("size", ctypes.c_uint32),
        ("width", ctypes.c_size_t), ("height", ctypes.c_size_t),
    ]  # fmt: skip


class _Kernel(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = [
        ("function", ctypes.c_void_p), ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("shared", ctypes.c_uint32),
        ("parameters", ctypes.c_void_p), ("extra", ctypes.c_void_p), ("kernel", ctypes.c_void_p), ("context", ctypes.c_void_p),
    ]  # fmt: skip


class DriverError(Exception):
    """The driver refused a call; the text names it."""


def memsets_become_kernels(graph: torch.cuda.CUDAGraph, device: torch.device) -> int:
    """How many were replaced in a graph that is kept and not instantiated yet. Where the driver is another one than is known here, none:
    the graph computes the same with its memsets."""
    if torch.version.cuda is None:
        return 0
    try:
        with torch.cuda.device(device):
            return replaced(_driver(), graph.raw_cuda_graph(), _fill(device))
    except (OSError, AttributeError, DriverError):
        return 0


def replaced(driver: Any, graph: int, function: int) -> int:
    """The same on the driver's own graph. A memset goes when its kernel is in its place; where that fails, the kernel goes."""
    count = 0
    for node in _nodes(driver, graph):
        kind, memset = ctypes.c_int(), _Memset()
        _call(driver, "cuGraphNodeGetType", node, ctypes.byref(kind))
        if kind.value != MEMSET:
            continue
        _call(driver, "cuGraphMemsetNodeGetParams", node, ctypes.byref(memset))
        if memset.height != 1 or memset.width * memset.size > LARGEST:
            continue
        before = _neighbours(driver, "cuGraphNodeGetDependencies_v2", node)
        behind = _neighbours(driver, "cuGraphNodeGetDependentNodes_v2", node)
        made = _add(driver, graph, function, memset)
        try:
            _connect(driver, graph, before[0], _alike(made, before[0]), before[1])
            _connect(driver, graph, _alike(made, behind[0]), behind[0], behind[1])
        except (AttributeError, DriverError):  # it would run beside what it is to run before
            if driver.cuGraphDestroyNode(made):
                raise RuntimeError("a recorded graph cannot be mended") from None
            raise
        _call(driver, "cuGraphDestroyNode", node)
        count += 1
    return count


def _alike(node: ctypes.c_void_p, others: Any) -> Any:
    """The node, as often as there are others."""
    return (ctypes.c_void_p * len(others))(*[node.value] * len(others))


def _connect(driver: Any, graph: int, begins: Any, ends: Any, edges: Any) -> None:
    if len(edges):
        count = ctypes.c_size_t(len(edges))
        _call(driver, "cuGraphAddDependencies_v2", ctypes.c_void_p(graph), begins, ends, edges, count)


def _nodes(driver: Any, graph: int) -> list[ctypes.c_void_p]:
    count = ctypes.c_size_t()
    _call(driver, "cuGraphGetNodes", ctypes.c_void_p(graph), None, ctypes.byref(count))
    found = (ctypes.c_void_p * count.value)()
    _call(driver, "cuGraphGetNodes", ctypes.c_void_p(graph), found, ctypes.byref(count))
    return [ctypes.c_void_p(each) for each in found]


def _neighbours(driver: Any, name: str, node: ctypes.c_void_p) -> tuple[Any, Any]:
    """The nodes on one side, and what is known of the edges to them: 8 bytes each."""
    count = ctypes.c_size_t()
    _call(driver, name, node, None, None, ctypes.byref(count))
    found, edges = (ctypes.c_void_p * count.value)(), (ctypes.c_uint64 * count.value)()
    if count.value:
        _call(driver, name, node, found, edges, ctypes.byref(count))
    return found, edges


def _add(driver: Any, graph: int, function: int, memset: _Memset) -> ctypes.c_void_p:
    """A node of the kernel that does what the memset does; nothing waits for it yet."""
    values = (
        ctypes.c_uint64(memset.to), ctypes.c_uint64(memset.width), ctypes.c_uint32(memset.value), ctypes.c_uint32(memset.size),
    )  # fmt: skip
    places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(each) for each in values))
    kernel = _Kernel(
        function=function, grid=(-(-memset.width // THREADS), 1, 1), block=(THREADS, 1, 1), parameters=ctypes.addressof(places)
    )  # fmt: skip
    made = ctypes.c_void_p()
    _call(
        driver, "cuGraphAddKernelNode_v2", ctypes.byref(made), ctypes.c_void_p(graph), None, ctypes.c_size_t(0), ctypes.byref(kernel)
    )  # fmt: skip
    return made


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@cache
def _fill(device: torch.device) -> int:
    """The kernel, on the thread's current device."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    _call(_driver(), "cuModuleLoadData", ctypes.byref(module), PTX)
    _call(_driver(), "cuModuleGetFunction", ctypes.byref(function), module, b"fill")
    assert function.value is not None
    return function.value


def _call(driver: Any, name: str, *arguments: object) -> None:
    failed = getattr(driver, name)(*arguments)
    if failed:
        raise DriverError(f"{name}: error {failed} of the CUDA driver")
