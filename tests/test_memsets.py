"""Memsets of a recorded graph: what becomes of the nodes, with a driver that is none."""

from __future__ import annotations

import ctypes
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import triton

from codetta.runtime import memsets
from codetta.runtime.memsets import KERNEL, LARGEST, MEMSET, PTX, DriverError, replaced

GRAPH, FUNCTION = 77, 78


@dataclass
class Driver:
    """Graphs of the driver as dictionaries: nodes by their handles, edges with their data."""

    nodes: dict[int, Any] = field(default_factory=dict)  # memsets by their parameters, kernels by what they fill
    edges: dict[tuple[int, int], int] = field(default_factory=dict)
    failing: tuple[str, int] = ("", 0)  # a function, and how many of its calls are well

    def __getattribute__(self, name: str) -> Any:
        failing, left = object.__getattribute__(self, "failing")
        if name == failing:
            self.failing = (failing, left - 1)
            if left <= 0:
                return lambda *given: 999
        return object.__getattribute__(self, name)

    def cuGraphGetNodes(self, graph: Any, out: Any, count: Any) -> int:  # noqa: N802
        assert graph.value == GRAPH
        return self._give(list(self.nodes), out, count)

    def cuGraphNodeGetType(self, node: Any, out: Any) -> int:  # noqa: N802
        out._obj.value = MEMSET if isinstance(self.nodes[node.value], memsets._Memset) else KERNEL
        return 0

    def cuGraphMemsetNodeGetParams(self, node: Any, out: Any) -> int:  # noqa: N802
        ctypes.memmove(ctypes.addressof(out._obj), ctypes.addressof(self.nodes[node.value]), ctypes.sizeof(out._obj))
        return 0

    def cuGraphNodeGetDependencies_v2(self, node: Any, out: Any, edges: Any, count: Any) -> int:  # noqa: N802
        found = {a: data for (a, b), data in self.edges.items() if b == node.value}
        self._give(list(found.values()), edges, count)
        return self._give(list(found), out, count)

    def cuGraphNodeGetDependentNodes_v2(self, node: Any, out: Any, edges: Any, count: Any) -> int:  # noqa: N802
        found = {b: data for (a, b), data in self.edges.items() if a == node.value}
        self._give(list(found.values()), edges, count)
        return self._give(list(found), out, count)

    def cuGraphAddKernelNode_v2(self, out: Any, graph: Any, others: Any, count: Any, given: Any) -> int:  # noqa: N802
        kernel = given._obj
        places = ctypes.cast(kernel.parameters, ctypes.POINTER(ctypes.c_void_p))
        kinds = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32)
        values = tuple(kind.from_address(places[at]).value for at, kind in enumerate(kinds))
        assert kernel.function == FUNCTION and others is None and not count.value
        assert kernel.grid[0] * kernel.block[0] >= values[1]
        out._obj.value = max(self.nodes) + 1
        self.nodes[out._obj.value] = values
        return 0

    def cuGraphAddDependencies_v2(self, graph: Any, begins: Any, ends: Any, edges: Any, count: Any) -> int:  # noqa: N802
        for begin, end, data in zip(begins, ends, edges, strict=True):
            self.edges[begin, end] = data
        return 0

    def cuGraphDestroyNode(self, node: Any) -> int:  # noqa: N802
        del self.nodes[node.value]
        self.edges = {ends: data for ends, data in self.edges.items() if node.value not in ends}
        return 0

    @staticmethod
    def _give(values: list[int], out: Any, count: Any) -> int:
        count._obj.value = len(values)
        for at, value in enumerate(values if out is not None else ()):
            out[at] = value
        return 0


def graph() -> Driver:
    """1 -> 2 (memset) -> 3, 4; 4 -> 5 (a large one), 6 (of rows)."""
    small, large, rows = (
        memsets._Memset(4096, 0, 7, 4, 300, 1),
        memsets._Memset(0, 0, 0, 4, LARGEST, 1),
        memsets._Memset(0, 64, 0, 1, 8, 2),
    )
    nodes = {1: "kernel", 2: small, 3: "kernel", 4: "kernel", 5: large, 6: rows}
    return Driver(nodes, {(1, 2): 5, (2, 3): 6, (2, 4): 7, (4, 5): 0, (4, 6): 0})


def test_a_small_memset_becomes_a_kernel() -> None:
    driver = graph()
    large, rows = driver.nodes[5], driver.nodes[6]
    assert replaced(driver, GRAPH, FUNCTION) == 1
    assert driver.nodes == {1: "kernel", 3: "kernel", 4: "kernel", 5: large, 6: rows, 7: (4096, 300, 7, 4)}
    assert driver.edges == {(1, 7): 5, (7, 3): 6, (7, 4): 7, (4, 5): 0, (4, 6): 0}
    assert replaced(driver, GRAPH, FUNCTION) == 0


@pytest.mark.parametrize(
    "failing",
    [
        ("cuGraphGetNodes", 0), ("cuGraphNodeGetType", 1), ("cuGraphMemsetNodeGetParams", 0), ("cuGraphNodeGetDependencies_v2", 1),
        ("cuGraphNodeGetDependentNodes_v2", 0), ("cuGraphAddKernelNode_v2", 0), ("cuGraphAddDependencies_v2", 0),
        ("cuGraphAddDependencies_v2", 1),
    ],
)  # fmt: skip
def test_a_driver_that_refuses_leaves_the_graph_as_it_was(failing: tuple[str, int]) -> None:
    driver, before = graph(), graph()
    driver.failing = failing
    with pytest.raises(DriverError, match=failing[0]):
        replaced(driver, GRAPH, FUNCTION)
    assert set(driver.nodes) == set(before.nodes) and driver.edges == before.edges


def test_a_kernel_that_stays_beside_the_graph_is_an_error() -> None:
    driver = graph()
    driver.failing = ("cuGraphAddDependencies_v2", 1)
    driver.cuGraphDestroyNode = lambda node: 1  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="cannot be mended"):
        replaced(driver, GRAPH, FUNCTION)


def test_the_kernel_assembles(tmp_path: Path) -> None:
    text = tmp_path / "fill.ptx"
    text.write_bytes(PTX)
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    for arch in ("sm_80", "sm_90", "sm_100", "sm_120"):
        subprocess.run([str(assembler), f"-arch={arch}", str(text), "-o", str(tmp_path / arch)], check=True)
