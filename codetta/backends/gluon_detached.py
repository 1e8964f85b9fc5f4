"""The detached main loop for Hopper: the epilogue has warps of its own and runs beside the next tile's main loop.

    consumer 0, 1   four warps each: the matrix instructions of half of the tile's rows. Then they park the accumulator in
                    shared memory, rounded to the type of A, and go on with the next tile. Consumer 0 also keeps the
                    ring of A and B filled: a copy into the slot that both have left, one step behind.
    epilogue        four warps: read the parked accumulator chunk by chunk, compute, write the results in its place and
                    have them copied away; operand tiles are fetched some chunks ahead.

Only the parking is exposed, whatever the epilogue does, as long as it is shorter than a main loop. The price is one rounding of the
accumulator, which separate kernels make too; programs that store in full precision take the attached loop (gluon_attached.py).
There are no warps for copies alone: a fourth warpgroup would leave fewer registers at launch than the widest matrix instruction
needs, and narrower ones cost 2 % (H200, docs/log.md).
Barriers are waited for by parity, which is sound only for a waiter at most one phase behind:
    full        a step's A and B are there; again only after consumer 0 has seen `left` and used the slot itself.
    left        consumer 1 has left a slot; consumer 0 waits for each one before it fills the slot again.
    parked      half a tile's accumulator is there; again only after `freed`.
    freed       its results have been copied away; again only after `parked` of the next tile.
    xfull       the operand tiles of a chunk are there; filled again by the warps that waited for it.
"""

from __future__ import annotations

from codetta.backends.gluon_kernel import TYPES, Kernel
from codetta.backends.triton_epilogue import parameters
from codetta.plan.traffic import CONSUMERS

# How the warps share the registers after launch: three warpgroups of 168 become 160, 160 and 184.
CONSUMER_REGISTERS, EPILOGUE_REGISTERS = 160, 184


