"""Writer: the steps of a plan as lines of Python, each tensor a local variable that is dropped after its last use."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, fx

from codetta.attention import Attention
from codetta.capture.attention import HOW, OPERATORS
from codetta.capture.kinds import (
    MEMORY,
    is_effect,
    is_size_of_inputs,
    is_tangent,
    is_view,
    memory_of,
    origin,
    packet_of,
)
from codetta.ir import view as views
from codetta.ir.graph import Node
from codetta.ir.op import apply
from codetta.runtime.bind import strided
from codetta.runtime.constants import Constants
from codetta.runtime.function import Line
from codetta.runtime.launch import launch
from codetta.runtime.masks import SizedMask
from codetta.runtime.sized import Sized
from codetta.runtime.whole import Entry, OneKernel
from codetta.stat import Stat
from codetta.steps import (
    Attend,
    Finish,
    Fixed,
    Launch,
    Mask,
    Multiply,
    Plan,
    Present,
    Region,
    Room,
    Run,
    Source,
    Step,
    Whole,
)

aten = torch.ops.aten
# Who compiles a region that no program covers; None: it is not worth it.
CompileRegion = Callable[[fx.GraphModule], Callable[..., Any] | None]
WORD = re.compile(r"[A-Za-z_]\w*")


class Writer:
    """Writes the steps of a plan, and knows what its variables are.

    constants: those that are kept between calls, which the function is given in a list named `made`. None: nothing that depends on
    parameters is kept, and constants are made by lines of their own, before the first step that reads them.
    """

    def __init__(self, plan: Plan, constants: Constants | None, compile_region: CompileRegion | None) -> None:
        self.plan, self.compile_region = plan, compile_region
        self.graph = plan.graph
        self.keeps = constants is not None
        self.constants = constants or Constants(plan.graph, self.graph.nodes.find_nodes(op="placeholder"))
        self.written = 0  # constants that lines make already
        self.objects: list[Any] = []
        self.symbols: dict[str, str] = {}  # of sizes: where they come from
        self.sizes: dict[str, torch.SymInt] = {}  # and what they are
        self.stored: dict[tuple[Node, torch.dtype], str] = {}
        self.stats: dict[Node, str] = {}
        self.finished: dict[tuple[Node, torch.dtype], str] = {}
        self.lies: dict[fx.Node, str] = {}  # tensors that are views of what a program has made
        self.presented = {step.target: step for step in plan.steps if isinstance(step, Present)}
        self.output = next(each for each in self.graph.nodes.nodes if each.op == "output")
        self._symbols()

    def beginning(self) -> list[Line]:
        """What is there before the first step: constants, and what the graph holds itself."""
        kept = self.constants.recipes if self.keeps else []
        lines = [Line(f"made[{number}]", f"m{number}", kind="given") for number in range(len(kept))]
        for each in self.graph.nodes.nodes:
            if each.op == "get_attr":
                held = self.object(_attribute(self.graph.nodes.owning_module, str(each.target)))
                lines.append(Line(held, self.variable(each), again=True, kind="given"))
        return lines

    def lines(self, steps: Iterable[Step]) -> list[Line]:
        found: list[Line] = []
        for step in steps:
            lines = self._step(step)
            found += [*self._new_constants(), *lines]
        return found

    def _new_constants(self) -> list[Line]:
        """Lines that make the constants which the last step was the first to need."""
        if self.keeps:
            return []
        begin, self.written = self.written, len(self.constants.recipes)
        lines = []
        for number, recipe in enumerate(self.constants.recipes[begin:], begin):
            given = [*map(self.variable, recipe.sources), *(f"m{part}" for part in recipe.parts.values())]
            lines.append(Line(f"{self.object(recipe)}({', '.join(given)})", f"m{number}"))
        return lines

    def _step(self, step: Step) -> list[Line]:
        match step:
            case Launch():
                return [self._launch(step)]
            case Present():
                return [Line(self._present(step), self.variable(step.target), kind="view")]
            case Finish():
                return [self._finish(step)]
            case Run():
                return [self._operator(step.target)]
            case Mask():
                return [self._mask(step)]
            case Room():
                value = step.target.meta["val"]
                sizes = ", ".join(self.size(size) for size in value.shape)
                text = f"torch.empty(({sizes}), dtype={self.object(value.dtype)}, device={self.object(value.device)})"
                return [Line(text, self.variable(step.target), kind="room")]
            case Fixed():
                return self._fixed(step)
            case Region():
                return self._region(step)
            case Whole():
                return self._whole(step)

    def results(
        self, begin: int = 0, end: int | None = None, differentiated: bool = False
    ) -> tuple[list[Line], list[str]]:
        """Some of the graph's results as they are handed out, for others to look at and write to, and lines that make them so: what the
        graph has apart shares no memory here, and lies in it with the strides that the graph has.

        differentiated: to be the results of a function with gradients, of which none that is a view can be written to.
        """
        lines: list[Line] = []
        texts: list[str] = []
        known: list[tuple[str, str, str]] = []
        owners = self.output.meta[MEMORY]
        for each, owner in list(zip(self.output.args[0], owners, strict=True))[begin:end]:
            text = self.spell(each)
            if isinstance(each, fx.Node) and each.op == "call_function" and isinstance(each.meta.get("val"), Tensor):
                place = self._memory(each)
                others = [other for at, mine, other in known if at == place and mine != owner]
                known.append((place, owner, text))
                if end is not None and not self._lies_as_meant(each):
                    text = self._strided(each, each.meta["val"])
                if others:
                    text = f"{self.object(apart)}({text}, {others[0]})"
                elif differentiated and place != text:
                    text += ".detach()"  # shares the count of what is written to it, and is no view
                if text != self.spell(each):
                    name = f"v__result{begin + len(texts)}"
                    lines.append(Line(text, name, kind="view"))
                    text = name
            texts.append(text)
        return lines, texts

    def _memory(self, each: fx.Node) -> str:
        """A name for the memory that a tensor lies in here, where a copy may be none."""
        while each not in self.lies:
            source = memory_of(each, copies=True)
            if source is each:
                break
            each = source
        return self.lies.get(each, self.variable(each))

    @staticmethod
    def variable(each: fx.Node) -> str:
        return f"v_{each.name}"

    def object(self, value: Any) -> str:
        for number, known in enumerate(self.objects):
            if known is value:
                return f"c[{number}]"
        self.objects.append(value)
        return f"c[{len(self.objects) - 1}]"

    def spell(self, arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return self.variable(arg)
        if isinstance(arg, tuple | list):
            inner = ", ".join(self.spell(each) for each in arg)
            return f"[{inner}]" if isinstance(arg, list) else f"({inner}{',' if len(arg) == 1 else ''})"
        if isinstance(arg, dict):
            return "{" + ", ".join(f"{key!r}: {self.spell(each)}" for key, each in arg.items()) + "}"
        if isinstance(arg, torch.SymInt):
            return self.size(arg)
        if arg is None or isinstance(arg, bool | int | str):
            return repr(arg)
        return self.object(arg)

    def _symbols(self) -> None:
        """Where the symbols of sizes can be read off the inputs; not off gradients, which are not there on the way forward."""
        for each in self.graph.nodes.find_nodes(op="placeholder"):
            value = each.meta.get("val") if not is_tangent(each) else None
            given = value.shape if isinstance(value, Tensor) else [value]
            for at, size in enumerate(given):
                if isinstance(size, torch.SymInt) and str(size.node.expr) not in self.symbols:
                    place = f".shape[{at}]" if isinstance(value, Tensor) else ""
                    self.symbols[str(size.node.expr)] = self.variable(each) + place
                    self.sizes[str(size.node.expr)] = size

    def size(self, size: Any) -> str:
        if isinstance(size, int):
            return str(size)
        from torch.utils._sympy.printers import PythonPrinter

        expr = size.node.expr
        if str(expr) in self.symbols:
            return self.symbols[str(expr)]
        symbols = {str(symbol): self.symbols[str(symbol)] for symbol in expr.free_symbols}
        text = WORD.sub(lambda word: symbols.get(word[0], word[0]), PythonPrinter().doprint(expr))
        return f"({text})"

    def _operator(self, each: fx.Node) -> Line:
        kind = "fixed" if is_size_of_inputs(each) else "view" if is_view(each) else "call"
        return Line(self._run(each), self.variable(each), kind=kind)

    def _run(self, each: fx.Node) -> str:
        if is_size_of_inputs(each):
            return self.size(each.meta["val"])
        target, packet = each.target, packet_of(each)
        args = [self.spell(arg) for arg in each.args]
        if packet in (aten.view, aten._unsafe_view):
            return f"{args[0]}.reshape({args[1]})"  # what a program stored may lie otherwise in memory
        if packet is aten.clone and _is_made(origin(each.args[0])):  # type: ignore[arg-type]
            # Nothing is written in place, so a copy is needed only for its layout, or to part from an input.
            return f"{args[0]}.contiguous()" if "memory_format" in each.kwargs else args[0]
        if packet in OPERATORS:
            call = Attention(*each.args[HOW:])  # type: ignore[arg-type]
            method = str(packet).removeprefix("codetta.attention").replace("_", ".")
            return f"{self.object(call)}{method}({', '.join(args[:HOW])})"
        kwargs = [f"{key}={self.spell(arg)}" for key, arg in each.kwargs.items()]
        return f"{self.object(target)}({', '.join(args + kwargs)})"

    def _mask(self, step: Mask) -> Line:
        made = SizedMask(self._module(step.makes))
        sizes = ", ".join(self.variable(each) for each in step.makes.inputs)
        return Line(f"{self.object(made)}({sizes})", self.variable(step.target), again=True)

    def _fixed(self, step: Fixed) -> list[Line]:
        if not self.keeps and not step.lasting:
            return self._region(step.makes)
        made = self.object(Sized(self._module(step.makes), step.lasting))
        inputs = ", ".join(self.variable(each) for each in step.makes.inputs)
        return [Line(f"{made}({inputs})", self._results(step.makes), again=True)]

    def _region(self, step: Region) -> list[Line]:
        """One call, if a compiler takes the region; else its operators one by one."""
        symbols = self._free_symbols(step)
        compiled = self.compile_region(self._module(step, symbols)) if self.compile_region is not None else None
        if compiled is None:
            return [self._operator(each) for each in step.nodes]
        arguments = [*(self.symbols[name] for name in symbols), *(self._expected(each) for each in step.inputs)]
        return [Line(f"{self.object(compiled)}({', '.join(arguments)})", self._results(step))]

    def _free_symbols(self, step: Region) -> dict[str, torch.SymInt]:
        """Symbols of sizes that a compiler could not read off the region's inputs: of tensors whose sizes are made of several."""
        given = [size for each in step.inputs for size in _sizes(each.meta["val"])]
        bare = {str(size) for size in given}
        found: dict[str, torch.SymInt] = {}
        for size in [*given, *(size for each in step.nodes for size in _sizes(each.meta.get("val")))]:
            for symbol in size.node.expr.free_symbols:
                if str(symbol) not in bare and str(symbol) in self.sizes:
                    found[str(symbol)] = self.sizes[str(symbol)]
        return dict(sorted(found.items()))

    def _results(self, step: Region) -> str:
        return ", ".join(self.variable(each) for each in step.outputs) + ","

    def _module(self, step: Region, symbols: dict[str, torch.SymInt] | None = None) -> fx.GraphModule:
        """The region as a graph of its own; symbols: sizes that it is given before its inputs."""
        graph = fx.Graph()
        for name, size in (symbols or {}).items():
            graph.placeholder(f"size_{name}").meta["val"] = size
        inner: dict[fx.Node, fx.Node] = {}
        for each in step.inputs:
            inner[each] = graph.placeholder(each.name)
            inner[each].meta["val"] = self._as_presented(each)
        for each in step.nodes:
            inner[each] = graph.node_copy(each, lambda arg: inner[arg])
            if each.target in (aten.view.default, aten._unsafe_view.default):
                inner[each].target = aten.reshape.default  # what a program stored may lie otherwise in memory
        graph.output(tuple(inner[each] for each in step.outputs))
        return fx.GraphModule(self.graph.nodes.owning_module or {}, graph)

    def _as_presented(self, each: fx.Node) -> Any:
        """What a region is compiled for: a program's results lie in memory as rows of a matrix, whatever the graph thought."""
        value = each.meta["val"]
        if each not in self.presented:
            return value
        dims = self.presented[each].value.dims
        order = [*views.factors(dims, "row"), *views.factors(dims, "col")]
        flat = [factor for dim in dims for factor in dim]
        whole = value.new_empty([factor.size for factor in order])
        return whole.permute([order.index(factor) for factor in flat]).reshape(value.shape)

    def _expected(self, each: fx.Node) -> str:
        """A region's argument, with the strides that the region was compiled for. An operator lays out its results as its inputs lie,
        and those may lie otherwise than the graph thought; so may the results of another region."""
        value = self._as_presented(each)
        if not isinstance(value, Tensor) or origin(each).op in ("placeholder", "get_attr"):
            return self.variable(each)
        return self._strided(each, value)

    def _strided(self, each: fx.Node, like: Tensor) -> str:
        strides = ", ".join(self.size(stride) for stride in like.stride())
        return f"{self.object(strided)}({self.variable(each)}, ({strides}{',' if like.dim() == 1 else ''}))"

    def _lies_as_meant(self, each: fx.Node) -> bool:
        """Whether a program's results are known to have the strides of the graph."""
        if each not in self.presented:
            return False
        pairs = zip(self._as_presented(each).stride(), each.meta["val"].stride(), strict=True)
        return all(views.same(x, y) for x, y in pairs)

    def _present(self, step: Present) -> str:
        """The stored matrix as the tensor that the graph expects: a view."""
        dims = step.value.dims
        text = self.lies[step.target] = self.stored[step.value.node, step.dtype]
        order = [*views.factors(dims, "row"), *views.factors(dims, "col")]
        flat = [factor for dim in dims for factor in dim]
        if flat != order or [factor.kind for factor in order] != ["row", "col"]:
            text += f".view({', '.join(self.size(factor.size) for factor in order)})" if order else ""
        if flat != order:
            text += f".permute({', '.join(str(order.index(factor)) for factor in flat)})"
        final = [self.size(views.product(factor.size for factor in dim)) for dim in dims]
        if [len(dim) for dim in dims] != [1] * len(flat):
            text += f".reshape({', '.join(final) if final else '()'})"
        return text

    def _finish(self, step: Finish) -> Line:
        """Once, in however many shapes the graph wants it."""
        variable = self.variable(step.target)
        text = self.finished.get((step.value, step.dtype))
        if text is None:
            stats = ", ".join(self.stats[sink] for sink in step.sinks)
            text = f"{self.object(Finished(step.value, step.sinks))}({stats}).to({self.object(step.dtype)})"
            self.finished[step.value, step.dtype] = variable
        self.lies[step.target] = self.finished[step.value, step.dtype]
        sizes = ", ".join(self.size(size) for size in step.target.meta["val"].shape)
        return Line(f"{text}.view({sizes})", variable)

    def _source(self, source: Source) -> str:
        match source.kind:
            case "leaf":
                leaf = self.graph.leaves[source.name]
                return f"{self.object(leaf)}.matrix({self.variable(leaf.source)})"
            case "stored":
                assert source.value is not None and source.dtype is not None
                return self.stored[source.value, source.dtype]
            case "stat":
                assert source.value is not None
                return self.stats[source.value]
            case "constant":
                assert source.value is not None
                return f"m{self.constants.vector(source.value)}"
            case "places":
                assert source.tensor is not None
                cache, places, rows = source.tensor.args
                every = f"{self.spell(cache)}.shape[0], {self.size(rows.meta['val'].shape[2])}"  # type: ignore[union-attr]
                return f"{self.spell(places)}.expand({every}).reshape(-1)"
        raise AssertionError(source.kind)

    def _weight(self, name: str, gain: Node | None) -> str:
        """A weight (N, K): the parameter itself, or what was made of it."""
        weight = self.graph.weights[name]
        if gain is not None or weight.source.op != "placeholder":
            return f"m{self.constants.weight(name, gain)}"
        text = self.variable(weight.source) + (".t()" if weight.transposed else "")
        sizes = weight.source.meta["val"].shape
        whole = (weight.start, weight.stop) == (0, sizes[1 if weight.transposed else 0])
        return text if whole else f"{text}[{weight.start} : {weight.stop}]"

    def _launch(self, step: Launch) -> Line:
        results = []
        for name in step.program.outputs:
            variable = f"p{step.number}_{name}"
            if name in step.appends:
                variable = self.variable(step.appends[name])
            elif name in step.stores:
                self.stored[step.stores[name]] = variable
            else:
                self.stats[step.sinks[name]] = variable
            results.append(variable)
        weights = ", ".join(self._weight(name, gain) for name, gain in step.weights)
        operands = ", ".join(f"{name!r}: {self._source(source)}" for name, source in step.operands.items())
        given = f"{self.object(step.program)}, {self._source(step.a)}, [{weights}], {{{operands}}}"
        rooms = [
            f"{name!r}: {self.variable(room.target)}[..., {begin} : {begin + step.stores[name][0].space.cols}]"
            for name, (room, begin) in step.into.items()
        ]
        rooms += [f"{name!r}: {self.spell(append.args[0])}" for name, append in step.appends.items()]
        if rooms:
            given += f", {{{', '.join(rooms)}}}"
        return Line(f"{self.object(launch)}({given})", ", ".join(results) + ",", kind="launch")

    def _whole(self, step: Whole) -> list[Line]:
        """One call, with the tensors that its phases read; caches that they append to are what they were, and more."""
        kernel = OneKernel(step, step.products[0].launch.device)
        given = ", ".join(self._given(entry) for entry in kernel.given)
        results = []
        for entry in kernel.keeps:
            launch = cast(Multiply, entry.phase).launch
            results.append(f"p{launch.number}_{entry.operand}")
            self.stored[launch.stores[entry.operand]] = results[-1]
        appends = [each for phase in step.products for each in phase.launch.appends.values()]
        aliases = [Line(self.spell(each.args[0]), self.variable(each), kind="view") for each in appends]
        return [Line(f"{self.object(kernel)}([{given}])", "".join(f"{each}, " for each in results)), *aliases]

    def _given(self, entry: Entry) -> str:
        """What a place in the table is filled with."""
        phase = entry.phase
        if isinstance(phase, Attend):
            named = {"keys": phase.caches[0], "values": phase.caches[1], "places": phase.places}
            return self.variable(named[entry.name])
        match entry.kind:
            case "weight":
                return self._weight(*phase.launch.weights[int(entry.operand)])
            case "cache":
                return self.spell(phase.launch.appends[entry.operand].args[0])
            case "a":
                return self._source(cast(Source, phase.a))
        return self._source(cast(Source, phase.operands[entry.operand]))


