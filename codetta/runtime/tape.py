"""Tape: what a function of a plan does for one set of arguments, so that the same can be done again with everything decided.

The function's lines are executed one by one, as they always are. A program's launch is remembered as data, a view as a place in memory
(a root and an offset), any other line as itself. Roots are the function's arguments, memory that launches were given for their results,
and the results of other lines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from codetta.runtime.function import Function, Line, last_uses
from codetta.runtime.invocation import Address, Argument, Invocation, TensorMap, listening
from codetta.stat import Stat

aten = torch.ops.aten
EMPTY = (aten.empty, aten.empty_strided, aten.empty_like, aten.new_empty, aten.new_empty_strided)


class UnboundError(Exception):
    """The function cannot be bound for these arguments; the text says why."""


@dataclass(eq=False)
class Root:
    """Memory with an address of its own at every call. name: the variable (or expression) whose tensor begins there; "" for memory
    that is given to launches for their results."""

    number: int
    name: str
    begin: int  # address, while the tape was made
    bytes: int
    like: Tensor  # without memory: size, strides and offset of the tensor that begins there
    first: int = 0  # steps that use it
    last: int = 0
    returned: bool = False

    @property
    def is_slot(self) -> bool:
        return not self.name


@dataclass(frozen=True)
class Ref:
    """A tensor as a place in memory."""

    root: int
    offset: int  # bytes from where the root begins
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class StatRef:
    """A statistic whose partials are at that place."""

    partials: Ref
    how: str
    width: int
    total: int


@dataclass(frozen=True, eq=False)
class Constant:
    """A value that is the same at every call."""

    value: Any


@dataclass(frozen=True, eq=False)
class Local:
    """A value that only a variable has, such as a tuple of tensors."""

    name: str


Recorded = Ref | StatRef | Constant | Local


@dataclass(frozen=True, eq=False)
class Launched:
    """A step: a launch, whose tensors are addresses, with the roots that it reads and writes."""

    invocation: Invocation
    roots: list[int]


@dataclass(frozen=True, eq=False)
class Called:
    """A step: a line that is made again as it is, with what its variables were and what it leaves."""

    line: Line
    uses: dict[str, Recorded]
    made: dict[str, Recorded]


class Tape:
    """The steps of a function for its arguments, and the memory that they work on."""

    def __init__(self, function: Function, launch: Callable[..., Any], device: torch.device) -> None:
        self.function, self.launch, self.device = function, launch, device
        self.objects = list(
            function.objects
        )  # what the lines call `c`, and what copies on the way to launches add to it
        self.roots: list[Root] = []
        self.steps: list[Launched | Called] = []
        self.values: dict[str, Recorded] = {}
        self.touches: dict[str, set[int]] = {}  # slots that a variable without a place has hold of
        self.shared: list[tuple[int, int]] = []  # arguments that lie in the same memory
        self.results: list[Recorded] = []
        self.opening: list[Line] = []  # lines that give names to what was there before
        self.why: str | None = None  # why the function cannot be bound
        self.given: list[int] = []  # roots of arguments, and of what was there before
        self._launch: Invocation | None = None  # of the line at hand
        self._copied: _Copies | None = None  # on the way to it
        self._known: dict[int, int] = {}  # storages: their roots
        self._watched: list[StorageWeakRef] = []  # as long as they are, no storage gets the identity of an earlier one
        self._copies = 0

    def run(self, args: list[Any]) -> tuple[Any, ...]:
        """The function's results for these arguments, in a list that is emptied."""
        function = self.function
        objects = [self._launched if each is self.launch else each for each in function.objects]
        scope: dict[str, Any] = {
            "c": objects,
            "torch": torch,
            "math": math,
            **dict(zip(function.arguments, args, strict=True)),
        }
        args.clear()
        for name in function.arguments:
            self._given(name, scope[name])
        named = [line.uses | line.makes for line in function.lines] + [Line(function.returned).uses]
        for name in set(function.arguments).difference(*named):
            del scope[name]
        for line, names in zip(function.lines, last_uses(named), strict=False):
            self._launch, self._copied = None, _Copies() if line.kind == "launch" else None
            with self._copied or nullcontext():
                exec(str(line), scope)
            self._try(self._record, line, {name: scope[name] for name in sorted(line.makes)})
            for name in names:
                scope.pop(name, None)
        results = tuple(eval(text, scope) for text in function.results)
        for text, value in zip(function.results, results, strict=True):
            self._try(self._returned, text, value)
        self._launch = self._copied = None
        self._known.clear()
        self._watched.clear()
        return results

    def _try(self, record: Callable[..., None], *args: Any) -> None:
        """Whatever stands in the way of a tape, the call itself goes on."""
        if self.why is None:
            try:
                record(*args)
            except UnboundError as error:
                self.why = str(error)

    # ---- lines

    def _record(self, line: Line, made: dict[str, Any]) -> None:
        if line.kind == "given":
            self.opening.append(line)
            for name, value in made.items():
                self._given(name, value)
            return
        if self._copied is not None and self._copied.why is not None:
            self._launch = None
        if line.kind == "room" or self._launch is not None:
            for value in made.values():
                tensor = value.partials if isinstance(value, Stat) else value
                if self._find(tensor) is None:
                    self._slot(tensor)
            if line.kind == "launch":
                self._commit()
            self.values |= {name: self._value(name, value) for name, value in made.items()}
            return
        if line.kind == "fixed":
            self.values |= {name: Constant(value) for name, value in made.items()}
            return
        if line.kind == "view" and all(self._is_placed(value) for value in made.values()):
            self.values |= {name: self._value(name, value) for name, value in made.items()}
            return
        self._called(line, made)

    def _called(self, line: Line, made: dict[str, Any]) -> None:
        number = len(self.steps)
        uses = {name: self.values[name] for name in sorted(line.uses)}
        for name, value in uses.items():
            self._use(value, number, self.touches.get(name, set()))
        for name, value in made.items():
            for each in _tensors(value):
                if self._find(each) is None and (each is value or isinstance(value, Stat)):
                    self._root(f"{name}.partials" if isinstance(value, Stat) else name, each)
        self.values |= {name: self._value(name, value) for name, value in made.items()}
        for name, value in made.items():
            self.touches[name] = {root for each in _tensors(value) if (root := self._find(each)) is not None}
        self.steps.append(Called(line, uses, {name: self.values[name] for name in made}))

    def _launched(self, *args: Any) -> Any:
        """The launch of a program, listened to."""
        with listening() as heard:
            results = self.launch(*args)
        if len(heard) == 1:
            self._launch = heard[0]
        return results

    def _commit(self) -> None:
        """The launch of this line as a step, behind the copies that were made for it."""
        invocation = self._launch
        assert invocation is not None and self._copied is not None
        for target, args, kwargs, result in self._copied.needed(invocation):
            self._copy(target, args, kwargs, result)
        roots: list[int] = []
        arguments: list[Argument] = []
        for argument in invocation.arguments:
            given = argument.base if isinstance(argument, TensorMap) else argument
            if isinstance(given, Tensor):
                address = self._addressed(given)
                roots.append(address.root)
                arguments.append(replace(argument, base=address) if isinstance(argument, TensorMap) else address)
            else:
                arguments.append(argument)
        self.steps.append(Launched(replace(invocation, arguments=arguments), list(dict.fromkeys(roots))))

    def _addressed(self, tensor: Tensor) -> Address:
        root = self._find(tensor)
        if root is None:
            raise UnboundError("a launch works on memory that nobody has made")
        self._used(root, len(self.steps))
        return Address(root, tensor.data_ptr() - self.roots[root].begin if tensor.numel() else 0)

    def _copy(self, target: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        """An operator that stood between a launch and what it reads, as a line."""
        self._copies += 1
        leaves, structure = pytree.tree_flatten((args, kwargs))
        names = []
        for at, leaf in enumerate(leaves):
            name = f"v__copied{self._copies}_{at}"
            ref = self._ref(leaf) if isinstance(leaf, Tensor) else None
            if isinstance(leaf, Tensor) and ref is None:
                raise UnboundError("a copy is made of memory that nobody has made")
            self.values[name] = ref or Constant(leaf)
            names.append(name)
        call = len(self.objects)

        def made(*leaves: Any) -> Any:
            given, named = pytree.tree_unflatten(list(leaves), structure)
            return target(*given, **named)

        self.objects.append(made)
        line = Line(f"c[{call}]({', '.join(names)})", f"v__copy{self._copies}")
        self._called(line, {f"v__copy{self._copies}": result})

    # ---- memory

    def _given(self, name: str, value: Any) -> None:
        if not isinstance(value, Tensor):
            self.values[name] = Local(name)
            return
        known = self._find(value)
        root = self._root(name, value)
        self.given.append(root)
        if known is not None:
            self.shared.append((known, root))
            self._known[value.untyped_storage()._cdata] = known
        self.values[name] = _ref(root, 0, value)

    def _root(self, name: str, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        number = len(self.roots)
        like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
        here = len(self.steps)
        self.roots.append(Root(number, name, tensor.data_ptr(), storage.nbytes(), like, here, here))
        self._known[storage._cdata] = number
        self._watched.append(StorageWeakRef(storage))
        return number

    def _slot(self, tensor: Tensor) -> int:
        if tensor.device != self.device:
            raise UnboundError(f"results on {tensor.device} and on {self.device}")
        number = self._root("", tensor)
        self.roots[number].begin = tensor.untyped_storage().data_ptr()
        return number

    def _find(self, tensor: Tensor) -> int | None:
        return self._known.get(tensor.untyped_storage()._cdata)

    def _ref(self, tensor: Tensor) -> Ref | None:
        root = self._find(tensor)
        if root is None:
            return None
        return _ref(root, tensor.data_ptr() - self.roots[root].begin if tensor.numel() else 0, tensor)

    def _is_placed(self, value: Any) -> bool:
        return isinstance(value, Tensor | Stat) and all(self._find(each) is not None for each in _tensors(value))

    def _value(self, name: str, value: Any) -> Recorded:
        if isinstance(value, Tensor):
            return self._ref(value) or Local(name)
        if isinstance(value, Stat):
            partials = self._ref(value.partials)
            assert partials is not None
            return StatRef(partials, value.how, value.width, value.total)
        return Local(name)

    def _used(self, root: int, step: int) -> None:
        self.roots[root].last = max(self.roots[root].last, step)

    def _use(self, value: Recorded, step: int, touched: set[int]) -> None:
        for root in touched:
            self._used(root, step)
        match value:
            case Ref():
                self._used(value.root, step)
            case StatRef():
                self._used(value.partials.root, step)

    def _returned(self, text: str, value: Any) -> None:
        if text in self.values:
            found = self.values[text]
        elif isinstance(value, Tensor):
            ref = self._ref(value)
            if ref is None:
                raise UnboundError(f"{text} is made with the results")
            found = ref
        else:
            found = Constant(value)
        if isinstance(found, Ref):
            self.roots[found.root].returned = True
        elif isinstance(found, StatRef):
            raise UnboundError("a statistic is returned")
        self.results.append(found)


class _Copies(TorchDispatchMode):
    """Operators that are called on the way to a launch, other than views and new memory."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[tuple[Any, Any, Any, Tensor]] = []
        self.why: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in EMPTY:
            return result
        if func._schema.is_mutable or not isinstance(result, Tensor):
            self.why = f"{func} is called on the way"
        elif not func.is_view and _storages([result]).isdisjoint(_storages(_tensors(args))):
            self.made.append((func, args, kwargs or {}, result))
        return result

    def needed(self, invocation: Invocation) -> list[tuple[Any, Any, Any, Tensor]]:
        """Those that the launch reads, and those that they are made of."""
        given = [each.base if isinstance(each, TensorMap) else each for each in invocation.arguments]
        wanted = _storages([each for each in given if isinstance(each, Tensor)])
        found: list[tuple[Any, Any, Any, Tensor]] = []
        for made in reversed(self.made):
            if not _storages([made[3]]).isdisjoint(wanted):
                found.insert(0, made)
                wanted |= _storages(_tensors((made[1], made[2])))
        return found


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in a value."""
    if isinstance(value, Stat):
        return [value.partials]
    return [each for each in pytree.tree_leaves(value) if isinstance(each, Tensor)]


def _storages(tensors: list[Tensor]) -> set[int]:
    return {each.untyped_storage()._cdata for each in tensors}


def _ref(root: int, offset: int, tensor: Tensor) -> Ref:
    return Ref(root, offset, tuple(tensor.size()), tuple(tensor.stride()), tensor.dtype)
