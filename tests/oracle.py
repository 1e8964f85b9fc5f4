"""The judge: a backend's result against float64, with eager's own error as the budget.

    err(ours, fp64) <= 2 * err(eager, fp64) + eps

for stores and finished sinks alike. "Eager" is the reference in its own precision, and a function that the caller gives.
One run can be right by luck, and twice nothing is no budget; so the reference runs a few times with inputs that
differ by less than fp32 can tell (`_variants`), and the worst of them counts. An ill-conditioned epilogue gets the slack
that it really needs and no more.

Outputs are poisoned before a run, and so is the memory around them and between their elements: an element that is not
written is seen, and so is one written too many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from codetta.backends import reference
from codetta.backends.base import Backend
from codetta.ir.graph import Node, Space, node, rebuilt, transform
from codetta.ir.op import QUANTISED, round_to
from codetta.program import Piece, Program, Store
from codetta.runtime.bind import Binding
from codetta.stat import Stat

Results = dict[str, Tensor | Stat]

# What is added to twice eager's error, relative to the size of the truth.
EPS = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 1e-4, torch.bfloat16: 5e-4}
# How near to a tie a value that is rounded in the middle of an epilogue may fall to either side.
NUDGE = 2.0**-16
MARGIN = 64  # guard elements on either side of an output: keeps its alignment, whatever its dtype


@dataclass(frozen=True)
class Verdict:
    """The error of one output, relative to the norm of the truth, and what is wrong with it."""

    name: str
    ours: float
    eager: float
    budget: float
    complaint: str = ""

    def __str__(self) -> str:
        return f"{self.name}: error {self.ours:.3g}, eager {self.eager:.3g}, budget {self.budget:.3g} {self.complaint}"


def check(
    program: Program,
    binding: Binding,
    backend: Backend,
    *,
    eager: Callable[[], Results] | None = None,
    separate: bool = False,
) -> list[Verdict]:
    """Run the backend on fresh, poisoned outputs and hold each output to its budget.

    `separate`: eager's product leaves its kernel rounded to the type of A, as PyTorch's does. Most backends keep it in fp32
    and are held to that, which is stricter.
    """
    with fresh(binding) as mine:
        results = backend.run(program, mine)
        assert set(results) == set(program.outputs), f"{backend.name} returned {list(results)}, not {program.outputs}"
        for name, output in mine.outputs.items():
            got = results[name]
            assert isinstance(got, Tensor), f"{backend.name} returned {type(got).__name__} for the store {name}"
            assert got.data_ptr() == output.data_ptr(), f"{backend.name} did not write {name} where it was told to"
            assert got.dtype == output.dtype, f"{backend.name} returned {name} as {got.dtype}"
        verdicts = judge(program, binding, results, eager=eager, separate=separate)
    bad = [str(verdict) for verdict in verdicts if verdict.complaint]
    assert not bad, f"{backend.name} on {program.name}, {binding.rows} rows:\n" + "\n".join(bad) + f"\n{program}"
    return verdicts


def check_bits(program: Program, binding: Binding, backend: Backend, times: int = 2) -> None:
    """The same call gives the same bits, unfinished partials included."""
    seen: list[dict[str, Tensor]] = []
    for _ in range(times):
        with fresh(binding) as mine:
            seen.append({name: _bits(value) for name, value in backend.run(program, mine).items()})
    for other in seen[1:]:
        for name, bits in seen[0].items():
            assert torch.equal(bits, other[name]), f"{backend.name} gives {name} of {program.name} other bits each time"


def judge(
    program: Program,
    binding: Binding,
    results: Results,
    *,
    eager: Callable[[], Results] | None = None,
    separate: bool = False,
) -> list[Verdict]:
    """A verdict for each output. `binding` holds the inputs as they were before the run."""
    bare = _without_rounding(program)
    truth = _run_reference(bare, binding, precise=True)
    eagers = [_run_reference(*variant) for variant in _variants(program, binding)]
    if eager is not None:
        eagers.append(eager())
    if separate:
        eagers.append(_run_reference(program, binding, separate=True))
    verdicts = []
    for store in program.stores:
        exact, ours = _plain(truth[store.name]), _plain(results[store.name])
        written = torch.ones_like(ours, dtype=torch.bool)
        if store.row_index:
            # Rows that no index names keep what was there; a run over other poison tells which these are.
            other = _run_reference(bare, binding, precise=True, poison=0.0)
            written = exact == _plain(other[store.name])
            written |= exact.isnan() & _plain(other[store.name]).isnan()
        if store.dtype in QUANTISED or not store.dtype.is_floating_point:
            unrounded = [_plain(_run_reference(*each)[store.name]) for each in _variants(bare, binding)]
            if separate:
                unrounded.append(_plain(_run_reference(bare, binding, separate=True)[store.name]))
            verdict = _judge_steps(store, ours, exact, unrounded, written)
        else:
            near = [_plain(each[store.name])[written] for each in eagers]
            verdict = _judge_norm(store.name, ours[written], exact[written], near, EPS[store.dtype])
        untouched = ours[~written]
        if not (untouched.isnan() | (untouched == _sentinel(store.dtype))).all():
            verdict = replace(verdict, complaint="writes rows that no index names")
        verdicts.append(verdict)
    eps = EPS[torch.float64 if program.a_dtype == torch.float64 else torch.float32]
    for sink in program.sinks:
        parts, exacts = _finished(results[sink.name]), _finished(truth[sink.name])
        near_parts = [_finished(each[sink.name]) for each in eagers]
        for index, (part, exact) in enumerate(zip(parts, exacts, strict=True)):
            name = sink.name if len(parts) == 1 else f"{sink.name}.{('mean', 'var')[index]}"
            verdicts.append(_judge_norm(name, part, exact, [each[index] for each in near_parts], eps))
    return verdicts


@contextmanager
def fresh(binding: Binding) -> Iterator[Binding]:
    """The binding with outputs of its own: poisoned unless they are also read, guarded on all sides."""
    outputs, operands, buffers = {}, dict(binding.operands), []
    for name, old in binding.outputs.items():
        shift = old.storage_offset() % MARGIN
        size = 1 + sum((n - 1) * step for n, step in zip(old.shape, old.stride(), strict=True)) if old.numel() else 0
        buffer = _poison((int(shift + size + 2 * MARGIN),), old.dtype, old.device)
        new = outputs[name] = buffer.as_strided(old.shape, old.stride(), shift + MARGIN)
        buffers.append((name, buffer, shift))
        for key, operand in binding.operands.items():
            if isinstance(operand, Tensor) and old.numel() and operand.data_ptr() == old.data_ptr():
                new.copy_(old)
                operands[key] = new.view(operand.shape)
    yield replace(binding, outputs=outputs, operands=operands)
    for name, buffer, shift in buffers:
        mine = torch.zeros(buffer.shape, dtype=torch.bool, device=buffer.device)
        mine.as_strided(outputs[name].shape, outputs[name].stride(), shift + MARGIN).fill_(True)
        poison = _poison((1,), buffer.dtype, buffer.device).view(torch.uint8)
        around = buffer.view(torch.uint8).view(-1, poison.numel())[~mine]
        assert (around == poison).all(), f"memory next to out[{name!r}] was written"


def _poison(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if dtype.is_floating_point:
        return torch.full(shape, torch.nan, device=device).to(dtype)
    return torch.full(shape, int(_sentinel(dtype)), dtype=dtype, device=device)


def _sentinel(dtype: torch.dtype) -> float:
    """A number that no store of an integer type produces: saturation stops at -127."""
    return 0.0 if dtype == torch.bool else torch.nan if dtype.is_floating_point else float(torch.iinfo(dtype).min)


def _variants(program: Program, binding: Binding) -> list[tuple[Program, Binding]]:
    """The same call, summed in another order, with inputs moved by what fp32 can hardly tell, and with ties moved.

    A value that is rounded in the middle of an epilogue falls to either side of a tie, and what follows sees the whole
    step: so there is a variant with all such values a little larger, and one with them a little smaller.
    """
    generator = torch.Generator(device=binding.a.device).manual_seed(0)
    wide = torch.float64 if binding.a.dtype == torch.float64 else torch.float32
    a = binding.a.to(wide)
    sign = torch.randint(0, 2, a.shape, generator=generator, device=a.device).to(wide) * 2 - 1
    moved = a * (1 + sign * torch.finfo(wide).eps)
    variants = [
        (program, binding),
        (program, replace(binding, a=a.flip(-1), b=tuple(b.flip(-1) for b in binding.b))),
        (program, replace(binding, a=moved)),
    ]
    nudged = [_nudged(program, 1 + NUDGE), _nudged(program, 1 - NUDGE)]
    return variants + [(each, binding) for each in nudged if each != program]


def _nudged(program: Program, factor: float) -> Program:
    """cast(x) -> cast(x * factor), everywhere."""
    by = node("const", space=Space(), value=factor)

    def nudge(each: Node) -> Node | None:
        return rebuilt(each, (node("mul", each.args[0], by),)) if each.op == "cast" else None

    def moved(value: Node) -> Node:
        return transform([value], nudge)[id(value)]

    stores = [
        replace(store, pieces=tuple(replace(piece, value=moved(piece.value)) for piece in store.pieces))
        for store in program.stores
    ]
    sinks = [replace(sink, values=tuple(moved(value) for value in sink.values)) for sink in program.sinks]
    return replace(program, stores=tuple(stores), sinks=tuple(sinks))


def _run_reference(
    program: Program,
    binding: Binding,
    precise: bool = False,
    poison: float = torch.nan,
    separate: bool = False,
) -> dict[str, Tensor | Stat]:
    outputs = {}
    for store in program.stores:
        old = binding.outputs[store.name]
        new = torch.zeros(old.shape, dtype=store.dtype, device=old.device)
        outputs[store.name] = new.fill_(poison if store.dtype.is_floating_point else _sentinel(store.dtype))
    return reference.run(program, replace(binding, outputs=outputs), precise=precise, separate=separate)


def _without_rounding(program: Program) -> Program:
    """The program with its stores as they are before they are rounded."""
    wide = torch.float64 if program.a_dtype == torch.float64 else torch.float32

    def bare(store: Store) -> Store:
        pieces = [
            Piece(p.value.args[0], p.frame) if p.value.op == "cast" and p.value.attr("dtype") == store.dtype else p
            for p in store.pieces
        ]
        return replace(store, pieces=tuple(pieces), dtype=wide)

    return replace(program, stores=tuple(bare(store) for store in program.stores))


def _judge_norm(name: str, ours: Tensor, exact: Tensor, eagers: list[Tensor], eps: float) -> Verdict:
    if ours.shape != exact.shape:
        return Verdict(name, 0.0, 0.0, 0.0, f"has shape {tuple(ours.shape)}, not {tuple(exact.shape)}")
    finite = exact.isfinite()
    agreed = torch.ones_like(finite)
    for each in eagers:
        finite &= each.isfinite()
        # Next to the largest number of the type, rounding decides whether there is an infinity: nobody is wrong there.
        agreed &= _same_kind(each, eagers[0])
    scale = exact[finite].norm().item() or 1.0
    error = (ours - exact)[finite].norm().item() / scale
    eager = max(((each - exact)[finite].norm().item() / scale for each in eagers), default=0.0)
    budget = 2 * eager + eps
    complaint = ""
    if not _same_kind(ours, eagers[0])[agreed].all():
        at = (~_same_kind(ours, eagers[0]) & agreed).nonzero()[0].tolist()
        complaint = f"is {ours[tuple(at)].item()} at {at}, where eager has {eagers[0][tuple(at)].item()}"
    elif not error <= budget:
        complaint = "exceeds the budget"
    elif finite.any():
        worst = (ours - exact)[finite].abs().max().item()
        allowed = 4 * max((each - exact)[finite].abs().max().item() for each in eagers)
        allowed += 4 * eps * exact[finite].abs().max().item() + 1e-30
        if not worst <= allowed:
            complaint = f"one element is {worst:.3g} off, {allowed:.3g} allowed"
    return Verdict(name, error, eager, budget, complaint)


def _same_kind(x: Tensor, y: Tensor) -> Tensor:
    """Whether both are finite, both NaN, or the same infinity."""
    return torch.where(x.isfinite() | y.isfinite(), x.isfinite() & y.isfinite(), (x == y) | (x.isnan() & y.isnan()))


def _judge_steps(store: Store, ours: Tensor, exact: Tensor, eagers: list[Tensor], written: Tensor) -> Verdict:
    """Rounding is monotone: a value that may be off by `slack` lands between the roundings of its two bounds."""
    exact, ours = exact[written], ours[written]
    finite = exact.isfinite()
    limit = QUANTISED.get(store.dtype, torch.inf)
    size = exact[finite].abs().clamp(max=limit).max().item() if finite.any() else 0.0
    errors = [(each[written] - exact)[finite].abs() for each in eagers]
    eager = max((error.max().item() for error in errors if error.numel()), default=0.0)
    slack = 2 * eager + EPS[torch.float32] * size
    low, high = round_to(exact - slack, store.dtype), round_to(exact + slack, store.dtype)
    right = ((low <= ours) & (ours <= high)) | (low.isnan() & ours.isnan())
    complaint = ""
    if not right.all():
        at = (~right).nonzero()[0].tolist()
        complaint = f"is {ours[tuple(at)].item()} at {at}, but the value to round is {exact[tuple(at)].item()}"
    return Verdict(store.name, 0.0, eager, slack, complaint)


def _finished(value: Tensor | Stat) -> tuple[Tensor, ...]:
    """A sink, finished in float64: what is judged is the partials, not how they are put together."""
    assert isinstance(value, Stat), f"a sink came back as {type(value).__name__}"
    finished = replace(value, partials=value.partials.double()).finish()
    return finished if isinstance(finished, tuple) else (finished,)


def _plain(value: Tensor | Stat) -> Tensor:
    assert isinstance(value, Tensor), f"a store came back as {type(value).__name__}"
    return value.double()


def _bits(value: Tensor | Stat) -> Tensor:
    tensor = value.partials if isinstance(value, Stat) else value
    return tensor.contiguous().reshape(-1).view(torch.uint8).clone()
