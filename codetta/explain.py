"""Explain: what became of a model. Programs with their equations, laws that were applied, calls, what was left over and why.

Counts, not measurements: a kernel for each operator that is no view before, and for each program, call and region after;
each tensor once for each kernel that reads or writes it.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from codetta.capture.kinds import is_call, is_effect, is_view, packet_of
from codetta.errors import ArgumentError
from codetta.integrations.breaks import breaks_seen
from codetta.integrations.dynamo import Backend, backend_of, compile
from codetta.integrations.huggingface import Causal
from codetta.ir import view as views
from codetta.ir.show import equations
from codetta.options import Options
from codetta.partition import is_tensor_of_graph
from codetta.plan.cost import bytes_moved, flops, predicted_ms
from codetta.plan.target import device_target
from codetta.program import Program
from codetta.runtime.whole import OneKernel
from codetta.steps import Finish, Fixed, Launch, Mask, Multiply, Plan, Region, Run, Whole, sinks_of


@dataclass(frozen=True)
class ProgramReport:
    name: str
    where: str  # the module that the first product belongs to
    products: list[list[int]]  # N, K of each
    rows: int
    equations: list[str]
    laws: list[str]
    bytes: int
    flops: int
    predicted_ms: float | None  # by the roofline of the GPU it would run on; None on a CPU
    backward: bool = False  # whether only gradients need it


@dataclass
class Report:
    """What `explain` found, over all graphs of the model."""

    programs: list[ProgramReport] = field(default_factory=list)
    calls: list[dict[str, str]] = field(default_factory=list)
    leftover_ops: list[dict[str, Any]] = field(default_factory=list)
    launches_before: int = 0
    launches_after: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    refusals: list[dict[str, str]] = field(default_factory=list)
    graphs: int = 0
    breaks: list[str] = field(default_factory=list)  # where Dynamo could not follow the model, and why
    schedule: str = (
        ""  # of a decoder's step, where it was to be one kernel: how many phases that has, or why it is a chain
    )
    saved: list[dict[str, Any]] = field(default_factory=list)  # what gradients keep, beside parameters and inputs
    saved_bytes: int = 0
    eager_saved_bytes: int = 0
    decode: dict[str, Any] = field(
        default_factory=dict
    )  # of a step: its sizes, and bytes of the cache and of all that is made on the way

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = []
        for where, programs in _by_block(self.programs).items():
            calls = sum(call["where"].startswith(where) for call in self.calls) if where else 0
            lines.append(f"{where or 'the rest'}: {len(programs)} programs, {calls} attention calls")
            for program in programs:
                shape = " + ".join(f"{n}" for n, _ in program.products)
                size = f"({shape}) x {program.products[0][1]}" if program.products else "no product"
                backward = "  (backward)" if program.backward else ""
                lines.append(f"  {program.name}  {program.rows} x {size}  {program.where}{backward}")
                lines += [f"      {line}" for line in program.equations]
                if program.laws:
                    lines.append(f"      by {', '.join(program.laws)}")
        if self.leftover_ops:
            lines.append("left over:")
            lines += [f"  {each['count']:4d} x {each['op']}  {each['reason']}" for each in self.leftover_ops]
        if self.breaks:
            rest = f"{self.graphs} graphs" if self.graphs else "no graph: everything runs as it would without codetta"
            lines.append(f"the graph breaks ({rest}):")
            lines += [f"  {each}" for each in self.breaks]
        if self.schedule:
            lines.append(f"schedule: {self.schedule}")
        lines.append(f"kernels: {self.launches_before} -> {self.launches_after}")
        lines.append(f"bytes moved: {_size(self.bytes_before)} -> {_size(self.bytes_after)}")
        if self.saved:
            lines.append("kept for gradients, beside parameters and inputs:")
            lines += [f"  {_size(each['bytes']):>10}  {each['what']}  {each['shape']}" for each in self.saved]
            lines.append(f"  {_size(self.saved_bytes):>10}  in all, where eager keeps {_size(self.eager_saved_bytes)}")
        if self.decode:
            one = self.decode
            lines.append(f"a step of {one['batch']} sequences, {one['context']} tokens each at most:")
            lines.append(
                f"  {_size(one['cache_bytes']):>10}  cache, {one['layers']} layers of keys and values {one['shape']}"
            )
            lines.append(f"  {_size(one['workspace_bytes']):>10}  made on the way, if nothing of it were dropped")
            lines.append(f"  {_size(one['weight_bytes']):>10}  parameters")
        return "\n".join(lines)


def explain(model: Any, *inputs: Any, options: Options | None = None, training: bool = False, **named: Any) -> Report:
    """The report of a call `model(*inputs, **named)`; the model may be compiled already or not, and stays as it is.

    training: of a call with gradients, with what it keeps for them.
    """
    if not callable(model):
        raise ArgumentError("model", f"is a {type(model).__name__}", "pass an nn.Module or a function of tensors")
    known = backend_of(model)
    options = options or (known.options if known is not None else Options())
    backend = Backend(options)
    target: Any = model
    if isinstance(model, nn.Module):
        target = copy.copy(model)
        target._compiled_call_impl = None
    compiled = compile(target, options=options, backend=backend)
    backend.arrived = True  # what it would say, the report says
    with torch.set_grad_enabled(training), _kept() as kept, breaks_seen() as breaks:
        compiled(*inputs, **named)
    plans = [executor.plan for executor in backend.executors] + [each.plan for each in backend.trainings]
    report = Report(graphs=len(plans), breaks=breaks)
    for plan in plans:
        _add(report, plan)
    if training:
        _add_saved(report, backend, kept, target, (inputs, named))
    return report


@torch.no_grad()
def explain_decode(model: nn.Module, *, batch: int = 1, context: int = 4096, options: Options | None = None) -> Report:
    """The report of one step of generation, with the sizes of its cache and of what it makes on the way."""
    known = backend_of(model)
    backend = Backend(options or (known.options if known is not None else Options()))
    plain = copy.copy(model)
    plain._compiled_call_impl = None
    causal, device = Causal(plain), next(model.parameters()).device
    _, keys, values = causal.prompt(torch.zeros((1, 1), dtype=torch.int64, device=device))
    slots = causal.slots(batch, context, keys, values)
    step = compile(causal.step(slots), backend=backend, dynamic=False)
    step(slots.places, slots.places)
    report = Report(graphs=len(backend.executors))
    for executor in backend.executors:
        _add(report, executor.plan)
        report.decode["workspace_bytes"] = report.decode.get("workspace_bytes", 0) + _made(executor.plan)
    shape = "x".join(map(str, slots.keys[0].shape)) + f" {str(slots.keys[0].dtype).removeprefix('torch.')}"
    report.decode |= {
        "batch": batch, "context": context, "layers": len(slots.keys), "shape": shape, "cache_bytes": slots.bytes,
        "weight_bytes": sum(each.nbytes for each in model.parameters()),
    }  # fmt: skip
    return report


def _made(plan: Plan) -> int:
    """Bytes that the steps of a plan allocate, views and caches aside."""
    total = 0
    for step in plan.steps:
        if isinstance(step, Launch):
            stores = [each for each in step.program.stores if each.name not in step.appends]
            total += sum(views.hint(step.rows) * max(each.cols, 1) * each.dtype.itemsize for each in stores)
        if isinstance(step, Whole):
            total += OneKernel(step, step.products[0].launch.device).bytes
        nodes = step.nodes if isinstance(step, Region) else [step.target] if isinstance(step, Run) else []
        total += _bytes(each for each in nodes if not is_view(each) and not is_effect(each))
    return total


@contextlib.contextmanager
def _kept() -> Iterator[list[Tensor]]:
    """Tensors that are kept for gradients while this lasts."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def _add_saved(report: Report, backend: Backend, kept: list[Tensor], model: Any, call: tuple[Any, Any]) -> None:
    """What the compiled model has kept, by name, and how much the plain one keeps: each piece of memory once."""
    inputs, named = call
    given = [each for each in (*inputs, *named.values()) if isinstance(each, Tensor)]
    if isinstance(model, nn.Module):
        given += [*model.parameters(), *model.buffers()]
    names = [name for each in backend.trainings for name in ("widths", *each.tensors)]
    known = {each.untyped_storage().data_ptr() for each in given}
    for at, tensor in enumerate(kept):
        memory = tensor.untyped_storage()
        if memory.data_ptr() in known or not memory.nbytes():
            continue
        known.add(memory.data_ptr())
        what = _spelled(names[at]) if len(names) == len(kept) else "tensor"
        shape = "x".join(map(str, tensor.shape)) + f" {str(tensor.dtype).removeprefix('torch.')}"
        report.saved.append({"what": what, "shape": shape, "bytes": memory.nbytes()})
    report.saved_bytes = sum(each["bytes"] for each in report.saved)
    known = {each.untyped_storage().data_ptr() for each in given}
    plain = model.forward if isinstance(model, nn.Module) else model
    with torch.enable_grad(), _kept() as theirs:
        plain(*inputs, **named)
    apart = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in theirs}
    report.eager_saved_bytes = sum(size for memory, size in apart.items() if memory not in known)


