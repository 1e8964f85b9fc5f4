"""The command line: env, bench, tune, show, demo, cache; explain and verify are in cli_models.py, generate is in cli_generate.py.

With --json the last line of stdout is one JSON object, and whatever is meant for people goes to stderr. This file
formats; what it prints is computed elsewhere.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from itertools import chain, product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.syntax import Syntax
from rich.table import Table

import codetta
from codetta import cli_generate, dispatch
from codetta import cli_models as models
from codetta.bench import demo as demo_module
from codetta.bench.kernels import NAMES
from codetta.bench.run import (
    DTYPES,
    KernelBench,
    Record,
    Row,
    ceilings,
    device_name,
    geometric_means,
    run_kernels,
    versions,
)
from codetta.bench.samples import Sizes, library_names, sample
from codetta.errors import ArgumentError
from codetta.plan.target import TARGETS, device_target
from codetta.progress import bar
from codetta.runtime.cache import Cache, default_directory
from codetta.terminal import Json, finish, reported, screen

app = typer.Typer(help="GEMM-epilogue programs: one matrix product and everything that follows it, in one kernel.", no_args_is_help=True, pretty_exceptions_enable=False)  # fmt: skip
bench_app = typer.Typer(help="Measure, with the baselines in the same run.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")
models.add_to(app)
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


Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:N; default: a GPU where there is one.")]
Only = Annotated[list[str] | None, typer.Option(help="Only this program; may be repeated.")]
Contenders = Annotated[list[str] | None, typer.Option(help="Only this contender; may be repeated.")]
Rounds = Annotated[int, typer.Option(help="Rounds of measurements; more is calmer.")]
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


def parse_sizes(given: list[str] | None) -> tuple[tuple[int, int], ...]:
    found = []
    for text in given or []:
        parts = text.split(",")
        if len(parts) != 2 or not all(part.strip().isdigit() for part in parts):
            raise ArgumentError(
                "sizes", f"{text!r} is not D,F", "pass two whole numbers, for example --sizes 2048,8192"
            )
        found.append((int(parts[0]), int(parts[1])))
    return tuple(found)


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


# ---- bench and tune ----------------------------------------------------------------------------------------------


@bench_app.command()
@reported
def kernels(
    rows: Annotated[int, typer.Option(help="Rows M; default 16384 on a GPU, 512 on a CPU.")] = 0,
    sizes: SizesOption = None,
    dtype: Dtype = None,
    only: Only = None,
    device: Device = "",
    rounds: Rounds = 3,
    skip_compile: Annotated[bool, typer.Option(help="Leave torch.compile out.")] = False,
    max_autotune: Annotated[bool, typer.Option(help="Let torch.compile tune its own products.")] = False,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """The library's epilogues against the bare product, eager PyTorch and torch.compile, in one run."""
    bench = KernelBench(
        pick_device(device), rows, parse_sizes(sizes), tuple(dtype or ()), tuple(only or NAMES), rounds,
        compiled=not skip_compile, max_autotune=max_autotune,
    )  # fmt: skip
    console = screen(as_json)
    jobs = bench.jobs()
    with bar("ceilings", len(jobs)) as advance:
        record = run_kernels(bench, "codetta " + " ".join(sys.argv[1:]), lambda row: advance(row["program"]))
    console.print(kernel_table(record))
    console.print(summary(record), highlight=False)
    for why in sorted({row["why"] for row in record.rows if row.get("why")}):
        console.print(f"on the reference backend: {why}", soft_wrap=True)
    if out is not None:
        record.append_to(out)
    finish(as_json, record.json())


