"""Function: lines of Python, each tensor a local variable that is dropped after its last use.

What a plan says is written as such a function once (writer.py), and once more, with everything decided, for a signature that it is
called with (bound.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

VARIABLE = re.compile(r"\b(?:v_\w+|p\d+_\w+|m\d+|made|widths)\b")


@dataclass(frozen=True)
class Line:
    """A line of a function.

    kind: "call" must be made at every call of the function; "launch" is a program; "view" looks at what is there; "fixed" is the same
    for all calls with inputs of the same sizes; "room" is memory; "given" was there before the first line.
    again: having its result another time costs nothing.
    """

    text: str
    made: str = ""  # the left side
    again: bool = False
    kind: str = "call"

    @property
    def makes(self) -> set[str]:
        return set(VARIABLE.findall(self.made))

    @property
    def uses(self) -> set[str]:
        return set(VARIABLE.findall(self.text))

    def __str__(self) -> str:
        return f"{self.made} = {self.text}" if self.made else self.text


@dataclass(frozen=True)
class Function:
    """Called with a list of arguments, which is emptied, so that each can go as soon as it has been used."""

    name: str
    arguments: list[str]
    lines: list[Line]
    results: list[str]
    objects: list[Any]  # what the lines call `c`

    @property
    def source(self) -> str:
        opening = [f"[{', '.join(self.arguments)}] = args", "args.clear()"] if self.arguments else []
        body = _with_drops([*opening, *map(str, self.lines), self.returned], set(self.arguments))
        return "\n".join([f"def {self.name}(args):", *(f"    {line}" for line in body)])

    @property
    def returned(self) -> str:
        return f"return ({', '.join(self.results)}{',' if len(self.results) == 1 else ''})"

    def compiled(self) -> Callable[[list[Any]], tuple[Any, ...]]:
        """The text as something to call."""
        scope: dict[str, Any] = {"c": self.objects, "torch": torch, "math": math}
        exec(compile(self.source, f"<codetta {self.name}>", "exec"), scope)
        found: Callable[[list[Any]], tuple[Any, ...]] = scope[self.name]
        return found


def last_uses(lines: list[set[str]]) -> list[list[str]]:
    """Of each line, the variables that no later line names."""
    last: dict[str, int] = {}
    for number, names in enumerate(lines):
        for name in names:
            last[name] = number
    return [sorted(name for name in names if last[name] == number) for number, names in enumerate(lines)]


def _with_drops(lines: list[str], arguments: set[str]) -> list[str]:
    """The lines with each variable deleted behind its last use, so that its memory serves the next."""
    gone = last_uses(
        [set(VARIABLE.findall(line)) | (arguments if not number else set()) for number, line in enumerate(lines)]
    )
    result = []
    for number, (line, names) in enumerate(zip(lines, gone, strict=True)):
        result.append(line)
        if names and number < len(lines) - 1:
            result.append(f"del {', '.join(names)}")
    return result
