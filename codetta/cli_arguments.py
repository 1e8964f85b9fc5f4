"""Arguments that several commands take, and what they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import torch
import typer

from codetta.bench.run import DTYPES
from codetta.errors import ArgumentError

Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:N; default: a GPU where there is one.")]
Only = Annotated[list[str] | None, typer.Option(help="Only this program; may be repeated.")]
Contenders = Annotated[list[str] | None, typer.Option(help="Only this contender; may be repeated.")]
Rounds = Annotated[int, typer.Option(min=1, help="Rounds of measurements; more is calmer.")]
Layers = Annotated[int, typer.Option(min=0, help="Give the models so many layers; default: as published.")]
Out = Annotated[Path | None, typer.Option(help="Append the record to this .jsonl file.")]
SizesOption = Annotated[list[str] | None, typer.Option("--sizes", help="D,F of a model; may be repeated.")]
Dtype = Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(DTYPES)}; may be repeated.")]


def pick_device(name: str) -> torch.device:
    if not name:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ArgumentError("device", f"{name!r} is unknown", "use cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise ArgumentError("device", f"{name!r} is not supported", "use cpu, cuda or cuda:N")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ArgumentError(
            "device", f"there is no {name} here", f"{torch.cuda.device_count()} GPUs are visible: use cpu"
        )
    return device


def parse_sizes(given: list[str] | None, multiple: int = 1) -> tuple[tuple[int, int], ...]:
    """Pairs D,F; D has to be a multiple of that."""
    found = []
    for text in given or []:
        parts = text.split(",")
        if len(parts) != 2 or not all(part.strip().isdigit() and int(part) > 0 for part in parts):
            raise ArgumentError(
                "sizes", f"{text!r} is not D,F", "pass two whole numbers, for example --sizes 2048,8192"
            )
        found.append((int(parts[0]), int(parts[1])))
        if found[-1][0] % multiple:
            raise ArgumentError("sizes", f"D of {text} is no multiple of {multiple}", "pass a D that is one")
    return tuple(found)