@bench_app.command()
@reported
def block(
    tokens: Annotated[int, typer.Option(help="Tokens; default 16384 on a GPU, 512 on a CPU.")] = 0,
    sizes: SizesOption = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A whole model's prefill, llama-3.2-1b or all; may be repeated. Blocks too if --sizes is given."
        ),
    ] = None,
    layers: Annotated[int, typer.Option(help="Give the models so many layers; default: as published.")] = 0,
    only: Contenders = None,
    device: Device = "",
    rounds: Rounds = 3,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """A Transformer block without its attention, compiled: against eager, torch.compile and the bare products."""
    from codetta.bench.block import IMPLEMENTATIONS, BlockBench, measure_blocks, new_record
    from codetta.bench.prefill import SHAPES, measure_prefill

    wanted = tuple(only or IMPLEMENTATIONS)
    bench = BlockBench(pick_device(device), tokens, parse_sizes(sizes), wanted, rounds, bool(sizes) or not model)
    console = screen(as_json)
    models = [name for name in SHAPES if name != "tiny"] if model == ["all"] else model or []
    with bar("ceilings", len(bench.jobs()) + len(models)) as advance:
        record = new_record(bench, "codetta " + " ".join(sys.argv[1:]))
        whole = (measure_prefill(name, bench.device, bench.implementations, layers) for name in models)
        for rows in chain(measure_blocks(bench), whole):
            record.rows += rows
            advance(rows[0].get("model") or f"D {rows[0]['D']}")
            if out is not None:
                record.part(rows).append_to(out)
    console.print(block_table(record))
    finish(as_json, record.json())


