"""Executor: a plan as one Python function, written once and called with the graph's inputs.

The function is a list of launches and of operators that stayed with the graph, each tensor a local variable that is dropped
after its last use. What parameters alone decide (weights with a norm's gain in them, vectors) is made when first needed
and again whenever one of those parameters has changed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from codetta import dispatch
from codetta.capture import Graph
from codetta.capture.attention import MASK
from codetta.capture.kinds import is_attention, packet_of
from codetta.errors import CheckError
from codetta.ir import view as views
from codetta.ir.graph import Node
from codetta.ir.op import apply, compute_dtype
from codetta.partition import Fixed, Launch, Mask, Plan, Present, Region, Run, Source, origin
from codetta.program import Program
from codetta.runtime.attention import Attention, SizedMask
from codetta.runtime.bind import Binding, bind_operand, bind_output, matrix
from codetta.runtime.sized import Sized, state_of
from codetta.stat import Stat

aten = torch.ops.aten
# Who compiles a region that no program covers; None: it is not worth it.
CompileRegion = Callable[[fx.GraphModule], Callable[..., Any] | None]


class Executor:
    """Callable with the graph's placeholders, in order; returns its outputs as a tuple."""

    def __init__(self, plan: Plan, compile_region: CompileRegion | None = None) -> None:
        self.plan = plan
        self.constants = Constants(plan.graph)
        writer = _Writer(plan, self.constants, compile_region)
        self.source = writer.source()
        scope: dict[str, Any] = {"c": writer.objects, "torch": torch}
        exec(compile(self.source, "<codetta plan>", "exec"), scope)
        self._function: Callable[..., Any] = scope["plan"]

    def __call__(self, *inputs: Any) -> Any:
        return self._function(self.constants.fresh(inputs), *inputs)


