"""Progress: a bar for whatever takes long, on stderr, where somebody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(what: str, total: int, shown: bool | None = None) -> Iterator[Callable[[str], None]]:
    """A progress bar; the function it yields counts one more and says what that was.

    shown: None where stderr is a terminal. In a log the bar stands at the end, once.
    """
    watched = sys.stderr.isatty()
    if not total or not (watched if shown is None else shown):
        yield lambda text: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=watched) as progress:
        task = progress.add_task(what, total=total)
        yield lambda text: progress.update(task, advance=1, description=f"{what} {text}".strip())
