"""Cross-entropy of a linear head: how rows go through it, a few rows or a few columns at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from codetta import dsl
from codetta.call import epilogue
from codetta.dsl import Col, Row, Value
from codetta.ir.op import compute_dtype
from codetta.library import logits_target, lse_target, onehot
from codetta.program import Operand, Program
from codetta.runtime.launch import launch
from codetta.trace import trace

# Bytes of logits that exist at a time, where their rows are made whole: so many, or as many as the sum over chunks has.
CHUNK = 1 << 30
STRIP = 56 << 20  # at least, where they are made by columns
ROWS = COLS = 256  # of which a chunk or a strip has a multiple


@dataclass(frozen=True)
class Head:
    """What a loss is made of: rows, weight and labels, and how they are looked at."""

    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    classes: Tensor | None
    ignore: int
    smoothing: float
    cap: float | None
    z: float

    @property
    def dtype(self) -> torch.dtype:
        return compute_dtype(self.x.dtype)

    def chunks(self, added: int = 0) -> Iterator[tuple[slice, Head]]:
        """Rows, a few at a time: as many as fit, in parts of about the same size. added: bytes to which every chunk adds."""
        count = self.x.shape[0]
        most = max(ROWS, max(CHUNK, added) // (self.weight.shape[0] * self.x.element_size()))
        parts = -(-count // most)
        size = -(-count // (parts or 1) // ROWS) * ROWS
        for begin in range(0, count, size or 1):
            at = slice(begin, begin + size)
            yield at, replace(self, x=self.x[at], target=self.target[at])

    def strips(self, dw: Tensor) -> Iterator[tuple[slice, Head, Tensor]]:
        """Classes, a few at a time, and room for their logits: behind the strip in the weight's gradient, which is yet to be written
        there, as long as that is enough. Labels are counted from the first class of the strip."""
        count, width = self.weight.shape
        rows = len(self.x)
        least = max(COLS, STRIP // (rows * self.x.element_size()) // COLS * COLS)
        spare = self.x.new_empty(0)
        begin = 0
        while begin < count:
            fits = (
                (count - begin) * width // (rows + width) // COLS * COLS
                if dw.numel() and dw.dtype == self.x.dtype
                else 0
            )
            end = min(begin + max(fits, least), count)
            if fits >= least:
                room = dw[end:].view(-1)
            else:
                room = spare = spare if spare.numel() else self.x.new_empty(rows * (end - begin))
            at = slice(begin, end)
            bias = None if self.bias is None else self.bias[at]
            part = replace(self, weight=self.weight[at], bias=bias, target=self.target - begin)
            yield at, part, room[: rows * (end - begin)].view(rows, end - begin)
            begin = end

    def operands(self) -> dict[str, Any]:
        """What the programs read beside x and the weight."""
        given = {"target": self.target, "bias": self.bias, "cap": self.cap, "shares": self.shares()}
        return {name: each for name, each in given.items() if each is not None}

    def valid(self) -> Tensor:
        found = self.target != self.ignore
        torch._assert_async(((self.target >= 0) & (self.target < self.weight.shape[0]) | ~found).all())
        return found

    def shares(self) -> Tensor | None:
        """Of each class in a smoothed label."""
        if not self.smoothing:
            return None
        if self.classes is not None:
            return self.classes.to(self.dtype)
        return torch.ones(self.weight.shape[0], dtype=self.dtype, device=self.x.device)

    def own(self) -> Tensor:
        """The weight of each row's class; 0 where the label is ignored."""
        valid = self.valid()
        return (
            valid.to(self.dtype) if self.classes is None else of_class(self.classes.to(self.dtype), self.target, valid)
        )

    def losses(self, lse: Tensor, picked: Tensor, shared: Tensor | None, own: Tensor) -> Tensor:
        """Of each row, from the statistics of its logits."""
        loss = (1.0 - self.smoothing) * own * (lse - picked)
        if shared is not None:
            shares = self.shares()
            assert shares is not None
            loss = loss + self.smoothing / self.weight.shape[0] * (lse * shares.sum() - shared)
        if self.z:
            loss = loss + self.z * lse * lse
        return torch.where(self.target == self.ignore, 0.0, loss)

    def factors(self, lse: Tensor, own: Tensor, scale: Tensor) -> dict[str, Tensor]:
        """dz = up·p - hit·onehot - even·shares: the numbers of each row; `scale`: what its loss counts for."""
        found = {"hit": (1.0 - self.smoothing) * own * scale}
        shares, found["up"] = self.shares(), found["hit"]
        if shares is not None:
            found["even"] = self.smoothing / self.weight.shape[0] * scale.expand_as(own)
            found["up"] = found["up"] + found["even"] * shares.sum()
            found["shares"] = shares
        if self.z:
            found["up"] = found["up"] + 2.0 * self.z * lse * scale
        return found