def _spelled(variable: str) -> str:
    """p3_s0 -> program_3 s0; v_getitem -> getitem"""
    found = re.fullmatch(r"p(\d+)_(\w+)", variable)
    return f"program_{found[1]} {found[2]}" if found else variable.removeprefix("v_")


def _add(report: Report, plan: Plan) -> None:
    nodes = [each for each in plan.graph.nodes.nodes if each.op == "call_function"]
    before = [each for each in nodes if not is_view(each)]
    report.launches_before += len(before)
    report.bytes_before += sum(_bytes([*each.all_input_nodes, each]) for each in before)
    left: Counter[tuple[str, str]] = Counter()
    for number, step in enumerate(plan.steps):
        match step:
            case Launch():
                program = _program(plan, step, backward=number >= plan.forward)
                report.programs.append(program)
                report.launches_after += 1
                report.bytes_after += program.bytes
            case Whole():
                report.schedule = f"one kernel of {len(step.phases)} phases"
                report.launches_after += 1
                for phase in step.phases:
                    if isinstance(phase, Multiply):
                        report.programs.append(_program(plan, phase.launch, backward=False))
                        report.bytes_after += report.programs[-1].bytes
                    else:
                        report.calls.append({"op": _op(phase.target), "where": _where(phase.target)})
                        report.bytes_after += _bytes([*phase.target.all_input_nodes, phase.target])
            case Run() if is_call(step.target):
                report.calls.append({"op": _op(step.target), "where": _where(step.target)})
                report.launches_after += 1
                report.bytes_after += _bytes([*step.target.all_input_nodes, step.target])
            case Finish():
                report.launches_after += 1
            case Run() if not is_view(step.target):
                left[_op(step.target), _reason(plan, step.target)] += 1
                report.launches_after += 1
                report.bytes_after += _bytes([*step.target.all_input_nodes, step.target])
            case Region():
                left.update((_op(each), _reason(plan, each)) for each in step.nodes if not is_view(each))
                report.launches_after += 1
                report.bytes_after += _bytes([*step.inputs, *step.outputs])
            case Mask():
                left["mask", "made of sizes alone: once for each size"] += 1
            case Fixed():
                for each in step.makes.nodes:
                    if not is_view(each):
                        left[_op(each), "made of sizes and parameters alone: once for each size"] += 1
    if plan.why_chain is not None and not report.schedule:
        report.schedule = f"a chain of kernels ({plan.why_chain})"
    report.leftover_ops += [{"op": op, "count": n, "reason": reason} for (op, reason), n in left.items()]
    for each, reason in plan.graph.refusals.items():
        report.refusals.append({"op": _op(each), "where": _where(each), "reason": str(reason)})


