"""Tuning results: which tile was measured to be the best for a program, on disk and per device.

A result belongs to one device (its name, architecture, size and driver), one program (every field of it), one bucket of
rows, one alignment, and one state of the code: PyTorch, Triton and the source of everything that writes kernels. Another
key, no result. This file remembers; `bench/tune.py` measures.
"""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from codetta.plan.tile import Tile
from codetta.program import Program
from codetta.runtime.cache import Cache, Key, key_of


@dataclass(frozen=True)
class TuneKey:
    program: Program
    device: torch.device
    bucket: int
    aligned: bool


@dataclass(frozen=True)
class Tuned:
    """The best tile, its time and that of the default in the same run."""

    tile: Tile
    ms: float
    default_ms: float
    tried: int


def find(key: TuneKey) -> Tuned | None:
    """What was measured, None if nothing was; asks the disk once in a process."""
    if key not in _found:
        _found[key] = _read(Cache("tune").get_json(_disk_key(key)))
    return _found[key]


def remember(key: TuneKey, tuned: Tuned) -> None:
    """Keep a complete result. It is one file, renamed into place: whoever is interrupted leaves the old one."""
    Cache("tune").put_json(_disk_key(key), dataclasses.asdict(tuned))
    _found[key] = tuned
    _changes.append(None)


def forget() -> None:
    """Drop what this process has read, so that the disk is asked again."""
    _found.clear()
    _changes.append(None)


def generation() -> int:
    """Another number after every change to what is remembered."""
    return len(_changes)


_changes: list[None] = []
_found: dict[TuneKey, Tuned | None] = {}


def _disk_key(key: TuneKey) -> Key:
    return key_of(
        program=key.program.key,
        bucket=key.bucket,
        aligned=key.aligned,
        device=_device(key.device),
        versions=_versions(),
        source=source_hash(),
    )


@cache
def _device(device: torch.device) -> dict[str, Any]:
    if device.type != "cuda":
        return {"name": device.type}
    facts = torch.cuda.get_device_properties(device)
    return {
        "name": facts.name,
        "arch": getattr(facts, "gcnArchName", "") if torch.version.hip else f"{facts.major}.{facts.minor}",
        "units": facts.multi_processor_count,
        "memory": facts.total_memory,
        "driver": str(getattr(torch._C, "_cuda_getDriverVersion", lambda: "unknown")()),
        "runtime": torch.version.hip or torch.version.cuda or "",
    }


@cache
def _versions() -> dict[str, str]:
    import triton

    return {"torch": torch.__version__, "triton": triton.__version__}


@cache
def source_hash() -> str:
    """Of every file that decides what a kernel looks like."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for folder in ("backends", "plan", "ir", "rewrite"):
        for path in sorted((package / folder).glob("*.py")):
            digest.update(f"{path.relative_to(package)}\n".encode() + path.read_bytes())
    digest.update((package / "program.py").read_bytes())
    return digest.hexdigest()


def _read(stored: Any) -> Tuned | None:
    """A stored result, if it has the form that this version writes."""
    try:
        tile = Tile(**stored["tile"])
        if any(type(getattr(tile, each.name)) is not type(each.default) for each in dataclasses.fields(Tile)):
            return None
        return Tuned(tile, float(stored["ms"]), float(stored["default_ms"]), int(stored["tried"]))
    except (TypeError, KeyError, ValueError):
        return None
