"""How values are spelled in C++: the types of vectors and tensors, and elementwise ops over the vectors of cpu_runtime.h."""

from __future__ import annotations

import math

import torch

from codetta.ir.graph import Frame, Node

DTYPES = {
    torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "double", torch.float8_e4m3fn: "fp8",
    torch.int8: "int8_t", torch.uint8: "uint8_t", torch.bool: "uint8_t", torch.int32: "int32_t", torch.int64: "i64",
}  # fmt: skip

# Vectors by the node's type, and the type of one lane in scratch memory.
VECTOR = {"float": "V", "int": "I", "bool": "B"}
LANE = {"float": "float", "int": "i64", "bool": "int32_t"}

SPELLING = {
    "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "{} / {}", "neg": "-{}", "abs": "magnitude({})",
    "maximum": "maximum({}, {})", "minimum": "minimum({}, {})", "exp": "exponential({})", "log": "logarithm({})",
    "sqrt": "square_root({})", "rsqrt": "reciprocal_root({})", "tanh": "tangent({})", "sigmoid": "sigmoid({})",
    "erf": "error_function({})", "erfc": "error_complement({})", "round": "rounded({})", "floor": "floored({})", "lt": "{} < {}", "le": "{} <= {}",
    "eq": "{} == {}", "ne": "{} != {}", "and": "{} & {}", "or": "{} | {}", "not": "~{}", "where": "where({}, {}, {})",
    "random": "uniform({}, {}, {})",
}  # fmt: skip
COMPARES = ("lt", "le", "eq", "ne")
LOGIC = ("and", "or", "not")
WHOLE = ("add", "sub", "mul", "neg", "abs", "maximum", "minimum", *COMPARES)  # whole numbers stay whole in these


def spelled(node: Node, args: list[str]) -> str:
    """An elementwise op on named arguments, each brought to the type that the op computes in."""
    kinds = [arg.dtype for arg in node.args]
    op = node.op
    if op in LOGIC:
        return SPELLING[op].format(*(as_type("bool", text, kind) for text, kind in zip(args, kinds, strict=True)))
    if op == "where":
        rest = [as_type("float", text, kind) for text, kind in zip(args[1:], kinds[1:], strict=True)]
        return SPELLING[op].format(as_type("bool", args[0], kinds[0]), *rest)
    if op == "random":
        return SPELLING[op].format(*(as_type("int", text, kind) for text, kind in zip(args, kinds, strict=True)))
    if op in WHOLE and set(kinds) == {"int"}:
        text = SPELLING[op].format(*args)
        return f"truth({text})" if op in COMPARES else text
    floats = [as_type("float", text, kind) for text, kind in zip(args, kinds, strict=True)]
    if op == "cast":
        return f"cast_to<{DTYPES[node.attr('dtype')]}>({floats[0]})"
    if op in ("maximum", "minimum"):
        for index, arg in enumerate(node.args):
            if arg.op == "const" and not math.isnan(arg.attr("value")):
                bound = "at_least" if op == "maximum" else "at_most"
                return f"{bound}({literal(arg.attr('value'))}, {floats[1 - index]})"
    return SPELLING[op].format(*floats)


def as_type(wanted: str, text: str, kind: str) -> str:
    """A value of one type as another."""
    return text if wanted == kind else f"{ {'float': 'number', 'int': 'whole', 'bool': 'truth'}[wanted] }({text})"


def framed(frame: Frame) -> str:
    return f"framed(c, {frame.index}, {frame.run}, {frame.block})"


def plus(frame: Frame | None) -> str:
    """Where the only run of a frame begins."""
    return f" + {frame.index * frame.run}" if frame and frame.index else ""


def minus(frame: Frame | None) -> str:
    return f" - {frame.index * frame.run}" if frame and frame.index else ""


def truth(value: bool) -> str:
    return "true" if value else "false"


def literal(value: float) -> str:
    if math.isnan(value):
        return '__builtin_nanf("")'
    if math.isinf(value):
        return f"{'-' if value < 0 else ''}__builtin_inff()"
    return f"{value!r}f"


def indented(lines: list[str]) -> list[str]:
    return [f"  {line}" for line in lines]