class Detached(Kernel):
    """Writes the kernel; pieces that do not differ come from the attached loop."""

    launch_registers = 168
    counter = "u"  # rings are counted through over halves of tiles
    part = "half"

    def barrier_counts(self) -> list[tuple[str, int, int]]:
        stages = self.tile.stages
        return [
            ("full", stages, 1),
            ("left", stages, 1),
            ("parked", CONSUMERS, 1),
            ("freed", CONSUMERS, 1),
            ("xfull", self.x, 1),
        ]

    def bank(self, ring: int) -> str:
        return ""

    def functions(self) -> None:
        self.issue()
        for chunk in range(self.tile.chunks if self.x else 0):
            self.fill(chunk)
        for writer in self.writers:
            self.epilogue(writer)
        self.epilogue_warps()
        self.consumer()
        self.kernel()

    # ---- consumers

    def consumer_arguments(self) -> list[str]:
        return [
            "a",
            *self.names("b"),
            "a_ring",
            "b_boxes",
            "a_halves",
            "b_ring",
            "full",
            "left",
            "park",
            "parked",
            "freed",
            "M",
        ]

    def issue(self) -> None:
        """The function that starts the copies of one step of A and B."""
        w = self.text
        w("", "@gluon.jit")
        with w.block(f"def issue(a, {', '.join(self.names('b'))}, a_ring, b_boxes, full, s, m, pn, k):"):
            self.copies_of_step()

    def fill_slot(self, slot: str) -> None:
        """Start the next step's copies into a slot, if there is a next step, and move on."""
        w = self.text
        with w.block("if next_tile < total:"):
            w(f"issue(a, {', '.join(self.names('b'))}, a_ring, b_boxes, full, {slot}, next_m, next_pn, next_k)")
            w(f"next_k += {self.tile.depth}")
            with w.block(f"if next_k >= {self.program.k}:"):
                w("next_k = 0", "next_tile += blocks")
                w(f"next_pm, next_pn = tile_order(next_tile, tiles_m, {self.all_columns()}, {self.tile.group})")
                w(f"next_m = next_pm * {self.tile.rows}")

    def release(self) -> None:
        """Leave slot `last`: consumer 1 says so, consumer 0 waits for that and fills it again."""
        w = self.text
        with w.block("if W == 0:"):
            w("mbarrier.wait(left.index(last), tl.where(s == 0, phase ^ 1, phase))")
            self.fill_slot("last")
        with w.block("else:"):
            w("mbarrier.arrive(left.index(last))")

    def consumer(self) -> None:
        w, tile, program = self.text, self.tile, self.program
        steps = -(-program.k // tile.depth)
        w("", "@gluon.jit")
        with w.block(f"def consumer({', '.join(self.consumer_arguments())}, W: gl.constexpr):"):
            self.accumulator_layouts()
            self.tile_counts()
            w("blocks = tl.num_programs(0)", "next_k = 0", "next_tile = tl.program_id(0) + 0")
            w(f"next_pm, next_pn = tile_order(next_tile, tiles_m, {self.all_columns()}, {tile.group})")
            w(f"next_m = next_pm * {tile.rows}")
            with w.block("if W == 0:"):
                for slot in range(tile.stages):
                    self.fill_slot(str(slot))
            w("s = 0", "phase = 0", "q = 0")
            with w.block("for tile in range(tl.program_id(0), total, tl.num_programs(0)):"):
                # A fresh expression, not `last = s`: Triton 3.6 drops a loop carry whose entry value is a live variable.
                w(
                    f"last = (s + {tile.stages - 1}) % {tile.stages}",
                    f"acc = gl.zeros([{self.rows}, {tile.cols}], gl.float32, L)",
                )
                with w.block(f"for step in range({steps}):"):
                    w(*self.multiply())
                    with w.block("if step > 0:"):
                        self.release()
                    w("last = s", "s += 1")
                    with w.block(f"if s == {tile.stages}:"):
                        w("s = 0", "phase = phase ^ 1")
                w("acc = warpgroup_mma_wait(0, deps=[acc])")
                self.release()
                w("mbarrier.wait(freed.index(W), (q & 1) ^ 1)")
                names = self.leaves("acc")
                for index, name in enumerate(names):
                    w(f"{name} = gl.convert_layout({name}, LC, assert_trivial=True).to({TYPES[program.a_dtype]})")
                    w(f"park.index(W * {len(names)} + {index}).store({name})")
                w("fence_async_shared()", "mbarrier.arrive(parked.index(W))", "q += 1")

    # ---- epilogue

    def io_arguments(self) -> list[str]:
        """What copies of operand and output tiles need."""
        integers = [name for name in parameters(self.program) if name.endswith("_span")]
        full = ["xfull"] if self.x else []
        return [
            *self.names("load"),
            *self.names("store"),
            "park",
            *self.x_buffers,
            *self.y_buffers,
            *full,
            "M",
            "rows_per_sample",
            *integers,
        ]

    def epilogue_arguments(self) -> list[str]:
        arguments = [*self.io_arguments(), "parked", "freed"]
        return arguments + [name for name in parameters(self.program) if name not in arguments]

    def leaf(self, strip: int, chunk: int) -> str:
        """A chunk of a strip of half a tile in the park."""
        leaves = self.strips * self.tile.chunks
        return f"park.index(half * {leaves} + {strip * self.tile.chunks + chunk})"

    def epilogue_warps(self) -> None:
        w = self.text
        w("", "@gluon.jit")
        with w.block(f"def epilogue({', '.join(self.epilogue_arguments())}):"):
            self.accumulator_layouts()
            self.tile_counts()
            w("blocks = tl.num_programs(0)", "first = tl.program_id(0) + 0")
            for chunk in range(self.x):
                w(f"fill_{chunk}({', '.join(self.io_arguments())}, first, tiles_m, {chunk}, 0)")
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
                    place = [*given, *self.epilogue_arguments(), *UNIT]
                    self.branch(lambda g: w(f"epilogue_{g}({', '.join(place)})"))
                    if any(each.stores for each in self.moves.segments):
                        w("tma.store_wait(0)")
                    w("fence_async_shared()", "mbarrier.arrive(freed.index(half))")
                w("q += 1")

    def epilogue_parameters(self, given: list[str]) -> list[str]:
        return [*given, *self.epilogue_arguments(), *UNIT]

    def begin_epilogue(self) -> None:
        if self.x:
            self.text("upcoming = tile + blocks * half")

    def accumulators(self, chunk: int) -> list[str]:
        names = [f"acc{p}_{chunk}" for p in range(self.strips)]
        for p, name in enumerate(names):
            self.text(f"{name} = {self.leaf(p, chunk)}.load(L{self.chunk}).to(gl.float32)")
        return names

    def after_chunk(self, g: int, chunk: int) -> None:
        if self.x and self.in_operands_place(g):
            # The reductions have given the copies some time to read the slot.
            self.text("tma.store_wait(0)")
            self.refill(chunk)

    def hand_over(self, g: int, chunk: int, outputs: list[str]) -> None:
        """Write a chunk's results where they leave from, start the copies, and fetch a later chunk's operands."""
        w, moves = self.text, self.moves.segments[g]
        in_y = [index for index, (ring, _) in enumerate(moves.store_place) if ring == "y"]
        if in_y:
            # Copies are read in order: when so few are left, the slot to be used next has been read.
            w(f"y_slot = {self.slot(chunk, self.y)[0]}", f"tma.store_wait({(self.y - 1) * len(outputs)})")
        buffers = []
        for name, (ring, index) in zip(outputs, moves.store_place, strict=True):
            buffers.append(self.leaf(index, chunk) if ring == "acc" else f"{ring}s{index}.index({ring}_slot)")
            w(f"{buffers[-1]}.store({name})")
        w("fence_async_shared()")
        for move, buffer in zip(moves.stores, buffers, strict=True):
            w(f"tma.async_copy_shared_to_global({move.name}_store, {self.coordinates(move, g, chunk)}, {buffer})")
        if self.x and not self.in_operands_place(g):
            self.refill(chunk)

    def in_operands_place(self, g: int) -> bool:
        return any(ring == "x" for ring, _ in self.moves.segments[g].store_place)

    def refill(self, chunk: int) -> None:
        """Fetch the operands of a later chunk into the slot of this one."""
        w = self.text
        arguments = ", ".join(self.io_arguments())
        if chunk + self.x < self.tile.chunks:
            w(f"fill_{chunk + self.x}({arguments}, tile, tiles_m, x_slot, half)")
        else:
            with w.block("if upcoming < total:"):
                w(f"fill_{chunk + self.x - self.tile.chunks}({arguments}, upcoming, tiles_m, x_slot, 1 - half)")

    def jobs(self) -> None:
        w, kind = self.text, TYPES[self.program.a_dtype]
        shape = [CONSUMERS * self.strips * self.tile.chunks, self.rows, self.chunk]
        w(f"park_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for({shape[1:]}, {kind})")
        w(f"park = gl.allocate_shared_memory({kind}, {shape}, park_layout)")
        consumers = [f"(consumer, ({', '.join(self.consumer_arguments())}, {number}))" for number in range(CONSUMERS)]
        jobs = [*consumers, f"(epilogue, ({', '.join(self.epilogue_arguments())},))"]
        w(
            "gl.warp_specialize([",
            *[f"    {job}," for job in jobs],
            f"], [4, 4], {[CONSUMER_REGISTERS, EPILOGUE_REGISTERS]})",
        )


# Which half of which tile the epilogue is at.
UNIT = ["u", "half", "tile", "blocks", "total", "tiles_m", "pm", "pn", "m", "row", "row_ok"]
