"""The CPU backend: has the epilogues written and compiled, and hands the tensors of a call to the main loop.

Runs wherever there is a C++ compiler. The main loop (cpu_gemm.cpp) is the same for all programs; what is generated is the
epilogue of each segment (cpu_epilogue.py) and the plan that tells the main loop what to compute (cpu_plan.py).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from codetta.backends import cpu_build, reference
from codetta.backends.cpu_arguments import arguments, check_indices, stat_loads
from codetta.backends.cpu_epilogue import EpilogueWriter, finish_function
from codetta.backends.cpu_plan import MOST_ROOM, Rows, panel_cols, row_groups, rows_of, why_not
from codetta.backends.cpu_spelling import DTYPES
from codetta.errors import LoweringError, Reason
from codetta.program import Program
from codetta.runtime.bind import Binding
from codetta.runtime.invocation import Invocation, Number, announce
from codetta.stat import FIELDS, Stat


@dataclass(frozen=True)
class Text:
    """The generated source of a program, and what else its writers found out."""

    source: str
    passes: int  # over a row, at most
    room: int  # bytes of scratch memory


@dataclass(frozen=True)
class Kernel:
    library: cpu_build.Library
    rows: Rows
    row_group: int
    passes: int
    partials: dict[str, tuple[int, int]]  # of each row reduction: how many, and columns of each
    indexed: bool  # whether row numbers are read from an operand


class Cpu:
    name = "cpu"

    def __init__(self) -> None:
        self._kernels: dict[Program, Kernel] = {}
        self._refused: dict[tuple[Program, cpu_build.Toolchain], list[Reason]] = {}

    def why_not(self, program: Program, binding: Binding) -> list[Reason]:
        if binding.a.device.type != "cpu":
            return [Reason("device", f"{binding.a.device} is no CPU")]
        kernel = self._kernels.get(program)
        if kernel is None:
            reasons = self._prepare(program)
            if reasons:
                return reasons
            kernel = self._kernels[program]
        if program.batched and kernel.row_group > 1 and binding.rows_per_batch % kernel.row_group:
            return [Reason("batched", f"groups of {kernel.row_group} rows straddle two batch entries")]
        return []

    def why_never(self, program: Program, device: torch.device, rows: int) -> list[Reason]:
        return [] if program in self._kernels else self._prepare(program)

    def build(self, program: Program, binding: Binding, device: torch.device) -> None:
        self.why_never(program, device, binding.rows)

    def run(self, program: Program, binding: Binding) -> dict[str, Tensor | Stat]:
        reasons = self.why_not(program, binding)
        if reasons:
            raise LoweringError(f"backend 'cpu' cannot run {program.name}", reasons)
        if not binding.rows or (not program.k and program.multiplies):
            return reference.run(program, binding)
        kernel = self._kernels[program]
        results: dict[str, Tensor | Stat] = dict(binding.outputs)
        for sink in program.sinks:
            if sink.by_row:
                tiles, width = kernel.partials[sink.name]
                shape, total = (FIELDS[sink.how], tiles, binding.rows), sink.cols
            else:
                width, total = kernel.rows.tile, binding.rows_per_batch
                shape = (1, -(-binding.rows_per_batch // width), binding.batch * sink.cols)
            results[sink.name] = Stat(torch.empty(shape, dtype=torch.float32), sink.how, width, total)
        if kernel.indexed:
            check_indices(program, binding, kernel.library)
        kept: list[Tensor] = []  # copies that must live until the kernel is done
        given = arguments(program, binding, results, kernel.passes, kept)
        kernel.library.run([each.data_ptr() if isinstance(each, Tensor) else each for each in given])
        announce(lambda: _invocation(kernel, given))
        return results

    def source(self, program: Program, binding: Binding) -> str:
        return write(program).source

    def _prepare(self, program: Program) -> list[Reason]:
        """Build the program's kernel; or the reasons why there is none, remembered as long as the compiler is the same."""
        try:
            tools = cpu_build.toolchain()
        except cpu_build.BuildError as error:
            _say_once(str(error))
            return [Reason("compiler", str(error))]
        if (program, tools) in self._refused:
            return self._refused[program, tools]
        reasons = why_not(program)
        if not reasons:
            text = write(program)
            if text.room > MOST_ROOM:
                reasons.append(
                    Reason("memory", f"a block takes {text.room} bytes of scratch memory, {MOST_ROOM} is the most")
                )
        if not reasons:
            try:
                library = cpu_build.load(text.source, DTYPES[program.a_dtype])
                self._kernels[program] = _kernel(program, library, text)
            except cpu_build.BuildError as error:
                reasons.append(Reason("compiler", str(error)))
        if reasons:
            self._refused[program, tools] = reasons
        return reasons


def _invocation(kernel: Kernel, given: list[int | Tensor]) -> Invocation | None:
    """The same call as data; None where row numbers must be looked at first."""
    if kernel.indexed:
        return None
    library = kernel.library
    values = [each if isinstance(each, Tensor) else Number(int(each), 8) for each in given]
    return Invocation(library.function, values, library, plan=library.plan)


@cache
def _say_once(problem: str) -> None:
    warnings.warn(
        f"codetta: {problem}. Until then, everything stays with PyTorch's own kernels.", RuntimeWarning, stacklevel=2
    )


def _kernel(program: Program, library: cpu_build.Library, text: Text) -> Kernel:
    partials = {}
    for segment in program.segments:
        panel = panel_cols(segment)
        for sink in (program.sinks[index] for index in segment.sinks):
            width = panel * len(sink.values) * sink.values[0].space.cols // segment.cols
            partials[sink.name] = (-(-segment.cols // panel), width)
    indexed = any(operand.row_index for operand in program.operands) or any(store.row_index for store in program.stores)
    return Kernel(library, rows_of(program), row_groups(program), text.passes, partials, indexed)


def write(program: Program) -> Text:
    """The whole source: epilogues, what finishes reductions, and the plan."""
    rows = rows_of(program)
    # Without the sizes of the product: another depth or layout needs no other epilogue.
    about = [line for line in program.text.splitlines() if not line.startswith(("program ", "Product "))]
    lines = [f"// {line}".rstrip() for line in (f"{program.name}:", *about)]
    lines += ['#include "cpu_runtime.h"', ""]
    segments, passes, room = [], 0, 0
    for number, segment in enumerate(program.segments):
        writer = EpilogueWriter(program, segment, number, rows)
        lines += writer.function()
        passes, room = max(passes, writer.passes), max(room, writer.room)
        frames = [(s.product, s.frame) for s in segment.strips]
        strips = [
            f"{{{product}, {frame.index}, {frame.run}, {frame.block}}}"
            if frame
            else f"{{{product}, 0, {segment.cols}, {segment.cols}}}"
            for product, frame in frames
        ]
        lines.append(f"static const Strip strips_{number}[] = {{{', '.join(strips)}}};")
        segments.append(
            f"{{{segment.cols}, {panel_cols(segment)}, {len(strips)}, strips_{number}, {writer.room}, {writer.name}}}"
        )
    lines += ["", *finish_function(program)]
    finish = "finish" if stat_loads(program) else "nullptr"
    lines += [
        f"static const Segment segments[] = {{{', '.join(segments)}}};",
        'extern "C" __attribute__((visibility("default"))) const Plan codetta_plan;',
        f"const Plan codetta_plan = {{{len(segments)}, segments, {rows.block}, {rows.tile}, {len(stat_loads(program))}, {finish}}};",
    ]
    return Text("\n".join(lines) + "\n", passes, room)
