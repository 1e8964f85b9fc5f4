"""Bindings: a function of a plan, bound for each signature of its arguments that comes again.

A signature is what the tape of a call may depend on: sizes and strides of the tensors that vary from call to call, numbers, threads. The
first call of a signature goes the plain way, the second makes the tape, all others are bound. What cannot be bound stays with the plain way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

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


class Bindings:
    """The function, called with its arguments in a list that is emptied.

    varying: arguments that may have other sizes at the next call; all others are the same tensors, or tensors like them. numbers: among
    them tensors on the host whose contents count, too. device: of all launches; None: the function is not bound.
    """

    def __init__(
        self, function: Function, launch: Callable[..., Any], device: torch.device | None, varying: Sequence[str],
        numbers: Sequence[str] = (), policy: Sequence[str] = (), written: Collection[str] = (), pure: bool = False,
    ) -> None:  # fmt: skip
        """policy: of a recorded graph's results, one for each; none: nothing is recorded. written: arguments that are written to.
        pure: a call whose results are dropped leaves no trace."""
        self.pure = pure
        self.function, self.launch, self.device, self.policy = function, launch, device, policy
        self.written = [at for at, name in enumerate(function.arguments) if name in written]
        self.varying = [function.arguments.index(name) for name in varying]
        self.numbers = [function.arguments.index(name) for name in numbers]
        self.plain = function.compiled()
        self.known: dict[Signature, Bound | str] = {}  # bound, or why not
        self.replays: dict[Bound, Replays] = {}

    def __call__(self, args: list[Any]) -> tuple[Any, ...]:
        if self._is_elsewhere():
            with torch.cuda.device(self.device):
                return self._call(args)
        return self._call(args)

    def _is_elsewhere(self) -> bool:
        """Whether the thread's current GPU is another one than that of the launches."""
        device = self.device
        return device is not None and device.type == "cuda" and torch._C._cuda_getDevice() != (device.index or 0)

    def _call(self, args: list[Any]) -> tuple[Any, ...]:
        if self.device is None or _is_watched():
            return self.plain(args)
        call = speculation.current() if self.pure else None
        if call is not None:
            results = call.results(self, args)
            if results is not None:
                return results
        signature = self.signature(args)
        found = self.known.get(signature)
        if isinstance(found, Bound):
            return self._bound(found, args, call)
        if found == SEEN and not capturing():
            return self._bind(signature, args)
        if found is None:
            self._remember(signature, SEEN)
        return self.plain(args)

    def _bound(self, bound: Bound, args: list[Any], call: speculation.Call | None) -> tuple[Any, ...]:
        replays = self.replays.get(bound)
        if replays is not None and not capturing():
            results = replays(args)
            if results is not None:
                if call is not None:
                    call.learn(self, partial(self._ready, replays), args)
                return results
        addresses = bound.addresses(args)
        return self.plain(args) if addresses is None else bound(args, addresses)

    def _ready(self, replays: Replays, args: list[Any]) -> tuple[Any, ...] | None:
        return None if self._is_elsewhere() else replays.ready(args)

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
