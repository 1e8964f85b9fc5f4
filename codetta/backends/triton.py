"""The Triton backend: chooses a tile, has the source written, compiled and cached, and launches it.

Runs on CUDA and HIP devices, and on the CPU in Triton's interpreter (TRITON_INTERPRET=1), for tests.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from codetta.backends import gluon_gemm, triton_gemm
from codetta.backends.triton_epilogue import DTYPES, operand_integers, store_integers
from codetta.backends.triton_invocation import invocation
from codetta.errors import LoweringError, Reason
from codetta.options import debug_level
from codetta.plan.choose import FEW, bucket, candidates
from codetta.plan.target import COPY_ALIGNMENT, Target, device_target, unit_count
from codetta.plan.tile import STREAM, Tile, alignment_reason
from codetta.plan.traffic import CONSUMERS, SPECIALISED
from codetta.plan.tune import Tuned, TuneKey, find, generation
from codetta.program import Operand, Program, Store
from codetta.runtime.bind import Binding, layout_strides
from codetta.runtime.cache import Cache, key_of
from codetta.runtime.invocation import announce
from codetta.stat import FIELDS, Stat

PRODUCT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

MOST_KNOWN = 4096  # calls of different sizes whose tiles are remembered


def interpreting() -> bool:
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


class TritonBackend:
    name = "triton"

    def __init__(self) -> None:
        self._known: dict[object, Tile | None] = {}  # tiles of calls that were seen before
        self._broken: dict[tuple[Program, Tile], Reason] = {}  # whose kernels did not compile

    def why_not(self, program: Program, binding: Binding) -> list[Reason]:
        device = binding.a.device
        if not (device.type == "cuda" or interpreting()):
            return [
                Reason(
                    "device", f"{device} is no GPU; Triton runs on the CPU only in its interpreter (TRITON_INTERPRET=1)"
                )
            ]
        target = device_target(device)
        if device.type == "cuda" and target is None:
            return [Reason("device", f"{torch.cuda.get_device_name(device)} is not in the table of targets")]
        reasons = unsupported(program, target)
        if reasons:
            return reasons
        return [] if self._best(program, binding, device) else self.candidates(program, binding)[1]

    def why_never(self, program: Program, device: torch.device, rows: int) -> list[Reason]:
        target = device_target(device)
        reasons = unsupported(program, target)
        if reasons:
            return reasons
        tiles, refused = candidates(program, bucket(rows), target, could_be_aligned(program))
        if not tiles:
            return list(refused)
        return why_slow(program, rows, target, tiles[0], refused)

    def build(self, program: Program, binding: Binding, device: torch.device) -> None:
        tile = self._best(program, binding, device)
        if tile is not None:
            torch.cuda.set_device(device)  # each thread has a current device of its own
            self.compile(program, binding, tile)

    def run(self, program: Program, binding: Binding) -> dict[str, Tensor | Stat]:
        """With the best tile; where its kernel does not compile on this target, with the next one, as long as there is one."""
        while True:
            tile = self.tile(program, binding)
            try:
                return self.launch(program, binding, tile)
            except Exception as error:  # what compilers raise has no common ancestor
                reason = self._why_not_compiled(program, binding, tile, error)
                if reason is None:
                    raise
                self._broken[program, tile] = reason
                self._known.clear()

    def _why_not_compiled(self, program: Program, binding: Binding, tile: Tile, error: Exception) -> Reason | None:
        """The reason, if it was the compiler that failed; None if it was the launch."""
        if isinstance(error, torch.OutOfMemoryError | LoweringError):
            return None
        try:
            self.compile(program, binding, tile)
        except Exception as again:
            said = str(again).strip().splitlines() or [type(again).__name__]
            return Reason(
                "compiler", f"the {tile.loop} loop with {tile.rows}x{tile.cols} tiles does not compile: {said[-1]}"
            )
        return None

    def source(self, program: Program, binding: Binding) -> str:
        return source(program, self.tile(program, binding), self._widen(program, binding))

    def tile(self, program: Program, binding: Binding) -> Tile:
        """The tile for this call: tuned if it has been, else the default."""
        best = self._best(program, binding, binding.a.device)
        if best is None:
            broken = [reason for (known, _), reason in self._broken.items() if known == program]
            raise LoweringError(f"no tile for {program.name}", broken + self.candidates(program, binding)[1])
        return best

    def _best(self, program: Program, binding: Binding, device: torch.device) -> Tile | None:
        """The first tile that such tensors on the device can take; on the way of every call, so it looks no further."""
        key = (program, device, generation(), *_layout(binding))
        if key not in self._known:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            target, tuned = device_target(device), self.tuned(program, binding, device)
            tiles, _ = candidates(program, bucket(binding.rows), target, aligned(program, binding))
            # What was tuned for other tensors of this bucket, or by another version, may be illegal here.
            first = (tuned.tile,) if tuned and tuned.tile in tiles else ()
            sound = (tile for tile in (*first, *tiles) if (program, tile) not in self._broken)
            fits = (tile for tile in sound if not _why_not_tensors(program, binding, tile))
            self._known[key] = next(fits, None)
        return self._known[key]

    def tuned(self, program: Program, binding: Binding, device: torch.device) -> Tuned | None:
        """What tuning has found for such calls on the device, if it has run."""
        return find(tune_key(program, binding, device)) if device.type == "cuda" else None

    def candidates(
        self, program: Program, binding: Binding, target: Target | None = None
    ) -> tuple[list[Tile], list[Reason]]:
        """Tiles that are legal for these tensors, best guess first, and why the others are not.

        target: of another device than the tensors are on, to see or compile what would run there.
        """
        target = target or device_target(binding.a.device)
        tiles, refused = candidates(program, bucket(binding.rows), target, aligned(program, binding))
        fitting, reasons = [], list(refused)
        for tile in tiles:
            found = _why_not_tensors(program, binding, tile)
            reasons += found
            if not found:
                fitting.append(tile)
        return fitting, reasons

    def launch(self, program: Program, binding: Binding, tile: Tile) -> dict[str, Tensor | Stat]:
        """Run the program with a given tile."""
        return self.prepare(program, binding, tile)()

    def prepare(self, program: Program, binding: Binding, tile: Tile) -> Callable[[], dict[str, Tensor | Stat]]:
        """A launch with everything bound once; each call writes the same tensors again."""
        kernel, grid, arguments, options, results = self._bound(program, binding, tile)
        launcher = kernel[grid]

        def run() -> dict[str, Tensor | Stat]:
            compiled = launcher(*arguments, **options)
            announce(lambda: invocation(compiled, grid[0], arguments))
            return results

        return run

    def compile(self, program: Program, binding: Binding, tile: Tile) -> None:
        """Compile the kernel that `launch` would run, and run nothing; threads may do so side by side."""
        kernel, grid, arguments, options, _ = self._bound(program, binding, tile)
        if not interpreting():
            kernel.warmup(*arguments, grid=grid, **options)

    def _bound(
        self, program: Program, binding: Binding, tile: Tile
    ) -> tuple[Any, tuple[int], list[Any], dict[str, int], dict[str, Tensor | Stat]]:
        program = form(program, tile)
        if tile.early and not binding.lasting:
            tile = replace(tile, early=False)  # somebody's own call: the kernel before it may have written its weights
        kernel = build(program, tile, self._widen(program, binding)).kernel
        # Column partials: one per tile of rows, or per consumer's part of one.
        row_tiles = -(-binding.rows_per_batch // tile.rows)
        parts = row_tiles * (CONSUMERS if tile.loop in SPECIALISED else 1)
        results: dict[str, Tensor | Stat] = dict(binding.outputs)
        for sink in program.sinks:
            results[sink.name] = _stat(program, sink.name, binding, tile, parts)
        tiles = binding.batch * row_tiles * sum(tile.column_tiles(segment) for segment in program.segments)
        grid = (tiles if tile.loop in triton_gemm.BY_POINTER else min(tiles, unit_count(binding.a.device)),)
        if tile.loop in SPECIALISED:
            options = {"num_warps": 4, "maxnreg": gluon_gemm.launch_registers(tile)}
        else:
            options = {"num_warps": tile.warps, "num_stages": tile.stages}
        if tile.early:
            options["launch_pdl"] = True
        return kernel, grid, _arguments(program, binding, tile, results), options, results

    @staticmethod
    def _widen(program: Program, binding: Binding) -> bool:
        return binding.a.device.type == "cpu" and program.a_dtype == torch.bfloat16


def unsupported(program: Program, target: Target | None) -> list[Reason]:
    """What no tile could change: types that the language lacks."""
    reasons = []
    if program.a_dtype not in PRODUCT_DTYPES:
        reasons.append(Reason("dtype", f"products of {program.a_dtype} have no kernel"))
    dtypes = {f"operand {o.name}": o.dtype for o in program.operands} | {
        f"output {s.name}": s.dtype for s in program.stores
    }
    for what, dtype in dtypes.items():
        if dtype not in DTYPES:
            reasons.append(Reason("dtype", f"{what} is {dtype}, which kernels do not have"))
        if dtype == torch.float8_e4m3fn and target is not None and not target.fp8:
            reasons.append(Reason("dtype", f"{what} is fp8 e4m3, which {target.name} does not convert"))
    if program.batched and any(node.space.rows > 1 for segment in program.segments for node in segment.nodes):
        reasons.append(Reason("batched", "groups of rows could straddle two batch entries"))
    return reasons


def could_be_aligned(program: Program) -> bool:
    """Whether the copy engine can address A and every B, if nothing but their sizes is against it."""
    depth = program.k * program.a_dtype.itemsize
    widths = [product.cols * product.dtype.itemsize for product in program.products if product.layout == "kn"]
    return not any(size % COPY_ALIGNMENT for size in (depth, *widths))


def why_slow(program: Program, rows: int, target: Target | None, tile: Tile, refused: Sequence[Reason]) -> list[Reason]:
    """Why the vendor's product and a kernel for the rest are faster than the program on its best tile; empty if they are not."""
    if rows <= FEW or target is None or not program.multiplies:
        return []
    if program.a_dtype == torch.float32 and not program.tf32:
        return [Reason("cost", "products in full precision are faster by the vendor's library")]
    if target.warpgroups and tile.loop not in SPECIALISED:
        # Locality is asked of every tile; what stands in the way of the faster loops comes after it.
        reasons = sorted(refused, key=lambda each: each.rule == "not tile-local")
        why = str(reasons[0]) if reasons else "its tensors are not aligned"
        return [
            Reason(
                "cost", f"the vendor's product and a kernel for the rest are faster than the {tile.loop} loop; {why}"
            )
        ]
    return []


