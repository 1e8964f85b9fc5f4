"""The command line: env, show, demo, cache; cli_bench.py, cli_models.py and cli_generate.py have the others.

With --json the last line of stdout is one JSON object, and whatever is meant for people goes to stderr. This file
formats; what it prints is computed elsewhere.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from importlib import metadata
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from rich.syntax import Syntax
from rich.table import Table

import codetta
from codetta import cli_bench, cli_generate, cli_models, dispatch
from codetta.bench import demo as demo_module
from codetta.bench.run import DTYPES, device_name, versions
from codetta.bench.samples import Sizes, library_names, sample
from codetta.cli_arguments import Device, parse_sizes, pick_device
from codetta.errors import ArgumentError
from codetta.plan.target import TARGETS, device_target
from codetta.progress import bar
from codetta.runtime.cache import Cache, default_directory
from codetta.terminal import Json, finish, ratio, reported, screen

app = typer.Typer(help="GEMM-epilogue programs: one matrix product and everything that follows it, in one kernel.", no_args_is_help=True, pretty_exceptions_enable=False)  # fmt: skip
cli_bench.add_to(app)
cli_models.add_to(app)
cli_generate.add_to(app)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"codetta {codetta.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="The version.")] = False,
) -> None:
    """GEMM-epilogue programs: one matrix product and everything that follows it, in one kernel."""


# ---- env ---------------------------------------------------------------------------------------------------------


@app.command()
@reported
def env(as_json: Json = False) -> None:
    """Versions, devices, compilers, backends and caches: what is here, and why what is missing is missing."""
    facts = environment()
    console = screen(as_json)
    for title, section in facts.items():
        table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2))
        for key, value in section.items():
            table.add_row(key, value if isinstance(value, str) else json.dumps(value))
        console.print(table)
    finish(as_json, facts)


def environment() -> dict[str, dict[str, Any]]:
    found: dict[str, Any] = versions()
    for name in ("islpy", "numpy", "rich", "typer"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    devices: dict[str, Any] = {"cpu": device_name(torch.device("cpu"))}
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        target = device_target(device)
        devices[f"cuda:{index}"] = f"{device_name(device)}, {target.name if target else 'not in the table of targets'}"
    compilers = {name: shutil.which(name) or "not found" for name in ("c++", "g++", "clang++")}
    return {
        "versions": found,
        "devices": devices,
        "compilers": compilers,
        "backends": {name: backend_state(name) for name in dispatch.BACKENDS},
        "caches": caches(),
    }


def backend_state(name: str) -> str:
    """ "available", or why not: asked of the backend itself, with the smallest of programs."""
    from codetta import library

    device = torch.device("cuda" if name == "triton" and torch.cuda.is_available() else "cpu")
    program, binding = library.bias_activation.bind(torch.zeros(2, 16, device=device), torch.zeros(16, 16, device=device), activation="relu")  # fmt: skip
    try:
        reasons = dispatch.load_backend(name).why_not(program, binding)
    except ImportError as error:
        return f"not available: {error}"
    return "not available: " + "; ".join(map(str, reasons)) if reasons else "available"


def caches() -> dict[str, Any]:
    """Kinds of entries in the cache directory with their number and bytes, and Triton's own directory."""
    folder = default_directory()
    kinds = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    found: dict[str, Any] = {"directory": str(folder)}
    for kind in kinds:
        entries, size = Cache(kind).size()
        found[kind] = {"entries": entries, "bytes": size}
    try:
        from triton import knobs

        found["triton compiles into"] = str(knobs.cache.dir)
    except (ImportError, AttributeError):
        pass
    return found


@app.command()
@reported
def cache(clear: Annotated[bool, typer.Option(help="Forget everything.")] = False, as_json: Json = False) -> None:
    """The disk cache: kernels' sources, CPU libraries and tuning results."""
    facts = caches()
    console = screen(as_json)
    if clear:
        for kind in facts:
            if isinstance(facts[kind], dict):
                Cache(kind).clear()
    for key, value in facts.items():
        if isinstance(value, dict):
            console.print(
                f"{key:12} {value['entries']:6} entries {value['bytes'] / 2**20:9.2f} MiB{'  cleared' if clear else ''}"
            )
        else:
            console.print(f"{key}: {value}", soft_wrap=True)
    finish(as_json, {**facts, "cleared": clear})


# ---- show and demo -----------------------------------------------------------------------------------------------


