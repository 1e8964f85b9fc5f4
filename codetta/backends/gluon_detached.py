"""The detached main loop for Hopper: the epilogue has warps of its own and runs beside the next tile's main loop.

    consumer 0, 1   four warps each: the matrix instructions of half of the tile's rows, then they park the accumulator in
                    shared memory, rounded to the type of A, and go on with the next tile.
    epilogue        four warps: read the parked accumulator chunk by chunk, compute, and write the results in its place.
    load            one warp: A and B through a ring of `stages` slots.
    io              one warp: brings operand tiles in and takes results away.

Only the parking is exposed, whatever the epilogue does, as long as it is shorter than a main loop. The price is one rounding of the
accumulator, which separate kernels make too; programs that store in full precision take the attached loop (gluon_gemm.py).
Barriers are waited for by parity, which is sound only for a waiter at most one phase behind. A unit is half a tile:
    parked          a unit's accumulator is there; again only after `freed`.
    freed           all stores of the unit have been read; again only after `parked` of the next tile.
    ready           a chunk of a unit is computed, one barrier for each chunk of either half; again only after `freed`.
    xfull, yfree    as in the attached loop, counted through over units.
"""

from __future__ import annotations

from codetta.backends.gluon_epilogue import GluonWriter
from codetta.backends.gluon_gemm import TYPES, Kernel
from codetta.backends.triton_epilogue import PLACE, merge_statements, parameters
from codetta.plan.traffic import CONSUMERS

# Registers at launch for four warpgroups, and how they share them: two consumers, the epilogue, the single warps.
LAUNCH_REGISTERS, CONSUMER_REGISTERS, EPILOGUE_REGISTERS, OTHER_REGISTERS = 128, 160, 152, 40