@bench_app.command()
@reported
def train(
    model: Annotated[
        list[str] | None, typer.Option(help="A published shape, such as llama-3.2-1b; may be repeated.")
    ] = None,
    layers: Annotated[int, typer.Option(help="Give the models so many layers; default: as published.")] = 0,
    only: Contenders = None,
    device: Device = "",
    rounds: Annotated[int, typer.Option(help="Steps of each contender.")] = 10,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """A forward and a backward pass of whole models: time, peak memory and loss, against eager, torch.compile and Liger."""
    from codetta.bench.train import IMPLEMENTATIONS, measure_train

    where = pick_device(device)
    names = model or (["llama-3.2-1b"] if where.type == "cuda" else ["tiny"])
    wanted, console = known(only, IMPLEMENTATIONS), screen(as_json)
    jobs = {name: lambda _, name=name: measure_train(name, where, wanted, layers, rounds) for name in names}
    record = measured("train", where, jobs, out)
    console.print(plain_table(record, ("model", "tokens", "impl", "ms", "gib", "loss"), "forward and backward"))
    finish(as_json, record.json())


@bench_app.command()
@reported
def decode(
    model: Annotated[
        list[str] | None, typer.Option(help="A published shape, such as llama-7b; may be repeated.")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences; may be repeated.")] = None,
    context: Annotated[list[int] | None, typer.Option(help="Tokens before the next one; may be repeated.")] = None,
    layers: Annotated[int, typer.Option(help="Give the models so many layers; default: as published.")] = 0,
    dtype: Dtype = None,
    only: Contenders = None,
    device: Device = "",
    rounds: Rounds = 3,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """One more token for each sequence: time, and the share of the memory's read stream, against eager and torch.compile."""
    from codetta.bench.decode import IMPLEMENTATIONS, measure_decode

    where = pick_device(device)
    names = model or (["llama-7b"] if where.type == "cuda" else ["tiny"])
    kinds = dtype or ["bf16"]
    if not set(kinds) <= set(DTYPES):
        raise ArgumentError("dtype", f"{kinds} are not all known", f"use some of {', '.join(DTYPES)}")
    jobs = list(product(names, kinds, batch or [1], context or [512]))
    if any(size < 1 or length < 1 for _, _, size, length in jobs):
        raise ArgumentError("batch or context", "is less than 1", "pass positive numbers")
    wanted, console = known(only, IMPLEMENTATIONS), screen(as_json)

    def measure(record: Record, name: str, kind: str, size: int, length: int) -> list[Row]:
        read = record.ceilings["read_tbs"]
        return measure_decode(name, where, size, length, read, wanted, layers, rounds, DTYPES[kind])

    named = {f"{job[0]}, {job[1]}, {job[2]} x {job[3]}": lambda record, job=job: measure(record, *job) for job in jobs}
    record = measured("decode", where, named, out)
    console.print(
        plain_table(
            record,
            ("model", "dtype", "batch", "context", "impl", "ms", "stream_share", "kl"),
            "a token; kl: against eager fp32",
        )
    )
    finish(as_json, record.json())


@bench_app.command()
@reported
def step(
    model: Annotated[
        list[str] | None, typer.Option(help="A published shape, such as llama-7b; may be repeated.")
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens before the next one.")] = 512,
    layers: Annotated[int, typer.Option(help="Give the models so many layers; default: as published.")] = 0,
    ring: Annotated[
        list[str] | None,
        typer.Option(help="Bytes of a slot and pieces in flight, such as 16384:4; may be repeated. Default: as usual."),
    ] = None,
    device: Device = "",
    rounds: Rounds = 3,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Where the time of a decoder's step goes inside its one kernel: waiting and work of each kind of phase."""
    from codetta.bench.step import measure_step, ring_named

    where, console = pick_device(device), screen(as_json)
    rings = [ring_named(each) for each in ring] if ring else [None]
    if context < 1:
        raise ArgumentError("context", "is less than 1", "pass a positive number")
    named = {
        name: lambda _, name=name: measure_step(name, where, context, rings, layers, rounds)
        for name in model or ["llama-7b"]
    }
    record = measured("step", where, named, out)
    columns = ("model", "ring", "phase", "times", "ms", "wait_us", "work_us", "uneven_us", "pieces")
    console.print(plain_table(record, columns, "ms: from token to token; us: of each phase of a kind, on the average"))
    finish(as_json, record.json())


@bench_app.command()
@reported
def layer(
    tokens: Annotated[int, typer.Option(help="Tokens; default 16384 on a GPU, 512 on a CPU.")] = 0,
    sizes: SizesOption = None,
    only: Contenders = None,
    device: Device = "",
    rounds: Rounds = 3,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """A Transformer layer without its attention, forward and backward, against eager, torch.compile and Liger."""
    from codetta.bench.layer import IMPLEMENTATIONS, SIZES, measure_layer

    where = pick_device(device)
    wanted = known(only, IMPLEMENTATIONS)
    jobs = parse_sizes(sizes) or SIZES[where.type]
    console = screen(as_json)
    named = {f"D {d}": lambda _, d=d, f=f: measure_layer(d, f, where, wanted, tokens, rounds) for d, f in jobs}
    record = measured("layer", where, named, out)
    console.print(plain_table(record, ("D", "F", "tokens", "pass", "impl", "ms"), "without attention"))
    finish(as_json, record.json())


@bench_app.command()
@reported
def loss(
    tokens: Annotated[int, typer.Option(help="Rows; default 16384 on a GPU, 256 on a CPU.")] = 0,
    width: Annotated[int, typer.Option(help="Columns of the rows; default 2048 on a GPU.")] = 0,
    vocabulary: Annotated[int, typer.Option(help="Classes; default 128256 on a GPU.")] = 0,
    only: Contenders = None,
    device: Device = "",
    rounds: Rounds = 3,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """A linear head with cross-entropy, forward and backward, against eager, torch.compile, Liger and cut-cross-entropy."""
    from codetta.bench.loss import IMPLEMENTATIONS, measure_loss

    where = pick_device(device)
    wanted = known(only, IMPLEMENTATIONS)
    console = screen(as_json)
    record = measured(
        "loss", where, {"head": lambda _: measure_loss(where, tokens, width, vocabulary, wanted, rounds)}, out
    )
    columns = ("rows", "D", "V", "impl", "ms", "gib", "dx_error", "dw_error")
    console.print(
        plain_table(record, columns, "forward and backward; gib: beside what is given; errors against float64")
    )
    finish(as_json, record.json())


def measured(
    name: str, where: torch.device, jobs: Mapping[str, Callable[[Record], list[Row]]], out: Path | None
) -> Record:
    """The record of all jobs; each is appended to the file as soon as it is done."""
    record = Record(name, device_name(where), "codetta " + " ".join(sys.argv[1:]))
    record.ceilings = ceilings(where)
    with bar(name, len(jobs)) as advance:
        for job, measure in jobs.items():
            rows = measure(record)
            record.rows += rows
            advance(job)
            if out is not None:
                record.part(rows).append_to(out)
    return record


def known(only: list[str] | None, contenders: tuple[str, ...]) -> tuple[str, ...]:
    """Those that are asked for; all of them by default."""
    unknown = [each for each in only or () if each not in contenders]
    if unknown:
        raise ArgumentError("only", f"{unknown[0]!r} is no contender", f"use some of {', '.join(contenders)}")
    return tuple(only or contenders)


def plain_table(record: Record, columns: tuple[str, ...], caption: str) -> Table:
    """Rows as they are, those of the record's columns that have something in them."""
    table = Table(title=f"{record.device}, {record.date}", caption=caption)
    shown = [name for name in columns if any(name in row for row in record.rows)]
    for name in shown:
        words = any(isinstance(row.get(name), str) for row in record.rows)
        table.add_column(name, justify="left" if words else "right")
    for row in record.rows:
        table.add_row(*(str(row.get(name, "")) for name in shown))
    return table


def block_table(record: Record) -> Table:
    table = Table(title=f"{record.device}, {record.date}", caption="ms; x: how many times faster ours is")
    names = list(dict.fromkeys(row["impl"] for row in record.rows))
    table.add_column("what")
    table.add_column("tokens", justify="right")
    for name in names:
        table.add_column(name, justify="right")
        if name != "codetta":
            table.add_column("x", justify="right")
    works: dict[tuple[str, int], dict[str, float]] = {}
    for row in record.rows:
        what = row.get("model") or f"block {row['D']}, {row['F']}"
        works.setdefault((what, row["tokens"]), {})[row["impl"]] = row["ms"]
    for (what, count), times in works.items():
        cells = [what, str(count)]
        for name in names:
            cells.append(f"{times[name]:.3f}" if name in times else "-")
            if name != "codetta":
                cells.append(_ratio(times[name] / times["codetta"]) if {name, "codetta"} <= set(times) else "-")
        table.add_row(*cells)
    return table


def kernel_table(record: Record) -> Table:
    table = Table(
        title=f"{record.device}, {record.date}", caption="x: how many times faster ours is; green 1.00 and above"
    )
    for name in ("program", "dtype", "M", "N", "K"):
        table.add_column(name, justify="left" if name in ("program", "dtype") else "right")
    for name in ("ms", "product", "x", "compile", "x", "eager", "x", "error/eager's", "tile"):
        table.add_column(name, justify="left" if name == "tile" else "right")
    for row in record.rows:
        cells = [row["program"], row["dtype"], *(str(row[key]) for key in "MNK"), f"{row['ms']:.3f}"]
        for key in ("cublas_ms", "compile_ms", "eager_ms"):
            cells += [f"{row[key]:.3f}", _ratio(row[key] / row["ms"])] if row[key] else ["-", "-"]
        style = "" if row["within_budget"] else "red"
        cells += [
            f"[{style}]{row['err_ratio']:.2f}[/]" if style else f"{row['err_ratio']:.2f}",
            row["tile"] or row["backend"],
        ]
        table.add_row(*cells)
    return table


def _ratio(x: float) -> str:
    return f"[{'green' if x >= 1 else 'red'}]{x:.2f}[/]"


def summary(record: Record) -> str:
    """Geometric means, wins and losses, the worst row of each comparison, and the ceilings."""
    lines = []
    names = {"cublas": "the bare product", "compile": "product + torch.compile", "eager": "product + eager"}
    for key, mean in geometric_means(record.rows).items():
        rows = [row for row in record.rows if row.get(f"{key}_ms")]
        if mean is None or not rows:
            continue
        worst = min(rows, key=lambda row: row[f"{key}_ms"] / row["ms"])
        lost = sum(row[f"{key}_ms"] < row["ms"] for row in rows)
        lines.append(
            f"against {names[key]}: {mean:.3f}x in the geometric mean, {len(rows) - lost} won, {lost} lost, "
            f"worst {worst[f'{key}_ms'] / worst['ms']:.2f}x ({_where(worst)})"
        )
    if record.rows:
        error = max(record.rows, key=lambda row: row["err_ratio"])
        over = sum(not row["within_budget"] for row in record.rows)
        lines.append(f"largest error: {error['err_ratio']:.2f} times eager's ({_where(error)}); {over} over the budget")
    reads, products = record.ceilings["read_tbs"], record.ceilings["matmul_tflops"]
    lines.append(f"the device reads {reads:g} TB/s and multiplies at {products:g} TFLOP/s")
    return "\n".join(lines)


def _where(row: Row) -> str:
    return f"{row['program']} {row['M']}x{row['N']}x{row['K']}"


@app.command()
@reported
def tune(
    rows: Annotated[int, typer.Option(help="Rows M; the result serves their whole bucket.")] = 0,
    sizes: SizesOption = None,
    dtype: Dtype = None,
    only: Only = None,
    device: Device = "",
    limit: Annotated[int, typer.Option(help="Candidates for each program.")] = 24,
    as_json: Json = False,
) -> None:
    """Measure the legal tiles of the library's programs on this GPU and remember the best."""
    from codetta.bench.tune import tune as tune_program

    bench = KernelBench(pick_device(device), rows, parse_sizes(sizes), tuple(dtype or ()), tuple(only or NAMES))
    if not bench.on_gpu:
        raise ArgumentError("device", "there is nothing to tune on a CPU: its backend has one schedule", "run this where a GPU is")  # fmt: skip
    console = screen(as_json)
    table = Table(title=f"{device_name(bench.device)}")
    for name in ("program", "M", "N", "K", "default ms", "best ms", "x", "tile", "tried", "left out"):
        table.add_column(name, justify="left" if name in ("program", "tile") else "right")
    results, reasons = [], []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        whole = progress.add_task("tune", total=len(bench.jobs()))
        step = progress.add_task("")
        for d, f, kind, name in bench.jobs():
            case = bench.case(d, f, kind, name)
            program, binding = case.bind()
            progress.update(whole, description=name)
            found = tune_program(
                program, binding, limit=limit,
                progress=lambda stage, done, total: progress.update(step, description=stage, completed=done, total=total),
            )  # fmt: skip
            progress.advance(whole)
            m, n, k = case.shape
            best = found.tuned
            table.add_row(
                name, str(m), str(n), str(k), f"{best.default_ms:.3f}", f"{best.ms:.3f}", _ratio(best.default_ms / best.ms), str(best.tile),
                str(best.tried), str(len(found.skipped)),
            )  # fmt: skip
            reasons += [f"{name}: {tile}: {why}" for tile, why in found.skipped]
            results.append({
                "program": name, "dtype": kind, "M": m, "N": n, "K": k, "ms": best.ms, "default_ms": best.default_ms,
                "tile": dataclasses.asdict(best.tile), "tried": best.tried, "skipped": [[str(t), why] for t, why in found.skipped],
            })  # fmt: skip
            del case, program, binding
            torch.cuda.empty_cache()
    console.print(table)
    for reason in reasons:
        console.print(f"left out: {reason}", soft_wrap=True, highlight=False)
    finish(as_json, {"device": device_name(bench.device), "versions": versions(), "rows": results})


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
            f"{each.ms:.2f}", _ratio(each.eager_ms / each.ms), f"{each.eager_error:.1e}", f"[{mark}]{each.error:.1e}[/]" if mark else f"{each.error:.1e}",
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
