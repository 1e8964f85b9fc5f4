"""Calls of an epilogue that look like an earlier one: bound (runtime/bindings.py), so that nothing is checked, traced or chosen again.

A call looks like another if its tensors have the same sizes, strides and types, and everything else is equal: what is refused, traced and
chosen depends on nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from codetta.program import Program
from codetta.runtime.bindings import Bindings
from codetta.runtime.function import Function, Line
from codetta.stat import Stat

MOST = 64  # calls that are remembered for an epilogue
PLAIN = (type(None), bool, int, float, str, torch.dtype)

Key = tuple[object, ...]
# The program of a call and its outputs by name, not finished: of a, the weights, operands and the tensors that are written to.
Run = Callable[[Tensor, Any, dict[str, Any], dict[str, Tensor]], tuple[Program, Mapping[str, Tensor | Stat]]]


def key_of(
    a: Any, w: Any, operands: Mapping[str, Any], out: Mapping[str, Any], settings: Sequence[object]
) -> Key | None:
    """What tells calls apart. None: a call is like no other, because somebody looks on, or for what it is given."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return None
    gradients = torch.is_grad_enabled()
    weights = w if isinstance(w, list | tuple) else (w,)
    parts: list[object] = [*settings, len(weights), isinstance(w, Tensor), *operands, len(out), *out]
    written = {each.untyped_storage()._cdata for each in out.values() if type(each) is Tensor}
    for value in chain((a,), weights, operands.values(), out.values()):
        if isinstance(value, Stat):
            parts += (value.how, value.width, value.total)
            value = value.partials
        if type(value) is Tensor or type(value) is nn.Parameter:
            if gradients and value.requires_grad:
                return None
            parts += (value.shape, value.stride(), value.dtype, value.device)
        elif type(value) in PLAIN:
            parts += (type(value), value)
        else:
            return None
    if written:
        read = [each.partials if isinstance(each, Stat) else each for each in chain((a,), weights, operands.values())]
        # What is written to lies in memory of its own.
        if len(written) < len(out) or any(
            isinstance(each, Tensor) and each.untyped_storage()._cdata in written for each in read
        ):
            return None
    return tuple(parts)


class Repeated:
    """A call that comes again, with other tensors. Holds none of them."""

    def __init__(
        self, run: Run, program: Program, a: Tensor, w: Any, operands: Mapping[str, Any], out: Mapping[str, Tensor]
    ) -> None:
        def launch(*call: Any) -> list[Tensor | Stat]:
            program, results = run(*call)
            return [results[name] for name in program.outputs]

        objects: list[Any] = [launch]
        lines: list[Line] = []
        count = 1 if isinstance(w, Tensor) else len(w)
        weights = [f"v_w{at}" for at in range(count)]
        written = [f"v_out{at}" for at in range(len(out))]
        self.given = [name for name, value in operands.items() if isinstance(value, Tensor | Stat)]
        arguments, spelled = [], []
        for at, (name, value) in enumerate(operands.items()):
            text = f"v_x{at}"
            if isinstance(value, Stat):
                objects.append(partial(Stat, how=value.how, width=value.width, total=value.total))
                lines.append(Line(f"c[{len(objects) - 1}]({text})", f"v_stat{at}", kind="view"))
                spelled.append(f"{name!r}: v_stat{at}")
            elif isinstance(value, Tensor):
                spelled.append(f"{name!r}: {text}")
            else:
                objects.append(value)
                spelled.append(f"{name!r}: c[{len(objects) - 1}]")
            if name in self.given:
                arguments.append(text)
        listed = weights[0] if isinstance(w, Tensor) else f"[{', '.join(weights)}]"
        outs = ", ".join(f"{name!r}: {text}" for name, text in zip(out, written, strict=True))
        made = [f"p0_r{at}" for at in range(len(program.outputs))]
        call = f"c[0](v_a, {listed}, {{{', '.join(spelled)}}}, {{{outs}}})"
        lines.append(Line(call, "".join(f"{each}, " for each in made), kind="launch"))
        self.sinks = {sink.name: sink for sink in program.sinks}
        self.outputs = program.outputs
        results = []
        for name, text in zip(program.outputs, made, strict=True):
            results += [f"{text}.partials", f"{text}.width", f"{text}.total"] if name in self.sinks else [text]
        names = ["v_a", *weights, *arguments, *written]
        self.bindings = Bindings(Function("call", names, lines, results, objects), launch, a.device, names)

    def __call__(
        self, a: Tensor, w: Any, operands: Mapping[str, Any], out: Mapping[str, Tensor]
    ) -> dict[str, Tensor | Stat]:
        given = [operands[name] for name in self.given]
        tensors = [each.partials if isinstance(each, Stat) else each for each in given]
        results = iter(self.bindings([a, *([w] if isinstance(w, Tensor) else w), *tensors, *out.values()]))
        return {
            name: Stat(next(results), self.sinks[name].how, next(results), next(results)) if name in self.sinks else next(results)
            for name in self.outputs
        }  # fmt: skip
