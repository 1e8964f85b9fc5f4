"""Laws about columns: parts that lie too far apart for one run of columns become strips of the tile.

A tile can split its own columns in registers only if the parts lie within it. Gate and up halves of a
(2F, K) weight lie F columns apart, so the tile is made of two strips of columns instead, and every
value of the epilogue is rewritten to live on one strip. This is the column map of the tile; weights are not repacked.
"""

from __future__ import annotations

from collections.abc import Callable

from codetta.errors import TraceError
from codetta.ir.graph import Frame, Node, Space, node, rebuilt, topological, transform
from codetta.ir.op import OPS
from codetta.ir.show import formula

# The widest run of columns that every target can hold in one tile.
WIDEST_BLOCK = 256


def is_wide(frame: Frame, widest: int = WIDEST_BLOCK) -> bool:
    """Whether a part needs strips: its block exceeds any tile, or is not a power of two, as tiles in registers are."""
    return frame.block > widest or not _is_power_of_two(frame.block) or not _is_power_of_two(frame.count)


def _is_power_of_two(x: int) -> bool:
    return x & (x - 1) == 0


def wide_frames(roots: list[Node], widest: int = WIDEST_BLOCK) -> tuple[int, int, int] | None:
    """(count, block, columns of the whole) of the wide parts and joins among the nodes, None if there are none."""
    found = set()
    for each in topological(roots):
        if each.op == "part" and is_wide(each.attr("frame"), widest):
            found.add((each.attr("frame").count, each.attr("frame").block, each.args[0].space.cols))
        elif _is_wide_join(each, widest):
            found.add((len(each.args), each.attr("block"), each.space.cols))
    if len(found) > 1:
        listed = ", ".join(f"{count} parts of {block} columns" for count, block, _ in sorted(found))
        raise TraceError(
            f"one epilogue can take columns apart in one way only, this one does it in {len(found)}: {listed}"
        )
    return next(iter(found), None)


def spans_strips(value: Node, wide: tuple[int, int, int], widest: int = WIDEST_BLOCK) -> bool:
    """Whether the value still covers all columns that the wide parts take apart or join."""
    return any(
        _is_wide_join(each, widest) or (each.op == "acc" and not each.attr("frame") and each.space.cols == wide[2])
        for each in topological([part_sinks_to_leaves(value, widest)])
    )


def _is_wide_join(value: Node, widest: int) -> bool:
    return value.op == "join" and is_wide(Frame(0, len(value.args), value.attr("block")), widest)


def join_rises(value: Node, cut_table: Callable[[Node, Frame], Node | None]) -> Node:
    """f(join(a, b), x)  ->  join(f(a, part 0 of x), f(b, part 1 of x))

    Exact. RoPE's x · cos + join(-x2, x1) · sin becomes two halves that read half a table each, as one writes it by hand.
    `cut_table` gives the part of a table that repeats over the columns, or None; where it has none the law refuses and the
    value stays as it is.
    """
    joined = next((arg for arg in value.args if arg.op == "join"), None)
    if joined is None or OPS[value.op].shape != "elementwise":
        return value
    count, block, cols = len(joined.args), joined.attr("block"), joined.space.cols
    parts = []
    for index in range(count):
        frame = Frame(index, count, block)
        args = [_part_of(arg, frame, cols, cut_table) for arg in value.args]
        found = [arg for arg in args if arg is not None]
        if len(found) < len(args):
            return value
        parts.append(rebuilt(value, tuple(found)))
    return node("join", *parts, block=block)


def _part_of(value: Node, frame: Frame, cols: int, cut_table: Callable[[Node, Frame], Node | None]) -> Node | None:
    if value.space.cols != cols:
        return value
    if value.op == "join" and (len(value.args), value.attr("block")) == (frame.count, frame.block):
        return value.args[frame.index]
    if value.op == "load" and value.attr("period"):
        return cut_table(value, frame)
    if OPS[value.op].shape == "elementwise" and _reads_table(value):
        # Down to the leaves, so that the tables among them are cut as well.
        args = [_part_of(arg, frame, cols, cut_table) for arg in value.args]
        found = [arg for arg in args if arg is not None]
        return rebuilt(value, tuple(found)) if len(found) == len(args) else None
    return node("part", value, frame=frame)


def _reads_table(value: Node) -> bool:
    """Whether a table that repeats over the columns is among what the value is computed from, in its own epilogue."""
    if value.op == "load":
        return bool(value.attr("period"))
    return OPS[value.op].shape == "elementwise" and any(_reads_table(arg) for arg in value.args)


def part_sinks_to_leaves(root: Node, widest: int = WIDEST_BLOCK) -> Node:
    """part(f(x, y)) -> f(part(x), part(y)); at the leaves the part becomes a frame.

    Exact. Applies to wide parts only. Refuses a table that repeats with a period the strip's runs do not hold whole,
    and groups or narrow blocks that straddle two strips.
    """

    def push(each: Node) -> Node | None:
        if each.op == "part" and is_wide(each.attr("frame"), widest):
            return _on_strip(each.args[0], each.attr("frame"))
        return None

    return transform([root], push)[id(root)]


def strip(value: Node, frame: Frame, widest: int = WIDEST_BLOCK) -> Node:
    """`value` restricted to one strip, the restriction pushed to its leaves."""
    return _on_strip(part_sinks_to_leaves(value, widest), frame)


def _on_strip(value: Node, frame: Frame) -> Node:
    cols = value.space.cols
    if not cols:
        return value
    space = Space(value.space.rows, cols // frame.count)

    def scaled(factor_up: int, factor_down: int = 1) -> Frame:
        if frame.block * factor_up % (factor_down * frame.count):
            raise TraceError(f"{formula(value)} straddles the strips of {frame.run} columns")
        return Frame(frame.index, frame.count, frame.block * factor_up // factor_down)

    match value.op:
        case "acc" | "col_index":
            _refuse_nested(value)
            return node(value.op, space=space, **{**dict(value.attrs), "frame": frame})
        case "load" | "load_int":
            period = value.attr("period")
            if period:
                if frame.run % period:
                    raise TraceError(
                        f"{value.attr('name')} repeats every {period} columns, which do not fit whole into runs of {frame.run}"
                    )
                return node(value.op, space=space, **dict(value.attrs))
            _refuse_nested(value)
            return node(value.op, space=space, **{**dict(value.attrs), "frame": frame})
        case "join" if (value.attr("block"), len(value.args)) == (frame.block, frame.count):
            return value.args[frame.index]
        case "join":
            if frame.run % value.attr("block"):
                raise TraceError(f"{formula(value)} straddles the strips of {frame.run} columns")
            return rebuilt(value, tuple(_on_strip(arg, scaled(1, len(value.args))) for arg in value.args))
        case "part":
            count = value.attr("frame").count
            if frame.run * count % value.attr("frame").block:
                raise TraceError(f"{formula(value)} straddles the strips of {frame.run} columns")
            return rebuilt(value, (_on_strip(value.args[0], scaled(count)),))
        case "group_sum" | "group_max":
            return rebuilt(value, (_on_strip(value.args[0], scaled(value.attr("cols"))),))
        case "spread":
            return rebuilt(value, (_on_strip(value.args[0], scaled(1, value.attr("cols"))),))
        case op:
            assert OPS[op].shape == "elementwise", op
            return rebuilt(value, tuple(_on_strip(arg, frame) for arg in value.args))


def _refuse_nested(value: Node) -> None:
    if value.attr("frame"):
        raise TraceError(f"{formula(value)} is already a strip; parts of parts that lie apart are not supported")
