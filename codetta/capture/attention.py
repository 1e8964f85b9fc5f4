"""Attention in a graph: kept as one call, with as few keys and as small a mask as the call can do with.

PyTorch takes scaled_dot_product_attention apart while it traces, into whatever kernel suits what it sees then: a causal mask as a
matrix hides that half of the work need not be done, and some masks lead to three products in full precision. Here it stays whole until
it runs (codetta/attention.py), and what its mask is called is known (runtime/masks.py).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

import codetta.attention  # noqa: F401 (its operators)
from codetta.capture.kinds import as_autocast, autocasts, packet_of
from codetta.ir.view import same

aten, ours = torch.ops.aten, torch.ops.codetta
OPERATORS = (ours.attention, ours.attention_forward, ours.attention_backward)
# Where their arguments stand: the last seven are the same for all of them.
QUERY, KEY, MASK, HOW, GROUPED = -7, -6, -4, -3, -1


def stays_whole(module: fx.GraphModule, training: bool) -> None:
    """scaled_dot_product_attention(q, k, v, mask)  ->  attention(q, k, v, mask)

    Exact. Before the tracer sees the graph. Refuses dropout, masks with gradients, and what is broadcast, but for one head of keys and
    values: all queries share it.
    """
    casts = autocasts(module)
    for each in module.graph.find_nodes(op="call_function", target=torch._C._nn.scaled_dot_product_attention):
        arguments = _arguments(*each.args, **each.kwargs)
        if arguments is None:
            continue
        arguments = _broadcast(arguments)
        if arguments is None:
            continue
        mask = arguments[MASK].meta.get("example_value") if isinstance(arguments[MASK], fx.Node) else None
        if training and isinstance(mask, torch.Tensor) and mask.requires_grad:
            continue
        with module.graph.inserting_before(each):
            arguments = tuple(as_autocast(module.graph, argument, casts[each]) for argument in arguments)
            if training:
                call = module.graph.call_function(ours.attention_forward.default, arguments)
                call.meta |= {name: each.meta[name] for name in ("nn_module_stack", "stack_trace") if name in each.meta}
                each.target, each.args, each.kwargs = operator.getitem, (call, 0), {}
            else:
                each.target, each.args, each.kwargs = ours.attention.default, arguments, {}
    module.recompile()


def _arguments(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: Any = False, *, scale: Any = None,
    enable_gqa: Any = False,
) -> tuple[Any, ...] | None:  # fmt: skip
    """PyTorch's arguments as `attention` takes them; None where it does not."""
    if dropout_p != 0.0 or not isinstance(is_causal, bool) or not isinstance(enable_gqa, bool):
        return None
    return query, key, value, attn_mask, is_causal, scale, enable_gqa


