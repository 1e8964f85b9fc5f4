"""Printing: one equation per line, in an order that depends on the graph alone. Cache keys are made of this text."""

from __future__ import annotations

from collections.abc import Mapping

from codetta.ir.graph import Frame, Node, topological

INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "div": "/",
    "lt": "<",
    "le": "<=",
    "eq": "==",
    "ne": "!=",
    "and": "&",
    "or": "|",
}


def names(nodes: list[Node]) -> dict[int, str]:
    """Short names: leaves keep their own, the rest are numbered."""
    result: dict[int, str] = {}
    for number, node in enumerate(nodes):
        match node.op:
            case "acc":
                name = f"acc{node.attr('product')}" + _framed(node.attr("frame"))
            case "load" | "load_int":
                field = node.attr("field")
                name = node.attr("name") + (f".{field}" if field else "") + _framed(node.attr("frame"))
            case "const":
                name = (
                    f"{node.attr('value'):g}"
                    if node.attr("value") == float(f"{node.attr('value'):g}")
                    else repr(node.attr("value"))
                )
            case "row_index" | "col_index":
                name = node.op[:3] + _framed(node.attr("frame"))
            case _:
                name = f"v{number}"
        result[id(node)] = name
    return result


def equations(roots: Mapping[str, Node]) -> list[str]:
    """One line for each computed node, then one for each root."""
    order = topological(roots.values())
    name = names(order)
    lines = [f"{name[id(node)]} = {_right(node, name)}" for node in order if node.args]
    return lines + [f"{root} <- {name[id(node)]} {node.space}" for root, node in roots.items()]


def formula(node: Node) -> str:
    """The whole expression on one line, for error messages and tables."""
    name = names(topological([node]))
    text: dict[int, str] = {}
    for each in topological([node]):
        text[id(each)] = (
            f"({_right(each, text)})"
            if each.args and each.op in INFIX
            else _right(each, text)
            if each.args
            else name[id(each)]
        )
    result = text[id(node)]
    return result[1:-1] if node.op in INFIX else result


def _right(node: Node, name: Mapping[int, str]) -> str:
    args = [name[id(arg)] for arg in node.args]
    if node.op in INFIX:
        return f"{args[0]} {INFIX[node.op]} {args[1]}"
    attrs = [f"{key}={_plain(value)}" for key, value in node.attrs]
    return f"{node.op}({', '.join(args + attrs)})"


def _plain(value: object) -> str:
    return f"{value.index}/{value.count}@{value.block}" if isinstance(value, Frame) else str(value)


def _framed(frame: Frame | None) -> str:
    return f"[{_plain(frame)}]" if frame else ""
