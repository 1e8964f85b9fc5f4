"""Replay: a bound function recorded as a CUDA graph, and given other inputs at each call.

Nobody is to notice it. What a graph reads it reads at the addresses that it was recorded with: tensors that lie there still are read in
place, a few others are copied to where it expects them. What it writes lies in its own memory and is overwritten by the next call, so that
results are copies ("fresh"), or lent ("lent": gradients), or kept for the way back ("kept"); as long as somebody has hold of what was lent
or kept, the function runs without the graph.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from codetta.errors import CodettaError
from codetta.runtime.bound import Bound
from codetta.runtime.recorded import record, recording
from codetta.runtime.sized import addresses_of, lie_at

FRESH, LENT, KEPT, TOKEN = "fresh", "lent", "kept", "token"
COPIED = 1 << 20  # bytes of inputs that are copied at each call, at most
HANDED = 64 << 20  # bytes of results that are copied
LARGE = 256 << 20  # bytes between kernels: a GPU that moves more is slower than any host
SHARE = 16  # graphs hold one part in so many of a device's memory


class ReplayError(CodettaError):
    """The function cannot be recorded; the text says why."""


class Replay:
    """The graph of a bound function, with the arguments that it was recorded for."""

    def __init__(
        self, bound: Bound, args: Sequence[Any], moving: Sequence[int], same: Collection[int], policy: Sequence[str]
    ) -> None:
        self.bound, self.device, self.moving = bound, bound.device, list(moving)
        self.stream = _stream(self.device)
        self.lock = threading.Lock()
        with torch.inference_mode(False), torch.no_grad():  # a later call may be of another mode
            self.buffers = [_like(args[at]) for at in self.moving]
        given = list(args)
        for at, buffer in zip(self.moving, self.buffers, strict=True):
            given[at] = buffer
        loose = {*self.moving, *same}
        self.fixed = [at for at, each in enumerate(given) if isinstance(each, Tensor) and at not in loose]
        self.where = addresses_of(given, self.fixed)
        # Lists hold what was made of parameters.
        self.made = {
            at: [each.data_ptr() for each in value] for at, value in enumerate(given) if isinstance(value, list)
        }
        before = torch.cuda.memory_reserved(self.device)
        self.graph, results = record(partial(self._bare, given), self.device)
        self.bytes = max(torch.cuda.memory_reserved(self.device) - before, 0)
        self.token: StorageWeakRef | None = None
        self.results = [self._result(value, how, given) for value, how in zip(results, policy, strict=True)]
        if sum(each.nbytes for how, each in self.results if how == FRESH) > HANDED:
            raise ReplayError("its results are too large to be copied")
        # Storages whose tensors are lent: they belong to the graph and to whoever has such a tensor.
        lent = {each.untyped_storage()._cdata: each.untyped_storage() for how, each in self.results if how == LENT}
        del results, given
        self.lent = [(cdata, storage, torch._C._storage_Use_Count(cdata)) for cdata, storage in lent.items()]

    def takes(self, args: list[Any]) -> bool:
        """Whether everything that is read in place lies where it lay."""
        if _stream(self.device) != self.stream or not lie_at(args, self.where, self.fixed):
            return False
        return all(lie_at(args[at], where, list(range(len(where)))) for at, where in self.made.items())

    def is_free(self) -> bool:
        """Whether nobody has hold of what the last call left."""
        if self.token is not None and not self.token.expired():
            return False
        return all(torch._C._storage_Use_Count(cdata) <= alone for cdata, _, alone in self.lent)

    def __call__(self, args: list[Any]) -> tuple[Any, ...] | None:
        """The results; None if somebody still has hold of the last ones."""
        with self.lock:
            if not self.is_free():
                return None
            for at, buffer in zip(self.moving, self.buffers, strict=True):
                buffer.copy_(args[at])
            self.graph.replay()
            return tuple([self._handed(how, value, args) for how, value in self.results])

    def _bare(self, given: list[Any]) -> tuple[Any, ...]:
        return self.bound(list(given), self.bound.addresses(given))

    # ---- results

    def _result(self, value: Any, how: str, given: Sequence[Any]) -> tuple[str, Any]:
        if not isinstance(value, Tensor):
            return "constant", value
        for at, each in enumerate(given):
            if each is value:
                return "argument", at
        if any(value.untyped_storage()._cdata == buffer.untyped_storage()._cdata for buffer in self.buffers):
            raise ReplayError("a view of an input is returned")
        return (KEPT if not value.is_cuda and how != TOKEN else how), value

    def _handed(self, how: str, value: Any, args: Sequence[Any]) -> Any:
        match how:
            case "argument":
                return args[value]
            case "fresh":
                return value.clone()
            case "token":
                found = value.clone()
                self.token = StorageWeakRef(found.untyped_storage())
                return found
            case "lent":
                # A tensor of its own in the same memory, in a sixth of the time that `set_` takes.
                return value.detach()
        return value


class Replays:
    """The replay of one bound function, made when its calls have shown what stays where it is."""

    PATIENCE = 16  # calls that may pass until then

    def __init__(
        self,
        bound: Bound,
        policy: Sequence[str],
        varying: Collection[int],
        same: Collection[int],
        fixed: Collection[int],
    ) -> None:
        """varying: arguments that are no parameters; same: those whose contents belong to the signature, wherever they lie; fixed: those
        that are written to, and so never copied."""
        self.bound, self.policy = bound, policy
        self.varying, self.same, self.fixed = set(varying), set(same), set(fixed)
        self.current: Replay | None = None
        self.why: str | None = None  # why there is none, for good
        self.last: list[int] | None = None  # addresses of the last call
        self.calls = self.missed = 0
        if bound.bytes > LARGE:
            self.why = f"{bound.bytes >> 20} MB lie between its kernels: the GPU takes longer than the host"

    def __call__(self, args: list[Any]) -> tuple[Any, ...] | None:
        """The results from a graph; None: the function is to be called without one."""
        if self.why is not None:
            return None
        if self.current is None:
            current = self._recorded(args)
            return None if current is None else self._run(current, args)
        return self.ready(args)

    @property
    def is_settled(self) -> bool:
        """Whether there is a graph, or there will be none."""
        return self.current is not None or self.why is not None

    def ready(self, args: list[Any]) -> tuple[Any, ...] | None:
        """The results from a graph that is there already."""
        current = self.current
        if current is None:
            return None
        if not current.takes(args):
            self.missed += 1
            if self.missed >= self.PATIENCE:  # something lies elsewhere for good
                self.forget()
            return None
        return self._run(current, args)

    def _run(self, current: Replay, args: list[Any]) -> tuple[Any, ...] | None:
        results = current(args)
        if results is not None:
            self.missed = 0
            _shelf.used(self)
        return results

    def _recorded(self, args: list[Any]) -> Replay | None:
        self.calls += 1
        moving = self._moving(args)
        if moving is None:
            if self.calls > self.PATIENCE:
                self.why = "its arguments lie elsewhere at every call"
            return None
        if not recording.acquire(blocking=False):  # random numbers know of one recording at a time
            return None
        try:
            self.current = Replay(self.bound, args, moving, self.same, self.policy)
        except Exception as error:  # whatever it is, the function itself still works
            self.why = str(error).splitlines()[0] if str(error) else type(error).__name__
            torch.cuda.current_stream(self.bound.device).synchronize()
            return None
        finally:
            recording.release()
        _shelf.add(self)
        return self.current

    def forget(self) -> None:
        """Give the graph's memory back."""
        self.current, self.last, self.calls, self.missed = None, None, 0, 0

    def _moving(self, args: Sequence[Any]) -> list[int] | None:
        """Arguments that are to be copied; None if that is yet unknown, or would be too much."""
        now = [each.data_ptr() if isinstance(each, Tensor) else 0 for each in args]
        last, self.last = self.last, now
        if last is None:
            return None
        moved = [
            at
            for at, (before, here) in enumerate(zip(last, now, strict=True))
            if before != here and at not in self.same
        ]
        if any(not args[at].is_cuda or at in self.fixed for at in moved):
            return None
        if sum(args[at].nbytes for at in moved) > COPIED:
            return None
        # What is small and no parameter may well lie elsewhere next time.
        small = [
            at for at in self.varying - self.fixed
            if isinstance(args[at], Tensor) and args[at].is_cuda and args[at].nbytes <= COPIED // 16
        ]  # fmt: skip
        return sorted({*moved, *(small if len(small) <= 4 else [])})


class _Shelf:
    """All graphs of the process, the least used first; the memory that they may hold is bounded."""

    def __init__(self) -> None:
        self.kept: OrderedDict[int, weakref.ref[Replays]] = OrderedDict()
        self.lock = threading.Lock()

    def used(self, replays: Replays) -> None:
        with self.lock:
            if id(replays) in self.kept:
                self.kept.move_to_end(id(replays))

    def add(self, replays: Replays) -> None:
        assert replays.current is not None
        device = replays.current.device
        most = torch.cuda.get_device_properties(device).total_memory // SHARE
        with self.lock:
            self.kept[id(replays)] = weakref.ref(replays)
            alive = [
                (key, each)
                for key, ref in self.kept.items()
                if (each := ref()) is not None and each.current is not None
            ]
            total = sum(each.current.bytes for _, each in alive if each.current is not None)
            for key, each in alive:
                if total <= most or each.current is None:
                    break
                total -= each.current.bytes
                del self.kept[key]
                each.forget()
                if each is replays:
                    each.why = "its memory is more than graphs may hold"


_shelf = _Shelf()


def _like(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _stream(device: torch.device) -> int:
    found: int = torch._C._cuda_getCurrentRawStream(device.index or 0)
    return found
