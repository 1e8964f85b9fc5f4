"""The `codetta` backend of torch.compile: Dynamo and AOTAutograd hand over a graph, a plan comes back.

Inference graphs become plans; graphs that need gradients become plans of two halves (joint.py).
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch._guards import TracingContext
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from codetta.capture.attention import stays_whole
from codetta.capture.kinds import is_effect, is_view
from codetta.capture.loss import Spared, loss_takes_the_head
from codetta.compiler import compile_graph, compile_joint
from codetta.errors import ArgumentError, Stage
from codetta.integrations.breaks import breaks_seen, say_nothing_compiled
from codetta.integrations.contain import contained, contained_region
from codetta.integrations.joint import called, two_graphs
from codetta.integrations.logits import with_logits
from codetta.ir.view import hint
from codetta.options import Options, known, options_of
from codetta.runtime.executor import Executor, Training
from codetta.runtime.speculation import Kinds
from codetta.runtime.writer import CompileRegion

Compiled = TypeVar("Compiled", bound=Callable[..., Any])


def compile(
    model: Compiled,
    *,
    options: Options | dict[str, Any] | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    backend: Backend | None = None,
) -> Compiled:
    """The model, rewritten: same module, same parameters, same answers; calls go through GEMM-epilogue programs.

    dynamic: True makes the sizes of inputs symbols, so that one compilation serves every batch and length; False compiles for each
    anew. None: the first sizes have code of their own, all others share one.
    fullgraph: an error where the graph would break, as torch.compile has it.
    backend: one that remembers what it made, for those who want to look at it.
    """
    if not callable(model):
        raise ArgumentError("model", f"is a {type(model).__name__}", "pass an nn.Module or a function of tensors")
    backend = backend or Backend(options_of(options))
    if not isinstance(model, nn.Module):
        frame: Any = _frame(model, backend, dynamic, fullgraph)
        return frame
    model._compiled_call_impl = _Watched(model, backend, dynamic, fullgraph)
    if hasattr(model, "generation_config"):
        from codetta.integrations.generation import takes_over

        takes_over(model)
    return model


def backend_of(model: Any) -> Backend | None:
    """What compiled the model, None for a plain one."""
    found = getattr(getattr(model, "_compiled_call_impl", None), "backend", None)
    return found if isinstance(found, Backend) else None


def _frame(
    function: Callable[..., Any], backend: Backend, dynamic: bool | None, fullgraph: bool
) -> _Call | _FirstSizes:
    if dynamic is not None:
        return _Call(function, backend, dynamic, fullgraph)
    return _FirstSizes(function, backend, fullgraph)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Watched:
    """A module's compiled call, one for each set of hooks that its modules have: Dynamo traces hooks with the rest, and does not look
    at them again."""

    def __init__(self, model: nn.Module, backend: Backend, dynamic: bool | None, fullgraph: bool) -> None:
        self.model, self.backend = model, backend
        self.how = dynamic, fullgraph
        self.made: dict[tuple[object, ...], _Call | _FirstSizes] = {}
        self.kinds = Kinds() if backend.options.graphs == "auto" else None
        self._look()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # part of somebody else's graph
            return self.model._call_impl(*args, **kwargs)
        # Every hook has a number of its own; one that is taken away leaves no trace but in the modules.
        if self.hooks or RemovableHandle.next_id != self.seen:
            self._look()
        if self.kinds is None or self.hooks:
            return self.call(*args, **kwargs)
        return self.kinds.call(self.call, args, kwargs, mode=self.model.training)

    def _look(self) -> None:
        self.seen = RemovableHandle.next_id
        found = [getattr(torch.nn.modules.module, f"_global{name}") for name in _HOOKS]
        found += [vars(each).get(name) for each in self.model.modules() for name in _HOOKS]
        self.hooks = tuple((at, *numbers) for at, numbers in enumerate(found) if numbers)
        if self.hooks not in self.made:
            while len(self.made) > 8:  # not all that ever were, and never the plain one
                del self.made[next(hooks for hooks in self.made if hooks)]
            self.made[self.hooks] = _frame(self.model._call_impl, self.backend, *self.how)
        self.call = self.made[self.hooks]


def _own_frame(call: Callable[..., Any]) -> Callable[..., Any]:
    """A frame around the call, with code of its own.

    Dynamo passes over PyTorch's frames, and with them over a model that is one of PyTorch's containers; and it counts compilations and
    keeps guards by code, which all modules would share.
    """

    def frame(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    frame.__code__ = frame.__code__.replace(co_name=f"model_{next(_numbers)}")
    return frame


_numbers = itertools.count()


class _Call:
    """A compiled function and who compiled it, which lies here and not on the module: a copy of the model is a plain one."""

    def __init__(self, function: Callable[..., Any], backend: Backend, dynamic: bool, fullgraph: bool = False) -> None:
        self.backend, self.name, self.function = backend, _name_of(function), function
        self.settings = torch._dynamo.config._make_closure_patcher(**_settings())
        self.call: Any = torch.compile(_own_frame(function), backend=backend, dynamic=dynamic, fullgraph=fullgraph)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # part of somebody else's graph
            return self.function(*args, **kwargs)
        if not self.backend.arrived:
            return self._first(*args, **kwargs)
        revert = self.settings()  # `patch` would take as long as all guards of a model
        try:
            return self.call(*args, **kwargs)
        finally:
            revert()

    def _first(self, *args: Any, **kwargs: Any) -> Any:
        """A call before which there was no graph; said, if there is none behind it either and Dynamo knows why."""
        self.backend.arrived = True
        with breaks_seen() as breaks:
            found = self(*args, **kwargs)
        if breaks and not self.backend.graphs:
            say_nothing_compiled(self.name, breaks)
        return found


def _name_of(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    return type(owner).__name__ if isinstance(owner, nn.Module) else getattr(function, "__qualname__", repr(function))


def _settings() -> dict[str, Any]:
    """What Dynamo is told while it may trace. Sizes may be symbols, but numbers such as a norm's eps are what they are, and no inputs.
    A message that transformers says once does not part a loss from its head."""
    config = torch._dynamo.config
    silent = "ignore_logging_functions" if hasattr(config, "ignore_logging_functions") else "ignore_logger_methods"
    return {"specialize_float": True, "recompile_limit": 64, silent: _Silent(getattr(config, silent))}


class _Silent(set[Any]):
    """Loggers' methods that are passed over, among them those that say something once. Those are found here, but not listed: PyTorch
    2.11 writes its settings into a log, and functions cannot be written."""

    def __contains__(self, each: object) -> bool:
        once = (method for name, method in vars(logging.Logger).items() if name.endswith("_once"))
        return super().__contains__(each) or any(each is method for method in once)


class _FirstSizes:
    """Code for the first sizes, which is made sooner and knows more, and code for all others.

    What grows out of sight of the inputs (a cache inside of an object) would have the first made anew again and again: after `MOST`
    times, everything goes to the second.
    """

    MOST = 3

    def __init__(self, function: Callable[..., Any], backend: Backend, fullgraph: bool = False) -> None:
        self.backend = backend
        self.first, self.others = (_Call(function, backend, dynamic, fullgraph) for dynamic in (False, True))
        self.sizes: list[object] | None = None
        self.made = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.others(*args, **kwargs)
        sizes = _sizes((*args, *kwargs.values()))
        if self.sizes is None:
            self.sizes = sizes
        if sizes != self.sizes or self.made >= self.MOST:
            return self.others(*args, **kwargs)
        before = self.backend.graphs
        try:
            return self.first(*args, **kwargs)
        finally:
            self.made += self.backend.graphs != before


def _sizes(arguments: Iterable[Any]) -> list[object]:
    """Of the tensors in arguments, in order."""
    found: list[object] = []
    for each in arguments:
        if isinstance(each, torch.Tensor):
            found.append(each.shape)
        elif isinstance(each, tuple | list):
            found += _sizes(each)
        elif isinstance(each, dict):
            found += _sizes(each.values())
    return found


class Backend:
    """What torch.compile calls with each graph; remembers the executors that it made."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.executors: list[Executor] = []
        self.trainings: list[Training] = []
        self.graphs = 0  # that were handed over
        self.arrived = False  # whether there was a call

    def __call__(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        self.graphs += 1
        return contained(module, inputs, self._compiled)

    def _compiled(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd

        training = torch.is_grad_enabled() and _needs_gradients(module, inputs)
        spared: list[Spared] = []
        with Stage("rewriting"):
            stays_whole(module, training)
            if self.options.numerics != "strict":
                lazy, recompute = training and self.options.logits == "lazy", self.options.memory == "less"
                spared = loss_takes_the_head(module, lazy, recompute)
        compiled = aot_autograd(
            fw_compiler=lambda module, inputs: called(module),
            bw_compiler=_boxed,
            inference_compiler=self.compile_graph,
            partition_fn=self.compile_joint,
            keep_inference_input_mutations=not training,
        )(module, inputs)
        return with_logits(compiled, spared) if spared else compiled

    def compile_graph(self, module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        """An aten graph as an executor."""
        executor = compile_graph(module, _parameters(module.graph), self.options, self._takes())
        self.executors.append(executor)
        return executor

    def compile_joint(
        self,
        module: fx.GraphModule,
        inputs: Any,
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: list[int] | None = None,
        **_: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """A graph of results and gradients, as two that do nothing but call the halves of a plan."""
        parameters = _at(module.graph, static_lifetime_input_indices or [])
        training = compile_joint(module, parameters, num_fwd_outputs, self.options, self._takes())
        self.trainings.append(training)
        return two_graphs(training)

    def _takes(self) -> CompileRegion | None:
        compile_region = {"auto": _where_it_pays, "inductor": by_inductor, "graph": None}[self.options.leftover]
        return None if compile_region is None else lambda region: contained_region(region, compile_region)


def _boxed(module: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    """A backward function takes its arguments in a list and empties it."""
    function = called(module)

    def run(args: list[Any]) -> Any:
        return function(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def backend(
    module: fx.GraphModule, inputs: list[Any], mode: str | None = None, options: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """torch.compile(model, backend="codetta"); options: fields of `codetta.Options`, by name."""
    if mode is not None:
        raise ArgumentError(
            "mode", f"is {mode!r}, and codetta has none", f"pass options={{...}} with any of {', '.join(known())}"
        )
    return Backend(options_of(options))(module, inputs)


def _needs_gradients(module: fx.GraphModule, inputs: list[Any]) -> bool:
    tensors = [*inputs, *module.parameters()]
    return any(isinstance(each, torch.Tensor) and each.requires_grad for each in tensors)


# What a compiler must spare a region, at every call, for seconds of its time to pay: bytes between its operators, or launches.
WORTH = {"cpu": 2 << 20, "cuda": 64 << 20}
WORTH_LAUNCHES = 16
TINY, WORTH_TINY = (
    1 << 16,
    8,
)  # elements of tensors that are nothing but launches: a decoder's step has no time for many of them


def _where_it_pays(region: fx.GraphModule) -> Callable[..., Any] | None:
    """Small tensors stay in a CPU's cache, and a GPU is done with a few of them before the next call asks."""
    inside = [each for each in region.graph.nodes if each.op == "call_function" and not is_view(each)]
    (results,) = (each.args[0] for each in region.graph.nodes if each.op == "output")
    values = [each.meta["val"] for each in inside if each not in results]
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    spared = sum(tensor.element_size() * math.prod(hint(size) for size in tensor.shape) for tensor in tensors)
    device = "cuda" if any(tensor.is_cuda for tensor in tensors) else "cpu"
    tiny = all(math.prod(hint(size) for size in tensor.shape) <= TINY for tensor in tensors)
    pays = spared >= WORTH[device] or (device == "cuda" and len(inside) >= (WORTH_TINY if tiny else WORTH_LAUNCHES))
    return by_inductor(region) if pays else None


def by_inductor(region: fx.GraphModule) -> Callable[..., Any]:
    """A region of leftover operators, compiled by Inductor, with the sizes of the whole graph as its symbols."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    # Operators with several results are given, and give them, as one.
    given = [each.meta["val"] for each in region.graph.nodes if each.op == "placeholder"]
    inputs, arguments = pytree.tree_flatten(given)

    def flattened(*inputs: Any) -> Any:
        return region(*pytree.tree_unflatten(list(inputs), arguments))

    table = select_decomp_table() | {torch.ops.aten.bmm.default: _outer}
    decomposed = make_fx(flattened, decomposition_table=table)(*inputs)
    (output,) = decomposed.graph.find_nodes(op="output")
    flat, structure = pytree.tree_flatten(output.args[0])
    output.args = (tuple(flat),)
    # Everything is visible: others go on with these results and expect their strides as the graph has them, not padded.
    output.meta["user_visible_output_idxs"] = list(range(len(flat)))
    context = TracingContext.try_get()
    # Inductor reports the strides of its outputs as those of the whole graph, of which this is a part.
    reported = context.output_strides if context is not None else None
    try:
        if context is not None:
            context.output_strides = None
        try:
            compiled: Any = compile_fx_inner(decomposed, inputs)
        except (
            KeyError
        ):  # guards of what Inductor's cache holds name sizes of the whole graph, which the region is not given
            with torch._inductor.config.patch(fx_graph_cache=False):
                compiled = compile_fx_inner(decomposed, inputs)
    finally:
        if context is not None:
            context.output_strides = reported

    flat_already = not any(isinstance(each, tuple | list) for each in given)

    def run(*args: Any) -> Any:
        leaves = list(args) if flat_already else pytree.tree_leaves(args)
        return pytree.tree_unflatten(compiled(leaves), structure)  # Inductor clears the list that it is given

    return run


def _outer(x: torch.Tensor, y: torch.Tensor) -> Any:
    """A product that sums nothing up is made with what is around it: positions times frequencies."""
    return x * y if x.dtype == y.dtype and hint(x.shape[-1]) == 1 and isinstance(x.shape[-1], int) else NotImplemented


def _parameters(graph: fx.Graph) -> list[fx.Node]:
    """Placeholders that are parameters or buffers: the same tensors at every call."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    return _at(graph, metadata.static_input_indices if metadata is not None else [])


def _at(graph: fx.Graph, static: list[int]) -> list[fx.Node]:
    placeholders = graph.find_nodes(op="placeholder")
    found = [placeholders[at] for at in static if isinstance(placeholders[at].meta.get("val"), torch.Tensor)]
    # A cache is the same tensor at every call too, but the graph writes to it.
    written = {each.args[0] for each in graph.nodes if is_effect(each)} | _written_behind(graph, placeholders)
    return [each for each in found if each not in written]


def _written_behind(graph: fx.Graph, placeholders: list[fx.Node]) -> set[fx.Node]:
    """Placeholders that AOTAutograd writes to behind the graph: in the second half of a plan they are no longer what they were."""
    (output,) = graph.find_nodes(op="output")
    found = [getattr(each, "mutated_input", None) for each in output.meta.get("desc") or ()]
    return {each for each in placeholders if each.meta.get("desc") is not None and each.meta["desc"] in found}