class Detached(Kernel):
    """Writes the kernel; pieces that do not differ come from the attached loop."""

    counter = "u"  # rings are counted through over units

    def barrier_counts(self) -> list[tuple[str, int, int]]:
        chunks = self.tile.chunks
        return [
            ("full", self.tile.stages, 1), ("empty", self.tile.stages, CONSUMERS), ("lag", 1, 1), ("parked", CONSUMERS, 1),
            ("freed", CONSUMERS, 1), ("xfull", self.x, 1), ("yfree", self.y, 1), ("ready", CONSUMERS * chunks, 1),
        ]  # fmt: skip

    def bank(self, ring: int) -> str:
        return ""

    def epilogue_arguments(self) -> list[str]:
        barriers = [name for name in ("xfull", "yfree") if (self.x if name == "xfull" else self.y)]
        return [
            "park",
            *self.x_buffers,
            *self.y_buffers,
            "parked",
            "freed",
            "ready",
            *barriers,
            *parameters(self.program),
        ]

    def io_arguments(self) -> list[str]:
        barriers = [name for name in ("xfull", "yfree") if (self.x if name == "xfull" else self.y)]
        integers = [name for name in parameters(self.program) if name.endswith("_span")]
        return [
            *self.names("load"), *self.names("store"), "park", *self.x_buffers, *self.y_buffers, "freed", "ready", *barriers,
            "M", "rows_per_sample", *integers,
        ]  # fmt: skip

    def instruction_cols(self) -> int:
        # The assembler wants the registers of one instruction at launch, and four warpgroups start with 128 each.
        return min(self.tile.cols, 128)

    def leaf(self, strip: int, chunk: int, half: str) -> str:
        """A chunk of a strip in the park."""
        leaves = self.strips * self.tile.chunks
        return f"park.index({half} * {leaves} + {strip * self.tile.chunks + chunk})"

    def functions(self) -> None:
        self.load_warp()
        if self.has_io:
            self.io_warp()
        for writer in self.writers:
            self.epilogue(writer)
        self.epilogue_warps()
        self.consumer()
        self.kernel()

    # ---- warps

    def consumer(self) -> None:
        w = self.text
        w("", "@gluon.jit")
        with w.block("def consumer(a_halves, b_ring, full, empty, lag, park, parked, freed, M, W: gl.constexpr):"):
            self.accumulator_layouts()
            self.tile_counts()
            w("s = 0", "phase = 0", "q = 0")
            with w.block("for tile in range(tl.program_id(0), total, tl.num_programs(0)):"):
                self.main_loop()
                w("acc = warpgroup_mma_wait(0, deps=[acc])", "mbarrier.arrive(empty.index(last))")
                w("mbarrier.wait(freed.index(W), (q & 1) ^ 1)")
                names = self.leaves("acc")
                for index, name in enumerate(names):
                    w(f"{name} = gl.convert_layout({name}, LC, assert_trivial=True).to({TYPES[self.program.a_dtype]})")
                    w(f"park.index(W * {len(names)} + {index}).store({name})")
                w("fence_async_shared()", "mbarrier.arrive(parked.index(W))", "q += 1")

    def epilogue_warps(self) -> None:
        w = self.text
        arguments = ", ".join(self.epilogue_arguments())
        w("", "@gluon.jit")
        with w.block(f"def epilogue({arguments}):"):
            self.accumulator_layouts()
            self.tile_counts()
            w("q = 0")
            with w.block("for tile in range(tl.program_id(0), total, tl.num_programs(0)):"):
                with w.block(f"for half in range({CONSUMERS}):"):
                    self.tile_place("tile", "half")
                    w(f"u = q * {CONSUMERS} + half")
                    w(
                        f"row = gl.expand_dims(m + gl.arange(0, {self.rows}, gl.SliceLayout(1, LC)), 1)",
                        "row_ok = row < M",
                    )
                    given = self.prepare(self.writers[0]) if self.early() else []
                    w("mbarrier.wait(parked.index(half), q & 1)")
                    place = [*given, *self.epilogue_arguments(), "u", "q", "half", "pm", "pn", "m", "row", "row_ok"]
                    self.branch(lambda g: w(f"epilogue_{g}({', '.join(place)})"))
                w("q += 1")

    def epilogue(self, writer: GluonWriter) -> None:
        w, g, program = self.text, writer.number, self.program
        hoisted, first = self.hoisted_names(writer), self.vector_names(writer, 0)
        given = hoisted + first if self.early() else []
        moves, rest = self.moves.segments[g], ", ".join(parameters(program))
        place = ["u", "q", "half", "pm", "pn", "m", "row", "row_ok"]
        w("", "@gluon.jit")
        with w.block(f"def epilogue_{g}({', '.join([*given, *self.epilogue_arguments(), *place])}):"):
            w(*writer.layouts())
            vectors = first if self.early() else self.prepare(writer)[len(hoisted) :]
            for chunk in range(self.tile.chunks):
                w(f"# chunk {chunk}")
                upcoming = self.fetch(writer, chunk + 1) if chunk + 1 < self.tile.chunks else []
                inputs = []
                for p in range(self.strips):
                    inputs.append(f"acc{p}_{chunk}")
                    w(f"{inputs[-1]} = {self.leaf(p, chunk, 'half')}.load(L{self.chunk}).to(gl.float32)")
                inputs += self.loaded_tiles(writer, chunk)
                column = self.column(g, chunk * self.chunk)
                here = dict(
                    zip(PLACE, ["m", "row", "row_ok", column, f"pm * {CONSUMERS} + half", "1", "0"], strict=True)
                )
                outputs = [f"out_{store.name}_{piece}" for store, piece in writer.moved_stores()]
                sunk = [f"s{index}" for index in range(len(writer.sink_values()))]
                call = f"chunk_{g}({', '.join([*inputs, *hoisted, *vectors, *here.values()])}, {rest})"
                w(f"{', '.join(outputs + sunk)} = {call}" if outputs + sunk else call)
                if self.y:
                    slot, phase = self.slot(chunk, self.y)
                    w(f"y_slot = {slot}", f"mbarrier.wait(yfree.index(y_slot), {phase})")
                for name, (ring, index) in zip(outputs, moves.store_place, strict=True):
                    buffer = self.leaf(index, chunk, "half") if ring == "acc" else f"{ring}s{index}.index({ring}_slot)"
                    w(f"{buffer}.store({name})")
                if self.has_io:
                    w("fence_async_shared()", f"mbarrier.arrive(ready.index(half * {self.tile.chunks} + {chunk}))")
                if writer.segment.sinks:
                    suffix = f"_{chunk}" if chunk else ""
                    results = [f"{name}{suffix}" for name in writer.results()]
                    call = f"reduce_{g}({', '.join([*sunk, *here.values()])}, {rest})"
                    w(f"{', '.join(results)} = {call}" if results else call)
                    if chunk:
                        w(f"j0 = {self.column(g)}", *merge_statements(writer, suffix, chunk))
                vectors = upcoming
            self.store_partials(writer)
            if not self.has_io:
                w("fence_async_shared()", "mbarrier.arrive(freed.index(half))")

    def io_warp(self) -> None:
        w, chunks = self.text, self.tile.chunks
        if self.x:
            for chunk in range(chunks):
                self.fill(chunk)
        arguments = ", ".join(self.io_arguments())
        x_is_stored = any(ring == "x" for each in self.moves.segments for ring, _ in each.store_place)
        w("", "@gluon.jit")
        with w.block(f"def io({arguments}):"):
            self.tile_counts()
            w("first = tl.program_id(0)", "blocks = tl.num_programs(0)")
            for chunk in range(self.x):
                w(f"fill_{chunk}({arguments}, first, tiles_m, {chunk}, 0)")
            for slot in range(self.y):
                w(f"mbarrier.arrive(yfree.index({slot}))")
            w("q = 0")
            with w.block("for tile in range(tl.program_id(0), total, blocks):"):
                with w.block(f"for half in range({CONSUMERS}):"):
                    self.tile_place("tile", "half")
                    w(f"u = q * {CONSUMERS} + half")
                    if self.x:
                        w("upcoming = tile + blocks * half")
                    for chunk in range(chunks):
                        w(f"# chunk {chunk}")
                        if self.x:
                            w(f"x_slot = {self.slot(chunk, self.x)[0]}")
                        if self.y:
                            w(f"y_slot = {self.slot(chunk, self.y)[0]}")
                        w(f"mbarrier.wait(ready.index(half * {chunks} + {chunk}), q & 1)")
                        self.branch(lambda g, chunk=chunk: self.io_stores(g, chunk))  # type: ignore[misc]
                        if self.y or x_is_stored:
                            w("tma.store_wait(0)")
                        if self.y:
                            w("mbarrier.arrive(yfree.index(y_slot))")
                        if self.x and chunk + self.x < chunks:
                            w(f"fill_{chunk + self.x}({arguments}, tile, tiles_m, x_slot, half)")
                        elif self.x:
                            with w.block("if upcoming < total:"):
                                w(f"fill_{chunk + self.x - chunks}({arguments}, upcoming, tiles_m, x_slot, 1 - half)")
                    w("tma.store_wait(0)", "mbarrier.arrive(freed.index(half))")
                w("q += 1")

    def io_stores(self, g: int, chunk: int) -> None:
        moves = self.moves.segments[g]
        for move, (ring, slot) in zip(moves.stores, moves.store_place, strict=True):
            buffer = self.leaf(slot, chunk, "half") if ring == "acc" else f"{ring}s{slot}.index({ring}_slot)"
            self.text(
                f"tma.async_copy_shared_to_global({move.name}_store, {self.coordinates(move, g, chunk)}, {buffer})"
            )

    def park_layout(self) -> str:
        return f"gl.NVMMASharedLayout.get_default_for({[self.rows, self.chunk]}, {TYPES[self.program.a_dtype]})"

    def jobs(self) -> None:
        w = self.text
        shape = [CONSUMERS * self.strips * self.tile.chunks, self.rows, self.chunk]
        w(f"park_layout: gl.constexpr = {self.park_layout()}")
        w(f"park = gl.allocate_shared_memory({TYPES[self.program.a_dtype]}, {shape}, park_layout)")
        jobs = [
            f"(consumer, (a_halves, b_ring, full, empty, lag.index(0), park, parked, freed, M, {number}))"
            for number in range(CONSUMERS)
        ]
        jobs.append(f"(epilogue, ({', '.join(self.epilogue_arguments())},))")
        jobs.append(f"(load, (a, {', '.join(self.names('b'))}, a_ring, b_boxes, full, empty, M))")
        warps, registers = [4, 4, 1], [CONSUMER_REGISTERS, EPILOGUE_REGISTERS, OTHER_REGISTERS]
        if self.has_io:
            jobs.append(f"(io, ({', '.join(self.io_arguments())},))")
            warps.append(1)
            registers.append(OTHER_REGISTERS)
        w("gl.warp_specialize([", *[f"    {job}," for job in jobs], f"], {warps}, {registers})")
