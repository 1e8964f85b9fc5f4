"""Executor: a plan as one Python function, written once and called with the graph's inputs; for training as two.

A function is a list of launches and of operators that stayed with the graph. The second one of a training plan is given what the
first has carried over to it: tensors and sizes. What costs nothing to have again (tables that are kept for each size) is not carried.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from codetta.capture.kinds import is_effect, is_random, is_tangent, origin
from codetta.errors import Stage
from codetta.runtime.bindings import Bindings
from codetta.runtime.constants import Constants
from codetta.runtime.function import Function, Line
from codetta.runtime.launch import launch
from codetta.runtime.replay import FRESH, KEPT, LENT, TOKEN
from codetta.runtime.sized import backwards
from codetta.runtime.writer import CompileRegion, Writer
from codetta.stat import Stat
from codetta.steps import Launch, Plan


class Executor:
    """Callable with the graph's placeholders, in order; returns its outputs as a tuple. lasting: placeholders that are parameters."""

    def __init__(
        self,
        plan: Plan,
        compile_region: CompileRegion | None = None,
        lasting: Collection[fx.Node] = (),
        graphs: bool = False,
    ) -> None:
        self.plan, self.running = plan, Running(plan)
        placeholders = plan.graph.nodes.find_nodes(op="placeholder")
        constants = Constants(plan.graph, placeholders)
        writer = Writer(plan, constants, compile_region)
        lines = writer.lines(plan.steps)
        inputs = [writer.variable(each) for each in placeholders]
        handing, results = writer.results(end=len(writer.output.args[0]))
        function = Function("plan", ["made", *inputs], [*writer.beginning(), *lines, *handing], results, writer.objects)
        varying = [writer.variable(each) for each in placeholders if each not in lasting]
        self.source = function.source
        policy = [FRESH] * len(results) if graphs else []
        self.bindings = Bindings(
            function, launch, _device(plan), varying, policy=policy, written=_written(plan, writer), pure=_is_pure(plan),
            made=constants.kept,
        )  # fmt: skip

    def __call__(self, *inputs: Any) -> Any:
        with self.running:
            return self.bindings(list(inputs))


class Training:
    """A plan with gradients: `forward` with the graph's own inputs, `backward` with what was carried over and the tangents."""

    def __init__(
        self,
        plan: Plan,
        outputs: int,
        compile_region: CompileRegion | None = None,
        lasting: Collection[fx.Node] = (),
        graphs: bool = False,
    ) -> None:
        self.plan, self.running = plan, Running(plan)
        placeholders = plan.graph.nodes.find_nodes(op="placeholder")
        self.primals = [each for each in placeholders if not is_tangent(each)]
        self.tangents = [each for each in placeholders if is_tangent(each)]
        writer = self.writer = Writer(plan, None, compile_region)
        first = writer.lines(plan.steps[: plan.forward])
        second = writer.lines(plan.steps[plan.forward :])
        first = writer.beginning() + first
        returned = list(writer.output.args[0])
        self.results, self.gradients = returned[:outputs], returned[outputs:]
        last, gradients = writer.results(outputs)
        second += last
        known = {writer.variable(each) for each in self.tangents}
        assert not any(line.uses & known for line in first), "results wait for gradients"
        again, carried = _carried([*second, Line(", ".join(gradients))], first, known)
        ints = {writer.variable(each) for each in plan.graph.nodes.nodes if _is_size(each)}
        self.sizes = [name for name in carried if name in ints]
        self.tensors = [name for name in carried if name not in ints]
        self._write(first, again + second, gradients, lasting, graphs)

    def _write(
        self, first: list[Line], second: list[Line], gradients: list[str], lasting: Collection[fx.Node], graphs: bool
    ) -> None:
        writer, device = self.writer, _device(self.plan)
        inputs = [writer.variable(each) for each in self.primals]
        stats = [name for name in self.tensors if name in writer.stats.values()]
        leaving = [f"{name}.partials" if name in stats else name for name in self.tensors]
        # How many columns each partial stands for is decided where it is made.
        widths = f"torch.tensor([{', '.join(f'{name}.width' for name in stats)}], dtype=torch.int64)"
        handing, results = writer.results(end=len(self.results), differentiated=True)
        forward = Function(
            "forward", inputs, [*first, *handing, Line(widths, "widths", kind="fixed")], [*results, "widths", *leaving, *self.sizes],
            writer.objects,
        )  # fmt: skip
        tangents = [writer.variable(each) for each in self.tangents]
        arriving = [f"{name}_partials" if name in stats else name for name in self.tensors]
        opening = []
        for at, name in enumerate(stats):
            sink = next(sink for sink, variable in writer.stats.items() if variable == name)
            made = writer.object(_Unfinished(sink.op[4:], sink.args[0].space.cols))
            opening.append(Line(f"{made}({name}_partials, widths[{at}])", name, kind="view"))
        backward = Function(
            "backward", [*self.sizes, "widths", *arriving, *tangents], opening + second, gradients,
            writer.objects,
        )  # fmt: skip
        self.source = f"{forward.source}\n\n{backward.source}"
        varying = [writer.variable(each) for each in self.primals if each not in lasting]
        first_policy = [FRESH] * len(results) + [TOKEN] + [KEPT] * (len(leaving) + len(self.sizes)) if graphs else []
        second_policy = [LENT] * len(self.gradients) if graphs else []
        written = _written(self.plan, writer)
        self.first = Bindings(
            forward, launch, device, varying, policy=first_policy, written=written, pure=_is_pure(self.plan)
        )  # fmt: skip
        self.second = Bindings(
            backward, launch, device, [*self.sizes, *arriving, *tangents], ["widths"], policy=second_policy, written=written
        )  # fmt: skip

    def forward(self, *inputs: Any) -> Any:
        """The results, then what is carried over: tensors, then sizes."""
        with self.running:
            return self.first(list(inputs))

    def backward(self, args: list[Any]) -> Any:
        """Given sizes, tensors and tangents, in a list that is emptied, so that each can go as soon as it has been used."""
        backwards.count += 1
        return self.second(args)


