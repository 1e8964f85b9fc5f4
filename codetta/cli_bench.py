"""The commands that measure: bench and tune; the grid of whole models is in cli_grid.py. This file formats, codetta/bench measures."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from codetta import cli_grid
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
from codetta.cli_arguments import (
    Contenders,
    Device,
    Dtype,
    Layers,
    Only,
    Out,
    Rounds,
    SizesOption,
    parse_sizes,
    pick_device,
)
from codetta.errors import ArgumentError
from codetta.progress import bar
from codetta.terminal import Json, finish, ratio, reported, screen

bench_app = typer.Typer(help="Measure, with the baselines in the same run.", no_args_is_help=True)
cli_grid.add_to(bench_app)


def add_to(app: typer.Typer) -> None:
    app.add_typer(bench_app, name="bench")
    app.command("tune")(tune)


@bench_app.command()
@reported
def kernels(
    rows: Annotated[int, typer.Option(min=0, help="Rows M; default 16384 on a GPU, 512 on a CPU.")] = 0,
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
    tokens: Annotated[int, typer.Option(min=0, help="Tokens; default 16384 on a GPU, 512 on a CPU.")] = 0,
    sizes: SizesOption = None,
    only: Contenders = None,
    device: Device = "",
    rounds: Rounds = 3,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """A Transformer block without its attention, compiled: against eager, torch.compile and the bare products."""
    from codetta.bench.block import HEAD, IMPLEMENTATIONS, BlockBench, measure_blocks, new_record

    bench = BlockBench(pick_device(device), tokens, parse_sizes(sizes, HEAD), tuple(only or IMPLEMENTATIONS), rounds)
    console = screen(as_json)
    with bar("ceilings", len(bench.jobs())) as advance:
        record = new_record(bench, "codetta " + " ".join(sys.argv[1:]))
        for rows in measure_blocks(bench):
            record.rows += rows
            advance(f"D {rows[0]['D']}")
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
    layers: Layers = 0,
    only: Contenders = None,
    device: Device = "",
    rounds: Annotated[int, typer.Option(min=1, help="Steps of each contender.")] = 10,
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
    layers: Layers = 0,
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
def generate(
    model: Annotated[
        list[str] | None, typer.Option(help="A published shape, such as llama-3.2-1b; may be repeated.")
    ] = None,
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 128,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 128,
    batch: Annotated[list[int] | None, typer.Option(help="Prompts that are read together; may be repeated.")] = None,
    setting: Annotated[list[str] | None, typer.Option(help="One of the table's settings; may be repeated.")] = None,
    layers: Layers = 0,
    only: Contenders = None,
    device: Device = "",
    rounds: Rounds = 5,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Text as people ask for it: the first token of prompts, and `generate` with its settings."""
    from codetta.bench.generate import IMPLEMENTATIONS, measure_generate

    where, console = pick_device(device), screen(as_json)
    names = model or (["llama-3.2-1b"] if where.type == "cuda" else ["tiny"])
    batches, settings = tuple(batch or [1, 8]), tuple(setting or ())
    if min(batches) < 1:
        raise ArgumentError("batch", "is less than 1", "pass a positive number")
    wanted = known(only, IMPLEMENTATIONS)

    def measure(name: str, _: Record) -> list[Row]:
        return measure_generate(name, where, prompt, tokens, batches, settings, wanted, layers, rounds, console.print)

    record = measured("generate", where, {name: partial(measure, name) for name in names}, out)
    columns = ("model", "layers", "prompt", "batch", "setting", "impl", "ms", "first_ms")
    console.print(plain_table(record, columns, "ms: a token, of whole calls; first_ms: the first call, which compiles"))
    finish(as_json, record.json())


@bench_app.command()
@reported
def step(
    model: Annotated[
        list[str] | None, typer.Option(help="A published shape, such as llama-7b; may be repeated.")
    ] = None,
    context: Annotated[int, typer.Option(min=1, help="Tokens before the next one.")] = 512,
    layers: Layers = 0,
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
    tokens: Annotated[int, typer.Option(min=0, help="Tokens; default 16384 on a GPU, 512 on a CPU.")] = 0,
    sizes: SizesOption = None,
    only: Contenders = None,
    device: Device = "",
    rounds: Rounds = 3,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """A Transformer layer without its attention, forward and backward, against eager, torch.compile and Liger."""
    from codetta.bench.block import HEAD
    from codetta.bench.layer import IMPLEMENTATIONS, SIZES, measure_layer

    where = pick_device(device)
    wanted = known(only, IMPLEMENTATIONS)
    jobs = parse_sizes(sizes, HEAD) or SIZES[where.type]
    console = screen(as_json)
    named = {f"D {d}": lambda _, d=d, f=f: measure_layer(d, f, where, wanted, tokens, rounds) for d, f in jobs}
    record = measured("layer", where, named, out)
    console.print(plain_table(record, ("D", "F", "tokens", "pass", "impl", "ms"), "without attention"))
    finish(as_json, record.json())


@bench_app.command()
@reported
def loss(
    tokens: Annotated[int, typer.Option(min=0, help="Rows; default 16384 on a GPU, 256 on a CPU.")] = 0,
    width: Annotated[int, typer.Option(min=0, help="Columns of the rows; default 2048 on a GPU.")] = 0,
    vocabulary: Annotated[int, typer.Option(min=0, help="Classes; default 128256 on a GPU.")] = 0,
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
        what = f"block {row['D']}, {row['F']}"
        works.setdefault((what, row["tokens"]), {})[row["impl"]] = row["ms"]
    for (what, count), times in works.items():
        cells = [what, str(count)]
        for name in names:
            cells.append(f"{times[name]:.3f}" if name in times else "-")
            if name != "codetta":
                cells.append(ratio(times[name] / times["codetta"]) if {name, "codetta"} <= set(times) else "-")
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
            cells += [f"{row[key]:.3f}", ratio(row[key] / row["ms"])] if row[key] else ["-", "-"]
        style = "" if row["within_budget"] else "red"
        cells += [
            f"[{style}]{row['err_ratio']:.2f}[/]" if style else f"{row['err_ratio']:.2f}",
            row["tile"] or row["backend"],
        ]
        table.add_row(*cells)
    return table


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


@reported
def tune(
    rows: Annotated[int, typer.Option(min=0, help="Rows M; the result serves their whole bucket.")] = 0,
    sizes: SizesOption = None,
    dtype: Dtype = None,
    only: Only = None,
    device: Device = "",
    limit: Annotated[int, typer.Option(min=1, help="Candidates for each program.")] = 24,
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
                name, str(m), str(n), str(k), f"{best.default_ms:.3f}", f"{best.ms:.3f}", ratio(best.default_ms / best.ms), str(best.tile),
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
