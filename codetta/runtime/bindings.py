"""Bindings: a function of a plan, bound for each signature of its arguments that comes again.

A signature is what the tape of a call may depend on: sizes and strides of the tensors that vary from call to call, numbers, threads. The
first call of a signature goes the plain way, the second makes the tape, all others are bound. What cannot be bound stays with the plain way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from codetta.errors import CodettaError
from codetta.runtime import speculation
from codetta.runtime.bound import Bound
from codetta.runtime.function import Function
from codetta.runtime.replay import Replays
from codetta.runtime.sized import capturing
from codetta.runtime.tape import Tape, UnboundError

MOST = 256  # signatures that are remembered
SEEN = "seen once"

Signature = tuple[object, ...]
Result = TypeVar("Result")
Made = Callable[[Sequence[Any]], Any]


class Bindings:
    """The function, called with its arguments in a list that is emptied.

    made: from the arguments to the function's first one, which callers do not give; None: callers give all of them. varying: arguments that
    may have other sizes at the next call; all others are the same tensors, or tensors like them. numbers: among them tensors on the host
    whose contents count, too. device: of all launches; None: the function is not bound.
    """

    def __init__(
        self, function: Function, launch: Callable[..., Any], device: torch.device | None, varying: Sequence[str],
        numbers: Sequence[str] = (), policy: Sequence[str] = (), written: Collection[str] = (), pure: bool = False,
        made: Made | None = None,
    ) -> None:  # fmt: skip
        """policy: of a recorded graph's results, one for each; none: nothing is recorded. written: arguments that are written to.
        pure: a call whose results are dropped leaves no trace."""
        self.pure, self.made = pure, made
        self.function, self.launch, self.device, self.policy = function, launch, device, policy
        self.written = [at for at, name in enumerate(function.arguments) if name in written]
        self.varying = [function.arguments.index(name) for name in varying]
        self.numbers = [function.arguments.index(name) for name in numbers]
        self.plain = function.compiled()
        self.known: dict[Signature, Bound | str] = {}  # bound, or why not
        self.replays: dict[Bound, Replays] = {}

    def __call__(self, args: list[Any]) -> tuple[Any, ...]:
        return self._at_home(self._call, args)

    def _at_home(self, call: Callable[..., Result], *args: Any) -> Result:
        """The call, while the GPU of the launches is the thread's current one."""
        device = self.device
        if device is not None and device.type == "cuda" and torch._C._cuda_getDevice() != (device.index or 0):
            with torch.cuda.device(device):
                return call(*args)
        return call(*args)

    def _call(self, args: list[Any]) -> tuple[Any, ...]:
        if self.device is None or _is_watched():
            return self.plain(self._complete(args))
        call = speculation.current() if self.pure else None
        if call is not None:
            results = call.results(self, args)
            if results is not None:
                return results
        given = args if call is None else list(args)
        args = self._complete(args)
        signature = self.signature(args)
        found = self.known.get(signature)
        if isinstance(found, Bound):
            if call is not None and self._is_settled(found):
                call.learn(self, partial(self._at_home, self._ready, found), given)
            return self._bound(found, args)
        if found == SEEN and not capturing():
            return self._bind(signature, args)
        if found is None:
            self._remember(signature, SEEN)
        return self.plain(args)

    def _complete(self, args: list[Any]) -> list[Any]:
        """All arguments of the function."""
        return args if self.made is None else [self.made(args), *args]

    def _bound(self, bound: Bound, args: list[Any]) -> tuple[Any, ...]:
        replays = self.replays.get(bound)
        if replays is not None and not capturing():
            results = replays(args)
            if results is not None:
                return results
        addresses = bound.addresses(args)
        return self.plain(args) if addresses is None else bound(args, addresses)

    def _is_settled(self, bound: Bound) -> bool:
        """Whether it is known how this is launched best, and the device would run while the host goes on."""
        replays = self.replays.get(bound)
        return speculation.pays_on(bound.device) and (replays is None or replays.is_settled)

    def _ready(self, bound: Bound, args: list[Any]) -> tuple[Any, ...] | None:
        """The results for arguments of a call that is yet to come; None if there is more to do for them than to launch."""
        if _is_watched() or not self._is_settled(bound):
            return None
        args = self._complete(args)
        replays = self.replays.get(bound)
        results = None if replays is None else replays.ready(args)
        if results is not None:
            return results
        addresses = bound.addresses(args)
        return None if addresses is None else bound(list(args), addresses)

    def signature(self, args: list[Any]) -> Signature:
        values: list[object] = [torch.get_num_threads()]
        for at in self.varying:
            value = args[at]
            if isinstance(value, Tensor):
                values.append(value.shape)
                values.append(value.stride())
            else:
                values.append(value)
        values += [tuple(args[at].tolist()) for at in self.numbers]
        return tuple(values)

    def _bind(self, signature: Signature, args: list[Any]) -> tuple[Any, ...]:
        assert self.device is not None
        tape = Tape(self.function, self.launch, self.device)
        results = tape.run(args)
        try:
            bound = Bound(tape)
            self._remember(signature, bound)
            if self.policy and bound.device.type == "cuda":
                self.replays[bound] = Replays(bound, self.policy, self.varying, self.numbers, self.written)
        except (UnboundError, CodettaError) as error:
            self._remember(signature, str(error) or type(error).__name__)
        return results

    def _remember(self, signature: Signature, value: Bound | str) -> None:
        self.known.pop(signature, None)
        if len(self.known) >= MOST:
            gone = self.known.pop(next(iter(self.known)))
            if isinstance(gone, Bound):
                self.replays.pop(gone, None)
        self.known[signature] = value


def _is_watched() -> bool:
    """Whether each launch is to be looked at."""
    found = os.environ
    return found.get("CODETTA_CHECK", "0") not in ("", "0") or found.get("CODETTA_DEBUG", "0") not in ("", "0")
