"""A case: the text of an epilogue, the shapes of its tensors and a seed, from which everything else follows.

Printed, a case can be pasted and run. `check` holds a backend to the error budget; `check_meaning` holds the reference to the
independent evaluator of `eager.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import eager
import hypothesis
import oracle
import torch
from torch import Tensor

import codetta
from codetta import dispatch
from codetta.backends import reference
from codetta.call import Epilogue
from codetta.errors import LoweringError
from codetta.program import Program
from codetta.runtime.bind import Binding
from codetta.stat import FIELDS, Stat

refusals: Counter[str] = Counter()  # what backends refused in this process, by rule


@dataclass(frozen=True)
class Spec:
    """An operand to be made: what it holds follows from `fill`, the case's seed and its name."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    fill: str = "normal"  # normal, positive, scale, index, slots, bool, mask, seed, number, or stat:how:width:total
    limit: int = 0  # of indices
    strided: bool = False


@dataclass(frozen=True)
class Case:
    source: str = field(repr=False)
    lead: tuple[int, ...]
    k: int
    cols: tuple[int, ...]
    dtype: torch.dtype
    specs: tuple[Spec, ...] = ()
    outs: tuple[Spec, ...] = ()
    batched: bool = False
    transposed: tuple[bool, ...] = ()  # of a, then of each w
    values: str = "plain"  # or mean, outliers
    seed: int = 0

    def __repr__(self) -> str:
        fields = ", ".join(
            f"{k}={v!r}" for k, v in vars(self).items() if k in self.__dataclass_fields__ and k != "source"
        )
        return f"Case('''\n{self.source}''', {fields})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(repr(self))  # Hypothesis prints failing cases with this

    @property
    def rows(self) -> int:
        return math.prod(self.lead)

    @cached_property
    def epilogue(self) -> Epilogue:
        return codetta.epilogue(self._function(codetta))

    @cached_property
    def a(self) -> Tensor:
        a = self._normal("a", (*self.lead, self.k))
        if self.values == "mean":
            a = a + 30.0
        elif self.values == "outliers":
            a = torch.where(self._normal("at", a.shape) > 2.5, a * 300.0, a)
        return self._transposed(a.to(self.dtype), 0)

    @cached_property
    def w(self) -> list[Tensor]:
        batch = self.lead[:1] if self.batched else ()
        weights = [self._normal(f"w{i}", (*batch, n, self.k)) / math.sqrt(self.k) for i, n in enumerate(self.cols)]
        return [self._transposed(w.to(self.dtype), i + 1) for i, w in enumerate(weights)]

    @cached_property
    def operands(self) -> dict[str, Any]:
        return {spec.name: self._make(spec) for spec in self.specs}

    @cached_property
    def out(self) -> dict[str, Tensor]:
        return {spec.name: self._make(spec) for spec in self.outs}

    def bind(self) -> tuple[Program, Binding]:
        out = {name: tensor.clone() if not _gaps(tensor) else tensor for name, tensor in self.out.items()}
        return self.epilogue.bind(self.a, self.w, out=out, **self.operands)

    def run(self, backend: str) -> dict[str, Tensor | Stat]:
        program, binding = self.bind()
        with oracle.fresh(binding) as mine:
            return dispatch.load_backend(backend).run(program, mine)

    def check(self, backend: str, *, bits: bool = False) -> bool:
        """Hold the backend to the error budget; False if it refuses the program, which is reported and counted."""
        program, binding = self.bind()
        chosen = dispatch.load_backend(backend)
        try:
            reasons = chosen.why_not(program, binding)
            if reasons:
                raise LoweringError(backend, reasons)
            oracle.check(program, binding, chosen)
            if bits:
                oracle.check_bits(program, binding, chosen)
        except LoweringError as refusal:
            for rule in {reason.rule for reason in refusal.reasons}:
                refusals[f"{backend}: {rule}"] += 1
                if hypothesis.currently_in_test_context():
                    hypothesis.event(f"{backend} refuses: {rule}")
            return False
        return True

    def truth(self) -> dict[str, Any]:
        """Every output by the independent evaluator, in float64: matrices, or what a reduction comes to."""
        eager.rows_now.count, eager.rows_now.batch = self.rows, self.lead[0] if self.batched else 1
        a = self.a.double()
        if self.batched:
            products = [torch.bmm(a, w.double().transpose(1, 2)).flatten(0, 1) for w in self.w]
        else:
            products = [a.reshape(-1, self.k) @ w.double().T for w in self.w]
        operands = {spec.name: self._seen(spec) for spec in self.specs}
        return dict(self._function(eager)(*map(eager.Matrix, products), **operands))

    def check_meaning(self) -> None:
        """The reference in float64 against the independent evaluator: the same numbers in the same places."""
        program, binding = self.bind()
        results = reference.run(program, binding, precise=True)
        stores = {store.name: store for store in program.stores}
        for name, expected in self.truth().items():
            got = results[name]
            if isinstance(got, Stat):
                finished = got.finish()
                for part, value in zip(_listed(finished), _listed(expected), strict=True):
                    _close(name, part, value)
                continue
            assert isinstance(got, Tensor), name
            stored = expected if isinstance(expected, eager.Stored) else eager.Stored(expected)
            value = stored.value.data
            if stores[name].group == 1:
                value = value.expand(self.rows, -1)
            if stored.accumulate:
                value = value + self.out[name].double().reshape(value.shape)
            _close(name, got, self._placed(stored, value, got.shape, binding.samples, self.out.get(name)))

    def _placed(
        self, stored: eager.Stored, value: Tensor, shape: torch.Size, samples: int, before: Tensor | None
    ) -> Tensor:
        """A matrix of values as the output tensor holds it."""
        if stored.layout == "rows":
            if stored.rows is None:
                return value.reshape(shape)
            assert before is not None
            result = before.double().clone()
            for row, at in enumerate(stored.rows.data.flatten().long().tolist()):
                if at >= 0:
                    result[at] = value[row]
            return result
        by_head = value.reshape(samples, value.shape[0] // samples, -1, stored.head)
        order = f"bthd->{stored.layout}"
        if stored.rows is None:
            return torch.einsum(order, by_head)
        assert before is not None
        result = torch.einsum(f"{stored.layout}->bthd", before.double()).clone()
        index = stored.rows.data.reshape(samples, -1).long().tolist()
        for sample, places in enumerate(index):
            for row, at in enumerate(places):
                if at >= 0:
                    result[sample, at] = by_head[sample, row]
        return torch.einsum(order, result)

    def _function(self, ct: Any) -> Callable[..., Any]:
        scope: dict[str, Any] = {"ct": ct, "torch": torch}
        exec(compile("from __future__ import annotations\n" + self.source, "<case>", "exec"), scope)
        return scope["random_epilogue"]

    def _generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed * 1009 + sum(ord(c) * 31**i for i, c in enumerate(name)) % 10007)

    def _normal(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self._generator(name))

    def _transposed(self, x: Tensor, index: int) -> Tensor:
        """The same values with the last dimension no longer the dense one."""
        if not (self.transposed and self.transposed[index]):
            return x
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)

    def _make(self, spec: Spec) -> Any:
        generator, normal = self._generator(spec.name), self._normal(spec.name, spec.shape)
        match spec.fill.split(":"):
            case ["number"]:
                return round(normal.item(), 3)
            case ["normal"]:
                value = normal
            case ["positive"]:
                value = normal.abs() + 0.1
            case ["scale"]:
                value = 0.5 + torch.rand(spec.shape, generator=generator)
            case ["bool"]:
                value = normal > 0
            case ["mask"]:
                value = torch.where(normal > 0.5, -torch.inf, 0.0)
            case ["index" | "seed"]:
                value = torch.randint(-1 if spec.fill == "index" else 0, spec.limit, spec.shape, generator=generator)
            case ["rows"]:
                value = torch.randint(0, spec.limit, spec.shape, generator=generator)
            case ["slots"]:
                # Each sample's rows go to places of their own, some to none.
                places = [
                    torch.randperm(spec.limit, generator=generator)[: spec.shape[-1]]
                    for _ in range(math.prod(spec.shape[:-1]))
                ]
                value = torch.stack(places).reshape(spec.shape)
                value = torch.where(normal > 1.0, -1, value)
            case ["stat", how, width, total]:
                tiles = math.ceil(int(total) / int(width))
                partials = torch.randn((FIELDS[how], tiles, self.rows), generator=generator)
                if how in ("moments", "lse"):
                    partials[1] = partials[1].abs() + 0.5
                return Stat(partials, how, int(width), int(total))
            case _:
                raise AssertionError(spec.fill)
        value = value.to(spec.dtype)
        if spec.strided:
            room = value.new_zeros((*spec.shape[:-1], spec.shape[-1] + 3))
            room[..., : spec.shape[-1]] = value
            value = room[..., : spec.shape[-1]]
        return value

    def _seen(self, spec: Spec) -> Any:
        """The operand as the evaluator sees it: a matrix over all rows and its own columns."""
        value = self.operands[spec.name]
        if isinstance(value, Stat):
            finished = Stat(value.partials.double(), value.how, value.width, value.total).finish()
            if isinstance(finished, tuple):
                return codetta.dsl.Moments(*(eager.Matrix(each[:, None]) for each in finished))  # type: ignore[arg-type]
            return eager.Matrix(finished[:, None])
        if not isinstance(value, Tensor):
            return value
        number = value if value.dtype == torch.bool else value.double()
        match self.epilogue.kinds[spec.name]:
            case codetta.Scalar() | codetta.Row():
                return eager.Matrix(number.reshape(1, -1))
            case codetta.Col():
                return eager.Matrix(number.reshape(-1, 1))
            case codetta.SampleRow():
                return eager.Matrix(number[torch.arange(self.rows) // (self.rows // number.shape[0])])
            case codetta.Tile(layout="rows"):
                return eager.Matrix(number.reshape(self.rows, -1))
            case codetta.Tile(layout=layout):
                return eager.Matrix(torch.einsum(f"{layout}->bthd", number).reshape(self.rows, -1))
            case codetta.Table(rows="each"):
                return eager.Matrix(number.reshape(self.rows, -1))
            case codetta.Table(rows="repeat"):
                return eager.Matrix(number[torch.arange(self.rows) % number.shape[0]])
            case codetta.Table(rows=name):
                return eager.Matrix(number[self.operands[name].reshape(-1).long()])
            case _:
                return eager.Matrix(number)


def _listed(value: Any) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)


def _close(name: str, got: Tensor, expected: Tensor) -> None:
    expected = expected.double().reshape(got.shape) if got.numel() == expected.numel() else expected.double()
    scale = expected[expected.isfinite()].abs().max().item() if expected.isfinite().any() else 1.0
    torch.testing.assert_close(
        got.double(),
        expected,
        rtol=1e-9,
        atol=1e-11 * scale + 1e-30,
        equal_nan=True,
        msg=lambda text: f"{name}: {text}",
    )


def _gaps(x: Tensor) -> bool:
    return not x.is_contiguous()
