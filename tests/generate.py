"""Random epilogue programs over the whole language, as source text with the tensors to call it with.

    @given(cases())
    def test_cpu(case): case.check("cpu")

A case is its text, its shapes and a seed: printed, it can be pasted and run. What backends may not have yet is left out by
`cases(FEATURES - {"dropout"})`; what they refuse is counted (`case.refusals`) and reported as an event, never failed.
Values are kept in a range where fp32 has something to say: tanh in front of exp, 1 + |y| below a fraction. Decisions on
computed values (round, floor, comparisons) are made where both sides meet, or on operands, which every backend sees
exactly: a tie that falls to the other side is no bug.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from case import Case, Spec
from hypothesis import strategies as st

from codetta.ir.graph import Frame
from codetta.rewrite.columns import is_wide
from codetta.stat import FIELDS

FEATURES = frozenset(
    {
        "products", "pairs", "wide", "groups", "group_rows", "tables", "layouts", "samples", "tiles", "stats", "ints", "masks", "dropout",
        "quantize", "casts", "row_store", "accumulate", "sinks", "batched", "transposed", "strided", "half", "adversarial",
    }
)  # fmt: skip
ROWS = (1, 2, 7, 16, 31, 33, 64, 127, 130)
DEPTHS = (1, 17, 63, 64, 100)
FLOATS = {"torch.float32": torch.float32, "torch.bfloat16": torch.bfloat16, "torch.float16": torch.float16}


@dataclass(frozen=True)
class Drawn:
    """A value of the epilogue being written. Values meet if their columns, rows and home agree (or are absent)."""

    text: str
    rows: int  # as in Space: 0 none, 1 each, r one per r rows
    cols: int
    size: float  # what its magnitude stays below, roughly
    home: str  # the product, or the strips of it, that its columns are of
    grain: int  # blocks that divide this do not straddle strips


@dataclass
class Product:
    """A product's columns: `cols` of them, taken apart into `count` parts of blocks of `block` if count > 1."""

    cols: int
    grain: int
    count: int = 1
    block: int = 0


UNARY: list[tuple[str, Callable[[float], float]]] = [
    ("ct.tanh({x})", lambda s: 1), ("ct.sigmoid({x})", lambda s: 1), ("ct.relu({x})", lambda s: s),
    ("ct.silu({x})", lambda s: s), ("ct.gelu({x})", lambda s: s), ("ct.gelu({x}, approximate='tanh')", lambda s: s),
    ("ct.squared_relu({x})", lambda s: s * s), ("ct.exp(ct.tanh({x}))", lambda s: 3), ("ct.exp(ct.minimum({x}, 3.0))", lambda s: 21),
    ("ct.log(1.0 + abs({x}))", lambda s: 20), ("ct.sqrt(abs({x}) + 0.25)", lambda s: math.sqrt(s) + 1), ("ct.rsqrt({x} * {x} + 1.0)", lambda s: 1),
    ("ct.erf({x})", lambda s: 1), ("ct.softcap({x}, 5.0)", lambda s: 5), ("-{x}", lambda s: s), ("abs({x})", lambda s: s),
    ("{x} * 1.7", lambda s: s * 1.7), ("{x} + 0.3", lambda s: s + 1), ("1.0 - {x}", lambda s: s + 1), ("{x} ** 3", lambda s: s**3),
    ("{x} / 3.0", lambda s: s), ("ct.clamp({x}, -2.0, 3.0)", lambda s: 3), ("ct.maximum({x}, -0.5)", lambda s: s), ("ct.minimum({x}, 0.5)", lambda s: s),
    ("ct.where({x} > 0.25, {x}, 0.2 + 0.2 * {x})", lambda s: s + 1),
]  # fmt: skip
BINARY: list[tuple[str, Callable[[float, float], float]]] = [
    ("{x} + {y}", lambda s, t: s + t), ("{x} - {y}", lambda s, t: s + t), ("{y} - {x}", lambda s, t: s + t),
    ("{x} * {y}", lambda s, t: s * t), ("{x} / (1.0 + abs({y}))", lambda s, t: s), ("ct.maximum({x}, {y})", max), ("ct.minimum({x}, {y})", max),
]  # fmt: skip
LARGEST = 1e5


