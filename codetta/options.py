"""Options: what a user may decide about a compilation. Each has one owner, named beside it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from codetta.errors import ArgumentError

LEFTOVER = ("auto", "inductor", "graph")
MEMORY = ("less", "normal", "more")
SCHEDULE = ("auto", "chain", "persistent")
GRAPHS = ("auto", "off")


@dataclass(frozen=True)
class Options:
    """numerics: "default" admits laws that reassociate, "strict" only exact ones: no norm is deferred (rewrite/).
    leftover: who runs what no program covers: Inductor, the graph's own operators one by one, or Inductor where it pays
    ("auto": where tensors or launches are many) (integrations/).
    logits: those that a model with a loss hands out beside it, in training: made when somebody looks at them ("lazy"), or "always"
    (integrations/logits.py).
    memory: of gradients. "normal": what a program among them can make again is not kept for them; "more" keeps it, which spares that
    program a store; "less" also makes the logits of a loss twice, a third more work there (partition.py, runtime/loss.py).
    schedule: of a decoder's step. "chain": a kernel for each program; "persistent": all of them as one kernel, where phases.py can;
    "auto": that which was measured to be faster on such a device (compiler.py).
    graphs: "auto": calls that come again with inputs of the same sizes are recorded as CUDA graphs, where the host would be slower than
    the GPU; "off": never (runtime/replay.py).
    progress: a bar while kernels are built; None shows it where stderr is a terminal (compiler.py).
    """

    numerics: str = "default"
    leftover: str = "auto"
    logits: str = "lazy"
    memory: str = "normal"
    schedule: str = "auto"
    graphs: str = "auto"
    progress: bool | None = None

    def __post_init__(self) -> None:
        if self.numerics not in ("default", "strict"):
            raise ArgumentError("numerics", f"is {self.numerics!r}", "pass 'default' or 'strict'")
        if self.logits not in ("lazy", "always"):
            raise ArgumentError("logits", f"is {self.logits!r}", "pass 'lazy' or 'always'")
        for name, known in (("leftover", LEFTOVER), ("memory", MEMORY), ("schedule", SCHEDULE), ("graphs", GRAPHS)):
            value = getattr(self, name)
            if value not in known:
                raise ArgumentError(name, f"is {value!r}", f"pass one of {', '.join(known)}")


def known() -> list[str]:
    """The names of all options."""
    return [each.name for each in fields(Options)]


def options_of(given: Options | Mapping[str, Any] | None) -> Options:
    """Options, or a dictionary of them."""
    if given is None or isinstance(given, Options):
        return given or Options()
    if not isinstance(given, Mapping):
        raise ArgumentError(
            "options", f"is a {type(given).__name__}", "pass codetta.Options or a dictionary of its fields"
        )
    for name in given:
        if name not in known():
            raise ArgumentError("options", f"has {name!r}, which is unknown", f"use {', '.join(known())}")
    return Options(**given)


def debug_level() -> int:
    """CODETTA_DEBUG: 1 programs and backends, 2 laws and refusals, 3 plans, 4 generated source."""
    text = os.environ.get("CODETTA_DEBUG", "") or "0"
    if not text.isdecimal():
        raise ArgumentError("CODETTA_DEBUG", f"is {text!r}", "set it to a number from 0 to 4")
    return int(text)
