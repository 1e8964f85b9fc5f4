"""Graph breaks: where Dynamo could not follow a model, and why, for those who are told."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OURS = Path(__file__).resolve().parents[1]


@contextmanager
def breaks_seen() -> Iterator[list[str]]:
    """The graph breaks of this block, at its end: a line for each, with the place in the model's code."""
    from torch._dynamo.utils import graph_break_reasons  # importing it is slow, and imports Triton

    before, found = len(graph_break_reasons), list[str]()
    try:
        yield found
    finally:
        found += dict.fromkeys(_line(each) for each in graph_break_reasons[before:])


def say_nothing_compiled(name: str, breaks: list[str]) -> None:
    """A warning that a call was not compiled at all."""
    warnings.warn(
        f"codetta: nothing of {name} was compiled, it runs as it would without codetta: {'; '.join(breaks)}. "
        "codetta.compile(..., fullgraph=True) raises with the details.",
        RuntimeWarning,
        stacklevel=4,
    )


def _line(each: Any) -> str:
    reason = str(each.reason).splitlines()[0].strip()
    frames = [frame for frame in each.user_stack or () if OURS not in Path(frame.filename).parents]
    return f"{reason} ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else reason
