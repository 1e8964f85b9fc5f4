"""How commands talk: to people on a console, to programs in one JSON object, and of errors in one line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any

import typer
from rich.console import Console

from codetta.errors import CodettaError

Json = Annotated[bool, typer.Option("--json", help="End with one JSON object on stdout; the rest goes to stderr.")]


def reported(command: Callable[..., None]) -> Callable[..., None]:
    """Errors that Codetta raises on purpose are messages, not tracebacks."""

    @wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except CodettaError as error:
            Console(stderr=True).print(f"[red]error:[/red] {error}", highlight=False)
            raise typer.Exit(2) from None

    return run


def screen(as_json: bool) -> Console:
    """Where people read. Redirected output is not cut to a terminal's width."""
    file = sys.stderr if as_json else sys.stdout
    return Console(file=file, width=None if file.isatty() else 160)


def finish(as_json: bool, value: Any) -> None:
    if as_json:
        sys.stdout.write(json.dumps(value) + "\n")
        sys.stdout.flush()


def ratio(value: float) -> str:
    """How many times faster, green from 1.00 on."""
    return f"[{'green' if value >= 1 else 'red'}]{value:.2f}[/]"
