"""Cross-compilation: a program's kernel for a target that need not be here, and what the compiler says of it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from codetta.backends import gluon_gemm, triton_gemm
from codetta.backends.triton import form, load
from codetta.backends.triton_epilogue import sink_name, unspecialised
from codetta.plan.target import Target
from codetta.plan.tile import Tile
from codetta.plan.traffic import SPECIALISED
from codetta.program import Program

SHORT = {
    torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8", torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv", torch.int32: "i32", torch.int64: "i64", torch.bool: "i1",
}  # fmt: skip


@dataclass(frozen=True)
class Report:
    """What a compiled kernel needs and uses."""

    registers: int
    spills: int  # bytes of registers that went to memory
    shared: int
    warpgroup: bool  # asynchronous warpgroup matrix instructions
    bulk_copy: bool  # copies by the tensor copy engine
    assembly: str


def cross_compile(program: Program, tile: Tile, target: Target) -> Report:
    """Compile the program's kernel for the target; raises what the compiler raises."""
    import triton
    from triton.compiler import ASTSource

    options: dict[str, Any]
    if tile.loop in SPECIALISED:
        from triton.experimental.gluon._runtime import GluonASTSource

        module = load(gluon_gemm.source(program, tile), program.name)
        source = GluonASTSource(module.kernel, *_signature(program, tile))
        options = {"num_warps": 4, "maxnreg": gluon_gemm.launch_registers(tile)}
    else:
        program = form(program, tile)
        module = load(triton_gemm.source(program, tile), program.name)
        source = ASTSource(module.kernel, *_signature(program, tile))
        options = {"num_warps": tile.warps, "num_stages": tile.stages}
    return report(triton.compile(source, target=target.triton, options=options), target)


def report(compiled: Any, target: Target) -> Report:
    """Registers and spills as the assembler reports them."""
    if target.vendor == "hip":
        text = compiled.asm["amdgcn"]
        return Report(
            _number(text, r"\.vgpr_count:\s+(\d+)"),
            4 * (_number(text, r"\.vgpr_spill_count:\s+(\d+)") + _number(text, r"\.sgpr_spill_count:\s+(\d+)")),
            compiled.metadata.shared,
            False,
            False,
            text,
        )
    text = compiled.asm["ptx"]
    usage = _resource_usage(compiled.asm["cubin"])
    # A stack need not come of spills (some kernels keep 8 bytes there); the assembler tells, at the price of another run.
    stack = _number(usage, r"LOCAL:(\d+)") or _number(usage, r"STACK:(\d+)")
    return Report(
        _number(usage, r"REG:(\d+)"),
        _spilled(text, target) if stack else 0,
        compiled.metadata.shared,
        "wgmma" in text,
        "cp.async.bulk.tensor" in text,
        text,
    )


def _resource_usage(cubin: bytes) -> str:
    from triton import knobs

    tool = knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        run = subprocess.run([tool, "--dump-resource-usage", str(path)], capture_output=True, text=True, check=True)
    return run.stdout


def _spilled(ptx: str, target: Target) -> int:
    """Bytes of registers stored to memory, as the assembler says; the launch's register limit is in the PTX."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    assert isinstance(target.arch, int)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        command = [get_ptxas(target.arch).path, "-v", f"--gpu-name={sm_arch_from_capability(target.arch)}", str(path)]
        run = subprocess.run(
            [*command, "-o", str(path.with_suffix(".cubin"))], capture_output=True, text=True, check=True
        )
    return sum(int(each) for each in re.findall(r"(\d+) bytes spill stores", run.stderr + run.stdout))


def _number(text: str, pattern: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


def _signature(
    program: Program, tile: Tile
) -> tuple[dict[str, str], dict[str, Any], dict[tuple[int, ...], list[list[Any]]]]:
    """Types of the kernel's parameters, with the alignment that ordinary tensors have."""
    specialised = tile.loop in SPECIALISED
    names = (gluon_gemm if specialised else triton_gemm).kernel_parameters(program, tile)
    types: dict[str, str] = dict.fromkeys(names, "i32")
    element = SHORT[program.a_dtype]
    if specialised:
        for name, role, what in gluon_gemm.descriptors(program, tile):
            block, dtype = gluon_gemm.block_of(program, tile, role, what)
            types[name] = f"tensordesc<{SHORT[dtype]}{block},{gluon_gemm.shared_layout(block, dtype)!r}>"
    elif not program.multiplies:
        pass
    elif tile.loop in triton_gemm.BY_POINTER:
        types |= {"a": f"*{element}"} | {f"b{i}": f"*{element}" for i in range(len(program.products))}
    else:
        a_block = (tile.rows, tile.depth) if program.a_layout == "mk" else (tile.depth, tile.rows)
        types["a"] = f"tensordesc<{element}[{a_block[0]},{a_block[1]}]>"
        for segment in program.segments:
            for strip in segment.strips:
                width = tile.strip(segment)
                nk = program.products[strip.product].layout == "nk"
                n, k = (width, tile.depth) if nk else (tile.depth, width)
                types[f"b{strip.product}"] = f"tensordesc<{element}[{n},{k}]>"
    for operand in program.operands:
        types[f"in_{operand.name}_ptr"] = f"*{SHORT[operand.dtype]}"
    for store in program.stores:
        types[f"out_{store.name}_ptr"] = f"*{SHORT[store.dtype]}"
    for sink in program.sinks:
        types[f"{sink_name(sink)}_part"] = "*fp32"
    skipped = unspecialised(names)
    aligned: dict[tuple[int, ...], list[list[Any]]] = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if types[name].startswith("*") or (types[name] == "i32" and name not in skipped)
    }
    return types, {}, aligned
