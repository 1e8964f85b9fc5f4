"""The warp-specialised loops: which class writes which."""

from __future__ import annotations

from codetta.backends.gluon_attached import Attached
from codetta.backends.gluon_detached import Detached
from codetta.backends.gluon_kernel import Kernel, block_of, descriptors, kernel_parameters, shared_layout
from codetta.plan.tile import Tile
from codetta.program import Program

LOOPS: dict[str, type[Kernel]] = {"specialised": Attached, "detached": Detached}

__all__ = ["block_of", "descriptors", "kernel_parameters", "launch_registers", "shared_layout", "source"]


def source(program: Program, tile: Tile) -> str:
    """The kernel module's source."""
    return LOOPS[tile.loop](program, tile).source()


def launch_registers(tile: Tile) -> int:
    return LOOPS[tile.loop].launch_registers
