"""Random graphs: a product, and a few operators that move, cut, join, reduce, normalise and multiply what they find."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Shape = tuple[int, ...]
WIDTHS = (4, 8, 16)  # of what a product may be applied to

MEANINGS: dict[str, Callable[..., Tensor]] = {
    "permute": lambda x, order: x.permute(order), "reshape": lambda x, shape: x.reshape(shape), "silu": F.silu, "tanh": torch.tanh,
    "neg": torch.neg, "square": lambda x: x * x * 0.5, "add": torch.add, "sub": torch.sub, "mul": torch.mul,
    "sum": lambda x, at, keep: x.sum(at, keepdim=keep), "mean": lambda x, at, keep: x.mean(at, keepdim=keep),
    "amax": lambda x, at, keep: x.amax(at, keepdim=keep), "narrow": lambda x, at, begin, size: x.narrow(at, begin, size),
    "cat": lambda x, y, at: torch.cat([x, y], at), "flip": lambda x, at: x.flip(at), "unsqueeze": lambda x, at: x.unsqueeze(at),
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:], eps=1e-5), "layer_norm": lambda x: F.layer_norm(x, x.shape[-1:], eps=1e-5),
    "linear": F.linear,
}  # fmt: skip


@dataclass(frozen=True)
class Ref:
    """An argument that is a tensor: an earlier value, a given tensor, or a weight."""

    kind: str
    index: int


@dataclass
class Design:
    """Operators by name, each with its arguments; shapes of all values, and of the tensors that are given."""

    steps: list[tuple[str, tuple[Any, ...]]] = field(default_factory=list)
    shapes: list[Shape] = field(default_factory=lambda: [(2, 3, 16)])
    given: list[Shape] = field(default_factory=list)

    @property
    def results(self) -> list[int]:
        """What nobody goes on with."""
        used = {arg.index for _, args in self.steps for arg in args if isinstance(arg, Ref) and arg.kind == "value"}
        return [at for at in range(len(self.shapes)) if at not in used]


def design(seed: int) -> Design:
    chance, made = random.Random(seed), Design()
    for _ in range(chance.randrange(3, 14)):
        at = chance.choice([len(made.shapes) - 1] * 4 + list(range(len(made.shapes))))
        found = chance.choice(STEPS)(chance, made, made.shapes[at])
        if found is not None and found[2]:
            name, args, shape = found
            made.steps.append((name, (Ref("value", at), *args)))
            made.shapes.append(shape)
    return made


Found = tuple[str, tuple[Any, ...], Shape] | None


def _permute(chance: random.Random, made: Design, shape: Shape) -> Found:
    order = list(range(len(shape)))
    chance.shuffle(order)
    return "permute", (tuple(order),), tuple(shape[at] for at in order)


def _merge(chance: random.Random, made: Design, shape: Shape) -> Found:
    if len(shape) < 2:
        return None
    at = chance.randrange(len(shape) - 1)
    new = (*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :])
    return "reshape", (new,), new


def _split(chance: random.Random, made: Design, shape: Shape) -> Found:
    at = chance.randrange(len(shape))
    sizes = [size for size in (2, 3, 4, 8) if shape[at] % size == 0 and shape[at] > size]
    if not sizes or len(shape) > 4:
        return None
    size = chance.choice(sizes)
    parts = (size, shape[at] // size) if chance.random() < 0.5 else (shape[at] // size, size)
    new = (*shape[:at], *parts, *shape[at + 1 :])
    return "reshape", (new,), new


def _unary(chance: random.Random, made: Design, shape: Shape) -> Found:
    return chance.choice(("silu", "tanh", "neg", "square")), (), shape


def _with_given(chance: random.Random, made: Design, shape: Shape) -> Found:
    other = tuple(size if chance.random() < 0.7 else 1 for size in shape)
    while len(other) > 1 and chance.random() < 0.3:
        other = other[1:]
    made.given.append(other)
    return chance.choice(("add", "mul")), (Ref("given", len(made.given) - 1),), shape


def _with_value(chance: random.Random, made: Design, shape: Shape) -> Found:
    fits = [
        at
        for at, other in enumerate(made.shapes)
        if len(other) == len(shape) and all(x in (1, y) for x, y in zip(other, shape, strict=True))
    ]
    return (chance.choice(("add", "mul", "sub")), (Ref("value", chance.choice(fits)),), shape) if fits else None


def _reduce(chance: random.Random, made: Design, shape: Shape) -> Found:
    at, keep = chance.randrange(len(shape)), chance.random() < 0.7
    new = (*shape[:at], *((1,) if keep else ()), *shape[at + 1 :])
    return chance.choice(("sum", "mean", "amax")), (at, keep), new


def _narrow(chance: random.Random, made: Design, shape: Shape) -> Found:
    at = chance.randrange(len(shape))
    begin = chance.randrange(shape[at])
    size = chance.randrange(1, shape[at] - begin + 1)
    return "narrow", (at, begin, size), (*shape[:at], size, *shape[at + 1 :])


def _cat(chance: random.Random, made: Design, shape: Shape) -> Found:
    at = chance.randrange(len(shape))
    rest = lambda other: (*other[:at], *other[at + 1 :])  # noqa: E731
    fits = [
        number
        for number, other in enumerate(made.shapes)
        if len(other) == len(shape) and rest(other) == rest(shape) and other[at] + shape[at] <= 64
    ]
    if not fits:
        return None
    number = chance.choice(fits)
    new = (*shape[:at], shape[at] + made.shapes[number][at], *shape[at + 1 :])
    return "cat", (Ref("value", number), at), new


def _linear(chance: random.Random, made: Design, shape: Shape) -> Found:
    if shape[-1] not in WIDTHS or len(shape) < 2 or sum(name == "linear" for name, _ in made.steps) > 2:
        return None
    return "linear", (Ref("weight", shape[-1]),), (*shape[:-1], 16)


def _norm(chance: random.Random, made: Design, shape: Shape) -> Found:
    return (chance.choice(("rms_norm", "layer_norm")), (), shape) if shape[-1] > 1 else None


def _flip(chance: random.Random, made: Design, shape: Shape) -> Found:
    return ("flip", (chance.randrange(len(shape)),), shape) if chance.random() < 0.3 else None


def _unsqueeze(chance: random.Random, made: Design, shape: Shape) -> Found:
    at = chance.randrange(len(shape) + 1)
    return ("unsqueeze", (at,), (*shape[:at], 1, *shape[at:])) if len(shape) < 5 else None


STEPS = (
    _permute, _merge, _merge, _split, _unary, _unary, _with_given, _with_given, _with_value, _reduce, _narrow, _cat, _linear, _norm, _flip,
    _unsqueeze,
)  # fmt: skip


class Graph(nn.Module):
    """A design as a module of (x, given)."""

    def __init__(self, made: Design) -> None:
        super().__init__()
        self.made = made
        self.first = nn.Linear(16, 16)
        self.weights = nn.ParameterDict({str(k): nn.Parameter(torch.randn(16, k) / k**0.5) for k in WIDTHS})

    def forward(self, x: Tensor, given: list[Tensor]) -> tuple[Tensor, ...]:
        values = [self.first(x)]
        for name, args in self.made.steps:
            found = []
            for arg in args:
                if isinstance(arg, Ref):
                    known = {"value": values, "given": given}.get(arg.kind)
                    found.append(known[arg.index] if known is not None else self.weights[str(arg.index)])
                else:
                    found.append(arg)
            values.append(MEANINGS[name](*found))
        return tuple(values[at] for at in self.made.results)
