"""The loss of a language model in a graph: taken together with the head before it, so that no logits are made."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from codetta.capture.kinds import Autocast, as_autocast, autocasts
from codetta.loss import linear_cross_entropy

_SHAPES = ("view", "reshape", "flatten")
_NAMES = {torch.reshape: "reshape", torch.flatten: "flatten"}


@dataclass(frozen=True)
class Spared:
    """Logits that were an output of the graph. In their place stand the rows that the head is given."""

    at: int  # among the outputs
    make: fx.GraphModule  # (rows, parameters) -> logits
    parameters: tuple[int, ...]  # among the inputs; the weight is the first
    dtype: torch.dtype
    autocast: Autocast  # that the head ran under


@dataclass
class _Found:
    head: fx.Node
    chain: list[fx.Node]  # from the head's result to what the loss reads
    cuts: list[Any]  # rows that are taken of it on the way
    cap: float | None


def loss_takes_the_head(module: fx.GraphModule, lazy: bool, recompute: bool = False) -> list[Spared]:
    """cross_entropy(linear(x, w), target)  ->  linear_cross_entropy(x, w, target)

    Reassociates. Before the tracer sees the graph; logits may be cut by rows, seen otherwise and capped on the way. Where they are also
    an output, they are made when somebody looks at them, if that may be (`lazy`). Refuses logits that the graph itself uses otherwise
    and labels that are probabilities. `recompute`: gradients make the logits once more.
    """
    spared: list[Spared] = []
    casts = autocasts(module)
    for loss in module.graph.find_nodes(op="call_function", target=F.cross_entropy):
        arguments = _arguments(*loss.args, **loss.kwargs)
        found = _found(arguments["input"]) if arguments is not None else None
        if arguments is None or found is None:
            continue
        outside = {user for each in found.chain for user in each.users if user not in found.chain and user is not loss}
        cast = [each for each in outside if _is_cast_and_handed_out(each)]
        if any(user.op != "output" for user in outside.difference(cast)) or (outside and not lazy):
            continue
        if outside:
            handed = _handed_out(module, found, cast, casts[found.head])
            if handed is None:
                continue
            spared += handed
        _replace(module, loss, found, arguments | {"recompute": recompute}, casts[found.head])
        for each in [*cast, *reversed(found.chain)]:  # no more than these: what writes in place has no readers either
            if not each.users:
                module.graph.erase_node(each)
    module.recompile()
    return spared


def _arguments(
    input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: Any = -100, reduce: Any = None,
    reduction: Any = "mean", label_smoothing: Any = 0.0,
) -> dict[str, Any] | None:  # fmt: skip
    """PyTorch's arguments as `linear_cross_entropy` takes them; None where it does not."""
    labels = _value(target)
    if (
        size_average is not None
        or reduce is not None
        or labels is None
        or labels.is_floating_point()
        or labels.dim() != 1
    ):
        return None
    known = {"ignore_index": ignore_index, "reduction": reduction, "label_smoothing": label_smoothing}
    if any(isinstance(each, fx.Node) for each in known.values()):
        return None
    return {"input": input, "target": target, "class_weight": weight, **known}


def _found(each: Any) -> _Found | None:
    """The head behind views, casts, cuts by rows and a cap; None if there is something else."""
    value = _value(each)
    if value is None or value.dim() != 2:
        return None
    found = _Found(each, [], [], None)
    while isinstance(each, fx.Node):
        found.chain.insert(0, each)
        if each.target is torch._C._nn.linear:
            found.head = each
            mine = _value(each)
            exact = mine is not None and value.dtype in (mine.dtype, torch.float32, torch.float64)
            return found if exact else None
        name = _name(each)
        seen_otherwise = name in _SHAPES and not found.cuts and _same_columns(each)
        if seen_otherwise or name in ("float", "contiguous") or (name == "to" and _keeps_digits(each)):
            each = each.args[0]
        elif each.target is operator.getitem and _cuts_rows(each):
            found.cuts.insert(0, each.args[1])
            each = each.args[0]
        elif each.target in (operator.mul, torch.mul) and found.cap is None and (capped := _capped(each)) is not None:
            found.cap, inside = capped
            found.chain = [*inside, *found.chain]
            each = inside[0].args[0]
        else:
            return None
    return None


def _name(each: fx.Node) -> str:
    return str(each.target) if each.op == "call_method" else _NAMES.get(each.target, "")  # type: ignore[arg-type]


