"""Hardware facts as data. Architecture numbers appear in this file and nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

COPY_ALIGNMENT = 16  # bytes, of bases and strides that the copy engines take


@dataclass(frozen=True)
class Target:
    """What tile choice and code generation need to know about one kind of device."""

    name: str
    vendor: str  # cuda or hip
    arch: int | str  # as Triton's GPUTarget names it
    warp: int  # threads
    shared: int  # bytes of shared memory that one block can have
    registers: int  # 32-bit registers per thread at most
    # Of the common part, for predictions (sm_90: measured on an H200, else published):
    units: int  # multiprocessors
    read_tbs: float  # terabytes a second from memory, and
    matmul_tflops: float  # bf16 operations a second
    bulk_copy: bool  # tensor descriptors are copied by hardware
    warpgroups: bool  # asynchronous matrix instructions of four warps (wgmma)
    fp8: bool  # converts fp8 e4m3 in hardware
    # Epilogues whose estimated registers stay below this share of the register file do not spill: found by compiling the
    # library for each target (tests/test_compile.py holds it).
    headroom: float = 0.95

    def registers_for(self, warps: int) -> int:
        """Registers that a thread of such a block can have."""
        if self.vendor == "cuda":
            return min(self.registers, 65_536 // (warps * self.warp))
        # Four SIMDs share the warps of a block; a SIMD's file is divided among those that it has.
        return self.registers // max(warps // 4, 1)

    @property
    def starts_early(self) -> bool:
        """Whether a kernel can start while the one before it ends, and wait for it later (programmatic dependent launch)."""
        return isinstance(self.arch, int) and self.arch >= 90

    @property
    def triton(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.vendor, self.arch, self.warp)


TARGETS = {
    target.name: target
    for target in (
        Target(
            "sm_80",
            "cuda",
            80,
            32,
            166_912,
            255,
            108,
            2.0,
            312,
            bulk_copy=False,
            warpgroups=False,
            fp8=False,
            headroom=0.85,
        ),
        Target("sm_90", "cuda", 90, 32, 232_448, 255, 132, 4.3, 750, bulk_copy=True, warpgroups=True, fp8=True),
        Target("sm_100", "cuda", 100, 32, 232_448, 255, 148, 8.0, 2250, bulk_copy=True, warpgroups=False, fp8=True),
        Target("sm_120", "cuda", 120, 32, 101_376, 255, 170, 1.8, 210, bulk_copy=True, warpgroups=False, fp8=True),
        Target(
            "gfx942",
            "hip",
            "gfx942",
            64,
            65_536,
            512,
            304,
            5.3,
            1307,
            bulk_copy=False,
            warpgroups=False,
            fp8=True,
            headroom=0.76,
        ),
        Target(
            "gfx950",
            "hip",
            "gfx950",
            64,
            163_840,
            512,
            256,
            8.0,
            2500,
            bulk_copy=False,
            warpgroups=False,
            fp8=True,
            headroom=0.76,
        ),
    )
}


@cache
def device_target(device: torch.device) -> Target | None:
    """The target of a device, None for one that is not in the table."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return TARGETS.get(properties.gcnArchName.split(":")[0])
    # Later members of a family run the family's code.
    family = {8: "sm_80", 9: "sm_90", 10: "sm_100", 12: "sm_120"}.get(properties.major)
    return TARGETS[family] if family else None


@cache
def unit_count(device: torch.device) -> int:
    """Multiprocessors of the device; on a machine without one, few, so that the interpreter sees a persistent loop."""
    if device.type != "cuda":
        return 3
    return torch.cuda.get_device_properties(device).multi_processor_count
