"""The `codetta` backend of torch.compile: Dynamo and AOTAutograd hand over a graph, a plan comes back.

Inference graphs become plans. A graph that needs gradients goes to Inductor as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from codetta.capture import capture
from codetta.partition import Plan, partition
from codetta.rewrite.scale import row_scale_commutes
from codetta.runtime.executor import Executor


def backend(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """What torch.compile(model, backend="codetta") calls."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.compile_fx import compile_fx

    if torch.is_grad_enabled() and _needs_gradients(module, inputs):
        return compile_fx(module, inputs)
    return aot_autograd(fw_compiler=compile_graph, inference_compiler=compile_graph)(module, inputs)


def _needs_gradients(module: fx.GraphModule, inputs: list[Any]) -> bool:
    tensors = [*inputs, *module.parameters()]
    return any(isinstance(each, torch.Tensor) and each.requires_grad for each in tensors)


def compile_graph(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """An aten graph as an executor."""
    executor = Executor(plan_of(module))
    _compiled.append(executor)
    return executor


def plan_of(module: fx.GraphModule) -> Plan:
    from torch._functorch.compile_utils import fx_graph_cse

    graph = fx.GraphModule(module, fx_graph_cse(module.graph)).graph
    return partition(capture(graph, _parameters(graph), [row_scale_commutes]))


def _parameters(graph: fx.Graph) -> list[fx.Node]:
    """Placeholders that are parameters or buffers: the same tensors at every call."""
    from torch._guards import TracingContext

    placeholders = [each for each in graph.nodes if each.op == "placeholder"]
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    static = metadata.static_input_indices if metadata is not None else []
    return [placeholders[at] for at in static if isinstance(placeholders[at].meta.get("val"), torch.Tensor)]


_compiled: list[Executor] = []