class Constants:
    """What parameters alone decide, by name; made anew when a parameter has changed."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.placeholders = [each for each in graph.nodes.nodes if each.op == "placeholder"]
        self.index = {each: number for number, each in enumerate(self.placeholders)}
        self.recipes: list[Callable[[_Parameters], Tensor]] = []
        self.keys: list[object] = []
        self.watched: list[int] = []
        self.made: list[Tensor] = []
        self.state: tuple[object, ...] | None = None

    def weight(self, name: str, gain: Node | None) -> int:
        return self._recipe(("weight", name, gain), lambda at: at.weight(name, gain))

    def vector(self, value: Node) -> int:
        return self._recipe(("vector", value), lambda at: at.vector(value))

    def _recipe(self, key: object, make: Callable[[_Parameters], Tensor]) -> int:
        if key not in self.keys:
            self.keys.append(key)
            self.recipes.append(make)
        return self.keys.index(key)

    def fresh(self, inputs: Sequence[Any]) -> list[Tensor]:
        if self.state is None or self._state(inputs) != self.state:
            at = _Parameters(self.graph, dict(zip(self.placeholders, inputs, strict=True)))
            with torch.no_grad():
                self.made = [recipe(at) for recipe in self.recipes]
            self.watched = sorted(self.index[each] for each in at.used)
            self.state = self._state(inputs)
        return self.made

    def _state(self, inputs: Sequence[Any]) -> tuple[object, ...]:
        return tuple(state_of(inputs[at]) for at in self.watched)


class _Parameters:
    """The graph's parameters, for one making of the constants; remembers which were used."""

    def __init__(self, graph: Graph, given: dict[fx.Node, Any]) -> None:
        self.graph, self.known = graph, dict(given)
        self.given = set(given)
        self.used: set[fx.Node] = set()
        self.weights: dict[tuple[str, Node | None], Tensor] = {}

    def tensor(self, each: fx.Node) -> Tensor:
        if each in self.given:
            self.used.add(each)
        elif each not in self.known:
            args, kwargs = fx.node.map_arg((each.args, each.kwargs), self.tensor)
            self.known[each] = each.target(*args, **kwargs)  # type: ignore[operator]
        return self.known[each]

    def weight(self, name: str, gain: Node | None) -> Tensor:
        """(N, K), with the gain of its K columns multiplied in."""
        if (name, gain) not in self.weights:
            known = self.graph.weights[name]
            part = known.matrix(self.tensor(known.source))
            if gain is not None:
                wide = compute_dtype(part.dtype)
                scaled = (part.to(wide) * self.vector(gain).to(wide)).to(part.dtype)
                # As the weight lies in memory, which the program was written for.
                part = scaled.t().contiguous().t() if known.transposed else scaled.contiguous()
            self.weights[name, gain] = part
        return self.weights[name, gain]

    def vector(self, value: Node) -> Tensor:
        """A row made of parameters: fp32, or fp64 for a model in it."""
        match value.op:
            case "const":
                return torch.tensor(value.attr("value"))
            case "load":
                leaf = self.graph.leaves[value.attr("name")]
                tensor = self.tensor(leaf.source)
                if leaf.start is not None:
                    tensor = tensor[..., leaf.start : leaf.start + leaf.operand.cols]
                flat = tensor.reshape(-1).to(compute_dtype(tensor.dtype))
                if not value.space.cols:
                    return flat.reshape(())
                return flat.repeat(value.space.cols // flat.numel())
            case "vector":
                weight = self.weight(value.attr("weight"), value.attr("gain"))
                row = self.vector(value.args[0]).to(weight.device)
                return (weight.to(compute_dtype(weight.dtype)) * row).sum(1)
        args = [self.vector(arg) for arg in value.args]
        return apply(value.op, args, dict(value.attrs))


def launch(program: Program, a: Tensor, b: Sequence[Tensor], values: dict[str, Tensor | Stat]) -> list[Tensor | Stat]:
    """Run one program of a plan; its stores and sinks in the order of its outputs."""
    a, major = matrix("a", a)
    if major == "column":
        a = a.contiguous()
    rows = a.shape[0]
    samples = 1
    for operand in program.operands:
        if operand.rows == "sample":
            samples = values[operand.name].shape[0]  # type: ignore[union-attr]
    bound = {each.name: bind_operand(each, values[each.name], rows, samples) for each in program.operands}
    outputs = {each.name: bind_output(each, None, rows, samples, a.device) for each in program.stores}
    binding = Binding(rows, samples, 1, (rows,), a, tuple(b), bound, outputs)
    results = dispatch.run(program, binding)
    if os.environ.get("CODETTA_CHECK", "0") not in ("", "0"):
        check(program, binding, results)
    return [results[name] for name in program.outputs]


def check(program: Program, binding: Binding, results: dict[str, Tensor | Stat]) -> None:
    """CODETTA_CHECK=1: hold a program to the reference on the tensors at hand; the first that disagrees is named."""
    from codetta.backends import reference

    got = {name: _finished(value) for name, value in results.items()}
    truth = reference.run(program, binding, precise=True)
    plain = reference.run(program, binding, separate=True)
    for name in program.outputs:
        for mine, exact, usual in zip(got[name], _finished(truth[name]), _finished(plain[name]), strict=True):
            scale = exact.double().norm().clamp_min(1e-30)
            error, theirs = ((each.double() - exact.double()).norm() / scale for each in (mine, usual))
            if not error <= 2 * theirs + 1e-3:
                raise CheckError(
                    f"{program.name}: output {name} is off by {error:.2e} where separate kernels are by {theirs:.2e}\n{program}"
                )


def _finished(value: Tensor | Stat) -> tuple[Tensor, ...]:
    done = value.finish() if isinstance(value, Stat) else value.clone()
    return done if isinstance(done, tuple) else (done,)


class _Writer:
    """Writes the function."""

    def __init__(self, plan: Plan, constants: Constants, compile_region: CompileRegion | None) -> None:
        self.plan, self.constants, self.compile_region = plan, constants, compile_region
        self.graph = plan.graph
        self.objects: list[Any] = []
        self.lines: list[str] = []
        self.symbols: dict[str, str] = {}  # of sizes: where they come from
        self.stored: dict[tuple[Node, torch.dtype], str] = {}
        self.stats: dict[Node, str] = {}
        self.presented = {step.target: step for step in plan.steps if isinstance(step, Present)}

    def source(self) -> str:
        inputs = [self.variable(each) for each in self.constants.placeholders]
        self._symbols()
        for each in self.graph.nodes.nodes:
            if each.op == "get_attr":
                held = self.object(_attribute(self.graph.nodes.owning_module, str(each.target)))
                self.lines.append(f"{self.variable(each)} = {held}")
        for step in self.plan.steps:
            match step:
                case Launch():
                    self._launch(step)
                case Present():
                    self.lines.append(f"{self.variable(step.target)} = {self._present(step)}")
                case Run():
                    self.lines.append(f"{self.variable(step.target)} = {self._run(step.target)}")
                case Mask():
                    self._mask(step)
                case Fixed():
                    self._fixed(step)
                case Region():
                    self._region(step)
        output = next(each for each in self.graph.nodes.nodes if each.op == "output")
        self.lines.append(f"return {self.spell(output.args[0])}")
        body = _with_drops(self.lines, keep=set(inputs))
        return "\n".join([f"def plan(made, {', '.join(inputs)}):", *(f"    {line}" for line in body)])

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
        if arg is None or isinstance(arg, bool | int | str):
            return repr(arg)
        return self.object(arg)

    def _symbols(self) -> None:
        """Where the symbols of sizes can be read off the inputs."""
        for each in self.constants.placeholders:
            value = each.meta.get("val")
            if isinstance(value, torch.SymInt):
                self.symbols.setdefault(str(value.node.expr), self.variable(each))
            elif isinstance(value, Tensor):
                for at, size in enumerate(value.shape):
                    if isinstance(size, torch.SymInt):
                        self.symbols.setdefault(str(size.node.expr), f"{self.variable(each)}.shape[{at}]")

    def size(self, size: Any) -> str:
        if isinstance(size, int):
            return str(size)
        from torch.utils._sympy.printers import PythonPrinter

        expr = size.node.expr
        if str(expr) in self.symbols:
            return self.symbols[str(expr)]
        text = PythonPrinter().doprint(expr)
        for symbol in sorted(map(str, expr.free_symbols), key=len, reverse=True):
            text = text.replace(symbol, self.symbols[symbol])
        return f"({text})"

    def _run(self, each: fx.Node) -> str:
        target, packet = each.target, packet_of(each)
        args = [self.spell(arg) for arg in each.args]
        if packet in (aten.view, aten._unsafe_view):
            return f"{args[0]}.reshape({args[1]})"  # what a program stored may lie otherwise in memory
        if packet is aten.clone and origin(each.args[0]).op == "call_function":  # type: ignore[arg-type]
            # Nothing is written in place, so a copy is needed only for its layout, or to part from an input.
            return f"{args[0]}.contiguous()" if "memory_format" in each.kwargs else args[0]
        if packet is torch.ops.codetta.attention:
            call = Attention(*each.args[MASK + 1 :])  # type: ignore[arg-type]
            return f"{self.object(call)}({', '.join(args[: MASK + 1])})"
        kwargs = [f"{key}={self.spell(arg)}" for key, arg in each.kwargs.items()]
        return f"{self.object(target)}({', '.join(args + kwargs)})"

    def _mask(self, step: Mask) -> None:
        made = SizedMask(self._module(step.makes))
        sizes = ", ".join(self.variable(each) for each in step.makes.inputs)
        self.lines.append(f"{self.variable(step.target)} = {self.object(made)}({sizes})")

    def _fixed(self, step: Fixed) -> None:
        made = self.object(Sized(self._module(step.makes)))
        results = ", ".join(self.variable(each) for each in step.makes.outputs)
        inputs = ", ".join(self.variable(each) for each in step.makes.inputs)
        self.lines.append(f"{results}, = {made}({inputs})")

    def _region(self, step: Region) -> None:
        """One call, if a compiler takes the region; else its operators one by one."""
        function = self.compile_region(self._module(step)) if self.compile_region is not None else None
        if function is None:
            self.lines += [f"{self.variable(each)} = {self._run(each)}" for each in step.nodes]
            return
        results = ", ".join(self.variable(each) for each in step.outputs)
        arguments = ", ".join(self._expected(each) for each in step.inputs)
        self.lines.append(f"{results}, = {self.object(function)}({arguments})")

    def _module(self, step: Region) -> fx.GraphModule:
        """The region as a graph of its own."""
        graph = fx.Graph()
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
        """A region's argument: kernels of others may lay out their results differently when their inputs lie otherwise."""
        value = each.meta["val"]
        if not isinstance(value, Tensor) or not is_attention(origin(each)):
            return self.variable(each)
        strides = ", ".join(self.size(stride) for stride in value.stride())
        return f"{self.object(strided)}({self.variable(each)}, ({strides},))"

    def _present(self, step: Present) -> str:
        """The stored matrix as the tensor that the graph expects: a view."""
        dims = step.value.dims
        text = self.stored[step.value.node, step.dtype]
        order = [*views.factors(dims, "row"), *views.factors(dims, "col")]
        flat = [factor for dim in dims for factor in dim]
        if flat != order or len(order) != 2:
            text += f".view({', '.join(self.size(factor.size) for factor in order)})" if order else ""
        if flat != order:
            text += f".permute({', '.join(str(order.index(factor)) for factor in flat)})"
        final = [self.size(views.product(factor.size for factor in dim)) for dim in dims]
        if [len(dim) for dim in dims] != [1] * len(flat):
            text += f".reshape({', '.join(final) if final else '()'})"
        return text

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
                return f"made[{self.constants.vector(source.value)}]"
        raise AssertionError(source.kind)

    def _weight(self, name: str, gain: Node | None) -> str:
        """A weight (N, K): the parameter itself, or what was made of it."""
        weight = self.graph.weights[name]
        if gain is not None or weight.source.op != "placeholder":
            return f"made[{self.constants.weight(name, gain)}]"
        text = self.variable(weight.source) + (".t()" if weight.transposed else "")
        sizes = weight.source.meta["val"].shape
        whole = (weight.start, weight.stop) == (0, sizes[1 if weight.transposed else 0])
        return text if whole else f"{text}[{weight.start} : {weight.stop}]"

    def _launch(self, step: Launch) -> None:
        results = []
        for name in step.program.outputs:
            variable = f"p{step.number}_{name}"
            if name in step.stores:
                self.stored[step.stores[name]] = variable
            else:
                self.stats[step.sinks[name]] = variable
            results.append(variable)
        weights = ", ".join(self._weight(name, gain) for name, gain in step.weights)
        operands = ", ".join(f"{name!r}: {self._source(source)}" for name, source in step.operands.items())
        call = (
            f"{self.object(launch)}({self.object(step.program)}, {self._source(step.a)}, [{weights}], {{{operands}}})"
        )
        self.lines.append(f"{', '.join(results)}{',' if len(results) == 1 else ''} = {call}")


def strided(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The tensor with these strides; copied only if it has others."""
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name)
    return module


def _with_drops(lines: list[str], keep: set[str]) -> list[str]:
    """The lines with each variable deleted behind its last use, so that its memory serves the next."""
    import re

    names = [set(re.findall(r"\b(?:v_\w+|p\d+_\w+)\b", line)) for line in lines]
    last: dict[str, int] = {}
    for number, found in enumerate(names):
        for name in found:
            last[name] = number
    result = []
    for number, line in enumerate(lines):
        result.append(line)
        gone = sorted(name for name in names[number] if last[name] == number and name not in keep)
        if gone and number < len(lines) - 1:
            result.append(f"del {', '.join(gone)}")
    return result
