"""Phases: the launches of a plan for one row, and the attention between them, as one kernel.

A step of a decoder is a chain: each program needs all that the last one made. Where a plan's launches are one row each and what lies between
them is attention over a cache, the chain becomes phases of a single kernel (`schedule="persistent"`), which hand over vectors instead of
tensors. What has to be there before goes first, what needs their results comes after.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from codetta.attention import Attention
from codetta.backends import cuda_phases
from codetta.capture.attention import HOW
from codetta.capture.kinds import packet_of
from codetta.errors import Reason
from codetta.ir import view as views
from codetta.ir.graph import Node
from codetta.steps import (
    Attend,
    Finish,
    Fixed,
    Launch,
    Mask,
    Multiply,
    Phase,
    Plan,
    Present,
    Region,
    Room,
    Run,
    Source,
    Step,
    Vector,
    Whole,
)

aten, ours = torch.ops.aten, torch.ops.codetta
RESHAPES = (aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.alias, aten.clone)
TURNS = (aten.transpose, aten.permute)


def one_kernel(plan: Plan) -> Plan | Reason:
    """The plan with its launches as one step, or why not."""
    try:
        return _Phases(plan).plan()
    except _RefusedError as no:
        return no.reason


class _RefusedError(Exception):
    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(rule)
        self.reason = Reason(rule, detail)


class _Phases:
    def __init__(self, old: Plan) -> None:
        self.old, self.graph = old, old.graph
        self.phases: list[Phase] = []
        self.vectors: list[Vector] = []
        self.before: list[Step] = []
        self.after: list[Step] = []
        self.makers: dict[tuple[Node, torch.dtype], tuple[Multiply, str]] = {}
        self.stored: dict[tuple[Node, torch.dtype], Vector] = {}
        self.stats: dict[Node, Vector] = {}
        self.tensors: dict[fx.Node, Vector] = {}  # the row of a tensor of the graph, in order
        self.rows: dict[fx.Node, Vector] = {}  # that was appended, by what appends it
        self.late: set[fx.Node] = set()  # tensors that are made behind the kernel

    def plan(self) -> Plan:
        for step in self.old.steps:
            self._take(step)
        if not any(isinstance(each, Attend) for each in self.phases):
            raise _RefusedError("a step of a decoder", "nothing here is attention over a cache")
        places = {_origin(each.args[1]) for each in self.rows}
        places |= {each.places for each in self.phases if isinstance(each, Attend)}
        if len(places) > 1:
            raise _RefusedError("one place", "rows are appended at several")
        if sum(_entries(each) for each in self.phases) > cuda_phases.MOST_ENTRIES:
            raise _RefusedError("a table of 32 KB", f"{len(self.phases)} phases need more")
        life = Life(self.phases)
        if any(read - life.made[each] > cuda_phases.MOST_AGO for each, read in life.read.items()):
            raise _RefusedError("phases that are near", "a vector is read long after it was made")
        output = next(each for each in self.graph.nodes.nodes if each.op == "output")
        wanted = set(output.all_input_nodes)
        kept: list[Step] = []
        for step in reversed(self.after):
            if not isinstance(step, Present | Run) or step.target in wanted:
                kept.append(step)
                wanted |= {each for each in _reads(step, self.graph) if isinstance(each, fx.Node)}
        if wanted & {each.target for each in self.phases if isinstance(each, Attend)}:
            raise _RefusedError("one kernel", "somebody else reads what attention makes")
        for step in kept:
            if isinstance(step, Present):
                maker, name = self.makers[step.value.node, step.dtype]
                if name not in maker.keeps:
                    maker.keeps.append(name)
        whole = Whole(self.phases, self.vectors)
        wanted |= {each for phase in self.phases for each in self._given(phase)}
        steps = [*_needed(self.before, wanted, self.graph), whole, *reversed(kept)]
        return Plan(steps, self.graph, len(steps), self.old.again)

    def _take(self, step: Step) -> None:
        inside = any(self._is_inside(each) for each in _reads(step, self.graph))
        if isinstance(step, Launch) and step.program.multiplies:
            return self._multiply(step)
        if isinstance(step, Run) and packet_of(step.target) is ours.attention:
            return self._attend(step.target)
        if not inside:
            return self.before.append(step)
        if isinstance(step, Present) and _in_order(step):
            self.tensors[step.target] = self.stored[step.value.node, step.dtype]
        elif isinstance(step, Run) and _keeps_order(step.target):
            source = step.target.args[0]
            if source in self.tensors:
                self.tensors[step.target] = self.tensors[source]  # type: ignore[index]
        if not isinstance(step, Present | Run):
            raise _RefusedError("one kernel", f"a {type(step).__name__.lower()} needs what a phase makes")
        self.late.add(step.target)
        self.after.append(step)

    def _is_inside(self, each: object) -> bool:
        return (
            each in self.stored or each in self.stats or each in self.rows or each in self.tensors or each in self.late
        )

    def _vector(self, cols: int) -> Vector:
        self.vectors.append(Vector(len(self.vectors), cols))
        return self.vectors[-1]

    def _given(self, phase: Phase) -> Iterator[fx.Node]:
        """Tensors of the graph that a phase reads."""
        if isinstance(phase, Attend):
            yield from (phase.places, *phase.caches)
            return
        for source in (phase.a, *phase.operands.values()):
            if isinstance(source, Source) and source.kind == "leaf":
                yield self.graph.leaves[source.name].source
        yield from (each.args[0] for each in phase.launch.appends.values())  # type: ignore[misc]

    # ---- products

    def _multiply(self, step: Launch) -> None:
        program = step.program.narrow
        if step.rows != 1 or step.into:
            raise _RefusedError("one row", f"{program.name} has {step.rows}")
        reasons = cuda_phases.why_not(program)
        if reasons:
            raise _RefusedError(reasons[0].rule, f"{program.name}: {reasons[0].detail}")
        operands = {name: self._source(source) for name, source in step.operands.items() if name in _named(program)}
        for name, source in operands.items():
            operand = program.operand(name)
            if isinstance(source, Vector) and not operand.stat and not cuda_phases.is_peeked(operand):
                raise _RefusedError(
                    "operands of rows", f"{name} of {program.name} is read otherwise than column by column"
                )
        sends: dict[str, Vector] = {}
        phase = Multiply(step, program, self._source(step.a), operands, sends)
        for store in program.stores:
            sends[store.name] = self._vector(store.cols)
            if store.name in step.appends:
                self.rows[step.appends[store.name]] = sends[store.name]
            else:
                self.stored[step.stores[store.name]] = sends[store.name]
                self.makers[step.stores[store.name]] = phase, store.name
        for sink in program.sinks:
            self.stats[step.sinks[sink.name]] = sends[sink.name] = self._vector(0)
        self.phases.append(phase)

    def _source(self, source: Source) -> Vector | Source:
        match source.kind:
            case "stored" if (source.value, source.dtype) in self.stored:
                return self.stored[source.value, source.dtype]  # type: ignore[index]
            case "stat" if source.value in self.stats:
                return self.stats[source.value]
            case "leaf":
                leaf = self.graph.leaves[source.name]
                if leaf.source in self.tensors and leaf.start is None:
                    return self.tensors[leaf.source]
                if leaf.source in self.late or leaf.source in self.tensors:
                    raise _RefusedError(
                        "one kernel", f"a phase reads {leaf.source.name}, which is made of what a phase makes"
                    )
        return source

    # ---- attention

    def _attend(self, each: fx.Node) -> None:
        query, key, value, mask = each.args[:HOW]
        how = Attention(*each.args[HOW:])  # type: ignore[arg-type]
        seen = _seen(mask)
        if query not in self.tensors or key not in self.rows or value not in self.rows:
            raise _RefusedError("attention over a cache", f"{each.name} reads something else")
        if seen is None or how.causal:
            raise _RefusedError("attention over a cache", f"the mask of {each.name} is not that of a place")
        places, window = seen
        caches = key.args[0], value.args[0]  # type: ignore[union-attr]
        shape, cache = query.meta["val"].shape, key.meta["val"]  # type: ignore[union-attr]
        same = cache.shape == value.meta["val"].shape and all(_origin(node.args[1]) is places for node in (key, value))  # type: ignore[union-attr]
        reasons = cuda_phases.why_not_attend(shape[1], cache.shape[1], shape[-1], cache.dtype)
        if not same or shape[0] != 1 or shape[2] != 1 or not cache.is_contiguous():
            raise _RefusedError("attention over a cache", f"{each.name} is not one query of each head")
        if reasons:
            raise _RefusedError(reasons[0].rule, reasons[0].detail)
        scale = shape[-1] ** -0.5 if how.scale is None else how.scale
        result = self._vector(shape[1] * shape[-1])
        self.tensors[each] = result
        self.late.add(each)
        new = self.rows[key], self.rows[value]  # type: ignore[index]
        self.phases.append(Attend(each, self.tensors[query], new, caches, places, window, shape[1], scale, result))  # type: ignore[arg-type,index]


class Life:
    """When vectors are made, when they are read for the last time, and when every block is known to be done with that.

    Every block sends its part of a sum when the last of its warps is through a phase, and whoever reads the sum waits for all of them: behind
    that, nobody is still in that phase, or in one before it.
    """

    def __init__(self, phases: list[Phase]) -> None:
        self.made: dict[Vector, int] = {}
        self.read: dict[Vector, int] = {}
        self.gates: list[tuple[int, int]] = []  # the phase of a sum, and the first one that reads it
        for number, phase in enumerate(phases):
            for vector in _made(phase):
                self.made[vector] = self.read[vector] = number
            for vector in _read(phase):
                if not vector.cols and self.read[vector] == self.made[vector]:
                    self.gates.append((self.made[vector], number))
                self.read[vector] = number
        self.last = len(phases)

    def released(self, phase: int) -> int:
        """From which phase on everybody is done with an earlier one."""
        return min((reader for sum_, reader in self.gates if sum_ >= phase), default=self.last)


def _made(phase: Phase) -> list[Vector]:
    return [phase.result] if isinstance(phase, Attend) else list(phase.sends.values())


def _read(phase: Phase) -> list[Vector]:
    if isinstance(phase, Attend):
        return [phase.query, *phase.new]
    return [each for each in (phase.a, *phase.operands.values()) if isinstance(each, Vector)]


def _entries(phase: Phase) -> int:
    """How many addresses a phase needs at most."""
    if isinstance(phase, Attend):
        return 10
    program = phase.program
    return 1 + len(program.products) + 2 * len(program.operands) + 3 * len(program.stores) + len(program.sinks)


def _needed(steps: list[Step], wanted: set[fx.Node], graph: Any) -> list[Step]:
    """Those of the steps that somebody needs: no mask has to be made for attention that knows its place."""
    wanted, kept = set(wanted), []
    for step in reversed(steps):
        if isinstance(step, Present | Run | Mask) and step.target not in wanted:
            continue
        if isinstance(step, Region):
            step = step.needed(wanted)
        elif isinstance(step, Fixed):
            step = Fixed(step.makes.needed(wanted), step.lasting)
        if isinstance(step, Region | Fixed) and not (step.makes if isinstance(step, Fixed) else step).outputs:
            continue
        kept.append(step)
        wanted |= {each for each in _reads(step, graph) if isinstance(each, fx.Node)}
    return kept[::-1]


def _named(program: Any) -> set[str]:
    return {operand.name for operand in program.operands}


def _reads(step: Step, graph: Any) -> Iterator[object]:
    """Tensors of the graph, stored values and statistics that a step needs."""
    match step:
        case Launch():
            for source in [step.a, *step.operands.values()]:
                match source.kind:
                    case "leaf":
                        yield graph.leaves[source.name].source
                    case "stored":
                        yield source.value, source.dtype
                    case "stat":
                        yield source.value
                    case "places":
                        yield source.tensor.args[1]  # type: ignore[union-attr]
        case Present():
            yield step.value.node, step.dtype
        case Finish():
            yield from step.sinks
        case Run() | Room():
            yield from step.target.all_input_nodes
        case Region():
            yield from step.inputs
        case Mask() | Fixed():
            yield from step.makes.inputs


def _in_order(step: Present) -> bool:
    """Whether the columns of a stored row lie in the tensor as in the row."""
    flat = [factor for dim in step.value.dims for factor in dim if factor.kind == "col"]
    return flat == list(views.factors(step.value.dims, "col"))


def _keeps_order(each: fx.Node) -> bool:
    """Whether a tensor's elements come in the order of its argument's."""
    packet = packet_of(each)
    if packet in TURNS:
        given: Any = each.args
        shape = given[0].meta["val"].shape
        order = list(range(len(shape)))
        if packet is aten.permute:
            order = [at % len(shape) for at in given[1]]
        else:
            one, other = (at % len(shape) for at in given[1:3])
            order[one], order[other] = order[other], order[one]
        wide = [at for at in order if shape[at] != 1]
        return wide == sorted(wide)
    return packet in RESHAPES


def _origin(each: Any) -> Any:
    """What a tensor is a view of, with all its elements."""
    while isinstance(each, fx.Node) and packet_of(each) in (*RESHAPES, aten.expand):
        source: Any = each.args[0]
        if math.prod(source.meta["val"].shape) != math.prod(each.meta["val"].shape):
            break
        each = source
    return each


def _seen(mask: Any) -> tuple[fx.Node, int] | None:
    """The place of the newest position, if a mask shows everything up to it, and how much of that (0: all)."""
    mask = _origin(mask)
    if not isinstance(mask, fx.Node):
        return None
    packet = packet_of(mask)
    if packet is aten.le and _counts(mask.args[0]):
        places = _origin(mask.args[1])
        value = places.meta["val"] if isinstance(places, fx.Node) else None
        one = value is not None and value.dtype == torch.int64 and math.prod(value.shape) == 1
        return (places, 0) if one else None
    if packet not in (aten.bitwise_and, aten.logical_and):
        return None
    for upper, lower in (mask.args[:2], mask.args[1::-1]):
        found, below = _seen(upper), _origin(lower)
        if found is None or packet_of(below) is not aten.gt or not _counts(below.args[0]):
            continue
        far = _origin(below.args[1])
        if packet_of(far) is aten.sub and _origin(far.args[0]) is found[0] and isinstance(far.args[1], int):
            return found[0], far.args[1]
    return None


def _counts(each: Any) -> bool:
    """Whether it is 0, 1, 2, ..."""
    each = _origin(each)
    return isinstance(each, fx.Node) and packet_of(each) is aten.arange and each.args[:-1] in ((), (0,))