def _program(plan: Plan, step: Launch, backward: bool) -> ProgramReport:
    program, graph = step.program, plan.graph
    origins = [graph.origin[product] for product in graph.placement.groups[step.number].products]
    laws = [law for each in origins for law in graph.fired.get(each, [])]
    reached = {value for value, _ in step.stores.values()}
    for each, value in graph.values.items():
        if each in graph.fired and (value.node in reached or set(sinks_of(value.node)) & set(step.sinks.values())):
            laws += graph.fired[each]
    if len(program.products) > 1:
        laws.append("products_merge")
    if program.sinks:
        laws.append("statistic_splits")
    rows, target = views.hint(step.rows), device_target(step.device)
    return ProgramReport(
        program.name,
        _where(origins[0]),
        [[product.cols, program.k] for product in program.products],
        rows,
        _equations(program),
        list(dict.fromkeys(laws)),
        bytes_moved(program, rows),
        flops(program, rows),
        round(predicted_ms(program, rows, target), 5) if target is not None else None,
        backward,
    )


def _equations(program: Program) -> list[str]:
    roots = {}
    for store in program.stores:
        for number, piece in enumerate(store.pieces):
            roots[store.name + (f".{number}" if len(store.pieces) > 1 else "")] = piece.value
    for sink in program.sinks:
        for number, value in enumerate(sink.values):
            roots[f"{sink.name}{f'.{number}' if number else ''} = {sink.op}"] = value
    return equations(roots)


