"""Dispatch: which backend runs a program. The reference defines what a program means; `cpu` and `triton` make it fast, and fall
back to the reference, out loud, where they cannot.
"""

from __future__ import annotations

import warnings
from functools import cache

import torch
from torch import Tensor

from codetta.backends.base import Backend
from codetta.errors import ArgumentError, LoweringError, Reason
from codetta.options import debug_level
from codetta.program import Program
from codetta.runtime.bind import Binding
from codetta.stat import Stat

BACKENDS = ("reference", "cpu", "triton")


def run(program: Program, binding: Binding, backend: str | None = None) -> dict[str, Tensor | Stat]:
    """Run the program on its tensors: pick the backend, build or find the kernel, launch it."""
    chosen, reasons = choose(program, binding, backend)
    if debug_level() >= 1:
        print(f"codetta: {program.name} ({binding.rows} rows) on {chosen.name}")
    try:
        results = chosen.run(program, binding)
    except LoweringError as error:  # its compiler failed
        if backend is not None:
            raise
        reasons = error.reasons
        results = load_backend("reference").run(program, binding)
    if reasons:
        _say_once(program.key, f"{program.name} runs on the reference backend: " + "; ".join(map(str, reasons)))
    return results


def choose(program: Program, binding: Binding, wanted: str | None = None) -> tuple[Backend, list[Reason]]:
    """The backend for these tensors, and why it is not the fast one, if it is not."""
    if wanted is not None and wanted not in BACKENDS:
        raise ArgumentError("backend", f"{wanted!r} is unknown", f"use one of {', '.join(BACKENDS)}")
    reference = load_backend("reference")
    # Nothing to multiply, or a precision that only the reference has: not worth a word.
    if (
        binding.rows == 0
        or (program.k == 0 and program.multiplies)
        or (wanted is None and program.a_dtype == torch.float64)
    ):
        return reference, []
    fast = load_backend(wanted or _fast(binding.a.device))
    reasons = fast.why_not(program, binding)
    if not reasons:
        return fast, []
    if wanted is not None:
        raise LoweringError(f"backend {wanted!r} cannot run {program.name}", reasons)
    return reference, reasons


def why_never(program: Program, device: torch.device, rows: int) -> list[Reason]:
    """Why no fast backend should run the program on so many rows on the device; builds its kernel where that needs no tensors."""
    if device.type not in ("cpu", "cuda"):
        return [Reason("device", f"{device.type} has no backend")]
    return load_backend(_fast(device)).why_never(program, device, rows)


def build(program: Program, binding: Binding, device: torch.device) -> None:
    """Have the fast backend build what it would launch for such tensors; they may be without memory (meta)."""
    if program.a_dtype != torch.float64 and binding.rows:
        load_backend(_fast(device)).build(program, binding, device)


def _fast(device: torch.device) -> str:
    return "triton" if device.type == "cuda" else "cpu"


@cache
def load_backend(name: str) -> Backend:
    """Backends are imported when first needed: import of codetta needs neither a GPU nor a compiler."""
    if name == "reference":
        from codetta.backends.reference import Reference

        return Reference()
    if name == "cpu":
        from codetta.backends.cpu import Cpu

        return Cpu()
    from codetta.backends.triton import TritonBackend

    return TritonBackend()


_said: set[str] = set()


def _say_once(key: str, message: str) -> None:
    if key not in _said:
        _said.add(key)
        warnings.warn(message, RuntimeWarning, stacklevel=4)