def statistics(head: Head) -> tuple[Tensor, Tensor]:
    """The loss of each row, and its lse. Nothing else is stored."""
    losses, lse = (torch.empty(head.x.shape[0], dtype=head.dtype, device=head.x.device) for _ in range(2))
    own = head.own()
    for at, part in head.chunks():  # of the partial statistics only a few rows' exist, too
        lse[at], picked, *shared = lse_target(part.x, part.weight, **part.operands())
        losses[at] = part.losses(lse[at], picked, shared[0] if shared else None, own[at])
    return losses, lse


def by_rows(head: Head, scale: Tensor, wanted: list[bool]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses, and the gradients of x, weight and bias of Σ scale·loss; those that nobody wants are empty.

    Every logit is made once. The weight's gradient is a sum over chunks, in fp32.
    """
    x, weight = head.x, head.weight
    losses, dx, dw, db = _room(head, wanted, head.dtype)
    own = head.own()
    for at, part in head.chunks(dw.nbytes):
        logits, lse, picked, *shared = logits_target(part.x, weight, dtype=x.dtype, **part.operands())
        losses[at] = part.losses(lse, picked, shared[0] if shared else None, own[at])
        values = {"logits": logits, "lse": lse, "target": part.target, **part.factors(lse, own[at], scale[at])}
        stage = _stage(weight.shape[0], x.dtype, head.cap, "even" in values, wanted[2])
        dz, *sums = launch(stage, logits, [], values, out={"dz": logits})
        assert isinstance(dz, Tensor)
        if wanted[0]:
            torch.mm(dz, weight, out=dx[at])
        if wanted[1]:
            _accumulate(dw, dz.t(), part.x, first=at.start == 0)
        if wanted[2]:
            db += sums[0].finish()  # type: ignore[union-attr, arg-type]
        del logits, dz, values  # before the next chunk's are made
    return losses, dx, dw, db


def by_columns(head: Head, lse: Tensor, scale: Tensor, wanted: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients alone, where lse is known: logits are made once more, a strip of classes at a time.

    Of the weight's gradient every strip is whole, and rounded once; the rows' is a sum over strips, in fp32.
    """
    x, weight = head.x, head.weight
    *_, dw, db = _room(head, [False, *wanted[1:]], weight.dtype)
    dx = torch.zeros(x.shape if wanted[0] else 0, dtype=head.dtype, device=x.device)
    values = {"lse": lse, **head.factors(lse, head.own(), scale)}
    shares = values.pop("shares", None)
    for at, part, room in head.strips(dw) if len(x) else ():
        given = part.operands() | values | ({"shares": shares[at]} if shares is not None else {})
        found = _strip(x, part.weight, **given, summed=wanted[2], out={"dz": room})
        dz: Tensor = found[0] if wanted[2] else found
        if wanted[0]:
            _accumulate(dx, dz, part.weight, first=at.start == 0)
        if wanted[1]:
            torch.mm(dz.t(), x, out=dw[at])
        if wanted[2]:
            db[at] = found[1]
    return _narrowed(dx, x.dtype), dw, db


def _narrowed(wide: Tensor, dtype: torch.dtype) -> Tensor:
    """Rounded, in its own place: there may be no other."""
    if wide.dtype == dtype or not wide.numel():
        return wide.to(dtype)
    numbers, found = wide.view(-1), wide.view(-1).view(dtype)
    begin = min(1 << 20, len(numbers))
    found[:begin] = numbers[:begin].to(dtype)
    while begin < len(numbers):  # what is written never reaches what is yet to be read
        end = min(len(numbers), begin * wide.element_size() // dtype.itemsize)
        found[begin:end] = numbers[begin:end]
        begin = end
    return found[: len(numbers)].view(wide.shape)


def _room(head: Head, wanted: list[bool], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For losses and for the gradients of x, weight (in that dtype) and bias; zeros where no row will write."""
    x, weight, device = head.x, head.weight, head.x.device
    losses = torch.empty(x.shape[0], dtype=head.dtype, device=device)
    dw = torch.empty(weight.shape if wanted[1] else 0, dtype=dtype, device=device)
    db = torch.zeros(weight.shape[0] if wanted[2] else 0, dtype=head.dtype, device=device)
    return losses, torch.empty_like(x) if wanted[0] else x.new_empty(0), dw if len(x) else dw.zero_(), db


def _accumulate(total: Tensor, left: Tensor, right: Tensor, first: bool) -> None:
    """total += left · right, in the precision of the total; the first time without what was there."""
    kind: dict[str, Any] = {}
    if left.dtype != total.dtype:
        if left.is_cuda:
            kind = {"out_dtype": total.dtype}
        else:
            left, right = left.to(total.dtype), right.to(total.dtype)  # no product there widens its result
    if first:
        torch.mm(left, right, **kind, out=total)
    else:
        torch.addmm(total, left, right, **kind, out=total)


def _dz(
    logits: Value, lse: Value, target: Value, up: Value, hit: Value, even: Value | None, shares: Value | None, cap: float | None
) -> Value:  # fmt: skip
    """up·p - hit·onehot - even·shares, through the cap."""
    dz = dsl.exp(logits - lse) * up - onehot(target, logits.cols) * hit
    if even is not None and shares is not None:
        dz = dz - even * shares
    return dz if cap is None else dz * (1.0 - (logits * (1.0 / cap)) ** 2)


@epilogue
def _strip(
    acc: Value, lse: Col, target: Col, up: Col, hit: Col, even: Col | None = None, shares: Row | None = None, bias: Row | None = None,
    cap: float | None = None, summed: bool = False,
) -> dict[str, Value]:  # fmt: skip
    """The gradient of logits, with the logits made once more."""
    z = acc if bias is None else acc + bias
    dz = _dz(z if cap is None else dsl.softcap(z, cap), lse, target, up, hit, even, shares, cap)
    return {"dz": dz, "db": dsl.col_sum(dz)} if summed else {"dz": dz}


@lru_cache(maxsize=64)
def _stage(cols: int, dtype: torch.dtype, cap: float | None, smooth: bool, summed: bool) -> Program:
    """The gradient of logits, from the logits."""

    def fn(
        logits: Value,
        lse: Value,
        target: Value,
        up: Value,
        hit: Value,
        even: Value | None = None,
        shares: Value | None = None,
    ) -> dict[str, Value]:
        dz = _dz(logits, lse, target, up, hit, even, shares, cap)
        return {"dz": dz, "db": dsl.col_sum(dz)} if summed else {"dz": dz}

    wide = compute_dtype(dtype)
    kinds = {"lse": wide, "target": torch.int64, "up": wide, "hit": wide} | ({"even": wide} if smooth else {})
    operands: dict[str, Operand | float] = {"logits": Operand("logits", dtype, "each", cols)}
    operands |= {name: Operand(name, kind, "each", 0) for name, kind in kinds.items()}
    if smooth:
        operands["shares"] = Operand("shares", wide, "none", cols)
    return trace(fn, name="loss_gradient", k=0, a_dtype=dtype, products=(), operands=operands)


def of_class(classes: Tensor, target: Tensor, valid: Tensor) -> Tensor:
    """The weight of each row's class; 0 where the label is not valid."""
    return torch.where(valid, classes[target.clamp(0, classes.shape[0] - 1)], 0.0)
