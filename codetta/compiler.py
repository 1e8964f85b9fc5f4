"""START HERE: the way of a model from its graph to launched kernels, on one page.

    graph  --capture-->  values  --rewrite-->  values  --partition-->  Plan of Programs  --runtime-->  tensors

    capture/      what depends on a matrix product becomes values on token matrices; laws (rewrite/) are applied on the way
    placement     which program computes which value; what is known too late for any is left to the graph
    partition     what each program reads and stores, and the order of launches
    runtime/      kernels built side by side, the plan as one Python function, or two with gradients; dispatch.py picks the backend of each program

A Program is data (program.py). A function of the accumulator, written by hand, becomes one too: dsl.py, trace.py, call.py.
Dynamo hands over the graphs, see integrations/dynamo.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from torch import fx

from codetta.backends import cuda_phases
from codetta.capture import capture
from codetta.capture.appends import rows_are_appended
from codetta.capture.attention import heads_are_shared
from codetta.capture.embedding import embedding_adds_up
from codetta.capture.inner_products import inner_product_passes
from codetta.capture.kinds import is_refused, results_keep_apart
from codetta.capture.paddings import paddings_join
from codetta.capture.repeats import whole_slice_vanishes, without_repeats
from codetta.capture.sums import sums_of_products_join
from codetta.capture.weight_gradients import gradients_look_again, row_scale_crosses
from codetta.dispatch import why_never
from codetta.errors import Reason, RefusedByPyTorchError, Stage
from codetta.ir.view import hint
from codetta.options import Options, debug_level
from codetta.partition import PartitionError, partition
from codetta.phases import one_kernel
from codetta.progress import bar
from codetta.rewrite.scale import row_scale_commutes
from codetta.runtime.ahead import Ahead
from codetta.runtime.executor import Executor, Training
from codetta.runtime.writer import CompileRegion
from codetta.steps import Launch, Plan

Written = TypeVar("Written", Executor, Training)


def compile_graph(
    module: fx.GraphModule, parameters: Iterable[fx.Node], options: Options, compile_region: CompileRegion | None
) -> Executor:
    """An aten graph as something to call with its inputs. compile_region: who compiles what no program covers, if anybody."""
    parameters = list(parameters)
    plan = scheduled(plan_of(module, parameters, options), options)
    return built(plan, options, lambda: Executor(plan, compile_region, parameters, options.graphs == "auto"))


def compile_joint(
    module: fx.GraphModule,
    parameters: Iterable[fx.Node],
    outputs: int,
    options: Options,
    compile_region: CompileRegion | None,
) -> Training:
    """The same for a graph whose outputs after the first few are gradients: two functions, one after the other."""
    parameters = list(parameters)
    plan = plan_of(module, parameters, options, outputs)
    return built(plan, options, lambda: Training(plan, outputs, compile_region, parameters, options.graphs == "auto"))


def built(plan: Plan, options: Options, write: Callable[[], Written]) -> Written:
    """What is written of a plan, with all its kernels."""
    with Stage("kernels"):
        kernels = Ahead(plan)
    # While kernels are built, who compiles regions does that.
    with Stage("writing"):
        written = write()
    with Stage("kernels"), bar("codetta: kernels", len(kernels), options.progress) as advance:
        kernels.wait(advance)
    show(plan, written.source)
    return written


def scheduled(plan: Plan, options: Options) -> Plan:
    """The plan as it is, or with its launches as one kernel, where that is asked for or known to be faster."""
    launches = [step for step in plan.steps if isinstance(step, Launch)]
    if options.schedule == "chain" or not any(step.appends for step in launches):
        return plan  # no step of a decoder
    measured = options.schedule == "auto"
    if not all(cuda_phases.runs_on(device, measured) for device in {step.device for step in launches}):
        return plan
    with Stage("schedule"):
        found = one_kernel(plan)
    return found if isinstance(found, Plan) else replace(plan, why_chain=found)


def show(plan: Plan, source: str) -> None:
    """CODETTA_DEBUG: 2 laws and refusals, 3 the plan as it is executed."""
    graph = plan.graph
    if debug_level() >= 2:
        for each, laws in graph.fired.items():
            print(f"codetta: {each.name}: {', '.join(laws)}")
        for each, reason in graph.refusals.items():
            print(f"codetta: {each.name} stays with the graph: {reason}")
        if plan.why_chain is not None:
            print(f"codetta: not one kernel: {plan.why_chain}")
    if debug_level() >= 3:
        print(source)


def plan_of(
    module: fx.GraphModule, parameters: Iterable[fx.Node], options: Options, outputs: int | None = None
) -> Plan:
    """capture, rewrite, partition, until every program is one that a backend can run; the rest stays with the graph."""
    graph, parameters = module.graph, list(parameters)
    if any(is_refused(each) for each in graph.nodes):
        raise RefusedByPyTorchError
    with Stage("rewriting"):
        results_keep_apart(graph)
        rewritten(graph, parameters, options, outputs is not None)
    left: dict[fx.Node, Reason] = {}
    laws = [row_scale_commutes] if options.numerics == "default" else []
    while True:
        with Stage("capture"):
            captured = capture(graph, parameters, laws, left)
        if laws and outputs is not None:
            with Stage("rewriting"):
                passed = inner_product_passes(captured)
                left |= passed
                if row_scale_crosses(captured) or passed:
                    without_repeats(graph)
                    continue
        try:
            with Stage("partition"):
                plan = partition(captured, outputs, again=options.memory != "more")
            refused = why_never_all(plan)
            if plan.again & set(refused):
                with Stage("partition"):
                    plan = partition(captured, outputs, again=False)
                refused = why_never_all(plan)
        except PartitionError as error:
            refused = {error.group.number: error.reason}
        if not refused:
            return plan
        # Every round leaves at least one more product to the graph, so this ends.
        for number, reason in refused.items():
            left |= {captured.origin[product]: reason for product in captured.placement.groups[number].products}


def rewritten(graph: fx.Graph, parameters: list[fx.Node], options: Options, training: bool) -> None:
    """Laws on the graph's own operators, before anything is captured; in place."""
    whole_slice_vanishes(graph)
    without_repeats(graph)
    rows_are_appended(graph)
    heads_are_shared(graph)
    if training:
        embedding_adds_up(graph)
        paddings_join(graph)
        if options.numerics == "default":
            sums_of_products_join(graph, parameters)
        gradients_look_again(graph, parameters)
        without_repeats(graph)


def why_never_all(plan: Plan) -> dict[int, Reason]:
    """Programs that no backend can run, or not as fast as separate kernels, by number.

    Kernels that need no tensors to be built are built side by side; layers share their programs.
    """
    calls = {
        step.number: (step.program, step.device, hint(step.rows)) for step in plan.steps if isinstance(step, Launch)
    }
    different = list(dict.fromkeys(calls.values()))
    with Stage("lowering"), ThreadPoolExecutor() as pool:
        reasons = dict(zip(different, pool.map(lambda call: why_never(*call), different), strict=True))
    return {number: reasons[call][0] for number, call in calls.items() if reasons[call]}