def _broadcast(arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The arguments with all samples and heads spelled out; None where PyTorch repeats others than a single head."""
    given = [each.meta.get("example_value") if isinstance(each, fx.Node) else None for each in arguments[:MASK]]
    if not all(isinstance(each, torch.Tensor) and each.dim() >= 2 for each in given):
        return None
    query, key, value = (list(each.shape[:-2]) for each in given)  # type: ignore[union-attr]
    alike = lambda x, y: len(x) == len(y) and all(same(a, b) for a, b in zip(x, y, strict=True))  # noqa: E731
    if not alike(key, value):
        return None
    if alike(query, key) or (arguments[GROUPED] and len(query) == len(key) == 2 and same(query[0], key[0])):
        return arguments
    shared = len(query) == len(key) == 2 and same(query[0], key[0]) and same(key[1], 1)
    return (*arguments[:GROUPED], True) if shared else None


def heads_are_shared(graph: fx.Graph) -> None:
    """attention(q, repeat(k, n), repeat(v, n))  ->  attention(q, k, v, grouped)

    Exact. Each head of keys and values serves n heads of queries, in the order in which the repeated ones stood, so that nobody writes
    or reads the copies, and gradients of the copies are never added up. Refuses where only one of the two is repeated, or they are
    repeated otherwise.
    """
    for each in graph.nodes:
        if packet_of(each) not in OPERATORS or each.args[GROUPED]:
            continue
        key, value = (_unrepeated(arg) for arg in each.args[KEY:MASK])
        if key is None or value is None or key.meta["val"].shape[1] != value.meta["val"].shape[1]:
            continue
        if packet_of(each) is ours.attention_backward:
            items = {item.args[1]: item for item in each.users}
            sums = {items[at]: _summed(items[at], source) for at, source in ((1, key), (2, value)) if at in items}
            if None in sums.values():
                continue
            for item, total in sums.items():
                source = (key, value)[item.args[1] - 1]
                item.meta["val"] = torch.empty_like(source.meta["val"])  # lies in memory as what it is the gradient of
                total.replace_all_uses_with(item)
        each.args = (*each.args[:KEY], key, value, *each.args[MASK:GROUPED], True)
    graph.eliminate_dead_code()


def _summed(each: fx.Node, source: fx.Node) -> Any:
    """The sum over copies of the gradient of repeated heads, shaped as those that were repeated; None if it is used otherwise."""
    shape, seen = source.meta["val"].shape, False
    while len(each.users) == 1:
        (each,) = each.users
        if packet_of(each) is aten.sum and not seen:
            seen = each.args[1] == [2] and each.args[0].meta["val"].dim() == 5  # type: ignore[union-attr]
            if not seen:
                return None
        elif packet_of(each) not in (aten.view, aten._unsafe_view, aten.reshape, aten.clone, aten.squeeze):
            return None
        if seen and each.meta["val"].shape == shape:
            return each
    return None


def _unrepeated(each: fx.Node) -> fx.Node | None:
    """What (B, H, T, D) is expanded to (B, H, n, T, D) and seen as (B, H n, T, D), if that is how the node was made."""
    shape = each.meta["val"].shape
    while packet_of(each) in (aten.view, aten._unsafe_view, aten.reshape, aten.clone):
        each = each.args[0]  # type: ignore[assignment]
    if packet_of(each) is not aten.expand or len(shape) != 4:
        return None
    before = each.args[0]
    assert isinstance(before, fx.Node)
    if packet_of(before) is not aten.unsqueeze or before.args[1] != 2:
        return None
    wide, source = each.meta["val"].shape, before.args[0]
    if len(wide) != 5 or not isinstance(wide[1], int) or not isinstance(wide[2], int):
        return None
    same = shape[1] == wide[1] * wide[2] and shape[3] == wide[4] and source.meta["val"].shape[1] == wide[1]  # type: ignore[union-attr]
    return source if same and isinstance(source, fx.Node) else None


def mask_has_a_name(each: fx.Node) -> fx.Node | None:
    """attention(q, k, v, mask made of sizes alone)  ->  attention(q, k, v, causal)

    Exact. The mask is made once for each size and looked at; if it is the causal triangle or allows everything, it is never made
    again and the kernel is told its name. Refuses (None) masks into which a given tensor comes.
    """
    if packet_of(each) not in OPERATORS:
        return None
    mask = each.args[MASK]
    return mask if isinstance(mask, fx.Node) and made_of_sizes(mask) is not None else None


def made_of_sizes(mask: fx.Node) -> list[fx.Node] | None:
    """Everything the mask is computed from, in order; None if a tensor that is given comes into it."""
    needed: set[fx.Node] = set()
    stack = [mask]
    while stack:
        each = stack.pop()
        if each in needed:
            continue
        needed.add(each)
        if each.op in ("placeholder", "get_attr"):
            if not isinstance(each.meta.get("val"), torch.SymInt):
                return None
        elif each.op != "call_function":
            return None
        stack += each.all_input_nodes
    return [each for each in mask.graph.nodes if each in needed and each.op == "call_function"]
