"""The attached main loop for Hopper: consumers multiply and run their own epilogues, other warps move the tiles.

    consumer 0, 1   four warps each: half of the tile's rows, one matrix instruction over all its columns per K step.
                    Consumer 1 can be made to run some steps behind (`Tile.stagger`); none was fastest (docs/log.md).
    load            one warp: A and B through a ring of `stages` slots.
    io 0, 1         one warp per consumer: brings the epilogue's operand tiles in during the main loop and takes its
                    results away behind the next one. One per consumer: a shared warp would make each wait for the other.

The epilogue walks the accumulator in chunks of columns, split in registers. Two rings per consumer carry its tiles: the x ring
holds the loads of a chunk, and stores of the same type are written back in their place; the y ring holds the other stores.
Barriers are waited for by parity, which is sound only for a waiter at most one phase behind:
    full / empty    the operand ring; `empty` counts both consumers, so neither gets more than `stages` steps ahead.
    xfull           the loads of a chunk are there; again only after `ready`, which the consumer signals after its wait.
    yfree           the slot has drained; again only after `ready` of the chunk that used it.
    ready           a chunk is written; indexed by slot, so it is armed again only through xfull or yfree.
    lag             consumer 0 releases consumer 1, once a tile; off for short K, where the operand ring would let
                    consumer 0 signal twice before consumer 1 looks.
The accumulator stays in fp32 throughout, so this is the loop of programs that store in full precision.
"""

from __future__ import annotations

from codetta.backends.gluon_kernel import Kernel
from codetta.backends.triton_epilogue import parameters
from codetta.plan.traffic import CONSUMERS

# How the warps share the registers after launch: three warpgroups of 168 become 240, 240 and 24.
CONSUMER_REGISTERS, OTHER_REGISTERS = 240, 24


