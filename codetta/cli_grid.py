"""`codetta bench grid`: the measurement, or what has been recorded of it, as rows, a table and a picture."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from codetta.bench.grid import IMPLEMENTATIONS, PASSES, GridBench, parse_grid_sizes
from codetta.bench.ratios import OURS, Cell, cells_of, markdown, mean_ratio, plot, recorded
from codetta.bench.run import Record, Row, ceilings, device_name
from codetta.bench.workers import measure_grid_with
from codetta.cli_arguments import pick_device
from codetta.errors import ArgumentError
from codetta.terminal import Json, finish, ratio, reported, screen

List = "; several are separated by commas."


def add_to(app: typer.Typer) -> None:
    app.command("grid")(grid)


@reported
def grid(
    models: Annotated[str, typer.Option(help="Published shapes, such as llama-3.2-1b" + List)] = "",
    sizes: Annotated[str, typer.Option(help="BATCHxLENGTH, such as 1x16,4x512; default: as the device and the pass allow.")] = "",
    which: Annotated[str, typer.Option("--pass", help=f"{' and '.join(PASSES)}" + List)] = ",".join(PASSES),
    layers: Annotated[int, typer.Option(min=0, help="Give every model so many; default: 4, the smallest models whole.")] = 0,
    impls: Annotated[str, typer.Option(help=f"Contenders of {', '.join(IMPLEMENTATIONS)}" + List)] = "",
    seconds: Annotated[float, typer.Option(help="Time of each contender in each cell.")] = 0.4,
    workers: Annotated[int, typer.Option(min=1, help="Processes that compile side by side; what is timed is timed alone.")] = 1,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:N; default: a GPU where there is one.")] = "",
    out: Annotated[Path | None, typer.Option(help="Append each cell to this .jsonl file as it is measured.")] = None,
    source: Annotated[Path | None, typer.Option("--from", help="Measure nothing: take the rows of this .jsonl file.")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Draw the ratio to the best peer into this .svg or .png.")] = None,
    figure: Annotated[str, typer.Option(help="What is drawn: ms (as called) or device_ms.")] = "ms",
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print the table in Markdown.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Whole models, prefill and training, as called and on the device, against eager, torch.compile and Liger at their best."""
    if figure not in ("ms", "device_ms"):
        raise ArgumentError("figure", f"is {figure!r}", "pass ms or device_ms")
    if picture is not None and picture.suffix not in (".svg", ".png"):
        raise ArgumentError("plot", f"{picture.name} is no picture", "pass a name that ends in .svg or .png")
    console = screen(as_json)
    if source is not None:
        record = recorded(source)
    else:
        bench = GridBench(
            pick_device(device), listed(models), parse_grid_sizes(sizes), listed(which), layers, listed(impls), seconds
        )
        record = _measured(
            bench, workers, out, lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)
        )
    rows = record["rows"]
    console.print(markdown(rows) if as_markdown else table(record), highlight=False, soft_wrap=as_markdown)
    for line in means(cells_of(rows)):
        console.print(line, highlight=False)
    if picture is not None:
        plot(picture, rows, f"{record['device']}, {record['date'][:10]}, commit {record['commit']}", figure)
    finish(as_json, record)


def listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _measured(bench: GridBench, workers: int, out: Path | None, say: Any) -> dict[str, Any]:
    """The record; each cell is said and appended to the file as soon as it is there."""
    record = Record("grid", device_name(bench.device), "codetta " + " ".join(sys.argv[1:]))
    record.ceilings = ceilings(bench.device)
    for rows in measure_grid_with(workers, bench, say):
        record.rows += rows
        for row in rows:
            say(line(row))
        if out is not None:
            record.part(rows).append_to(out)
        sys.stdout.flush()
    return record.json()


def line(row: Row) -> str:
    """A row in words."""
    head = f"{row['model']} {row['layers']} {row['pass']} {row['batch']}x{row['length']} {row['impl']}: "
    if row["ms"] is None:
        return head + row["error"]
    parts = [f"{row['ms']:.3f} ms as called, {row['host_ms']:.3f} on the host"]
    if row["device_ms"] is not None:
        parts.append(f"{row['device_ms']:.3f} on the device ({row['device_by']})")
    if row["gib"] is not None:
        parts.append(f"{row['gib']:.2f} GiB")
    return head + ", ".join([*parts, f"first call {row['first_ms'] / 1000:.1f} s"])


def table(record: dict[str, Any]) -> Table:
    cells = cells_of(record["rows"])
    names = [name for name in IMPLEMENTATIONS if any(name in cell.rows for cell in cells)]
    made = Table(
        title=f"{record['device']}, {record['date']}",
        caption="ms as called; x: how many times faster than the best peer, as called and on the device",
    )
    for name in ("model", "layers", "pass", "size", *names, "x", "device", "best peer's", "x", "GiB", "best peer's"):
        made.add_column(name, justify="left" if name in ("model", "pass", "size") else "right")
    for cell in cells:
        ours, by_device = cell.rows.get(OURS, {}), cell.best_peer("device_ms")
        peer = cell.rows.get(cell.best_peer() or "", {})
        words = [cell.model, str(cell.layers), cell.which, cell.size]
        words += [_time(cell.rows.get(name)) for name in names] + [_ratio(cell.ratio())]
        words += [_number(ours.get("device_ms")), _number(cell.rows.get(by_device or "", {}).get("device_ms"))]
        made.add_row(*words, _ratio(cell.ratio("device_ms")), _number(ours.get("gib")), _number(peer.get("gib")))
    return made


def _time(row: Row | None) -> str:
    if row is None:
        return "-"
    return escape(row.get("error", "").split(":")[0]) if row["ms"] is None else f"{row['ms']:.3f}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _ratio(value: float | None) -> str:
    return "-" if value is None else ratio(value)


def means(cells: list[Cell]) -> list[str]:
    """Of each pass: the geometric mean against the best peer, what was won and lost, and the worst cell."""
    lines = []
    for which in dict.fromkeys(cell.which for cell in cells):
        for figure, words in (("ms", "as called"), ("device_ms", "on the device")):
            known = [cell for cell in cells if cell.which == which and cell.ratio(figure) is not None]
            mean = mean_ratio(known, figure)
            if mean is None:
                continue
            worst = min(known, key=lambda cell: cell.ratio(figure) or 0.0)
            lost = sum((cell.ratio(figure) or 0.0) < 1 for cell in known)
            lines.append(
                f"{which}, {words}: {mean:.3f}x the best peer in the geometric mean, {len(known) - lost} won, {lost} lost, "
                f"worst {worst.ratio(figure):.2f}x ({worst.model}, {worst.size})"
            )
    return lines
