"""Speculative launch: a call that looks like an earlier one launches what that one launched first, and is judged afterwards.

Dynamo's guards, a model's wrappers and AOTAutograd's take longer than the kernels of many calls. All of them still run, but while the device
is at work. When they arrive at the function that was expected, with the very tensors that it was started with, the results are there; when
they arrive anywhere else, what was started is dropped: it writes to nothing but memory of its own.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from codetta.runtime.sized import capturing

MOST = 64  # kinds of calls that are remembered for a model
FUTILE = 4  # launches in a row that were of no use, after which a kind of call is left alone

Key = tuple[object, ...]
# From arguments to results, without anything being compiled or decided; to None if it cannot take them now.
Launch = Callable[[list[Any]], tuple[Any, ...] | None]


class Expected:
    """The function that a kind of call arrives at, and where its arguments come from."""

    def __init__(self, function: object, launch: Launch, args: Sequence[Any], leaves: Sequence[Tensor]) -> None:
        self.function, self.launch = function, launch
        self.lost = False  # an argument is no more
        number = {id(each): at for at, each in enumerate(leaves)}
        self.given = [(at, number[id(each)]) for at, each in enumerate(args) if id(each) in number]
        given = {at for at, _ in self.given}
        # Whoever replaces a parameter wants its memory back: it is not held on to.
        self.others = [
            weakref.ref(each, self._lose) if isinstance(each, Tensor) and at not in given else _Constant(each)
            for at, each in enumerate(args)
        ]

    def _lose(self, _: object) -> None:
        self.lost = True

    def started(self, leaves: Sequence[Tensor]) -> Started | None:
        args = [each() for each in self.others]
        if self.lost:
            return None
        for at, number in self.given:
            args[at] = leaves[number]
        results = self.launch(args)
        return None if results is None else Started(self.function, args, results)


class _Constant:
    """A value that is asked for as a weak reference is."""

    def __init__(self, value: Any) -> None:
        self.value = None if isinstance(value, Tensor) else value

    def __call__(self) -> Any:
        return self.value


class Started:
    """What was launched: for which function, with which arguments, with which results."""

    def __init__(self, function: object, args: list[Any], results: tuple[Any, ...]) -> None:
        self.function, self.args, self.results = function, args, results

    def serves(self, function: object, args: Sequence[Any]) -> bool:
        """Whether this is what the function would have done with these arguments."""
        if function is not self.function or len(args) != len(self.args):
            return False
        others = [(mine, each) for mine, each in zip(self.args, args) if mine is not each]
        return all(type(mine) is type(each) is int and mine == each for mine, each in others)


class Call:
    """A call of a model that this thread is in. The first function of a plan that it arrives at is the one that is looked at."""

    def __init__(self, kinds: Kinds, key: Key, leaves: list[Tensor]) -> None:
        self.kinds, self.key, self.leaves = kinds, key, leaves
        self.started: Started | None = None
        self.arrived = False
        expected = kinds.expected.get(key)
        if expected is not None:
            with torch.no_grad():
                try:
                    self.started = expected.started(leaves)
                except Exception:  # such as memory that ran out: what there is to be said, the call itself will say
                    kinds.futile(key)

    def results(self, function: object, args: Sequence[Any]) -> tuple[Any, ...] | None:
        """Of the function, if what was started serves it."""
        if self.arrived:
            return None
        self.arrived = True
        started, self.started = self.started, None
        if started is not None:
            if started.serves(function, args):
                self.kinds.useful(self.key)
                return started.results
            self.kinds.futile(self.key)
        return None

    def learn(self, function: object, launch: Launch, args: Sequence[Any]) -> None:
        """That a call of this kind arrives at the function, and what it could have launched at its beginning."""
        if self.kinds.is_worth_it(self.key) and _is_alone():
            self.kinds.expect(self.key, Expected(function, launch, args, self.leaves))


class Kinds:
    """The kinds of calls of one model, and what is expected of each."""

    def __init__(self) -> None:
        self.expected: dict[Key, Expected] = {}
        self.tries: dict[Key, int] = {}  # since a launch was of use

    def expect(self, key: Key, expected: Expected) -> None:
        while len(self.tries) >= MOST and key not in self.tries:
            oldest = next(iter(self.tries))
            del self.tries[oldest]
            self.expected.pop(oldest, None)
        self.tries[key] = self.tries.get(key, 0) + 1
        self.expected[key] = expected

    def is_worth_it(self, key: Key) -> bool:
        return self.tries.get(key, 0) < FUTILE

    def useful(self, key: Key) -> None:
        self.tries[key] = 0

    def futile(self, key: Key) -> None:
        self.expected.pop(key, None)

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: object) -> Any:
        """`function(*args, **kwargs)`; mode: what else tells kinds of calls apart."""
        before = getattr(_thread, "call", None)
        _thread.call = begun = self._begun(args, kwargs, mode)
        try:
            return function(*args, **kwargs)
        finally:
            _thread.call = before
            if begun is not None and begun.started is not None:  # it arrived nowhere
                self.futile(begun.key)

    def _begun(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], mode: object) -> Call | None:
        leaves: list[Tensor] = []
        key: list[object] = [mode, *_modes(), len(args), *kwargs]
        for value in (*args, *kwargs.values()):
            if type(value) is Tensor:
                leaves.append(value)
                key += (value.shape, value.stride(), value.dtype, value.device, value.requires_grad)
            elif value is None or isinstance(value, bool | int | float | str):
                key.append(value)
            else:
                return None
        return None if _is_observed() else Call(self, tuple(key), leaves)


_thread = threading.local()


def current() -> Call | None:
    """The call that this thread is in, until it has arrived at a function of a plan."""
    call: Call | None = getattr(_thread, "call", None)
    return None if call is None or call.arrived else call


def _modes() -> tuple[bool, bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch._C._is_any_autocast_enabled()


def pays_on(device: torch.device) -> bool:
    """Whether the device works while the host goes on."""
    return device.type == "cuda"


def _is_observed() -> bool:
    """Whether others would see a launch that came too soon: a recording, or what looks at each operator."""
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        return True
    return torch._C._functorch.peek_interpreter_stack() is not None or capturing()


_TORCH = Path(torch.__file__).parent
_WRAPPERS = tuple(
    str(_TORCH / name) + end
    for name, end in (("_dynamo", "/"), ("_functorch", "/"), ("_compile.py", ""), ("autograd", "/"), ("utils", "/"))
)
_HARMLESS = [str(Path(__file__).resolve().parents[1]), "<", *_WRAPPERS]  # how the files of such frames begin


def _is_alone() -> bool:
    """Whether nothing but a traced graph stands between the model's call and this function: operators that ran before it one by one
    might have changed what it reads."""
    harmless = tuple(_HARMLESS)
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not Kinds.call.__code__:
        code = frame.f_code
        resumed = code.co_name.startswith("torch_dynamo_resume")
        if resumed or not code.co_filename.startswith(harmless):
            return False
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None
