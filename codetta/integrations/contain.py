"""Containment: a graph that Codetta fails at is left to Inductor, and what that fails at to PyTorch's own operators.

Said once, with the stage that failed. Nothing is contained under CODETTA_DEBUG, where exceptions are what one is after, nor under
CODETTA_RAISE=1, which tests set. What is the caller's own is never contained: memory that runs out, and what eager refuses as well.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from codetta.errors import CheckError, RefusedByPyTorchError, Stage, stage_of
from codetta.options import debug_level

Function = Callable[..., Any]


def contained(module: fx.GraphModule, inputs: Sequence[Any], compile: Function) -> Function:
    """`compile(module, inputs)`, or the graph as others run it, if Codetta fails at it: now, or at one of its calls."""
    plain = copied(module)  # laws change a graph in place
    try:
        return Contained(compile(module, inputs), plain)
    except RefusedByPyTorchError:
        return plain.forward
    except Exception as error:
        if not is_contained(error):
            raise
        warn(error, "this graph is left to Inductor")
    return by_others(plain, inputs)


def contained_region(region: fx.GraphModule, compile: Function) -> Function | None:
    """`compile(region)`; None, for its operators one by one, if that fails."""
    try:
        with Stage("region compilation"):
            found: Function | None = compile(region)
    except Exception as error:
        if not is_contained(error):
            raise
        warn(error, "these operators run one by one")
        return None
    return found


def by_others(module: fx.GraphModule, inputs: Sequence[Any]) -> Function:
    """Inductor, or PyTorch's operators one by one."""
    from torch._inductor.compile_fx import compile_fx

    try:
        found: Any = compile_fx(copied(module), list(inputs))
    except Exception as error:
        if isinstance(error, torch.OutOfMemoryError) or _is_of_dynamo(error):
            raise
        return module.forward
    return found


class Contained:
    """A compiled graph. Where a call fails and the graph's own operators do not, they go on in its place."""

    def __init__(self, function: Function, plain: fx.GraphModule) -> None:
        self.function, self.plain = function, plain
        self.failed = False

    def __call__(self, *args: Any) -> Any:
        if self.failed:
            return self.plain.forward(*args)
        try:
            return self.function(*args)
        except Exception as error:
            # Only a plan knows whether it may be begun again: nothing has been written over.
            if not getattr(error, "codetta_again", False) or not is_contained(error):
                raise
            failure = error
        found = self.plain.forward(*args)  # what eager refuses, it says itself
        self.failed = True
        warn(failure, "this graph is left to PyTorch's operators")
        return found


def is_contained(error: Exception) -> bool:
    """Whether it is a fault of Codetta's own, and nobody wants to see it."""
    if isinstance(error, torch.OutOfMemoryError | CheckError) or _is_of_dynamo(error):
        return False
    return not debug_level() and os.environ.get("CODETTA_RAISE", "0") in ("", "0")


def _is_of_dynamo(error: Exception) -> bool:
    """Whether Dynamo raised it for itself: to begin again, or to break the graph."""
    return type(error).__module__.startswith("torch._dynamo")


_said: set[str] = set()


def warn(error: Exception, consequence: str) -> None:
    """Once for each fault."""
    what = f"{stage_of(error) or 'tracing'}: {type(error).__name__}: {error}"
    if what not in _said:
        _said.add(what)
        warnings.warn(
            f"codetta failed in {what}\nResults are right, but {consequence}. Please report this with the output of `codetta env` and "
            "the traceback that CODETTA_DEBUG=1 raises.",
            RuntimeWarning,
            stacklevel=3,
        )


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """The graph once more, with the same parameters and all that Dynamo has noted about it."""
    found = fx.GraphModule(module, copy.deepcopy(module.graph))
    found.meta.update(module.meta)
    for name, value in vars(module).items():
        if name not in vars(found):
            vars(found)[name] = value
    for mine, theirs in zip(found.graph.nodes, module.graph.nodes, strict=True):
        if theirs.op == "placeholder" and hasattr(theirs, "_dynamo_source"):
            mine._dynamo_source = theirs._dynamo_source
    return found
