"""Masks that are made of sizes alone: what a model computes anew at every call, and what is the same for every call of a size."""

from __future__ import annotations

import operator

import torch
from torch import fx

from codetta.capture.kinds import is_attention, packet_of

aten = torch.ops.aten


def mask_has_a_name(attention: fx.Node) -> fx.Node | None:
    """attention(q, k, v, mask made of sizes alone)  ->  attention(q, k, v, causal)

    Exact. The mask is made once for each size and looked at; if it is the causal triangle or allows everything, it is never made
    again and the kernel is told its name. Refuses (None) masks into which a given tensor comes, dropout, and operators of which
    more than the first result is used.
    """
    if not is_attention(attention) or attention.kwargs.get("dropout_p", 0.0) != 0.0:
        return None
    mask = attention.kwargs.get("attn_mask")
    if mask is None and mask_argument(attention) is not None:
        mask = attention.args[3]
    if not isinstance(mask, fx.Node) or made_of_sizes(mask) is None:
        return None
    items = [user.target is operator.getitem and user.args[1] == 0 for user in attention.users]
    return mask if all(items) else None


def mask_argument(attention: fx.Node) -> int | None:
    """Which positional argument is the mask; None where it goes by name."""
    named = packet_of(attention) in (
        aten._scaled_dot_product_cudnn_attention,
        aten._scaled_dot_product_efficient_attention,
    )
    return 3 if named and len(attention.args) > 3 else None


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
