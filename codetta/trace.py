"""From a function of the accumulator to a Program: kinds are read off annotations and shapes, the function is run once on values."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, get_args

import torch

from codetta.dsl import Col, Kind, Moments, Row, Scalar, Stored, Table, Tile, Value, lift
from codetta.errors import ArgumentError, TraceError
from codetta.ir.graph import Node, node
from codetta.ir.op import is_sink
from codetta.ir.show import formula
from codetta.program import Operand, Piece, Product, Program, Store, acc_node, assemble, load_node


def trace(
    fn: Callable[..., Any],
    *,
    name: str,
    k: int,
    a_dtype: torch.dtype,
    products: tuple[Product, ...],
    operands: dict[str, Operand | float],
    a_layout: str = "mk",
    batched: bool = False,
    tf32: bool = False,
) -> Program:
    """The program of `fn` for these products and operands; plain numbers become constants."""
    accs = [Value(acc_node(index, product.cols)) for index, product in enumerate(products)]
    values: dict[str, Any] = {}
    for key, operand in operands.items():
        if not isinstance(operand, Operand):
            values[key] = operand
        elif operand.stat == "moments":
            values[key] = Moments(Value(load_node(operand, 0, "mean")), Value(load_node(operand, 0, "var")))
        else:
            values[key] = Value(load_node(operand, operand.cols))
    result = fn(*accs, **values)
    returned = _named(result, name)
    declared = {key: operand for key, operand in operands.items() if isinstance(operand, Operand)}
    stores: list[Store] = []
    sinks: dict[str, Node] = {}
    for key, item in returned.items():
        if isinstance(item, Value) and is_sink(item.node.op):
            sinks[key] = item.node
        else:
            stores.append(_stored(key, item, a_dtype, declared))
    return assemble(
        name, k=k, a_dtype=a_dtype, products=products, operands=declared.values(), stores=stores, sinks=sinks, outputs=tuple(returned),
        a_layout=a_layout, batched=batched, tf32=tf32,
    )  # fmt: skip


def _named(result: Any, name: str) -> dict[str, Any]:
    if result is None:
        raise TraceError(
            f"the epilogue {name} returns nothing: return a value, a tuple of values or a dict of named values"
        )
    if isinstance(result, Value | Stored):
        result = {"out": result}
    elif isinstance(result, tuple | list):
        result = {f"out{index}": item for index, item in enumerate(result)}
    if not isinstance(result, dict) or not result:
        raise TraceError(
            f"the epilogue {name} returns {type(result).__name__}: return a value, a tuple of values or a dict of named values"
        )
    for key, item in result.items():
        if not isinstance(item, Value | Stored):
            raise TraceError(f"the epilogue {name} returns {key!r} = {item!r}, which is not made of its arguments")
        if not isinstance(key, str) or not key.isidentifier():
            raise TraceError(f"the epilogue {name} names an output {key!r}: names are Python identifiers")
    return result


def _stored(name: str, item: Value | Stored, a_dtype: torch.dtype, declared: dict[str, Operand]) -> Store:
    stored = item if isinstance(item, Stored) else Stored(item)
    value = lift(stored.value).node
    if not value.space.rows:
        raise TraceError(
            f"output {name!r} is the same for every row ({formula(value)}): compute it outside the epilogue"
        )
    is_tile = value.space.rows == 1 and value.space.cols > 0
    dtype = stored.dtype
    if dtype is None and value.op == "cast":
        dtype = value.attr("dtype")
    if dtype is None:
        coarse = "group" in {n.op.split("_")[0] for n in _back(value)} and value.op != "spread"
        dtype = a_dtype if is_tile and not coarse else torch.float64 if a_dtype == torch.float64 else torch.float32
    if stored.head and value.space.cols % stored.head:
        raise TraceError(f"output {name!r}: {value.space.cols} columns are not whole heads of {stored.head}")
    if stored.accumulate:
        if stored.layout != "rows" or stored.rows is not None or not is_tile:
            raise TraceError(f"output {name!r}: only a whole tile in rows can be accumulated")
        if name in declared:
            raise TraceError(
                f"output {name!r} is added to, but is also the name of an operand: name one of them otherwise"
            )
        operand = declared[name] = Operand(name, dtype, "each", value.space.cols)
        value = node("add", load_node(operand, operand.cols), value)
    row_index = stored.rows.node.attr("name") if stored.rows is not None else None
    return Store(
        name,
        (Piece(value),),
        dtype,
        value.space.cols,
        value.space.rows,
        stored.layout,
        stored.head,
        row_index,
        stored.accumulate,
    )


def _back(value: Node) -> list[Node]:
    """The value and what it is made of, up to the last regrouping of columns."""
    found = [value]
    for arg in value.args:
        if value.op != "spread" and arg.space == value.space:
            found += _back(arg)
    return found


def annotated_kinds(fn: Callable[..., Any]) -> dict[str, Kind | None]:
    """The kind each parameter is annotated with, None where it is left to the shapes."""
    try:
        annotations = inspect.get_annotations(fn, eval_str=True)
    except NameError as error:
        raise TraceError(f"{fn.__name__}: an annotation cannot be read ({error})") from None
    kinds: dict[str, Kind | None] = {}
    for key, parameter in inspect.signature(fn).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            raise TraceError(f"{fn.__name__}: *{key} has no kind; name each operand")
        kinds[key] = _kind_in(annotations.get(key))
    return kinds


def _kind_in(annotation: object) -> Kind | None:
    """The kind that an annotation is, or the only one in a union or in Annotated."""
    if isinstance(annotation, type) and issubclass(annotation, Kind):
        return annotation()
    if isinstance(annotation, Kind):
        return annotation
    found = [kind for kind in map(_kind_in, get_args(annotation)) if kind is not None]
    return found[0] if len(found) == 1 else None


def infer_kind(name: str, shape: tuple[int, ...], rows: int, cols: set[int]) -> Kind:
    """The only kind that fits the shape, or an error that says how to annotate."""
    how = "annotate the parameter with codetta.Row, Col, Tile, Table, SampleRow or Scalar"
    match shape:
        case () | (1,):
            return Scalar()
        case (length,):
            if length == rows and length in cols:
                raise ArgumentError(
                    name, f"{length} numbers could be one per row or one per column (M = N = {length})", how
                )
            if length == rows:
                return Col()
            return Row()
        case (first, 1) if first == rows:
            return Col()
        case (1, last) if last in cols and rows != 1:
            return Row()
        case (first, last) if first == rows and last in cols:
            return Tile()
        case (first, last) if first == rows and any(c % last == 0 for c in cols):
            return Table()
        case (first, last) if last in cols and rows % max(first, 1) == 0:
            raise ArgumentError(
                name, f"{first} vectors for {rows} rows could be one per sample or a table that repeats", how
            )
    raise ArgumentError(
        name, f"shape {shape} fits no operand of a product with {rows} rows and {sorted(cols)} columns", how
    )