def form(program: Program, tile: Tile) -> Program:
    """The program as such a tile takes it."""
    return program.narrow if tile.loop == STREAM or tile.early else program


def source(program: Program, tile: Tile, widen: bool = False) -> str:
    if tile.loop in SPECIALISED:
        return gluon_gemm.source(program, tile)
    return triton_gemm.source(form(program, tile), tile, widen)


def _why_not_tensors(program: Program, binding: Binding, tile: Tile) -> list[Reason]:
    """What about these tensors, beyond the alignment of A and B, the tile's loop cannot take."""
    if tile.loop not in SPECIALISED:
        return []
    from codetta.backends import gluon_launch

    return gluon_launch.why_not(program, binding, tile)


@cache
def build(program: Program, tile: Tile, widen: bool = False) -> ModuleType:
    """The generated module, from the cache or written now. Triton compiles and caches the kernel itself."""
    text = source(program, tile, widen)
    if debug_level() >= 4:
        print(text)
    return load(text, program.name)


def load(text: str, name: str) -> ModuleType:
    """Import generated source; Triton needs it in a file."""

    def write(path: Path) -> None:
        path.write_text(text)

    path = Cache("triton").get_file(key_of(source=text), write, suffix=".py")
    module_name = f"codetta_generated_{name}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    with _loading:  # tiles that differ at launch alone share their source, and are built side by side
        if module_name in sys.modules:
            return sys.modules[module_name]
        spec = importlib.util.spec_from_file_location(module_name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        spec.loader.exec_module(module)
        return module


_loading = threading.Lock()


def tune_key(program: Program, binding: Binding, device: torch.device | None = None) -> TuneKey:
    """Under what the tile of such a call is remembered; on another device than the tensors are on, if it is given."""
    return TuneKey(program, device or binding.a.device, bucket(binding.rows), aligned(program, binding))


def _layout(binding: Binding) -> list[object]:
    """All that the choice of a tile can depend on, of the tensors of a call."""
    tensors = [binding.a, *binding.b, *binding.operands.values(), *binding.outputs.values()]
    found: list[object] = [binding.rows, binding.samples, binding.batch]
    found += [
        (each.shape, each.stride(), each.data_ptr() % COPY_ALIGNMENT) for each in tensors if not isinstance(each, Stat)
    ]
    return found


def aligned(program: Program, binding: Binding) -> bool:
    """Whether the copy engine can address A and every B."""
    for tensor, batched in ((binding.a, False), *((b, program.batched) for b in binding.b)):
        step = max(tensor.stride()[-2:])
        if alignment_reason("", step * tensor.element_size(), tensor.data_ptr(), COPY_ALIGNMENT):
            return False
        if batched and tensor.stride(0) != tensor.shape[1] * tensor.shape[2]:
            return False
    # Descriptors see a batch of (K, N) as one matrix: a step in K must not reach into the next entry.
    return not (program.batched and any(p.layout == "kn" and program.k % 128 for p in program.products))


def _stat(program: Program, name: str, binding: Binding, tile: Tile, row_tiles: int) -> Stat:
    """Room for a sink's partials."""
    index = next(i for i, sink in enumerate(program.sinks) if sink.name == name)
    sink = program.sinks[index]
    segment = next(s for s in program.segments if index in s.sinks)
    fields = FIELDS[sink.how]
    if sink.by_row:
        shape = (fields, tile.column_tiles(segment), binding.rows)
        width = tile.strip(segment) * len(sink.values) * sink.values[0].space.cols // segment.cols
        total = sink.cols
    else:
        shape, width, total = (fields, row_tiles, binding.batch * sink.cols), tile.rows, binding.rows_per_batch
    return Stat(torch.empty(shape, dtype=torch.float32, device=binding.a.device), sink.how, width, total)


def _arguments(program: Program, binding: Binding, tile: Tile, results: dict[str, Any]) -> list[Any]:
    """Kernel arguments in the order of `triton_gemm.kernel_parameters`."""
    arguments = _matrices(program, binding, tile)
    if program.batched:
        arguments += [binding.rows_per_batch, *(b.stride(0) for b in binding.b)]
    arguments += [binding.rows, max(binding.rows_per_sample, 1)]
    for operand in program.operands:
        arguments += _operand(operand, binding)
    for store in program.stores:
        arguments += _output(store, binding.outputs[store.name])
    arguments += [results[sink.name].partials for sink in program.sinks]
    return arguments


def _matrices(program: Program, binding: Binding, tile: Tile) -> list[Any]:
    if not program.multiplies:
        return []
    if tile.loop in triton_gemm.BY_POINTER:
        a_step = binding.a.stride(0 if program.a_layout == "mk" else 1)
        steps = [b.stride(-2 if p.layout == "nk" else -1) for b, p in zip(binding.b, program.products, strict=True)]
        return [binding.a, *binding.b, a_step, *steps]
    if tile.loop in SPECIALISED:
        from codetta.backends import gluon_launch

        return gluon_launch.descriptors(program, binding, tile)
    from triton.tools.tensor_descriptor import TensorDescriptor

    widths = {strip.product: tile.strip(segment) for segment in program.segments for strip in segment.strips}
    a = binding.a if program.a_layout == "mk" else binding.a.T
    a_block = [tile.rows, tile.depth] if program.a_layout == "mk" else [tile.depth, tile.rows]
    descriptors = [TensorDescriptor.from_tensor(a, a_block)]
    for index, (b, product) in enumerate(zip(binding.b, program.products, strict=True)):
        matrix = b if product.layout == "nk" else b.transpose(-1, -2)
        block = [widths[index], tile.depth] if product.layout == "nk" else [tile.depth, widths[index]]
        descriptors.append(TensorDescriptor.from_tensor(matrix.flatten(0, -2), block))
    return descriptors


def _operand(operand: Operand, binding: Binding) -> list[Any]:
    value = binding.operands[operand.name]
    if isinstance(value, Stat):
        integers = {"tiles": value.partials.shape[1], "width": value.width, "total": value.total}
        return [value.partials, *(integers[what] for what in operand_integers(operand))]
    if operand.layout != "rows":
        return [value, *layout_strides(operand.layout, value)]
    integers = {"stride": value.stride(0)}
    if operand.rows == "sample":
        integers["span"] = binding.rows // value.shape[0]
    elif operand.rows == "repeat":
        integers["span"] = value.shape[0]
    return [value, *(integers[what] for what in operand_integers(operand))]


def _output(store: Store, value: Tensor) -> list[Any]:
    if store.layout != "rows":
        return [value, *layout_strides(store.layout, value)]
    return [value, *([value.stride(0)] if store_integers(store) else [])]
