"""Kinds of operators that stay with the graph: views cost nothing, attention is a call of its own, the rest is left over."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

aten = torch.ops.aten

_VIEWS = {
    aten.view, aten._unsafe_view, aten.reshape, aten.t, aten.transpose, aten.permute, aten.unsqueeze, aten.squeeze, aten.expand,
    aten.slice, aten.select, aten.split, aten.split_with_sizes, aten.chunk, aten.unbind, aten.alias, aten.detach, aten.sym_size,
    aten.as_strided,
}  # fmt: skip


MEMORY = "memory"  # of the graph's results, noted at its output


def packet_of(each: fx.Node) -> Any:
    """The operator without its overload; None for a plain Python function."""
    return each.target.overloadpacket if isinstance(each.target, torch._ops.OpOverload) else None


def is_view(each: fx.Node) -> bool:
    """Whether it launches nothing: a view, an item of a tuple, or arithmetic on sizes."""
    packet = packet_of(each)
    return packet is None or packet in _VIEWS


def origin(each: fx.Node) -> fx.Node:
    """The operator behind views."""
    while is_view(each) and each.args and isinstance(each.args[0], fx.Node):
        each = each.args[0]
    return each


def memory_of(each: fx.Node, copies: bool = False) -> fx.Node:
    """The operator that made the memory that a tensor lies in, one view further back; copies: these are passed over as well."""
    if not each.args or not isinstance(each.args[0], fx.Node):
        return each
    viewed = packet_of(each.args[0] if each.target is operator.getitem else each)
    return each.args[0] if viewed in _VIEWS or (copies and viewed is aten.clone) else each


def owner_of(each: fx.Node) -> fx.Node:
    """The operator that made the memory that a tensor lies in."""
    while (source := memory_of(each)) is not each:
        each = source
    return each


def results_keep_apart(graph: fx.Graph) -> None:
    """Note which results lie in memory of their own, before anything is changed: whoever writes to one must not write to others."""
    (output,) = graph.find_nodes(op="output")
    output.meta[MEMORY] = [owner_of(each).name if isinstance(each, fx.Node) else "" for each in output.args[0]]


def is_call(each: fx.Node) -> bool:
    """Attention, or the loss with its head: kernels of others, or programs of their own, that nothing is fused with."""
    packet = packet_of(each)
    return "scaled_dot_product" in getattr(packet, "__name__", "") or str(packet).startswith("codetta.")


def is_effect(each: fx.Node) -> bool:
    """Whether it writes to something that was there before."""
    return isinstance(each.target, torch._ops.OpOverload) and each.target._schema.is_mutable


def adds_in_any_order(each: fx.Node) -> bool:
    """Whether a compiler would make it of additions that come in another order at every call, and PyTorch's own kernel does not."""
    return packet_of(each) in (aten.embedding_dense_backward, aten.index_put, aten._unsafe_index_put)


Autocast = dict[
    str, torch.dtype | None
]  # what operators in lower precision cast to, by kind of device; None: nothing is cast


def autocasts(module: fx.GraphModule) -> dict[fx.Node, Autocast]:
    """What is on where each operator stands, in a graph that is yet to be traced: from outside, or switched on and off in the graph."""
    kinds = ("cpu", "cuda")
    now: Autocast = {
        kind: torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None for kind in kinds
    }
    found, before = {}, {}
    for each in module.graph.nodes:
        if each.target is torch.amp.autocast_mode._enter_autocast:
            kind, dtype, enabled = [*each.args, None, True][:3]
            before[each] = now
            now = now | {str(kind): (dtype or torch.get_autocast_dtype(str(kind))) if enabled else None}
        elif each.target is torch.amp.autocast_mode._exit_autocast:
            now = before[each.args[0]]
        found[each] = now
    return found


def as_autocast(graph: fx.Graph, each: Any, now: Autocast) -> Any:
    """An argument as an operator in lower precision would be given it; made before the insertion point."""
    value = each.meta.get("example_value") if isinstance(each, fx.Node) else None
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or value.dtype == torch.float64:
        return each
    dtype = now.get(value.device.type)
    return each if dtype in (None, value.dtype) else graph.call_method("to", (each, dtype))


def is_size(each: fx.Node) -> bool:
    """A number that comes with the call."""
    return each.op == "placeholder" and isinstance(each.meta.get("val"), torch.SymInt | int)


def is_size_of_inputs(each: fx.Node) -> bool:
    """A number that follows from the sizes that come with the call, whatever tensor the graph reads it off."""
    value = each.meta.get("val")
    return each.op == "call_function" and isinstance(value, torch.SymInt) and not free_unbacked_symbols(value)


# Operands that PyTorch's kernels want to be of one type, which tracing does not look at.
_OF_ONE_TYPE = {
    "aten.mm": (0, 1), "aten.addmm": (0, 1, 2), "aten.bmm": (0, 1), "aten.baddbmm": (0, 1, 2), "codetta.linear_loss": (0, 1, 3),
    "codetta.linear_losses": (0, 1, 3),
}  # fmt: skip
_HALVES = (torch.bfloat16, torch.float16)


def is_refused(each: fx.Node) -> bool:
    """Whether PyTorch's kernel refuses the operator for the types of its operands."""
    packet = packet_of(each)
    if packet is aten.native_layer_norm:  # parameters are of its input's type, or in full precision
        x, *parameters = (_type(each.args[at]) for at in (0, 2, 3))
        return any(own not in (None, x) and (x not in _HALVES or own != torch.float32) for own in parameters)
    types = {_type(each.args[at]) for at in _OF_ONE_TYPE.get(str(packet), ())}
    return len(types - {None}) > 1


def _type(arg: Any) -> torch.dtype | None:
    value = arg.meta.get("val") if isinstance(arg, fx.Node) else None
    return value.dtype if isinstance(value, torch.Tensor) else None


def is_tangent(each: fx.Node) -> bool:
    """A gradient that comes with the call, when all results have been handed out."""
    return each.op == "placeholder" and each.name.startswith("tangents")


def is_random(each: fx.Node) -> bool:
    """Whether it gives other numbers at every call."""
    target = each.target
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def call(graph: fx.Graph, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
    """An operator more, at the insertion point, that knows what it makes."""
    made = graph.call_function(target, args, kwargs)
    mode = next(each.meta["val"] for each in made.all_input_nodes).fake_mode
    with mode:
        given, named = fx.node.map_arg((args, kwargs), lambda each: each.meta["val"])
        made.meta["val"] = target(*given, **named)
    return made


def made_of(graph: fx.Graph, known: Iterable[fx.Node]) -> set[fx.Node]:
    """Those, and all that is made of nothing else."""
    found = set(known)
    for each in graph.nodes:
        if each.all_input_nodes and all(arg in found for arg in each.all_input_nodes):
            found.add(each)
    return found


def behind(graph: fx.Graph, begins: Callable[[fx.Node], bool]) -> set[fx.Node]:
    """Those, and all that one of them comes into."""
    found: set[fx.Node] = set()
    for each in graph.nodes:
        if begins(each) or any(arg in found for arg in each.all_input_nodes):
            found.add(each)
    return found