@dataclass(frozen=True)
class Finished:
    """A value that is made of reductions alone, on whole tensors."""

    value: Node
    sinks: list[Node]
    numbers: dict[Node, Tensor] = field(
        default_factory=dict
    )  # on the device: copying one there again would wait for all before it

    def __call__(self, *stats: Stat) -> Tensor:
        known = dict(zip(self.sinks, (each.finish() for each in stats), strict=True))
        return self._of(self.value, known, stats[0].device)

    def _of(self, value: Node, known: dict[Node, Any], device: torch.device) -> Tensor:
        if value in known:
            found: Tensor = known[value]
            return found
        if value.op == "moment":
            mean, variance = known[value.args[0]]
            return mean if value.attr("field") == "mean" else variance
        if value.op == "const":
            if value not in self.numbers or self.numbers[value].device != device:
                self.numbers[value] = torch.tensor(value.attr("value"), device=device)
            return self.numbers[value]
        return apply(value.op, [self._of(arg, known, device) for arg in value.args], dict(value.attrs))


def apart(tensor: Tensor, other: Tensor) -> Tensor:
    """The tensor, copied if it shares memory with the other one."""
    return tensor.clone() if tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() else tensor


def _sizes(value: Any) -> list[torch.SymInt]:
    """The sizes and strides of a tensor that are no numbers, or a size itself."""
    if isinstance(value, tuple | list):
        return [size for each in value for size in _sizes(each)]
    given = [*value.shape, *value.stride()] if isinstance(value, Tensor) else [value]
    return [size for size in given if isinstance(size, torch.SymInt)]


def _is_made(each: fx.Node) -> bool:
    """Whether nobody but the plan has it, and nothing is written over it."""
    return each.op == "call_function" and not is_effect(each)


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module
