"""Attention in a graph: kept as one call, with as few keys and as small a mask as the call can do with.

PyTorch takes scaled_dot_product_attention apart while it traces, into whatever kernel suits what it sees then: a causal mask as a
matrix hides that half of the work need not be done, and some masks lead to three products in full precision. Here it stays whole until
it runs, and what its mask is called is known (runtime/attention.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F

from codetta.capture.kinds import packet_of

aten = torch.ops.aten
MASK, GROUPED = 3, 6  # positions among the arguments


@torch.library.custom_op("codetta::attention", mutates_args=())
def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None, grouped: bool
) -> Tensor:
    """F.scaled_dot_product_attention without dropout. grouped: keys and values have fewer heads, which queries share."""
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=grouped)


@attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float | None, grouped: bool
) -> Tensor:
    sizes = [*query.shape[:-1], value.shape[-1]]
    if len(sizes) != 4:
        return query.new_empty(sizes)
    batch, heads, length, width = sizes
    return query.new_empty(batch, length, heads, width).transpose(1, 2)  # as kernels return it


def stays_whole(module: fx.GraphModule) -> None:
    """scaled_dot_product_attention(q, k, v, mask)  ->  attention(q, k, v, mask)

    Exact. Before the tracer sees the graph. Refuses dropout, and graphs under autocast, which would cast the arguments.
    """
    if torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu"):
        return
    nodes = [each for each in module.graph.nodes if each.op == "call_function"]
    if any(each.target is torch.amp.autocast_mode._enter_autocast for each in nodes):
        return
    changed = False
    for each in nodes:
        if each.target is torch._C._nn.scaled_dot_product_attention:
            arguments = _arguments(*each.args, **each.kwargs)
            if arguments is not None:
                each.target, each.args, each.kwargs = torch.ops.codetta.attention.default, arguments, {}
                changed = True
    if changed:
        module.recompile()


def _arguments(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: Any = False, *, scale: Any = None,
    enable_gqa: Any = False,
) -> tuple[Any, ...] | None:  # fmt: skip
    """PyTorch's arguments as `attention` takes them; None where it does not."""
    if dropout_p != 0.0 or not isinstance(is_causal, bool) or not isinstance(enable_gqa, bool):
        return None
    return query, key, value, attn_mask, is_causal, scale, enable_gqa


def heads_are_shared(graph: fx.Graph) -> None:
    """attention(q, repeat(k, n), repeat(v, n))  ->  attention(q, k, v, grouped)

    Exact. Each head of keys and values serves n heads of queries, in the order in which the repeated ones stood, so that nobody writes
    or reads the copies. Refuses where only one of the two is repeated, or they are repeated otherwise.
    """
    for each in graph.nodes:
        if packet_of(each) is not torch.ops.codetta.attention or each.args[GROUPED]:
            continue
        key, value = (_unrepeated(arg) for arg in each.args[1:MASK])
        if key is None or value is None or key.meta["val"].shape[1] != value.meta["val"].shape[1]:
            continue
        each.args = (each.args[0], key, value, *each.args[MASK:GROUPED], True)
    graph.eliminate_dead_code()


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
    if packet_of(each) is not torch.ops.codetta.attention:
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
