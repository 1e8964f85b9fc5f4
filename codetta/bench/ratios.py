"""Rows of the grid as ratios to the best peer: a table, their geometric means, and a picture of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from codetta.bench.run import Row
from codetta.errors import ArgumentError

OURS = "codetta"
FIGURES = {"ms": "as called", "device_ms": "on the device"}
WIDTH, HEIGHT, LEFT, TOP = 84, 30, 190, 74  # of a cell; of the names beside and above the cells
COLD, MIDDLE, WARM = (202, 92, 28), (236, 234, 228), (37, 108, 176)  # half the best peer's speed, the same, twice


@dataclass
class Cell:
    """One model at one size: the rows of its contenders by name."""

    model: str
    layers: int
    batch: int
    length: int
    which: str
    rows: dict[str, Row] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, int, int, int, str]:
        return self.model, self.layers, self.batch, self.length, self.which

    @property
    def size(self) -> str:
        return f"{self.batch}x{self.length}"

    def best_peer(self, figure: str = "ms") -> str | None:
        """The name of the fastest other contender."""
        known = [name for name, row in self.rows.items() if name != OURS and row.get(figure)]
        return min(known, key=lambda name: self.rows[name][figure], default=None)

    def ratio(self, figure: str = "ms") -> float | None:
        """How many times faster than the best peer; None where either is not known."""
        peer, ours = self.best_peer(figure), self.rows.get(OURS, {}).get(figure)
        return self.rows[peer][figure] / ours if peer and ours else None


def cells_of(rows: Iterable[Row]) -> list[Cell]:
    """The cells, in the order of their first rows; of several rows of a contender the last one counts."""
    found: dict[tuple[Any, ...], Cell] = {}
    for row in rows:
        cell = Cell(row["model"], row["layers"], row["batch"], row["length"], row["pass"])
        found.setdefault(cell.key, cell).rows[row["impl"]] = row
    return list(found.values())


def mean_ratio(cells: Iterable[Cell], figure: str = "ms") -> float | None:
    """The geometric mean of the ratios that are known."""
    ratios = [ratio for cell in cells if (ratio := cell.ratio(figure)) is not None]
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) if ratios else None


def recorded(path: Path) -> dict[str, Any]:
    """All records of the file's last device as one. Of a cell the last run counts, as a whole: contenders are compared within a run."""
    try:
        records = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ArgumentError("from", f"{path} cannot be read ({error})", "pass a .jsonl file that --out wrote") from None
    records = [each for each in records if isinstance(each, dict) and each.get("bench") == "grid"]
    if not records:
        raise ArgumentError("from", f"{path} has no record of the grid", "pass a .jsonl file that --out wrote")
    last = records[-1]
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for record in (each for each in records if each["device"] == last["device"]):
        for cell in cells_of(record["rows"]):
            cells[cell.key] = list(cell.rows.values())
    models = list(dict.fromkeys(model for model, *_ in cells))

    def place(key: tuple[Any, ...]) -> tuple[Any, ...]:
        model, layers, batch, length, which = key
        return models.index(model), layers, which, batch * length, batch

    return last | {"rows": [row for key in sorted(cells, key=place) for row in cells[key]]}


def markdown(rows: Iterable[Row]) -> str:
    """A table for documents: a line for each cell, times as called and on the device, and the ratio of both."""
    text = "| model | layers | pass | size | best peer | its ms | ours | times | device: its ms | ours | times | GiB: its | ours |\n"
    text += "|---|---|---|---|---|---|---|---|---|---|---|---|---|\n"
    for cell in cells_of(rows):
        peer, by_device, ours = cell.best_peer(), cell.best_peer("device_ms"), cell.rows.get(OURS, {})
        first, second = cell.rows.get(peer or "", {}), cell.rows.get(by_device or "", {})
        words = [cell.model, str(cell.layers), cell.which, cell.size.replace("x", " × "), peer or "-"]
        words += [_three(first.get("ms")), _three(ours.get("ms")), _bold(cell.ratio())]
        words += [_three(second.get("device_ms")), _three(ours.get("device_ms")), _bold(cell.ratio("device_ms"))]
        words += [_three(first.get("gib")), _three(ours.get("gib"))]
        text += f"| {' | '.join(words)} |\n"
    return text


