"""Hugging Face's `generate` of a compiled model: its own, with another loop for greedy choice and for sampling.

Hugging Face reads the arguments, makes the processors of logits and the criteria to stop, and prepares the cache, all as ever. Its loop
(`_sample`) is ours, where a Decoder can do what is asked for (loop.py); where not, that is said once, and everything runs as it would
without us, by the model's own forward.
"""

from __future__ import annotations

import threading
import warnings
from functools import cache
from types import MethodType
from typing import Any

from torch import Tensor, nn

from codetta.errors import ArgumentError, Reason
from codetta.generate import Generator
from codetta.integrations.dynamo import backend_of
from codetta.integrations.huggingface import plain
from codetta.integrations.loop import Call, NoRoomError, run, why_not

# Of GenerationMixin: loops that are not ours, and what they are.
OTHERS = {
    "_beam_search": "beams are compared across sequences",
    "_assisted_decoding": "an assistant proposes tokens, several are checked at once",
    "load_custom_generate": "a loop from elsewhere is asked for",
}


def takes_over(model: nn.Module) -> None:
    """Give the model a `generate` with our loop in it. A copy of the model has it, too, and passes everything on."""
    model.generate = MethodType(generate, model)  # type: ignore[assignment]


def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
    """As Hugging Face's, with the same arguments."""
    if backend_of(self) is None:
        return type(self).generate(self, *args, **kwargs)
    return type(self).generate(_kept(self).model(self), *args, **kwargs)


class _Kept:
    """What is kept of a compiled model for its next call."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # calls take turns
        self.busy = False  # so that a call out of a call (a streamer's, a criterion's) does not take the Generator away
        self.generator: Generator | None = None
        self.looped: Any = None
        self.said: set[str] = set()

    def model(self, compiled: Any) -> Any:
        """The model as Hugging Face's code sees it: plain, with our loop."""
        kind: Any = type(compiled)
        now = plain(compiled, _with_our_loop(kind))
        if self.looped is None:
            self.looped = now
        else:  # what Hugging Face has noted on it stays
            vars(self.looped).update(vars(now))
        vars(self.looped)["_codetta"] = self, compiled
        return self.looped

    def say(self, reasons: list[Reason]) -> None:
        new = [str(each) for each in reasons if str(each) not in self.said]
        self.said.update(new)
        if new:
            text = "; ".join(new)
            warnings.warn(f"codetta: generate is Hugging Face's own loop over the plain model ({text})", stacklevel=6)

    def made(self, compiled: Any) -> Generator | list[Reason]:
        if self.generator is None:
            try:
                self.generator = Generator(compiled)
            except ArgumentError as error:
                return [Reason("a model that is called with keys and values", f"{error.argument} {error.problem}")]
        return self.generator


def _kept(model: Any) -> _Kept:
    found: _Kept = vars(model._compiled_call_impl).setdefault("generation", _Kept())
    return found


@cache
def _with_our_loop(kind: Any) -> Any:
    """The class with our `_sample`, under its own name: models look things up by it."""
    from transformers import GenerationMixin

    def other(name: str, why: str) -> Any:
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            self._codetta[0].say([Reason("one token after the other", why)])
            return getattr(kind, name)(self, *args, **kwargs)

        return run

    functions = {name: other(name, why) for name, why in OTHERS.items() if hasattr(kind, name)}
    if getattr(kind, "_sample", None) is GenerationMixin._sample:
        functions["_sample"] = _sample
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), functions | names)


def _sample(self: Any, input_ids: Tensor, *args: Any, **named: Any) -> Any:
    """In place of GenerationMixin's."""
    from transformers import GenerationMixin

    kept, compiled = self._codetta
    call = Call.of(self, input_ids, *args, **named)
    reasons = why_not(call)
    if not reasons:
        with kept.lock:
            if kept.busy:
                reasons = [Reason("one call at a time", "this one came out of another")]
            else:
                made = kept.made(compiled)
                reasons = made if isinstance(made, list) else []
                if isinstance(made, Generator):
                    kept.busy = True
                    try:
                        return run(call, made)
                    except NoRoomError as error:
                        reasons = error.reasons
                    finally:
                        kept.busy = False
    kept.say(reasons)
    return GenerationMixin._sample(self, input_ids, *args, **named)