class Writer:
    """Writes one epilogue, line by line, out of what `draw` says."""

    def __init__(self, draw: st.DrawFn, features: frozenset[str]) -> None:
        self.draw, self.features = draw, features
        self.lines: list[str] = []
        self.pool: list[Drawn] = []
        self.parameters: list[str] = []
        self.specs: list[Spec] = []
        self.outs: list[Spec] = []
        self.count = 0

    def has(self, feature: str, chance: int = 2) -> bool:
        """Whether to use a feature: never if it is off, else once in `chance` times."""
        return feature in self.features and self.draw(st.integers(1, chance)) == chance

    def pick(self, options: Any) -> Any:
        return self.draw(st.sampled_from(list(options)))

    # ---- shapes

    def case(self) -> Case:
        draw = self.draw
        rows = self.pick(ROWS)
        self.batched = self.has("batched", 8)
        divisors = [b for b in (1, 2, 3, 5, 7) if rows % b == 0]
        by_sample = self.batched or self.has("samples")
        self.lead = (b := self.pick(divisors), rows // b) if by_sample else (rows,)
        self.samples = self.lead[0] if by_sample else 1
        self.rows = rows
        self.dtype = self.pick(FLOATS.values()) if "half" in self.features else torch.float32
        self.values = self.pick(("plain", "mean", "outliers")) if self.has("adversarial", 3) else "plain"
        largest = {"plain": 8.0, "mean": 300.0, "outliers": 5000.0}[self.values]
        count = self.pick((2, 3)) if self.has("products", 3) else 1
        meeting = draw(st.booleans())
        products = [self.product()]
        while len(products) < count:
            products.append(products[0] if meeting else self.product(wide=False))
        for index, product in enumerate(products):
            home = "p" if meeting else f"p{index}"
            acc = Drawn(f"acc{index}", 1, product.cols, largest, home, product.grain)
            self.pool.append(acc)
            if product.count > 1:
                self.take_apart(acc, product)
        for _ in range(draw(st.integers(1, 6))):
            self.step()
        returned = self.outputs()
        accs = [f"acc{i}" for i in range(count)]
        head = f"def random_epilogue({', '.join(accs + self.parameters)}):\n"
        source = head + "".join(f"    {line}\n" for line in [*self.lines, "return {" + ", ".join(returned) + "}"])
        transposed = tuple(self.has("transposed", 3) for _ in range(count + 1))
        return Case(
            source, self.lead, self.pick(DEPTHS), tuple(p.cols for p in products), self.dtype, tuple(self.specs), tuple(self.outs),
            self.batched, transposed, self.values, draw(st.integers(0, 10**6)),
        )  # fmt: skip

    def product(self, wide: bool = True) -> Product:
        head = self.pick((2, 4, 8, 16, 32, 64))
        if wide and self.has("wide", 3):
            count = self.pick((2, 2, 3, 4))
            run = self.pick((head, head * 2, head * 3, head * 5, 17, 41, 150))
            whole = self.draw(st.booleans())
            block = run * count
            cols = block if whole else block * self.pick((1, 2, 3))
            if cols <= 640:
                grain = run if is_wide(Frame(0, count, block)) else block
                return Product(cols, _power(grain), count, block)
        if self.draw(st.booleans()):
            cols = self.pick((1, 5, 17, 31, 37, 53, 97, 131, 200, 257))
            return Product(cols, _power(cols))
        cols = head * self.pick((1, 2, 3, 5))
        return Product(cols, _power(cols))

    def take_apart(self, acc: Drawn, product: Product) -> None:
        names = [self.fresh("p") for _ in range(product.count)]
        block = "" if product.block == product.cols else f", block={product.block}"
        call = (
            f"ct.halves({acc.text}{block})" if product.count == 2 else f"ct.parts({acc.text}, {product.count}{block})"
        )
        self.lines.append(f"{', '.join(names)} = {call}")
        wide = is_wide(Frame(0, product.count, product.block))
        home = acc.home + ("strip" if wide else "")
        grain = product.grain if wide else max(product.grain // product.count, 1)
        strips = [Drawn(name, 1, acc.cols // product.count, acc.size, home, grain) for name in names]
        self.pool += strips
        then = self.pick(("meet", "join", "nothing"))
        if then == "meet":
            self.let(f"ct.silu({names[0]}) * ct.tanh({names[-1]})", 1, strips[0].cols, acc.size, strips[0])
        elif then == "join":
            changed = [self.elementwise(each) for each in strips]
            name = self.fresh("j")
            self.lines.append(f"{name} = ct.join({', '.join(each.text for each in changed)}{block})")
            self.pool.append(Drawn(name, 1, acc.cols, max(each.size for each in changed), acc.home, acc.grain))

    # ---- values

    def fresh(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def let(self, text: str, rows: int, cols: int, size: float, like: Drawn, grain: int | None = None) -> Drawn:
        name = self.fresh("v")
        self.lines.append(f"{name} = {text}")
        value = Drawn(name, rows, cols, size, like.home, like.grain if grain is None else grain)
        if value.size > LARGEST:
            value = self.let(f"ct.softcap({name}, 50.0)", rows, cols, 50.0, value)
        self.pool.append(value)
        return value

    def some(self) -> Drawn:
        """A value, the latest more often, so that epilogues grow deep and not only wide."""
        value: Drawn = self.pool[-1] if self.draw(st.booleans()) else self.pick(self.pool)
        return value

    def step(self) -> None:
        x = self.some()
        kinds = ["elementwise", "operand", "operand", "meet"]
        kinds += [k for k in ("pairs", "groups", "dropout", "casts", "masks", "ints") if k in self.features]
        kind = self.pick(kinds)
        tile = x.rows == 1 and x.cols > 0
        if kind == "elementwise":
            self.elementwise(x)
        elif kind == "operand":
            text, rows, size = self.operand(x)
            self.combine(x, Drawn(text, rows, 0, size, "", 0))
        elif kind == "meet":
            others = [y for y in self.pool if (y.home, y.cols, y.rows) == (x.home, x.cols, x.rows) and y is not x]
            self.combine(x, self.pick(others)) if others else self.elementwise(x)
        elif kind == "pairs" and tile and x.grain > 1:
            block = self.pick(_powers(x.grain))
            self.split(x, block)
        elif kind == "groups" and tile:
            self.group(x)
        elif kind == "dropout" and tile:
            seed = self.parameter("seed", "Scalar", (), torch.int64, "seed", 2**31 - 1)
            p = self.pick((0.0, 0.1, 0.5))
            self.let(f"ct.dropout({x.text}, {p}, {seed})", 1, x.cols, x.size * 2, x)
        elif kind == "casts":
            dtype = self.pick(("torch.bfloat16", "torch.float16"))
            inner = x.text if x.size < 3e4 else f"ct.clamp({x.text}, -3e4, 3e4)"
            self.let(f"ct.cast({inner}, {dtype})", x.rows, x.cols, x.size, x)
        elif kind == "masks" and tile:
            self.mask(x)
        elif kind == "ints" and tile:
            self.by_number(x)
        else:
            self.elementwise(x)

    def elementwise(self, x: Drawn) -> Drawn:
        template, size = self.pick(UNARY)
        if size(x.size) > LARGEST:
            template, size = UNARY[0]
        return self.let(template.format(x=x.text), x.rows, x.cols, size(x.size), x)

    def combine(self, x: Drawn, y: Drawn) -> Drawn:
        template, size = self.pick(BINARY)
        if size(x.size, y.size) > LARGEST:
            template, size = "{x} / (1.0 + abs({y}))", lambda s, t: s
        return self.let(template.format(x=x.text, y=y.text), x.rows or y.rows, x.cols, size(x.size, y.size), x)

    def split(self, x: Drawn, block: int) -> None:
        first, second = self.fresh("l"), self.fresh("r")
        self.lines.append(
            f"{first}, {second} = " + (f"ct.pairs({x.text})" if block == 2 else f"ct.halves({x.text}, block={block})")
        )
        # What is left of a block is whole; several blocks of it stay apart, so that nothing larger may be split again.
        sides = [Drawn(n, 1, x.cols // 2, x.size, x.home, x.grain // 2) for n in (first, second)]
        self.pool += sides
        if self.draw(st.booleans()):
            how = self.pick(("rotate", "gate", "swap"))
            if how == "gate":
                self.let(f"ct.silu({first}) * {second}", 1, x.cols // 2, min(x.size**2, LARGEST), sides[0])
            elif how == "swap":
                self.let(f"ct.join({second}, {first}, block={block})", 1, x.cols, x.size, x)
            else:
                angle, _, _ = self.operand(sides[0], "tables" if "tables" in self.features else None)
                turned = f"{first} * {angle} - {second}, {second} * {angle} + {first}"
                self.let(f"ct.join({turned}, block={block})", 1, x.cols, x.size * 12, x)

    def group(self, x: Drawn) -> None:
        cols = self.group_cols(x)
        rows = self.pick((2, 4, 16)) if self.has("group_rows", 4) else 1
        op = self.pick(("group_sum", "group_max"))
        inner = f"{x.text} * {x.text}" if x.size < 300 and self.draw(st.booleans()) else x.text
        size = (x.size**2 if inner != x.text else x.size) * (cols * rows if op == "group_sum" else 1)
        by_rows = f", rows={rows}" if rows > 1 else ""
        small = self.let(
            f"ct.{op}({inner}, cols={cols}{by_rows})", rows, x.cols // cols, size, x, max(x.grain // cols, 1)
        )
        if self.draw(st.booleans()):
            self.combine(
                x, Drawn(f"ct.spread({small.text}, cols={cols}{by_rows})", 1, x.cols, small.size, x.home, x.grain)
            )

    def group_cols(self, x: Drawn) -> int:
        """Columns of a group that lies within a strip: a power of two, or the whole row where there are no strips."""
        whole = (
            [x.cols]
            if x.home in ("p", "p0", "p1", "p2") and not any(d.home.endswith("strip") for d in self.pool)
            else []
        )
        return int(self.pick([*_powers(x.grain), *whole] or [1]))

    def mask(self, x: Drawn) -> None:
        """-inf where it is harmless: in front of an exponential that makes it 0."""
        mask = self.parameter("mask", "Tile", (*self.lead, x.cols), self.pick(FLOATS.values()), "mask")
        if x.size > 50:
            x = self.let(f"ct.softcap({x.text}, 20.0)", 1, x.cols, 20.0, x)
        self.let(f"{self.pick(('ct.sigmoid', 'ct.tanh', 'ct.relu'))}({x.text} + {mask})", 1, x.cols, x.size, x)

    def by_number(self, x: Drawn) -> None:
        """Values chosen by row or column number, or by an integer or boolean operand: exact decisions."""
        where = self.pick(("causal", "target", "chosen", "rows", "rounded"))
        if where == "causal":
            text = f"ct.where(ct.row_index() >= ct.col_index({x.cols}), {x.text}, 0.0)"
        elif where == "target":
            column = self.parameter("ids", "Col", self.lead, self.pick((torch.int32, torch.int64)), "index", x.cols)
            text = f"{x.text} - ct.where(ct.col_index({x.cols}) == {column}, 1.0, 0.0)"
        elif where == "chosen":
            chosen = self.parameter("keep", "Tile", (*self.lead, x.cols), torch.bool, "bool")
            text = f"ct.where({chosen} > 0.5, {x.text}, -{x.text})"
        elif where == "rows":
            text = f"{x.text} * (1.0 + 0.01 * ct.row_index())"
        else:
            tile = self.parameter("noise", "Row", (x.cols,), torch.float32)
            text = f"{x.text} + ct.{self.pick(('round', 'floor'))}({tile} * 4.0)"
        self.let(text, 1, x.cols, x.size * 3 + 16, x)

    # ---- operands

    def parameter(
        self, name: str, kind: str, shape: tuple[int, ...], dtype: torch.dtype, fill: str = "normal", limit: int = 0
    ) -> str:
        name = self.fresh(name)
        strided = fill == "normal" and bool(shape) and self.has("strided", 4)
        self.parameters.append(f"{name}: ct.{kind}")
        self.specs.append(Spec(name, shape, dtype, fill, limit, strided))
        return name

    def operand(self, x: Drawn, wanted: str | None = None) -> tuple[str, int, float]:
        """An operand that meets x: its text, its rows and its size."""
        dtype = self.pick(FLOATS.values()) if "half" in self.features else torch.float32
        kinds = ["number", "scalar"] + (["row"] if x.cols else [])
        if x.rows == 1:
            kinds += ["col"] + [k for k in ("stats", "ints") if k in self.features]
            if x.cols:
                kinds += [k for k in ("tiles", "layouts", "samples", "tables", "groups") if k in self.features]
        kind = wanted or self.pick(kinds)
        match kind:
            case "number":
                return self.parameter("number", "Scalar", (), torch.float32, "number"), 0, 4.0
            case "scalar":
                return self.parameter("scalar", "Scalar", self.pick(((), (1,))), dtype), 0, 4.0
            case "row":
                return self.parameter("row", "Row", (x.cols,), dtype), 0, 4.0
            case "col":
                return self.parameter("col", "Col", self.lead, dtype), 1, 4.0
            case "ints":
                index = self.parameter("number", "Col", self.lead, self.pick((torch.int32, torch.int64)), "rows", 9)
                return f"({index} * 0.25)", 1, 3.0
            case "stats":
                how = self.pick(FIELDS)
                width = self.pick((32, 64))
                stat = self.parameter(
                    "stat", "Col", (), torch.float32, f"stat:{how}:{width}:{self.pick((width, 100, 192))}"
                )
                if how == "moments":
                    return self.pick((f"{stat}.mean", f"ct.rsqrt({stat}.var + 1.0)")), 1, 4.0
                return f"ct.tanh({stat})", 1, 1.0
            case "tiles":
                return self.parameter("tile", "Tile", (*self.lead, x.cols), dtype), 1, 5.0
            case "samples":
                return self.parameter("gate", "SampleRow", (self.samples, x.cols), dtype), 1, 5.0
            case "layouts":
                layout, head = self.pick(("bthd", "bhtd", "bhdt")), self.pick([*_powers(x.grain), x.cols])
                shape = _by_layout(layout, self.samples, self.rows // self.samples, x.cols // head, head)
                return self.parameter("heads", f"Tile({layout!r})", shape, dtype), 1, 5.0
            case "tables":
                width = self.pick([*_powers(x.grain), 1])
                match self.pick(("each", "repeat", "index") if "ints" in self.features else ("each", "repeat")):
                    case "each":
                        return self.parameter("table", "Table", (*self.lead, width), dtype), 1, 5.0
                    case "repeat":
                        rows = self.rows // self.samples
                        return self.parameter("table", "Table('repeat')", (rows, width), dtype), 1, 5.0
                    case _:
                        index = self.parameter(
                            "at", "Col", self.lead, self.pick((torch.int32, torch.int64)), "rows", 11
                        )
                        return self.parameter("table", f"Table({index!r})", (11, width), dtype), 1, 5.0
            case "groups":
                cols = self.group_cols(x)
                rows = self.pick((2, 4, 16)) if self.has("group_rows", 4) else 1
                shape = (math.ceil(self.rows / rows), x.cols // cols)
                group = self.parameter("scale", f"Group({rows}, {cols})", shape, dtype, "scale")
                return f"ct.spread({group}, {cols}{f', rows={rows}' if rows > 1 else ''})", 1, 1.5
        raise AssertionError(kind)

    # ---- outputs

    def outputs(self) -> list[str]:
        """The returned dict's items: stores and sinks, of the latest value and some others."""
        returned = []
        tiles = [v for v in self.pool if v.rows == 1 and v.cols]
        chosen = [self.pool[-1], *(self.pick(self.pool) for _ in range(self.draw(st.integers(0, 2))))]
        # Each product is read by somebody: otherwise a program of fewer products is all that is tested.
        chosen += [v for v in self.pool if v.text.startswith("acc")]
        for number, value in enumerate(chosen):
            returned += self.store(f"y{number}", value)
        if "sinks" in self.features:
            for number in range(self.draw(st.integers(0, 2))):
                returned.append(f"'s{number}': {self.sink(self.pick(tiles))}")
        return returned

    def store(self, name: str, x: Drawn) -> list[str]:
        tile = x.rows == 1 and x.cols > 0
        ways = ["plain", "dtype"]
        if tile:
            ways += [w for w in ("layouts", "row_store", "accumulate", "quantize") if w in self.features]
        way = self.pick(ways)
        dtype = self.pick(FLOATS) if "half" in self.features else "torch.float32"
        narrow = x.size > 3e4 and (dtype == "torch.float16" or self.dtype == torch.float16)
        text = f"ct.clamp({x.text}, -3e4, 3e4)" if narrow else x.text
        stored = FLOATS[dtype]
        if way == "dtype":
            return [f"{name!r}: ct.store({text}, dtype={dtype})"]
        if way == "layouts":
            layout, head = self.pick(("bthd", "bhtd", "bhdt")), self.pick([*_powers(x.grain), x.cols])
            return [f"{name!r}: ct.store({text}, dtype={dtype}, layout={layout!r}, head={head})"]
        if way == "row_store":
            per_sample = self.rows // self.samples
            if self.draw(st.booleans()):
                index = self.parameter("slots", "Col", (self.rows,), torch.int64, "slots", self.rows + 5)
                self.outs.append(Spec(name, (self.rows + 5, x.cols), stored))
                return [f"{name!r}: ct.store({text}, dtype={dtype}, rows={index})"]
            layout, head = self.pick(("bthd", "bhtd", "bhdt")), self.pick([*_powers(x.grain), x.cols])
            index = self.parameter("slots", "Col", (self.samples, per_sample), torch.int32, "slots", per_sample + 3)
            shape = _by_layout(layout, self.samples, per_sample + 3, x.cols // head, head)
            self.outs.append(Spec(name, shape, stored))
            return [f"{name!r}: ct.store({text}, dtype={dtype}, layout={layout!r}, head={head}, rows={index})"]
        if way == "accumulate":
            self.outs.append(Spec(name, (*self.lead, x.cols), stored))
            return [f"{name!r}: ct.store({text}, dtype={dtype}, accumulate=True)"]
        if way == "quantize":
            cols = self.group_cols(x)
            rows = self.pick((2, 4, 16)) if self.has("group_rows", 4) else 1
            kind = self.pick(("torch.int8", "torch.float8_e4m3fn"))
            if self.draw(st.integers(0, 3)) == 0:
                return [f"{name!r}: ct.store(ct.tanh({x.text}) * 100.0, dtype={kind})"]
            q, scale = self.fresh("q"), self.fresh("q")
            self.lines.append(f"{q}, {scale} = ct.quantize({x.text}, {kind}, cols={cols}, rows={rows})")
            return [f"{name!r}: {q}", f"'{name}_scale': {scale}"]
        if tile and self.has("strided", 4):
            self.outs.append(Spec(name, (self.rows, x.cols), stored, strided=True))
            return [f"{name!r}: ct.store({text}, dtype={dtype})"]
        return [f"{name!r}: {text}"]

    def sink(self, x: Drawn) -> str:
        ops = ["row_sum", "row_max", "row_moments", "row_lse", "col_sum", "col_max"]
        op = self.pick(
            ops + [o for o in ("pick", "masked_lse") if "ints" in self.features and "masks" in self.features]
        )
        if op == "pick":
            column = self.parameter("target", "Col", self.lead, self.pick((torch.int32, torch.int64)), "index", x.cols)
            return f"ct.pick({x.text}, {column})"
        if op == "masked_lse":
            mask = self.parameter("mask", "Tile", (*self.lead, x.cols), torch.float32, "mask")
            return f"ct.row_lse({x.text} + {mask})"
        return f"ct.{op}({x.text})"


def _power(n: int) -> int:
    """The largest power of two that divides n, as far as heads go."""
    return min(n & -n, 64)


def _powers(n: int) -> list[int]:
    return [p for p in (2, 4, 8, 16, 32, 64) if n % p == 0]


def _by_layout(layout: str, samples: int, rows: int, heads: int, head: int) -> tuple[int, ...]:
    sizes: Mapping[str, int] = {"b": samples, "t": rows, "h": heads, "d": head}
    return tuple(sizes[letter] for letter in layout)


@st.composite
def cases(draw: st.DrawFn, features: frozenset[str] = FEATURES) -> Case:
    """A random epilogue and its tensors, using no feature but these."""
    unknown = features - FEATURES
    assert not unknown, f"unknown features {sorted(unknown)}"
    return Writer(draw, frozenset(features)).case()