def _three(value: float | None) -> str:
    """A number with three digits that count."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def _bold(ratio: float | None) -> str:
    return "-" if ratio is None else f"**{ratio:.2f}**" if ratio < 1 else f"{ratio:.2f}"


# ---- the picture -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Box:
    """A cell of the picture, with its number, or a text without a fill."""

    x: float
    y: float
    text: str
    fill: tuple[int, int, int] | None = None
    at: str = "middle"
    weight: str = "normal"
    size: int = 13


def plot(path: Path, rows: Iterable[Row], title: str, figure: str = "ms") -> None:
    """A heat map of the ratio to the best peer: models down, sizes across, a block for each pass."""
    boxes, width, height = layout(cells_of(rows), title, figure)
    if path.suffix == ".svg":
        path.write_text(svg(boxes, width, height))
    elif path.suffix == ".png":
        _png(path, boxes, width, height)
    else:
        raise ArgumentError("plot", f"{path.name} is no picture", "pass a name that ends in .svg or .png")


def layout(cells: list[Cell], title: str, figure: str) -> tuple[list[Box], int, int]:
    boxes = [Box(12, 24, title, at="start", weight="bold", size=15)]
    y, widest = 40, 4
    for which in dict.fromkeys(cell.which for cell in cells):
        block = [cell for cell in cells if cell.which == which]
        sizes = sorted({(cell.batch * cell.length, cell.length, cell.size) for cell in block})
        columns = {size: LEFT + WIDTH * index for index, (_, _, size) in enumerate(sizes)}
        widest = max(widest, len(columns))
        mean = mean_ratio(block, figure)
        tail = f", {mean:.2f} in the geometric mean" if mean is not None else ""
        boxes.append(Box(12, y + 20, f"{which}, {FIGURES[figure]}{tail}", at="start", weight="bold"))
        boxes += [Box(x + WIDTH / 2, y + TOP - 32, size) for size, x in columns.items()]
        y += TOP - 24
        for name in dict.fromkeys((cell.model, cell.layers) for cell in block):
            boxes.append(Box(LEFT - 10, y + 20, f"{name[0]}, {name[1]} layers", at="end"))
            for cell in block:
                ratio = cell.ratio(figure)
                if (cell.model, cell.layers) == name and ratio is not None:
                    boxes.append(Box(columns[cell.size], y, f"{ratio:.2f}", colour(ratio)))
            y += HEIGHT
        y += 14
    note = "times faster than the best peer; blue: faster, orange: slower"
    return [*boxes, Box(12, y + 14, note, at="start")], LEFT + WIDTH * widest + 12, y + 28


def colour(ratio: float) -> tuple[int, int, int]:
    """Diverging around 1: by the logarithm, full at twice and at half."""
    share = max(-1.0, min(1.0, math.log2(ratio)))
    end = WARM if share > 0 else COLD
    red, green, blue = (round(m + (e - m) * abs(share)) for m, e in zip(MIDDLE, end))
    return red, green, blue


def _ink(fill: tuple[int, int, int]) -> str:
    """White on what is dark, black on what is light."""
    return "#fff" if 0.299 * fill[0] + 0.587 * fill[1] + 0.114 * fill[2] < 140 else "#111"


def svg(boxes: list[Box], width: int, height: int) -> str:
    """Text follows the reader's light or dark scheme, and so does the ground under it."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif">',
        "<style>.ground{fill:#fff}.text{fill:#1f2328}@media (prefers-color-scheme:dark){.ground{fill:#0d1117}.text{fill:#e6edf3}}</style>",
        f'<rect class="ground" width="{width}" height="{height}" rx="6"/>',
    ]
    for box in boxes:
        text = escape(box.text)
        if box.fill is None:
            style = f'class="text" text-anchor="{box.at}" font-size="{box.size}" font-weight="{box.weight}"'
            lines.append(f'<text x="{box.x:g}" y="{box.y:g}" {style}>{text}</text>')
            continue
        red, green, blue = box.fill
        lines.append(
            f'<rect x="{box.x + 1:g}" y="{box.y + 1:g}" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="3" fill="#{red:02x}{green:02x}{blue:02x}"/>'
            f'<text x="{box.x + WIDTH / 2:g}" y="{box.y + 20:g}" text-anchor="middle" font-size="13" fill="{_ink(box.fill)}">{text}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def _png(path: Path, boxes: list[Box], width: int, height: int) -> None:
    try:
        from PIL import Image, ImageDraw, ImageFont
    except ImportError:
        raise ArgumentError(
            "plot", "a .png needs Pillow", "pip install pillow, or pass a name that ends in .svg"
        ) from None
    scale = 2
    image = Image.new("RGB", (width * scale, height * scale), "white")
    draw = ImageDraw.Draw(image)
    for box in boxes:
        font = ImageFont.load_default(box.size * scale)
        x, y, ink, at = box.x, box.y, "#1f2328", {"start": "ls", "middle": "ms", "end": "rs"}[box.at]
        if box.fill is not None:
            edges = (x + 1, y + 1, x + WIDTH - 1, y + HEIGHT - 1)
            draw.rounded_rectangle([edge * scale for edge in edges], 3 * scale, box.fill)
            x, y, ink, at = x + WIDTH / 2, y + 20, _ink(box.fill), "ms"
        draw.text((x * scale, y * scale), box.text, ink, font, at)
    image.save(path)