class Running(Stage):
    """A call of a plan. What fails in it may be done over by others, if the plan writes to nothing that was there before."""

    def __init__(self, plan: Plan) -> None:
        super().__init__("a call of the plan")
        self.again = not any(is_effect(each) for each in plan.graph.nodes.nodes)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            error.codetta_again = self.again  # type: ignore[attr-defined]
            super().__exit__(kind, error, traceback)


class _Unfinished:
    """A statistic whose partials were carried over."""

    def __init__(self, how: str, total: int) -> None:
        self.how, self.total = how, total

    def __call__(self, partials: Tensor, width: Tensor) -> Stat:
        return Stat(partials, self.how, int(width), self.total)


def _written(plan: Plan, writer: Writer) -> set[str]:
    """Arguments that the graph writes to."""
    return {
        writer.variable(origin(each.args[0]))
        for each in plan.graph.nodes.nodes
        if is_effect(each) and isinstance(each.args[0], fx.Node)
    }


def _is_pure(plan: Plan) -> bool:
    """Whether a call leaves nothing but its results: no tensor written over, no random numbers drawn."""
    return not any(is_effect(each) or is_random(each) for each in plan.graph.nodes.nodes)


def _device(plan: Plan) -> torch.device | None:
    """Of all launches; None if there are several."""
    devices = {step.device for step in plan.steps if isinstance(step, Launch)}
    return devices.pop() if len(devices) == 1 else None


def _is_size(each: fx.Node) -> bool:
    return isinstance(each.meta.get("val"), torch.SymInt | torch.SymFloat | int | float)


def _carried(second: list[Line], first: list[Line], known: set[str]) -> tuple[list[Line], list[str]]:
    """Lines of the first function that the second repeats, and what it must be given, in the order in which it was made."""
    made = {name for line in second for name in line.makes} | known
    needed = {name for line in second for name in line.uses} - made
    again: list[Line] = []
    for line in reversed(first):
        if line.again and line.makes & needed:
            again.insert(0, line)
            needed = (needed - line.makes) | line.uses
    order = {name: number for number, line in enumerate(first) for name in sorted(line.makes)}
    return again, sorted(needed, key=lambda name: (order.get(name, -1), name))