class Attached(Kernel):
    """Writes the kernel."""

    launch_registers = 168

    def functions(self) -> None:
        self.load_warp()
        if self.has_io:
            self.io_warp()
        for writer in self.writers:
            self.epilogue(writer)
        self.consumer()
        self.kernel()

    def barrier_counts(self) -> list[tuple[str, int, int]]:
        """(name, how many, arrivals that complete one) of every barrier."""
        stages = self.tile.stages
        return [
            ("full", stages, 1), ("empty", stages, CONSUMERS), ("lag", 1, 1), ("xfull", CONSUMERS * self.x, 1),
            ("yfree", CONSUMERS * self.y, 1), ("ready", CONSUMERS * self.ring, 1),
        ]  # fmt: skip

    def bank(self, ring: int) -> str:
        """Where a consumer's slots of a ring begin."""
        return f"W * {ring} + "

    def load_warp(self) -> None:
        w, tile = self.text, self.tile
        w("", "@gluon.jit")
        with w.block(f"def load(a, {', '.join(self.names('b'))}, a_ring, b_boxes, full, empty, M):"):
            self.tile_counts()
            w("s = 0", "phase = 1")
            with w.block("for tile in range(tl.program_id(0), total, tl.num_programs(0)):"):
                self.tile_place("tile", None)
                with w.block(f"for k in range(0, {self.program.k}, {tile.depth}):"):
                    w("mbarrier.wait(empty.index(s), phase)")
                    self.copies_of_step()
                    w("s += 1")
                    with w.block(f"if s == {tile.stages}:"):
                        w("s = 0", "phase = phase ^ 1")

    def io_arguments(self) -> list[str]:
        integers = [name for name in parameters(self.program) if name.endswith("_span")]
        return [
            *self.names("load"), *self.names("store"), *self.x_buffers, *self.y_buffers, *self.barriers, "M", "rows_per_sample", *integers,
        ]  # fmt: skip

    def io_warp(self) -> None:
        w, chunks = self.text, self.tile.chunks
        if self.x:
            for chunk in range(chunks):
                self.fill(chunk)
        arguments = ", ".join(self.io_arguments())
        w("", "@gluon.jit")
        with w.block(f"def io({arguments}, W: gl.constexpr):"):
            self.tile_counts()
            w("first = tl.program_id(0)", "blocks = tl.num_programs(0)")
            for chunk in range(self.x):
                w(f"fill_{chunk}({arguments}, first, tiles_m, {chunk}, W)")
            for slot in range(self.y):
                w(f"mbarrier.arrive(yfree.index(W * {self.y} + {slot}))")
            w("q = 0")
            with w.block("for tile in range(tl.program_id(0), total, blocks):"):
                self.tile_place("tile", "W")
                for chunk in range(chunks):
                    place, phase = self.slot(chunk, self.ring)
                    w(f"# chunk {chunk}", f"{self.ring_name}_slot = {place}")
                    if self.x and self.y:
                        w(f"y_slot = {self.slot(chunk, self.y)[0]}")
                    w(f"mbarrier.wait(ready.index(W * {self.ring} + {self.ring_name}_slot), {phase})")
                    self.branch(lambda g, chunk=chunk: self.io_stores(g, chunk))  # type: ignore[misc]
                    w("tma.store_wait(0)")
                    if self.y:  # after the last chunk nobody waits for the slot; the arrival is harmless
                        w(f"mbarrier.arrive(yfree.index(W * {self.y} + y_slot))")
                    if self.x and chunk + self.x < chunks:
                        w(f"fill_{chunk + self.x}({arguments}, tile, tiles_m, x_slot, W)")
                    elif self.x:
                        with w.block("if tile + blocks < total:"):
                            w(f"fill_{chunk + self.x - chunks}({arguments}, tile + blocks, tiles_m, x_slot, W)")
                w("q += 1")

    def io_stores(self, g: int, chunk: int) -> None:
        moves = self.moves.segments[g]
        for move, (ring, slot) in zip(moves.stores, moves.store_place, strict=True):
            depth = self.x if ring == "x" else self.y
            buffer = f"{ring}s{slot}.index(W * {depth} + {ring}_slot)"
            self.text(
                f"tma.async_copy_shared_to_global({move.name}_store, {self.coordinates(move, g, chunk)}, {buffer})"
            )

    def consumer_arguments(self) -> list[str]:
        return [*self.x_buffers, *self.y_buffers, *self.barriers, *parameters(self.program)]

    def epilogue_parameters(self, given: list[str]) -> list[str]:
        place = ["q", "pm", "pn", "m", "row", "row_ok", "W: gl.constexpr"]
        return ["acc", *given, *self.consumer_arguments(), *place]

    def begin_epilogue(self) -> None:
        self.runs = self.leaves("acc")

    def accumulators(self, chunk: int) -> list[str]:
        """The accumulators of a chunk, one for each strip, in registers."""
        names = [f"acc{p}_{chunk}" for p in range(self.strips)]
        for p, name in enumerate(names):
            run = self.runs[p * self.tile.chunks + chunk]
            self.text(f"{name} = gl.convert_layout({run}, L{self.chunk}, assert_trivial=True)")
        return names

    def hand_over(self, g: int, chunk: int, outputs: list[str]) -> None:
        """Write a chunk's outputs into their slots and tell the io warp."""
        w, moves = self.text, self.moves.segments[g]
        if self.y:
            slot, phase = self.slot(chunk, self.y)
            w(f"y_slot = W * {self.y} + {slot}", f"mbarrier.wait(yfree.index(y_slot), {phase})")
        for name, (ring, slot_index) in zip(outputs, moves.store_place, strict=True):
            w(f"{ring}s{slot_index}.index({ring}_slot).store({name})")
        if self.has_io:
            if outputs:
                w("fence_async_shared()")
            w(f"mbarrier.arrive(ready.index({self.ring_name}_slot))")

    def after_chunk(self, g: int, chunk: int) -> None:
        """Nothing: the io warp does the rest."""

    def main_loop(self) -> None:
        """All K steps of a tile; the last matrix instruction is still running when it ends."""
        w, tile, program = self.text, self.tile, self.program
        steps = -(-program.k // tile.depth)
        # Off for short K: the operand ring would let consumer 0 signal twice before consumer 1 looks.
        lagged = tile.stagger and steps > tile.stages + tile.stagger
        # A fresh expression, not `last = s`: Triton 3.6 drops a loop carry whose entry value is a live variable.
        w(
            f"last = (s + {tile.stages - 1}) % {tile.stages}",
            f"acc = gl.zeros([{self.rows}, {tile.cols}], gl.float32, L)",
        )
        if lagged:
            with w.block("if W == 1:"):
                w("mbarrier.wait(lag, q & 1)")
        with w.block(f"for step in range({steps}):"):
            w(*self.multiply(), "mbarrier.arrive(empty.index(last), pred=step > 0)")
            if lagged:
                with w.block("if W == 0:"):
                    w(f"mbarrier.arrive(lag, pred=step == {tile.stagger})")
            w("last = s", "s += 1")
            with w.block(f"if s == {tile.stages}:"):
                w("s = 0", "phase = phase ^ 1")

    def consumer(self) -> None:
        w = self.text
        arguments = ["a_halves", "b_ring", "full", "empty", "lag", *self.consumer_arguments()]
        w("", "@gluon.jit")
        with w.block(f"def consumer({', '.join(arguments)}, W: gl.constexpr):"):
            self.accumulator_layouts()
            self.tile_counts()
            w("s = 0", "phase = 0", "q = 0")
            with w.block("for tile in range(tl.program_id(0), total, tl.num_programs(0)):"):
                self.main_loop()
                # While the last matrix instruction runs: everything the epilogue needs that is not a tile.
                self.tile_place("tile", "W")
                w(f"row = gl.expand_dims(m + gl.arange(0, {self.rows}, gl.SliceLayout(1, LC)), 1)", "row_ok = row < M")
                given = self.prepare(self.writers[0]) if self.early() else []
                w("acc = warpgroup_mma_wait(0, deps=[acc])", "mbarrier.arrive(empty.index(last))")
                place = ["acc", *given, *self.consumer_arguments(), "q", "pm", "pn", "m", "row", "row_ok", "W"]
                self.branch(lambda g: w(f"epilogue_{g}({', '.join(place)})"))
                w("q += 1")

    def jobs(self) -> None:
        """Who does what, with how many warps and registers."""
        shared = ", ".join(["a_halves", "b_ring", "full", "empty", "lag.index(0)", *self.consumer_arguments()])
        jobs = [f"(consumer, ({shared}, {number}))" for number in range(CONSUMERS)]
        jobs.append(f"(load, (a, {', '.join(self.names('b'))}, a_ring, b_boxes, full, empty, M))")
        warps, registers = [4, 1], [CONSUMER_REGISTERS, OTHER_REGISTERS]
        if self.has_io:
            for number in range(CONSUMERS):
                jobs.append(f"(io, ({', '.join(self.io_arguments())}, {number}))")
                warps.append(1)
                registers.append(OTHER_REGISTERS)
        self.text("gl.warp_specialize([", *[f"    {job}," for job in jobs], f"], {warps}, {registers})")