@app.command()
@reported
def show(
    name: Annotated[str, typer.Argument(help="An epilogue of the library; `codetta show list` names them.")],
    backend: Annotated[str, typer.Option(help="triton, cpu or reference.")] = "triton",
    target: Annotated[str, typer.Option(help=f"For triton: one of {', '.join(TARGETS)}.")] = "sm_90",
    rows: Annotated[int, typer.Option(help="Rows M.")] = 4096,
    sizes: Annotated[str, typer.Option(help="D,F of the model.")] = "2048,8192",
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")] = "bf16",
    as_json: Json = False,
) -> None:
    """An epilogue as equations, its tile on a target, and the generated source; needs no GPU."""
    console = screen(as_json)
    if name == "list":
        for each in library_names():
            console.print(f"{each:32}{demo_module.equation(each)}", soft_wrap=True, highlight=False, markup=False)
        finish(as_json, {"names": library_names()})
        return
    if dtype not in DTYPES:
        raise ArgumentError("dtype", f"{dtype!r} is unknown", f"use one of {', '.join(DTYPES)}")
    if backend not in dispatch.BACKENDS:
        raise ArgumentError("backend", f"{backend!r} is unknown", f"use one of {', '.join(dispatch.BACKENDS)}")
    if target not in TARGETS:
        raise ArgumentError("target", f"{target!r} is unknown", f"use one of {', '.join(TARGETS)}")
    d, f = parse_sizes([sizes])[0]
    samples = next(count for count in (4, 2, 1) if rows % count == 0)
    head = next(size for size in (128, 64, 32, 16, 1) if d % size == 0)
    shape = Sizes(rows, d, f, head=head, samples=samples)
    # The CPU backend looks at real memory; the others are content with shapes.
    where = torch.device("cpu" if backend == "cpu" else "meta")
    program, binding = sample(name, shape, where, DTYPES[dtype]).bind()
    facts: dict[str, Any] = {"name": name, "backend": backend, "program": program.text}
    console.print(f"{name}: {demo_module.equation(name)}", highlight=False, markup=False)
    console.print(Syntax(program.text, "text", word_wrap=True, background_color="default"))
    if backend == "triton":
        from codetta.backends.triton import TritonBackend, source

        tiles, refused = TritonBackend().candidates(program, binding, TARGETS[target])
        if not tiles:
            raise ArgumentError(name, "has no legal tile: " + "; ".join(map(str, refused)), "try other sizes")
        facts |= {"target": target, "tile": dataclasses.asdict(tiles[0]), "legal": len(tiles), "refused": [str(reason) for reason in refused]}  # fmt: skip
        facts["source"] = source(program, tiles[0])
        console.print(f"{target}: {tiles[0]}; {len(tiles)} legal tiles, {len(refused)} reasons against others", highlight=False)  # fmt: skip
        for reason in refused[:8]:
            console.print(f"  {reason}", highlight=False, soft_wrap=True)
    elif backend == "cpu":
        facts["source"] = load(backend).source(program, binding)
    if "source" in facts:
        language = "cpp" if backend == "cpu" else "python"
        console.print(Syntax(facts["source"], language, word_wrap=True, background_color="default"))
    finish(as_json, facts)


def load(name: str) -> Any:
    try:
        return dispatch.load_backend(name)
    except ImportError as error:
        raise ArgumentError("backend", f"{name} is not available: {error}", "use another") from None


@app.command()
@reported
def demo(device: Device = "", as_json: Json = False) -> None:
    """A Transformer block's epilogues on the hardware that is here: checked against float64, counted and timed."""
    where = pick_device(device)
    console = screen(as_json)
    rows, d, f, dtype = demo_module.sizes(where)
    console.print(f"{rows} rows, D = {d}, F = {f}, {dtype}, on {device_name(where)}", highlight=False)
    shown = []
    with bar("demo", len(demo_module.NAMES)) as advance:
        for each in demo_module.demo(where):
            shown.append(each)
            advance(each.name)
    table = Table(show_lines=False)
    for name in ("program", "fused into the product", "MB before", "after", "saved", "eager ms", "ours ms", "x", "eager's error", "ours", "backend"):  # fmt: skip
        left = name in ("program", "fused into the product", "backend")
        table.add_column(name, justify="left" if left else "right", overflow="fold")
    for each in shown:
        saved = 1 - each.bytes_after / each.bytes_before
        mark = "" if each.within_budget else "red"
        table.add_row(
            each.name, escape(each.equation), f"{each.bytes_before / 1e6:.1f}", f"{each.bytes_after / 1e6:.1f}", f"{saved:.0%}", f"{each.eager_ms:.2f}",
            f"{each.ms:.2f}", ratio(each.eager_ms / each.ms), f"{each.eager_error:.1e}", f"[{mark}]{each.error:.1e}[/]" if mark else f"{each.error:.1e}",
            each.backend,
        )  # fmt: skip
    console.print(table)
    console.print(
        "Errors are against float64. Before: the product as a kernel of its own, then one good pointwise kernel."
    )
    for why in sorted({each.why for each in shown if each.why}):
        console.print(f"On the reference backend: {why}", soft_wrap=True)
    example = sample("norm_swiglu").bind()
    from codetta.backends.triton import TritonBackend, source

    tiles, _ = TritonBackend().candidates(*example, TARGETS["sm_80"])
    text = source(example[0], tiles[0])
    start = text.index("@triton.jit")
    console.print("\nWhat the compiler writes for norm_swiglu on a GPU begins like this:")
    console.print(Syntax("\n".join(text[start:].splitlines()[:14]), "python", background_color="default"))
    console.print(
        "`codetta show norm_swiglu` prints all of it; docs/language.md explains the language, examples/ has more."
    )
    finish(as_json, {"device": device_name(where), "rows": [dataclasses.asdict(each) for each in shown]})  # fmt: skip
    if not all(each.within_budget for each in shown):
        raise typer.Exit(1)