def _reason(plan: Plan, each: fx.Node) -> str:
    if each in plan.graph.refusals:
        return str(plan.graph.refusals[each])
    if any(arg in plan.graph.refusals for arg in each.all_input_nodes):
        return "reads what was left over"
    value = plan.graph.values.get(each)
    before = value is None or is_tensor_of_graph(value.node)
    return "no product before it" if before else "known too late for the program that makes it"


def _op(each: fx.Node) -> str:
    return str(packet_of(each) or getattr(each.target, "__name__", each.target))


def _where(each: fx.Node) -> str:
    """The path of the module that the operator comes from, or whose gradients it makes."""
    stack = each.meta.get("nn_module_stack") or each.meta.get("fwd_nn_module_stack") or {}
    path = [str(name) for name, _ in stack.values()]
    return _plain(path[-1]) if path else ""


def _plain(path: str) -> str:
    """L['self']._modules['layers']['0'].mlp, as Dynamo spells it -> layers.0.mlp"""
    path = re.sub(r"^L\['\w+'\]", "", path).replace("_modules", "")
    path = re.sub(r"^.*cell_contents", "", path)  # a model that a function holds
    return ".".join(word for word in re.split(r"[\[\]'\".]+", path) if word and word != "__self__")


def _by_block(programs: Iterable[ProgramReport]) -> dict[str, list[ProgramReport]]:
    """Programs by the numbered module that they belong to, such as layers.0."""
    found: dict[str, list[ProgramReport]] = {}
    for program in programs:
        words = program.where.split(".")
        numbered = next((at for at, word in enumerate(words) if word.isdigit()), None)
        found.setdefault(".".join(words[: numbered + 1]) if numbered is not None else "", []).append(program)
    return found


def _bytes(nodes: Iterable[fx.Node]) -> int:
    total = 0
    for each in dict.fromkeys(nodes):
        values = each.meta.get("val")
        for value in values if isinstance(values, tuple | list) else [values]:
            if isinstance(value, Tensor):
                count = 1
                for size in value.shape:
                    count *= views.hint(size)
                total += count * value.element_size()
    return total


def _size(count: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count} B"