def _value(each: Any) -> torch.Tensor | None:
    found = each.meta.get("example_value") if isinstance(each, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


def _same_columns(each: fx.Node) -> bool:
    before, after = _value(each.args[0]), _value(each)
    return before is not None and after is not None and before.shape[-1] == after.shape[-1]


def _keeps_digits(each: fx.Node) -> bool:
    before, after = _value(each.args[0]), _value(each)
    if before is None or after is None or before.device != after.device:
        return False
    return after.dtype == before.dtype or after.dtype in (torch.float32, torch.float64)


def _cuts_rows(each: fx.Node) -> bool:
    """Slices of rows, all columns."""
    index, value = each.args[1], _value(each.args[0])
    if not isinstance(index, tuple) or value is None:
        return False
    plain = all(at is Ellipsis or isinstance(at, slice) for at in index)
    fixed = not any(
        isinstance(part, fx.Node) for at in index if isinstance(at, slice) for part in (at.start, at.stop, at.step)
    )
    whole = Ellipsis in index or len(index) == value.dim()
    return plain and fixed and whole and index[-1] == slice(None)


def _capped(each: fx.Node) -> tuple[float, list[fx.Node]] | None:
    """cap·tanh(y / cap): the cap, and the division and the tanh."""
    for bent, cap in (each.args, each.args[::-1]):
        if not isinstance(bent, fx.Node) or not isinstance(cap, float | int) or bent.target not in (torch.tanh, "tanh"):
            continue
        inner = bent.args[0]
        divides = isinstance(inner, fx.Node) and inner.target in (operator.truediv, torch.div)
        if divides and inner.args[1] == cap and isinstance(inner.args[0], fx.Node):  # type: ignore[union-attr]
            return float(cap), [inner, bent]  # type: ignore[list-item]
    return None


def _is_cast_and_handed_out(each: fx.Node) -> bool:
    """As those do who wrap a model for mixed precision."""
    casts = _name(each) == "float" or (_name(each) == "to" and _keeps_digits(each))
    return casts and all(user.op == "output" for user in each.users)


def _handed_out(module: fx.GraphModule, found: _Found, cast: list[fx.Node], now: Autocast) -> list[Spared] | None:
    """Those of the chain, and casts of them, that are outputs; None if they are not shaped as the head's result, or need more than
    parameters."""
    placeholders = module.graph.find_nodes(op="placeholder")
    (output,) = module.graph.find_nodes(op="output")
    outputs = list(output.args[0])
    head, spared = found.head, []
    for at, each in enumerate(outputs):
        if each not in found.chain and each not in cast:
            continue
        value, last = _value(each), each.args[0] if each in cast else each
        parameters = [arg for arg in head.all_input_nodes if arg is not head.args[0]]
        parameters.sort(key=lambda arg: arg is not head.args[1])
        if value is None or value.shape != _value(head).shape or any(arg not in placeholders for arg in parameters):  # type: ignore[union-attr]
            return None
        chain = found.chain[: found.chain.index(last) + 1] + ([each] if each in cast else [])
        make = _alone(chain, [head.args[0], *parameters])  # type: ignore[list-item]
        spared.append(Spared(at, make, tuple(map(placeholders.index, parameters)), value.dtype, now))
    for each in spared:
        outputs[each.at] = head.args[0]
    output.args = (tuple(outputs),)
    return spared


def _alone(chain: list[fx.Node], inputs: list[fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    inner = {each: graph.placeholder(each.name) for each in inputs}
    for each in chain:
        inner[each] = graph.node_copy(each, inner.__getitem__)
    graph.output(inner[chain[-1]])
    return fx.GraphModule({}, graph)


def _replace(module: fx.GraphModule, loss: fx.Node, found: _Found, arguments: dict[str, Any], now: Autocast) -> None:
    graph, result = module.graph, _value(loss)
    given = [*found.head.args, None][:3]
    rows, weight, bias = (
        found.head.kwargs.get(name, each) for name, each in zip(("input", "weight", "bias"), given, strict=True)
    )
    width = _value(weight).shape[1]  # type: ignore[union-attr]
    how = {name: each for name, each in arguments.items() if name not in ("input", "target")} | {"softcap": found.cap}
    with graph.inserting_before(loss):
        for index in found.cuts:
            rows = graph.call_function(operator.getitem, (rows, index))
        # As the head would have been given them.
        rows, weight, bias = (as_autocast(graph, each, now) for each in (rows, weight, bias))
        rows = graph.call_method("reshape", (rows, -1, width))
        call: Callable[..., Any] = linear_cross_entropy
        made = graph.call_function(call, (rows, weight, arguments["target"], bias), how)
        made = graph.call_method("to", (made, result.dtype))  # type: ignore[union-attr]
    loss.replace_all_uses_with(made)
    graph.erase_node(loss)
