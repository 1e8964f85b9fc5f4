"""The commands about whole models: explain and verify. A model is named by a function that builds it."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from codetta.errors import ArgumentError
from codetta.explain import explain, explain_decode
from codetta.terminal import Json, finish, reported, screen
from codetta.verify import verify

Target = Annotated[
    str,
    typer.Argument(
        help="file.py:function or package.module:function, which returns (model, inputs) or (model, inputs, named)."
    ),
]


def add_to(app: typer.Typer) -> None:
    app.command("explain")(explain_command)
    app.command("verify")(verify_command)


@reported
def explain_command(
    target: Target,
    training: Annotated[bool, typer.Option(help="Of a call with gradients, with what it keeps for them.")] = False,
    decode: Annotated[
        bool, typer.Option(help="Of a step of generation, with its cache; the inputs are not used.")
    ] = False,
    batch: Annotated[int, typer.Option(help="Sequences of that step.")] = 1,
    context: Annotated[int, typer.Option(help="Tokens of each that are kept.")] = 4096,
    as_json: Json = False,
) -> None:
    """What becomes of a model: programs with their equations, laws, calls, and what is left over and why."""
    model, inputs, named = load(target)
    if decode and training:
        raise ArgumentError("decode", "has no gradients", "ask for one of --decode and --training")
    if decode and (batch < 1 or context < 1):
        raise ArgumentError("batch or context", "is less than 1", "pass positive numbers")
    report = (
        explain_decode(model, batch=batch, context=context)
        if decode
        else explain(model, *inputs, training=training, **named)
    )
    screen(as_json).print(str(report), highlight=False, markup=False, soft_wrap=True)
    finish(as_json, report.to_json())


@reported
def verify_command(target: Target, as_json: Json = False) -> None:
    """A compiled model's error against float64, beside eager's own, output by output."""
    model, inputs, named = load(target)
    verdicts = verify(model, *inputs, **named)
    table = Table("output", "error", "eager's", "within budget")
    for each in verdicts:
        mark = "[green]yes[/]" if each.within_budget else "[red]no[/]"
        table.add_row(each.output, f"{each.error:.2e}", f"{each.eager_error:.2e}", mark)
    screen(as_json).print(table)
    finish(as_json, {"outputs": [each.to_json() for each in verdicts]})
    if not all(each.within_budget for each in verdicts):
        raise typer.Exit(1)


def load(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Import the function that the target names, and call it."""
    place, _, name = target.rpartition(":")
    if not place or not name.isidentifier():
        raise ArgumentError(
            "target", f"{target!r} names no function", "write file.py:function or package.module:function"
        )
    made = _function(place, name)()
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise ArgumentError(
            "target", f"{name} returns {type(made).__name__}", "return (model, inputs) or (model, inputs, named)"
        )
    inputs = made[1] if isinstance(made[1], tuple | list) else (made[1],)
    return made[0], tuple(inputs), dict(made[2]) if len(made) == 3 else {}


def _function(place: str, name: str) -> Any:
    if place.endswith(".py"):
        path = Path(place)
        if not path.exists():
            raise ArgumentError("target", f"there is no file {place}", "check the path")
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        folder = str(path.resolve().parent)  # as Python does for a script: its neighbours can be imported
        if folder not in sys.path:
            sys.path.insert(0, folder)
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(place)
        except ImportError as error:
            raise ArgumentError("target", f"{place} cannot be imported ({error})", "check the name") from None
    if not callable(getattr(module, name, None)):
        raise ArgumentError("target", f"{place} has no function {name}", "check the name")
    return getattr(module, name)
